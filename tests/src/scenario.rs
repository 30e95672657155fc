//! Scenario files: each describes one situation, which runs in several
//! [`Mode`]s. An end must not be able to tell the modes apart.
//!
//! A file defines who sends what and when ([`End`]), the impairments of the network, and how the run must end ([`Expect`]).
//! It does not mention splicing, except for [`Splice`]: the moment of a splice that the situation is about.

mod run;

pub use run::{Stage, run};

use longsplice_engine::{EndReason, Refusal};
use longsplice_lab::{
    Family, Impair, InOrder, LinkDirection, Options, Shape,
    traffic::{Chunks, Ending, Marks, Script, Start},
};
use serde::Deserialize;
use std::{collections::BTreeMap, time::Duration};

/// Time limit for a run; after it the run counts as hanging.
const DEADLINE: Duration = Duration::from_secs(12);

/// A file in tests/scenarios.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    /// One sentence that describes the situation.
    pub about: String,
    /// Address families of both sides.
    #[serde(default = "both_families")]
    pub families: Vec<Families>,
    /// The forwarder has a single device.
    #[serde(default)]
    pub one_armed: bool,
    /// Segmentation offload; off where losses have to be realistic.
    #[serde(default = "yes")]
    pub large_packets: bool,
    /// MTU of the client's link.
    #[serde(default = "ethernet")]
    pub mtu_client: u32,
    /// MTU of the server's link.
    #[serde(default = "ethernet")]
    pub mtu_server: u32,
    /// Number of simultaneous connections.
    #[serde(default = "two")]
    pub connections: u64,
    /// Connections come from two client addresses in turn.
    #[serde(default)]
    pub two_clients: bool,
    /// Bytes copied in both directions together before the splice of [`Mode::SplicedLater`].
    #[serde(default = "default_after")]
    pub splice_after: u64,
    /// Maximum time between two random switches in milliseconds.
    #[serde(default = "default_switch")]
    pub switch_ms: u64,
    /// The moment of a splice that the situation is about.
    pub splice: Option<Splice>,
    /// Sysctls of the three hosts.
    #[serde(default)]
    pub sysctl: BTreeMap<Host, BTreeMap<String, String>>,
    /// Impairments of the links.
    #[serde(default)]
    pub impair: BTreeMap<LinkDirection, Impairing>,
    /// The queues of the forwarder's devices, if they are short.
    pub queue: Option<Queue>,
    /// The end that connects.
    pub client: End,
    /// The end that accepts.
    pub server: End,
    /// The expected end of the run.
    #[serde(default)]
    pub expect: Expect,
}

fn both_families() -> Vec<Families> {
    vec![Families::V4, Families::V6]
}
fn yes() -> bool {
    true
}
fn ethernet() -> u32 {
    1500
}
fn two() -> u64 {
    2
}
fn default_after() -> u64 {
    100_000
}
fn default_switch() -> u64 {
    15
}

/// Address families of the client's side and the server's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Families {
    V4,
    V6,
    V4ToV6,
    V6ToV4,
}

impl Families {
    /// The address family of the client's side.
    pub fn client(self) -> Family {
        if matches!(self, Families::V4 | Families::V4ToV6) { Family::V4 } else { Family::V6 }
    }

    /// The address family of the server's side.
    pub fn server(self) -> Family {
        if matches!(self, Families::V4 | Families::V6ToV4) { Family::V4 } else { Family::V6 }
    }
}

/// A host of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Host {
    Client,
    Forwarder,
    Server,
}

/// Impairments of one direction.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[allow(missing_docs)]
pub struct Impairing {
    pub loss: f64,
    pub duplicate: f64,
    pub reorder: f64,
    pub delay_ms: u64,
}

impl Impairing {
    fn impair(self) -> Impair {
        Impair {
            loss: self.loss,
            duplicate: self.duplicate,
            reorder: self.reorder,
            delay: Duration::from_millis(self.delay_ms),
            ..Impair::default()
        }
    }
}

/// A queue that drops what does not fit: see [`Lab::shorten_queues`](longsplice_lab::Lab::shorten_queues).
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[allow(missing_docs)]
pub struct Queue {
    pub bytes: u32,
    pub mbit: u32,
}

/// Splice once this many bytes have passed each way, after a delay.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Splice {
    /// Bytes from the client.
    pub up: u64,
    /// Bytes from the server.
    pub down: u64,
    /// Delay in milliseconds.
    pub after_ms: u64,
    /// The expected refusal of the splice.
    pub refusal: Option<Refused>,
}

/// Refusals that a scenario can cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Refused {
    Closing,
    DrainTimeout,
    Mtu,
    Options,
}

impl Refused {
    fn refusal(self) -> Refusal {
        match self {
            Refused::Closing => Refusal::Closing,
            Refused::DrainTimeout => Refusal::DrainTimeout,
            Refused::Mtu => Refusal::Mtu,
            Refused::Options => Refusal::Options,
        }
    }
}

/// The behaviour of one end, in the terms of [`Script`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[allow(missing_docs)]
pub struct End {
    pub bytes: u64,
    pub pace: Option<u64>,
    /// Minimum and maximum size of a write.
    pub chunks: Option<[usize; 2]>,
    /// Positions of urgent bytes.
    pub urgent: Vec<u64>,
    /// How urgent bytes from the other end are received.
    pub marks: Received,
    pub start_received: Option<u64>,
    pub start_ms: Option<u64>,
    pub ahead: Option<u64>,
    pub ending: Finish,
    /// Reset by this end when it has received this many bytes.
    pub reset_received: Option<u64>,
    pub read_size: Option<usize>,
    /// Position and duration in milliseconds.
    pub pauses: Vec<[u64; 2]>,
    pub receive_buffer: Option<usize>,
    pub send_buffer: Option<usize>,
    pub max_segment: Option<u32>,
    /// This end sends before it has received anything.
    pub speaks_first: bool,
}

/// How urgent bytes are received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Received {
    #[default]
    Never,
    Inline,
    Apart,
}

impl Received {
    fn marks(self) -> Option<Marks> {
        match self {
            Received::Never => None,
            Received::Inline => Some(Marks::Inline),
            Received::Apart => Some(Marks::Apart),
        }
    }
}

/// How an end finishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Finish {
    #[default]
    HalfClose,
    Hold,
    Close,
    Reset,
}

impl End {
    fn fill(&self, s: Script) -> Script {
        let start = match (self.start_received, self.start_ms) {
            (Some(n), _) => Start::Received(n),
            (None, Some(ms)) => Start::Delay(Duration::from_millis(ms)),
            (None, None) => Start::AtOnce,
        };
        let ending = match (self.reset_received, self.ending) {
            (Some(n), _) => Ending::ResetReceived(n),
            (None, Finish::HalfClose) => Ending::HalfClose,
            (None, Finish::Hold) => Ending::Hold,
            (None, Finish::Close) => Ending::Close,
            (None, Finish::Reset) => Ending::Reset,
        };
        let mut s = s.bytes(self.bytes).start(start).ending(ending).deadline(DEADLINE);
        for [at, ms] in &self.pauses {
            s = s.pause(*at, Duration::from_millis(*ms));
        }
        Script {
            pace: self.pace,
            ahead: self.ahead,
            chunks: self.chunks.map_or(s.chunks, |[a, b]| if a == b { Chunks::Fixed(a) } else { Chunks::Random(a, b) }),
            urgent: self.urgent.clone(),
            marks: self.marks.marks(),
            read_size: self.read_size.unwrap_or(s.read_size),
            receive_buffer: self.receive_buffer,
            send_buffer: self.send_buffer,
            max_segment: self.max_segment,
            ..s
        }
    }
}

/// The expected end of a run, in every mode.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Expect {
    /// Which end ends the connection.
    pub how: Ended,
    /// Why no flow is spliced, in any mode.
    pub refusal: Option<Refused>,
    /// A reset may overtake data: the receiver gets only the beginning of the stream.
    pub cut: bool,
    /// Old duplicates may occur, and be rejected by timestamp.
    pub old_duplicates: bool,
    /// No end waits for a retransmission timer. Only for situations without
    /// loss, delay or small segments, and not checked in [`Mode::Switched`].
    pub no_timeouts: bool,
}

/// Which end ends the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Ended {
    #[default]
    Closed,
    ClientReset,
    ServerReset,
}

impl Ended {
    fn how(self) -> EndReason {
        match self {
            Ended::Closed => EndReason::Closed,
            Ended::ClientReset => EndReason::ClientReset,
            Ended::ServerReset => EndReason::ServerReset,
        }
    }
}

/// How the forwarder handles the flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Never spliced.
    Copy,
    /// Spliced before the first byte, if the engine is fast enough.
    Spliced,
    /// Spliced after [`Scenario::splice_after`] bytes.
    SplicedLater,
    /// Spliced at [`Scenario::splice`].
    SplicedThen,
    /// Spliced and unspliced repeatedly. With clients of IPv6, connections are adopted before their first splice.
    Switched,
    /// Copied by other code, for up to [`Scenario::splice_after`] bytes, then adopted in the midst of everything, and spliced.
    Adopted,
}

impl Mode {
    /// The modes that a scenario runs in.
    pub fn of(s: &Scenario) -> Vec<Mode> {
        let mut all = vec![Mode::Copy, Mode::Spliced, Mode::Switched];
        if s.client.bytes + s.server.bytes > s.splice_after {
            all.push(Mode::SplicedLater);
            // other code offers servers what their clients lack, and does not know urgent data
            let lacks =
                |settings: &BTreeMap<String, String>| settings.keys().any(|name| name.ends_with("tcp_timestamps"));
            if !s.sysctl.values().any(lacks) && s.client.urgent.is_empty() && s.server.urgent.is_empty() {
                all.push(Mode::Adopted);
            }
        }
        if s.splice.is_some() {
            all.push(Mode::SplicedThen);
        }
        all
    }
}

impl Scenario {
    /// Parses a file.
    pub fn parse(text: &str) -> Scenario {
        toml::from_str(text).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Whether the answer to a duplicate may overtake a host's last acknowledgement.
    fn overtakes(&self) -> bool {
        self.expect.how == Ended::Closed && self.impair.values().any(|i| i.reorder > 0.0)
    }

    fn shape(&self) -> Shape {
        if self.one_armed { Shape::OneArmed } else { Shape::TwoDevices }
    }

    /// With IPv4 clients everything arrives in order, so that nothing may be rejected as old; with IPv6 clients the
    /// forwarder processes packets of one direction on all CPUs at the same time.
    fn options(&self, families: Families) -> Options {
        Options {
            in_order: match families.client() {
                Family::V4 => InOrder::All,
                Family::V6 => InOrder::EndHosts,
            },
            mtu_client: self.mtu_client,
            mtu_server: self.mtu_server,
            large_packets: self.large_packets,
            ..Options::default()
        }
    }

    fn opener(&self, seed: u64) -> Script {
        self.client.fill(Script::opener(seed))
    }

    /// An end that speaks first must know the seed, so all connections use the same one in this case.
    fn answerer(&self) -> Script {
        self.server.fill(if self.server.speaks_first { Script::answerer_of(SEED) } else { Script::answerer() })
    }

    fn seed(&self, connection: u64) -> u64 {
        if self.server.speaks_first { SEED } else { SEED + connection }
    }
}

const SEED: u64 = 4242;
