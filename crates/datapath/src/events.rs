//! What the data path reports.

use crate::{
    Datapath, Tuple, abi,
    maps::{errno, from_bytes},
};
use libbpf_rs::{RingBuffer, RingBufferBuilder};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Both directions are forwarded.
    Forwarding,
    /// Both directions are in control mode.
    Control,
    /// A host has sent beyond its limit: an unsplice has begun.
    Triggered,
    /// Both FINs are acknowledged.
    Closed,
    /// A host has reset.
    Reset,
    /// Segments do not fit the MTU.
    Oversize,
    /// All up to a limit was forwarded.
    Passed,
}

/// A report, and the leg it came from.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The leg.
    pub leg: Tuple,
    /// What.
    pub kind: EventKind,
}

impl Event {
    fn from_abi(e: &abi::event) -> Event {
        let kind = match e.kind {
            abi::event_kind::EVENT_FORWARDING => EventKind::Forwarding,
            abi::event_kind::EVENT_CONTROL => EventKind::Control,
            abi::event_kind::EVENT_TRIGGERED => EventKind::Triggered,
            abi::event_kind::EVENT_PASSED => EventKind::Passed,
            abi::event_kind::EVENT_CLOSED => EventKind::Closed,
            abi::event_kind::EVENT_RESET => EventKind::Reset,
            _ => EventKind::Oversize,
        };
        Event { leg: Tuple::from_abi(&e.leg), kind }
    }
}

/// Reports as they come, for one listener.
pub struct Events<'a> {
    datapath: &'a Datapath,
    ring: RingBuffer<'a>,
    heard: Receiver<Event>,
}

impl Datapath {
    /// Begins to listen. A second listener would take events away from the first.
    pub fn events(&self) -> io::Result<Events<'_>> {
        let failed = |e: libbpf_rs::Error| io::Error::from_raw_os_error(errno(&e));
        let (tell, heard) = channel();
        let mut b = RingBufferBuilder::new();
        b.add(&self.maps.events, move |data| {
            let _ = tell.send(Event::from_abi(&from_bytes(data))); // to the struct that is built below
            0
        })
        .map_err(failed)?;
        Ok(Events { datapath: self, ring: b.build().map_err(failed)?, heard })
    }

    /// Ends a wait for events, the present one or the next.
    pub fn wake(&self) {
        if let Err(error) = self.wake.write(1) {
            tracing::warn!(%error, "events are heard late");
        }
    }
}

impl Events<'_> {
    /// Waits until there are events, [`Datapath::wake`] is called, a signal has come, or `limit` has passed, in whole
    /// milliseconds; the events, if there are any.
    pub fn wait(&mut self, limit: Duration) -> io::Result<impl Iterator<Item = Event> + '_> {
        // SAFETY: the ring is borrowed for as long, and does not close its descriptor before it is dropped.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) };
        let mut fds = [ring, self.datapath.wake.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let limit = PollTimeout::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, limit) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        if fds[1].any() == Some(true) {
            self.datapath.wake.read()?; // nobody else reads: it cannot block
        }
        match self.ring.consume_raw() {
            0.. => Ok(self.heard.try_iter()),
            e => Err(io::Error::from_raw_os_error(-e)),
        }
    }
}
