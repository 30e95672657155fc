//! The plan of a connection. All of it follows from the seed, which is the first word of the client's stream: the server knows
//! it, too.

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::time::Duration;

/// The bits of a seed that select the kind.
const KIND: u64 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Over at once.
    Short,
    /// Both hosts send a little, again and again.
    Paced,
    /// Little data, with pauses long enough for a release.
    Idle,
    /// Much data in little time.
    Bulk,
    /// Much data to a host that reads slowly: a switch has to drain for long.
    Slow,
    /// One host has sent all of its data long before the other.
    Half,
    /// A host sends once it has received what the other one has sent.
    Talk,
    /// One host resets the connection after its last byte.
    Reset,
}

impl Kind {
    pub const ALL: [Kind; 8] =
        [Kind::Short, Kind::Paced, Kind::Idle, Kind::Bulk, Kind::Slow, Kind::Half, Kind::Talk, Kind::Reset];

    /// A kind that lasts.
    pub fn lasting(r: &mut SmallRng) -> Kind {
        use Kind::*;
        let all = [Paced, Paced, Paced, Paced, Idle, Idle, Idle, Bulk, Slow, Slow, Half, Talk, Talk, Reset];
        all[r.random_range(0..all.len())]
    }
}

/// Something that a host sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Before that.
    pub pause: Duration,
    pub bytes: u64,
    /// Not before so many bytes have come.
    pub after: u64,
}

/// What one host does.
#[derive(Clone, Debug, Default)]
pub struct Half {
    pub steps: Vec<Step>,
    /// Bytes that it reads at a time, and the pause after that.
    pub reads: Option<(usize, Duration)>,
    /// It resets the connection after its last step.
    pub resets: bool,
}

impl Half {
    pub fn total(&self) -> u64 {
        self.steps.iter().map(|step| step.bytes).sum()
    }

    fn of(steps: impl IntoIterator<Item = (u64, u64)>) -> Half {
        let step = |(pause, bytes)| Step { pause: Duration::from_millis(pause), bytes, after: 0 };
        Half { steps: steps.into_iter().map(step).collect(), ..Half::default() }
    }
}

/// What both hosts do: the client first.
#[derive(Clone, Debug)]
pub struct Plan {
    pub halves: [Half; 2],
    /// How long that takes, if nothing is in its way.
    pub lasts: Duration,
}

impl Plan {
    /// The seed of a new connection.
    pub fn seed(kind: Kind, r: &mut SmallRng) -> u64 {
        r.random::<u64>() & !KIND | kind as u64
    }

    /// The kind of a connection.
    pub fn kind(seed: u64) -> Kind {
        Kind::ALL[(seed & KIND) as usize]
    }

    /// The plan for a seed.
    pub fn of(seed: u64) -> Plan {
        let r = &mut SmallRng::seed_from_u64(seed);
        let first = r.random_range(0..2);
        let mut halves = match Plan::kind(seed) {
            Kind::Short => [0; 2].map(|_| Half::of([(0, 8 << r.random_range(0..10))])),
            Kind::Paced => paced(r, 5000..25_000),
            Kind::Idle => {
                let rests: Vec<u64> = (0..r.random_range(2..5)).map(|_| r.random_range(1500..5000)).collect();
                [0; 2].map(|_| Half::of(rests.iter().map(|rest| (*rest, r.random_range(100..20_000)))))
            }
            Kind::Bulk => in_order(first, Half::of([(0, r.random_range(1_000_000..4_000_000))]), little(r)),
            Kind::Slow => {
                let bytes = r.random_range(300_000..900_000);
                let reads = Some((16_384, Duration::from_millis(r.random_range(50..250))));
                in_order(first, Half::of([(0, bytes)]), Half { reads, ..little(r) })
            }
            Kind::Half => {
                let mut both = paced(r, 5000..20_000);
                both[first] = little(r);
                both
            }
            Kind::Talk => talk(r),
            Kind::Reset => {
                let mut both = paced(r, 2000..10_000);
                both[first].resets = true;
                // the other host has something to send for longer
                both[1 - first].steps.extend(paced(r, 30_000..30_001)[0].steps.clone());
                both
            }
        };
        // its seed has to arrive
        halves[0].steps.insert(0, Step { bytes: 8, ..Step::default() });
        let pauses = |half: &Half| half.steps.iter().map(|step| step.pause).sum::<Duration>();
        let reading = |[half, other]: [&Half; 2]| {
            half.reads.map_or(Duration::ZERO, |(bytes, pause)| pause * (other.total() / bytes as u64 + 1) as u32)
        };
        let [one, other] = [&halves[0], &halves[1]];
        let lasts = pauses(one) + pauses(other) + reading([one, other]) + reading([other, one]);
        Plan { halves, lasts }
    }
}

fn in_order(first: usize, one: Half, other: Half) -> [Half; 2] {
    if first == 0 { [one, other] } else { [other, one] }
}

fn little(r: &mut SmallRng) -> Half {
    Half::of([(r.random_range(0..500), r.random_range(1..20_000))])
}

/// Both send for so many milliseconds.
fn paced(r: &mut SmallRng, lasts: std::ops::Range<u64>) -> [Half; 2] {
    let lasts = r.random_range(lasts);
    [0; 2].map(|_| {
        let (every, most) = (r.random_range(50..500), 100 << r.random_range(0..7));
        Half::of((0..lasts / every).map(|_| (every, r.random_range(1..=most))))
    })
}

fn talk(r: &mut SmallRng) -> [Half; 2] {
    let (mut both, mut said) = ([Half::default(), Half::default()], [8, 0]);
    let slowly = r.random_range(0..400);
    for _ in 0..r.random_range(20..60) {
        for who in 0..2 {
            let pause = Duration::from_millis(r.random_range(0..=slowly));
            let bytes = r.random_range(1..3000);
            both[who].steps.push(Step { pause, bytes, after: said[1 - who] });
            said[who] += bytes;
        }
    }
    both
}
