//! A timer that makes others cheap. Tokio writes to its own eventfd for each new timer that is due before all others, even if the
//! thread that sets it is the one that would be woken up. While connections begin, one timer is always due sooner than theirs.

use std::{cell::Cell, time::Duration};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    time::sleep,
};

/// As short as the shortest wait of a connection that goes well, for the end of a drain.
const TICK: Duration = Duration::from_millis(50);

thread_local! {
    static TICKS: Cell<bool> = const { Cell::new(false) };
    static STIRRED: Cell<bool> = const { Cell::new(false) };
}

/// Ticks while it lives.
struct Ticking;

impl Drop for Ticking {
    fn drop(&mut self) {
        TICKS.set(false);
    }
}

/// Notes that a connection or a flow begins in the current runtime. It ticks until none has begun for a while.
pub(crate) fn stir() {
    STIRRED.set(true);
    // the threads of other runtimes share their timers
    if TICKS.get() || Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread {
        return;
    }
    TICKS.set(true);
    let ticking = Ticking;
    tokio::spawn(async move {
        let _ticking = ticking;
        while STIRRED.take() {
            sleep(TICK).await;
        }
    });
}
