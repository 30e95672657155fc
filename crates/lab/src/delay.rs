//! The far end of a detour: frames wait here until they are late enough.
//!
//! One thread with one packet socket on the far end of a veth pair (see bpf/lab.bpf.c). Frames that came are given a
//! time to leave, by rate, delay and reordering, and leave in the order of those times. The queue is bounded like that
//! of a router: what would wait longer than [`Timing::queue`] for the rate is dropped, and counted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
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
/// Frames taken in one go, so that none that is due waits for long.
const BATCH: usize = 64;
/// What the kernel may keep for this thread while it is not running. At 1500 bytes a frame some 20,000 frames.
const SOCKET_BUFFER: usize = 64 << 20;
/// Frames that wait at most, whatever the rate: a bound on memory, far above what any test has in flight.
const FRAMES: usize = 50_000;
/// How often the thread looks whether it is to end.
const IDLE: Duration = Duration::from_millis(50);

/// When frames leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Every frame is late by this.
    pub delay: Duration,
    /// Bytes a second.
    pub rate: Option<u64>,
    /// How much waiting for the rate is allowed.
    pub queue: Duration,
    /// Share of frames that are held back, of those that take the detour.
    pub reorder: f64,
    /// How much longer those are held back.
    pub reorder_by: Duration,
}

/// What the thread counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub delayed: AtomicU64,
    pub reordered: AtomicU64,
    pub overflowed: AtomicU64,
    pub unsent: AtomicU64,
}

/// The running thread. Dropping it ends it; what still waits is lost.
#[derive(Debug)]
pub(crate) struct DelayLine {
    timing: Arc<Mutex<Timing>>,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DelayLine {
    /// Starts it on `device`, which exists and is up.
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
            free_at: Instant::now(),
        };
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || line.run(&stopped));
        Ok(Self { timing, counts, stop, thread: Some(thread) })
    }

    /// From now on frames that arrive leave at other times.
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

/// A packet socket on one device, and the address by which to send on it.
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

/// A frame that waits. Ordered by its time to leave, then by arrival.
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
    /// When the frame that was queued last will have been sent at the given rate.
    free_at: Instant,
}

impl Line {
    fn run(mut self, stop: &AtomicBool) {
        let mut buffer = vec![0; FRAME];
        while !stop.load(Ordering::Relaxed) {
            self.release();
            let next = self.waiting.peek().map(|next| next.0.leaves.saturating_duration_since(Instant::now()));
            let patience = next.unwrap_or(IDLE).min(IDLE);
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut ready, Some(patience.into()), None) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => self.receive(&mut buffer),
                // The socket is of no use any more.
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
                // Nothing more for now; a device that is going down says so at the next poll.
                Err(_) => return,
            }
        }
    }

    fn admit(&mut self, frame: &[u8]) {
        let timing = *self.timing.lock().expect("nothing panics under this lock");
        let now = Instant::now();
        let free_at = self.free_at.max(now);
        if free_at - now > timing.queue || self.waiting.len() >= FRAMES {
            self.counts.overflowed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let sending =
            timing.rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(frame.len() as f64 / rate.max(1) as f64));
        self.free_at = free_at + sending;
        let mut leaves = self.free_at + timing.delay;
        if self.random.random_bool(timing.reorder) {
            leaves += timing.reorder_by;
            self.counts.reordered.fetch_add(1, Ordering::Relaxed);
        }
        self.arrived += 1;
        self.waiting.push(Reverse(Waiting { leaves, number: self.arrived, frame: frame.to_vec() }));
    }

    fn release(&mut self) {
        let now = Instant::now();
        while self.waiting.peek().is_some_and(|next| next.0.leaves <= now) {
            let Some(Reverse(due)) = self.waiting.pop() else {
                return;
            };
            let sent = sendto(self.socket.as_raw_fd(), &due.frame, &self.address, MsgFlags::empty());
            let count = if sent.is_ok() { &self.counts.delayed } else { &self.counts.unsent };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}
