//! The vocabulary of the interface: policy in, status and outcome out.

use crate::{Refusal, Tally};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, net::SocketAddr, sync::Arc, time::Duration};

/// When a relayed pair of connections is spliced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpliceWhen {
    /// Never: the flow stays in control mode ([`Refusal::Policy`]).
    Never,
    /// As soon as the relay starts.
    AtOnce,
    /// After this many bytes, both directions together, were copied: short connections are not worth the switch.
    AfterBytes(u64),
}

/// What takes a spliced flow back to control mode by itself; there it stays until [`Command::Splice`](crate::Command).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trigger {
    /// The client sends again: its next request, say. Pulled inside the data path, so that no byte of it is forwarded.
    ClientData,
    /// The same for the server.
    ServerData,
    /// No byte in either direction for this long.
    Idle(Duration),
}

/// Over which paths a flow is spliced. A [`Command::Splice`](crate::Command) splices over any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PathRule {
    /// Where it makes no transfer slower ([`Refusal::Path`]): no direction that carries more than a few kilobytes may have a sender
    /// that is nearer to us than its receiver, unless both are within 2 ms, or the hosts shook hands with each other. Nothing is
    /// known yet of flows that are spliced [at once](SpliceWhen::AtOnce).
    #[default]
    Auto,
    /// Wherever they lead.
    Any,
}

/// How a relayed flow is treated; one per listener. Minor releases add fields: write `..Policy::default()` behind those you set.
#[derive(Clone, Debug)]
pub struct Policy {
    /// When to splice.
    pub when: SpliceWhen,
    /// Where to.
    pub path: PathRule,
    /// Hold new segments while the buffers drain, instead of forwarding them at once (the other drain policy of the
    /// connection-splicing paper, section III-C). Slower; for comparison. Needs CAP_NET_RAW.
    pub hold: bool,
    /// A splice that has not drained by then is taken back.
    pub drain_limit: Duration,
    /// Close the parked sockets silently after this long in forwarding mode; `None` keeps them while there are
    /// descriptors for others.
    pub release_after: Option<Duration>,
    /// Take it back by itself; `None`: only when told to.
    pub trigger: Option<Trigger>,
    /// A flow without a byte in either direction for this long is ended with a reset, copied or forwarded. Seen within a second
    /// while it is copied, and within an eighth of the limit, 30 s at most, while it is forwarded.
    pub idle_limit: Duration,
    /// While it is copied, a host that is silent for so long is asked whether it is still there (RFC 9293, 3.8.4), and one that has
    /// not answered after as long again is given up. Whole seconds, 1 to 32767. Hosts of a forwarded flow may ask each other.
    pub keepalive: Option<Duration>,
    /// Where its flows are counted.
    pub tally: Arc<Tally>,
}

impl Policy {
    /// From so many bytes on splicing a connection surely takes less time than copying it, on each machine whose figures are in
    /// bench/results (`longsplice-bench threshold`): at 128 KB it took up to a tenth more, at 256 KB 7 and 14 percent less.
    pub const PAYS_FROM: u64 = 256 * 1024;

    /// Bytes that are copied before a splice, if it goes by bytes.
    pub(crate) fn threshold(&self) -> Option<u64> {
        if let SpliceWhen::AfterBytes(n) = self.when { Some(n) } else { None }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            when: SpliceWhen::AfterBytes(Policy::PAYS_FROM),
            path: PathRule::Auto,
            hold: false,
            drain_limit: Duration::from_secs(10),
            release_after: Some(Duration::from_secs(60)),
            trigger: None,
            idle_limit: Duration::from_secs(2 * 3600),
            keepalive: None,
            tally: Arc::default(),
        }
    }
}

/// Bytes that control mode has in hand when it hands two legs over: they are delivered first.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Leftovers {
    /// For the server: read from the client, or added.
    pub to_server: Bytes,
    /// For the client.
    pub to_client: Bytes,
}

impl Leftovers {
    /// Bytes for both hosts.
    pub fn new(to_server: impl Into<Bytes>, to_client: impl Into<Bytes>) -> Leftovers {
        Leftovers { to_server: to_server.into(), to_client: to_client.into() }
    }

    /// Bytes for the server alone.
    pub fn for_server(bytes: impl Into<Bytes>) -> Leftovers {
        Leftovers::new(bytes, Bytes::new())
    }

    /// Bytes for the client alone.
    pub fn for_client(bytes: impl Into<Bytes>) -> Leftovers {
        Leftovers::new(Bytes::new(), bytes)
    }
}

/// What control mode knows of a flow and wants to see in lists and logs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlowInfo {
    /// The listener's protocol, for example `socks5` or `plug`.
    pub protocol: Cow<'static, str>,
    /// Who authenticated, if anybody did.
    pub user: Option<String>,
    /// The destination as the client named it (`example.org:443`).
    pub target: String,
}

impl FlowInfo {
    /// Without a user.
    pub fn new(protocol: impl Into<Cow<'static, str>>, target: impl Into<String>) -> FlowInfo {
        FlowInfo { protocol: protocol.into(), user: None, target: target.into() }
    }

    /// The same with the user who authenticated, if anybody did.
    #[must_use]
    pub fn with_user(self, user: Option<String>) -> FlowInfo {
        FlowInfo { user, ..self }
    }
}

/// Where a flow is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FlowState {
    /// Control mode: bytes are copied.
    Copying,
    /// Splice under way: what lies before the boundary drains.
    Draining,
    /// Forwarding mode; the sockets are parked.
    Spliced,
    /// Forwarding mode; no socket is left.
    Released,
    /// Unsplice under way.
    Unsplicing,
}

/// One live flow as `longsplice ls` shows it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct FlowStatus {
    /// Number of the flow, unique in this process.
    pub id: u64,
    /// The listener's protocol.
    pub protocol: String,
    /// The client's address: [`Leg::source`](crate::Leg::source).
    pub client: SocketAddr,
    /// The server's address.
    pub server: SocketAddr,
    /// The destination as the client named it.
    pub target: String,
    /// Who authenticated.
    pub user: Option<String>,
    /// State.
    pub state: FlowState,
    /// The stages a segment from the client traverses now, in order (connection-splicing paper, section IV).
    pub stages: Vec<Cow<'static, str>>,
    /// Bytes from client to server so far, copied and spliced.
    pub bytes_up: u64,
    /// Bytes from server to client so far, copied and spliced.
    pub bytes_down: u64,
    /// Age in milliseconds.
    pub age_ms: u64,
    /// Why it is not spliced, if it is not to be.
    pub refusal: Option<Refusal>,
}

/// What an operator or a program may ask of a live flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Splice now, whatever the policy waits for.
    Splice,
    /// Back to control mode.
    Unsplice,
    /// Close the parked sockets silently.
    Release,
    /// End it: a reset to both hosts.
    Reset,
}

/// How a flow ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum EndReason {
    /// Both directions were closed in order.
    Closed,
    /// The client reset.
    ClientReset,
    /// The server reset.
    ServerReset,
    /// No segment for [`Policy::idle_limit`].
    Idle,
    /// The program was told to stop.
    Stopped,
    /// The program was told to stop and left the flow running in the kernel.
    Left,
    /// The message has been passed on ([`Splicer::relay_message`](crate::Splicer::relay_message)): the connections go on.
    MessageRelayed,
}

impl EndReason {
    /// The label used in logs and records.
    pub fn as_str(self) -> &'static str {
        match self {
            EndReason::Closed => "closed",
            EndReason::ClientReset => "client-reset",
            EndReason::ServerReset => "server-reset",
            EndReason::Idle => "idle",
            EndReason::Stopped => "stopped",
            EndReason::Left => "left",
            EndReason::MessageRelayed => "message-relayed",
        }
    }
}

/// The record of a flow that has ended.
#[derive(Clone, Debug, Serialize)]
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
    /// Bytes from client to server, all told.
    pub bytes_up: u64,
    /// Bytes from server to client, all told.
    pub bytes_down: u64,
    /// Of these, bytes that passed while spliced.
    pub spliced_up: u64,
    /// Of these, bytes that passed while spliced.
    pub spliced_down: u64,
    /// How often the flow was spliced.
    pub splices: u32,
    /// Why it was not spliced, or not any more.
    pub refusal: Option<Refusal>,
    /// Length of its life in milliseconds.
    pub duration_ms: u64,
}

impl Ended {
    /// The record of a flow without a byte.
    pub fn new(id: u64, client: SocketAddr, server: SocketAddr, how: EndReason) -> Ended {
        let (bytes_up, bytes_down, spliced_up, spliced_down) = (0, 0, 0, 0);
        let (splices, refusal, duration_ms) = (0, None, 0);
        Ended { id, client, server, how, bytes_up, bytes_down, spliced_up, spliced_down, splices, refusal, duration_ms }
    }
}

/// A part of one host's stream, from the byte after those that were read on. For [`Splicer::relay_message`](crate::Splicer::relay_message).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its direction: 0 is client to server.
    pub(crate) from: usize,
    pub(crate) bytes: u64,
    pub(crate) until_receiver_speaks: bool,
}

impl Message {
    /// So many bytes from the client; `None`: until it closes.
    pub fn from_client(bytes: Option<u64>) -> Message {
        Message { from: 0, bytes: bytes.unwrap_or(u64::MAX), until_receiver_speaks: false }
    }

    /// So many bytes from the server; `None`: until it closes.
    pub fn from_server(bytes: Option<u64>) -> Message {
        Message { from: 1, bytes: bytes.unwrap_or(u64::MAX), until_receiver_speaks: false }
    }

    /// Stop early if the receiving host sends data or closes.
    pub fn until_receiver_speaks(self) -> Message {
        Message { until_receiver_speaks: true, ..self }
    }
}

/// What became of a [`Message`].
#[derive(Debug)]
#[non_exhaustive]
pub struct RelayedMessage {
    /// Its record: [`EndReason::MessageRelayed`] if the connections go on. Otherwise a connection was reset, nothing has moved for
    /// too long, or the program stops; then both legs are closed.
    pub ended: Ended,
    /// Bytes of it that were not passed on: its sender has closed before, or its receiver had something to say.
    pub missing: u64,
    /// Bytes that were read of it, but not passed on; not missing.
    pub in_hand: Bytes,
}

/// Called once, with the record of a flow that has ended, by a thread of the engine: it must not wait.
pub type Done = Box<dyn FnOnce(Ended, &FlowInfo) + Send>;
