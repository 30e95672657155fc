//! Copying without copies: `splice(2)` through a pipe, for flows that stay in control mode for good. It needs no privilege.

use crate::Leg;
use nix::{
    fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice},
    unistd::pipe2,
};
use std::{
    io,
    os::fd::OwnedFd,
    task::{Context, Poll, ready},
};
use tokio::io::Interest;

/// Bytes that a pipe may hold: as much as a large window brings, and below the limit for users without privilege.
const CAPACITY: usize = 256 * 1024;

/// One direction's pipe.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    filled: usize,
}

impl Pipe {
    /// Fails when descriptors or pipe memory have run out.
    pub fn new() -> io::Result<Pipe> {
        let (read, write) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)?;
        fcntl(&write, FcntlArg::F_SETPIPE_SZ(CAPACITY as i32))?;
        Ok(Pipe { read, write, filled: 0 })
    }

    /// Bytes in the pipe.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Takes up to `most` bytes from the leg. 0: end of stream.
    pub fn fill(&mut self, cx: &mut Context<'_>, from: &mut Leg, most: usize) -> Poll<io::Result<usize>> {
        loop {
            let socket = from.socket()?;
            ready!(socket.poll_read_ready(cx))?;
            let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
            let took = socket
                .try_io(Interest::READABLE, || Ok(splice(socket, None, &self.write, None, most.min(CAPACITY), flags)?));
            match took {
                Ok(n) => {
                    self.filled += n;
                    from.took(n);
                    return Poll::Ready(Ok(n));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    /// Gives what is in the pipe to the leg.
    pub fn empty(&mut self, cx: &mut Context<'_>, to: &mut Leg) -> Poll<io::Result<usize>> {
        loop {
            let socket = to.socket()?;
            ready!(socket.poll_write_ready(cx))?;
            let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
            let gave =
                socket.try_io(Interest::WRITABLE, || Ok(splice(&self.read, None, socket, None, self.filled, flags)?));
            match gave {
                Ok(n) => {
                    self.filled -= n;
                    to.gave(n);
                    return Poll::Ready(Ok(n));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}
