//! Tells clients of the control socket what happens.

use longsplice_engine::Splicer;
use longsplice_proxy::{
    Server,
    events::{Subscription, Wanted},
};
use std::{io, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::unix::{ReadHalf, WriteHalf},
    task::yield_now,
    time::timeout,
};

/// A subscriber that reads nothing for this long is disconnected. Somebody may look at a page of lines for a
/// while; what is kept for the subscriber meanwhile does not grow.
const STANDSTILL: Duration = Duration::from_secs(600);
/// Bytes that are written at a time, and events that are read for them, wanted or not. Then others have their turn.
const BATCH: (usize, usize) = (64 * 1024, 500);

/// Subscribes.
pub fn subscribe(server: &Server, splicer: &Splicer, wanted: Wanted) -> Result<Subscription, String> {
    server.events().subscribe(splicer, wanted).map_err(|e| e.to_string())
}

/// Writes what happens, until the client sends something or hangs up. `version`: of the protocol.
pub async fn write(
    (mut of, version): (Subscription, u32),
    (read, write): (&mut BufReader<ReadHalf<'_>>, &mut WriteHalf<'_>),
) -> io::Result<()> {
    let mut text = of.begun(version);
    loop {
        timeout(STANDSTILL, write.write_all(text.as_bytes())).await??;
        text.clear();
        let goes_on = tokio::select! {
            goes_on = of.next(&mut text) => goes_on,
            read = read.fill_buf() => read.map(|_| false)?,
        };
        if !goes_on {
            return Ok(());
        }
        let mut left = BATCH.1;
        while left > 0 && text.len() < BATCH.0 && of.try_next(&mut text) {
            left -= 1;
        }
        // what is there already is no wait, and neither is a socket with room
        yield_now().await;
    }
}
