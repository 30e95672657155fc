//! A small, strict TCP (RFC 9293) without handshake: it rejects every segment that a host is allowed to reject.
//!
//! Urgent data works as in Linux: of several marks that a receiver has not read up to, it knows only the last. Not
//! implemented: path MTU discovery, keep-alive, simultaneous close and open. Congestion control is slow start and additive
//! increase; loss recovery is NewReno with or without SACK (RFC 6582, and along the lines of RFC 6675).

mod input;
mod leap;

pub use super::segment::{ACK, FIN, PSH, Packet, RST, URG};
use super::style::Style;
use std::collections::VecDeque;

/// Time in microseconds.
pub type Time = u64;
pub const MS: Time = 1000;

/// After this time without a segment, an older TSval is no longer rejected (RFC 7323, 5.5; Linux's TCP_PAWS_WRAP).
const PAWS_LASTS: Time = 2_147_000_000;

/// No host waits longer until it retransmits (RFC 6298, 2.5).
const LONGEST_RTO: Time = 60_000 * MS;

pub fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}
pub fn after(a: u32, b: u32) -> bool {
    before(b, a)
}
pub fn earlier(a: u32, b: u32) -> u32 {
    if before(a, b) { a } else { b }
}
pub fn later(a: u32, b: u32) -> u32 {
    if after(a, b) { a } else { b }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ignored {
    Paws,
    NoTimestamps,
    Sequence,
    NoAck,
    AckTooNew,
    AckTooOld,
}

pub struct Tcp {
    pub style: Style,
    /// Window scale of the other side.
    peer_wscale: u8,
    ts_base: u32,
    /// Total time slept: clocks run on during sleep, timers do not.
    pub slept: Time,
    // sending
    una: u32,
    nxt: u32,
    max: u32,
    wnd: u32,
    max_wnd: u32,
    wl1: u32,
    wl2: u32,
    buffer: VecDeque<u8>,
    /// The end of the urgent data.
    urgent_out: Option<u32>,
    /// `max` before the segments that were returned last.
    counted: u32,
    /// Until this time, or an acknowledgement, new data waits: the device has refused some.
    refused_until: Option<Time>,
    closing: bool,
    fin_sent: bool,
    pub fin_acked: bool,
    cwnd: u32,
    ssthresh: u32,
    dup: u32,
    recover: Option<u32>,
    rtx: u32,
    sacked: Vec<(u32, u32)>,
    high_sacked: u32,
    srtt: Time,
    rttvar: Time,
    rto: Time,
    backoff: u32,
    timed: Option<(u32, Time)>,
    rto_at: Option<Time>,
    persist_at: Option<Time>,
    // receiving
    rcv: u32,
    edge: u32,
    last_ack: u32,
    ready: VecDeque<u8>,
    ooo: Vec<(u32, Vec<u8>)>,
    latest: Option<u32>,
    /// The urgent byte that has not been read yet.
    urgent_in: Option<u32>,
    fin_at: Option<u32>,
    pub eof: bool,
    ts_recent: u32,
    ts_recent_at: Time,
    unacked: u32,
    delack_at: Option<Time>,
    ack_now: bool,
    pub reset: bool,
    /// It was reset in TIME-WAIT: the process is not told.
    pub reset_late: bool,
    /// Permanently silent: closed under TCP_REPAIR.
    pub dead: bool,
    /// The process has exited: nobody reads from this socket any more.
    orphan: bool,
    /// Until this time the close is in progress, and segments are ignored.
    pub closed_at: Time,
    /// When an orphan ends, as by Linux's tcp_fin_timeout.
    ends_at: Option<Time>,
    out: Vec<Packet>,
    pub rtos: u32,
    pub fast: u32,
    pub ignored: Vec<(Ignored, u32)>,
    challenge_at: Time,
}

impl Tcp {
    pub fn new(style: Style, peer: &Style, iss: u32, irs: u32, ts_base: u32, ts_recent: u32) -> Tcp {
        let one = iss.wrapping_add(1);
        let rcv = irs.wrapping_add(1);
        let first = peer.receive.min(65535);
        let mine = style.receive.min(65535);
        Tcp {
            style,
            peer_wscale: peer.wscale,
            ts_base,
            slept: 0,
            una: one,
            nxt: one,
            max: one,
            wnd: first,
            max_wnd: first,
            wl1: rcv,
            wl2: one,
            buffer: VecDeque::new(),
            urgent_out: None,
            counted: one,
            refused_until: None,
            closing: false,
            fin_sent: false,
            fin_acked: false,
            cwnd: 10 * style.mss.min(peer.mss),
            ssthresh: u32::MAX,
            dup: 0,
            recover: None,
            rtx: one,
            sacked: Vec::new(),
            high_sacked: one,
            srtt: 0,
            rttvar: 0,
            rto: 1000 * MS,
            backoff: 0,
            timed: None,
            rto_at: None,
            persist_at: None,
            rcv,
            edge: rcv.wrapping_add(mine),
            last_ack: rcv,
            ready: VecDeque::new(),
            ooo: Vec::new(),
            latest: None,
            urgent_in: None,
            fin_at: None,
            eof: false,
            ts_recent,
            ts_recent_at: 0,
            unacked: 0,
            delack_at: None,
            ack_now: false,
            reset: false,
            reset_late: false,
            dead: false,
            orphan: false,
            closed_at: 0,
            ends_at: None,
            out: Vec::new(),
            rtos: 0,
            fast: 0,
            ignored: Vec::new(),
            challenge_at: 0,
        }
    }

    // ---- application side

    pub fn room(&self) -> usize {
        if self.closing { 0 } else { self.style.send.saturating_sub(self.buffer.len()) }
    }

    pub fn write(&mut self, data: &[u8]) {
        assert!(!self.closing);
        self.buffer.extend(data);
    }

    /// Marks the last byte written as urgent.
    pub fn mark(&mut self) {
        self.urgent_out = Some(self.una.wrapping_add(self.buffer.len() as u32));
    }

    pub fn close(&mut self) {
        self.closing = true;
    }

    /// The process exits without closing the socket. As in Linux, unread data cause a reset (RFC 9293, 3.10.4; RFC 2525,
    /// 2.17); otherwise the socket sends its remaining data and a FIN.
    pub fn abandon(&mut self, now: Time) {
        if self.dead || self.reset {
            return;
        }
        self.orphan = true;
        self.closing = true;
        if !self.ready.is_empty() {
            self.abort(now);
        }
    }

    /// Whether more is in flight than the window allows, because the window has shrunk.
    pub fn is_beyond(&self) -> bool {
        self.max.wrapping_sub(self.una) > self.wnd
    }

    /// Discards all data and resets the other end (RFC 9293, 3.10.5), within its window.
    pub fn abort(&mut self, now: Time) {
        let room = self.wnd.min(self.max.wrapping_sub(self.una));
        self.push(now, self.una.wrapping_add(room), Vec::new(), RST);
        (self.orphan, self.dead) = (true, true);
    }

    /// Closes the socket with a reset. As in Linux, none is sent once both ends were. Returns whether the other end is told, or needs not
    /// be.
    pub fn disconnect(&mut self, now: Time) -> bool {
        if !self.eof || !self.fin_sent {
            self.abort(now);
            return true;
        }
        (self.orphan, self.dead) = (true, true);
        self.fin_acked
    }

    /// Sends a reset with this number, in place of a socket that is closed.
    pub fn reset_from(&mut self, now: Time, seq: u32) {
        self.push(now, seq, Vec::new(), RST);
    }

    /// Whether the socket no longer exists, so that the kernel answers segments with a reset.
    pub fn is_gone(&self) -> bool {
        self.dead || self.reset || (self.orphan && self.eof && self.fin_acked)
    }

    pub fn unread(&self) -> usize {
        self.ready.len()
    }

    pub fn at_eof(&self) -> bool {
        self.ready.is_empty() && self.eof
    }

    /// Whether a read finds the end of the stream: that of a connection that was reset ends as well, once the process has been
    /// told of the reset.
    pub fn at_end(&self) -> bool {
        self.at_eof() || (self.reset && self.ready.is_empty())
    }

    /// Number of bytes written that the other end has not acknowledged.
    pub fn held(&self) -> u32 {
        if self.is_gone() { 0 } else { self.buffer.len() as u32 }
    }

    /// Number of bytes before the urgent one.
    fn to_mark(&self) -> Option<usize> {
        let read = self.rcv.wrapping_sub(self.ready.len() as u32 + u32::from(self.eof));
        self.urgent_in.map(|at| at.wrapping_sub(read) as usize)
    }

    /// Whether the next byte is urgent.
    pub fn at_mark(&self) -> bool {
        self.to_mark() == Some(0) && !self.ready.is_empty()
    }

    /// Reads up to a mark; at a mark, reads only the urgent byte.
    pub fn read(&mut self, n: usize, to: &mut Vec<u8>) -> usize {
        let n = n.min(self.ready.len());
        let n = match self.to_mark() {
            Some(0) if n > 0 => {
                self.urgent_in = None;
                1
            }
            Some(before) => n.min(before),
            None => n,
        };
        to.extend(self.ready.drain(..n));
        n
    }

    /// The first unacknowledged number, the one after the last sent, and the next expected.
    pub fn numbers(&self) -> (u32, u32, u32) {
        (self.una, self.max, self.rcv)
    }

    /// The TSval of the SYN. `None`: without timestamps, or so long ago that later ones do not look later.
    pub fn first_tsval(&self) -> Option<u32> {
        (self.style.ts && self.slept == 0).then_some(self.ts_base)
    }

    /// The right edge of the window that was announced.
    pub fn edge(&self) -> u32 {
        self.edge
    }

    /// Whether nothing is in flight in either direction.
    pub fn is_at_rest(&self) -> bool {
        self.una == self.max && self.delack_at.is_none()
    }

    pub fn brief(&self) -> String {
        format!(
            "una {} nxt {} max {} wnd {} cwnd {} rto {:?} rcv {} edge {} unread {} ooo {} buf {} closing {} fin_acked {} eof {}",
            self.una,
            self.nxt,
            self.max,
            self.wnd,
            self.cwnd,
            self.rto_at,
            self.rcv,
            self.edge,
            self.ready.len(),
            self.ooo.len(),
            self.buffer.len(),
            self.closing,
            self.fin_acked,
            self.eof
        )
    }

    /// Whether all data sent have been acknowledged.
    pub fn is_quiet(&self) -> bool {
        self.una == self.max && !before(self.una, self.goal())
    }

    // ---- timers and output

    pub fn wakes(&self) -> Option<Time> {
        if self.dead || self.reset {
            return None;
        }
        [self.rto_at, self.persist_at, self.delack_at, self.ends_at, self.refused_until].into_iter().flatten().min()
    }

    fn tsval(&self, now: Time) -> u32 {
        self.ts_base.wrapping_add(((now + self.slept) / self.style.tick) as u32)
    }

    /// Runs timers, and returns the packets that may be sent now.
    pub fn poll(&mut self, now: Time) -> Vec<Packet> {
        if self.dead || self.reset {
            // only the reset that ended the connection may still be sent
            self.out.retain(|p| self.orphan && p.flags & RST != 0);
            return std::mem::take(&mut self.out);
        }
        if self.orphan && self.fin_acked {
            let end = *self.ends_at.get_or_insert(now + 60_000 * MS);
            self.dead |= now >= end;
        }
        self.counted = self.max;
        self.refused_until = self.refused_until.filter(|until| *until > now);
        if self.delack_at.is_some_and(|t| t <= now) {
            self.ack_now = true;
        }
        if self.rto_at.is_some_and(|t| t <= now) {
            self.timeout(now);
        }
        if self.persist_at.is_some_and(|t| t <= now) {
            self.probe(now);
        }
        self.send(now);
        if self.updates_window() {
            self.ack_now = true;
        }
        if self.ack_now {
            // the byte of a probe is beyond the window, where a receiver
            // does not accept an acknowledgement either (BSD's tcp_output)
            self.push(now, if self.persist_at.is_some() { self.nxt } else { self.max }, Vec::new(), 0);
        }
        std::mem::take(&mut self.out)
    }

    fn timeout(&mut self, now: Time) {
        self.rtos += 1;
        // like Linux's tcp_orphan_retries
        if self.orphan && self.backoff == 8 {
            self.dead = true;
            return;
        }
        let flight = self.max.wrapping_sub(self.una);
        self.ssthresh = (flight / 2).max(2 * self.mss());
        self.cwnd = self.mss();
        self.recover = Some(self.max);
        self.nxt = self.una;
        self.rtx = self.una;
        self.dup = 0;
        self.timed = None;
        self.backoff = (self.backoff + 1).min(8);
        self.rto_at = Some(now + (self.rto << self.backoff).min(LONGEST_RTO));
        if self.wnd < self.mss() {
            // the window has shrunk: retransmit nevertheless (RFC 9293, 3.8.6)
            let n = (self.buffer.len() as u32).min(self.mss()).min(self.max.wrapping_sub(self.una));
            let fin = n < self.max.wrapping_sub(self.una).min(self.mss()) && self.fin_sent;
            let data: Vec<u8> = self.buffer.range(..n as usize).copied().collect();
            self.push(now, self.una, data, if fin { FIN } else { PSH });
            self.nxt = self.una.wrapping_add(n + u32::from(fin));
        }
        self.sacked.clear(); // the receiver may have reneged (RFC 2018, 8)
    }

    fn probe(&mut self, now: Time) {
        if self.style.probe_data && !self.buffer.is_empty() && self.una == self.max {
            let b = self.buffer[0];
            self.push(now, self.una, vec![b], 0);
            self.max = self.una.wrapping_add(1);
            self.nxt = self.una;
        } else if self.style.probe_data && !self.buffer.is_empty() {
            let b = self.buffer[0];
            self.push(now, self.una, vec![b], 0);
        } else {
            self.push(now, self.una.wrapping_sub(1), Vec::new(), 0);
        }
        self.backoff = (self.backoff + 1).min(8);
        self.persist_at = Some(now + (self.rto << self.backoff).min(LONGEST_RTO));
    }

    /// Takes back a segment that [`Tcp::poll`] has returned last: the queue of the device is full. As in Linux, its data counts as
    /// unsent, if it is new.
    pub fn refuse(&mut self, now: Time, p: &Packet) {
        if !after(p.end(), self.counted) {
            return;
        }
        let sent = later(p.seq, self.counted);
        (self.max, self.nxt) = (earlier(self.max, sent), earlier(self.nxt, sent));
        self.fin_sent &= p.flags & FIN == 0;
        self.timed = self.timed.filter(|(end, _)| !after(*end, self.max));
        self.rto_at = self.rto_at.filter(|_| self.una != self.max);
        self.refused_until = Some(now + self.rto.max(200 * MS));
    }

    /// Leaves TCP_REPAIR with a window probe.
    pub fn ask(&mut self, now: Time) {
        self.push(now, self.una.wrapping_sub(1), Vec::new(), 0);
    }

    fn mss(&self) -> u32 {
        self.style.mss
    }

    /// The sequence number after all data to be sent.
    fn goal(&self) -> u32 {
        let fin = u32::from(self.closing && !self.fin_acked);
        self.una.wrapping_add(self.buffer.len() as u32).wrapping_add(fin)
    }

    fn send(&mut self, now: Time) {
        loop {
            let goal = self.goal();
            let data_end = self.una.wrapping_add(self.buffer.len() as u32);
            // data that the other side already has
            if let Some(&(_, e)) = self.sacked.iter().find(|(s, e)| !before(self.nxt, *s) && before(self.nxt, *e)) {
                self.nxt = e;
                continue;
            }
            let in_flight = self.nxt.wrapping_sub(self.una);
            let window = self.wnd.min(self.cwnd + self.dup * self.mss());
            if !before(self.nxt, goal) || (self.nxt == self.max && self.refused_until.is_some()) {
                break;
            }
            let left = goal.wrapping_sub(self.nxt);
            let room = window.saturating_sub(in_flight);
            let mut n = self.mss().min(left).min(room);
            if n == 0 {
                break;
            }
            if let Some(&(s, _)) = self.sacked.iter().find(|(s, _)| after(*s, self.nxt)) {
                n = n.min(s.wrapping_sub(self.nxt));
            }
            // silly window avoidance (RFC 9293, 3.8.6.2.1)
            let again = before(self.nxt, self.max);
            if n < self.mss() && n < left && n < self.max_wnd / 2 && !again {
                if in_flight == 0 && self.persist_at.is_none() && self.rto_at.is_none() {
                    self.persist_at = Some(now + 200 * MS);
                }
                break;
            }
            let have = data_end.wrapping_sub(self.nxt).min(n);
            let have = if after(self.nxt, data_end) { 0 } else { have };
            let fin = n > have;
            let at = self.nxt.wrapping_sub(self.una) as usize;
            let data: Vec<u8> = self.buffer.range(at..at + have as usize).copied().collect();
            if !again && self.timed.is_none() {
                self.timed = Some((self.nxt.wrapping_add(n), now));
            }
            let seq = self.nxt;
            self.push(now, seq, data, if fin { FIN } else { PSH });
            self.fin_sent |= fin;
            self.nxt = self.nxt.wrapping_add(n);
            self.max = later(self.max, self.nxt);
            if self.rto_at.is_none() {
                self.rto_at = Some(now + self.rto);
            }
        }
        // closed window, nothing in flight
        if self.una == self.max
            && before(self.una, self.goal())
            && self.wnd < self.mss().min(self.goal().wrapping_sub(self.una))
        {
            if self.persist_at.is_none() && self.wnd == 0 {
                self.persist_at = Some(now + self.rto);
            }
        } else if self.wnd > 0 && self.persist_at.is_some() && self.una != self.max && self.rto_at.is_some() {
            self.persist_at = None;
        }
        // a probe byte beyond a closed window
        if self.una != self.max && self.rto_at.is_none() && self.persist_at.is_none() {
            self.rto_at = Some(now + self.rto);
        }
    }

    fn window(&self) -> u32 {
        let free = self.style.receive.saturating_sub(self.ready.len() as u32);
        free >> self.style.wscale << self.style.wscale
    }

    fn updates_window(&self) -> bool {
        let offered = self.edge.wrapping_sub(self.rcv);
        let free = self.window().min(65535 << self.style.wscale);
        !self.eof && free >= offered + (2 * self.mss()).min(self.style.receive / 2).max(1)
    }

    fn push(&mut self, now: Time, seq: u32, data: Vec<u8>, flags: u8) {
        // the right edge never moves back (RFC 9293, 3.8.6.2.2)
        let right = later(self.edge, self.rcv.wrapping_add(self.window().min(65535 << self.style.wscale)));
        let win = (right.wrapping_sub(self.rcv) >> self.style.wscale).min(65535);
        self.edge = later(self.edge, self.rcv.wrapping_add(win << self.style.wscale));
        let mut sack = Vec::new();
        if self.style.sack && !self.ooo.is_empty() {
            let mut blocks = self.blocks();
            if let Some(i) = self.latest.and_then(|l| blocks.iter().position(|(s, e)| !before(l, *s) && before(l, *e)))
            {
                let b = blocks.remove(i);
                blocks.insert(0, b);
            }
            blocks.truncate(3);
            sack = blocks;
        }
        let urgent = self.urgent_out.map(|end| end.wrapping_sub(seq)).filter(|n| (1..=0xffff).contains(n));
        self.out.push(Packet {
            seq,
            ack: self.rcv,
            flags: flags | ACK | if urgent.is_some() { URG } else { 0 },
            win: win as u16,
            urg: urgent.unwrap_or(0) as u16,
            ts: self.style.ts.then(|| (self.tsval(now), self.ts_recent)),
            sack,
            data,
            ..Packet::default()
        });
        self.last_ack = self.rcv;
        self.unacked = 0;
        self.delack_at = None;
        self.ack_now = false;
    }

    fn blocks(&self) -> Vec<(u32, u32)> {
        let mut v: Vec<(u32, u32)> = Vec::new();
        for (s, d) in &self.ooo {
            let e = s.wrapping_add(d.len() as u32);
            match v.last_mut() {
                Some(l) if !after(*s, l.1) => l.1 = later(l.1, e),
                _ => v.push((*s, e)),
            }
        }
        v
    }
}
