//! Sockets that the caller has made: [`Splicer::adopt`].

use crate::{
    engine::Engine,
    leg::{Leg, ip, live::Live},
    refusal::{self, Refusal},
    splicer::Splicer,
};
use longsplice_datapath::{AdoptError, Attended, Connection, Datapath, Repair, Tuple, await_programs, has_ulp};
use socket2::{Protocol, SockRef};
use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};
use tokio::{task::spawn_blocking, time::sleep};

/// Time limit for the host's answer to our probe. A host that is slower is copied.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time between two attempts to complete a record.
const TRY: Duration = Duration::from_millis(1);

/// Undoes an attempt that was not completed.
struct Attempt<'a> {
    datapath: &'a Datapath,
    attended: Attended,
    done: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.datapath.forget(self.attended.connection);
        }
    }
}

impl Splicer {
    /// Takes over a connected TCP socket that the caller has accepted or connected, at any moment of its connection: the leg can be
    /// spliced like those of [`Splicer::listen`] and [`Splicer::connect`]. It takes a round trip to the host, and some ten
    /// milliseconds, in which bytes may arrive and leave. What the caller has read and not passed on goes into
    /// [`Leftovers`](crate::Leftovers); positions count from here. No other descriptor of the socket may be used any more. If the
    /// connection cannot be spliced, because the host does not answer for three seconds, for example, the leg is copied, and its flow
    /// shows why. A flow with such a leg keeps its sockets until it ends ([`Policy::keeps_sockets`](crate::Policy)).
    ///
    /// Call it in a runtime, and in the network namespace of the data path. Errors are [`io::ErrorKind::InvalidInput`] if it is not a
    /// socket of TCP over IP, or if the kernel changes its bytes (TLS in the kernel, MPTCP), [`io::ErrorKind::NotConnected`], and
    /// those of socket options.
    pub async fn adopt(&self, socket: impl Into<OwnedFd>) -> io::Result<Leg> {
        let socket = socket.into();
        let s = SockRef::from(&socket);
        if s.protocol()? != Some(Protocol::TCP) || has_ulp(&socket) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only plain TCP sockets can be adopted"));
        }
        // a socket for IPv6 may have a connection of IPv4
        let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        let [remote, local] = [s.peer_addr()?, s.local_addr()?].map(|address| canonical(ip(&address)));
        s.set_nonblocking(true)?;
        s.set_tcp_nodelay(true)?;
        s.set_out_of_band_inline(true)?; // see live.rs
        let leg = Tuple { remote, local };
        let known = match self.datapath() {
            Some(_) if remote.ip() == local.ip() || remote.ip().is_loopback() => Err(Refusal::Loopback),
            Some(d) => record(self.engine(), d, socket.as_fd(), &leg).await,
            None => Ok(Connection { leg, generation: Connection::NONE }), // the engine's refusal is that of all flows
        };
        Ok(Leg::adopted(Live::new(socket)?, &leg, known))
    }
}

/// Makes a record for the connection of a socket, or says why there is none.
async fn record(engine: &Engine, d: &Datapath, socket: BorrowedFd<'_>, leg: &Tuple) -> Result<Connection, Refusal> {
    let attended = match d.attend(leg) {
        Err(AdoptError::Known) => {
            match engine.lingering.make_way_at_once(leg) {
                Some((ended, other)) => d.forget_ended(&ended, other.as_ref()),
                // a listener of ours has accepted it: the record counts from the SYN, and the socket can go on without
                None => d.give_back_one(leg),
            }
            d.attend(leg)
        }
        attended => attended,
    };
    engine.lingering.begins_anew(leg);
    let attended = attended.map_err(|error| refused(d, leg, &error))?;
    let mut attempt = Attempt { datapath: d, attended, done: false };
    // A segment to the host shows the way there, and its answer shows its clock. If the probe is not sent, others may do.
    if let Err(error) = Repair::On.set(socket).and_then(|()| Repair::Probe.set(socket)) {
        tracing::debug!(?leg, %error, "a socket that is adopted does not probe");
    }
    let waited = spawn_blocking(await_programs).await.map_err(|_| Refusal::Failed)?;
    if let Err(error) = waited {
        tracing::warn!(?leg, %error, "cannot wait for programs that run: sockets that are adopted are copied");
        return Err(Refusal::Kernel);
    }
    let until = Instant::now() + PATIENCE;
    loop {
        match d.adopt(&attempt.attended) {
            Ok(()) => break,
            Err(AdoptError::Busy | AdoptError::Silent) if Instant::now() < until => sleep(TRY).await,
            Err(error) => return Err(refused(d, leg, &error)),
        }
    }
    attempt.done = true;
    Ok(attempt.attended.connection)
}

fn refused(d: &Datapath, leg: &Tuple, error: &AdoptError) -> Refusal {
    tracing::debug!(?leg, %error, "not adopted");
    match error {
        AdoptError::Gone | AdoptError::Closing | AdoptError::Other => Refusal::Closing,
        AdoptError::Full => Refusal::TableFull,
        AdoptError::Fragments => Refusal::Fragments,
        AdoptError::Options => Refusal::Options,
        AdoptError::Busy | AdoptError::Known | AdoptError::Silent => refusal::of_untracked(d, &[*leg]),
        AdoptError::Run(_) => Refusal::Failed,
    }
}
