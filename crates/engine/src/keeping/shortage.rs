//! What the engine does when file descriptors run short: it has the keeper release parked
//! flows, and lets accepts and connects wait for their sockets. See [`Descriptors`](crate::engine::descriptors::Descriptors).

use crate::engine::{Engine, descriptors::is_reserved, flow::KeeperMessage};
use nix::errno::Errno;
use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// Interval at which a task that waits for descriptors checks for them.
const TRY: Duration = Duration::from_millis(5);
/// Time that a listener waits for descriptors. Then it reports `EMFILE`.
const ACCEPT_PATIENCE: Duration = Duration::from_millis(100);
/// Time that a connect waits for descriptors. The releases of a whole process take less.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

impl Engine {
    /// Checks a descriptor that was just opened, and asks for releases if descriptors are scarce.
    pub fn opened(&self, fd: &impl AsRawFd) {
        if self.descriptors.opened(fd) {
            self.release_some();
        }
    }

    /// The same for the socket of a connect. Fails with `EMFILE` if it is one of the last: it has to be closed again.
    pub fn opened_for_server(&self, fd: &impl AsRawFd) -> io::Result<()> {
        self.opened(fd);
        if is_reserved(fd) { Err(Errno::EMFILE.into()) } else { Ok(()) }
    }

    fn release_some(&self) {
        if self.datapath().is_some() && self.descriptors.ask() {
            self.tell(KeeperMessage::Room);
        }
    }

    /// Waits for descriptors before a client is accepted. Fails with `EMFILE` if there
    /// are still too few after a while. `any`: a descriptor to duplicate as a test.
    pub async fn await_descriptors(&self, any: impl AsFd) -> io::Result<()> {
        let end = Instant::now() + ACCEPT_PATIENCE;
        while self.descriptors.are_short() {
            match any.as_fd().try_clone_to_owned() {
                Ok(probe) => self.opened(&probe),
                Err(_) => self.release_some(),
            }
            if self.descriptors.are_short() {
                if Instant::now() >= end {
                    return Err(Errno::EMFILE.into());
                }
                sleep(TRY).await;
            }
        }
        Ok(())
    }

    /// Returns whether something that an accepted client needs, and that has failed since `began`,
    /// should be tried again because descriptors may be free now. Waits before it returns true.
    pub async fn is_to_be_tried_again(&self, error: &io::Error, began: Instant) -> bool {
        if error.raw_os_error() != Some(Errno::EMFILE as i32) || began.elapsed() >= CONNECT_PATIENCE {
            return false;
        }
        self.descriptors.ran_out();
        self.release_some();
        sleep(TRY).await;
        true
    }
}
