//! A million simultaneous connections, all spliced and released: the memory of
//! each, whether they still carry data, and the cost of a look-up among so many.
//!
//! [`venue`] is the proxy in its network, [`hosts`] are the threads that play client and server, and [`ends`] are their
//! parts: each connection starts with its number, by which the server's end is found again.

mod ends;
mod hosts;
mod venue;

use super::{
    Bench, Result,
    machine::number,
    memory::resident,
    results::{Figure, Line},
    stats::Spread,
    subject::Subject,
    variant::Variant,
};
use hosts::Hosts;
use nix::sys::resource::{Resource, getrlimit};
use std::{fs, time::Instant};
use venue::Venue;

/// Number of connections opened first: look-ups among a million are
/// compared with look-ups among these. Memory is measured from here on.
const FEW: usize = 1000;

/// Opens the connections in two steps, and measures.
pub fn measure(bench: &Bench, connections: usize) -> Result<Line> {
    let per_table = per_table()?;
    let venue = Venue::for_connections(connections)?;
    let few = FEW.min(connections / 2);
    let rounds = (connections / 100).max(100);
    let mut hosts = Hosts::start(&venue, connections, per_table)?;
    hosts.open(bench, 0..few)?;
    let mut dice = 1;
    let mut draw = |n: usize| (0..rounds).map(|_| (random(&mut dice) % n as u64) as usize).collect::<Vec<_>>();
    venue.wait_released()?;
    hosts.ping(&draw(few))?; // warms everything up
    let micros_few = hosts.ping(&draw(few))?;
    let (resident_few, slab_few) = (held(&venue), slab()?);

    let began = Instant::now();
    hosts.open(bench, few..connections)?;
    let seconds = began.elapsed().as_secs_f64();
    venue.wait_released()?;
    let (resident, slab) = (held(&venue), slab()?);
    bench.say(&format!("{connections} connections are open: {:.0} MB resident", resident / 1e6));
    let micros_all = hosts.ping(&draw(connections))?;
    let each = |after: f64, before: f64| (after - before).max(0.0) / (connections - few) as f64;
    let figures = [
        (Figure::Value, (connections - few) as f64 / seconds),
        (Figure::Process, each(resident, resident_few)),
        (Figure::Resident, resident),
        (Figure::Tables, venue.tables()? as f64 / venue.ends as f64),
        (Figure::Slab, each(slab, slab_few)),
        (Figure::Checked, rounds as f64),
        (Figure::MicrosFew, micros_few),
        (Figure::MicrosAll, micros_all),
    ];
    let subject = Subject::Million { connections: connections as u64 };
    Ok(Line::of(subject, Variant::Released, figures.map(|(figure, n)| (figure, Spread::of([n])))))
}

fn held(venue: &Venue) -> f64 {
    venue.pid().map_or(0.0, resident)
}

/// Returns the number of ends that fit in
/// a descriptor table, beside the descriptors that every program has open.
fn per_table() -> Result<usize> {
    const OTHERS: u64 = 256;
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(usize::try_from(limit.saturating_sub(OTHERS).clamp(100, 200_000))?)
}

fn slab() -> Result<f64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&info, "Slab").ok_or("no Slab in /proc/meminfo")? as f64 * 1024.0)
}

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
