//! New connections per second, where the cost of a splice shows: eight
//! clients on all CPUs that open short connections one after another.

use super::{
    Bench, Result,
    counters::Flows,
    network::Packets,
    objects::{Plan, fetch},
    results::{Case, Run},
    subject::Subject,
    variant::Variant,
    venue::Venue,
};
use std::time::Duration;

const CLIENTS: usize = 8;
/// Bytes carried by each connection.
const BYTES: [u64; 2] = [1, 16 << 10];
/// Maximum number of connections in one run: half the ports that a proxy
/// has for one server, since most of them stay in use for a minute.
const CONNECTIONS: usize = 8000;
const VARIANTS: [Variant; 6] =
    [Variant::IpForward, Variant::Spliced, Variant::Default, Variant::Copy, Variant::Haproxy, Variant::Nginx];

/// Measures both sizes.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    BYTES.into_iter().map(|bytes| case(bench, bytes, &VARIANTS)).collect()
}

/// Measures one size with these variants.
pub fn case(bench: &Bench, bytes: u64, variants: &[Variant]) -> Result<Case> {
    bench.rounds(Subject::Rate { bytes }, variants, |v| run(v, bytes, bench.seconds))
}

/// Uses a new venue for each run, since the entries of ended connections stay for a minute and must not accumulate.
fn run(variant: Variant, bytes: u64, seconds: f64) -> Result<Run> {
    let venue = Venue::set(variant, Packets::Large)?;
    let length = Duration::from_secs_f64(seconds);
    let before = Flows::of(&venue)?;
    let fetched = fetch(&venue, Plan { bytes, clients: CLIENTS, length, most: CONNECTIONS })?;
    let (count, cost) = (fetched.times.len() as f64, fetched.cost);
    let (rate, cpu) = (count / cost.seconds, cost.cpu * 1e6 / count);
    Ok(Run { spliced: Flows::of(&venue)?.share_since(before), ..Run::new(variant, cost, count, rate, cpu) })
}
