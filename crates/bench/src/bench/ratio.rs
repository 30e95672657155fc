//! Throughput by the ratio of data to acknowledgements (Table III of the connection-splicing paper): derived from the cost
//! of segments, and measured by a transfer in MTU-size packets with everything on one CPU, whose receivers are set to a
//! ratio. The actual ratio is counted at the client's device. Three to one is derived only: Linux acknowledges every second
//! segment. A device that puts three together waits for them, and the one CPU does nothing meanwhile.

use super::{
    Bench, Result, bulk,
    counters::Device,
    network::Packets,
    results::{Figure, Line, Results, Run, Section, plural},
    segment::{self, on_one_cpu},
    variant::Variant,
    venue::Near,
};
use longsplice_lab::{Lab, Namespace};

/// The ratio that is derived only.
const DERIVED: u64 = 3;
/// Segments per acknowledgement that are measured; as in the paper, with [`DERIVED`].
const MEASURED: [u64; 2] = [2, 1];
/// The variants of the paper, with the router and the most common peer.
const VARIANTS: [Variant; 4] = [Variant::IpForward, Variant::Spliced, Variant::Copy, Variant::Haproxy];

/// Bytes that must have arrived before the client wakes up; meanwhile TCP acknowledges at the set ratio. On one CPU a reader
/// that never sleeps is always behind, and TCP then acknowledges only what has been read: one segment in ten or twenty.
const UNREAD: u32 = 1 << 20;

/// Measures all ratios.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    let case = |segments| {
        let venues = bench.venues(&VARIANTS, |v| Near::set(v, Packets::Mtu))?;
        for venue in venues.all() {
            acknowledge(&venue.lab, segments)?;
        }
        bench.rounds(Section::Ratio, &row(segments), &VARIANTS, |v| run(venues.of(v)?, bench.seconds))
    };
    on_one_cpu(|| MEASURED.into_iter().try_for_each(case))?;
    derive(&mut bench.results());
    Ok(())
}

fn row(segments: u64) -> String {
    format!("{segments}:1")
}

/// Adds what is derived from the cost of segments, to the lines measured, and in lines of its own before them.
fn derive(results: &mut Results) {
    let at = results.lines.iter().position(|l| l.section == Section::Ratio).unwrap_or(results.lines.len());
    let has = VARIANTS.into_iter().filter(|v| results.variants(Section::Segment).contains(v));
    let more: Vec<Line> = has.map(|v| Line::of(Section::Ratio, &row(DERIVED), v, [])).collect();
    results.lines.splice(at..at, more);
    let segments = Results { lines: results.lines_of(Section::Segment).cloned().collect(), ..results.clone() };
    for line in results.lines.iter_mut().filter(|l| l.section == Section::Ratio) {
        let ratio = line.row.trim_end_matches(":1").parse().unwrap_or_default();
        let all = [
            (Figure::DerivedAlone, derived_alone(&segments, line.variant, ratio)),
            (Figure::Derived, derived(&segments, line.variant, ratio)),
            (Figure::DerivedThen, line.get(Figure::PerAck).and_then(|n| derived(&segments, line.variant, n))),
        ];
        line.figures.extend(Line::of(line.section, "", line.variant, all).figures);
    }
}

/// Sets the ratio. Two is Linux's default. One is set by routes, at the client and where a proxy receives.
fn acknowledge(lab: &Lab, segments: u64) -> Result<()> {
    let ip = |host: &Namespace, words: &str| host.execute("ip", &words.split(' ').collect::<Vec<_>>());
    if segments == 1 {
        ip(&lab.client, "route replace default via 10.77.1.1 dev c0 quickack 1")?;
        ip(&lab.client, "route replace 10.77.1.0/24 dev c0 src 10.77.1.2 quickack 1")?;
        ip(&lab.forwarder, "route replace 10.77.2.0/24 dev f1 src 10.77.2.1 quickack 1")?;
    }
    Ok(())
}

fn run(venue: &Near, seconds: f64) -> Result<Run> {
    let pairs = venue.connect(1)?;
    for pair in &pairs {
        longsplice_datapath::low_water(&pair.client, UNREAD)?;
    }
    let before = Device::of(&venue.lab.client, "c0")?;
    let (bytes, cost) = bulk::transfer_over(pairs, seconds)?;
    let after = Device::of(&venue.lab.client, "c0")?;
    let (megabytes, cpu) = (bytes as f64 / 1e6, cost.cpu * 1e9 / bytes as f64);
    // Scale to a busy CPU.
    let value = megabytes / (cost.seconds * cost.first_busy.max(0.01));
    let per_ack = (after.received - before.received) as f64 / (after.sent - before.sent).max(1) as f64;
    Ok(Run::new(venue.variant, cost, bytes as f64, value, cpu).with(Figure::PerAck, Some(per_ack)))
}

/// MB/s derived from the costs of Table II, for `segments` large segments and one small one. End hosts included.
fn derived(results: &Results, variant: Variant, segments: f64) -> Option<f64> {
    throughput(segments, |bytes| cost(results, bytes, variant))
}

/// The same for the forwarder alone: without the cost of two directly connected hosts.
fn derived_alone(results: &Results, variant: Variant, segments: f64) -> Option<f64> {
    throughput(segments, |bytes| {
        let alone = cost(results, bytes, variant)? - cost(results, bytes, Variant::Direct)?;
        Some(alone).filter(|micros| *micros > 0.0)
    })
}

/// The measured cost of a segment, in microseconds.
pub fn cost(results: &Results, bytes: u64, variant: Variant) -> Option<f64> {
    results.line(Section::Segment, &plural(bytes, "byte"), variant).map(Line::value)
}

/// As in the paper, an acknowledgement without data is assumed to cost as much as a segment of one byte.
fn throughput(segments: f64, cost: impl Fn(u64) -> Option<f64>) -> Option<f64> {
    let [small, large] = segment::BYTES;
    // Bytes per microsecond are megabytes per second.
    Some(segments * large as f64 / (segments * cost(large)? + cost(small)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_the_paper() {
        // The values of 2-path and IP/FWD in its Table II yield the
        // corners of its Table III, with its 1460 bytes per segment.
        let of = |small, large, n| throughput(n, |bytes| Some(if bytes == 1 { small } else { large })).unwrap();
        let paper = 1460.0 / segment::BYTES[1] as f64;
        assert_eq!((of(68.5, 101.1, 3.0) * paper).round(), 12.0);
        assert_eq!((of(24.0, 24.0, 1.0) * paper * 10.0).round(), 304.0);
    }
}
