//! Forwarding mode: what takes a flow back, releases it or ends it.

use super::{
    Action, Context, Control, Core, Event, State, Time,
    beyond::{self, Beyond},
    has_fragments,
    watch::RateWatch,
};
use crate::{
    EndReason, PathCause, PathFinding, Refusal,
    types::{Command, NotReleased, Policy, Trigger},
};
use longsplice_datapath::{EventKind, Pair, PathFlags, PathView, Side, SwitchError, Switched};
use std::time::Duration;

/// Maximum time that hosts wait for a flow to come back if the event of a trigger, or of the end of a message, is lost.
const PATIENCE: Duration = Duration::from_secs(8);
/// Time after which a host that still sends oversized segments ignores ICMP, or does not receive it.
const MTU_PATIENCE: Duration = Duration::from_secs(3);
/// Time without oversized segments after which a host has obeyed: lost
/// segments are retransmitted after a minute at most (RFC 6298, 2.5).
const MTU_AGAIN: Duration = Duration::from_secs(90);
/// Stands for "never release", so late that all other flows are released before.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Time limit for finding an instant at which a released flow has no data in flight. Most flows have one by then. Otherwise
/// the flow is taken back anyway, and its hosts send unacknowledged data again, which costs them one timeout at worst.
const IDLE_WITHIN: Duration = Duration::from_millis(100);

/// The result of a look at a forwarded flow.
#[derive(Debug)]
pub struct Seen {
    /// The reason for the look.
    pub why: Why,
    /// The flow's path entries. `None`: the tables were flushed.
    pub paths: Option<Pair<PathView>>,
    /// The flow's legs, if [`Core::wants_legs`].
    pub legs: Option<Switched>,
}

/// Why a forwarded flow is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The flow has just been spliced.
    Kept,
    /// A periodic look.
    Look,
    /// Something is due: a release, or another attempt.
    Due,
    /// A command.
    Command(Command),
    /// The data path reported an event of the flow.
    Told(EventKind),
    /// The route to one of the hosts leads over a device to which nothing will be attached. `transparent`: the
    /// hosts believe they talk to each other, and their segments reach our sockets only over attached devices.
    Elsewhere {
        /// See above.
        transparent: bool,
    },
}

/// A request for new sockets for a released flow.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Back {
    /// Time limit for an instant without data in flight.
    until: Time,
    /// Stay released after that time, instead of taking the flow back anyway.
    only_idle: bool,
    /// The flow is to stay in control mode.
    stay: bool,
    /// The attempt under way is the last.
    last: bool,
}

impl Back {
    fn soon(now: Time, stay: bool) -> Back {
        Back { until: now + IDLE_WITHIN, only_idle: false, stay, last: false }
    }
}

/// State of a flow while it is forwarded.
#[derive(Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Forwarded {
    began: Time,
    /// A fingerprint that changes with every byte, and the time of its last change.
    sign: (Pair<(u16, u32, u32)>, Time),
    /// Times of the first and the last oversized segments. Boxed, like the next fields, because most flows have none.
    oversize: Option<Box<[Time; 2]>>,
    /// Set if the flow is to get new sockets.
    back: Option<Box<Back>>,
    /// Set while the flow is watched for harm that the splice has done.
    watch: Option<Box<RateWatch>>,
    /// Set while both hosts may be beyond the other one's window.
    beyond: Option<Box<Beyond>>,
    /// When its entries were first found to be gone.
    gone: Option<Box<Time>>,
}

impl Forwarded {
    /// `is_forced`: although a host may have been promised more than the other can take.
    pub fn new(now: Time, watch: Option<RateWatch>, is_forced: bool) -> Forwarded {
        let (watch, beyond) = (watch.map(Box::new), is_forced.then(|| Box::new(Beyond::new(now))));
        Forwarded { began: now, sign: (Pair::default(), now), watch, beyond, ..Forwarded::default() }
    }

    pub(super) fn is_watched_for_windows(&self) -> bool {
        self.beyond.is_some()
    }

    /// Returns when the flow's entries were first found to be gone, which may be now.
    pub(super) fn gone_since(&mut self, now: Time) -> Time {
        **self.gone.get_or_insert_with(|| Box::new(now))
    }
}

/// The state of a forwarded flow that has not ended.
enum Life {
    /// Idle for this long.
    Idle(Duration),
    /// Taken back by a trigger whose event was lost.
    Woken,
}

/// Returns how a flow has ended, by its path entries. `None`: it has not.
pub(super) fn end_of(paths: &Pair<PathView>) -> Option<EndReason> {
    let Pair { client, server } = paths;
    if (client.flags | server.flags) & PathFlags::DEAD != 0 {
        if client.flags & server.flags & PathFlags::FIN != 0 {
            return Some(EndReason::Closed); // a late segment met a host that had forgotten the connection
        }
        let host = if client.flags & PathFlags::RST != 0 { Side::Client } else { Side::Server };
        return Some(EndReason::reset_by(host));
    }
    (client.flags & server.flags & PathFlags::FIN_ACKED != 0).then_some(EndReason::Closed)
}

impl Core {
    /// Returns whether the next step depends on the legs, that is, on whether a message
    /// was forwarded completely. The event may have come too early, or been lost.
    pub fn wants_legs(&self, why: Why) -> bool {
        self.message.is_some() && matches!(why, Why::Kept | Why::Look | Why::Told(EventKind::LimitReached))
    }

    /// Returns whether a released flow waits for an instant without data in flight. The driver tries every millisecond.
    pub fn is_returning(&self) -> bool {
        self.state == State::Released && self.forwarded.back.is_some()
    }

    /// Returns why the flow must keep its sockets, if it must: because of their ports, or because it waits for
    /// a limit or a trigger. Without the legs' records no limit is noticed.
    pub fn keeps_sockets(&self, policy: &Policy) -> Option<NotReleased> {
        match policy.trigger {
            _ if self.message.is_some() => Some(NotReleased::Message),
            Some(Trigger::ClientData | Trigger::ServerData) => Some(NotReleased::Trigger),
            _ => policy.keeps_sockets.then_some(NotReleased::Adopted),
        }
    }

    fn waits(&self, policy: &Policy) -> bool {
        self.keeps_sockets(policy).is_some()
    }

    /// Returns when the sockets of a forwarded flow are to be closed. `None`: never,
    /// not even if descriptors run short. Constant while the flow is forwarded.
    pub fn release_at(&self, policy: &Policy) -> Option<Time> {
        (!self.waits(policy)).then(|| self.forwarded.began + policy.release_after.unwrap_or(NEVER).min(NEVER))
    }

    /// Returns when forwarding began.
    pub fn began(&self) -> Time {
        self.forwarded.began
    }

    /// Returns the time until the flow must be looked at again, if that is soon.
    pub fn look_within(&self) -> Option<Duration> {
        let watch = self.forwarded.watch.as_ref().map(|watch| watch.pause());
        [watch, self.forwarded.beyond.as_ref().map(|beyond| beyond.pause())].into_iter().flatten().min()
    }

    /// Returns how long the hosts may wait for something whose event was lost.
    pub fn patience(&self, policy: &Policy) -> Duration {
        match policy.trigger {
            Some(Trigger::Idle(after)) => after.min(policy.idle_limit.get()),
            _ if self.waits(policy) => PATIENCE.min(policy.idle_limit.get()),
            _ => policy.idle_limit.get(),
        }
    }

    pub(super) fn on_forwarded(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        match event {
            Event::Seen(seen) => self.seen(cx, &seen),
            Event::Stop { leave: true } => self.end_forwarded(cx, EndReason::Left),
            Event::Stop { leave: false } => self.end_forwarded(cx, EndReason::Stopped),
            Event::Released(true) => {
                // perhaps it was released only because it needs new sockets
                self.state = State::Released;
                self.bring_back(cx)
            }
            Event::Released(false) => {
                // it keeps its sockets: a later release must not ask for new ones
                self.forwarded.back = None;
                Action::Wait
            }
            Event::Recreated(Ok(ends)) => self.recreated(cx, ends),
            Event::Recreated(Err(error)) => self.unreturned(cx, error),
            // commands arrive with a look; the other events belong to another state
            Event::Command(_)
            | Event::Moved
            | Event::Copied
            | Event::Heard
            | Event::Failed(_)
            | Event::Timer
            | Event::Told
            | Event::Attended(_)
            | Event::Measured(_)
            | Event::LookedBehind(_)
            | Event::Frozen(_)
            | Event::Adopted
            | Event::Refused { .. }
            | Event::Looked(_)
            | Event::Committed(_)
            | Event::Unspliced { .. } => Action::Wait,
        }
    }

    fn seen(&mut self, cx: &mut Context<'_>, seen: &Seen) -> Action {
        let Some(paths) = &seen.paths else {
            // a new connection has replaced the entries: an event is under way that says how they were
            let since = self.forwarded.gone_since(cx.now);
            if cx.now.saturating_sub(since) < PATIENCE && !matches!(seen.why, Why::Command(_)) {
                return Action::Wait;
            }
            // A new connection may have its addresses: no socket may send. If there is none, the stack resets the hosts.
            self.state = State::Ended;
            return Action::End { how: EndReason::Stopped, forwarded: true };
        };
        let mut slowed = None;
        let mut wanted = match seen.why {
            Why::Command(Command::Reset) => return self.end_forwarded(cx, EndReason::Stopped),
            Why::Command(Command::Release) if self.may_release(cx) => return Action::Release,
            Why::Command(Command::Unsplice) if has_fragments(paths) => {
                cx.refuse(Refusal::Fragments);
                None
            }
            Why::Command(Command::Unsplice) => Some(true),
            // an interrupted message may be spliced again
            Why::Told(EventKind::Triggered) => {
                self.triggered(cx);
                Some(self.message.is_none())
            }
            // the event may have come before the flow was kept, or been lost
            Why::Told(EventKind::LimitReached) | Why::Kept | Why::Look => self.is_passed(seen).then_some(false),
            Why::Told(EventKind::Oversize) => self.oversize(cx),
            // The limit is too small to be told to the sender, so a stream is copied from now on.
            Why::Told(EventKind::Narrow) => {
                cx.refuse(Refusal::Mtu);
                Some(self.message.is_none())
            }
            // New sockets use the hosts' numbers and work without the data path,
            // unless a host has received more than it has acknowledged here.
            Why::Elsewhere { transparent: false } if !has_fragments(paths) && !self.waits(cx.policy) => {
                return self.elsewhere(cx);
            }
            Why::Due
            | Why::Elsewhere { .. }
            | Why::Command(Command::Splice | Command::Release)
            | Why::Told(
                EventKind::Forwarding
                | EventKind::Control
                | EventKind::Closed
                | EventKind::Reset
                | EventKind::Replaced
                | EventKind::Deserted, // its sockets are being created
            ) => None,
        };
        if let Some(watch) = &mut self.forwarded.watch {
            let (is_slow, sender) = (watch.look(cx.now, paths), watch.slowest());
            let mut watch_ended = None;
            if is_slow || watch.is_over() || self.state != State::Spliced {
                watch_ended = self.forwarded.watch.take();
            }
            if is_slow && self.state == State::Spliced {
                slowed = watch_ended.and_then(|watch| watch.slowed_since_start());
                let measured = cx.shown.finding.map_or(Pair::both(0), |finding| finding.rtt_us);
                cx.refuse_path(PathFinding { cause: PathCause::Rate, sender, rtt_us: measured, loss: 0.0 });
                wanted = Some(true);
            }
        }
        if let Some(beyond) = &mut self.forwarded.beyond {
            match beyond.look(cx.now, paths) {
                beyond::Found::Unclear => {}
                beyond::Found::Over => self.forwarded.beyond = None,
                beyond::Found::Stuck if has_fragments(paths) => {}
                beyond::Found::Stuck => {
                    self.forwarded.beyond = None;
                    // once the sockets have got the hosts going, it may be spliced again
                    wanted = wanted.or(Some(false));
                }
            }
        }
        if let Some(stay) = wanted
            && let Some(action) = self.want_back(cx, stay)
        {
            self.control_mut().slowed = slowed;
            return action;
        }
        match self.life(cx, paths) {
            Err(how) => return self.end_forwarded(cx, how),
            Ok(Life::Woken) => {
                self.triggered(cx);
                self.stay |= self.message.is_none();
                return self.take_back(cx, None);
            }
            Ok(Life::Idle(after)) if after >= cx.policy.idle_limit.get() => {
                return self.end_forwarded(cx, EndReason::Idle);
            }
            Ok(Life::Idle(after)) => {
                let is_trigger = matches!(cx.policy.trigger, Some(Trigger::Idle(t)) if after >= t);
                if is_trigger && !has_fragments(paths) {
                    // a released flow is asked for again and again until it is back
                    if self.forwarded.back.is_none() {
                        self.triggered(cx);
                    }
                    if let Some(action) = self.want_back(cx, true) {
                        return action;
                    }
                }
            }
        }
        if self.may_release(cx) && self.release_at(cx.policy).is_some_and(|at| at <= cx.now) {
            return Action::Release;
        }
        self.bring_back(cx)
    }

    /// Notes that a trigger takes the flow back.
    fn triggered(&self, cx: &mut Context<'_>) {
        cx.shown.triggered |= self.message.is_none() && cx.policy.trigger.is_some();
    }

    fn is_passed(&self, seen: &Seen) -> bool {
        self.message.as_ref().zip(seen.legs.as_ref()).is_some_and(|(m, at)| m.is_passed(at))
    }

    /// Records oversized segments. A host that was told of another MTU long ago may probe whether it still holds (RFC 1191, 6.3).
    fn oversize(&mut self, cx: &mut Context<'_>) -> Option<bool> {
        let known = self.forwarded.oversize.as_deref().filter(|[_, last]| cx.now.saturating_sub(*last) < MTU_AGAIN);
        let since = known.map_or(cx.now, |[first, _]| *first);
        self.forwarded.oversize = Some(Box::new([since, cx.now]));
        let late = cx.now.saturating_sub(since) > MTU_PATIENCE;
        late.then(|| cx.refuse(Refusal::Mtu)).map(|()| false)
    }

    fn elsewhere(&mut self, cx: &mut Context<'_>) -> Action {
        // the time limit counts from the first report
        if self.forwarded.back.is_none() {
            cx.refuse(Refusal::Unattached);
            let until = cx.now + cx.policy.drain_limit;
            self.forwarded.back = Some(Box::new(Back { until, only_idle: true, stay: true, last: false }));
        }
        if self.state == State::Spliced { Action::Release } else { self.bring_back(cx) }
    }

    fn may_release(&self, cx: &Context<'_>) -> bool {
        self.state == State::Spliced && !self.waits(cx.policy)
    }

    /// Takes the flow back to its parked sockets now, or to new ones soon.
    fn want_back(&mut self, cx: &mut Context<'_>, stay: bool) -> Option<Action> {
        if self.state == State::Spliced {
            self.stay |= stay;
            return Some(self.take_back(cx, None));
        }
        self.forwarded.back.get_or_insert_with(|| Box::new(Back::soon(cx.now, stay)));
        None
    }

    fn take_back(&mut self, cx: &mut Context<'_>, then: Option<EndReason>) -> Action {
        self.control = Some(Box::new(Control::new(self.message.as_deref(), cx.shown.copied, Pair::both(0))));
        self.unsplice(then, Some(cx.now.saturating_sub(self.forwarded.began)))
    }

    fn end_forwarded(&mut self, cx: &mut Context<'_>, how: EndReason) -> Action {
        if self.state == State::Spliced && matches!(how, EndReason::Stopped | EndReason::Idle) {
            return self.take_back(cx, Some(how)); // the sockets inform the hosts
        }
        self.state = State::Ended;
        Action::End { how, forwarded: true }
    }

    /// Returns how long the flow has been idle, or how it has ended.
    fn life(&mut self, cx: &mut Context<'_>, paths: &Pair<PathView>) -> Result<Life, EndReason> {
        if let Some(how) = end_of(paths) {
            return Err(how);
        }
        let Pair { client, server } = paths;
        if self.state == State::Spliced && client.flags & server.flags & PathFlags::SPLICED == 0 {
            return Ok(Life::Woken);
        }
        let sign = paths.map(|p| (p.wraps, p.end, p.max_ack));
        if self.forwarded.sign.0 != sign {
            self.forwarded.sign = (sign, cx.now);
        }
        Ok(Life::Idle(cx.now.saturating_sub(self.forwarded.sign.1)))
    }

    /// Requests new sockets for a released flow, once it has no data
    /// in flight. If that takes too long, some bytes are sent again.
    fn bring_back(&mut self, cx: &Context<'_>) -> Action {
        let Some(back) = self.forwarded.back.as_mut().filter(|_| self.state == State::Released) else {
            return Action::Wait;
        };
        back.last = cx.now >= back.until;
        Action::Recreate { force: back.last && !back.only_idle }
    }

    fn unreturned(&mut self, cx: &mut Context<'_>, error: SwitchError) -> Action {
        match error {
            SwitchError::Busy if self.forwarded.back.as_ref().is_some_and(|back| !back.last) => return Action::Wait,
            SwitchError::Fragments => cx.refuse(Refusal::Fragments),
            _ => {}
        }
        self.forwarded.back = None; // it stays released
        Action::Wait
    }

    /// Continues with new sockets at the positions of the hosts. A host may be ahead of its socket, which then needs its entry as
    /// one that was in a switch does.
    fn recreated(&mut self, cx: &mut Context<'_>, ends: Pair<u64>) -> Action {
        cx.at.iter_mut().for_each(|at| at.shimmed = true);
        self.stay |= self.forwarded.back.take().is_some_and(|back| back.stay);
        self.control = Some(Box::new(Control::new(self.message.as_deref(), cx.shown.copied, Pair::both(0))));
        for from in Side::BOTH {
            self.advance(cx, from, ends[from]);
        }
        self.attend()
    }
}
