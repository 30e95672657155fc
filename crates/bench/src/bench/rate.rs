//! Objects that are fetched over connections of their own: response time by size (Fig. 6.1 and 6.2 of the symmetric-splice
//! paper), measured from connecting to the last byte, and as there from the request; new connections per second, where the cost
//! of a splice shows; and short transfers on one CPU, for the [`threshold`](super::threshold).

use super::{
    Bench, Result,
    counters::Flows,
    machine::Cost,
    network::Packets,
    objects::{Plan, Time, fetch},
    results::{Figure, Run, Section, plural, size},
    segment::on_one_cpu,
    stats::Spread,
    threshold,
    variant::Variant,
    venue::Near,
};
use std::time::Duration;

/// Maximum number of connections in one run: half the ports that a proxy
/// has for one server, since most of them stay in use for a minute.
const CONNECTIONS: usize = 8000;

/// Uses a new venue for each run, since the entries of ended connections stay for a minute and must not accumulate, and since the
/// memory layout of a process must not be the same for all rounds.
fn run(variant: Variant, plan: Plan, summary: impl FnOnce(&[Time], Cost) -> Option<Run>) -> Result<Run> {
    let venue = Near::set(variant, Packets::Large)?;
    let before = Flows::of(&venue)?;
    let fetched = fetch(&venue, plan)?;
    let run = summary(&fetched.times, fetched.cost).ok_or("nothing was fetched")?;
    Ok(run.with(Figure::Spliced, Flows::of(&venue)?.share_since(before)))
}

/// Measures response times: all sizes at low and high load, the largest at low load only.
pub fn responses(bench: &Bench<'_>) -> Result<()> {
    const BYTES: [u64; 6] = [1 << 10, 10 << 10, 100 << 10, 1 << 20, 10 << 20, 100 << 20];
    /// Numbers of clients at low and high load.
    const CLIENTS: [u64; 2] = [1, 32];
    /// Length of one run, as a fraction of a transfer: with many small objects this is enough.
    const SHARE: f64 = 0.4;
    const OBJECTS: usize = 4000;
    const VARIANTS: [Variant; 4] = [Variant::IpForward, Variant::SplicedSocks, Variant::CopySocks, Variant::Dante];
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    let case = |(clients, bytes): (u64, u64)| {
        let plan = Plan { bytes, clients: clients as usize, length, most: OBJECTS };
        let row = format!("{}, {}", size(bytes), plural(clients, "client"));
        bench.rounds(Section::Response, &row, &VARIANTS, |v| {
            run(v, plan, |times, cost| {
                let count = times.len() as f64;
                let median = |of: fn(&Time) -> f64| Some(Spread::of(times.iter().map(of))?.median * 1e3);
                let cpu = cost.cpu * 1e6 / count;
                let run = Run::new(v, cost, count, median(|time| time.connect)?, cpu);
                Some(run.with(Figure::Request, median(|time| time.request)))
            })
        })
    };
    let sizes = |clients: u64| {
        let largest = if clients == 1 { BYTES.len() } else { BYTES.len() - 1 };
        BYTES[..largest].iter().map(move |bytes| (clients, *bytes))
    };
    CLIENTS.into_iter().flat_map(sizes).try_for_each(case)
}

/// Measures connections per second with both sizes.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    const BYTES: [u64; 2] = [1, 16 << 10];
    const VARIANTS: [Variant; 6] =
        [Variant::IpForward, Variant::Spliced, Variant::Default, Variant::Copy, Variant::Haproxy, Variant::Nginx];
    BYTES.into_iter().try_for_each(|bytes| connections(bench, bytes, &VARIANTS))
}

/// Measures connections per second that carry so many bytes: eight clients on all CPUs that open one after another.
pub fn connections(bench: &Bench<'_>, bytes: u64, variants: &[Variant]) -> Result<()> {
    let plan = Plan { bytes, clients: 8, length: Duration::from_secs_f64(bench.seconds), most: CONNECTIONS };
    bench.rounds(Section::Rate, &size(bytes), variants, |v| {
        run(v, plan, |times, cost| Some(Run::rate(v, cost, times.len() as f64)))
    })
}

/// Measures short transfers of all sizes, copied and spliced, with everything on one CPU.
pub fn short(bench: &Bench<'_>) -> Result<()> {
    /// Bytes from server to client: all powers of two where the curves may cross.
    const SIZES: [u64; 10] =
        [1, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20];
    /// Length of one run, as a fraction of a transfer; the number of connections is limited, too.
    const SHARE: f64 = 0.2;
    const MOST: usize = 1000;
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    let case = |bytes| {
        let plan = Plan { bytes, clients: 1, length, most: MOST };
        threshold::rounds(bench, Section::Short, bytes, |v| {
            run(v, plan, |times, cost| Some(Run::each(v, cost, times.len() as f64)))
        })
    };
    on_one_cpu(|| SIZES.into_iter().try_for_each(case))?;
    threshold::say(bench, Section::Short, "Splicing", "splice after", &SIZES);
    Ok(())
}
