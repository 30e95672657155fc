//! What the calls take and return that switch a flow between control mode and forwarding mode.

use crate::{LegFlags, Pair, Phase, Side, Tuple, abi};

/// Reasons why a switch was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// A leg was neither tracked from its SYN on nor adopted, or is gone.
    #[error("not tracked")]
    Untracked,
    /// An earlier switch is not over.
    #[error("an earlier switch is not over")]
    Busy,
    /// A connection was reset, or is closing in both directions.
    #[error("closing")]
    Closing,
    /// A leg received fragments.
    #[error("fragments")]
    Fragments,
    /// The caller's byte counts contradict the tracker's.
    #[error("the caller's byte counts contradict the tracker's")]
    Mismatch,
    /// A table is full.
    #[error("table full")]
    Full,
    /// Everything up to a [`Limit`] has arrived: nothing is left to forward.
    #[error("everything up to the limit has already arrived")]
    Short,
    /// A host was promised more than the other has room for. A moment later it may fit.
    #[error("the windows do not fit yet")]
    Window,
    /// A host was silent for half a round of its timestamp clock, so its timestamps cannot be followed until it sends again.
    #[error("a host was silent for half a round of its clock")]
    Silent,
    /// Timestamps or selective acknowledgements were negotiated on one leg only.
    #[error("the legs have negotiated different options")]
    Options,
    /// A leg is another connection by now, which has reused its port, or has joined another flow.
    #[error("another connection by now")]
    Other,
    /// The program could not be run: an errno.
    #[error("running the switch program failed: errno {0}")]
    Run(i32),
}

/// One connection of a four-tuple. Ports come back within microseconds: whoever acts on a leg later names the connection that he
/// means, and nothing is done to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The leg.
    pub leg: Tuple,
    /// Tells the connection from others with the same addresses ([`Datapath::generation`](crate::Datapath::generation)).
    pub generation: u32,
}

impl Connection {
    /// The generation for whichever connection has the leg: for tools, and where there can be no other.
    pub const ANY: u32 = 0;
    /// The generation of a connection that the data path does not know: nothing is done to any.
    pub const NONE: u32 = 2;
}

/// Whichever connection has this leg.
impl From<&Tuple> for Connection {
    fn from(leg: &Tuple) -> Connection {
        Connection { leg: *leg, generation: Connection::ANY }
    }
}

impl From<&Connection> for Connection {
    fn from(connection: &Connection) -> Connection {
        *connection
    }
}

/// One leg as its owner sees it. Positions count bytes since the SYN; a FIN counts as one.
#[derive(Clone, Copy, Debug)]
pub struct Half {
    /// The leg.
    pub leg: Tuple,
    /// Position up to which bytes were read from the socket.
    pub consumed: u64,
    /// Position up to which bytes were written to the socket.
    pub produced: u64,
    /// Number of bytes in hand from this leg for the other.
    pub leftover: u32,
    /// How much of the host's data may be forwarded.
    pub limit: Limit,
}

/// How much of a host's data may be forwarded. Data beyond the limit makes the data
/// path take both directions back. It forwards no byte of that data, and no FIN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Limit {
    /// All data.
    #[default]
    None,
    /// No data. Bytes in the socket stay there unread, and new bytes join them.
    Keep,
    /// This many bytes after those that were read from the socket, at most [`Limit::MAX`].
    Bytes(u32),
}

impl Limit {
    /// 1 GiB, because distances in sequence space are told by their signs. For more, splice again at the limit.
    pub const MAX: u32 = 1 << 30;

    fn to_abi(self) -> abi::limit {
        match self {
            Limit::None => abi::limit::LIMIT_NONE,
            Limit::Keep => abi::limit::LIMIT_KEEP,
            Limit::Bytes(n) => abi::limit(n.min(Limit::MAX)),
        }
    }
}

/// How to freeze; by default, none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreezeOptions {
    /// Segments that arrive during the drain are not forwarded, but given to `Datapath::poll_held`. The caller re-injects them
    /// when the drain has ended or was taken back.
    pub hold: bool,
    /// Fail with [`SwitchError::Window`] while a host may send more than the other has room for: the excess would be lost.
    pub fit: bool,
    /// Copy forwarded data to `Datapath::poll_taps` until the next freeze.
    pub tap: bool,
    /// The connections that are meant ([`Connection::generation`]).
    pub generations: Pair<u32>,
}

/// How to commit; by default, none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// For each host, set the limit at its present position, if it has none.
    pub trigger: Pair<bool>,
    /// Fail with [`SwitchError::Short`] if everything up to a limit has been forwarded: too late for a commit.
    pub in_time: bool,
    /// As in [`FreezeOptions`].
    pub generations: Pair<u32>,
}

/// The result of a freeze: what is left to be drained.
#[derive(Clone, Copy, Debug, Default)]
pub struct Frozen {
    /// Number of bytes still to be read from each leg's socket.
    pub pending: Pair<u32>,
    /// Whether the end of the stream is to be read after these bytes.
    pub fin: Pair<bool>,
    /// Positions of the bounds.
    pub bound: Pair<u64>,
    /// Sequence numbers of the bounds.
    pub seq: Pair<u32>,
    /// State of the legs right after the freeze.
    pub at: Switched,
}

/// The next hop of a leg's packets, as learned from packets that its socket has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hop {
    pub(crate) ifindex: u32,
    pub(crate) dmac: [u8; 6],
    pub(crate) smac: [u8; 6],
    /// Mark of the packets, as set by a firewall or the socket. The route depends on it.
    pub(crate) mark: u32,
}

/// State of both legs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Switched {
    /// Phase of the bytes from each host.
    pub phase: Pair<Phase>,
    /// Position of all data from each host.
    pub end: Pair<u64>,
    /// Position of the last bound, low 32 bits.
    pub bound: Pair<u32>,
    /// Bits of `LegFlags` of each leg.
    pub flags: Pair<u32>,
    /// After an unsplice, also one by the data path: whether the direction was forwarded already (true), or still draining.
    pub was_forwarded: Pair<bool>,
    /// After an unsplice: whether the host's FIN lies below the bound, so that its socket will never see it.
    pub fin: Pair<bool>,
    /// Next hops towards the hosts.
    pub hops: Pair<Hop>,
    /// MSS announced by each host, in bytes.
    pub mss: Pair<u32>,
    /// After a commit: offset from extended sequence numbers of copies (`TapRecord`) to positions.
    pub origin: Pair<u64>,
}

/// The result of [`Datapath::commit_or_look`](crate::Datapath::commit_or_look).
#[derive(Clone, Copy, Debug)]
pub enum Commit {
    /// The commit is done.
    Done(Switched),
    /// Not all bytes of both directions are forwarded yet. The state of the legs, as by a look.
    NotYet(Switched),
}

impl Switched {
    /// Returns whether both next hops are known, and may be used for a commit without asking the kernel about routes.
    pub fn has_plain_hops(&self) -> bool {
        self.hops.iter().all(|hop| hop.ifindex != 0 && hop.mark == 0)
    }

    /// Returns whether the proxy owns all bytes of both directions.
    pub fn is_local(&self) -> bool {
        self.phase == Pair::both(Phase::Local)
    }

    /// Returns whether all bytes of both directions are forwarded.
    pub fn is_forwarded(&self) -> bool {
        self.phase == Pair::both(Phase::Forwarding)
    }

    /// Returns whether all bytes of both directions are forwarded, and none are held.
    pub fn is_drained(&self) -> bool {
        self.is_forwarded() && (self.flags.client | self.flags.server) & LegFlags::HOLD == 0
    }

    /// Returns the sizes in bytes of the largest IP packets for both hosts, according
    /// to their MSS, and to the MTU of the paths to them where it is known.
    pub fn most(&self, legs: Pair<&Tuple>, mtu: Pair<Option<u32>>) -> Pair<u32> {
        Pair::from_fn(|side| (self.mss[side] + headers(legs[side])).min(mtu[side].unwrap_or(u32::MAX)))
    }

    /// Returns the position of the last bound of the bytes from this host. The hosts do not
    /// wait, so `end` may be beyond it, by less than 2^32 because no window is larger.
    pub fn bound64(&self, from: Side) -> u64 {
        self.end[from] - u64::from((self.end[from] as u32).wrapping_sub(self.bound[from]))
    }
}

/// Returns the size in bytes of the IP and TCP headers of packets without options.
pub fn headers(leg: &Tuple) -> u32 {
    if leg.is_v4() { 40 } else { 60 }
}

/// Returns whether a host may be told to send packets that are at most `most` bytes when they leave for `to`.
/// Hosts apply what they are told to all connections to the same address, and announce it to us, so a host that
/// asks for very little must not slow down all others. The minimum is that of RFC 8200, 5; no tunnel leaves less.
pub fn can_fit(host: &Tuple, to: &Tuple, most: u32) -> bool {
    const LEAST: u32 = 1280;
    most + headers(host) >= LEAST + headers(to)
}

pub(crate) fn bare(t: &Tuple) -> Half {
    Half { leg: *t, consumed: 0, produced: 0, leftover: 0, limit: Limit::None }
}

/// Builds a call. For the programs, the client's leg is `a`.
pub(crate) fn call(op: abi::switch_op, halves: Pair<&Half>, generations: Pair<u32>) -> abi::switch_call {
    let half = |h: &Half| abi::half {
        leg: h.leg.to_abi(),
        consumed: h.consumed as u32,
        produced: h.produced as u32,
        leftover: h.leftover,
        limit: h.limit.to_abi(),
        ..Default::default()
    };
    let args = abi::switch_args { op, a: half(halves.client), b: half(halves.server), ..Default::default() };
    let Pair { client: generation_a, server: generation_b } = generations;
    abi::switch_call { args, generation_a, generation_b, ..Default::default() }
}

pub(crate) fn outcome(result: abi::switch_result) -> Result<(), SwitchError> {
    match result {
        abi::switch_result::SWITCH_OK => Ok(()),
        abi::switch_result::SWITCH_BUSY => Err(SwitchError::Busy),
        abi::switch_result::SWITCH_CLOSING => Err(SwitchError::Closing),
        abi::switch_result::SWITCH_FRAGMENTS => Err(SwitchError::Fragments),
        abi::switch_result::SWITCH_MISMATCH => Err(SwitchError::Mismatch),
        abi::switch_result::SWITCH_FULL => Err(SwitchError::Full),
        abi::switch_result::SWITCH_WINDOW => Err(SwitchError::Window),
        abi::switch_result::SWITCH_SHORT => Err(SwitchError::Short),
        abi::switch_result::SWITCH_SILENT => Err(SwitchError::Silent),
        abi::switch_result::SWITCH_OPTIONS => Err(SwitchError::Options),
        abi::switch_result::SWITCH_OTHER => Err(SwitchError::Other),
        _ => Err(SwitchError::Untracked),
    }
}

/// Evaluates a freeze. `consumed`: positions up to which bytes had been read from the sockets.
pub(crate) fn frozen(call: &abi::switch_call, consumed: Pair<u64>) -> Frozen {
    let halves = Pair::new(&call.args.a, &call.args.b);
    // an unread FIN is included in `pending`
    let fin = halves.map(|h| h.fin != 0 && h.pending > 0);
    Frozen {
        pending: halves.zip(fin).map(|(h, fin)| h.pending - u32::from(fin)),
        fin,
        bound: halves.zip(consumed).map(|(h, at)| at + u64::from(h.start.wrapping_sub(at as u32))),
        seq: halves.map(|h| h.seq),
        at: switched(call),
    }
}

pub(crate) fn switched(call: &abi::switch_call) -> Switched {
    let g = &call.args;
    Switched {
        phase: Pair::new(g.a.phase_in.into(), g.b.phase_in.into()),
        end: Pair::new(g.end_a, g.end_b),
        bound: Pair::new(g.a.start, g.b.start),
        flags: Pair::new(g.a.flags, g.b.flags),
        fin: Pair::new(g.a.fin != 0, g.b.fin != 0),
        was_forwarded: Pair::new(g.a.pending != 0, g.b.pending != 0),
        hops: Pair::new(&call.hop_a, &call.hop_b).map(|h| {
            let macs = h.macs.map(u32::to_ne_bytes);
            let mac = |at| std::array::from_fn(|i| macs.as_flattened()[at + i]);
            Hop { ifindex: h.ifindex, dmac: mac(0), smac: mac(6), mark: h.mark }
        }),
        mss: Pair::new(call.hop_a.mss, call.hop_b.mss),
        origin: Pair::new(g.origin_a, g.origin_b),
    }
}
