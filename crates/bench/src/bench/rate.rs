//! New connections per second, which is where splicing has to be paid for: eight clients that open one short connection
//! after the other, on all CPUs.

use super::{
    Bench, Result,
    objects::{Plan, fetch},
    results::{Case, Run},
    subject::Subject,
    variant::Variant,
    venue::{Packets, Venue},
};
use std::time::Duration;

const CLIENTS: usize = 8;
/// What each connection carries.
const BYTES: [u64; 2] = [1, 16 << 10];
/// In one run. Half as many ports as a proxy has for one server, most of which stay taken for a minute.
const CONNECTIONS: usize = 8000;
const VARIANTS: [Variant; 6] =
    [Variant::IpForward, Variant::Spliced, Variant::Default, Variant::Copy, Variant::Haproxy, Variant::Nginx];

/// Both sizes.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    let case = |bytes| bench.rounds(Subject::Rate { bytes }, &VARIANTS, |v| run(v, bytes, bench.seconds));
    BYTES.into_iter().map(case).collect()
}

/// In a new venue each time: what ended connections leave for a minute must not pile up.
fn run(variant: Variant, bytes: u64, seconds: f64) -> Result<Run> {
    let venue = Venue::set(variant, Packets::Large)?;
    let length = Duration::from_secs_f64(seconds);
    let fetched = fetch(&venue, Plan { bytes, clients: CLIENTS, length, most: CONNECTIONS })?;
    let (count, cost) = (fetched.times.len() as f64, fetched.cost);
    let (rate, cpu) = (count / cost.seconds, cost.cpu * 1e6 / count);
    Ok(Run::new(variant, cost, count, rate, cpu))
}
