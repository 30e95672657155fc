//! The socket of a leg, in each of its states.

use crate::leg::live::Live;
use std::{
    io, mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// The socket of a leg.
#[derive(Debug)]
pub(crate) enum Socket {
    /// Accepted, and not registered with a runtime yet. It can be read and written as long as that need not wait.
    Idle(OwnedFd),
    /// Registered with the runtime: can be read and written.
    Live(Live),
    /// Not registered: the flow is forwarded, or is about to be copied again.
    Parked(OwnedFd),
    /// The flow is released.
    Gone,
}

impl Socket {
    /// Returns the descriptor, unless the flow is released.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Socket::Live(s) => Some(s.get().as_fd()),
            Socket::Idle(s) | Socket::Parked(s) => Some(s.as_fd()),
            Socket::Gone => None,
        }
    }

    /// Returns the registered socket.
    pub fn live(&self) -> io::Result<&Live> {
        match self {
            Socket::Live(s) => Ok(s),
            _ => Err(parked()),
        }
    }

    /// Returns the registered socket.
    pub fn live_mut(&mut self) -> io::Result<&mut Live> {
        match self {
            Socket::Live(s) => Ok(s),
            _ => Err(parked()),
        }
    }

    /// Reads or writes a socket that is not registered. If that had to wait, registers it and returns `None`.
    pub fn if_idle<R>(&mut self, act: impl FnOnce(&OwnedFd) -> io::Result<R>) -> io::Result<Option<R>> {
        let Socket::Idle(socket) = self else { return Ok(None) };
        match act(socket) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.attend().map(|()| None),
            done => done.map(Some),
        }
    }

    /// Registers it with the current runtime, unless it is registered.
    pub fn attend(&mut self) -> io::Result<()> {
        if matches!(self, Socket::Live(_)) { Ok(()) } else { self.enter() }
    }

    /// Registers it with the current runtime, and takes it out of another one if necessary.
    pub fn enter(&mut self) -> io::Result<()> {
        let socket = match self.take() {
            Socket::Live(s) => s.leave(),
            Socket::Idle(s) | Socket::Parked(s) => s,
            Socket::Gone => return Err(parked()),
        };
        *self = Socket::Live(Live::new(socket)?);
        Ok(())
    }

    /// Takes it out of the runtime.
    pub fn park(&mut self) {
        *self = match self.take() {
            Socket::Live(s) => Socket::Parked(s.leave()),
            Socket::Idle(s) | Socket::Parked(s) => Socket::Parked(s),
            Socket::Gone => Socket::Gone,
        }
    }

    /// Takes it, and leaves none.
    pub fn take(&mut self) -> Socket {
        mem::replace(self, Socket::Gone)
    }
}

fn parked() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the flow is forwarded")
}
