//! Throughput by the ratio of data to acknowledgements (Table III of the connection-splicing paper): derived from the cost
//! of segments, and measured by a transfer in MTU-size packets, everything on one CPU, whose receivers acknowledge as they
//! are told to. How they really did is counted at the client's device.

use super::{
    Bench, Result, bulk,
    counters::Device,
    results::{Case, Run, Summary},
    segment::{self, on_one_cpu},
    subject::Subject,
    variant::Variant,
    venue::{Packets, Venue, coalesce},
};
use longsplice_lab::{Lab, Namespace};

/// Segments to one acknowledgement, as in the paper.
pub const SEGMENTS: [u64; 3] = [3, 2, 1];
/// As in the paper, with the router and the most usual peer.
pub const VARIANTS: [Variant; 4] = [Variant::IpForward, Variant::Spliced, Variant::Copy, Variant::Haproxy];

/// The client sleeps until so much has come, and TCP acknowledges as it should meanwhile. On one CPU a reader that is always
/// awake is always late, and TCP then acknowledges only what has been read: one segment in ten, or in twenty.
const UNREAD: u32 = 1 << 20;

/// All ratios.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    let case = |segments| {
        let venues = bench.venues(&VARIANTS, Packets::Mtu)?;
        for venue in venues.all() {
            acknowledge(&venue.lab, segments)?;
        }
        bench.rounds(Subject::Ratio { segments }, &VARIANTS, |v| run(venues.of(v)?, bench.seconds))
    };
    on_one_cpu(|| SEGMENTS.into_iter().map(case).collect())
}

/// Two is what Linux does. One: the routes say so, at the client and where a proxy receives. Three: the client's device
/// puts so many together before TCP sees them, and TCP acknowledges the whole.
fn acknowledge(lab: &Lab, segments: u64) -> Result<()> {
    let ip = |host: &Namespace, words: &str| host.execute("ip", &words.split(' ').collect::<Vec<_>>());
    match segments {
        1 => {
            ip(&lab.client, "route replace default via 10.77.1.1 dev c0 quickack 1")?;
            ip(&lab.client, "route replace 10.77.1.0/24 dev c0 src 10.77.1.2 quickack 1")?;
            ip(&lab.forwarder, "route replace 10.77.2.0/24 dev f1 src 10.77.2.1 quickack 1")?;
        }
        3 => {
            // Headers and three segments fit, a fourth does not.
            ip(&lab.client, "link set dev c0 gro_max_size 5000")?;
            coalesce(&lab.client, "c0")?;
        }
        _ => {}
    }
    Ok(())
}

fn run(venue: &Venue, seconds: f64) -> Result<Run> {
    let pairs = venue.connect(1)?;
    for pair in &pairs {
        longsplice_datapath::low_water(&pair.client, UNREAD)?;
    }
    let before = Device::of(&venue.lab.client, "c0")?;
    let (bytes, cost) = bulk::transfer_over(pairs, seconds)?;
    let after = Device::of(&venue.lab.client, "c0")?;
    let (megabytes, cpu) = (bytes as f64 / 1e6, cost.cpu * 1e9 / bytes as f64);
    // A device that waits for more to come leaves the CPU idle meanwhile: what counts is what a busy one carries.
    let value = megabytes / (cost.seconds * cost.first_busy.max(0.01));
    let mut run = Run::new(venue.variant, cost, bytes as f64, value, cpu);
    run.per_ack = Some((after.received - before.received) as f64 / (after.sent - before.sent).max(1) as f64);
    Ok(run)
}

/// MB/s with the costs of Table II: so many large segments and one small one take so long. End hosts included.
pub fn derived(summary: &Summary, variant: Variant, segments: f64) -> Option<f64> {
    let cost = |bytes| summary.line(Subject::Segment { bytes }, variant).map(|line| line.value.median);
    throughput(segments, cost)
}

/// The same for the forwarder by itself: without what two hosts on one wire take.
pub fn derived_alone(summary: &Summary, variant: Variant, segments: f64) -> Option<f64> {
    throughput(segments, |bytes| alone(summary, bytes, variant))
}

/// Cost of a segment in the forwarder, in microseconds.
pub fn alone(summary: &Summary, bytes: u64, variant: Variant) -> Option<f64> {
    let of = |v| summary.line(Subject::Segment { bytes }, v).map(|line| line.value.median);
    Some(of(variant)? - of(Variant::Direct)?).filter(|micros| *micros > 0.0)
}

/// An acknowledgement without data is taken for as costly as a segment of one byte, as in the paper.
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
        // 2-path and IP/FWD of its Table II come to the corners of its Table III, with its 1460 bytes per segment.
        let of = |small, large, n| throughput(n, |bytes| Some(if bytes == 1 { small } else { large })).unwrap();
        let paper = 1460.0 / segment::BYTES[1] as f64;
        assert_eq!((of(68.5, 101.1, 3.0) * paper).round(), 12.0);
        assert_eq!((of(24.0, 24.0, 1.0) * paper * 10.0).round(), 304.0);
    }
}
