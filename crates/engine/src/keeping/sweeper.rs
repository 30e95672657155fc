//! Removes records without a socket. A client's leg is created when the end of its handshake is seen, before the
//! kernel has processed it. If the kernel then drops that (an old timestamp, a firewall rule, a full accept queue), or a
//! process dies, a record without a socket is left. Such records would fill the table, until nothing could be spliced.
//!
//! In each [`ROUND`], all entries in control mode are examined, a few at a time, and the kernel is asked for their
//! sockets. An entry that has no socket at every look until its time is over is removed. Every connection that
//! this process holds, as the leg of a flow or waiting to be accepted, has a socket, so no bookkeeping is needed.

use crate::lingering::LINGER;
use longsplice_datapath::{Claim, Datapath, IdleEntry, IdleWalk, Sockets, Tuple};
use std::{
    collections::HashMap,
    io,
    time::{Duration, Instant},
};

/// Minimum time between two walks through the tables.
const ROUND: Duration = Duration::from_secs(5);
/// Number of entries looked at in one step, or some 16,000 slots. A step takes half a millisecond, so at most 2 % of
/// a processor. Empty tables for a million flows take ten seconds; ten thousand entries are examined in a second.
const PAGE: usize = 4 * Sockets::AT_ONCE;
const PACE: Duration = Duration::from_millis(25);
/// Time without a socket after which an entry that was never switched is removed. As long as a client may need to complete
/// its handshake, of which our SYN-ACK reminds it after 1, 3 and 7 seconds. A client that is even later is copied.
const SPARE: Duration = Duration::from_secs(10);
/// The same for other entries: those that answer the last segments
/// of a connection, and those of half-open transparent connections.
const OTHERS: Duration = Duration::from_secs(2 * LINGER.as_secs());
/// Maximum number of suspects between two looks, which take 16 MB. Others wait for their turn.
const SUSPECTS: usize = 65536;

struct Suspect {
    entry: IdleEntry,
    since: Instant,
    looked: Instant,
}

#[derive(Default)]
pub(crate) struct Sweeper {
    /// `None`: the kernel does not answer.
    sockets: Option<Sockets>,
    idle: IdleWalk,
    suspects: HashMap<Tuple, Suspect>,
    /// The first look of this round, and the next look.
    times: Option<(Instant, Instant)>,
}

impl Sweeper {
    /// Creates a sweeper in the network namespace of the data path.
    pub fn new() -> Sweeper {
        let sockets = Sockets::open().inspect_err(
            |error| tracing::warn!(%error, "cannot ask the kernel for sockets: records of failed handshakes stay"),
        );
        let now = Instant::now();
        let sockets = sockets.ok();
        Sweeper { times: sockets.is_some().then_some((now, now)), sockets, ..Sweeper::default() }
    }

    /// Returns when the next look is due.
    pub fn due(&self) -> Option<Instant> {
        self.times.map(|(_, next)| next)
    }

    /// Looks at the next entries, if it is time. Returns the number of records removed.
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
                tracing::warn!(%error, "cannot look for records of failed handshakes: tried again later");
                self.times = Some((began, now + ROUND));
                0
            }
        }
    }

    /// Returns whether an entry's time is over.
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

fn page(idle: &mut IdleWalk, d: &Datapath, sockets: &mut Sockets) -> io::Result<Option<Vec<(IdleEntry, Claim)>>> {
    let Some(entries) = idle.next(d, PAGE)? else { return Ok(None) };
    let mut page = Vec::with_capacity(entries.len());
    for entries in entries.chunks(Sockets::AT_ONCE) {
        let connections: Vec<_> = entries.iter().map(|e| (e.leg, e.device)).collect();
        page.extend(entries.iter().copied().zip(sockets.claims(&connections)?));
    }
    Ok(Some(page))
}
