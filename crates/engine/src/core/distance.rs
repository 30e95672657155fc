//! Where a splice slows no transfer down, judged by the round-trip times and the losses of the legs. While a flow
//! is copied, the congestion control of each host knows only its own leg. After the splice it drives
//! the whole path with what it has learned there. A sender on a short leg with a distant receiver
//! then starves (BBR, which keeps its minimum for 10 s) or has spurious timeouts (RFC 6298).
//!
//! Copying splits the path, which makes transfers faster where both legs are long: each sender's window
//! grows, and recovers from a loss, by its own round trips.

use super::queue::CLOSE;
use crate::{
    finding::{PathCause, PathFinding},
    types::{PathRule, Policy, SpliceWhen},
};
use longsplice_datapath::{Pair, Side, Tuple};
use std::time::Duration;

/// Bytes that a direction may carry without suffering: the initial window of a sender (RFC 6928: ten segments).
const FEW: u64 = 10 * 1460;
/// A direction with less than this part of the bytes carries only requests or acknowledgements for the other one.
const PART: u64 = 16;
/// Round-trip time of both legs together that does no harm: covered by the
/// slack of a sender's timers, which are at least 200 ms, and of its windows.
pub(super) const SHORT: Duration = Duration::from_millis(2);

/// Round-trip time of each leg from which on a stream starts clearly faster in two parts.
const FAR: Duration = Duration::from_millis(5);
/// Bytes in which a stream starts: slow start from ten segments (RFC 6928) takes seven round trips for them.
const START: u64 = 1024 * 1024;
/// Round-trip time of a sender's leg that needs only a small window.
const NEAR: Duration = Duration::from_millis(1);
/// Such a window, in bytes: 1 Gbit/s.
const NEAR_WINDOW: u32 = 128 * 1024;

/// Round-trip time from which on a client is far. Nearer ones gain little by a splice before the first byte.
pub const FAR_CLIENT: Duration = CLOSE;
/// A server is near if its round-trip time is less than this part of the client's: both legs together, which the server's
/// congestion control then drives alone, are hardly longer than the client's.
const NEAR_PART: u32 = 10;

/// Facts about a flow that its policy would splice.
pub(crate) struct Distance<'a> {
    pub policy: &'a Policy,
    pub legs: Pair<Tuple>,
    /// Minimum round-trip times of the legs. `None` while there is no measurement, which is no reason to copy.
    pub rtt: Pair<Option<Duration>>,
    /// Part of the segments to each host that was lost.
    pub lost: Pair<f32>,
    /// Bytes that each direction has carried, or is known to carry later.
    pub carried: Pair<u64>,
    /// Bytes that were copied. If none, hosts that shook hands with each other know the whole path.
    pub copied: u64,
    /// One message of connections that will carry others, too.
    pub is_message: bool,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Splice,
    /// A splice would slow a transfer down.
    Copy,
    /// A splice could do harm, but the flow has carried too little to know. Judge again after this many more bytes.
    After(u64),
}

impl Distance<'_> {
    /// Returns whether a flow of which nothing was copied is to be spliced now, whatever its policy counts. A near server that has
    /// measured nothing but its own leg's handshake drives the whole path as if there were no proxy. Once it has sent data over its
    /// own leg alone, it would suffer from a splice.
    pub fn is_to_start(&self) -> bool {
        let Pair { client: Some(client), server: Some(server) } = self.rtt else { return false };
        let is_new = self.copied == 0 && !self.is_message;
        // a trigger waits for what comes after the splice, which would be the first byte
        is_new && self.policy.trigger.is_none() && client > FAR_CLIENT && server * NEAR_PART < client
    }

    pub fn judge(&self) -> Judgement {
        let Pair { client, server } = &self.legs;
        let is_transparent = client.remote == server.local && client.local == server.remote;
        let PathRule::Within { rtt_ratio, loss } = self.policy.path else { return Judgement::Splice };
        if is_transparent && self.copied == 0 {
            return Judgement::Splice;
        }
        let Pair { client: Some(client), server: Some(server) } = self.rtt else { return Judgement::Splice };
        let rtt = Pair::new(client, server);
        let is_lossy = |to: Side| client + server > CLOSE && self.lost[to] > loss;
        let suffers = |from: &Side| !is_harmless(rtt[*from], rtt[from.other()], rtt_ratio) || is_lossy(from.other());
        let all = self.carried.client.saturating_add(self.carried.server);
        let carries = |from: &Side| self.carried[*from] > FEW.max(all / PART);
        let counts = self.policy.threshold().is_some() && !self.is_message;
        let starts = counts && self.copied < START && client.min(server) > FAR;
        if !Side::BOTH.iter().any(suffers) {
            return if starts { Judgement::After(START - self.copied) } else { Judgement::Splice };
        }
        if !Side::BOTH.iter().any(carries) {
            return match self.policy.when {
                SpliceWhen::AtOnce => Judgement::Splice,
                _ => Judgement::After(FEW + 1 - self.carried.client.max(self.carried.server)),
            };
        }
        match Side::BOTH.iter().any(|from| carries(from) && suffers(from)) {
            true => Judgement::Copy,
            false if starts => Judgement::After(START - self.copied),
            false => Judgement::Splice,
        }
    }

    /// Returns what decided that the flow is copied, with the measured values.
    pub fn finding(&self, cause: Option<PathCause>) -> PathFinding {
        let is_far = |from: Side| match (self.policy.path, self.rtt[from], self.rtt[from.other()]) {
            (PathRule::Within { rtt_ratio, .. }, Some(sender), Some(receiver)) => {
                !is_harmless(sender, receiver, rtt_ratio)
            }
            _ => false,
        };
        // the one that carries more counts; if that one does not suffer, it is the other
        let main = if self.carried.client > self.carried.server { Side::Client } else { Side::Server };
        let is_lossy =
            |from: Side| matches!(self.policy.path, PathRule::Within { loss, .. } if self.lost[from.other()] > loss);
        let sender = if is_far(main) || is_lossy(main) || cause.is_some() { main } else { main.other() };
        let cause = cause.unwrap_or(if is_far(sender) { PathCause::Rtt } else { PathCause::Loss });
        PathFinding::new(cause, sender, self.rtt, self.lost[sender.other()])
    }

    /// Returns the windows in bytes that suffice for hosts from which a flow is copied. `None`: as large as the kernel makes them.
    /// A larger window for a near host would only be a queue for a far receiver that takes its bytes slowly.
    pub fn windows(&self) -> Pair<Option<u32>> {
        let is_small = |from: Side| {
            let (sender, receiver) = (self.rtt[from]?, self.rtt[from.other()]?);
            (sender <= NEAR && receiver > CLOSE).then_some(NEAR_WINDOW)
        };
        Pair::from_fn(is_small)
    }
}

fn is_harmless(sender: Duration, receiver: Duration, rtt_ratio: f32) -> bool {
    sender + receiver <= sender.mul_f32(rtt_ratio).max(SHORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_on_short_legs_are_not_spliced_to_far_receivers() {
        use Judgement::{After, Copy, Splice};
        let ms = |n: u64| Some(Duration::from_micros(n));
        let [near, same, far, none] = [ms(300), ms(1600), ms(50_000), None];
        let many = FEW + 1;
        let cases = [
            // a download from a far server, an upload to it
            ([near, far], [500, many], Splice),
            ([near, far], [many, 500], Copy),
            ([near, far], [many, many], Copy),
            // requests for a download from a far server
            ([near, far], [20_000, 301_000], Splice),
            ([near, far], [20_000, 299_000], Copy),
            // the same for a far client
            ([far, near], [500, many], Copy),
            ([far, near], [many, 500], Splice),
            ([far, near], [u64::MAX, u64::MAX], Copy),
            // too little to know
            ([far, near], [500, 0], After(many - 500)),
            ([near, far], [0, FEW], After(1)),
            // short, equal, and unknown ones
            ([near, same], [many, many], Splice),
            ([same, near], [0, 0], Splice),
            ([far, far], [many, many], Splice),
            ([far, ms(56_000)], [many, many], Splice),
            ([far, ms(57_000)], [many, 0], Copy),
            ([ms(8000), ms(9000)], [many, many], Splice),
            ([ms(500), ms(1500)], [many, many], Splice),
            ([near, none], [many, many], Splice),
            ([none, none], [0, 0], Splice),
        ];
        let tuple = |remote: u16, local: u16| Tuple {
            remote: ([10, 0, 0, 1], remote).into(),
            local: ([10, 0, 0, 2], local).into(),
        };
        let (ours, theirs) = (
            Pair::new(tuple(1, 2), tuple(3, 4)),
            Pair::new(tuple(1, 2), Tuple { remote: tuple(1, 2).local, local: tuple(1, 2).remote }),
        );
        let half = Pair::new(tuple(1, 2), Tuple { remote: tuple(1, 2).local, local: tuple(5, 6).remote });
        let at_once = Policy { when: SpliceWhen::AtOnce, ..Policy::default() };
        let (auto, any) = (Policy::default(), Policy { path: PathRule::Any, ..Policy::default() });
        let judge = |policy, legs, rtt, carried, copied| {
            let (lost, is_message) = (Pair::both(0.0), true);
            Distance { policy, legs, rtt, lost, carried, copied, is_message }.judge()
        };
        for (rtt, carried, want) in cases {
            let (rtt, carried) = (Pair::from(rtt), Pair::from(carried));
            assert_eq!(judge(&auto, ours, rtt, carried, 1), want, "{rtt:?} {carried:?}");
            assert_eq!(judge(&any, ours, rtt, carried, 1), Splice);
            let asked = if want == Copy { Copy } else { Splice };
            assert_eq!(judge(&at_once, ours, rtt, carried, 1), asked, "at once: {rtt:?} {carried:?}");
            assert_eq!(judge(&auto, theirs, rtt, carried, 1), want, "a transparent one that was copied");
            assert_eq!(judge(&auto, theirs, rtt, carried, 0), Splice, "the hosts shook hands");
            assert_eq!(judge(&auto, half, rtt, carried, 0), want, "the server sees another client");
        }
    }

    /// A download over legs of so many milliseconds, of whose segments to the client this part was lost.
    fn download(client: u64, server: u64, lost: f32, copied: u64) -> Distance<'static> {
        let (rtt, lost) = (Pair::new(client, server).map(|ms| Some(Duration::from_millis(ms))), Pair::new(lost, 0.0));
        let leg = |n| Tuple { remote: ([10, 0, n, 1], 1).into(), local: ([10, 0, n, 2], 2).into() };
        let policy = Box::leak(Box::default());
        Distance {
            policy,
            legs: Pair::new(leg(0), leg(1)),
            rtt,
            lost,
            carried: Pair::new(100, copied),
            copied,
            is_message: false,
        }
    }

    #[test]
    fn what_gains_from_two_legs_is_copied() {
        use Judgement::{After, Copy, Splice};
        // slow start
        assert_eq!(download(6, 6, 0.0, 65_536).judge(), After(START - 65_536));
        assert_eq!(download(6, 6, 0.0, START).judge(), Splice);
        assert_eq!(download(5, 100, 0.0, 65_536).judge(), Splice, "a leg of 5 ms gains little");
        assert_eq!(Distance { is_message: true, ..download(6, 6, 0.0, 65_536) }.judge(), Splice, "it is not the first");
        let at_once = Policy { when: SpliceWhen::AtOnce, ..Policy::default() };
        assert_eq!(Distance { policy: &at_once, ..download(6, 6, 0.0, 0) }.judge(), Splice);
        let any = Policy { path: PathRule::Any, ..Policy::default() };
        assert_eq!(Distance { policy: &any, ..download(6, 6, 0.1, 65_536) }.judge(), Splice);
        // recovery from losses
        assert_eq!(download(6, 100, 0.002, START).judge(), Splice);
        assert_eq!(download(6, 100, 0.0021, START).judge(), Copy);
        assert_eq!(download(1, 9, 0.1, START).judge(), Splice, "a short path recovers soon");
        assert_eq!(
            Distance { carried: Pair::new(START, 500), ..download(6, 100, 0.1, START) }.judge(),
            Copy,
            "too far"
        );
        assert_eq!(
            Distance { carried: Pair::new(START, 500), ..download(6, 6, 0.1, START) }.judge(),
            Splice,
            "upwards"
        );
    }

    #[test]
    fn a_finding_names_what_decided() {
        let far = download(100, 6, 0.1, START).finding(None);
        assert_eq!((far.cause, far.sender, far.rtt_us), (PathCause::Rtt, Side::Server, Pair::new(100_000, 6000)));
        let lossy = download(6, 100, 0.1, START).finding(None);
        assert_eq!((lossy.cause, lossy.sender, lossy.loss), (PathCause::Loss, Side::Server, 0.1));
        let upload = Distance { carried: Pair::new(START, START / 2), ..download(6, 100, 0.0, START) }.finding(None);
        assert_eq!((upload.cause, upload.sender), (PathCause::Rtt, Side::Client));
        // both directions carry, and the smaller one suffers
        let both = Distance { carried: Pair::new(START / 2, START), ..download(6, 100, 0.0, START) }.finding(None);
        assert_eq!((both.cause, both.sender), (PathCause::Rtt, Side::Client));
    }

    #[test]
    fn near_senders_to_far_receivers_have_small_windows() {
        let small = Some(NEAR_WINDOW);
        assert_eq!(download(11, 1, 0.0, START).windows(), Pair::new(None, small));
        assert_eq!(download(1, 11, 0.0, START).windows(), Pair::new(small, None));
        assert_eq!(download(10, 1, 0.0, START).windows(), Pair::both(None));
        assert_eq!(download(100, 2, 0.0, START).windows(), Pair::both(None), "a window is for a round trip");
        assert_eq!(Distance { rtt: Pair::both(None), ..download(11, 1, 0.0, START) }.windows(), Pair::both(None));
    }
}
