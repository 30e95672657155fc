//! Throughput by the ratio of data to acknowledgements (Table III of the connection-splicing paper): derived from the cost
//! of segments, and measured by a transfer in MTU-size packets with everything on one CPU, whose receivers are set to a
//! ratio. The actual ratio is counted at the client's device. Three to one is derived only: Linux acknowledges every second
//! segment. A device that puts three together waits for them, and the one CPU does nothing meanwhile.

use super::{
    Bench, Result, bulk,
    counters::Device,
    network::Packets,
    results::{Case, Figure, Line, Results, Run},
    segment::{self, on_one_cpu},
    subject::Subject,
    variant::Variant,
    venue::Near,
};
use longsplice_lab::{Lab, Namespace};

/// Segments per acknowledgement, as in the paper.
pub const SEGMENTS: [u64; 3] = [3, 2, 1];
const MEASURED: [u64; 2] = [2, 1];
/// The variants of the paper, with the router and the most common peer.
pub const VARIANTS: [Variant; 4] = [Variant::IpForward, Variant::Spliced, Variant::Copy, Variant::Haproxy];

/// Bytes that must have arrived before the client wakes up; meanwhile TCP acknowledges at the set ratio. On one CPU a reader
/// that never sleeps is always behind, and TCP then acknowledges only what has been read: one segment in ten or twenty.
const UNREAD: u32 = 1 << 20;

/// Measures all ratios.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    let case = |segments| {
        let venues = bench.venues(&VARIANTS, |v| Near::set(v, Packets::Mtu))?;
        for venue in venues.all() {
            acknowledge(&venue.lab, segments)?;
        }
        bench.rounds(Subject::Ratio { segments }, &VARIANTS, |v| run(venues.of(v)?, bench.seconds))
    };
    on_one_cpu(|| MEASURED.into_iter().map(case).collect())
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
pub fn derived(results: &Results, variant: Variant, segments: f64) -> Option<f64> {
    throughput(segments, |bytes| results.line(Subject::Segment { bytes }, variant).map(Line::value))
}

/// The same for the forwarder alone: without the cost of two directly connected hosts.
pub fn derived_alone(results: &Results, variant: Variant, segments: f64) -> Option<f64> {
    throughput(segments, |bytes| {
        let of = |v| results.line(Subject::Segment { bytes }, v).map(Line::value);
        Some(of(variant)? - of(Variant::Direct)?).filter(|micros| *micros > 0.0)
    })
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
