//! Congestion marks: hosts with and without ECN, a network that marks, and checks that no mark is lost.

use super::{
    Fate, World,
    tcp::{Packet, RST, after, later},
};
use longsplice_datapath::{LegFlags, Pair, Side, model::Edit};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

const ECE: u8 = 0x40;
const CWR: u8 = 0x80;
/// Codepoints in the IP header (RFC 3168, 5).
const ECT: u8 = 2;
const CE: u8 = 3;

/// Counters of marks in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Segments marked by the network.
    pub marked: u32,
    /// Marks that reached a host over the path.
    pub passed: u32,
    /// Number of echoes that were the first news of a mark to a sending host.
    pub echoed: u32,
    /// Marked segments dropped because no one would have echoed the mark.
    pub dropped: u32,
}

/// One end of a connection (RFC 3168, 6.1).
#[derive(Clone, Copy, Debug, Default)]
struct End {
    agreed: bool,
    /// Send ECE until CWR arrives.
    echoing: bool,
    /// Send CWR with the next new data.
    reduced: bool,
    /// The end of the data sent.
    sent: Option<u32>,
}

#[derive(Debug, Default)]
pub struct Marks {
    rng: Option<SmallRng>,
    share: f64,
    /// Retransmissions and segments without data may be marked, too (RFC 8311).
    all: bool,
    hosts: Pair<End>,
    sockets: Pair<End>,
    /// The end of all data received from each host, its FIN included.
    come: Pair<Option<u32>>,
    counts: Counts,
}

impl End {
    fn send(&mut self, p: &mut Packet, all: bool) {
        if !self.agreed || p.flags & RST != 0 {
            return;
        }
        let new = !p.data.is_empty() && self.sent.is_none_or(|sent| after(p.end(), sent));
        if new {
            self.sent = Some(p.end());
            p.flags |= if std::mem::take(&mut self.reduced) { CWR } else { 0 };
        }
        p.ecn = if new || all { ECT } else { 0 };
        p.flags |= if self.echoing { ECE } else { 0 };
    }

    /// Processes the flags of a received segment. Returns whether it starts a reaction to a mark.
    fn hear(&mut self, p: &Packet) -> bool {
        if !self.agreed {
            return false;
        }
        self.echoing = (self.echoing && p.flags & CWR == 0) || (p.ecn == CE && !p.data.is_empty());
        let first = p.flags & ECE != 0 && !self.reduced;
        self.reduced |= first;
        first
    }
}

impl Marks {
    /// Chooses ECN on both legs, one or none, with sockets that have negotiated it or were created by TCP_REPAIR.
    pub fn random(seed: u64) -> Marks {
        let mut r = SmallRng::seed_from_u64(seed.rotate_left(24));
        let agreed = Pair::new(r.random_bool(0.7), r.random_bool(0.7));
        let restored = r.random_bool(0.3);
        let end = |agreed| End { agreed, ..End::default() };
        let share = *[0.01, 0.1, 0.4].get(r.random_range(0..3usize)).expect("three");
        let (hosts, sockets) = (agreed.map(end), agreed.map(|agreed| end(agreed && !restored)));
        Marks { share, all: r.random_bool(0.3), hosts, sockets, rng: Some(r), ..Marks::default() }
    }

    /// Flags of `enum leg_flag`.
    pub fn leg_flags(&self, side: Side) -> u32 {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let (host, socket) = (self.hosts[side].agreed, self.sockets[side].agreed);
        flag(host, LegFlags::ECN) | flag(host && !socket, LegFlags::RESTORED)
    }

    pub fn by_host(&mut self, from: Side, p: &mut Packet) {
        self.hosts[from].send(p, self.all);
    }

    pub fn by_socket(&mut self, to: Side, p: &mut Packet) {
        self.sockets[to].send(p, self.all);
    }

    /// Passes a packet over a link, which may mark it.
    pub fn pass(&mut self, p: &mut Packet) {
        let Some(r) = &mut self.rng else { return };
        if p.ecn == ECT && r.random_bool(self.share) {
            p.ecn = CE;
            self.counts.marked += 1;
        }
    }

    pub fn at_socket(&mut self, from: Side, p: &Packet) {
        self.sockets[from].hear(p);
    }

    fn at_host(&mut self, to: Side, p: &Packet) -> Option<String> {
        if !self.hosts[to].agreed && (p.ecn != 0 || p.flags & (ECE | CWR) != 0) {
            return Some(format!("{to:?} is shown marks that it has not agreed on: {p:?}"));
        }
        self.counts.passed += u32::from(p.ecn == CE);
        self.counts.echoed += u32::from(self.hosts[to].hear(p));
        None
    }

    /// Checks how the data path has handled a segment from this host.
    fn judge(&mut self, from: Side, p: &Packet, fate: &Fate) -> Option<String> {
        let both = self.hosts.iter().all(|h| h.agreed);
        let come = self.come[from];
        let end = |kept: usize| p.seq.wrapping_add(kept.min(p.data.len()) as u32);
        let (local, forwarded, whole) = match fate {
            Fate::Sent { local, forwarded, plain } => (local.as_ref(), forwarded.as_ref(), *plain),
            Fate::Dropped(v) if longsplice_datapath::VERDICTS[*v as usize] == "ce-dropped" => {
                self.counts.dropped += 1;
                (None, None, true)
            }
            Fate::Dropped(_) | Fate::Answered(_) => return None,
        };
        // a FIN counts: data that fills a gap before it, like any other gap, is taken for a retransmission
        if p.end() != p.seq {
            self.come[from] = Some(come.map_or(p.end(), |c| later(c, p.end())));
        }
        if p.flags & RST != 0 {
            return None;
        }
        if let Some(e) = forwarded.filter(|e| (e.strip_ecn == 0) != both) {
            return Some(format!("agreed by both: {both}, and a copy goes out so: {e:?}"));
        }
        // A mark on data that arrives for the first time must reach a side that echoes it.
        let mark = self.hosts[from].agreed && p.ecn == CE && !p.data.is_empty();
        let new = |e: &Edit, whole: bool| {
            let kept = if whole { p.data.len() } else { e.keep as usize };
            kept > 0 && come.is_none_or(|c| after(end(kept), c))
        };
        let unheard = |e: &Edit, heard: bool, whole| mark && !heard && new(e, whole);
        if forwarded.is_some_and(|e| unheard(e, both, false)) {
            return Some(format!("the other host gets this without its mark: {p:?}"));
        }
        if local.is_some_and(|e| unheard(e, self.sockets[from].agreed, whole)) {
            return Some(format!("our socket gets this, and cannot echo its mark: {p:?}"));
        }
        None
    }
}

impl World {
    pub(super) fn judge_marks(&mut self, from: Side, p: &Packet, fate: &Fate) {
        let wrong = self.marks.judge(from, p, fate);
        self.out.marks = self.marks.counts;
        wrong.inspect(|w| self.fail(w));
    }

    pub(super) fn judge_host(&mut self, to: Side, p: &Packet) {
        let wrong = self.marks.at_host(to, p);
        wrong.inspect(|w| self.fail(w));
    }
}

/// The ECN bits of a copy: the codepoint in the IP header and the TCP flags.
pub fn edited(p: &Packet, e: &Edit) -> (u8, u8) {
    if e.strip_ecn != 0 { (0, e.flags & !(ECE | CWR)) } else { (p.ecn, e.flags) }
}
