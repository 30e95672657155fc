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
    Bench, Result,
    results::{Case, Figure, Run, Section, size},
    stats::sign,
    variant::Variant,
};
use std::cmp::Ordering;

/// Rounds for each requested round.
const ROUNDS: usize = 3;
/// Maximum number of sizes for which the rounds cannot tell, between the
/// largest at which splicing costs and the smallest from which it pays.
const DOUBT: usize = 1;
/// The variants compared.
pub const VARIANTS: [Variant; 2] = [Variant::Spliced, Variant::Copy];

/// Measures one size.
pub fn rounds(bench: &Bench<'_>, section: Section, bytes: u64, run: impl FnMut(Variant) -> Result<Run>) -> Result<()> {
    let count = bench.results().rounds * ROUNDS;
    bench.some_rounds(count, section, &size(bytes), &VARIANTS, run)
}

/// Says what follows from the cases of a section, one for each size.
pub fn say(bench: &Bench<'_>, section: Section, what: &str, advice: &str, sizes: &[u64]) {
    let mut results = bench.results();
    let cases: Vec<&Case> = results.cases.iter().filter(|case| case.section == section).collect();
    let words = words(what, advice, sizes, &cases);
    results.words.insert(section, words);
}

/// Finds the crossing of the curves in time and in CPU time, and says what to do: `advice`, if the rounds leave little doubt
/// below the size from which splicing takes significantly less of both.
fn words(what: &str, advice: &str, sizes: &[u64], cases: &[&Case]) -> String {
    let signs = |of: Figure| {
        let sizes = sizes.iter().zip(cases);
        sizes.map(|(bytes, case)| (*bytes, sign(case.gains(of)))).collect::<Vec<_>>()
    };
    let (time, cpu) = (signs(Figure::Value), signs(Figure::Cpu));
    let recommended = clear(&time).zip(clear(&cpu)).map(|(time, cpu)| time.max(cpu));
    let recommended = match recommended {
        Some(n) => format!("Recommended: {advice} {n} bytes."),
        None => "These rounds cannot tell from how many bytes on; more may.".to_owned(),
    };
    format!("{what} takes less time {}, less CPU {}. {recommended}", crossing(&time), crossing(&cpu))
}

/// Indices in a list of sizes: of the last at which splicing
/// significantly costs, and of the first from which it pays at all sizes.
fn places(signs: &[(u64, Ordering)]) -> (Option<usize>, Option<usize>) {
    let costs = signs.iter().rposition(|(_, sign)| sign.is_lt());
    let pays = signs.iter().rposition(|(_, sign)| !sign.is_gt()).map_or(0, |last| last + 1);
    (costs, (pays < signs.len()).then_some(pays))
}

fn crossing(signs: &[(u64, Ordering)]) -> String {
    match places(signs) {
        (Some(costs), Some(pays)) => {
            format!("from somewhere between {} and {} bytes on", signs[costs].0, signs[pays].0)
        }
        (None, Some(pays)) => format!("from {} bytes on at the latest", signs[pays].0),
        (_, None) => "from no size on that was measured, as far as these rounds can tell".to_owned(),
    }
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

    fn found(signs: [Ordering; 5]) -> (Option<usize>, Option<usize>, Option<u64>) {
        let signs: Vec<_> = [1, 2, 4, 8, 16].into_iter().zip(signs).collect();
        let (costs, pays) = places(&signs);
        (costs, pays, clear(&signs))
    }

    #[test]
    fn where_two_costs_cross() {
        assert_eq!(found([Less, Less, Greater, Greater, Greater]), (Some(1), Some(2), Some(4)));
        assert_eq!(found([Less, Equal, Greater, Greater, Greater]), (Some(0), Some(2), Some(4)), "a doubt");
        assert_eq!(found([Greater; 5]), (None, Some(0), Some(1)), "from the start");
        assert_eq!(found([Less, Greater, Less, Greater, Greater]), (Some(2), Some(3), Some(8)), "the last time counts");
    }

    #[test]
    fn curves_that_only_touch_do_not_cross() {
        assert_eq!(found([Less, Equal, Equal, Equal, Greater]), (Some(0), Some(4), None));
        assert_eq!(found([Less, Greater, Equal, Equal, Greater]), (Some(0), Some(4), None), "once is not enough");
        assert_eq!(found([Less, Greater, Greater, Greater, Equal]), (Some(0), None, None), "not at the end");
        assert_eq!(found([Less; 5]), (Some(4), None, None));
        assert_eq!(found([Equal; 5]), (None, None, None));
    }
}
