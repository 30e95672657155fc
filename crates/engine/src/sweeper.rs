//! Records that nobody claims. A client's leg is made when the end of its handshake is seen, before the kernel has taken it; what the
//! kernel then drops (an old timestamp, a rule of a firewall, a full accept queue) leaves a record without a socket, as a process
//! does that has died. They would fill the table, and nobody would be spliced any more.
//!
//! Each [`ROUND`] all entries are looked at that are in control mode, a few at a time, and the kernel is asked whether it has
//! their sockets. One that has none, look after look until its time is over, goes. What holds a connection here, the leg of a flow
//! or one that waits to be accepted, has a socket; so nothing has to be noted for it.

use crate::lingering::LINGER;
use longsplice_datapath::{Claim, Datapath, Idle, IdleEntry, Sockets, Tuple};
use std::{
    collections::HashMap,
    io,
    time::{Duration, Instant},
};

/// The tables are looked through so often at most, ...
const ROUND: Duration = Duration::from_secs(5);
/// ... a page of them at a time, of some 16,000 slots or so many entries. That takes half a millisecond, so at most 2 % of a
/// processor. Empty tables for a million flows take ten seconds; of entries, ten thousand are looked at in a second.
const PAGE: usize = 4 * Sockets::AT_ONCE;
const PACE: Duration = Duration::from_millis(25);
/// Where no switch was: as long as a client may need to end its handshake after all, which our SYN-ACK, sent again after 1, 3 and 7
/// seconds, reminds it of. A client that is later yet is copied.
const SPARE: Duration = Duration::from_secs(10);
/// The others: entries that answer the last segments of a connection, those of one that others have half open.
const OTHERS: Duration = Duration::from_secs(2 * LINGER.as_secs());
/// So many are remembered between two looks, in 16 MB; more wait for their turn.
const SUSPECTS: usize = 65536;

struct Suspect {
    entry: IdleEntry,
    since: Instant,
    looked: Instant,
}

#[derive(Default)]
pub(crate) struct Sweeper {
    /// None: the kernel does not answer.
    sockets: Option<Sockets>,
    idle: Idle,
    suspects: HashMap<Tuple, Suspect>,
    /// This round's first look, and the next look.
    times: Option<(Instant, Instant)>,
}

impl Sweeper {
    /// In the network namespace of the data path.
    pub fn new() -> Sweeper {
        let sockets = Sockets::open().inspect_err(
            |error| tracing::warn!(%error, "the kernel does not tell of sockets: records of failed handshakes stay"),
        );
        let now = Instant::now();
        let sockets = sockets.ok();
        Sweeper { times: sockets.is_some().then_some((now, now)), sockets, ..Sweeper::default() }
    }

    /// When it wants to look next.
    pub fn due(&self) -> Option<Instant> {
        self.times.map(|(_, next)| next)
    }

    /// Looks a bit further, if it is time to; how many records went.
    pub fn look(&mut self, d: &Datapath, now: Instant) -> usize {
        let (Some((began, next)), Some(sockets)) = (self.times, &mut self.sockets) else { return 0 };
        if now < next {
            return 0;
        }
        match page(&mut self.idle, d, sockets) {
            Ok(Some(page)) => {
                self.times = Some((began, now + PACE));
                page.into_iter().filter(|(entry, claim)| self.judge(*entry, *claim, now) && d.sweep(entry)).count()
            }
            Ok(None) => {
                let next = now.max(began + ROUND);
                self.times = Some((next, next));
                self.suspects.retain(|_, s| s.looked >= began);
                self.suspects.shrink_to(2 * self.suspects.len());
                0
            }
            Err(error) => {
                tracing::warn!(%error, "records of failed handshakes are looked for again later");
                self.times = Some((began, now + ROUND));
                0
            }
        }
    }

    /// Is its time over?
    fn judge(&mut self, entry: IdleEntry, claim: Claim, now: Instant) -> bool {
        if claim != Claim::No {
            self.suspects.remove(&entry.leg);
            return false;
        }
        let before = self.suspects.get_mut(&entry.leg).filter(|s| s.entry.is(&entry));
        let Some(suspect) = before else {
            if self.suspects.len() < SUSPECTS {
                self.suspects.insert(entry.leg, Suspect { entry, since: now, looked: now });
            }
            return false;
        };
        suspect.looked = now;
        now - suspect.since >= if entry.is_spare() { SPARE } else { OTHERS }
    }
}

fn page(idle: &mut Idle, d: &Datapath, sockets: &mut Sockets) -> io::Result<Option<Vec<(IdleEntry, Claim)>>> {
    let Some(entries) = idle.next(d, PAGE)? else { return Ok(None) };
    let mut page = Vec::with_capacity(entries.len());
    for entries in entries.chunks(Sockets::AT_ONCE) {
        let connections: Vec<_> = entries.iter().map(|e| (e.leg, e.device)).collect();
        page.extend(entries.iter().copied().zip(sockets.claims(&connections)?));
    }
    Ok(Some(page))
}
