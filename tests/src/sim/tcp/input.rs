//! Processing of received segments (RFC 9293, 3.10.7.4).

use super::{ACK, FIN, Ignored, LONGEST_RTO, PAWS_LASTS, PSH, Packet, RST, Tcp, Time, URG, after, before, later};

impl Tcp {
    fn ignore(&mut self, why: Ignored) {
        match self.ignored.iter_mut().find(|i| i.0 == why) {
            Some(i) => i.1 += 1,
            None => self.ignored.push((why, 1)),
        }
    }

    /// Answers an unacceptable segment with an ACK, rate limited as in all implementations.
    fn challenge(&mut self, now: Time) {
        if now >= self.challenge_at {
            self.challenge_at = now + 500;
            self.ack_now = true;
        }
    }

    /// Processes a segment. Returns why it was ignored, if it was.
    pub fn input(&mut self, now: Time, p: &Packet) -> Option<Ignored> {
        if self.dead || self.reset {
            return None;
        }
        if self.style.ts && p.ts.is_none() && p.flags & RST == 0 && !self.style.lenient {
            self.ignore(Ignored::NoTimestamps);
            return Some(Ignored::NoTimestamps); // silently (RFC 7323, 3.2)
        }
        if self.style.ts
            && let Some((val, _)) = p.ts
            && before(val, self.ts_recent)
            && now + self.slept < self.ts_recent_at + PAWS_LASTS
            && p.flags & RST == 0
        {
            self.ignore(Ignored::Paws);
            self.challenge(now);
            return Some(Ignored::Paws);
        }
        let (seq, end) = (p.seq, p.end());
        let wnd = self.edge.wrapping_sub(self.rcv);
        let low = if self.style.strict_low { self.rcv } else { self.last_ack };
        let acceptable = if end == seq {
            // up to and including the edge, as in all implementations; or, by the letter, below it
            let edge = self.rcv.wrapping_add(wnd);
            !before(seq, low) && (before(seq, edge) || (seq == edge && (wnd == 0 || !self.style.strict_edge)))
        } else {
            after(end, self.rcv) && before(seq, self.rcv.wrapping_add(wnd.max(u32::from(wnd == 0 && seq == self.rcv))))
        };
        if !acceptable {
            self.ignore(Ignored::Sequence);
            if p.flags & RST == 0 {
                self.challenge(now);
                // duplicates and probes are answered without rate limit
                if end != seq || before(seq, self.rcv) {
                    self.ack_now = true;
                }
            }
            return Some(Ignored::Sequence);
        }
        if p.flags & RST != 0 {
            if seq == self.rcv && self.style.lenient && self.eof && self.fin_acked {
                (self.reset_late, self.dead) = (true, true);
            } else if seq == self.rcv {
                self.reset = true;
            } else {
                self.challenge(now);
            }
            return None;
        }
        if p.flags & ACK == 0 {
            self.ignore(Ignored::NoAck);
            return Some(Ignored::NoAck);
        }
        if after(p.ack, self.max) {
            self.ignore(Ignored::AckTooNew);
            self.challenge(now);
            return Some(Ignored::AckTooNew);
        }
        if before(p.ack, self.una.wrapping_sub(self.max_wnd)) {
            self.ignore(Ignored::AckTooOld);
            self.challenge(now);
            return Some(Ignored::AckTooOld);
        }
        if self.style.ts
            && let Some((val, _)) = p.ts
            && !after(seq, self.last_ack)
        {
            self.ts_recent = val;
            self.ts_recent_at = now + self.slept;
        }
        self.acknowledged(now, p);
        if p.flags & URG != 0 {
            // data already received does not become urgent afterwards
            let at = seq.wrapping_add(u32::from(p.urg)).wrapping_sub(1);
            if !before(at, self.rcv) && self.urgent_in.is_none_or(|known| after(at, known)) {
                self.urgent_in = Some(at);
            }
        }
        if self.orphan && !self.eof && after(end.wrapping_sub(u32::from(p.flags & FIN != 0)), self.rcv) {
            self.abort(now); // data that nobody will read
        } else if end != seq {
            self.data(now, p, wnd);
        }
        None
    }

    fn acknowledged(&mut self, now: Time, p: &Packet) {
        let win = u32::from(p.win) << self.peer_wscale;
        let mut window_changed = false;
        if before(p.ack, self.una) {
            return;
        }
        let newer = before(self.wl1, p.seq) || (self.wl1 == p.seq && !after(self.wl2, p.ack));
        let linux = after(p.ack, self.una) || before(self.wl1, p.seq) || (self.wl1 == p.seq && win > self.wnd);
        if if self.style.strict_window { newer } else { linux } {
            window_changed = win != self.wnd;
            let opened = self.wnd == 0 && win > 0;
            self.wnd = win;
            self.max_wnd = self.max_wnd.max(win);
            self.wl1 = p.seq;
            self.wl2 = p.ack;
            if opened {
                self.backoff = 0;
                self.persist_at = None;
                if self.una == self.max || self.nxt != self.max || self.style.probe_data {
                    // a byte sent as a probe is sent again as data
                    self.nxt = if self.persist_at.is_none() && self.rto_at.is_none() { self.una } else { self.nxt };
                }
            } else if win == 0 && self.persist_at.is_none() && self.una == self.max && before(self.una, self.goal()) {
                self.persist_at = Some(now + self.rto);
            }
        }
        let mut new_sack = false;
        let sane = |&(s, e): &(u32, u32)| after(e, s) && !after(e, self.max);
        if self.style.sack && (!self.style.strict_sack || p.sack.iter().all(sane)) {
            for &(s, e) in &p.sack {
                if !before(s, self.una) && after(e, s) && !after(e, self.max) {
                    let known = self.sacked.iter().any(|&(a, b)| !before(s, a) && !after(e, b));
                    if !known {
                        new_sack = true;
                        self.sacked.push((s, e));
                        self.high_sacked = later(self.high_sacked, e);
                    }
                }
            }
            self.sacked.sort_by_key(|x| x.0.wrapping_sub(self.una));
        }
        if after(p.ack, self.una) {
            self.advanced(now, p.ack);
        } else if self.una != self.max && p.data.is_empty() && p.flags & FIN == 0 {
            let counts = if self.style.sack { new_sack } else { !window_changed };
            if counts && self.wnd > 0 {
                self.dup += 1;
                if self.dup == 3 && self.recover.is_none_or(|r| !before(self.una, r)) {
                    self.fast += 1;
                    let flight = self.max.wrapping_sub(self.una);
                    self.ssthresh = (flight / 2).max(2 * self.mss());
                    self.cwnd = self.ssthresh;
                    self.recover = Some(self.max);
                    self.timed = None;
                    self.retransmit_hole(now, self.una);
                } else if self.dup > 3 && self.style.sack && self.recover.is_some() {
                    self.retransmit_hole(now, self.rtx);
                }
            }
        }
        if self.style.sack && !p.data.is_empty() && new_sack {
            self.dup += 1;
        }
    }

    /// Retransmits the first segment from `from` on that is neither acknowledged nor beyond the data sent.
    fn retransmit_hole(&mut self, now: Time, from: u32) {
        let mut at = later(from, self.una);
        while let Some(&(_, e)) = self.sacked.iter().find(|(s, e)| !before(at, *s) && before(at, *e)) {
            at = e;
        }
        if self.style.sack && !self.sacked.is_empty() && !before(at, self.high_sacked) && at != self.una {
            return;
        }
        if !before(at, self.max) || !before(at, self.nxt) {
            return;
        }
        let data_end = self.una.wrapping_add(self.buffer.len() as u32);
        let mut n = self.mss().min(self.max.wrapping_sub(at));
        if let Some(&(s, _)) = self.sacked.iter().find(|(s, _)| after(*s, at)) {
            n = n.min(s.wrapping_sub(at));
        }
        let have = if before(at, data_end) { data_end.wrapping_sub(at).min(n) } else { 0 };
        let fin = n > have && self.fin_sent;
        let i = at.wrapping_sub(self.una) as usize;
        let data: Vec<u8> = self.buffer.range(i..i + have as usize).copied().collect();
        let len = have + u32::from(fin);
        if len == 0 {
            return;
        }
        self.push(now, at, data, if fin { FIN } else { PSH });
        self.rtx = at.wrapping_add(len);
    }

    fn advanced(&mut self, now: Time, ack: u32) {
        let n = ack.wrapping_sub(self.una);
        let bytes = (n as usize).min(self.buffer.len());
        self.buffer.drain(..bytes);
        if n as usize > bytes {
            assert!(self.fin_sent && n as usize == bytes + 1, "acknowledges what was not sent");
            self.fin_acked = true;
        }
        self.una = ack;
        self.refused_until = None;
        self.urgent_out = self.urgent_out.filter(|end| after(*end, ack));
        self.nxt = later(self.nxt, ack);
        self.sacked.retain(|&(_, e)| after(e, ack));
        self.high_sacked = later(self.high_sacked, ack);
        if let Some((end, at)) = self.timed
            && !before(ack, end)
        {
            let r = (now - at).max(1);
            if self.srtt == 0 {
                self.srtt = r;
                self.rttvar = r / 2;
            } else {
                self.rttvar = (3 * self.rttvar + self.srtt.abs_diff(r)) / 4;
                self.srtt = (7 * self.srtt + r) / 8;
            }
            self.rto = (self.srtt + 4 * self.rttvar).clamp(self.style.rto_min, LONGEST_RTO);
            self.timed = None;
        }
        self.backoff = 0;
        self.persist_at = None;
        match self.recover {
            Some(r) if before(ack, r) => {
                if self.nxt == self.max {
                    self.dup = self.dup.saturating_sub(n / self.mss());
                    // without SACK a partial acknowledgement names the next hole (RFC 6582)
                    self.retransmit_hole(now, if self.style.sack { later(ack, self.rtx) } else { ack });
                }
                self.cwnd += n.min(self.mss());
            }
            Some(_) => {
                self.recover = None;
                self.dup = 0;
                self.cwnd = self.cwnd.max(2 * self.mss());
            }
            None => {
                self.dup = 0;
                if self.cwnd < self.ssthresh {
                    self.cwnd += n.min(2 * self.mss());
                } else {
                    self.cwnd += (self.mss() * self.mss() / self.cwnd).max(1);
                }
                self.cwnd = self.cwnd.min(1 << 24);
            }
        }
        self.rto_at = (self.una != self.max).then_some(now + self.rto);
    }

    fn data(&mut self, now: Time, p: &Packet, wnd: u32) {
        let limit = self.rcv.wrapping_add(wnd);
        let mut data = &p.data[..];
        let mut seq = p.seq;
        let mut fin = p.flags & FIN != 0;
        if before(seq, self.rcv) {
            let cut = self.rcv.wrapping_sub(seq) as usize;
            data = &data[cut.min(data.len())..];
            seq = self.rcv;
            self.ack_now = true;
        }
        let end = seq.wrapping_add(data.len() as u32);
        if after(end, limit) {
            let keep = limit.wrapping_sub(seq) as usize;
            data = &data[..keep.min(data.len())];
            fin = false;
            self.ack_now = true;
        }
        let end = seq.wrapping_add(data.len() as u32);
        if fin {
            self.fin_at = Some(end);
        }
        if self.eof {
            self.ack_now = true;
            return;
        }
        let in_order = seq == self.rcv;
        if !in_order && self.style.drops_unordered {
            self.ack_now = true;
            self.fin_at = self.fin_at.filter(|_| !fin);
            return;
        }
        if !data.is_empty() {
            self.latest = Some(seq);
            let at = self.ooo.partition_point(|(s, _)| before(*s, seq));
            self.ooo.insert(at, (seq, data.to_vec()));
        }
        let holes = self.ooo.len() > 1 || !in_order;
        while let Some((s, _)) = self.ooo.first() {
            if after(*s, self.rcv) {
                break;
            }
            let (s, d) = self.ooo.remove(0);
            let skip = self.rcv.wrapping_sub(s) as usize;
            if skip < d.len() {
                self.ready.extend(&d[skip..]);
                self.rcv = self.rcv.wrapping_add((d.len() - skip) as u32);
            }
        }
        if self.fin_at == Some(self.rcv) {
            self.rcv = self.rcv.wrapping_add(1);
            self.edge = later(self.edge, self.rcv);
            self.eof = true;
            self.ack_now = true;
        }
        self.unacked += data.len() as u32;
        if holes || self.unacked >= 2 * self.mss() {
            self.ack_now = true;
        } else if self.delack_at.is_none() {
            self.delack_at = Some(now + self.style.delack);
        }
    }
}
