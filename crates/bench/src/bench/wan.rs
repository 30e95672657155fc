//! Transfers over long and lossy paths: a splice must not make any of them slower. After a splice, the sender's congestion
//! control drives the whole path with what it has learned about the leg to the forwarder. And translucent proxies, as the TPOT
//! paper measures them: the time until the first byte of a short connection (its Table 3), and such transfers with a proxy half
//! way, or two at its thirds.
//!
//! Each subject has a [venue](Far), and both [ends](super::ends) are threads of this process. A round measures every subject
//! once, in rotated order. The processors are idle most of the time, so that other programs disturb this less than other
//! measurements.

use super::{
    Bench, Result, bulk,
    ends::minus,
    far::{Far, PROXIES, Record},
    memory::socket_memory,
    network::Packets,
    rate,
    results::{Figure, Line, Results, Run, Section, plural},
    segment,
    stats::Spread,
    variant::Variant,
};
use crate::cell::{self, Cell, Protocol};
use longsplice::Ask;
use longsplice_datapath::SenderFacts;
use longsplice_lab::{Namespace, Shape, process::wait_for};
use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

pub use super::ends::LIMIT;

/// Number of requests measured on each warm connection.
const REQUESTS: usize = 3;
/// The note of a run that was cut off.
pub const CUT_OFF: &str = "cut off";
/// Number of slow readers.
const CLIENTS: usize = 10;
/// Bytes that each of them reads per second.
const PER_SECOND: u64 = 1_000_000;
/// The object that slow readers fetch, and the path.
const SLOW: &str = "c50, 10 MB, reno";
/// What is unspliced half way: with Reno and BBR, a far client and a near server.
const UNSPLICED: [&str; 2] = ["c100, 10 MB, reno", "c100, 2 MB, bbr"];
/// How often their memory is read.
const EVERY: Duration = Duration::from_millis(250);
/// Time until a connection has ended, at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is compared over long paths.
pub const VARIANTS: [Variant; 6] =
    [Variant::IpForward, Variant::Copy, Variant::Spliced, Variant::Default, Variant::EndToEnd, Variant::Haproxy];
/// The same through translucent proxies.
const TRANSLUCENT: [Variant; 6] = [
    Variant::IpForward,
    Variant::TpotBasic,
    Variant::TpotPipelined,
    Variant::TpotSpliced,
    Variant::TpotTwo,
    Variant::TpotTwoSpliced,
];
/// Ways of forwarding whose costs are compared.
const COMPARED: [Variant; 6] = [
    Variant::Direct,
    Variant::IpForward,
    Variant::BesideTpot,
    Variant::CopyTpot,
    Variant::SplicedTpot,
    Variant::SplicedTpotUdp,
];

/// Measures transfers over long paths.
pub fn paths(bench: &Bench<'_>) -> Result<()> {
    transfers(bench, Section::Path, Shape::TwoDevices, &VARIANTS, &cell::WAN)?;
    let mut results = bench.results();
    let words = verdict(&results);
    results.words.extend(words.map(|words| (Section::Path, words)));
    Ok(())
}

/// Measures the same through translucent proxies.
pub fn translucent(bench: &Bench<'_>) -> Result<()> {
    transfers(bench, Section::Tpot, Shape::TwoForwarders, &TRANSLUCENT, &cell::TPOT)
}

/// Measures what segments and connections through translucent proxies cost without delays.
pub fn costs(bench: &Bench<'_>) -> Result<()> {
    // The larger segment fits the MTU with the headers of a tunnel.
    segment::cases(bench, &[1, 1400], &COMPARED)?;
    rate::connections(bench, 1, &COMPARED[1..])?;
    bulk::cases(bench, Packets::Large, &[8], &COMPARED[1..])?;
    bulk::cases(bench, Packets::Mtu, &[8], &COMPARED[1..])
}

/// Measures the chosen rows or these, with the variants that can take part in them.
fn transfers(bench: &Bench<'_>, section: Section, shape: Shape, all: &[Variant], rows: &[&str]) -> Result<()> {
    let rows = rows.iter().map(|row| row.parse()).collect::<std::result::Result<Vec<Cell>, _>>()?;
    let rows = if bench.args.path.is_empty() { &rows } else { &bench.args.path };
    if let Some(cell) = rows.iter().find(|cell| cell.place == 't' && shape == Shape::TwoDevices) {
        return Err(format!("{}: `wan` has two links; use `tpot`, or write c, s or b", cell.label).into());
    }
    let venues = bench.venues(all, |v| Far::set(v, shape))?;
    rows.iter().try_for_each(|cell| {
        let variants: Vec<Variant> = all.iter().copied().filter(|v| v.serves(cell)).collect();
        for venue in venues.all().filter(|venue| variants.contains(&venue.variant)) {
            venue.prepare(cell)?;
        }
        bench.rounds(section, &cell.label, &variants, |v| run(venues.of(v)?, cell))
    })
}

/// How the default policy does, compared with the slower of routing and copying; `None` if it was not measured.
fn verdict(r: &Results) -> Option<String> {
    let lines = r.lines_of(Section::Path).filter(|l| l.variant == Variant::Default);
    let lines = lines.filter_map(|l| Some((l, l.row.parse::<Cell>().ok()?, l.get(Figure::ToSlower)?)));
    let lines: Vec<(&Line, Cell, f64)> = lines.collect();
    let (worst, _, most) = lines.iter().max_by(|a, b| a.2.total_cmp(&b.2))?;
    let median = Spread::of(lines.iter().map(|(.., ratio)| *ratio))?.median;
    let lossless = || lines.iter().filter(|(_, cell, _)| cell.loss == 0.0).map(|(line, ..)| line);
    let copied = |l: &Line| r.line(l.section, &l.row, Variant::Copy).map_or(0, |copied| copied.worst(Figure::Needless));
    let timeouts = lossless().map(|l| l.worst(Figure::Timeouts)).sum();
    let needless = lossless().map(|l| l.worst(Figure::Needless).saturating_sub(copied(l))).sum();
    let near = lines.iter().filter(|(_, cell, _)| cell.is_towards_near_host());
    let shares = near.filter_map(|(l, cell, _)| Some((cell.bytes as f64, l.get(Figure::Spliced)?)));
    let (all, spliced) = shares.fold((0.0, 0.0), |sum, (size, share)| (sum.0 + size, sum.1 + size * share));
    let near = format!(
        " Of the bytes sent to a near host by a far one, or over 2 ms at most, it splices {:.2}: all but the first ones of \
         each connection that is not HTTP.",
        spliced / all
    );
    Some(format!(
        "The default policy takes {median:.2} times as long as the slower of routing and copying in the median of {} rows, \
         and {most:.2} times at most ({}). In the rows without loss, its worst rounds have {}, and {} in vain more than \
         those of copying, all rows together.{}",
        lines.len(),
        worst.row,
        plural(timeouts, "timeout"),
        plural(needless, "segment"),
        if all > 0.0 { &near } else { "" },
    ))
}

/// Transfers the object once, or over HTTP a few times after once that does not count.
fn run(venue: &Far, cell: &Cell) -> Result<Run> {
    venue.lose(cell)?;
    let needless = || venue.hosts().map(duplicates).sum::<u64>();
    let before = (needless(), venue.ends.server.facts(), venue.dropped());
    let logged = venue.logged();
    let (seconds, client) = venue
        .lab
        .client
        .run(|| transfer(venue, cell).map_err(|e| e.to_string()))
        .map_err(|e| format!("{e}{}", venue.last_words()))?;
    let facts = if cell.up { client } else { minus(venue.ends.server.facts(), before.1) };
    let late = seconds.contains(&LIMIT.as_secs_f64());
    if late {
        // What is under way must not meet the next transfer.
        thread::sleep(Duration::from_secs(2));
    }
    let count = if cell.protocol == Protocol::Http { seconds.len() + 1 } else { 1 };
    let records = venue.records(&logged, if late { 0 } else { count });
    if !late && records.len() < venue.variant.translucent() {
        return Err("the connection has not met each proxy".into());
    }
    let seconds = Spread::of(seconds).ok_or("nothing was transferred")?.median;
    let counts = [
        (Figure::Retransmitted, f64::from(facts.retransmitted)),
        (Figure::Timeouts, f64::from(facts.timeouts)),
        (Figure::Needless, (needless() - before.0) as f64),
        (Figure::Dropped, (venue.dropped() - before.2) as f64),
    ];
    let mut run = Run::of(venue.variant, [(Figure::Value, seconds)].into_iter().chain(counts));
    run.notes.extend(late.then(|| CUT_OFF.to_owned()));
    run.notes.extend(records.iter().rev().find_map(|record| record.refusal.clone()));
    Ok(run.with(Figure::Spliced, share(&records, cell.up)))
}

/// The seconds of each transfer, and what the client's kernel has counted. Must be called in the client's namespace.
fn transfer(venue: &Far, cell: &Cell) -> Result<(Vec<f64>, SenderFacts)> {
    let mut began = Instant::now();
    let mut client = venue.connect(cell)?;
    let mut seconds = Vec::new();
    let warm = cell.protocol == Protocol::Http;
    for n in 0..if warm { REQUESTS + 1 } else { 1 } {
        if n > 0 {
            began = Instant::now();
        }
        let Some(ended) = client.transfer(cell.up, cell.bytes, began + LIMIT)? else {
            seconds.push(LIMIT.as_secs_f64());
            break;
        };
        let arrived = if cell.up { venue.ends.server.uploaded().ok_or("no upload arrived")? } else { ended };
        if !warm || n > 0 {
            seconds.push((arrived - began).as_secs_f64());
        }
    }
    Ok((seconds, client.facts()))
}

/// Segments that a host has received in vain: it reports each to the sender (RFC 2883).
fn duplicates(host: &Namespace) -> u64 {
    let reported = ["TCPDSACKOldSent", "TCPDSACKOfoSent"];
    reported.into_iter().filter_map(|name| host.counter("TcpExt", name)).sum()
}

/// Share of the sender's bytes that were forwarded while spliced; `None` without records.
fn share(records: &[Record], up: bool) -> Option<f64> {
    let sum = |of: fn(&Record) -> u64| records.iter().map(of).sum::<u64>() as f64;
    let (all, spliced) = match up {
        false => (sum(|r| r.bytes_down), sum(|r| r.spliced_down)),
        true => (sum(|r| r.bytes_up), sum(|r| r.spliced_up)),
    };
    (all > 0.0).then(|| spliced / all)
}

/// Measures the memory of the forwarder's sockets with each proxy, while clients read slowly.
pub fn readers(bench: &Bench<'_>) -> Result<()> {
    let proxies = &VARIANTS[1..];
    let venues = bench.venues(proxies, |v| Far::set(v, Shape::TwoDevices))?;
    bench.some_rounds(1, Section::Readers, "", proxies, |v| read_slowly(venues.of(v)?, &SLOW.parse()?))
}

fn read_slowly(venue: &Far, cell: &Cell) -> Result<Run> {
    venue.prepare(cell)?;
    let began = Instant::now();
    let read = || venue.connect(cell)?.read_slowly(cell.bytes, PER_SECOND);
    let samples = Mutex::new(Vec::new());
    let outcome = thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| venue.lab.client.run(read))).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            thread::sleep(EVERY);
            samples.lock().expect("one thread").push(socket_memory(&venue.lab.forwarder)? as f64 / CLIENTS as f64);
        }
        for thread in threads {
            thread.join().map_err(|_| "a reader panicked")??;
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    });
    outcome?;
    let samples = samples.into_inner().expect("one thread");
    let figures = [
        (Figure::Amount, CLIENTS as f64),
        (Figure::Value, Spread::of(samples.iter().copied()).ok_or("no sample")?.median),
        (Figure::Peak, samples.iter().copied().fold(0.0, f64::max)),
        (Figure::Seconds, began.elapsed().as_secs_f64()),
    ];
    Ok(Run::of(venue.variant, figures))
}

/// Measures unsplices.
pub fn unsplices(bench: &Bench<'_>) -> Result<()> {
    let variants = [Variant::Spliced];
    let venues = bench.venues(&variants, |v| Far::set(v, Shape::TwoDevices))?;
    UNSPLICED.into_iter().try_for_each(|row| {
        let cell: Cell = row.parse()?;
        venues.all().try_for_each(|venue| venue.prepare(&cell))?;
        bench.rounds(Section::Unsplice, row, &variants, |v| {
            let venue = venues.of(v)?;
            unsplice(venue, &cell).map_err(|e| format!("{e}{}", venue.last_words()).into())
        })
    })
}

fn unsplice(venue: &Far, cell: &Cell) -> Result<Run> {
    let beyond = || venue.lab.forwarder.counter("TcpExt", "BeyondWindow");
    let without = fetch(venue, cell, || Ok(()))?;
    let mut control = venue.control(PROXIES[0])?;
    let ended = || longsplice::flows(&mut control).is_ok_and(|rows| rows.is_empty()).then_some(());
    wait_for(PATIENCE, ended).ok_or("the connection did not end in time")?;
    let before = (beyond(), venue.ends.server.facts());
    let with = fetch(venue, cell, || take_back(venue, cell.bytes / 2))?;
    let facts = minus(venue.ends.server.facts(), before.1);
    let figures = [
        (Figure::Value, without),
        (Figure::Unsplice, with),
        (Figure::Retransmitted, f64::from(facts.retransmitted)),
        (Figure::Timeouts, f64::from(facts.timeouts)),
    ];
    let beyond = beyond().zip(before.0).map(|(after, before)| (after - before) as f64);
    Ok(Run::of(venue.variant, figures).with(Figure::BeyondWindow, beyond))
}

/// Fetches the object, and returns the seconds. The connection stays open until `meanwhile` has ended, too.
fn fetch(venue: &Far, cell: &Cell, meanwhile: impl FnOnce() -> Result<()> + Send) -> Result<f64> {
    let began = Instant::now();
    let mut client = venue.lab.client.run(|| venue.connect(cell))?;
    let (ended, done) = thread::scope(|scope| {
        let meanwhile = scope.spawn(|| meanwhile().map_err(|e| e.to_string()));
        (client.transfer(cell.up, cell.bytes, began + LIMIT), meanwhile.join())
    });
    done.map_err(|_| "what was to be done meanwhile has panicked")??;
    Ok(ended?.map_or(LIMIT, |ended| ended - began).as_secs_f64())
}

/// Unsplices the flow that is open once it is spliced and this many bytes have come from the server. Not after a
/// time: transfers of the same object differ in their duration, with BBR by a factor of some.
fn take_back(venue: &Far, after: u64) -> Result<()> {
    let mut control = venue.control(PROXIES[0])?;
    let found = wait_for(LIMIT, || match longsplice::flows(&mut control) {
        Ok(rows) => rows.iter().find(|row| row.state == "spliced" && row.bytes_down >= after).map(|row| Ok(row.id)),
        Err(e) => Some(Err(e)),
    });
    let id = found.ok_or("no flow was spliced and half-way in time")??;
    control.ask(Ask::Unsplice { id })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::results::Part, *};

    #[test]
    fn the_default_policy_is_compared_with_the_slower() {
        let words = verdict(&super::super::report::tests::paths()).unwrap();
        for part in ["1.25 times at most (c100, 1 MB, bbr)", "have 1 timeout, and 3 segments in vain"] {
            assert!(words.contains(part), "no {part:?} in {words}");
        }
        assert_eq!(verdict(&Results::new(Part::Wan, 1)), None);
    }

    #[test]
    fn the_share_of_spliced_bytes() {
        let record =
            |bytes_down, spliced_down| Record { bytes_up: 10, bytes_down, spliced_up: 0, spliced_down, refusal: None };
        let records = [record(100, 0), record(300, 200)];
        assert_eq!(share(&records, false), Some(0.5));
        assert_eq!(share(&records, true), Some(0.0));
        assert_eq!(share(&[], false), None);
    }
}
