//! Where a splice slows no transfer down, judged by the round-trip times of the legs. While a flow
//! is copied, the congestion control of each host knows only its own leg. After the splice it drives
//! the whole path with what it has learned there. A sender on a short leg with a distant receiver
//! then starves (BBR, which keeps its minimum for 10 s) or has spurious timeouts (RFC 6298).

use crate::types::{PathRule, Policy, SpliceWhen};
use longsplice_datapath::{Pair, Side, Tuple};
use std::time::Duration;

/// Bytes that a direction may carry without suffering: the initial window of a sender (RFC 6928: ten segments).
const FEW: u64 = 10 * 1460;
/// Round-trip time of both legs together that does no harm: covered by the
/// slack of a sender's timers, which are at least 200 ms, and of its windows.
pub(super) const SHORT: Duration = Duration::from_millis(2);

/// Facts about a flow that its policy would splice.
pub(crate) struct Distance<'a> {
    pub policy: &'a Policy,
    pub legs: Pair<Tuple>,
    /// Minimum round-trip times of the legs. `None` while there is no measurement, which is no reason to copy.
    pub rtt: Pair<Option<Duration>>,
    /// Bytes that each direction has carried, or is known to carry later.
    pub carried: Pair<u64>,
    /// Bytes that were copied. If none, hosts that shook hands with each other know the whole path.
    pub copied: u64,
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
    pub fn judge(&self) -> Judgement {
        let Pair { client, server } = &self.legs;
        let is_transparent = client.remote == server.local && client.local == server.remote;
        if self.policy.path == PathRule::Any || (is_transparent && self.copied == 0) {
            return Judgement::Splice;
        }
        let Pair { client: Some(client), server: Some(server) } = self.rtt else { return Judgement::Splice };
        let rtt = Pair::new(client, server);
        let suffers = |from: &Side| !is_harmless(rtt[*from], rtt[from.other()]);
        let carries = |from: &Side| self.carried[*from] > FEW;
        if !Side::BOTH.iter().any(suffers) {
            return Judgement::Splice;
        }
        if !Side::BOTH.iter().any(carries) {
            return match self.policy.when {
                SpliceWhen::AtOnce => Judgement::Splice,
                _ => Judgement::After(FEW + 1 - self.carried.client.max(self.carried.server)),
            };
        }
        if Side::BOTH.iter().any(|from| carries(from) && suffers(from)) { Judgement::Copy } else { Judgement::Splice }
    }
}

/// A window that BBR has measured lasts for up to twice the sender's own round-trip time,
/// since BBR doubles it. An eighth is how far two measurements of the same path differ.
fn is_harmless(sender: Duration, receiver: Duration) -> bool {
    receiver <= sender + sender / 8 || sender + receiver <= SHORT
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
        let judge = |policy, legs, rtt, carried, copied| Distance { policy, legs, rtt, carried, copied }.judge();
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
}
