//! Events that the data path reports.

use crate::{
    Datapath, Tuple, abi,
    maps::{errno, from_bytes},
};
use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Both directions are forwarded now.
    Forwarding,
    /// Both directions are in control mode now.
    Control,
    /// A host has sent data beyond its limit, which has started an unsplice.
    Triggered,
    /// Both FINs are acknowledged.
    Closed,
    /// A host has sent a reset.
    Reset,
    /// Segments exceed the MTU.
    Oversize,
    /// Everything up to a limit was forwarded.
    LimitReached,
    /// The host of a transparent connection sends to a socket that is gone.
    /// It has not received our reset ([`Datapath::reset_deserted`]).
    Deserted,
}

/// An event, and the leg that it concerns.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The leg.
    pub leg: Tuple,
    /// The kind of event.
    pub kind: EventKind,
}

impl Event {
    fn from_abi(e: &abi::event) -> Event {
        let kind = match e.kind {
            abi::event_kind::EVENT_FORWARDING => EventKind::Forwarding,
            abi::event_kind::EVENT_CONTROL => EventKind::Control,
            abi::event_kind::EVENT_TRIGGERED => EventKind::Triggered,
            abi::event_kind::EVENT_LIMIT_REACHED => EventKind::LimitReached,
            abi::event_kind::EVENT_CLOSED => EventKind::Closed,
            abi::event_kind::EVENT_RESET => EventKind::Reset,
            abi::event_kind::EVENT_DESERTED => EventKind::Deserted,
            _ => EventKind::Oversize,
        };
        Event { leg: Tuple::from_abi(&e.leg), kind }
    }
}

/// Receives events. There may be only one receiver.
pub struct Events<'a> {
    datapath: &'a Datapath,
    ring: RingBuffer<'a>,
    heard: Receiver<Event>,
}

/// A copy of forwarded bytes.
#[derive(Clone, Copy, Debug)]
pub struct TapRecord<'a> {
    /// The leg on which they arrived.
    pub leg: Tuple,
    /// Position of the first byte.
    pub at: TapPosition,
    /// Position up to which the other host has acknowledged, relative to the first byte.
    pub acked: i32,
    /// The bytes of one segment, or of a part of one.
    pub bytes: &'a [u8],
}

/// Position of the first copied byte (`enum tap_position`).
#[derive(Clone, Copy, Debug)]
pub enum TapPosition {
    /// Stream position.
    Stream(u64),
    /// Extended sequence number: add [`Switched::origin`](crate::Switched::origin) to get the stream position.
    Extended(u64),
    /// Sequence number, less than 2^31 away from that of the bound of the splice.
    Low(u32),
}

impl TapRecord<'_> {
    fn new(data: &[u8]) -> TapRecord<'_> {
        let head: abi::tap_record = from_bytes(data);
        let at = match head.kind {
            0 => TapPosition::Stream(head.at),
            1 => TapPosition::Extended(head.at),
            _ => TapPosition::Low(head.at as u32),
        };
        let bytes = &data[size_of::<abi::tap_record>()..][..head.len as usize];
        TapRecord { leg: Tuple::from_abi(&head.leg), at, acked: head.acked, bytes }
    }
}

fn failed(e: libbpf_rs::Error) -> io::Error {
    io::Error::from_raw_os_error(errno(&e))
}

/// Passes records to `f` until it returns false. Passes `None` when
/// all present records have been passed, at least ten times a second.
pub(crate) fn poll_ring(ring: &MapHandle, mut f: impl FnMut(Option<&[u8]>) -> bool) -> io::Result<()> {
    let f = RefCell::new(&mut f);
    let go = Cell::new(true);
    let hear = |data: Option<&[u8]>| go.set((f.borrow_mut())(data) && go.get());
    let mut b = RingBufferBuilder::new();
    b.add(ring, |data| {
        hear(Some(data));
        0
    })
    .map_err(failed)?;
    let ring = b.build().map_err(failed)?;
    while go.get() {
        match ring.poll_raw(Duration::from_millis(100)) {
            0.. => hear(None),
            // a signal or SIGSTOP interrupts the wait: the ring was not read
            e if e == -libc::EINTR => {}
            e => return Err(io::Error::from_raw_os_error(-e)),
        }
    }
    Ok(())
}

impl Datapath {
    /// Starts to receive events. A second receiver would take events away from the first.
    pub fn events(&self) -> io::Result<Events<'_>> {
        let (tell, heard) = channel();
        let mut b = RingBufferBuilder::new();
        b.add(&self.maps.events, move |data| {
            let _ = tell.send(Event::from_abi(&from_bytes(data))); // to the struct that is built below
            0
        })
        .map_err(failed)?;
        Ok(Events { datapath: self, ring: b.build().map_err(failed)?, heard })
    }

    /// Passes copies of forwarded data ([`Datapath::freeze`] with `tap`) to `f` until it returns false.
    /// Passes `None` when all present copies have been passed. Blocks: call it from a thread of its own.
    pub fn poll_taps(&self, mut f: impl FnMut(Option<TapRecord<'_>>) -> bool) -> io::Result<()> {
        poll_ring(&self.maps.taps, |data| f(data.map(TapRecord::new)))
    }

    /// Stops copying the forwarded data of a leg whose reader is gone.
    pub fn untap(&self, leg: &Tuple) -> io::Result<()> {
        self.maps.untap(leg)
    }
}

impl Events<'_> {
    /// Waits until there are events, [`Datapath::wake`] is called, a signal arrives,
    /// or `limit` has passed, in whole milliseconds. Returns the events, if any.
    pub fn wait(&mut self, limit: Duration) -> io::Result<impl Iterator<Item = Event> + '_> {
        // SAFETY: the ring is borrowed longer than this, and does not close its descriptor before it is dropped.
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
