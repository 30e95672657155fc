//! Types of the public interface: policies, commands, states and outcomes.

use crate::{
    finding::PathFinding,
    refusal::{Refusal, Tally},
};
use bytes::Bytes;
use longsplice_datapath::{Pair, Side};
use std::{
    borrow::Cow,
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// When a relayed pair of connections is spliced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpliceWhen {
    /// Never. The flow stays in control mode ([`Refusal::Policy`]).
    Never,
    /// As soon as the relay starts.
    AtOnce,
    /// After this many bytes were copied, both directions together. Short connections are not worth the switch.
    AfterBytes(u64),
    /// Before the first byte where the client is far and the server near, if the [path](PathRule) is judged at all: later, a splice
    /// would slow the server down. Elsewhere after [`Policy::PAYS_FROM`] bytes.
    Auto,
}

impl SpliceWhen {
    /// Returns the number of bytes to copy before a splice, if they are counted.
    pub fn threshold(self) -> Option<u64> {
        match self {
            SpliceWhen::AfterBytes(n) => Some(n),
            SpliceWhen::Auto => Some(Policy::PAYS_FROM),
            SpliceWhen::Never | SpliceWhen::AtOnce => None,
        }
    }
}

/// An event that takes a spliced flow back to control mode. The flow then stays there until [`Command::Splice`](crate::Command).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trigger {
    /// The client sends data again, for example its next request. The data path
    /// takes the flow back itself, so that it forwards no byte of that data.
    ClientData,
    /// The server sends data again, likewise.
    ServerData,
    /// No byte in either direction for this long.
    Idle(Duration),
}

/// Called with the number of a flow that its [`Trigger`] takes back. A thread of the engine calls it; it must not block.
#[derive(Clone)]
pub struct OnTrigger(Arc<dyn Fn(u64) + Send + Sync>);

impl OnTrigger {
    /// Calls this function.
    pub fn new(call: impl Fn(u64) + Send + Sync + 'static) -> OnTrigger {
        OnTrigger(Arc::new(call))
    }

    pub(crate) fn tell(&self, flow: u64) {
        (self.0)(flow);
    }
}

impl fmt::Debug for OnTrigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnTrigger")
    }
}

/// The network paths over which a flow may be spliced. [`Command::Splice`](crate::Command) ignores this rule.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(try_from = "WrittenPathRule"))]
#[non_exhaustive]
pub enum PathRule {
    /// Only paths on which a splice slows no transfer down; otherwise the flow is copied ([`Refusal::Path`]).
    ///
    /// In a direction that carries more than a few kilobytes, and more than a sixteenth of all bytes, the round-trip time of
    /// the whole path must be at most `rtt_ratio` times that of the sender's part of it. The ratio does not matter if both
    /// parts together take at most 2 ms, or if the hosts shook hands with each other. Nothing is known yet of a flow that is
    /// spliced [at once](SpliceWhen::AtOnce).
    ///
    /// If the parts together take more than 10 ms, at most `loss` of the segments to the receiver may have been lost: a sender
    /// that recovers from losses by round trips of the whole path is slower (BBR less so). If each part takes more than 5 ms,
    /// 1 MB is copied first, because slow start is faster over each.
    ///
    /// A path that was refused is looked at again after ten seconds, and then ever more rarely. A flow that falls below
    /// half of its rate within some round trips after its splice is taken back, and stays in control mode.
    Within {
        /// The limit; see [`PathRule::RTT_RATIO`].
        rtt_ratio: f32,
        /// A part of 1; see [`PathRule::LOSS`].
        loss: f32,
    },
    /// Any path.
    Any,
}

impl PathRule {
    /// The default limit. Up to twice its own round-trip time, even BBR is not harmed, whose window
    /// is twice what it has measured. An eighth is how far two measurements of the same path differ.
    pub const RTT_RATIO: f32 = 2.125;
    /// The default limit of losses. With one in 500, Reno carries 10 Mbit/s over 30 ms (Mathis et al., 1997).
    pub const LOSS: f32 = 0.002;

    /// Returns the rule with other limits. Errors if `rtt_ratio` is not a number from 1 to 1000, or `loss` not one from 0 to 1.
    pub fn within(rtt_ratio: f32, loss: f32) -> Result<PathRule, String> {
        match (rtt_ratio, loss) {
            (1.0..=1000.0, 0.0..=1.0) => Ok(PathRule::Within { rtt_ratio, loss }),
            (1.0..=1000.0, _) => Err(format!("a loss of {loss} is not possible: write a number from 0 to 1")),
            _ => Err(format!("an rtt_ratio of {rtt_ratio} is not possible: write a number from 1 to 1000")),
        }
    }
}

impl Default for PathRule {
    fn default() -> PathRule {
        PathRule::Within { rtt_ratio: PathRule::RTT_RATIO, loss: PathRule::LOSS }
    }
}

/// A [`PathRule`] as it is written in a configuration.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "write \"auto\", \"any\", or { rtt_ratio = NUMBER, loss = NUMBER }")]
enum WrittenPathRule {
    Named(NamedPathRule),
    Limits(PathLimits),
}

#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PathLimits {
    rtt_ratio: Option<f32>,
    loss: Option<f32>,
}

#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum NamedPathRule {
    Auto,
    Any,
}

#[cfg(feature = "serde")]
impl TryFrom<WrittenPathRule> for PathRule {
    type Error = String;

    fn try_from(written: WrittenPathRule) -> Result<PathRule, String> {
        match written {
            WrittenPathRule::Named(NamedPathRule::Auto) => Ok(PathRule::default()),
            WrittenPathRule::Named(NamedPathRule::Any) => Ok(PathRule::Any),
            WrittenPathRule::Limits(PathLimits { rtt_ratio: None, loss: None }) => {
                Err("write rtt_ratio = NUMBER, loss = NUMBER, or both".into())
            }
            WrittenPathRule::Limits(PathLimits { rtt_ratio, loss }) => {
                PathRule::within(rtt_ratio.unwrap_or(PathRule::RTT_RATIO), loss.unwrap_or(PathRule::LOSS))
            }
        }
    }
}

/// A time limit that may change while flows have it: clones of it change with it. After [`IdleLimit::set`],
/// [`Splicer::limits_changed`](crate::Splicer::limits_changed) tells the flows.
#[derive(Clone, Debug)]
pub struct IdleLimit(Arc<AtomicU64>);

impl IdleLimit {
    /// Returns the limit. Resolution: a millisecond.
    pub fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Relaxed))
    }

    /// Changes the limit.
    pub fn set(&self, limit: Duration) {
        self.0.store(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }
}

impl From<Duration> for IdleLimit {
    fn from(limit: Duration) -> IdleLimit {
        let new = IdleLimit(Arc::default());
        new.set(limit);
        new
    }
}

/// Treatment of relayed flows; one per listener. Minor releases add fields: write `..Policy::default()` after those you set.
#[derive(Clone, Debug)]
pub struct Policy {
    /// When to splice.
    pub when: SpliceWhen,
    /// The network paths over which to splice.
    pub path: PathRule,
    /// Hold new segments while the buffers drain, instead of forwarding them at once (the other drain policy
    /// of the connection-splicing paper, section III-C). Slower; meant for comparison. Needs CAP_NET_RAW.
    pub hold: bool,
    /// Time limit for draining. A splice that takes longer is taken back.
    pub drain_limit: Duration,
    /// Close the parked sockets silently after this time in forwarding mode. `None`:
    /// keep them as long as there are enough descriptors for other connections.
    pub release_after: Option<Duration>,
    /// Never close the parked sockets before the flow ends, not even if descriptors run short: the ports belong to the kernel, which
    /// would give them to other connections. Set by the engine for sockets that it has adopted ([`Splicer::adopt`](crate::Splicer::adopt)).
    pub keeps_sockets: bool,
    /// Event that unsplices the flow by itself. `None`: unsplice only on command.
    pub trigger: Option<Trigger>,
    /// Whom to tell of that.
    pub on_trigger: Option<OnTrigger>,
    /// Reset a flow, copied or forwarded, after this time without a byte in either direction. Noticed within a
    /// second while the flow is copied, and within an eighth of the limit, 30 s at most, while it is forwarded.
    pub idle_limit: IdleLimit,
    /// While the flow is copied, probe a host that has been silent for this time (RFC 9293, 3.8.4), and give it up if it has
    /// not answered after the same time again. Whole seconds, 1 to 32767. The hosts of a forwarded flow may probe each other.
    pub keepalive: Option<Duration>,
    /// Counters for the flows of this policy.
    pub tally: Arc<Tally>,
}

impl Policy {
    /// Number of bytes from which splicing takes clearly less time than copying (`longsplice-bench threshold`): up to an eighth
    /// less at 32 KB, a fifth at 64 KB. Up to 16 KB, both take the same. Later would be worse over long paths: after a splice, a far
    /// sender's window is that of a receiver which has needed little until then.
    pub const PAYS_FROM: u64 = 32 * 1024;

    /// Number of bytes to copy before a splice, if the policy counts bytes.
    pub(crate) fn threshold(&self) -> Option<u64> {
        self.when.threshold()
    }
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            when: SpliceWhen::Auto,
            path: PathRule::default(),
            hold: false,
            drain_limit: Duration::from_secs(10),
            release_after: Some(Duration::from_secs(60)),
            keeps_sockets: false,
            trigger: None,
            on_trigger: None,
            idle_limit: Duration::from_secs(2 * 3600).into(),
            keepalive: None,
            tally: Arc::default(),
        }
    }
}

/// Bytes that the caller has in hand when it hands two legs over. They are delivered first.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Leftovers {
    /// Bytes for the server: read from the client, or added.
    pub to_server: Bytes,
    /// Bytes for the client: read from the server, or added.
    pub to_client: Bytes,
}

impl Leftovers {
    /// Creates leftovers for both hosts.
    pub fn new(to_server: impl Into<Bytes>, to_client: impl Into<Bytes>) -> Leftovers {
        Leftovers { to_server: to_server.into(), to_client: to_client.into() }
    }

    /// Creates leftovers for the server alone.
    pub fn for_server(bytes: impl Into<Bytes>) -> Leftovers {
        Leftovers::new(bytes, Bytes::new())
    }

    /// Creates leftovers for the client alone.
    pub fn for_client(bytes: impl Into<Bytes>) -> Leftovers {
        Leftovers::new(Bytes::new(), bytes)
    }

    /// Returns the bytes of each direction: those for the server are the client's.
    pub(crate) fn by_sender(&self) -> Pair<Bytes> {
        Pair::new(self.to_server.clone(), self.to_client.clone())
    }
}

/// The caller's description of a flow, for lists and logs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlowInfo {
    /// The listener's protocol, for example `socks5` or `plug`.
    pub protocol: Cow<'static, str>,
    /// The destination as the client named it (`example.org:443`).
    pub target: Box<str>,
    /// The address of the listener, if that is of interest.
    pub listen: Option<SocketAddr>,
    /// The name of the listener, if it has one.
    pub name: Option<Arc<str>>,
    /// What most flows have not: each of them would have to hold its place.
    rare: Option<Box<Rare>>,
}

/// What is known of few flows.
#[derive(Clone, Debug, Default)]
struct Rare {
    user: Option<Box<str>>,
    member: Option<Arc<str>>,
}

impl FlowInfo {
    /// Creates a description without a user.
    pub fn new(protocol: impl Into<Cow<'static, str>>, target: impl Into<String>) -> FlowInfo {
        let target = target.into().into_boxed_str();
        FlowInfo { protocol: protocol.into(), target, listen: None, name: None, rare: None }
    }

    /// Sets the authenticated user, if any.
    #[must_use]
    pub fn with_user(mut self, user: Option<String>) -> FlowInfo {
        if let Some(user) = user {
            self.rare.get_or_insert_default().user = Some(user.into());
        }
        self
    }

    /// Returns the authenticated user, if any.
    pub fn user(&self) -> Option<&str> {
        self.rare.as_ref()?.user.as_deref()
    }

    /// Sets the address of the listener, if that is of interest.
    #[must_use]
    pub fn with_listen(self, listen: Option<SocketAddr>) -> FlowInfo {
        FlowInfo { listen, ..self }
    }

    /// Sets the name of the listener, if it has one.
    #[must_use]
    pub fn with_name(self, name: Option<Arc<str>>) -> FlowInfo {
        FlowInfo { name, ..self }
    }

    /// Sets the server of a pool, if it is one.
    #[must_use]
    pub fn with_member(mut self, member: Option<Arc<str>>) -> FlowInfo {
        if member.is_some() {
            self.rare.get_or_insert_default().member = member;
        }
        self
    }

    /// Returns the server of a pool, if it is one.
    pub fn member(&self) -> Option<&str> {
        self.rare.as_ref()?.member.as_deref()
    }
}

/// The state of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum FlowState {
    /// Control mode: bytes are copied.
    Copying,
    /// Splicing: bytes before the bound are drained.
    Draining,
    /// Forwarding mode, with parked sockets.
    Spliced,
    /// Forwarding mode, without sockets.
    Released,
    /// Unsplicing.
    Unsplicing,
}

/// One live flow, as `longsplice ls` shows it.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FlowStatus {
    /// Number of the flow, unique in this process.
    pub id: u64,
    /// The listener's protocol, for example `socks5`.
    pub protocol: String,
    /// The address of the listener, if it is known.
    pub listen: Option<SocketAddr>,
    /// The name of the listener, if it is known.
    pub name: Option<String>,
    /// The client's address: [`Leg::source`](crate::Leg::source).
    pub client: SocketAddr,
    /// The server's address.
    pub server: SocketAddr,
    /// The destination as the client named it.
    pub target: String,
    /// The server of a pool, if it is one. Not known of a flow that has outlived a process.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub member: Option<String>,
    /// The authenticated user, if any.
    pub user: Option<String>,
    /// The state of the flow.
    pub state: FlowState,
    /// The stages that a segment from the client passes through now, in order (connection-splicing paper, section IV).
    pub stages: Vec<Cow<'static, str>>,
    /// Bytes from client to server so far, copied and spliced.
    pub bytes_up: u64,
    /// Bytes from server to client so far, copied and spliced.
    pub bytes_down: u64,
    /// Bytes of `bytes_up` that were forwarded while spliced.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub spliced_up: u64,
    /// Bytes of `bytes_down` that were forwarded while spliced.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub spliced_down: u64,
    /// Number of splices so far.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub splices: u32,
    /// Age in milliseconds.
    pub age_ms: u64,
    /// Number of processes that it has lived through, with this one.
    pub processes: u32,
    /// Why the flow is not spliced, if it cannot or must not be.
    pub refusal: Option<Refusal>,
    /// What was measured, if the refusal is [`Refusal::Path`].
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub path: Option<PathFinding>,
}

/// A command to a live flow, from an operator or a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Splice now, regardless of the policy.
    Splice,
    /// Take the flow back to control mode.
    Unsplice,
    /// Close the parked sockets silently.
    Release,
    /// End the flow with a reset to both hosts.
    Reset,
}

/// Why the sockets of a flow are not closed now ([`Splicer::release`](crate::Splicer::release)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum NotReleased {
    /// There is no such flow.
    #[error("there is no flow of this process with this number")]
    NoFlow,
    /// It is copied.
    #[error("it is not spliced: it is copied")]
    Copying,
    /// It is being spliced, or taken back.
    #[error("it is being spliced or taken back; try again")]
    Switching,
    /// It has no sockets any more, or an earlier process had them.
    #[error("it has no sockets any more")]
    Released,
    /// It relays a message, and must notice its end.
    #[error("it keeps its sockets: the body of an HTTP message passes, and they take what comes after it")]
    Message,
    /// Its trigger takes it back when a host sends again.
    #[error("it keeps its sockets: its trigger waits for data of a host, which they take")]
    Trigger,
    /// Its ports belong to the kernel.
    #[error("it keeps its sockets: they were adopted, and the kernel could give their ports to other connections")]
    Adopted,
}

impl NotReleased {
    /// Returns the name for programs.
    pub fn as_str(self) -> &'static str {
        match self {
            NotReleased::NoFlow => "no-flow",
            NotReleased::Copying => "copying",
            NotReleased::Switching => "switching",
            NotReleased::Released => "released",
            NotReleased::Message => "message",
            NotReleased::Trigger => "trigger",
            NotReleased::Adopted => "adopted",
        }
    }
}

/// How a flow ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum EndReason {
    /// Both directions were closed in order, with a FIN.
    Closed,
    /// The client sent a reset.
    ClientReset,
    /// The server sent a reset.
    ServerReset,
    /// No byte in either direction for [`Policy::idle_limit`].
    Idle,
    /// The program was told to stop.
    Stopped,
    /// The program was told to stop and left the flow running in the kernel.
    Left,
    /// A flow of an earlier process: how it ended was not seen, or both hosts were reset, because nobody could go on with it.
    Lost,
    /// The message has been relayed ([`Splicer::relay_message`](crate::Splicer::relay_message)); the connections go on.
    MessageRelayed,
}

impl EndReason {
    /// Returns the end by a reset from this host.
    pub(crate) fn reset_by(host: Side) -> EndReason {
        match host {
            Side::Client => EndReason::ClientReset,
            Side::Server => EndReason::ServerReset,
        }
    }

    /// Returns the label used in logs and records.
    pub fn as_str(self) -> &'static str {
        match self {
            EndReason::Closed => "closed",
            EndReason::ClientReset => "client-reset",
            EndReason::ServerReset => "server-reset",
            EndReason::Idle => "idle",
            EndReason::Stopped => "stopped",
            EndReason::Left => "left",
            EndReason::Lost => "lost",
            EndReason::MessageRelayed => "message-relayed",
        }
    }
}

/// The record of a flow that has ended.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Ended {
    /// Number of the flow.
    pub id: u64,
    /// The client's address: [`Leg::source`](crate::Leg::source).
    pub client: SocketAddr,
    /// The server's address.
    pub server: SocketAddr,
    /// How it ended.
    pub how: EndReason,
    /// Total bytes from client to server.
    pub bytes_up: u64,
    /// Total bytes from server to client.
    pub bytes_down: u64,
    /// Bytes of `bytes_up` that were forwarded while spliced.
    pub spliced_up: u64,
    /// Bytes of `bytes_down` that were forwarded while spliced.
    pub spliced_down: u64,
    /// Number of times that the flow was spliced.
    pub splices: u32,
    /// Why the flow was not spliced, or not spliced again.
    pub refusal: Option<Refusal>,
    /// What was measured, if the refusal is [`Refusal::Path`].
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub path: Option<PathFinding>,
    /// Lifetime in milliseconds.
    pub duration_ms: u64,
}

impl Ended {
    /// Creates the record of a flow that carried no bytes.
    pub fn new(id: u64, client: SocketAddr, server: SocketAddr, how: EndReason) -> Ended {
        let (bytes_up, bytes_down, spliced_up, spliced_down) = (0, 0, 0, 0);
        let (splices, refusal, path, duration_ms) = (0, None, None, 0);
        Ended {
            id,
            client,
            server,
            how,
            bytes_up,
            bytes_down,
            spliced_up,
            spliced_down,
            splices,
            refusal,
            path,
            duration_ms,
        }
    }
}

/// A part of one host's stream that begins after the last byte read.
/// For [`Splicer::relay_message`](crate::Splicer::relay_message).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The sender.
    pub(crate) from: Side,
    pub(crate) bytes: u64,
    pub(crate) until_receiver_speaks: bool,
    pub(crate) pays: bool,
}

impl Message {
    /// A message of `bytes` bytes from the client. `None`: everything until the client closes.
    pub fn from_client(bytes: Option<u64>) -> Message {
        Message { from: Side::Client, bytes: bytes.unwrap_or(u64::MAX), until_receiver_speaks: false, pays: false }
    }

    /// A message of `bytes` bytes from the server. `None`: everything until the server closes.
    pub fn from_server(bytes: Option<u64>) -> Message {
        Message { from: Side::Server, bytes: bytes.unwrap_or(u64::MAX), until_receiver_speaks: false, pays: false }
    }

    /// Stop early if the receiving host sends data or closes.
    pub fn until_receiver_speaks(self) -> Message {
        Message { until_receiver_speaks: true, ..self }
    }

    /// Splice it at once, whatever its length, unless the policy is never to splice: it is the rest of a message that was
    /// long enough.
    pub fn that_pays(self) -> Message {
        Message { pays: true, ..self }
    }
}

/// The outcome of a [`Message`].
#[derive(Debug)]
#[non_exhaustive]
pub struct RelayedMessage {
    /// Record of the message: [`EndReason::MessageRelayed`] if the connections go on. Otherwise a connection
    /// was reset, nothing moved for too long, or the program is stopping; both legs are then closed.
    pub ended: Ended,
    /// Bytes of the message that were not relayed, because the sender closed early or the receiver sent data.
    pub missing: u64,
    /// Bytes of the message that were read but not passed on. They do not count as missing.
    pub in_hand: Bytes,
    /// The sender has sent more than the message. What was dropped of that will arrive again, at any time: do not take it for a
    /// part of whatever is expected then.
    pub excess: bool,
    /// The connection of the receiver, who was expected to speak, has failed. Its leg holds what it sent before that.
    pub receiver_failed: bool,
}

/// Who is told of the end of a flow: a function with these arguments, for example.
pub trait Finish: Send {
    /// Called once, before a flow begins and anything else is said of it; not in another process that goes on with it. Must not
    /// block. `hosts`: addresses of client and server.
    fn begun(&self, _id: u64, _hosts: Pair<SocketAddr>, _info: &FlowInfo) {}

    /// A thread of the engine calls this once, with the record of the flow; it must not block.
    fn finish(self: Box<Self>, ended: Ended, info: &FlowInfo);

    /// Returns what the caller has to know of the flow in another process that goes on with it ([`Splicer::hand_on`],
    /// [`Splicer::take_up`]). `None`: it cannot be handed on.
    ///
    /// [`Splicer::hand_on`]: crate::Splicer::hand_on
    /// [`Splicer::take_up`]: crate::Splicer::take_up
    #[doc(hidden)]
    fn description(&self) -> Option<String> {
        None
    }
}

impl<F: FnOnce(Ended, &FlowInfo) + Send> Finish for F {
    fn finish(self: Box<Self>, ended: Ended, info: &FlowInfo) {
        self(ended, info);
    }
}

/// Told of the end of a flow.
pub type Done = Box<dyn Finish>;
