//! Looks whether the data path is still pinned and attached as this process has left it. Somebody may remove the pins, or detach
//! the programs: the kernel does not tell.
//!
//! What was pinned is pinned again, and nothing else has changed. What was detached is attached again; but meanwhile segments have
//! come to sockets without the data path:
//!
//! | flow | what was missed | what becomes of it |
//! | --- | --- | --- |
//! | copied, never spliced | how far its bytes are | copied to its end |
//! | copied after a splice, or switching | its sockets have other numbers than its hosts | reset: they may have taken what is not theirs |
//! | spliced | nothing, as a rule: its segments lie beyond the windows of the parked sockets | goes on |
//! | | these hold some of them | they are closed: goes on as released |
//! | | these have acknowledged some of them | reset: nobody will send them again |
//! | released | the kernel has told the hosts that there is no socket | it ends |

use crate::{
    Command, Splicer,
    flow::{Flow, Place},
};
use longsplice_datapath::{Datapath, Mended};
use std::time::{Duration, Instant};

/// How often it is looked: two dozen system calls.
const EVERY: Duration = Duration::from_secs(1);
/// At most one message in this time says that the tables are full.
const FULL_EVERY: Duration = Duration::from_secs(10);
/// So many flows are taken from the table at a time.
const PAGE: usize = 1000;

pub(crate) struct Guard {
    next: Instant,
    /// What could not be put right, and was said.
    failed: String,
    /// How many legs had found no room when that was said, and when it may be said again.
    full: (u64, Instant),
}

impl Guard {
    pub fn new(splicer: &Splicer, now: Instant) -> Guard {
        let before = splicer.datapath().and_then(|d| d.legs_without_room().ok());
        Guard { next: now + EVERY, failed: String::new(), full: (before.unwrap_or(0), now) }
    }

    pub fn look(&mut self, splicer: &Splicer, now: Instant) {
        let Some(d) = splicer.datapath().filter(|_| now >= self.next) else { return };
        self.next = now + EVERY;
        d.look_for_conntrack();
        let failed = match d.mend() {
            Ok(mended) => {
                tell(d, &mended);
                if !mended.devices.is_empty() {
                    end_spoilt(splicer, d);
                }
                String::new()
            }
            Err(error) => error.to_string(),
        };
        if !failed.is_empty() && failed != self.failed {
            tracing::error!(
                "what was removed or detached of the data path cannot be put back: {failed}; end what has done it, or start again"
            );
        }
        self.failed = failed;
        self.tell_of_full_tables(d, now);
    }

    /// The first time, and then how often.
    fn tell_of_full_tables(&mut self, d: &Datapath, now: Instant) {
        let Ok(all) = d.legs_without_room() else { return };
        let (told, next) = self.full;
        if all == told || now < next {
            return;
        }
        self.full = (all, now + FULL_EVERY);
        let n = all - told;
        tracing::warn!(
            "the tables of flows are full: {n} connections are copied, not spliced; a larger --max-flows helps"
        );
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
    mended.gone.iter().for_each(|device| tracing::info!("device number {device} is gone: nothing is spliced there"));
}

/// Segments have passed unseen: flows whose sockets may have taken them end.
fn end_spoilt(splicer: &Splicer, d: &Datapath) {
    let mut last = 0;
    while let Some(flows) = splicer.page(last, PAGE) {
        last = flows[flows.len() - 1].id;
        for flow in flows.iter().filter(|f| is_spoilt(d, f)) {
            tracing::warn!(flow = flow.id, "segments of it have passed unseen: reset");
            splicer.command(flow.id, Command::Reset);
        }
    }
}

fn is_spoilt(d: &Datapath, flow: &Flow) -> bool {
    match &mut *flow.place() {
        Place::Task { .. } => [flow.client, flow.server].iter().any(|t| d.leg(t).is_some_and(|l| !l.is_untouched())),
        Place::Kept(kept) => kept.is_spoilt(d, flow),
        Place::Gone => false,
    }
}
