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
    machine::{Machine, today},
    memory::{number, resident},
    report,
    results::FORMAT,
};
use hosts::Hosts;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path, time::Instant};
use venue::Venue;

/// Name of the result file. It is separate from the other results, because it is measured at another time.
pub const JSON: &str = "million.json";
/// Number of connections opened first: look-ups among a million are
/// compared with look-ups among these. Memory is measured from here on.
const FEW: usize = 1000;

/// The contents of the result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MillionResults {
    /// [`FORMAT`].
    pub format: u32,
    /// Day in UTC.
    pub date: String,
    /// Where and with what the results were measured.
    pub machine: Machine,
    /// The results.
    pub million: Million,
}

impl MillionResults {
    /// Results of today, on this machine.
    pub fn new(machine: Machine, million: Million) -> MillionResults {
        MillionResults { format: FORMAT, date: today(), machine, million }
    }

    /// Writes the file, beside other results or alone.
    pub fn write(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir)?;
        Ok(fs::write(dir.join(JSON), serde_json::to_string_pretty(self)? + "\n")?)
    }

    /// Formats the results with a heading, as Markdown.
    pub fn text(&self) -> String {
        let head = format!("## Connections at the same time, measured on {}", self.date);
        format!("{head}\n\n{}.\n\n{}", report::machine(&self.machine), self.million.table())
    }
}

/// The results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Million {
    /// Number of simultaneous connections.
    pub connections: usize,
    /// Connections opened, spliced and released per second, including the hosts' work.
    pub per_second: f64,
    /// Resident bytes of the process per connection.
    pub process: f64,
    /// Resident bytes of the process at the end.
    pub resident: u64,
    /// Bytes of the data path's tables per flow of capacity.
    pub tables: f64,
    /// Bytes of kernel objects of all kinds (slab) per connection: the sockets of both hosts.
    pub slab: f64,
    /// Randomly chosen connections that carried correct data both ways.
    pub checked: usize,
    /// Microseconds of a round trip on one CPU, over connections chosen from the first few.
    pub micros_few: f64,
    /// The same, chosen from all connections.
    pub micros_all: f64,
}

impl Million {
    fn table(&self) -> String {
        let rows = [
            ("opened per second, hosts included", self.per_second, 0),
            ("resident in the process, bytes per connection", self.process, 0),
            ("resident in the process, MB", self.resident as f64 / 1e6, 0),
            ("tables of the data path, bytes per flow", self.tables, 0),
            ("kernel memory of both hosts' sockets, bytes per connection", self.slab, 0),
            ("of them drawn at random, with all bytes right", self.checked as f64, 0),
            ("round trip, drawn from the first few, microseconds on one CPU", self.micros_few, 1),
            ("round trip, drawn from all, microseconds on one CPU", self.micros_all, 1),
        ];
        let rows = rows.map(|(what, value, digits)| vec![what.to_owned(), format!("{value:.digits$}")]);
        let head = format!("{} connections, spliced and released:", self.connections);
        report::table(&head, "what", &["figure".to_owned()], rows.to_vec())
    }
}

/// Opens the connections in two steps, and measures.
pub fn measure(bench: &Bench, connections: usize) -> Result<Million> {
    let per_table = raise_limit()?;
    let venue = Venue::set(connections)?;
    let few = FEW.min(connections / 2);
    let rounds = (connections / 100).max(100);
    let mut hosts = Hosts::start(&venue, connections, per_table)?;
    hosts.open(bench, 0..few)?;
    let mut dice = 1;
    let mut draw = |n: usize| (0..rounds).map(|_| (random(&mut dice) % n as u64) as usize).collect::<Vec<_>>();
    venue.wait_released()?;
    hosts.ping(&draw(few))?; // warms everything up
    let micros_few = hosts.ping(&draw(few))?;
    let (resident_few, slab_few) = (resident(venue.proxy.pid()) as u64, slab()?);

    let began = Instant::now();
    hosts.open(bench, few..connections)?;
    let seconds = began.elapsed().as_secs_f64();
    venue.wait_released()?;
    let (resident, slab) = (resident(venue.proxy.pid()) as u64, slab()?);
    bench.say(&format!("{connections} connections are open: {:.0} MB resident", resident as f64 / 1e6));
    let micros_all = hosts.ping(&draw(connections))?;
    let each = |after: u64, before: u64| after.saturating_sub(before) as f64 / (connections - few) as f64;
    Ok(Million {
        connections,
        per_second: (connections - few) as f64 / seconds,
        process: each(resident, resident_few),
        resident,
        tables: venue.tables()? as f64 / venue.room as f64,
        slab: each(slab, slab_few),
        checked: rounds,
        micros_few,
        micros_all,
    })
}

/// Raises the limit of descriptors. Returns the number of ends that fit in
/// a descriptor table, beside the descriptors that every program has open.
fn raise_limit() -> Result<usize> {
    const OTHERS: u64 = 256;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(usize::try_from(hard.saturating_sub(OTHERS).clamp(100, 200_000))?)
}

fn slab() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&info, "Slab").ok_or("no Slab in /proc/meminfo")? * 1024)
}

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
