//! Response time by object size (Fig. 6.1 and 6.2 of the symmetric-splice paper), measured from connecting to the last byte,
//! and as there from the request: through SOCKS proxies and a router, with one client and with many.

use super::{
    Bench, Result,
    counters::Flows,
    network::Packets,
    objects::{Plan, Time, fetch},
    results::{Case, Run},
    stats::Spread,
    subject::Subject,
    variant::Variant,
    venue::Venue,
};
use std::time::Duration;

/// Object sizes; the largest at low load only.
const BYTES: [u64; 6] = [1 << 10, 10 << 10, 100 << 10, 1 << 20, 10 << 20, 100 << 20];
/// Numbers of clients at low and high load.
const CLIENTS: [u64; 2] = [1, 32];
/// Length of one run, as a fraction of a transfer: with many small objects this is enough.
const SHARE: f64 = 0.4;
const OBJECTS: usize = 4000;
const VARIANTS: [Variant; 4] = [Variant::IpForward, Variant::SplicedSocks, Variant::CopySocks, Variant::Dante];

/// Measures all sizes at both loads.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for clients in CLIENTS {
        let largest = if clients == 1 { BYTES.len() } else { BYTES.len() - 1 };
        for &bytes in &BYTES[..largest] {
            let run = |v| run(v, bytes, clients, bench.seconds * SHARE);
            cases.push(bench.rounds(Subject::Response { bytes, clients }, &VARIANTS, run)?);
        }
    }
    Ok(cases)
}

/// Uses a new venue for each run, since the entries of ended connections stay for a minute and must not accumulate.
fn run(variant: Variant, bytes: u64, clients: u64, seconds: f64) -> Result<Run> {
    let venue = Venue::set(variant, Packets::Large)?;
    let length = Duration::from_secs_f64(seconds);
    let before = Flows::of(&venue)?;
    let fetched = fetch(&venue, Plan { bytes, clients: clients as usize, length, most: OBJECTS })?;
    let (count, cost) = (fetched.times.len() as f64, fetched.cost);
    let median = |of: fn(&Time) -> f64| Spread::of(fetched.times.iter().map(of)).map(|seconds| seconds.median * 1e3);
    let (connect, request) = (median(|time| time.connect), median(|time| time.request));
    let cpu = cost.cpu * 1e6 / count;
    let run = Run::new(variant, cost, count, connect.ok_or("nothing was fetched")?, cpu);
    Ok(Run { request, spliced: Flows::of(&venue)?.share_since(before), ..run })
}
