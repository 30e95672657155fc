//! The state machine of a flow, without sockets, threads, clocks or a data path. An [`Event`] goes in, and an
//! [`Action`] comes out; the answer to an action is the next event. The task that copies (relay.rs),
//! the keeper of forwarded flows and the simulator in tests/ drive it.
//!
//! | state | bytes | leaves by |
//! | --- | --- | --- |
//! | `Copying` | both directions are copied | threshold or command: freeze; end of both streams |
//! | `Draining` | copied up to the bound, forwarded beyond it | both forwarded: commit, or end if both FINs are acknowledged; time limit, command, failure: unsplice |
//! | `Spliced` | forwarded; sockets parked | trigger, command, MTU: unsplice; release; both FINs acknowledged, RST, idle: end |
//! | `Released` | forwarded; there are no sockets | command, MTU: recreation, when idle; both FINs acknowledged, RST, idle: end |
//! | `Unsplicing` | the data path gives both directions back | its answer: copied by a task again; end |
//! | `Settling` | a message was relayed; its forwarded part is not acknowledged yet | acknowledged, reset, time limit: end |
//! | `Closing` | both streams have ended; forwarded bytes, or FINs, are not acknowledged yet | acknowledged, lost, time limit: end |
//! | `Resetting` | a host has failed; the other one has not acknowledged all that came before | acknowledged, time limit: end, with a reset |
//! | `Ended` | | |
//!
//! If the connection of a host fails, what it has sent before is passed on first, and then the other host is reset
//! ([`Core::fails`]). The receiver of a message that waits for its answer is left to the caller: the answer may have come.
//!
//! A failed drain is not an error: the flow is copied again, and its status shows the reason.

mod beyond;
mod control;
mod distance;
mod ending;
mod forwarded;
pub mod orphan;
mod queue;
mod so_far;
mod start;
mod streams;
#[cfg(test)]
mod tests;
mod watch;

use crate::{
    EndReason, FlowState, PathCause, PathFinding, Refusal,
    types::{Command, Message, Policy},
};
use control::Control;
pub use distance::FAR_CLIENT;
use forwarded::Forwarded;
pub use forwarded::{Seen, Why};
use longsplice_datapath::{
    Frozen, Half, LegFlags, Limit, Pair, PathFacts, PathFlags, PathView, Side, SwitchError, Switched, Tuple,
};
pub use queue::{Held, needs_queues};
pub use so_far::SoFar;
use std::time::Duration;
use streams::Passing;
pub use streams::{Next, Position, Stream};

/// Time since an origin that all events of a flow share. CLOCK_MONOTONIC, so that another process can continue it.
pub type Time = Duration;

/// The state of a flow. See the [table](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[allow(missing_docs)]
pub enum State {
    Copying,
    Draining,
    Spliced,
    Released,
    Unsplicing,
    Settling,
    Closing,
    Resetting,
    Ended,
}

impl State {
    fn shown(self) -> FlowState {
        match self {
            State::Copying | State::Settling | State::Closing | State::Resetting | State::Ended => FlowState::Copying,
            State::Draining => FlowState::Draining,
            State::Spliced => FlowState::Spliced,
            State::Released => FlowState::Released,
            State::Unsplicing => FlowState::Unsplicing,
        }
    }
}

/// The progress of a flow, as lists show it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Progress {
    /// State of the flow.
    pub state: FlowState,
    /// Bytes copied, by direction.
    pub copied: Pair<u64>,
    /// Bytes of completed spliced stretches, by direction.
    pub spliced: Pair<u64>,
    /// Positions at which the current spliced stretch began, by direction.
    pub since: Pair<u64>,
    /// Number of completed splices.
    pub splices: u32,
    /// Why the flow is not spliced, or not spliced again.
    pub refusal: Option<Refusal>,
    /// What was measured when its path was last refused.
    pub finding: Option<PathFinding>,
    /// A trigger has just taken it back: to be told.
    pub triggered: bool,
    /// It was just frozen, which the state does not show yet.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub freezes: bool,
}

impl Progress {
    /// Progress of a new flow.
    pub fn new(refusal: Option<Refusal>) -> Progress {
        let none = Pair::both(0);
        let (state, splices, finding) = (FlowState::Copying, 0, None);
        let (triggered, freezes) = (false, false);
        Progress { state, copied: none, spliced: none, since: none, splices, refusal, finding, triggered, freezes }
    }

    /// Returns what was measured of the path, if that is why the flow is not spliced, or why it was spliced before its first byte.
    pub fn path_finding(&self) -> Option<PathFinding> {
        self.finding.filter(|found| self.refusal == Some(Refusal::Path) || found.cause == PathCause::Far)
    }

    /// Counts a spliced stretch of bytes from this host that has reached position `end`. Returns their number.
    fn forwarded_to(&mut self, from: Side, end: u64) -> u64 {
        let forwarded = end - self.since[from];
        self.since[from] = end;
        self.spliced[from] += forwarded;
        forwarded
    }

    /// Counts the last stretches of a flow that ends while it is forwarded. `ends`:
    /// positions of all data from the hosts; `fins`: whether a FIN is the last of it.
    pub fn ends_forwarded(&mut self, ends: Pair<u64>, fins: Pair<bool>) {
        for from in Side::BOTH {
            let forwarded = ends[from].saturating_sub(self.since[from]);
            self.spliced[from] += forwarded.saturating_sub(fins[from].into());
        }
    }
}

/// An event of a flow.
#[derive(Debug)]
pub enum Event {
    /// Bytes were passed on.
    Moved,
    /// Nothing more is to be read for now: both directions have ended, have
    /// drained to their limits, or have copied as much as was requested.
    Copied,
    /// The receiver of a message has sent data, at which the message is to stop. In a drain, a host has sent data
    /// that is left to us.
    Heard,
    /// The connection to this host has failed.
    Failed(Side),
    /// [`Core::timer`] has expired.
    Timer,
    /// The data path reported an event of the flow, which is not forwarded.
    Told,
    /// A forwarded flow was looked at.
    Seen(Box<Seen>),
    /// A command from an operator or a program.
    Command(Command),
    /// The program is stopping.
    Stop {
        /// Forwarded flows stay forwarded.
        leave: bool,
    },
    /// Answer to [`Action::Attend`]: whether both sockets can be read and written.
    Attended(bool),
    /// Answer to [`Action::Measure`].
    Measured(Pair<PathFacts>),
    /// Answer to [`Action::LookBehind`]: whether a stream ends there.
    LookedBehind(bool),
    /// Answer to [`Action::Freeze`].
    Frozen(Result<Box<Frozen>, SwitchError>),
    /// Answer to [`Action::Adopt`].
    Adopted,
    /// Another answer to [`Action::Adopt`] and [`Action::Freeze`].
    Refused {
        /// The reason.
        why: Refusal,
        /// The reason will not change.
        for_good: bool,
    },
    /// Answer to [`Action::Look`]. Also to [`Action::Commit`], if not all bytes are forwarded yet.
    Looked(Result<Box<Switched>, SwitchError>),
    /// Answer to [`Action::Commit`]. Also to [`Action::Look`], where [`Core::may_commit`] allows it.
    Committed(Result<Box<Switched>, SwitchError>),
    /// Answer to [`Action::Unsplice`].
    Unspliced {
        /// The answer of the data path.
        at: Result<Box<Switched>, SwitchError>,
        /// The client has sent a reset.
        client_reset: bool,
    },
    /// Answer to [`Action::Release`]: whether the sockets were released.
    Released(bool),
    /// Answer to [`Action::Recreate`]: the positions of the hosts.
    Recreated(Result<Pair<u64>, SwitchError>),
}

/// An action that the driver must perform.
#[derive(Debug)]
pub enum Action {
    /// Copy ([`Core::copies`]) and wait for events.
    Wait,
    /// Hand the flow to a task, with both sockets registered.
    Attend,
    /// Copy for the foreseeable future. `forget`: why the data path can forget both legs.
    CopyOn {
        /// The refusal.
        forget: Option<Refusal>,
        /// Receive windows in bytes for the hosts, and limits for what waits in the other host's socket. `None`: the kernel's.
        windows: Pair<Option<u32>>,
    },
    /// Measure the paths, as the sockets know them.
    Measure,
    /// Hold these senders back, since their queues are too long for a freeze. If none: no longer hold any back.
    HoldBack(Pair<Option<Held>>),
    /// Have the data path adopt the legs that it does not know yet, while bytes are copied on.
    Adopt,
    /// Read once more, beyond the bytes that were enough for a splice.
    LookBehind,
    /// Freeze both directions. With `fit`, fail if a host may send more than the other has room for.
    Freeze {
        /// See `Datapath::freeze`.
        fit: bool,
    },
    /// Look at the legs in the data path.
    Look,
    /// Commit, and park the sockets.
    Commit {
        /// What the last look found.
        at: Box<Switched>,
        /// Size in bytes of the largest IP packet for each host.
        most: Pair<u32>,
    },
    /// Hand the flow to the keeper of forwarded flows.
    Keep,
    /// Take the flow back to control mode.
    Unsplice {
        /// Time in forwarding mode. `None`: the flow was draining.
        away: Option<Duration>,
    },
    /// Close the parked sockets silently.
    Release,
    /// Create new sockets; with `force`, even if some data is not acknowledged.
    Recreate {
        /// See `Datapath::recreate`.
        force: bool,
    },
    /// End the flow.
    End {
        /// How it ended.
        how: EndReason,
        /// It was forwarded until now, and no socket may send for it.
        forwarded: bool,
    },
}

/// The environment of an event.
pub struct Context<'a> {
    /// The present time.
    pub now: Time,
    /// The flow's policy.
    pub policy: &'a Policy,
    /// The legs.
    pub legs: Pair<Tuple>,
    /// Positions of their sockets.
    pub at: Pair<&'a mut Position>,
    /// The progress shown in lists.
    pub shown: &'a mut Progress,
}

impl Context<'_> {
    fn refuse(&mut self, why: Refusal) {
        self.shown.refusal = Some(why);
    }

    fn refuse_path(&mut self, finding: PathFinding) {
        self.shown.finding = Some(finding);
        self.refuse(Refusal::Path);
    }
}

/// Whether the data path has records of the legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
enum Records {
    /// They are made when a splice is due.
    Lacking,
    /// They are being made.
    Asked,
    There,
}

/// The state machine of one flow.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Core {
    state: State,
    /// The policy is overruled: the flow stays in control mode.
    stay: bool,
    /// A FIN was forwarded past a socket. The sockets would not see the end of that direction, or would repeat it.
    fin_past: bool,
    /// The host whose connection has failed.
    failed: Option<Side>,
    /// Why the flow can never be spliced.
    obstacle: Option<Refusal>,
    records: Records,
    /// How much data from each host a splice may forward.
    limits: Pair<Limit>,
    /// Set if the flow relays one message instead of two streams.
    message: Option<Box<Passing>>,
    /// State of control mode: set while bytes are read and written, or are about to be.
    control: Option<Box<Control>>,
    /// State of forwarding mode.
    forwarded: Forwarded,
}

impl Core {
    /// Creates a flow with bytes in hand. Its first event must be [`Event::Attended`]. `obstacle`: why it can never be spliced.
    pub fn new(message: Option<Message>, obstacle: Option<Refusal>, in_hand: Pair<u64>) -> Core {
        let message = message.map(|m| Box::new(Passing::new(&m)));
        let control = Box::new(Control::new(message.as_deref(), Pair::both(0), in_hand));
        Core {
            state: State::Copying,
            stay: false,
            fin_past: false,
            failed: None,
            obstacle,
            records: Records::There,
            limits: Pair::both(Limit::None),
            message,
            control: Some(control),
            forwarded: Forwarded::default(),
        }
    }

    /// Returns a flow that an earlier process has spliced and that has no sockets any more.
    /// `is_forced`: as [`Core::may_be_beyond`] of the flow that it was.
    pub fn released(now: Time, fin_past: bool, is_forced: bool) -> Core {
        let forwarded = Forwarded::new(now, None, is_forced);
        Core { state: State::Released, fin_past, control: None, forwarded, ..Core::new(None, None, Pair::both(0)) }
    }

    /// Has the legs adopted before the first splice ([`Action::Adopt`]).
    #[must_use]
    pub fn without_records(self) -> Core {
        Core { records: Records::Lacking, ..self }
    }

    /// Says that the client is further away than [`FAR_CLIENT`].
    #[must_use]
    pub fn for_far_client(mut self) -> Core {
        self.control_mut().is_client_far = true;
        self
    }

    /// Returns true, once, if the flow's server turned out to suffer from splices before its first byte.
    pub fn take_was_slow(&mut self) -> bool {
        self.control.as_mut().is_some_and(|control| std::mem::take(&mut control.was_slow))
    }

    /// Processes an event and returns the next action.
    pub fn on(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let action = match self.state {
            State::Copying => self.on_copying(cx, event),
            State::Draining => self.on_draining(cx, event),
            State::Unsplicing => self.on_unsplicing(cx, event),
            State::Settling => self.on_settling(cx, event),
            State::Closing => self.on_closing(cx, event),
            State::Resetting => self.on_resetting(cx, event),
            State::Spliced | State::Released => self.on_forwarded(cx, event),
            State::Ended => Action::Wait,
        };
        cx.shown.state = self.state.shown();
        action
    }

    /// Returns the state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns whether bytes are to be read and written.
    pub fn copies(&self) -> bool {
        (self.state == State::Copying && self.control().start_until.is_none())
            || self.state == State::Resetting
            || (self.state == State::Draining && !self.control().passed)
    }

    /// Returns whether the driver must report when this host sends data that is left to us.
    pub fn listens_to(&self, side: Side) -> bool {
        let sends_message = self.message.as_ref().is_some_and(|m| m.from == side);
        self.listens() && (!sends_message || self.state == State::Draining)
    }

    /// Returns whether the driver must report when the receiver of the message sends data.
    pub fn listens(&self) -> bool {
        match self.state {
            State::Copying => self.message.as_ref().is_some_and(|m| m.until_receiver_speaks),
            // what the hosts send next may be the first sign that the message has passed
            State::Draining => self.message.is_some() && self.control().passed && !self.control().heard,
            State::Settling => !self.control().heard,
            _ => false,
        }
    }

    /// Returns whether commands are accepted, if only to be ignored.
    pub fn takes_commands(&self) -> bool {
        matches!(self.state, State::Copying | State::Draining | State::Settling | State::Closing | State::Resetting)
    }

    /// Returns whether a stop ends the flow now. One that is about to end may do so.
    pub fn heeds_stop(&self, now: Time) -> bool {
        self.state != State::Closing || self.control().has_closed_for(now) >= ending::CLOSING
    }

    /// Returns whether the end of the message, or of its part that was to be spliced, has passed in forwarding mode.
    pub fn has_passed(&self, from: Side, at: &Switched) -> bool {
        self.message.as_ref().is_some_and(|m| m.from == from && m.is_passed(at) && !m.passed_early)
    }

    /// Returns the sender of the message, if the flow relays one.
    pub fn message_from(&self) -> Option<Side> {
        self.message.as_ref().map(|m| m.from)
    }

    /// Returns both directions. Only while bytes are copied or drained.
    pub fn streams(&self) -> &Pair<Stream> {
        &self.control().streams
    }

    /// Returns both directions, for the code that reads and writes. Only while bytes are copied or drained.
    pub fn streams_mut(&mut self) -> &mut Pair<Stream> {
        &mut self.control_mut().streams
    }

    /// Sets how much the next splices may forward. A flow that relays a message sets its own limits.
    pub fn set_limits(&mut self, limits: Pair<Limit>) {
        self.limits = limits;
    }

    /// Describes one leg for the data path.
    pub fn half(&self, side: Side, leg: Tuple, at: &Position) -> Half {
        let leftover = self.streams()[side].in_hand as u32;
        Half { leg, consumed: at.consumed, produced: at.produced, leftover, limit: self.limits[side] }
    }

    /// Returns the host whose connection has failed, while the rest of what it has sent is passed on.
    pub fn failed(&self) -> Option<Side> {
        self.failed
    }

    /// Returns whether the receiver of the message has failed, which was to answer it.
    pub fn receiver_failed(&self) -> bool {
        self.message.as_ref().is_some_and(|m| self.failed == Some(m.from.other()))
    }

    /// Returns whether the message's sender has sent more than the message, of which the data path may have dropped a part. It is
    /// sent again, and nobody has read it.
    pub fn has_excess(&self) -> bool {
        self.message.as_ref().is_some_and(|m| m.excess)
    }

    /// Returns whether a FIN was forwarded past a socket, so that no socket may send its own.
    pub fn is_fin_past(&self) -> bool {
        self.fin_past
    }

    /// Returns whether both hosts of a forwarded flow may be beyond the other one's window.
    pub fn may_be_beyond(&self) -> bool {
        self.forwarded.is_watched_for_windows()
    }

    /// Returns whether the flow will end as soon as it is taken back.
    pub fn is_ending(&self) -> bool {
        self.state == State::Unsplicing && self.control().then.is_some()
    }

    fn control(&self) -> &Control {
        self.control.as_ref().expect("not forwarded")
    }

    fn control_mut(&mut self) -> &mut Control {
        self.control.as_mut().expect("not forwarded")
    }

    /// Returns whether nothing more of a message is to be read, so that there is nothing to splice for.
    fn is_read(&self, cx: &Context<'_>) -> bool {
        Side::BOTH.iter().all(|from| self.streams()[*from].is_read(cx.at[*from]))
    }

    /// Returns whether both streams, or the message, have ended.
    fn are_over(&self, cx: &Context<'_>) -> bool {
        if self.is_read(cx) {
            return self.streams().iter().all(|s| s.in_hand == 0);
        }
        cx.at.iter().all(|at| at.eof && at.shut)
    }

    fn note_copied(&self, cx: &mut Context<'_>) {
        cx.shown.copied = self.streams().each_ref().map(|s| s.copied);
    }

    /// Takes the flow back. It is then copied, or ends if `then` says how.
    fn unsplice(&mut self, then: Option<EndReason>, away: Option<Duration>) -> Action {
        let control = self.control_mut();
        control.streams.iter_mut().for_each(Stream::undrained);
        control.then = then;
        self.state = State::Unsplicing;
        Action::Unsplice { away }
    }

    fn on_unsplicing(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let Event::Unspliced { at, client_reset } = event else { return Action::Wait };
        let at = match at {
            Ok(at) => at,
            Err(SwitchError::Other) => return self.replaced(cx),
            Err(_) => return self.end(cx, EndReason::Stopped),
        };
        self.took_back(cx, &at);
        if were_reset(&at) {
            // each host knows of it
            return self.end(cx, if client_reset { EndReason::ClientReset } else { reset_by(&at) });
        }
        if let Some(how) = self.control_mut().then.take() {
            return self.end(cx, how);
        }
        self.failed = self.failed.or(reset_side(&at));
        self.attend()
    }

    /// Moves the sockets' positions by the bytes that were forwarded past them.
    fn took_back(&mut self, cx: &mut Context<'_>, at: &Switched) {
        cx.at.iter_mut().for_each(|at| at.shimmed = true);
        self.control_mut().note_settled(cx.now, at);
        self.note_excess(at);
        for from in Side::BOTH.into_iter().filter(|from| at.was_forwarded[*from]) {
            let forwarded = self.advance(cx, from, at.bound64(from));
            let stream = &mut self.control_mut().streams[from];
            if let Some(left) = stream.message {
                stream.passed(forwarded);
                // a splice that did not pay is not tried again: the receiver keeps sending
                self.stay |= cx.policy.threshold().is_some_and(|n| left > forwarded && forwarded < n);
            }
            // the FIN of a message's sender is never forwarded: it is still to be read
            if at.fin[from] && !cx.at[from].eof && self.limits[from] == Limit::None {
                (cx.at[from].eof, cx.at[from.other()].shut) = (true, true);
                cx.shown.spliced[from] -= 1;
                self.fin_past = true;
            }
        }
    }

    /// Counts the bytes from this host, up to `end`, that were forwarded past the sockets. Returns their number.
    fn advance(&self, cx: &mut Context<'_>, from: Side, end: u64) -> u64 {
        let forwarded = cx.shown.forwarded_to(from, end);
        cx.at[from].consumed += forwarded;
        cx.at[from.other()].produced += forwarded;
        forwarded
    }

    /// Notes that the message's sender has sent more than the message.
    fn note_excess(&mut self, at: &Switched) {
        if let Some(m) = &mut self.message {
            m.excess |= at.flags[m.from] & LegFlags::EXCESS != 0;
        }
    }

    fn attend(&mut self) -> Action {
        self.state = State::Copying;
        Action::Attend
    }

    /// Ends a flow that is not forwarded.
    fn end(&mut self, cx: &mut Context<'_>, how: EndReason) -> Action {
        self.note_copied(cx);
        self.state = State::Ended;
        if how == EndReason::Closed && cx.shown.splices == 0 && cx.shown.refusal.is_none() {
            cx.refuse(Refusal::Short);
        }
        Action::End { how, forwarded: false }
    }

    /// Has the flow look at its limits, which have changed, at its next timer.
    pub fn look_at_limits(&mut self, now: Time) {
        if let (State::Copying, Some(control)) = (self.state, &mut self.control) {
            control.look_at_limits(now);
        }
    }

    /// Returns when a flow that was taken back is looked at next, while not everything that was forwarded is acknowledged.
    pub fn settles_at(&self) -> Option<Time> {
        self.control.as_ref().and_then(|control| control.settle_at).filter(|_| self.state == State::Copying)
    }

    /// Returns when [`Event::Timer`] is due.
    pub fn timer(&self) -> Option<Time> {
        match self.state {
            State::Copying => {
                let (control, has_failed) = (self.control(), self.failed.is_some());
                let failed = has_failed.then_some(control.until);
                [Some(control.next_tick()), self.settles_at(), failed, control.start_until].into_iter().flatten().min()
            }
            State::Draining => Some(self.control().look_at.min(self.control().until)),
            State::Settling | State::Closing | State::Resetting => Some(self.control().look_at),
            State::Spliced | State::Released | State::Unsplicing | State::Ended => None,
        }
    }
}

fn was_reset(at: &Switched) -> bool {
    (at.flags.client | at.flags.server) & LegFlags::RESET != 0
}

fn were_reset(at: &Switched) -> bool {
    at.flags.client & at.flags.server & LegFlags::RESET != 0
}

/// Returns the side on which a connection was reset.
fn reset_side(at: &Switched) -> Option<Side> {
    Side::BOTH.into_iter().find(|side| at.flags[*side] & LegFlags::RESET != 0)
}

/// Returns whose reset it was.
fn reset_by(at: &Switched) -> EndReason {
    EndReason::reset_by(if at.flags.client & LegFlags::RESET_IN != 0 { Side::Client } else { Side::Server })
}

/// Returns whether fragments were forwarded. Taking the flow back could then lose data that a host
/// retransmits across the bound, so the flow stays forwarded unless the alternative is worse.
fn has_fragments(paths: &Pair<PathView>) -> bool {
    paths.iter().any(|p| p.flags & PathFlags::FRAGMENTS != 0)
}
