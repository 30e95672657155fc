//! Events that the data path reports.

use crate::{
    Connection, Datapath, PathView, Tuple, abi,
    tables::maps::{errno, from_bytes},
};
use libbpf_rs::{AsRawLibbpf, MapHandle, RingBuffer, RingBufferBuilder};
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        atomic::{Ordering::SeqCst, fence},
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
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
    /// A router's limit for segments is too small to be told to their sender.
    Narrow,
    /// Everything up to a limit was forwarded.
    LimitReached,
    /// The host of a transparent connection sends to a socket that is gone.
    /// It has not received our reset ([`Datapath::reset_deserted`]).
    Deserted,
    /// The connection was over, and a new one takes its place: its entries were removed.
    Replaced,
}

/// What the record of a leg said when a new connection took its place.
#[derive(Clone, Copy, Debug)]
pub struct LastRecord {
    /// Stream position of all that the host has sent.
    pub end: u64,
    /// Bits of `LegFlags`.
    pub flags: u32,
}

/// An event, and the leg that it concerns.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The leg.
    pub leg: Tuple,
    /// The kind of event.
    pub kind: EventKind,
    /// [`Connection::generation`] of the leg's connection; [`Connection::NONE`] if the leg had no entry.
    pub generation: u32,
    /// The entry at that time.
    pub path: PathView,
    /// [`EventKind::Replaced`]: the same event of the flow's other leg follows.
    pub more: bool,
    /// [`EventKind::Replaced`]: how the leg's record was, if there was one.
    pub record: Option<LastRecord>,
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
            abi::event_kind::EVENT_REPLACED => EventKind::Replaced,
            abi::event_kind::EVENT_NARROW => EventKind::Narrow,
            _ => EventKind::Oversize,
        };
        let generation = if e.generation == 0 { Connection::NONE } else { e.generation };
        let (leg, path) = (Tuple::from_abi(&e.leg), PathView::new(&e.p));
        let abi::replaced { end, flags, more } = e.replaced;
        let record = (flags != 0).then_some(LastRecord { end, flags });
        Event { leg, kind, generation, path, more: more != 0, record }
    }
}

/// Receives events. There may be only one receiver.
///
/// Normally, the first event wakes the receiver up, by an interrupt in the middle of the packet path, which costs more than
/// the whole rest of a segment. While events come often, the receiver reads them at short intervals instead (`Pace`), and
/// tells the data path not to wake it up for those that can wait (`tell_all()` in verdict.h).
pub struct Events<'a> {
    datapath: &'a Datapath,
    ring: RingBuffer<'a>,
    heard: Receiver<Event>,
    pace: Pace,
}

/// Interval at which events are read while they come often. A drain may be committed that much later; until then, its
/// segments are forwarded all the same, but the general way.
const POLL: Duration = Duration::from_millis(1);
/// Events come often if no more than this passes between them.
const OFTEN: Duration = Duration::from_millis(4);

/// Whether the receiver polls.
#[derive(Debug)]
struct Pace {
    polls: bool,
    /// When events were last read.
    last: Option<Instant>,
}

impl Pace {
    /// Notes whether there were events at `now`. Returns whether to begin or to stop polling.
    fn heard(&mut self, any: bool, now: Instant) -> Option<bool> {
        let often = self.last.is_some_and(|last| now.saturating_duration_since(last) <= OFTEN);
        if any {
            self.last = Some(now);
        }
        let polls = often && (any || self.polls);
        let changes = polls != self.polls;
        self.polls = polls;
        changes.then_some(polls)
    }
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

/// Returns the position in bytes up to which a ring with one map was read.
fn consumed(ring: &RingBuffer<'_>) -> u64 {
    // SAFETY: the ring is open, and has one map. A position is read from memory that stays mapped as long as it is open.
    unsafe { libbpf_sys::ring__consumer_pos(libbpf_sys::ring_buffer__ring(ring.as_libbpf_object().as_ptr(), 0)) }
}

/// Returns the position in bytes up to which it was written, including records that are not finished.
fn produced(ring: &RingBuffer<'_>) -> u64 {
    // SAFETY: as in `consumed`.
    unsafe { libbpf_sys::ring__producer_pos(libbpf_sys::ring_buffer__ring(ring.as_libbpf_object().as_ptr(), 0)) }
}

/// The usual time between two `None` of [`poll_ring`], at most.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Passes records to `f` until it returns `None`. Otherwise it returns after which time it is to be called again, at most: with
/// `None`. All records that were in the ring when one `None` was handled have been passed when the next one comes.
pub(crate) fn poll_ring(ring: &MapHandle, mut f: impl FnMut(Option<&[u8]>) -> Option<Duration>) -> io::Result<()> {
    let f = RefCell::new(&mut f);
    let rest = Cell::new(Some(TICK));
    let hear = |data: Option<&[u8]>| rest.set(rest.get().and_then(|_| (f.borrow_mut())(data)));
    let mut b = RingBufferBuilder::new();
    b.add(ring, |data| {
        hear(Some(data));
        0
    })
    .map_err(failed)?;
    let ring = b.build().map_err(failed)?;
    let mut present = 0; // where the ring ended at the last `None`
    while let Some(rest) = rest.get() {
        let heard = match ring.poll_raw(rest) {
            // read anyway: a producer that does not see yet how far we have read wakes nobody up
            0 => ring.consume_raw(),
            heard => heard,
        };
        match heard {
            // Reading stops before a record that another processor has not finished. If that one is delayed, perhaps because a
            // hypervisor does not run it, finished records wait behind it.
            0.. if consumed(&ring) < present => {}
            0.. => {
                hear(None);
                present = produced(&ring);
            }
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
        let pace = Pace { polls: false, last: None };
        Ok(Events { datapath: self, ring: b.build().map_err(failed)?, heard, pace })
    }

    /// Passes copies of forwarded data ([`Datapath::freeze`] with `tap`) to `f` until it returns false.
    /// Passes `None` when all present copies have been passed. Blocks: call it from a thread of its own.
    pub fn poll_taps(&self, mut f: impl FnMut(Option<TapRecord<'_>>) -> bool) -> io::Result<()> {
        poll_ring(&self.maps.taps, |data| f(data.map(TapRecord::new)).then_some(TICK))
    }

    /// Stops copying the forwarded data of a leg whose reader is gone.
    pub fn untap(&self, leg: impl Into<Connection>) -> io::Result<()> {
        self.maps.path_op_on(abi::path_op::PATH_OP_UNTAP, &leg.into())
    }
}

impl Events<'_> {
    /// Waits until there are events, [`Datapath::wake`] is called, a signal arrives, or `limit` has passed, in whole
    /// milliseconds. While events come often, it returns every millisecond. Returns the events, if any.
    pub fn wait(&mut self, limit: Duration) -> io::Result<impl Iterator<Item = Event> + '_> {
        // SAFETY: the ring is borrowed longer than this, and does not close its descriptor before it is dropped.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) };
        let mut fds = [ring, self.datapath.wake.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let limit = if self.pace.polls { limit.min(POLL) } else { limit };
        let limit = PollTimeout::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, limit) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        if fds[1].any() == Some(true) {
            self.datapath.wake.read()?; // nobody else reads: it cannot block
        }
        let any = self.read()?;
        if let Some(polls) = self.pace.heard(any, Instant::now()) {
            self.datapath.maps.set_polling(polls)?;
            self.datapath.polls.store(polls, SeqCst);
            if !polls {
                // From here on everybody wakes us up. What was left without that is read now: events here, and what else
                // the caller waits for when this returns, before it calls again (`Datapath::wake_soon`).
                fence(SeqCst);
                self.read()?;
            }
        }
        let datapath = self.datapath;
        let is_replaced = |event: &Event| event.kind == EventKind::Replaced;
        Ok(self.heard.try_iter().inspect(move |event| {
            if is_replaced(event) {
                datapath.was_replaced(&event.leg);
            }
        }))
    }

    /// Reads the ring. Returns whether there were events.
    fn read(&mut self) -> io::Result<bool> {
        match self.ring.consume_raw() {
            n @ 0.. => Ok(n > 0),
            e => Err(io::Error::from_raw_os_error(-e)),
        }
    }
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        self.datapath.polls.store(false, SeqCst);
        let _ = self.datapath.maps.set_polling(false); // nobody reads any more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_polled_only_while_they_come_often() {
        let (mut pace, begin) = (Pace { polls: false, last: None }, Instant::now());
        let mut at = |ms, any| pace.heard(any, begin + Duration::from_millis(ms));
        assert_eq!([at(0, true), at(100, true), at(1100, false), at(1200, true)], [None; 4], "now and then");
        assert_eq!(at(1203, true), Some(true));
        assert_eq!([at(1204, false), at(1206, false), at(1207, true), at(1211, false)], [None; 4], "a short pause");
        assert_eq!([at(1212, false), at(1213, false), at(1300, true)], [Some(false), None, None]);
    }
}
