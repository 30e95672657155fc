//! Copying without copies: `splice(2)` through a pipe, for flows that stay in control mode for good. It needs no privilege.

use crate::{Leg, descriptors::are_scarce};
use longsplice_datapath::is_urgent;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice},
    unistd::pipe2,
};
use std::{
    io,
    os::fd::OwnedFd,
    task::{Context, Poll, ready},
};

/// Bytes that a pipe may hold: as much as a large window brings, and below the limit for users without privilege.
const CAPACITY: usize = 256 * 1024;

const FLAGS: SpliceFFlags = SpliceFFlags::SPLICE_F_MOVE.union(SpliceFFlags::SPLICE_F_NONBLOCK);

/// One direction's pipe.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    filled: usize,
}

impl Pipe {
    /// Fails when descriptors are scarce, or pipe memory has run out.
    pub fn new() -> io::Result<Pipe> {
        let (read, write) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)?;
        if are_scarce(&write) {
            return Err(Errno::EMFILE.into());
        }
        fcntl(&write, FcntlArg::F_SETPIPE_SZ(CAPACITY as i32))?;
        Ok(Pipe { read, write, filled: 0 })
    }

    /// Takes up to `most` bytes from the leg. 0: end of stream. `None`: the next byte is urgent, and splice(2) stops for ever
    /// where one begins, or says that nothing comes after it.
    pub fn fill(&mut self, cx: &mut Context<'_>, from: &mut Leg, most: usize) -> Poll<io::Result<Option<usize>>> {
        let took = ready!(from.socket()?.poll_with_readable(cx, |socket| {
            match splice(socket, None, &self.write, None, most.min(CAPACITY), FLAGS) {
                Err(Errno::EAGAIN) | Ok(0) if is_urgent(socket)? => Ok(None),
                took => Ok(Some(took?)),
            }
        }))?;
        if let Some(n) = took {
            self.filled += n;
            from.at.took(n);
        }
        Poll::Ready(Ok(took))
    }

    /// Gives what is in the pipe to the leg.
    pub fn empty(&mut self, cx: &mut Context<'_>, to: &mut Leg) -> Poll<io::Result<usize>> {
        let gave = |socket: &OwnedFd| Ok(splice(&self.read, None, socket, None, self.filled, FLAGS)?);
        let n = ready!(to.socket()?.poll_with_writable(cx, 1, gave))?;
        self.filled -= n;
        to.at.gave(n);
        Poll::Ready(Ok(n))
    }
}
