//! Zero-copy relaying: `splice(2)` through a pipe, for flows that stay in control mode for good. Needs no privilege.

use crate::{engine::descriptors::are_scarce, leg::Leg};
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

/// Capacity of a pipe in bytes: what a large window brings, and below the limit for unprivileged users.
const CAPACITY: usize = 256 * 1024;

const FLAGS: SpliceFFlags = SpliceFFlags::SPLICE_F_MOVE.union(SpliceFFlags::SPLICE_F_NONBLOCK);

/// The pipe of one direction.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    filled: usize,
}

impl Pipe {
    /// Creates a pipe. Fails when descriptors are scarce, or pipe memory has run out.
    pub fn new() -> io::Result<Pipe> {
        let (read, write) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)?;
        if are_scarce(&write) {
            return Err(Errno::EMFILE.into());
        }
        fcntl(&write, FcntlArg::F_SETPIPE_SZ(CAPACITY as i32))?;
        Ok(Pipe { read, write, filled: 0 })
    }

    /// Moves up to `most` bytes from the leg into the pipe. Returns 0 at the end of the stream. Returns `None`
    /// if the next byte is urgent: splice(2) stops for ever at such a byte, or reports that nothing follows it.
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

    /// Returns the bytes in the pipe, which ends with that.
    pub fn into_bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; self.filled];
        let mut at = 0;
        // a read from a pipe that has bytes fails only by a signal
        while at < bytes.len() {
            match nix::unistd::read(&self.read, &mut bytes[at..]) {
                Ok(n @ 1..) => at += n,
                Err(Errno::EINTR) => {}
                Ok(0) | Err(_) => break,
            }
        }
        assert_eq!(at, self.filled, "what was filled in is there");
        bytes
    }

    /// Moves the bytes in the pipe to the leg.
    pub fn empty(&mut self, cx: &mut Context<'_>, to: &mut Leg) -> Poll<io::Result<usize>> {
        to.hurry()?;
        let gave = |socket: &OwnedFd| Ok(splice(&self.read, None, socket, None, self.filled, FLAGS)?);
        let n = ready!(to.socket()?.poll_with_writable(cx, 1, gave))?;
        self.filled -= n;
        to.at.gave(n);
        Poll::Ready(Ok(n))
    }
}
