//! Adoption: when a splice is due, the data path makes records for connections that it does not know (bpf/adopt.h): those of
//! [`Splicer::listen_adopting`](crate::Splicer::listen_adopting), and those whose sockets other code has made
//! ([`Splicer::adopt`](crate::Splicer::adopt)).

use crate::{
    core::Position,
    engine::Engine,
    leg::Leg,
    refusal::{self, Refusal},
};
use longsplice_datapath::{AdoptError, Attended, Datapath, Repair, Tuple, silent_for};
use std::{os::fd::BorrowedFd, sync::Arc, time::Duration};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

/// Time after which a connection is copied if nothing is seen of it.
const PATIENCE: Duration = Duration::from_secs(3);
/// Two ticks of the kernel's slowest clock, in which it counts how long a host was silent. A host that was heard earlier than we
/// think seems to have a faster clock, which does no harm.
const TICKS: Duration = Duration::from_millis(20);
/// Time between two attempts to complete a record: at first, and at last.
const TRY: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(1)];

/// The record of a connection that is being adopted. Dropping it removes the record, unless the leg has it.
struct Attempt {
    engine: Arc<Engine>,
    attended: Attended,
    /// The host was asked for a segment.
    probed: bool,
    /// Bytes that were written when it began.
    written: u64,
    complete: bool,
    kept: bool,
}

impl Attempt {
    /// Begins to watch the connection.
    fn begin(engine: &Arc<Engine>, d: &Datapath, leg: &Leg) -> Result<Attempt, Refusal> {
        let (written, shut, leg) = (leg.at.produced, leg.at.shut, &leg.tuple());
        let attended = match d.attend(leg, shut) {
            Err(AdoptError::Known) => {
                match engine.lingering.make_way_at_once(leg) {
                    Some((ended, other)) => d.forget_ended(&ended, other.as_ref()),
                    // a listener of ours has accepted it: the record counts from the SYN, and the socket can go on without
                    None => d.give_back_one(leg),
                }
                d.attend(leg, shut)
            }
            attended => attended,
        };
        engine.lingering.begins_anew(leg);
        let attended = attended.map_err(|error| refused(d, leg, &error))?;
        Ok(Attempt { engine: engine.clone(), attended, probed: false, written, complete: false, kept: false })
    }

    /// Asks the host for a segment, which shows the way there. Its answer shows the host's clock.
    fn probe(&mut self, socket: BorrowedFd<'_>) {
        self.probed = true;
        // if the probe is not sent, other segments may pass
        if let Err(error) = Repair::Probe.set(socket) {
            tracing::debug!(leg = ?self.attended.connection.leg, %error, "a socket that is adopted does not probe");
        }
    }

    /// Completes the record. Returns false if it has to be tried again. `late`: only if nothing was sent since it began. No probe
    /// is sent for a connection that is half closed.
    fn complete(&mut self, d: &Datapath, leg: &Leg, late: bool) -> Result<bool, Refusal> {
        let Position { produced, shut, eof, .. } = leg.at;
        let last = late && (produced != self.written || !(shut || eof));
        let socket = leg.descriptor().ok_or(Refusal::Closing)?;
        if self.complete {
            return Ok(true);
        }
        let silent = silent_for(socket).map_err(|_| Refusal::Closing)? + TICKS;
        match d.adopt(&self.attended, shut, leg.bytes_in(), produced, silent) {
            Ok(()) => self.complete = true,
            Err(AdoptError::Silent) if !self.probed => self.probe(socket),
            Err(AdoptError::Busy | AdoptError::Silent) if !last => {}
            Err(error) => return Err(refused(d, &leg.tuple(), &error)),
        }
        Ok(self.complete)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(d) = self.engine.datapath().filter(|_| !self.kept) {
            d.forget(self.attended.connection);
        }
    }
}

/// Legs that are being adopted.
pub(crate) struct Adopting {
    attempts: Vec<Attempt>,
    /// The present wait for programs that run. `None`: it is over.
    grace: Option<oneshot::Receiver<()>>,
    /// The kernel cannot wait.
    failed: bool,
    began: Instant,
    /// The next attempt.
    next: Instant,
}

impl Adopting {
    /// Begins to watch the connections of those legs that the data path does not know. Call it in a runtime.
    pub fn begin<'a>(engine: &Arc<Engine>, legs: impl Iterator<Item = &'a Leg>) -> Result<Adopting, Refusal> {
        engine.refusal().map_or(Ok(()), Err)?;
        let d = engine.datapath().ok_or(Refusal::Failed)?;
        let mut attempts = Vec::new();
        for leg in legs.filter(|leg| leg.lacks_record()) {
            let mut attempt = Attempt::begin(engine, d, leg)?;
            if leg.bytes_in() + leg.bytes_out() == 0 {
                attempt.probe(leg.descriptor().ok_or(Refusal::Closing)?); // nothing else may pass for a while
            }
            attempts.push(attempt);
        }
        let now = Instant::now();
        Ok(Adopting { attempts, grace: Some(engine.grace.begin()), failed: false, began: now, next: now })
    }

    /// Waits until [`Adopting::complete`] may succeed. It can be dropped and called again.
    pub async fn ready(&mut self) {
        if let Some(grace) = &mut self.grace {
            self.failed = grace.await.is_err();
            self.grace = None;
        }
        sleep_until(self.next).await;
    }

    /// Completes the records. Nobody may read or write the sockets during the call. Returns false if it has to be tried again,
    /// after [`Adopting::ready`].
    pub fn complete<'a>(&mut self, engine: &Engine, legs: impl Iterator<Item = &'a mut Leg>) -> Result<bool, Refusal> {
        engine.refusal().map_or(Ok(()), Err)?;
        let d = engine.datapath().ok_or(Refusal::Failed)?;
        if self.failed {
            return Err(Refusal::Kernel);
        }
        let now = Instant::now();
        self.next = now + (now.saturating_duration_since(self.began) / 4).clamp(TRY[0], TRY[1]);
        let mut legs: Vec<_> = legs.filter(|leg| leg.lacks_record()).collect();
        for (leg, attempt) in legs.iter().zip(&mut self.attempts) {
            if !attempt.complete(d, leg, now >= self.began + PATIENCE)? {
                return Ok(false);
            }
        }
        for (leg, attempt) in legs.iter_mut().zip(&mut self.attempts) {
            leg.has_record(attempt.attended.connection);
            attempt.kept = true;
        }
        Ok(true)
    }
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
