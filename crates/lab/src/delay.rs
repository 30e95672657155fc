//! The far end of a detour, where frames are delayed.
//!
//! One thread reads a packet socket on the far end of a veth pair (see bpf/lab.bpf.c). It assigns each frame a departure
//! time, by rate, delay and reordering, and sends frames in the order of these times. The queue is bounded as in a router: a
//! frame that would wait for the rate longer than [`Timing::queue`] is dropped and counted. Each connection can have a queue
//! of its own, which no other connection delays.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, binary_heap::PeekMut};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::sockopt::{RcvBufForce, SndBufForce};
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, recvfrom, sendto, setsockopt, socket,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::{LabError, Namespace};

/// Larger than any frame: the near end has no segmentation offload.
const FRAME: usize = 70_000;
/// Frames read in one batch, limited so that no due frame waits for long.
const BATCH: usize = 64;
/// Receive buffer of the socket, for the time while this thread does not run. Holds about 20,000 frames of 1500 bytes.
const SOCKET_BUFFER: usize = 64 << 20;
/// Maximum number of queued frames at any rate: a limit on memory, far above what any test has in flight.
const FRAMES: usize = 50_000;
/// Maximum number of queues. Connections beyond that share one.
const QUEUES: usize = 1024;
/// How long a frame waits until it is sent again that the kernel had no room for.
const RETRY: Duration = Duration::from_micros(200);
/// How late a frame may be. Later, a device that takes nothing is the cause.
const LATE: Duration = Duration::from_secs(1);
/// How often the thread checks whether it is to exit.
const IDLE: Duration = Duration::from_millis(50);

/// The parameters that determine when frames leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Delay of every frame.
    pub delay: Duration,
    /// Bytes per second.
    pub rate: Option<u64>,
    /// Maximum time that a frame may wait for the rate.
    pub queue: Duration,
    /// Whether each connection has the rate, and a queue, to itself.
    pub per_connection: bool,
    /// Fraction of the frames on the detour that are held back.
    pub reorder: f64,
    /// Additional delay of frames that are held back.
    pub reorder_by: Duration,
}

/// Counters of the thread.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub delayed: AtomicU64,
    pub reordered: AtomicU64,
    pub overflowed: AtomicU64,
    pub unsent: AtomicU64,
}

/// A handle to the running thread. Dropping it ends the thread; queued frames are lost.
#[derive(Debug)]
pub(crate) struct DelayLine {
    timing: Arc<Mutex<Timing>>,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DelayLine {
    /// Starts the thread on `device`, which must exist and be up.
    pub fn start(namespace: &Namespace, device: &str, timing: Timing, seed: u64) -> Result<Self, LabError> {
        let (socket, address) =
            namespace.run(|| open(device)).map_err(LabError::io(format!("packet socket on {device}")))?;
        let (timing, counts, stop) =
            (Arc::new(Mutex::new(timing)), Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let line = Line {
            socket,
            address,
            timing: timing.clone(),
            counts: counts.clone(),
            random: StdRng::seed_from_u64(seed),
            waiting: BinaryHeap::new(),
            arrived: 0,
            queues: Queues::default(),
        };
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || line.run(&stopped));
        Ok(Self { timing, counts, stop, thread: Some(thread) })
    }

    /// Changes the timing of frames that arrive from now on.
    pub fn set_timing(&self, timing: Timing) {
        *self.timing.lock().expect("nothing panics under this lock") = timing;
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens a packet socket on one device. Returns it with the address to send to.
fn open(device: &str) -> io::Result<(OwnedFd, LinkAddr)> {
    let interfaces = nix::ifaddrs::getifaddrs()?;
    let address = interfaces
        .filter(|interface| interface.interface_name == device)
        .find_map(|interface| interface.address?.as_link_addr().copied())
        .ok_or(io::ErrorKind::NotFound)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll)?;
    setsockopt(&socket, RcvBufForce, &SOCKET_BUFFER)?;
    setsockopt(&socket, SndBufForce, &SOCKET_BUFFER)?;
    bind(socket.as_raw_fd(), &address)?;
    Ok((socket, address))
}

/// A queued frame. Ordered by departure time, then by arrival.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    leaves: Instant,
    number: u64,
    frame: Vec<u8>,
}

struct Line {
    socket: OwnedFd,
    address: LinkAddr,
    timing: Arc<Mutex<Timing>>,
    counts: Arc<Counts>,
    random: StdRng,
    waiting: BinaryHeap<Reverse<Waiting>>,
    arrived: u64,
    queues: Queues,
}

/// The sender and the receiver of a frame: IP addresses and ports of TCP or UDP. IPv4 addresses are padded with zeros.
type Connection = [u8; 36];

/// The queues for the rate: for each, when its last frame will have been sent.
#[derive(Default)]
struct Queues {
    busy_until: HashMap<Option<Connection>, Instant>,
}

impl Queues {
    /// Queues a frame that takes `sending` at the rate. Returns when it will have been sent; `None`
    /// if it would wait longer than `limit`. Frames without a connection share one queue.
    fn push(
        &mut self,
        mut connection: Option<Connection>,
        now: Instant,
        sending: Duration,
        limit: Duration,
    ) -> Option<Instant> {
        if self.busy_until.len() >= QUEUES && !self.busy_until.contains_key(&connection) {
            self.busy_until.retain(|_, until| *until > now);
            if self.busy_until.len() >= QUEUES {
                connection = None;
            }
        }
        let until = self.busy_until.entry(connection).or_insert(now);
        let begins = now.max(*until);
        if begins - now > limit {
            return None;
        }
        *until = begins + sending;
        Some(*until)
    }
}

/// The connection that an Ethernet frame belongs to; `None` for fragments and for anything but TCP and UDP.
fn connection(frame: &[u8]) -> Option<Connection> {
    const ETHERNET: usize = 14;
    const PROTOCOLS: [u8; 2] = [6, 17];
    let packet = frame.get(ETHERNET..)?;
    let mut key = [0; 36];
    let (addresses, protocol, header) = match packet.first()? >> 4 {
        4 if packet.get(6..8)?[0] & 0x3f == 0 && packet[7] == 0 => {
            (packet.get(12..20)?, packet[9], usize::from(packet[0] & 0xf) * 4)
        }
        6 => (packet.get(8..40)?, packet[6], 40),
        _ => return None,
    };
    if !PROTOCOLS.contains(&protocol) {
        return None;
    }
    key[..addresses.len()].copy_from_slice(addresses);
    key[32..].copy_from_slice(packet.get(header..header + 4)?);
    Some(key)
}

impl Line {
    fn run(mut self, stop: &AtomicBool) {
        let mut buffer = vec![0; FRAME];
        while !stop.load(Ordering::Relaxed) {
            let least = if self.release() { Duration::ZERO } else { RETRY };
            let next = self.waiting.peek().map(|next| next.0.leaves.saturating_duration_since(Instant::now()));
            let patience = next.unwrap_or(IDLE).clamp(least, IDLE);
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut ready, Some(patience.into()), None) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => self.receive(&mut buffer),
                // The socket is no longer usable.
                Err(_) => return,
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) {
        const OUTGOING: u8 = nix::libc::PACKET_OUTGOING;
        for _ in 0..BATCH {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), buffer) {
                Ok((_, Some(from))) if from.pkttype() == OUTGOING => {}
                Ok((length, _)) => self.admit(&buffer[..length]),
                // Nothing more for now; if the device is going down, the next poll reports it.
                Err(_) => return,
            }
        }
    }

    fn admit(&mut self, frame: &[u8]) {
        let timing = *self.timing.lock().expect("nothing panics under this lock");
        let sending =
            timing.rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(frame.len() as f64 / rate.max(1) as f64));
        let connection = timing.per_connection.then(|| connection(frame)).flatten();
        let has_room = self.waiting.len() < FRAMES;
        let sent = has_room.then(|| self.queues.push(connection, Instant::now(), sending, timing.queue)).flatten();
        let Some(sent) = sent else {
            self.counts.overflowed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let mut leaves = sent + timing.delay;
        if self.random.random_bool(timing.reorder) {
            leaves += timing.reorder_by;
            self.counts.reordered.fetch_add(1, Ordering::Relaxed);
        }
        self.arrived += 1;
        self.waiting.push(Reverse(Waiting { leaves, number: self.arrived, frame: frame.to_vec() }));
    }

    /// Sends what is due. Returns false if the kernel has no room for more now: it queues received packets for a CPU, and on a
    /// busy machine that queue can be full. This machine is slow then, not the link, so the frames wait.
    fn release(&mut self) -> bool {
        let now = Instant::now();
        while let Some(due) = self.waiting.peek_mut().filter(|next| next.0.leaves <= now) {
            let sent = sendto(self.socket.as_raw_fd(), &due.0.frame, &self.address, MsgFlags::empty());
            if sent == Err(Errno::ENOBUFS) && now - due.0.leaves < LATE {
                return false;
            }
            PeekMut::pop(due);
            let count = if sent.is_ok() { &self.counts.delayed } else { &self.counts.unsent };
            count.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn frame(version: u8, ports: [u8; 4]) -> Vec<u8> {
        let (header, protocol) = if version == 4 { (20, 9) } else { (40, 6) };
        let mut packet = vec![0; header];
        packet[0] = if version == 4 { 0x45 } else { 0x60 };
        packet[protocol] = 6;
        [&[0; 14][..], &packet, &ports].concat()
    }

    #[test]
    fn frames_are_told_apart_by_addresses_and_ports() {
        for version in [4, 6] {
            let one = frame(version, [0, 1, 0, 2]);
            assert_eq!(connection(&one).unwrap()[32..], [0, 1, 0, 2]);
            assert_ne!(connection(&one), connection(&frame(version, [0, 2, 0, 1])));
            assert_eq!(connection(&one[..one.len() - 1]), None, "cut short");
        }
        let mut fragment = frame(4, [0, 1, 0, 2]);
        fragment[14 + 7] = 1;
        assert_eq!(connection(&fragment), None);
    }

    #[test]
    fn a_connection_waits_for_its_own_frames_only() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        let [one, other] = [1, 2].map(|n| Some([n; 36]));
        assert_eq!(queues.push(one, now, MS, MS), Some(now + MS));
        assert_eq!(queues.push(one, now, MS, MS), Some(now + 2 * MS));
        assert_eq!(queues.push(one, now, MS, MS), None, "the queue is full");
        assert_eq!(queues.push(other, now, MS, MS), Some(now + MS));
        assert_eq!(queues.push(one, now + 5 * MS, MS, MS), Some(now + 6 * MS), "it has run empty");
    }

    #[test]
    fn the_number_of_queues_is_limited() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        for n in 0..2 * QUEUES {
            let mut key = [0; 36];
            key[..8].copy_from_slice(&n.to_ne_bytes());
            queues.push(Some(key), now, MS, Duration::MAX);
        }
        assert_eq!(queues.busy_until.len(), QUEUES + 1);
        queues.push(Some([9; 36]), now + 5000 * MS, MS, MS);
        assert_eq!(queues.busy_until.len(), 1, "queues that have run empty make room");
    }
}
