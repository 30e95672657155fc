//! The side of the new process: it takes everything over from the one that has started it.

use super::{
    CONNECTIONS, LEAST, MOST_IN_HAND_OF_ALL, MOST_SERVERS, MOST_SOCKETS, Message, Of, Offer, Pair, Takes, VERSION,
    reason,
};
use longsplice_datapath::AbiId;
use longsplice_proxy::{
    handed::{About, Handed, KnownServer},
    inherited::{Inherited, OfListener},
};
use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{dup2_stdin, getppid},
};
use serde::Deserialize;
use std::{
    fs::File,
    io,
    net::TcpListener,
    os::{fd::AsFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// Time limit for the offer.
const OFFER: Duration = Duration::from_secs(30);

/// Most connections that are handed over: as many as have descriptors under the usual hard limit of a million.
const MOST_CONNECTIONS: usize = 1 << 20;
/// One descriptor in so many is for sockets that are handed over: others are for their servers, and for new clients.
const FOR_HANDED: u64 = 2;

/// Time after which a process that dies has left its children, once it has closed what it had.
const DIES: Duration = Duration::from_secs(1);

/// What the process that runs has said.
#[derive(Debug)]
pub struct Heir {
    pair: Pair,
    offer: Offer,
    serves: AtomicBool,
}

/// What it says of connections and servers.
#[derive(Debug, Default)]
pub struct Received {
    /// Connections, for [`Heir::are_ours`].
    pub connections: Vec<Handed>,
    /// What is known of servers of pools.
    pub servers: Vec<KnownServer>,
    /// Names of listeners that are paused.
    pub paused: Vec<String>,
}

/// The sockets that it has offered.
#[derive(Debug, Default)]
pub struct Offered {
    /// The control socket.
    pub control: Option<UnixListener>,
    /// Metrics.
    pub admin: Option<TcpListener>,
    /// The socket for tools of HAProxy, and its path.
    pub haproxy: Option<(PathBuf, UnixListener)>,
    /// The listeners.
    listeners: Vec<(OfListener, TcpListener)>,
    /// Those that a supervisor keeps.
    kept: Vec<TcpListener>,
}

impl Offered {
    /// Returns the sockets that listeners had bound.
    pub fn bound(&self) -> impl Iterator<Item = &TcpListener> {
        self.listeners.iter().filter(|(of, _)| of.intercepts.is_none()).map(|(_, socket)| socket)
    }

    /// Takes the listening sockets.
    pub fn inherited(&mut self) -> io::Result<Inherited> {
        Inherited::new(std::mem::take(&mut self.kept))?.with(std::mem::take(&mut self.listeners))
    }
}

impl Heir {
    /// Takes the offer from standard input.
    pub fn begin() -> io::Result<(Heir, Offered)> {
        let pair = Pair(io::stdin().as_fd().try_clone_to_owned()?);
        dup2_stdin(File::open("/dev/null")?)?; // or it would stay open
        let until = Instant::now() + OFFER;
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let offer = match pair.hear(until) {
            Ok(Some((Message::Offer(offer), _))) => offer,
            Ok(Some((other, _))) => return Err(invalid(format!("standard input begins with {other:?}"))),
            Ok(None) => return Err(invalid("standard input is closed".into())),
            Err(e) => return Err(invalid(format!("standard input is of no process that hands over: {e}"))),
        };
        let mut offered = Offered::default();
        let refuse = |why: String| {
            let _ = pair.say(&Message::Refused { why: reason(&why) }, &[], LEAST); // it may be gone
            invalid(why)
        };
        if offer.version != VERSION {
            let (is, ours) = (offer.version, VERSION);
            return Err(refuse(format!(
                "it speaks version {is} of the protocol of upgrades, and this program version {ours}"
            )));
        }
        if offer.sockets > MOST_SOCKETS {
            return Err(refuse(format!("it offers {} sockets", offer.sockets)));
        }
        for _ in 0..offer.sockets {
            match pair.hear(until)?.map(|(said, mut sockets)| (said, sockets.pop())) {
                Some((Message::Socket(of), Some(socket))) => match of {
                    Of::Control => offered.control = Some(socket.into()),
                    Of::Admin => offered.admin = Some(socket.into()),
                    Of::Haproxy { path } => offered.haproxy = Some((path, socket.into())),
                    Of::Listener(of) => offered.listeners.push((of, socket.into())),
                    Of::Supervisor => offered.kept.push(socket.into()),
                },
                Some((other, _)) => return Err(refuse(format!("a socket is missing: {other:?}"))),
                None => return Err(invalid("the process that hands over is gone".into())),
            }
        }
        Ok((Heir { pair, offer, serves: AtomicBool::new(false) }, offered))
    }

    /// Returns whether the control socket of the process that hands over has this path.
    pub fn has_control(&self, path: &Path) -> bool {
        self.offer.control == path
    }

    /// Returns the directories of caches that the process that hands over leaves to this one.
    pub fn caches(&self) -> Vec<PathBuf> {
        self.offer.caches.clone()
    }

    /// Fails if the tables of the process that hands over are none of this program's.
    pub fn check_tables(&self) -> Result<(), String> {
        let ours = AbiId::OURS.to_string();
        match &self.offer.tables {
            Some(theirs) if *theirs != ours => Err(format!(
                "the tables in the kernel are of ABI {theirs}, and this program has {ours}: its connections would be copied; use \
                 `longsplice stop --drain` and start it"
            )),
            _ => Ok(()),
        }
    }

    /// Returns whether the process that hands over splices.
    pub fn splices(&self) -> bool {
        self.offer.tables.is_some()
    }

    /// Says that nothing is left that can fail, and waits until the other process has let go, or has died. Returns what
    /// comes with that. `listeners`: names and protocols; `splices`: whether this process does.
    pub fn prepared(&self, listeners: &[(String, String)], splices: bool) -> Result<Received, String> {
        let limit = Duration::from_secs(self.offer.within).max(OFFER);
        let program = env!("CARGO_PKG_VERSION").to_owned();
        let takes = (self.offer.connections == CONNECTIONS).then(|| self.takes(splices));
        // if it is gone, that is heard
        for (name, protocol) in listeners.iter().filter(|_| takes.is_some()) {
            let (name, protocol) = (name.clone(), protocol.clone());
            let _ = self.pair.say(&Message::Listens { name, protocol }, &[], limit);
        }
        let _ = self.pair.say(&Message::Prepared { program, takes, servers: true, paused: true }, &[], limit);
        tracing::info!("prepared to take over");
        let (mut all, mut bytes) = (Received::default(), 0);
        let until = Instant::now() + limit;
        loop {
            let (about, in_hand, sockets) = match self.pair.hear(until) {
                Ok(Some((Message::Commit, _))) => return Ok(all),
                Ok(Some((Message::Connection { about, in_hand }, sockets))) => (about, in_hand, sockets),
                Ok(Some((Message::Servers { known }, _))) if all.servers.len() + known.len() <= MOST_SERVERS => {
                    // what is not understood is not known
                    all.servers.extend(known.into_iter().filter_map(|one| KnownServer::deserialize(one).ok()));
                    continue;
                }
                Ok(Some((Message::Paused { name }, _))) if all.paused.len() < MOST_SOCKETS => {
                    all.paused.push(name);
                    continue;
                }
                Ok(Some((other, _))) => return Err(format!("the process that hands over says {other:?}")),
                Ok(None) => break,
                Err(e) => return Err(format!("the process that hands over does not let go: {e}")),
            };
            bytes += in_hand.iter().map(|n| n.min(&MOST_IN_HAND_OF_ALL)).sum::<usize>();
            let known: Option<About> = About::deserialize(*about).ok().filter(|about| about.sockets() == sockets.len());
            let (Some(about), Some(_)) = (known, takes.filter(|_| bytes <= MOST_IN_HAND_OF_ALL)) else {
                return Err("the process that hands over says of a connection what is not understood".into());
            };
            if all.connections.len() >= MOST_CONNECTIONS {
                return Err("the process that hands over has too many connections".into());
            }
            let [up, down] = in_hand.map(|n| self.pair.receive_all(n, until));
            match (up, down) {
                (Ok(Some(up)), Ok(Some(down))) => {
                    all.connections.push(Handed { about, sockets, in_hand: [up.into(), down.into()] });
                }
                (Ok(_), Ok(_)) => break,
                (Err(e), _) | (_, Err(e)) => return Err(format!("the process that hands over stops short: {e}")),
            }
        }
        if !self.is_orphaned() {
            return Err("the process that hands over has given up".into());
        }
        tracing::warn!(
            "the process that was to hand over has died: this one takes its place, and what it copied is lost"
        );
        Ok(all)
    }

    /// Returns which connections this process takes.
    fn takes(&self, splices: bool) -> Takes {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        let sockets = usize::try_from(limit / FOR_HANDED).unwrap_or(usize::MAX).min(MOST_CONNECTIONS);
        Takes { version: CONNECTIONS, sockets, splices }
    }

    /// Waits until the process that has handed over says that its connections are this one's now. If it has died, they are, too.
    pub fn are_ours(&self) -> Result<(), String> {
        match self.pair.hear(Instant::now() + Duration::from_secs(self.offer.within)) {
            Ok(Some((Message::Yours, _))) => Ok(()),
            Ok(None) if self.is_orphaned() => Ok(()),
            Ok(said) => Err(format!("it says {:?}", said.map(|(said, _)| said))),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Waits until that process has closed what it had offered.
    pub fn until_closed(&self) {
        let _ = self.pair.hear(Instant::now() + Duration::from_secs(self.offer.within)); // it says nothing any more
    }

    /// Returns whether the process that has started this one is dead. One that gives up lives, and kills this one.
    fn is_orphaned(&self) -> bool {
        let Some(process) = self.offer.process.and_then(|number| i32::try_from(number).ok()) else { return false };
        let until = Instant::now() + DIES;
        while Instant::now() < until {
            if getppid().as_raw() != process {
                return true;
            }
            thread::sleep(DIES / 100);
        }
        false
    }

    /// Says that this process serves.
    pub fn serves(&self) {
        self.serves.store(true, Relaxed);
        let limit = Duration::from_secs(self.offer.within);
        if let Err(error) = self.pair.say(&Message::Serving, &[], limit) {
            tracing::warn!("cannot tell the process that has handed over that this one serves: {error}");
        }
    }

    /// Says why this process does not serve, unless it does.
    pub fn refuse(&self, why: &str) {
        if !self.serves.load(Relaxed) {
            let _ = self.pair.say(&Message::Refused { why: reason(why) }, &[], OFFER); // it may be gone
        }
    }
}
