//! The plan of a connection. All of it follows from the seed, which
//! is the first word of its stream, so the server knows it, too.

use longsplice_lab::traffic::{Amount, Chunks, Ending, Role, Script, Start};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::time::Duration;

/// A host that still waits this long after the planned time of a connection has been left hanging.
pub const HANGS: Duration = Duration::from_secs(60);
/// The bits of a seed that select the kind.
const KIND: u64 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Both hosts send for a while at different rates, and stop reading now and then.
    Long,
    /// Little data, with pauses long enough for a release.
    Idle,
    /// Much data in little time.
    Fast,
    /// One host sends all of its data long before the other.
    HalfClosed,
    /// One host resets in the middle of the stream.
    Reset,
    /// Over at once.
    Short,
    /// Over at once, by a reset.
    Cut,
}

impl Kind {
    pub const ALL: [Kind; 7] =
        [Kind::Long, Kind::Idle, Kind::Fast, Kind::HalfClosed, Kind::Reset, Kind::Short, Kind::Cut];

    /// A kind that does not.
    pub fn passing(r: &mut SmallRng) -> Kind {
        [Kind::Short, Kind::Short, Kind::Cut][r.random_range(0..3)]
    }

    /// A kind that lasts.
    pub fn lasting(r: &mut SmallRng) -> Kind {
        [Kind::Long, Kind::Long, Kind::Long, Kind::Idle, Kind::Idle, Kind::Fast, Kind::HalfClosed, Kind::Reset]
            [r.random_range(0..8)]
    }
}

/// The scripts of both ends of a connection.
pub struct Plan {
    pub opener: Script,
    pub answerer: Script,
    /// The end that resets the connection.
    pub reset_by: Option<Role>,
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Plan {
    /// The seed of a new connection.
    pub fn seed(kind: Kind, r: &mut SmallRng) -> u64 {
        r.random::<u64>() & !KIND | kind as u64
    }

    /// The plan for a seed; `None` if it is not one of ours.
    pub fn of(seed: u64) -> Option<Plan> {
        let kind = *Kind::ALL.get((seed & KIND) as usize)?;
        let r = &mut SmallRng::seed_from_u64(seed);
        let mut ends = [Script::opener(seed), Script::answerer_of(seed)];
        for end in &mut ends {
            end.chunks = Chunks::Random(1, 32 * 1024);
            end.nodelay = r.random();
        }
        let first = r.random_range(0..2);
        let mut reset_by = None;
        let time = match kind {
            Kind::Long => long(&mut ends, r),
            Kind::Idle => idle(&mut ends, r),
            Kind::Fast => {
                ends[first].send = bytes(r.random_range(4_000_000..20_000_000));
                ends[1 - first].send = bytes(r.random_range(0..100_000));
                ends.iter_mut().for_each(|end| end.pace = Some(10_000_000));
                2
            }
            Kind::HalfClosed => {
                let little = r.random_range(8..50_000);
                ends[first].send = bytes(little);
                // the opener speaks first
                let after = if first == 0 { Start::Received(little) } else { Start::AtOnce };
                ends[1 - first].start = if r.random() { after } else { Start::Delay(seconds(1)) };
                let time = r.random_range(5..20);
                let pace = r.random_range(20_000..400_000);
                (ends[1 - first].send, ends[1 - first].pace) = (bytes(pace * time), Some(pace));
                time + 1
            }
            Kind::Reset => {
                let time = long(&mut ends, r);
                let pace = ends[first].pace.unwrap_or(1);
                ends[first].send = bytes(r.random_range(8..pace * time));
                ends[first].ending = Ending::Reset;
                // the other end must not end by itself before
                let other = ends[1 - first].pace.unwrap_or(1);
                ends[1 - first].send = bytes(other * time * 3);
                reset_by = Some(ends[first].role);
                time
            }
            Kind::Short => {
                ends.iter_mut().for_each(|end| end.send = bytes(8 << r.random_range(0..14)));
                1
            }
            Kind::Cut => {
                ends[first].send = bytes(8 << r.random_range(0..14));
                ends[first].ending = Ending::Reset;
                // the other end must not end by itself before
                (ends[1 - first].send, ends[1 - first].pace) = (bytes(4_000_000), Some(1_000_000));
                reset_by = Some(ends[first].role);
                1
            }
        };
        // the seed has to arrive, so the opener must send at least that
        if let Amount::Bytes(..8) = ends[0].send {
            ends[0].send = bytes(8);
        }
        let [opener, answerer] = ends.map(|end| end.deadline(seconds(time) + HANGS));
        Some(Plan { opener, answerer, reset_by })
    }
}

fn bytes(bytes: u64) -> Amount {
    Amount::Bytes(bytes)
}

/// Plans a long connection. Like the functions below, returns its duration in seconds.
fn long(ends: &mut [Script; 2], r: &mut SmallRng) -> u64 {
    let time = r.random_range(6..25);
    for end in ends {
        let pace = r.random_range(5_000..400_000);
        (end.pace, end.send) = (Some(pace), bytes(pace * time));
        if r.random() {
            *end = end.clone().pause(r.random_range(0..100_000), Duration::from_millis(r.random_range(10..2000)));
        }
    }
    time
}

fn idle(ends: &mut [Script; 2], r: &mut SmallRng) -> u64 {
    let rests = [0; 3].map(|_| r.random_range(2000..7000));
    for end in ends {
        end.send = bytes(r.random_range(30_000..300_000));
        for (n, rest) in (1..).zip(rests) {
            *end = end.clone().rest(n * 8000, Duration::from_millis(rest));
        }
    }
    rests.iter().sum::<u64>() / 1000 + 1
}
