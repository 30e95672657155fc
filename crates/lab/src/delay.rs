//! The far end of a detour, where frames are delayed.
//!
//! One thread reads a packet socket on the far end of a veth pair (see bpf/lab.bpf.c). It assigns each frame a departure
//! time, by rate, delay and reordering, and sends frames in the order of these times. The queue is bounded as in a router: a
//! frame that would wait for the rate longer than [`Timing::queue`] is dropped and counted.

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
/// Frames read in one batch, limited so that no due frame waits for long.
const BATCH: usize = 64;
/// Receive buffer of the socket, for the time while this thread does not run. Holds about 20,000 frames of 1500 bytes.
const SOCKET_BUFFER: usize = 64 << 20;
/// Maximum number of queued frames at any rate: a limit on memory, far above what any test has in flight.
const FRAMES: usize = 50_000;
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
            free_at: Instant::now(),
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
    /// When the last queued frame will have been sent at the given rate.
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
