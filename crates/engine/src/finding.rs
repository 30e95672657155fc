//! What was measured of a path that was refused ([`Refusal::Path`](crate::Refusal::Path)), and what decided.

use longsplice_datapath::{Pair, Side};
use std::{fmt, time::Duration};

/// Why the path of a flow was refused, with the measured values: those that [`PathRule`](crate::PathRule) is about.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PathFinding {
    /// What decided.
    pub cause: PathCause,
    /// The sender that a splice would slow down, or has slowed down.
    pub sender: Side,
    /// Minimum round-trip time of each leg in microseconds; 0: not measured.
    pub rtt_us: Pair<u32>,
    /// Part of the segments to the receiver that was lost.
    pub loss: f32,
}

/// What decided that a path is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum PathCause {
    /// The whole path takes more than `rtt_ratio` times the round-trip time of the sender's leg.
    Rtt,
    /// More than `loss` of the segments to the receiver were lost.
    Loss,
    /// The sender's queue stayed too long for a switch that nobody notices.
    Queue,
    /// The flow fell below half of its rate after a splice, and was taken back.
    Rate,
    /// The client is far and the server near: the flow was spliced before anything was copied. This refuses nothing.
    Far,
}

impl PathFinding {
    pub(crate) fn new(cause: PathCause, sender: Side, rtt: Pair<Option<Duration>>, loss: f32) -> PathFinding {
        let micros = |rtt: Option<Duration>| rtt.map_or(0, |rtt| rtt.as_micros().try_into().unwrap_or(u32::MAX));
        PathFinding { cause, sender, rtt_us: rtt.map(micros), loss }
    }
}

impl PathCause {
    /// Returns the label used in logs and lists.
    pub fn as_str(self) -> &'static str {
        match self {
            PathCause::Rtt => "rtt",
            PathCause::Loss => "loss",
            PathCause::Queue => "queue",
            PathCause::Rate => "rate",
            PathCause::Far => "far",
        }
    }
}

/// `rtt, client 40.1 ms, server 0.5 ms, loss 0.0012, sender server`
impl fmt::Display for PathFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.cause.as_str())?;
        for (name, us) in [("client", self.rtt_us.client), ("server", self.rtt_us.server)] {
            match us {
                0 => write!(f, ", {name} not measured")?,
                us => write!(f, ", {name} {:.1} ms", f64::from(us) / 1000.0)?,
            }
        }
        let sender = if self.sender == Side::Client { "client" } else { "server" };
        write!(f, ", loss {:.4}, sender {sender}", self.loss)
    }
}

#[test]
fn a_finding_has_its_numbers() {
    let rtt = Pair::new(Some(Duration::from_micros(40_140)), None);
    let found = PathFinding::new(PathCause::Loss, Side::Server, rtt, 0.0123);
    assert_eq!(found.to_string(), "loss, client 40.1 ms, server not measured, loss 0.0123, sender server");
}
