//! Scenario files: one situation each, run in several [`Mode`]s that must not differ in anything an end can see.
//!
//! A file says who sends what and when ([`End`]), what the network is like, and how it must end ([`Expect`]). It says
//! nothing of splicing, apart from [`Splice`]: the moment of a splice that the situation is about.

mod run;

pub use run::run;

use longsplice_engine::{EndReason, Refusal};
use longsplice_lab::{
    Family, Impair, InOrder, LinkDirection, Options, Shape,
    traffic::{Chunks, Ending, Marks, Script, Start},
};
use serde::Deserialize;
use std::{collections::BTreeMap, time::Duration};

/// Everything has ended by then, or it hangs.
const DEADLINE: Duration = Duration::from_secs(12);

/// One file of tests/scenarios.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    /// The situation in a sentence.
    pub about: String,
    /// Addresses of both sides.
    #[serde(default = "both_families")]
    pub families: Vec<Families>,
    /// The forwarder has a single device.
    #[serde(default)]
    pub one_armed: bool,
    /// Segmentation offload; none where losses are to be realistic.
    #[serde(default = "yes")]
    pub large_packets: bool,
    /// MTU of the client's link.
    #[serde(default = "ethernet")]
    pub mtu_client: u32,
    /// MTU of the server's link.
    #[serde(default = "ethernet")]
    pub mtu_server: u32,
    /// Connections at the same time.
    #[serde(default = "two")]
    pub connections: u64,
    /// Connections come from two addresses of the client in turn.
    #[serde(default)]
    pub two_clients: bool,
    /// Both directions together, copied before the splice of [`Mode::SplicedLater`].
    #[serde(default = "default_after")]
    pub splice_after: u64,
    /// Milliseconds at most from one random switch to the next.
    #[serde(default = "default_switch")]
    pub switch_ms: u64,
    /// The moment of a splice that the situation is about.
    pub splice: Option<Splice>,
    /// Sysctls of the three hosts.
    #[serde(default)]
    pub sysctl: BTreeMap<Host, BTreeMap<String, String>>,
    /// Impairments of the links.
    #[serde(default)]
    pub impair: BTreeMap<Direction, Impairing>,
    /// The end that connects.
    pub client: End,
    /// The end that accepts.
    pub server: End,
    /// How it must end.
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
    /// The client's side.
    pub fn client(self) -> Family {
        if matches!(self, Families::V4 | Families::V4ToV6) { Family::V4 } else { Family::V6 }
    }

    /// The server's side.
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

/// A direction of a link, as in [`LinkDirection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Direction {
    FromClient,
    ToClient,
    FromServer,
    ToServer,
}

impl Direction {
    fn way(self) -> LinkDirection {
        match self {
            Direction::FromClient => LinkDirection::FromClient,
            Direction::ToClient => LinkDirection::ToClient,
            Direction::FromServer => LinkDirection::FromServer,
            Direction::ToServer => LinkDirection::ToServer,
        }
    }
}

/// What happens to packets of one direction.
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

/// Splice when so many bytes have passed each way, and some time after that.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Splice {
    /// Bytes from the client.
    pub up: u64,
    /// Bytes from the server.
    pub down: u64,
    /// How long after that.
    pub after_ms: u64,
    /// The splice is refused, and so.
    pub refusal: Option<Refused>,
}

/// The refusals that a scenario can bring about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Refused {
    Closing,
    DrainTimeout,
    Mtu,
}

impl Refused {
    fn refusal(self) -> Refusal {
        match self {
            Refused::Closing => Refusal::Closing,
            Refused::DrainTimeout => Refusal::DrainTimeout,
            Refused::Mtu => Refusal::Mtu,
        }
    }
}

/// What one end does; the words are those of [`Script`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[allow(missing_docs)]
pub struct End {
    pub bytes: u64,
    pub pace: Option<u64>,
    /// Least and greatest size of a write.
    pub chunks: Option<[usize; 2]>,
    /// Positions of urgent bytes.
    pub urgent: Vec<u64>,
    /// How those are received that the other end sends.
    pub marks: Received,
    pub start_received: Option<u64>,
    pub start_ms: Option<u64>,
    pub ahead: Option<u64>,
    pub ending: Finish,
    /// A reset by this end when it has received so much.
    pub reset_received: Option<u64>,
    pub read_size: Option<usize>,
    /// Position and milliseconds.
    pub pauses: Vec<[u64; 2]>,
    pub receive_buffer: Option<usize>,
    pub send_buffer: Option<usize>,
    pub max_segment: Option<u32>,
    /// It sends before anything was received.
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

/// How an end ends.
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

/// How it must end, in every mode.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Expect {
    /// Who ends it.
    pub how: Ended,
    /// A reset may overtake data: what arrives is a beginning of what was sent.
    pub cut: bool,
    /// Old duplicates are to be expected, and so is their rejection by timestamp.
    pub old_duplicates: bool,
    /// No end waits for a retransmission timer: only where nothing is lost, late or small, and not asked of
    /// [`Mode::Switched`].
    pub no_timeouts: bool,
}

/// Who ends it.
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

/// How the forwarder treats the flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Never spliced.
    Copy,
    /// Spliced before the first byte, if the engine is quick enough.
    Spliced,
    /// Spliced after [`Scenario::splice_after`] bytes.
    SplicedLater,
    /// Spliced at [`Scenario::splice`].
    SplicedThen,
    /// Spliced and unspliced again and again.
    Switched,
}

impl Mode {
    /// The modes of a scenario.
    pub fn of(s: &Scenario) -> Vec<Mode> {
        let mut all = vec![Mode::Copy, Mode::Spliced, Mode::Switched];
        if s.client.bytes + s.server.bytes > s.splice_after {
            all.push(Mode::SplicedLater);
        }
        if s.splice.is_some() {
            all.push(Mode::SplicedThen);
        }
        all
    }
}

impl Scenario {
    /// Reads a file.
    pub fn parse(text: &str) -> Scenario {
        toml::from_str(text).unwrap_or_else(|e| panic!("{e}"))
    }

    fn shape(&self) -> Shape {
        if self.one_armed { Shape::OneArmed } else { Shape::TwoDevices }
    }

    /// With IPv4 clients everything arrives in order, so that nothing may be rejected as old; with IPv6 clients the forwarder
    /// handles packets of one direction on all CPUs at the same time.
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

    /// An end that speaks first must know the seed: all connections have the same one then.
    fn answerer(&self) -> Script {
        self.server.fill(if self.server.speaks_first { Script::answerer_of(SEED) } else { Script::answerer() })
    }

    fn seed(&self, connection: u64) -> u64 {
        if self.server.speaks_first { SEED } else { SEED + connection }
    }
}

const SEED: u64 = 4242;
