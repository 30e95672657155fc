//! Checks whether the data path is still pinned and attached. Somebody may
//! remove the pins or detach the programs, and the kernel does not report this.
//!
//! Removed pins are restored, and flows are not affected. Detached programs are attached again,
//! but in the meantime segments have reached sockets without passing through the data path:
//!
//! | flow | what was missed | result |
//! | --- | --- | --- |
//! | copied, never spliced | the positions of its bytes | copied to its end |
//! | copied after a splice, or switching | its sockets' numbers differ from its hosts' | reset: they may have taken wrong data |
//! | spliced | usually nothing: its segments lie beyond the windows of the parked sockets | goes on |
//! | | the parked sockets hold some of its segments | the sockets are closed, and it goes on as released |
//! | | the parked sockets have acknowledged some of its segments | reset: nobody will send them again |
//! | released | the kernel has told the hosts that there is no socket | ends |

use crate::{
    engine::{
        Engine,
        flow::{Flow, FlowOwner},
    },
    types::Command,
};
use longsplice_datapath::{Datapath, Mended};
use std::time::{Duration, Instant};

/// Interval between checks. One takes two dozen system calls.
const EVERY: Duration = Duration::from_secs(1);
/// Minimum interval between messages that the tables are full.
const FULL_EVERY: Duration = Duration::from_secs(10);
/// Number of flows taken from the table at a time.
const PAGE: usize = 1000;

pub(crate) struct Guard {
    next: Instant,
    /// The error that was logged last: something that could not be repaired.
    failed: String,
    /// Number of legs without room at the last message, and the earliest time of the next.
    full: (u64, Instant),
}

impl Guard {
    pub fn new(engine: &Engine, now: Instant) -> Guard {
        let before = engine.datapath().and_then(|d| d.legs_without_room().ok());
        Guard { next: now + EVERY, failed: String::new(), full: (before.unwrap_or(0), now) }
    }

    pub fn look(&mut self, engine: &Engine, now: Instant) {
        let Some(d) = engine.datapath().filter(|_| now >= self.next) else { return };
        self.next = now + EVERY;
        d.look_for_conntrack();
        let failed = match d.mend() {
            Ok(mended) => {
                tell(d, &mended);
                if !mended.devices.is_empty() {
                    end_spoilt(engine, d);
                }
                String::new()
            }
            Err(error) => error.to_string(),
        };
        if !failed.is_empty() && failed != self.failed {
            tracing::error!(
                "cannot put back what was removed or detached of the data path: {failed}; end the program that did it, or restart"
            );
        }
        self.failed = failed;
        self.tell_of_full_tables(d, now);
    }

    /// Logs that tables are full: at once the first time, and then at intervals.
    fn tell_of_full_tables(&mut self, d: &Datapath, now: Instant) {
        let Ok(all) = d.legs_without_room() else { return };
        let (told, next) = self.full;
        if all == told || now < next {
            return;
        }
        self.full = (all, now + FULL_EVERY);
        let (n, entries) = (all - told, d.entries().unwrap_or(u64::MAX));
        // which of them a transparent listener had taken, the data path does not know
        tracing::warn!(
            "cannot track {n} connections: they are copied, and clients of transparent listeners are reset; {}",
            why_no_room(entries, d.max_flows())
        );
    }
}

/// Returns why legs find no room. A flow has two entries.
fn why_no_room(entries: u64, max_flows: u32) -> &'static str {
    if entries < u64::from(max_flows) {
        "clients have used the same ports again faster than the places of their last connections are freed, within a second"
    } else {
        "the tables of flows are full; a larger --max-flows helps"
    }
}

fn tell(d: &Datapath, mended: &Mended) {
    if mended.pins > 0 {
        tracing::warn!(
            "{} pins in {} had been removed, without which no other process can take flows over: pinned again; \
            find out who removes them, and use `longsplice stop --flush` to end all flows",
            mended.pins,
            d.pin().display()
        );
    }
    if !mended.devices.is_empty() {
        tracing::warn!(
            "the programs had been detached from {}: attached again; flows that were copied meanwhile are not spliced any more; \
            find out who detaches them, and use `longsplice stop` to stop splicing",
            mended.devices.join(", ")
        );
    }
    mended.gone.iter().for_each(|name| d.tell_gone(name));
}

/// Resets the flows whose sockets may have taken segments that the data path did not see.
fn end_spoilt(engine: &Engine, d: &Datapath) {
    let mut last = 0;
    while let Some(flows) = engine.page(last, PAGE) {
        last = flows[flows.len() - 1].id;
        for flow in flows.iter().filter(|f| is_spoilt(d, f)) {
            let _named = flow.named();
            tracing::warn!("segments have passed unseen: the flow is reset");
            engine.command(flow.id, Command::Reset);
        }
    }
}

fn is_spoilt(d: &Datapath, flow: &Flow) -> bool {
    match &mut *flow.owner() {
        FlowOwner::Task { .. } => flow.legs.iter().any(|t| d.leg(t).is_some_and(|l| !l.is_untouched())),
        FlowOwner::Keeper(kept) => kept.is_spoilt(d, flow),
        FlowOwner::Gone => false,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_larger_table_is_advised_if_it_helps() {
        for (entries, helps) in [(0, false), (15, false), (17, true), (32, true), (u64::MAX, true)] {
            assert_eq!(super::why_no_room(entries, 16).contains("--max-flows"), helps, "{entries}");
        }
    }
}
