//! From how many bytes on splicing pays: connections that carry N bytes, copied and spliced at once, everything on one CPU.
//!
//! A splice costs a fixed amount and saves some for each byte. Where the two curves cross is the size from which splicing
//! at once would have been right; to splice after as many bytes were copied costs at most twice what the best choice
//! would, however long the connection turns out to be (Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).

use super::{
    Bench, Result,
    objects::{Plan, fetch},
    results::{Case, Round, Run, Summary, Threshold},
    segment::on_one_cpu,
    stats::crossing,
    subject::Subject,
    variant::Variant,
    venue::{Packets, Venue},
};
use std::time::Duration;

/// Bytes from server to client.
const SIZES: [u64; 8] = [1, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// One size, one variant, one round: this part of a transfer's length, and not more connections than that.
const SHARE: f64 = 0.2;
const CONNECTIONS: usize = 200;
const VARIANTS: [Variant; 2] = [Variant::Copy, Variant::Spliced];

/// All sizes, both variants.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    on_one_cpu(|| {
        let case = |bytes| bench.rounds(Subject::Short { bytes }, &VARIANTS, |v| run(v, bytes, bench.seconds * SHARE));
        SIZES.into_iter().map(case).collect()
    })
}

/// In a new venue each time: what ended flows leave for a minute must not pile up.
fn run(variant: Variant, bytes: u64, seconds: f64) -> Result<Run> {
    let venue = Venue::set(variant, Packets::Large)?;
    let length = Duration::from_secs_f64(seconds);
    let fetched = fetch(&venue, Plan { bytes, clients: 1, length, most: CONNECTIONS })?;
    let (count, cost) = (fetched.times.len() as f64, fetched.cost);
    let micros = cost.seconds * 1e6 / count;
    let cpu = micros * cost.first_busy;
    Ok(Run::new(variant, cost, count, micros, cpu))
}

/// Where the curves cross.
pub fn of(cases: &[Case]) -> Threshold {
    let summary = Summary::of(cases);
    let median = |case: &Case, v| summary.line(case.subject, v).map(|line| line.value.median);
    let curve = |variant, of: &dyn Fn(&Case, Variant) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = SIZES.into_iter().zip(cases);
        points.filter_map(|(bytes, case)| Some((bytes as f64, of(case, variant)?))).collect()
    };
    let by_time = crossing(&curve(Variant::Copy, &median), &curve(Variant::Spliced, &median));
    let by_cpu = crossing(&curve(Variant::Copy, &cpu), &curve(Variant::Spliced, &cpu));
    let recommended = by_time.zip(by_cpu).map(|(a, b)| (a.max(b).ceil() as u64).next_power_of_two());
    Threshold { by_time, by_cpu, recommended }
}

/// Of all rounds together, since ticks are coarse.
fn cpu(case: &Case, variant: Variant) -> Option<f64> {
    let rounds: Vec<&Round> = case.counted();
    let runs: Vec<&Run> = rounds.iter().filter_map(|r| r.of(variant)).collect();
    let count: f64 = runs.iter().map(|r| r.amount).sum();
    (count > 0.0).then(|| runs.iter().map(|r| r.cpu * r.amount).sum::<f64>() / count)
}
