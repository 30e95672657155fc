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
    counters::Flows,
    network::Packets,
    objects::{Plan, fetch},
    results::{Case, Crossing, Run, Threshold},
    segment::on_one_cpu,
    stats::sign,
    subject::Subject,
    variant::Variant,
    venue::Venue,
};
use std::{cmp::Ordering, time::Duration};

/// Bytes from server to client: all powers of two where the curves may cross.
pub const SIZES: [u64; 10] =
    [1, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20];
/// Length of one run, as a fraction of a transfer; the number of connections is limited, too.
const SHARE: f64 = 0.2;
const CONNECTIONS: usize = 1000;
/// Rounds for each requested round.
const ROUNDS: usize = 3;
/// Maximum number of sizes for which the rounds cannot tell, between the
/// largest at which splicing costs and the smallest from which it pays.
const DOUBT: usize = 1;
/// The variants compared.
pub const VARIANTS: [Variant; 2] = [Variant::Copy, Variant::Spliced];

/// Measures all sizes with both variants.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    on_one_cpu(|| {
        let length = bench.seconds * SHARE;
        let case = |bytes| {
            bench.rounds_of(bench.rounds * ROUNDS, Subject::Short { bytes }, &VARIANTS, |v| run(v, bytes, length))
        };
        SIZES.into_iter().map(case).collect()
    })
}

/// Uses a new venue for each run, since the entries of ended flows stay for a minute and must not accumulate, and since the
/// memory layout of a process must not be the same for all rounds.
fn run(variant: Variant, bytes: u64, seconds: f64) -> Result<Run> {
    let venue = Venue::set(variant, Packets::Large)?;
    let length = Duration::from_secs_f64(seconds);
    let before = Flows::of(&venue)?;
    let fetched = fetch(&venue, Plan { bytes, clients: 1, length, most: CONNECTIONS })?;
    let (count, cost) = (fetched.times.len() as f64, fetched.cost);
    let micros = cost.seconds * 1e6 / count;
    let cpu = micros * cost.first_busy;
    Ok(Run { spliced: Flows::of(&venue)?.share_since(before), ..Run::new(variant, cost, count, micros, cpu) })
}

/// Finds the crossing of the curves. There is one case for each size.
pub fn of(sizes: &[u64], cases: &[Case]) -> Threshold {
    let signs = |of: fn(&Run) -> f64| {
        let sizes = sizes.iter().zip(cases);
        sizes.map(|(bytes, case)| (*bytes, sign(gains(case, of)))).collect::<Vec<_>>()
    };
    let (by_time, by_cpu) = (signs(|run| run.value), signs(|run| run.cpu));
    let recommended = clear(&by_time).zip(clear(&by_cpu)).map(|(time, cpu)| time.max(cpu));
    Threshold { by_time: crossing(&by_time), by_cpu: crossing(&by_cpu), recommended }
}

/// The savings by splicing in each round. Disturbed rounds are included: they raise
/// the cost of either variant in turn, so they make the test weaker, but not wrong.
fn gains(case: &Case, of: fn(&Run) -> f64) -> Vec<f64> {
    let gain = |round: &super::results::Round| Some(of(round.of(Variant::Copy)?) - of(round.of(Variant::Spliced)?));
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
