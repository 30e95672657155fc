//! The side of the new process: it takes everything over from the one that has started it.

use super::{LEAST, MOST_SOCKETS, Message, Of, Offer, Pair, VERSION, reason};
use longsplice_datapath::AbiId;
use longsplice_proxy::inherited::Inherited;
use nix::unistd::{dup2_stdin, getppid};
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

/// Time after which a process that dies has left its children, once it has closed what it had.
const DIES: Duration = Duration::from_secs(1);

/// What the process that runs has said.
#[derive(Debug)]
pub struct Heir {
    pair: Pair,
    offer: Offer,
    serves: AtomicBool,
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
    /// The listeners, by name.
    listeners: Vec<(String, TcpListener)>,
    /// Those that a supervisor keeps.
    kept: Vec<TcpListener>,
}

impl Offered {
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
            let _ = pair.say(&Message::Refused { why: reason(&why) }, None, LEAST); // it may be gone
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
            match pair.hear(until)? {
                Some((Message::Socket(of), Some(socket))) => match of {
                    Of::Control => offered.control = Some(socket.into()),
                    Of::Admin => offered.admin = Some(socket.into()),
                    Of::Haproxy { path } => offered.haproxy = Some((path, socket.into())),
                    Of::Listener { name } => offered.listeners.push((name, socket.into())),
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

    /// Says that nothing is left that can fail, and waits until the other process has let go, or has died.
    pub fn prepared(&self) -> Result<(), String> {
        let limit = Duration::from_secs(self.offer.within).max(OFFER);
        let program = env!("CARGO_PKG_VERSION").to_owned();
        let _ = self.pair.say(&Message::Prepared { program }, None, limit); // if it is gone, that is heard
        tracing::info!("prepared to take over");
        match self.pair.hear(Instant::now() + limit) {
            Ok(Some((Message::Commit, _))) => Ok(()),
            Ok(Some((other, _))) => Err(format!("the process that hands over says {other:?}")),
            Ok(None) if self.is_orphaned() => {
                tracing::warn!(
                    "the process that was to hand over has died: this one takes its place, and what it copied is lost"
                );
                Ok(())
            }
            Ok(None) => Err("the process that hands over has given up".into()),
            Err(e) => Err(format!("the process that hands over does not let go: {e}")),
        }
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
        if let Err(error) = self.pair.say(&Message::Serving, None, limit) {
            tracing::warn!("cannot tell the process that has handed over that this one serves: {error}");
        }
    }

    /// Says why this process does not serve, unless it does.
    pub fn refuse(&self, why: &str) {
        if !self.serves.load(Relaxed) {
            let _ = self.pair.say(&Message::Refused { why: reason(why) }, None, OFFER); // it may be gone
        }
    }
}
