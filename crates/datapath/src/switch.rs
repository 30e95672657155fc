//! The calls that switch a flow.

use crate::{Datapath, LegFlags, Phase, Tuple, abi, maps::run_program};
use serde::{Deserialize, Serialize};

/// Why a switch was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// Not seen from the SYN on, or gone.
    #[error("not tracked")]
    Untracked,
    /// Another switch is not over.
    #[error("an earlier switch is not over")]
    Busy,
    /// Reset, or closing in both directions.
    #[error("closing")]
    Closing,
    /// Fragments were seen.
    #[error("fragments")]
    Fragments,
    /// The counts cannot be right.
    #[error("the caller's byte counts contradict the tracker's")]
    Mismatch,
    /// A table is full.
    #[error("table full")]
    Full,
    /// All up to a [`Limit`] has come: nothing is left to forward.
    #[error("all up to the limit has come")]
    Short,
    /// A host was promised more than the other has room for: a moment later it may fit.
    #[error("the windows do not fit yet")]
    Window,
    /// A host was silent for so long that its timestamps cannot be followed (half a round of its clock): when it has sent something.
    #[error("a host was silent for half a round of its clock")]
    Silent,
    /// The program could not be run.
    #[error("running the switch program failed: errno {0}")]
    Run(i32),
}

/// One leg as its owner sees it. Positions count bytes since the SYN, FINs counting one.
#[derive(Clone, Copy, Debug)]
pub struct Half {
    /// Which leg.
    pub leg: Tuple,
    /// Position up to which its bytes were taken from the socket.
    pub consumed: u64,
    /// Position up to which bytes were given to the socket.
    pub produced: u64,
    /// Bytes in hand from this leg for the other.
    pub leftover: u32,
    /// How much of what the host sends may be forwarded.
    pub limit: Limit,
}

/// How much of what a host sends may be forwarded. Data beyond it take both directions back, in the data path itself: not one
/// byte of them is forwarded, and a FIN neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// All.
    #[default]
    None,
    /// Nothing: what is in the socket stays there, unread, and what comes joins it.
    Keep,
    /// So many bytes after those that were taken from the socket, at most [`Limit::MAX`].
    Bytes(u32),
}

impl Limit {
    /// 1 GiB, for distances in sequence space are told from their signs. Whoever wants more begins anew there.
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
    /// Segments that arrive during the drain are not forwarded, but given to [`Datapath::poll_held`]. The caller re-injects them
    /// when the drain has ended or was taken back.
    pub hold: bool,
    /// Fail with [`SwitchError::Window`] while a host may send more than the other has room for: the excess would be lost.
    pub fit: bool,
    /// Copy forwarded data to [`Datapath::poll_taps`] until the next freeze.
    pub tap: bool,
}

/// What a freeze leaves to be drained.
#[derive(Clone, Copy, Debug, Default)]
pub struct Frozen {
    /// Bytes still to be read from the first and the second leg's socket.
    pub pending: [u32; 2],
    /// End of stream is to be read after them.
    pub fin: [bool; 2],
    /// Positions of the bounds.
    pub bound: [u64; 2],
    /// Their sequence numbers.
    pub seq: [u32; 2],
    /// The legs right after.
    pub at: Switched,
}

/// Where a leg's packets leave, as learned from what its socket has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hop {
    pub(crate) ifindex: u32,
    pub(crate) dmac: [u8; 6],
    pub(crate) smac: [u8; 6],
    /// Of its packets, as a firewall or the socket has set it: the route depends on it.
    pub(crate) mark: u32,
}

/// State of a pair of legs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Switched {
    /// Phase of the bytes from the first and from the second host.
    pub phase: [Phase; 2],
    /// Position of all that came from the hosts.
    pub end: [u64; 2],
    /// Position of the last bound, low 32 bits.
    pub bound: [u32; 2],
    /// `LegFlags`.
    pub flags: [u32; 2],
    /// After an unsplice: was the direction forwarded already (true), or still draining? Also if the data path did it.
    pub was_forwarded: [bool; 2],
    /// After an unsplice: the host's FIN lies below the bound, so that its socket will never see it.
    pub fin: [bool; 2],
    /// Towards the hosts.
    pub hops: [Hop; 2],
    /// Announced by the hosts, bytes.
    pub mss: [u32; 2],
    /// After a commit: what makes positions of the extended sequence numbers of copies ([`Copied`](crate::Copied)).
    pub origin: [u64; 2],
}

impl Switched {
    /// Is all the proxy's, in both directions?
    pub fn is_local(&self) -> bool {
        self.phase == [Phase::Local; 2]
    }

    /// Is all forwarded, in both directions?
    pub fn is_forwarded(&self) -> bool {
        self.phase == [Phase::Forwarding; 2]
    }

    /// ... and nothing held any more?
    pub fn is_drained(&self) -> bool {
        self.is_forwarded() && (self.flags[0] | self.flags[1]) & LegFlags::HOLD == 0
    }

    /// The largest IP packets, in bytes, that may be sent to the hosts `a` and `b`: by what they have announced, and by the MTU of
    /// the paths to them, as far as it is known.
    pub fn most(&self, [a, b]: [&Tuple; 2], mtu: [Option<u32>; 2]) -> [u32; 2] {
        let most = |leg: &Tuple, i: usize| (self.mss[i] + headers(leg)).min(mtu[i].unwrap_or(u32::MAX));
        [most(a, 0), most(b, 1)]
    }

    /// Position of the last bound of direction `d`. The hosts do not wait: `end` may be beyond it already, by less than
    /// 2^32 since no window is larger.
    pub fn bound64(&self, d: usize) -> u64 {
        self.end[d] - u64::from((self.end[d] as u32).wrapping_sub(self.bound[d]))
    }
}

impl Datapath {
    pub(crate) fn run(
        &self,
        op: abi::switch_op,
        a: &Half,
        b: &Half,
        set: impl FnOnce(&mut abi::switch_args),
    ) -> Result<abi::switch_call, SwitchError> {
        let mut call = call(op, a, b);
        set(&mut call.args);
        run_program(&self.switch, &mut call).map_err(SwitchError::Run)?;
        outcome(call.args.result).map(|()| call)
    }

    /// Sets the boundary on both legs. Nobody may read or write the sockets during the call; afterwards the caller reads
    /// `pending` bytes of each, writes leftovers and these to the other, and waits for [`EventKind::Forwarding`].
    pub fn freeze(&self, a: &Half, b: &Half, options: FreezeOptions) -> Result<Frozen, SwitchError> {
        let FreezeOptions { hold, fit, tap } = options;
        let _one = self.switching.lock().expect("no panic under this lock");
        let r = self.run(abi::switch_op::OP_FREEZE, a, b, |g| {
            g.hold = hold.into();
            g.fit = fit.into();
            g.tap = tap.into();
        })?;
        let frozen = frozen(&r, [a.consumed, b.consumed]);
        self.shown().add(&frozen.at.hops);
        Ok(frozen)
    }

    /// Forwarding mode for good: entries that need no lock. Both directions must be forwarded already
    /// ([`SwitchError::Busy`] otherwise), as `at` has found. most: see [`Switched::most`]. `trigger`: the limit of that host is
    /// here, if it has none.
    pub fn commit(
        &self,
        [a, b]: [&Tuple; 2],
        at: &Switched,
        most: [u32; 2],
        trigger: [bool; 2],
    ) -> Result<Switched, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let (via_a, via_b) = (self.via_for(a, &at.hops[0], most[0])?, self.via_for(b, &at.hops[1], most[1])?);
        let remotes = match (a.is_v4(), b.is_v4()) {
            (true, false) => (self.remote_for(a)?, 0),
            (false, true) => (0, self.remote_for(b)?),
            _ => (0, 0),
        };
        let r = self.run(abi::switch_op::OP_COMMIT, &bare(a), &bare(b), |g| {
            g.via_a = via_a;
            g.via_b = via_b;
            (g.remote_b, g.remote_a) = remotes;
            g.trigger = u32::from(trigger[0]) | u32::from(trigger[1]) << 1;
        })?;
        Ok(switched(&r))
    }

    /// Back to control mode, from wherever the switch is. A flow that has had fragments forwarded ([`PathFlags::FRAGMENTS`])
    /// should stay as it is: what its host sends again across the bound may never come through.
    pub fn unsplice(&self, a: &Tuple, b: &Tuple) -> Result<Switched, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let at = self.run(abi::switch_op::OP_UNSPLICE, &bare(a), &bare(b), |_| {}).map(|r| switched(&r))?;
        self.shown().add(&at.hops);
        Ok(at)
    }

    /// Phases and positions.
    pub fn look(&self, a: &Tuple, b: &Tuple) -> Result<Switched, SwitchError> {
        self.run(abi::switch_op::OP_LOOK, &bare(a), &bare(b), |_| {}).map(|r| switched(&r))
    }
}

/// Of packets without options, bytes.
pub(crate) fn headers(leg: &Tuple) -> u32 {
    if leg.is_v4() { 40 } else { 60 }
}

/// May a host be told to send packets that are no larger than `most` bytes when they leave for `to`? Hosts remember what they are
/// told for all connections to the same address, and announce it to us: one that asks for little is not to make all others slow.
/// RFC 8200, 5; no tunnel leaves less.
pub fn can_fit(host: &Tuple, to: &Tuple, most: u32) -> bool {
    const LEAST: u32 = 1280;
    most + headers(host) >= LEAST + headers(to)
}

pub(crate) fn bare(t: &Tuple) -> Half {
    Half { leg: *t, consumed: 0, produced: 0, leftover: 0, limit: Limit::None }
}

pub(crate) fn call(op: abi::switch_op, a: &Half, b: &Half) -> abi::switch_call {
    let half = |h: &Half| abi::half {
        leg: h.leg.to_abi(),
        consumed: h.consumed as u32,
        produced: h.produced as u32,
        leftover: h.leftover,
        limit: h.limit.to_abi(),
        ..Default::default()
    };
    let args = abi::switch_args { op, a: half(a), b: half(b), ..Default::default() };
    abi::switch_call { args, ..Default::default() }
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
        _ => Err(SwitchError::Untracked),
    }
}

/// `consumed`: positions up to which bytes had been taken from the sockets.
pub(crate) fn frozen(call: &abi::switch_call, consumed: [u64; 2]) -> Frozen {
    let halves = [&call.args.a, &call.args.b];
    // the FIN is counted while it has not been read
    let fin = halves.map(|h| h.fin != 0 && h.pending > 0);
    Frozen {
        pending: [0, 1].map(|d| halves[d].pending - u32::from(fin[d])),
        fin,
        bound: [0, 1].map(|d| consumed[d] + u64::from(halves[d].start.wrapping_sub(consumed[d] as u32))),
        seq: halves.map(|h| h.seq),
        at: switched(call),
    }
}

pub(crate) fn switched(call: &abi::switch_call) -> Switched {
    let g = &call.args;
    Switched {
        phase: [g.a.phase_in.into(), g.b.phase_in.into()],
        end: [g.end_a, g.end_b],
        bound: [g.a.start, g.b.start],
        flags: [g.a.flags, g.b.flags],
        fin: [g.a.fin != 0, g.b.fin != 0],
        was_forwarded: [g.a.pending != 0, g.b.pending != 0],
        hops: [&call.hop_a, &call.hop_b].map(|h| {
            let macs = h.macs.map(u32::to_ne_bytes);
            let mac = |at| std::array::from_fn(|i| macs.as_flattened()[at + i]);
            Hop { ifindex: h.ifindex, dmac: mac(0), smac: mac(6), mark: h.mark }
        }),
        mss: [call.hop_a.mss, call.hop_b.mss],
        origin: [g.origin_a, g.origin_b],
    }
}
