//! One end of a connection: a thread that writes, a thread that reads, and the state they share.

use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use longsplice_datapath::is_urgent;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, getsockopt, recv};
use nix::{getsockopt_impl, libc, sockopt_impl};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sha2::{Digest, Sha256};
use socket2::SockRef;

use super::{Amount, Chunks, Cue, Ending, Marks, Report, Role, STEP, Script, Start, StreamEnd};
use crate::pattern::{self, Mismatch};

sockopt_impl!(
    /// The first part of TCP_INFO, up to `tcpi_total_retrans`. The structure
    /// grows with kernel versions, and nix requires the full size asked for.
    TcpInfo, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 26]
);

/// When the other end resets a connection, the writer may get the error and
/// the reader only an end of stream. Within this time both count as one event.
const SAME_EVENT: Duration = Duration::from_millis(20);

/// Runs one end of a connection until both directions have ended or the deadline expires, then closes it.
pub fn converse(stream: TcpStream, script: &Script) -> Report {
    let conversation = Conversation {
        stream: &stream,
        script,
        started: Instant::now(),
        // Query this now: a reset socket no longer knows its peer.
        local: stream.local_addr().ok(),
        remote: stream.peer_addr().ok(),
        progress: Mutex::new(Progress { seed: script.seed, received: 0, reading: true, over: None }),
        changed: Condvar::new(),
    };
    let set_up = SockRef::from(&stream).set_read_timeout(Some(STEP)).and(stream.set_write_timeout(Some(STEP)));
    let set_up = set_up.and(SockRef::from(&stream).set_out_of_band_inline(script.marks == Some(Marks::Inline)));
    let (sender, receiver) = match set_up.and(stream.set_nodelay(script.nodelay)) {
        Ok(()) => thread::scope(|scope| {
            let writer = scope.spawn(|| conversation.write());
            let receiver = conversation.read();
            (writer.join().expect("the writing thread does not panic"), receiver)
        }),
        Err(error) => {
            let how = StreamEnd::from_error(&error);
            (Sender { end: how.clone(), ..Sender::default() }, Receiver { end: how, ..Receiver::default() })
        }
    };
    conversation.report(sender, receiver)
}

/// The result of the writing thread.
struct Sender {
    sent: u64,
    urgent: Vec<u64>,
    digest: Sha256,
    end: StreamEnd,
    ended: Option<Instant>,
}

impl Default for Sender {
    fn default() -> Self {
        Self { sent: 0, urgent: Vec::new(), digest: Sha256::new(), end: StreamEnd::Eof, ended: None }
    }
}

/// The result of the reading thread.
struct Receiver {
    received: u64,
    marks: Vec<u64>,
    /// An urgent byte received out of band whose position in the stream has not been reached yet.
    apart: Option<u8>,
    digest: Sha256,
    mismatch: Option<Mismatch>,
    first_byte: Option<Duration>,
    longest_gap: Duration,
    longest_gap_at: u64,
    end: StreamEnd,
    ended: Option<Instant>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self {
            received: 0,
            marks: Vec::new(),
            apart: None,
            digest: Sha256::new(),
            mismatch: None,
            first_byte: None,
            longest_gap: Duration::ZERO,
            longest_gap_at: 0,
            end: StreamEnd::Eof,
            ended: None,
        }
    }
}

/// State shared by the two threads.
struct Progress {
    /// The connection's seed, when known.
    seed: Option<u64>,
    received: u64,
    /// Whether the reader is still running.
    reading: bool,
    /// Why the connection is over for both threads: closed by the script, or broken.
    over: Option<StreamEnd>,
}

struct Conversation<'a> {
    stream: &'a TcpStream,
    script: &'a Script,
    started: Instant,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Conversation<'_> {
    fn late(&self) -> bool {
        self.started.elapsed() >= self.script.deadline
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("neither thread panics while it holds the lock")
    }

    fn tell(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress());
        self.changed.notify_all();
    }

    /// Why the connection is over for both threads, if it is.
    fn over(&self) -> Option<StreamEnd> {
        self.progress().over.clone()
    }

    /// Ends the connection for the other thread, too; the first reason counts.
    fn finish(&self, why: StreamEnd) {
        self.tell(|progress| {
            progress.over.get_or_insert(why);
        });
    }

    /// Waits until `condition` holds; an error is the event that came first.
    fn await_progress(&self, condition: impl Fn(&Progress) -> bool) -> Result<(), StreamEnd> {
        let mut progress = self.progress();
        loop {
            if let Some(why) = &progress.over {
                return Err(why.clone());
            }
            if condition(&progress) {
                return Ok(());
            }
            if self.late() {
                return Err(StreamEnd::Timeout);
            }
            progress = self.changed.wait_timeout(progress, STEP).expect("no panic under the lock").0;
        }
    }

    /// Sleeps until `when`; fails if the connection is over earlier.
    fn sleep_until(&self, when: Instant) -> Result<(), StreamEnd> {
        self.sleep_while(when, || false)
    }

    fn sleep_while(&self, when: Instant, enough: impl Fn() -> bool) -> Result<(), StreamEnd> {
        loop {
            let rest = when.saturating_duration_since(Instant::now());
            if rest.is_zero() || enough() {
                return Ok(());
            }
            if let Some(why) = self.over() {
                return Err(why);
            }
            if self.late() {
                return Err(StreamEnd::Timeout);
            }
            thread::sleep(rest.min(STEP));
        }
    }

    // ---- writing thread

    fn write(&self) -> Sender {
        let mut sender = Sender::default();
        let sent_all = self.write_all(&mut sender);
        let end = sent_all.and_then(|()| self.end_writing());
        sender.end = end.err().unwrap_or(StreamEnd::Eof);
        sender.ended = Some(Instant::now());
        if sender.end != StreamEnd::Eof {
            self.finish(sender.end.clone());
        }
        sender
    }

    fn write_all(&self, sender: &mut Sender) -> Result<(), StreamEnd> {
        let wants_to_send = self.script.send != Amount::Bytes(0);
        match self.script.start {
            Start::AtOnce => {}
            Start::Received(bytes) => self.await_progress(|p| p.received >= bytes || !p.reading)?,
            Start::Delay(delay) => self.sleep_until(self.started + delay)?,
        }
        if !wants_to_send {
            return Ok(());
        }
        self.await_progress(|p| p.seed.is_some() || !p.reading)?;
        // The stream ended before the seed arrived: no answer is possible.
        let Some(seed) = self.progress().seed else {
            return Ok(());
        };
        let seed = match self.script.role {
            Role::Opener => seed,
            Role::Answerer => pattern::answer_seed(seed),
        };
        let mut random = StdRng::seed_from_u64(seed);
        let mut buffer = Vec::new();
        let mut urgent = self.script.urgent.iter().peekable();
        let mut rests = self.script.rests.iter().peekable();
        let (began, mut rested) = (Instant::now(), Duration::ZERO);
        while let Some(room) = self.room(sender.sent, began)? {
            while let Some(rest) = rests.next_if(|rest| rest.at <= sender.sent) {
                self.sleep_until(Instant::now() + rest.lasting)?;
                rested += rest.lasting;
            }
            let to_rest = rests.peek().map_or(u64::MAX, |rest| rest.at - sender.sent);
            let to_mark = match urgent.peek() {
                Some(at) if **at == sender.sent => 1,
                Some(at) => **at - sender.sent,
                None => u64::MAX,
            };
            let chunk = (self.chunk(&mut random) as u64).min(room).min(to_mark).min(to_rest);
            buffer.resize(chunk as usize, 0);
            pattern::fill(seed, sender.sent, &mut buffer);
            let flags = if urgent.next_if_eq(&&sender.sent).is_some() { libc::MSG_OOB } else { 0 };
            self.write_chunk(&buffer, flags, sender)?;
            if let Some(pace) = self.script.pace {
                self.sleep_until(began + rested + Duration::from_secs_f64(sender.sent as f64 / pace as f64))?;
            }
        }
        Ok(())
    }

    /// Number of bytes that may be sent now, at least one; `None` when all have been sent.
    fn room(&self, sent: u64, began: Instant) -> Result<Option<u64>, StreamEnd> {
        let rest = match self.script.send {
            _ if self.script.until.as_ref().is_some_and(Cue::is_given) => 0,
            Amount::Bytes(bytes) => bytes - sent,
            Amount::Lasting(time) if began.elapsed() < time => u64::MAX,
            Amount::Lasting(_) => 0,
        };
        if rest == 0 {
            return Ok(None);
        }
        let Some(ahead) = self.script.ahead else {
            return Ok(Some(rest));
        };
        self.await_progress(|p| p.received.saturating_add(ahead) > sent || !p.reading)?;
        let allowed = (self.progress().received.saturating_add(ahead)).saturating_sub(sent);
        // The other end has finished, so no more bytes will be allowed.
        Ok((allowed > 0).then_some(allowed.min(rest)))
    }

    fn chunk(&self, random: &mut StdRng) -> usize {
        match self.script.chunks {
            Chunks::Fixed(size) => size.max(1),
            Chunks::Random(low, high) => {
                let (low, high) = (low.max(1), high.max(low).max(1));
                // Logarithmic distribution: both single bytes and large bursts find bugs.
                let exponent = random.random_range((low as f64).ln()..=(high as f64).ln());
                (exponent.exp().round() as usize).clamp(low, high)
            }
        }
    }

    fn write_chunk(&self, mut chunk: &[u8], flags: i32, sender: &mut Sender) -> Result<(), StreamEnd> {
        while !chunk.is_empty() {
            if let Some(why) = self.over() {
                return Err(why);
            }
            match SockRef::from(self.stream).send_with_flags(chunk, flags | libc::MSG_NOSIGNAL) {
                Ok(count) => {
                    if flags & libc::MSG_OOB != 0 {
                        sender.urgent.push(sender.sent);
                    }
                    sender.digest.update(&chunk[..count]);
                    sender.sent += count as u64;
                    chunk = &chunk[count..];
                }
                Err(error) if is_step(&error) && self.late() => return Err(StreamEnd::Timeout),
                Err(error) if is_step(&error) => {}
                Err(error) => return Err(StreamEnd::from_error(&error)),
            }
        }
        Ok(())
    }

    fn end_writing(&self) -> Result<(), StreamEnd> {
        match self.script.ending {
            Ending::HalfClose => self.stream.shutdown(Shutdown::Write).map_err(|error| match error.kind() {
                // No longer connected: the other end has reset the connection.
                ErrorKind::NotConnected => StreamEnd::Reset,
                _ => StreamEnd::from_error(&error),
            }),
            Ending::Hold => self.await_progress(|progress| !progress.reading),
            Ending::Close => {
                self.end_both();
                Ok(())
            }
            Ending::Reset => self.reset(),
            Ending::ResetReceived(bytes) => {
                self.await_progress(|progress| progress.received >= bytes || !progress.reading)?;
                self.reset()
            }
        }
    }

    fn reset(&self) -> Result<(), StreamEnd> {
        let lingering = SockRef::from(self.stream).set_linger(Some(Duration::ZERO));
        self.end_both();
        lingering.map_err(|error| StreamEnd::from_error(&error))
    }

    /// Stops the reader, so that the socket can be closed. Shutting
    /// down the receiving half wakes the reader and sends nothing.
    fn end_both(&self) {
        self.finish(StreamEnd::Own);
        let _ = self.stream.shutdown(Shutdown::Read);
    }

    // ---- reading thread

    fn read(&self) -> Receiver {
        let mut receiver = Receiver::default();
        receiver.end = self.read_all(&mut receiver);
        receiver.ended = Some(Instant::now());
        self.tell(|progress| progress.reading = false);
        if receiver.end != StreamEnd::Eof {
            self.finish(receiver.end.clone());
        }
        receiver
    }

    fn read_all(&self, receiver: &mut Receiver) -> StreamEnd {
        if let Some(cue) = &self.script.read_after
            && let Err(how) = self.sleep_while(self.started + self.script.deadline, || cue.is_given())
        {
            return how;
        }
        let mut buffer = vec![0; self.script.read_size.max(1)];
        let mut pauses = self.script.pauses.iter().peekable();
        let mut last = None;
        let mut first_word = Vec::new();
        loop {
            while let Some(pause) = pauses.next_if(|pause| pause.at <= receiver.received) {
                if let Err(how) = self.sleep_until(Instant::now() + pause.lasting) {
                    return how;
                }
                last = None;
            }
            let stops = [self.script.stop_reading_at, pauses.peek().map(|pause| pause.at)];
            let stop = stops.into_iter().flatten().min().unwrap_or(u64::MAX);
            let room = (stop - receiver.received).min(buffer.len() as u64) as usize;
            if room == 0 {
                return self.stop_reading();
            }
            let read = match self.script.marks {
                None => { self.stream }.read(&mut buffer[..room]),
                Some(how) => self.read_to_mark(how, &mut buffer[..room], receiver),
            };
            match read {
                Ok(0) => return self.over().unwrap_or(StreamEnd::Eof),
                Ok(count) => self.take(&buffer[..count], receiver, &mut last, &mut first_word),
                Err(error) if is_step(&error) => match self.over() {
                    Some(why) => return why,
                    None if self.late() => return StreamEnd::Timeout,
                    None => {}
                },
                Err(error) => return self.over().unwrap_or_else(|| StreamEnd::from_error(&error)),
            }
        }
    }

    /// Reads up to an urgent byte, or that byte alone, and records its position.
    fn read_to_mark(&self, how: Marks, buffer: &mut [u8], receiver: &mut Receiver) -> io::Result<usize> {
        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI)];
        poll(&mut fds, PollTimeout::try_from(STEP).expect("short"))?;
        let there = fds[0].revents().unwrap_or(PollFlags::empty());
        if there.contains(PollFlags::POLLPRI) && how == Marks::Apart {
            let mut byte = [0];
            recv(self.stream.as_raw_fd(), &mut byte, MsgFlags::MSG_OOB)?;
            receiver.apart = Some(byte[0]);
        }
        if there.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let urgent = is_urgent(self.stream)?;
        let room = match (how, urgent, receiver.apart) {
            (Marks::Inline, true, _) => 1,
            (Marks::Apart, true, Some(byte)) => {
                receiver.apart = None;
                receiver.marks.push(receiver.received);
                buffer[0] = byte;
                return Ok(1);
            }
            _ => buffer.len(),
        };
        let count = { self.stream }.read(&mut buffer[..room])?;
        if how == Marks::Inline && urgent && count == 1 {
            receiver.marks.push(receiver.received);
        }
        Ok(count)
    }

    fn take(&self, bytes: &[u8], receiver: &mut Receiver, last: &mut Option<Instant>, first_word: &mut Vec<u8>) {
        let now = Instant::now();
        receiver.first_byte.get_or_insert(now - self.started);
        let gap = last.replace(now).map_or(Duration::ZERO, |last| now - last);
        if gap > receiver.longest_gap {
            (receiver.longest_gap, receiver.longest_gap_at) = (gap, receiver.received);
        }
        receiver.digest.update(bytes);
        let seed = self.learn(bytes, first_word);
        if let (Some(seed), None) = (seed, receiver.mismatch) {
            let seed = match self.script.role {
                Role::Opener => pattern::answer_seed(seed),
                Role::Answerer => seed,
            };
            receiver.mismatch = pattern::check(seed, receiver.received, bytes).err();
        }
        receiver.received += bytes.len() as u64;
        self.tell(|progress| progress.received = receiver.received);
    }

    /// Learns the seed from the first word, if the script has none. Only an
    /// answerer can do this: the opener's stream begins with the seed itself.
    fn learn(&self, bytes: &[u8], first_word: &mut Vec<u8>) -> Option<u64> {
        if let Some(seed) = self.progress().seed {
            return Some(seed);
        }
        let missing = 8 - first_word.len();
        first_word.extend(bytes.iter().take(missing));
        let seed = u64::from_le_bytes(first_word.as_slice().try_into().ok()?);
        self.tell(|progress| progress.seed = Some(seed));
        Some(seed)
    }

    /// Stops reading, so that the window closes. The connection lasts until the writer has ended it or the deadline expires.
    fn stop_reading(&self) -> StreamEnd {
        loop {
            if let Some(why) = self.over() {
                return why;
            }
            if self.late() {
                return StreamEnd::Timeout;
            }
            thread::sleep(STEP);
        }
    }

    // ---- both threads

    fn report(&self, sender: Sender, receiver: Receiver) -> Report {
        let mut end = receiver.end;
        // See SAME_EVENT: the writer got the error, so the reader saw only an end of stream.
        let together = sender.ended.zip(receiver.ended).is_some_and(|(a, b)| a.max(b) - a.min(b) < SAME_EVENT);
        if end == StreamEnd::Eof && sender.end == StreamEnd::Reset && together {
            end = StreamEnd::Reset;
        }
        Report {
            seed: self.progress().seed,
            sent: sender.sent,
            urgent: sender.urgent,
            received: receiver.received,
            marks: receiver.marks,
            sha256_sent: hexadecimal(sender.digest),
            sha256_received: hexadecimal(receiver.digest),
            mismatch: receiver.mismatch,
            first_byte: receiver.first_byte,
            longest_gap: receiver.longest_gap,
            longest_gap_at: receiver.longest_gap_at,
            retransmits: getsockopt(&self.stream.as_fd(), TcpInfo).ok().map(|info| info[25]),
            end,
            send_end: sender.end,
            duration: self.started.elapsed(),
            local: self.local,
            remote: self.remote,
        }
    }
}

/// Whether a call failed only because [`STEP`] had expired.
fn is_step(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn hexadecimal(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
