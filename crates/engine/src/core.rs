//! The state machine of a flow, without sockets, threads, clock or data path: what happens goes in as an [`Event`], what is to be
//! done comes out as an [`Action`], whose answer is the next event. The task that copies ([`relay`](crate::relay)), the
//! [`keeper`](crate::keeper) of forwarded flows, and the simulator in tests/ drive it.
//!
//! | state | bytes | leaves by |
//! | --- | --- | --- |
//! | `Copying` | both directions are copied | threshold or command: freeze; end of both streams |
//! | `Draining` | copied up to the bound, forwarded beyond it | both forwarded: commit; time limit, command, failure: unsplice |
//! | `Spliced` | forwarded; the sockets are parked | trigger, command, MTU: unsplice; release; both FINs acknowledged, RST, idle: end |
//! | `Released` | forwarded; there are no sockets | command, MTU: recreation, when idle; both FINs acknowledged, RST, idle: end |
//! | `Unsplicing` | the data path gives them back | its answer: attended by a task again, and copied; end |
//! | `Settling` | a message was passed on; its forwarded part is not acknowledged yet | acknowledged, reset, time limit: end |
//! | `Closing` | both FINs were forwarded past the sockets, and are not acknowledged yet | acknowledged, time limit: end |
//! | `Ended` | | |
//!
//! A drain that fails is no error: the flow copies on, with the reason in its status.

mod control;
mod distance;
mod forwarded;
mod streams;
#[cfg(test)]
mod tests;

use crate::{
    EndReason, FlowState, Refusal,
    types::{Command, Message, Policy},
};
use control::Control;
use forwarded::Forwarded;
pub use forwarded::{Seen, Why};
use longsplice_datapath::{Frozen, Half, LegFlags, Limit, PathFacts, PathFlags, SwitchError, Switched, Tuple};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use streams::Passing;
pub use streams::{Next, Position, Stream};

/// Time since an origin that all events of a flow share: CLOCK_MONOTONIC, so that another process can go on with it.
pub type Time = Duration;

/// Where a flow is. See the [table](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum State {
    Copying,
    Draining,
    Spliced,
    Released,
    Unsplicing,
    Settling,
    Closing,
    Ended,
}

impl State {
    fn shown(self) -> FlowState {
        match self {
            State::Copying | State::Settling | State::Closing | State::Ended => FlowState::Copying,
            State::Draining => FlowState::Draining,
            State::Spliced => FlowState::Spliced,
            State::Released => FlowState::Released,
            State::Unsplicing => FlowState::Unsplicing,
        }
    }
}

/// What lists show of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Of the flow.
    pub state: FlowState,
    /// Bytes that were copied, by direction.
    pub copied: [u64; 2],
    /// Bytes of finished spliced stretches.
    pub spliced: [u64; 2],
    /// Positions where the present spliced stretch began.
    pub since: [u64; 2],
    /// Completed splices.
    pub splices: u32,
    /// Why it is not spliced, or not any more.
    pub refusal: Option<Refusal>,
}

impl Progress {
    /// Of a flow that begins.
    pub fn new(refusal: Option<Refusal>) -> Progress {
        Progress { state: FlowState::Copying, copied: [0; 2], spliced: [0; 2], since: [0; 2], splices: 0, refusal }
    }

    /// A spliced stretch of direction `d` has come to `end`: how many bytes it had.
    fn forwarded_to(&mut self, d: usize, end: u64) -> u64 {
        let forwarded = end - self.since[d];
        self.since[d] = end;
        self.spliced[d] += forwarded;
        forwarded
    }

    /// The flow ends while it is forwarded. `ends`: positions of all that came from the hosts; `fins`: with a FIN at the end.
    pub fn ends_forwarded(&mut self, ends: [u64; 2], fins: [bool; 2]) {
        for d in 0..2 {
            self.spliced[d] += (ends[d] - self.since[d]).saturating_sub(fins[d].into());
        }
    }
}

/// A host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Side {
    Client,
    Server,
}

impl Side {
    /// Of the sender in direction `d`: 0 is client to server.
    pub fn sender(d: usize) -> Side {
        if d == 0 { Side::Client } else { Side::Server }
    }

    fn reset(self) -> EndReason {
        match self {
            Side::Client => EndReason::ClientReset,
            Side::Server => EndReason::ServerReset,
        }
    }
}

/// What happens.
#[derive(Debug)]
pub enum Event {
    /// Bytes were passed on.
    Moved,
    /// Nothing more is to be read for now: both directions have ended, or have drained to their limits, or as much as was asked for
    /// has been copied.
    Copied,
    /// The receiver of a message that heeds it has said something.
    Heard,
    /// A connection has failed.
    Failed(Side),
    /// The time of [`Core::timer`] has come.
    Timer,
    /// The data path has told of the flow, which is not forwarded.
    Told,
    /// Somebody looked at a flow that is forwarded.
    Seen(Box<Seen>),
    /// An operator or a program wants something.
    Command(Command),
    /// The program stops.
    Stop {
        /// What is forwarded stays so.
        leave: bool,
    },
    /// Answers [`Action::Attend`]: whether both sockets can be read and written.
    Attended(bool),
    /// Answers [`Action::Measure`].
    Measured([PathFacts; 2]),
    /// Answers [`Action::LookBehind`]: whether a stream ends there.
    LookedBehind(bool),
    /// Answers [`Action::Freeze`].
    Frozen(Result<Box<Frozen>, SwitchError>),
    /// Answers [`Action::Freeze`], too.
    Refused {
        /// The reason.
        why: Refusal,
        /// It will not change.
        for_good: bool,
    },
    /// Answers [`Action::Look`].
    Looked(Result<Box<Switched>, SwitchError>),
    /// Answers [`Action::Commit`].
    Committed(Result<Box<Switched>, SwitchError>),
    /// Answers [`Action::Unsplice`].
    Unspliced {
        /// The data path's answer.
        at: Result<Box<Switched>, SwitchError>,
        /// The client's reset has passed.
        client_reset: bool,
    },
    /// Answers [`Action::Release`]: whether it was done.
    Released(bool),
    /// Answers [`Action::Recreate`], with the positions where the hosts were.
    Recreated(Result<[u64; 2], SwitchError>),
}

/// What is to be done.
#[derive(Debug)]
pub enum Action {
    /// Nothing, but to copy ([`Core::copies`]) and to wait.
    Wait,
    /// Into a task, with both sockets.
    Attend,
    /// It is copied for as long as one can see. `forget`: the reason why the data path can forget both legs.
    CopyOn {
        /// The refusal.
        forget: Option<Refusal>,
    },
    /// Ask the sockets what they know of their paths.
    Measure,
    /// Read once more behind the bytes that were enough.
    LookBehind,
    /// Freeze. `fit`: not while a host may send more than the other has room for.
    Freeze {
        /// See `Datapath::freeze`.
        fit: bool,
    },
    /// Look at the legs.
    Look,
    /// Commit, and park the sockets.
    Commit {
        /// What the last look has found, and the largest packets for the hosts.
        at: Box<Switched>,
        /// Bytes of IP packet.
        most: [u32; 2],
    },
    /// Leave it to whoever looks after forwarded flows.
    Keep,
    /// Take it back.
    Unsplice {
        /// How long it was forwarded; `None`: it was draining.
        away: Option<Duration>,
    },
    /// Close the parked sockets silently.
    Release,
    /// New sockets, even if not all is acknowledged (`force`).
    Recreate {
        /// See `Datapath::recreate`.
        force: bool,
    },
    /// It is over. `forwarded`: no socket may speak for it.
    End {
        /// The reason.
        how: EndReason,
        /// Until now.
        forwarded: bool,
    },
}

/// What surrounds an event.
pub struct Context<'a> {
    /// Now.
    pub now: Time,
    /// The flow's.
    pub policy: &'a Policy,
    /// The client's leg, and the server's.
    pub legs: [Tuple; 2],
    /// Where their sockets are.
    pub at: [&'a mut Position; 2],
    /// What lists show.
    pub shown: &'a mut Progress,
}

impl Context<'_> {
    fn refuse(&mut self, why: Refusal) {
        self.shown.refusal = Some(why);
    }
}

/// A flow.
#[derive(Debug, Serialize, Deserialize)]
pub struct Core {
    state: State,
    /// It is to be in control mode, or spliced whatever the policy says.
    stay: bool,
    /// A FIN was forwarded past its socket: the sockets will not see the end of that direction, or would repeat it.
    fin_past: bool,
    /// Why it can never be spliced.
    obstacle: Option<Refusal>,
    /// How much of what the hosts send a splice may forward.
    limits: [Limit; 2],
    /// One message is passed on, not two streams.
    message: Option<Box<Passing>>,
    /// While bytes are read and written, or are about to be.
    control: Option<Box<Control>>,
    /// While they are not.
    forwarded: Forwarded,
}

impl Core {
    /// A flow that begins, with bytes in hand: the first event is [`Event::Attended`]. `obstacle`: why it can never be spliced.
    pub fn new(message: Option<Message>, obstacle: Option<Refusal>, in_hand: [u64; 2]) -> Core {
        let message = message.map(|m| Box::new(Passing::new(&m)));
        let control = Box::new(Control::new(message.as_deref(), [0; 2], in_hand));
        Core {
            state: State::Copying,
            stay: false,
            fin_past: false,
            obstacle,
            limits: [Limit::None; 2],
            message,
            control: Some(control),
            forwarded: Forwarded::default(),
        }
    }

    /// Something happens.
    pub fn on(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let action = match self.state {
            State::Copying => self.on_copying(cx, event),
            State::Draining => self.on_draining(cx, event),
            State::Unsplicing => self.on_unsplicing(cx, event),
            State::Settling => self.on_settling(cx, event),
            State::Closing => self.on_closing(cx, event),
            State::Spliced | State::Released => self.on_forwarded(cx, event),
            State::Ended => Action::Wait,
        };
        cx.shown.state = self.state.shown();
        action
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Are bytes to be read and written?
    pub fn copies(&self) -> bool {
        self.state == State::Copying || (self.state == State::Draining && !self.control().passed)
    }

    /// Is it to be heard whether the receiver of the message has something to say?
    pub fn listens(&self) -> bool {
        match self.state {
            State::Copying => self.message.as_ref().is_some_and(|m| m.until_receiver_speaks),
            State::Settling => !self.control().heard,
            _ => false,
        }
    }

    /// May a command come?
    pub fn takes_commands(&self) -> bool {
        matches!(self.state, State::Copying | State::Draining)
    }

    /// The direction of the message that is passed on, if it is one: 0 is client to server.
    pub fn message_from(&self) -> Option<usize> {
        self.message.as_ref().map(|m| m.from)
    }

    /// Both directions, while bytes are copied or drain.
    pub fn streams(&self) -> &[Stream; 2] {
        &self.control().streams
    }

    /// The same, for whoever reads and writes.
    pub fn streams_mut(&mut self) -> &mut [Stream; 2] {
        &mut self.control_mut().streams
    }

    /// How much the next splices may forward, unless the flow is for one message.
    pub fn set_limits(&mut self, limits: [Limit; 2]) {
        self.limits = limits;
    }

    /// One leg as the data path wants to know it.
    pub fn half(&self, d: usize, leg: Tuple, at: &Position) -> Half {
        let leftover = self.streams()[d].in_hand as u32;
        Half { leg, consumed: at.consumed, produced: at.produced, leftover, limit: self.limits[d] }
    }

    /// Both FINs were forwarded, or one: no socket may send its own.
    pub fn is_fin_past(&self) -> bool {
        self.fin_past
    }

    /// Will it end as soon as it is taken back?
    pub fn is_ending(&self) -> bool {
        self.state == State::Unsplicing && self.control().then.is_some()
    }

    fn control(&self) -> &Control {
        self.control.as_ref().expect("not forwarded")
    }

    fn control_mut(&mut self) -> &mut Control {
        self.control.as_mut().expect("not forwarded")
    }

    /// Is nothing left of a message to splice for?
    fn is_read(&self, cx: &Context<'_>) -> bool {
        self.streams().iter().zip(&cx.at).all(|(s, at)| s.is_read(at))
    }

    /// Have both streams ended, or their messages?
    fn are_over(&self, cx: &Context<'_>) -> bool {
        if self.is_read(cx) {
            return self.streams().iter().all(|s| s.in_hand == 0);
        }
        cx.at.iter().all(|at| at.eof && at.shut)
    }

    fn note_copied(&self, cx: &mut Context<'_>) {
        cx.shown.copied = self.streams().map(|s| s.copied);
    }

    /// It is taken back, and then copied, or ends.
    fn unsplice(&mut self, then: Option<EndReason>, away: Option<Duration>) -> Action {
        let control = self.control_mut();
        control.streams.iter_mut().for_each(Stream::undrained);
        control.then = then;
        self.state = State::Unsplicing;
        Action::Unsplice { away }
    }

    fn on_unsplicing(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let Event::Unspliced { at, client_reset } = event else { return Action::Wait };
        let Ok(at) = at else { return self.end(cx, EndReason::Stopped) };
        self.took_back(cx, &at);
        if was_reset(&at) {
            return self.end(cx, if client_reset { EndReason::ClientReset } else { reset_by(&at) });
        }
        match self.control_mut().then.take() {
            Some(how) => self.end(cx, how),
            None => self.attend(),
        }
    }

    /// The sockets' positions move by what was forwarded past them.
    fn took_back(&mut self, cx: &mut Context<'_>, at: &Switched) {
        cx.at.iter_mut().for_each(|at| at.shimmed = true);
        for d in (0..2).filter(|d| at.was_forwarded[*d]) {
            let forwarded = self.advance(cx, d, at.bound64(d));
            let stream = &mut self.control_mut().streams[d];
            if let Some(left) = stream.message {
                stream.passed(forwarded);
                // a splice that has not paid is not tried again: the receiver keeps sending
                self.stay |= cx.policy.threshold().is_some_and(|n| left > forwarded && forwarded < n);
            }
            // that of a message's sender is never forwarded: it is still to be read
            if at.fin[d] && !cx.at[d].eof && self.limits[d] == Limit::None {
                (cx.at[d].eof, cx.at[1 - d].shut) = (true, true);
                cx.shown.spliced[d] -= 1;
                self.fin_past = true;
            }
        }
    }

    /// All up to `end` was forwarded past the sockets in direction `d`: how many bytes.
    fn advance(&self, cx: &mut Context<'_>, d: usize, end: u64) -> u64 {
        let forwarded = cx.shown.forwarded_to(d, end);
        cx.at[d].consumed += forwarded;
        cx.at[1 - d].produced += forwarded;
        forwarded
    }

    fn attend(&mut self) -> Action {
        self.state = State::Copying;
        Action::Attend
    }

    fn on_settling(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let at = match event {
            Event::Looked(Ok(at)) => at,
            Event::Looked(Err(_)) | Event::Stop { .. } => return self.end(cx, EndReason::Stopped),
            Event::Heard => {
                // its next message may have brought the last acknowledgement along
                self.control_mut().heard = true;
                return Action::Look;
            }
            Event::Told | Event::Timer => return Action::Look,
            _ => return Action::Wait,
        };
        if was_reset(&at) {
            return self.end(cx, reset_by(&at));
        }
        if at.is_local() {
            return self.end(cx, EndReason::MessageRelayed);
        }
        self.look_again(cx, EndReason::Idle)
    }

    fn on_closing(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        match event {
            Event::Looked(Ok(at)) if at.flags[0] & at.flags[1] & LegFlags::FIN_ACKED == 0 => {
                self.look_again(cx, EndReason::Closed)
            }
            Event::Looked(_) => self.end(cx, EndReason::Closed),
            Event::Told | Event::Timer => Action::Look,
            _ => Action::Wait,
        }
    }

    fn look_again(&mut self, cx: &mut Context<'_>, late: EndReason) -> Action {
        let control = self.control_mut();
        if cx.now >= control.until {
            return self.end(cx, late);
        }
        control.look_at = cx.now + control::LOOK_EVERY;
        Action::Wait
    }

    /// Of a flow that is not forwarded.
    fn end(&mut self, cx: &mut Context<'_>, how: EndReason) -> Action {
        self.note_copied(cx);
        self.state = State::Ended;
        if how == EndReason::Closed && cx.shown.splices == 0 && cx.shown.refusal.is_none() {
            cx.refuse(Refusal::Short);
        }
        Action::End { how, forwarded: false }
    }

    /// When [`Event::Timer`] is to come.
    pub fn timer(&self) -> Option<Time> {
        match self.state {
            State::Copying => Some(self.control().next_tick()),
            State::Draining => Some(self.control().look_at.min(self.control().until)),
            State::Settling | State::Closing => Some(self.control().look_at),
            State::Spliced | State::Released | State::Unsplicing | State::Ended => None,
        }
    }
}

fn was_reset(at: &Switched) -> bool {
    (at.flags[0] | at.flags[1]) & LegFlags::RESET != 0
}

/// Whose reset it was.
fn reset_by(at: &Switched) -> EndReason {
    if at.flags[0] & LegFlags::RESET_IN != 0 { EndReason::ClientReset } else { EndReason::ServerReset }
}

/// Have fragments been forwarded? Then a switch back may lose what its host sends again across the bound, and the flow stays
/// forwarded unless that is worse.
fn has_fragments(paths: &[longsplice_datapath::PathView; 2]) -> bool {
    paths.iter().any(|p| p.flags & PathFlags::FRAGMENTS != 0)
}
