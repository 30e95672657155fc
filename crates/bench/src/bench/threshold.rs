//! The number of bytes from which splicing pays: connections that carry
//! N bytes, copied and spliced at once, with everything on one CPU.
//!
//! A splice has a fixed cost, and saves some for each byte. The size where the two curves cross
//! is the one from which splicing at once would have been right. To splice after that many bytes
//! were copied costs at most twice as much as the best choice, however long the connection turns
//! out to be (Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).
//!
//! Near the crossing the distance between the curves is smaller than the variation of either, so medians would cross at
//! random. Instead the difference is taken within each of many short rounds, and tested for a significant sign.

use super::{
    results::{Case, Figure, Run},
    stats::sign,
    variant::Variant,
};
use serde::{Deserialize, Serialize};
use std::{cmp::Ordering, fmt};

/// Bytes from server to client: all powers of two where the curves may cross.
pub const SIZES: [u64; 10] =
    [1, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20];
/// Rounds for each requested round.
pub const ROUNDS: usize = 3;
/// Maximum number of sizes for which the rounds cannot tell, between the
/// largest at which splicing costs and the smallest from which it pays.
const DOUBT: usize = 1;
/// The variants compared.
pub const VARIANTS: [Variant; 2] = [Variant::Copy, Variant::Spliced];

/// Threshold derived from short transfers, spliced at once and copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Threshold {
    /// The size from which splicing takes less time.
    pub by_time: Crossing,
    /// The size from which splicing takes less CPU time.
    pub by_cpu: Crossing,
    /// The size from which splicing takes significantly less of both,
    /// if the rounds leave little doubt below it; otherwise `None`.
    pub recommended: Option<u64>,
}

/// The size from which splicing costs less: between `costs` and `pays`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossing {
    /// The largest size at which splicing costs significantly more; `None` if there is no such size among those measured.
    pub costs: Option<u64>,
    /// The smallest size from which splicing costs significantly less at all sizes; `None` if not even at the largest.
    pub pays: Option<u64>,
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.costs, self.pays) {
            (Some(costs), Some(pays)) => write!(f, "from somewhere between {costs} and {pays} bytes on"),
            (None, Some(pays)) => write!(f, "from {pays} bytes on at the latest"),
            (_, None) => f.write_str("from no size on that was measured, as far as these rounds can tell"),
        }
    }
}

/// Finds the crossing of the curves. There is one case for each size.
pub fn of(sizes: &[u64], cases: &[Case]) -> Threshold {
    let signs = |of: Figure| {
        let sizes = sizes.iter().zip(cases);
        sizes.map(|(bytes, case)| (*bytes, sign(gains(case, of)))).collect::<Vec<_>>()
    };
    let (by_time, by_cpu) = (signs(Figure::Value), signs(Figure::Cpu));
    let recommended = clear(&by_time).zip(clear(&by_cpu)).map(|(time, cpu)| time.max(cpu));
    Threshold { by_time: crossing(&by_time), by_cpu: crossing(&by_cpu), recommended }
}

/// The savings by splicing in each round. Disturbed rounds are included: they raise
/// the cost of either variant in turn, so they make the test weaker, but not wrong.
fn gains(case: &Case, of: Figure) -> Vec<f64> {
    let of = |run: Option<&Run>| run?.get(of);
    let gain = |round: &super::results::Round| Some(of(round.of(Variant::Copy))? - of(round.of(Variant::Spliced))?);
    case.rounds.iter().filter_map(gain).collect()
}

/// Indices in a list of sizes: of the last at which splicing
/// significantly costs, and of the first from which it pays at all sizes.
fn places(signs: &[(u64, Ordering)]) -> (Option<usize>, Option<usize>) {
    let costs = signs.iter().rposition(|(_, sign)| sign.is_lt());
    let pays = signs.iter().rposition(|(_, sign)| !sign.is_gt()).map_or(0, |last| last + 1);
    (costs, (pays < signs.len()).then_some(pays))
}

fn crossing(signs: &[(u64, Ordering)]) -> Crossing {
    let (costs, pays) = places(signs);
    Crossing { costs: costs.map(|i| signs[i].0), pays: pays.map(|i| signs[i].0) }
}

/// The size from which splicing significantly pays, if there is little doubt below it.
fn clear(signs: &[(u64, Ordering)]) -> Option<u64> {
    let (costs, pays) = places(signs);
    let doubtful = pays? - costs.map_or(0, |i| i + 1);
    (doubtful <= DOUBT).then_some(signs[pays?].0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Ordering::{Equal, Greater, Less};

    fn found(signs: [Ordering; 5]) -> (Option<u64>, Option<u64>, Option<u64>) {
        let signs: Vec<_> = [1, 2, 4, 8, 16].into_iter().zip(signs).collect();
        let Crossing { costs, pays } = crossing(&signs);
        (costs, pays, clear(&signs))
    }

    #[test]
    fn where_two_costs_cross() {
        assert_eq!(found([Less, Less, Greater, Greater, Greater]), (Some(2), Some(4), Some(4)));
        assert_eq!(found([Less, Equal, Greater, Greater, Greater]), (Some(1), Some(4), Some(4)), "a doubt");
        assert_eq!(found([Greater; 5]), (None, Some(1), Some(1)), "from the start");
        assert_eq!(found([Less, Greater, Less, Greater, Greater]), (Some(4), Some(8), Some(8)), "the last time counts");
    }

    #[test]
    fn curves_that_only_touch_do_not_cross() {
        assert_eq!(found([Less, Equal, Equal, Equal, Greater]), (Some(1), Some(16), None));
        assert_eq!(found([Less, Greater, Equal, Equal, Greater]), (Some(1), Some(16), None), "once is not enough");
        assert_eq!(found([Less, Greater, Greater, Greater, Equal]), (Some(1), None, None), "not at the end");
        assert_eq!(found([Less; 5]), (Some(16), None, None));
        assert_eq!(found([Equal; 5]), (None, None, None));
    }
}
