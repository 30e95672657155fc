//! Control mode: the decision to splice a copied flow, and its drain.

use super::{
    Action, Context, Core, Event, Records, State, Stream, Time,
    distance::{Distance, Judgement, SHORT},
    forwarded::Forwarded,
    queue::Queue,
    start::Slowed,
    streams::Passing,
    was_reset,
    watch::{Before, RateWatch},
};
use crate::{
    EndReason, PathCause, PathFinding, Refusal,
    types::{Command, PathRule, Policy, SpliceWhen},
};
use longsplice_datapath::{
    Frozen, LegFlags, Limit, Pair, PathFacts, Phase, Side, SwitchError, Switched, Tuple, can_fit,
};
use std::time::Duration;

/// Maximum age of the byte counts in lists while a flow is copied.
const COUNT_EVERY: Duration = Duration::from_millis(250);
/// Interval at which phases are polled during a drain, because events are lost when their ring is full.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval of looks where nobody waits for what they find, unless a host has reset its connection.
pub(super) const LOOK_RARELY: Duration = Duration::from_secs(1);
/// Time after the freeze of a message until its commit. Most messages have passed by then, and the general way of the data path
/// costs them less than it takes to park the sockets, to wake the keeper up and to take the flow back.
pub(super) const COMMIT_AFTER: Duration = Duration::from_millis(2);
/// If fewer bytes than this are left of a message, a commit costs more than it saves, even if all segments are small (about 180).
/// It is committed after [`LOOK_EVERY`], so that the flow does not wait for a slow receiver.
pub(super) const SHORT_REST: u64 = 256 * 1024;
/// Time until the next attempt, if an earlier switch may not be over or the windows may not fit yet.
const AGAIN: Duration = Duration::from_millis(5);
/// Minimum time until the next look at a path on which a splice would have slowed a transfer down.
const PATH_AGAIN: Duration = Duration::from_secs(10);
/// Time that the queues have to become short before a splice, beyond a multiple of the time that the receiver
/// needs for them: the sender may use the window that it was promised before it is held back.
const APPROACH: Duration = Duration::from_secs(1);
/// Number of lost segments from which a path is lossy. Fewer may be an accident.
const LOST: u32 = 2;
/// Number of copied bytes from which the rate of a direction is known: more than its first window.
const WATCHED: u64 = 16 * 1024;
/// Time until the next attempt, if a host was silent for too long.
const SILENT_AGAIN: Duration = Duration::from_secs(5);
/// Number of attempts that wait for fitting windows, while bytes move. Afterwards,
/// data that exceeds the other host's window is lost and sent again.
const FIT_TRIES: u32 = 4;
/// Bytes after which windows that did not fit may do so: about what a host sends before it hears from the other.
const FIT_STEP: u64 = 32 * 1024;
/// Time limit for what may be under way when a host has reset its connection: segments that the reset has overtaken, and the
/// acknowledgement of forwarded bytes, which nobody sends again. If the other socket has bytes to deliver, too, it may first
/// have to send those before them again.
pub(super) const UNDER_WAY: Duration = Duration::from_secs(1);
pub(super) const UNDER_WAY_BEHIND: Duration = Duration::from_secs(5);

/// State of a flow while it is copied, drained or taken back.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Control {
    pub streams: Pair<Stream>,
    /// Path MTUs to the hosts in bytes, as the sockets knew them when a splice was last considered.
    mtu: Pair<Option<u32>>,
    /// Number of copied bytes after which the flow is spliced. `u64::MAX`: never.
    pub enough: u64,
    /// A command requests a splice.
    wanted: bool,
    /// The next attempt, if the data path could not splice yet, and the number of attempts so far.
    again: Option<Again>,
    tries: u32,
    /// The last freeze did not wait for windows that fit.
    is_forced: bool,
    /// The client is far: whether the server is near is measured before anything is copied.
    pub is_client_far: bool,
    /// Until when nothing is copied, since the flow is to be spliced before the server has sent anything.
    pub start_until: Option<Time>,
    /// Set while senders are held back.
    pub approach: Option<Approach>,
    /// Number of bytes copied when copying began, and that time.
    pub began: (Pair<u64>, Time),
    /// Round-trip time of the whole path, and what the flow is to be compared with after its splice, if it is watched.
    watch: Option<(Duration, Before)>,
    /// Number of copied bytes at the last count, and the time when bytes last moved. Later, of bytes that are not acknowledged.
    pub moved: (u64, Time),
    /// When bytes have last moved in another process, until copying begins here.
    pub quiet_since: Option<Time>,
    /// Bytes are moving and are counted at intervals. When they stop, nothing wakes up before the idle limit.
    counts: bool,
    tick_at: Time,
    /// While draining: nothing is left to be copied.
    pub passed: bool,
    /// While draining: the earliest time of a commit.
    commit_at: Time,
    /// The end of the present wait, and the next look.
    pub until: Time,
    pub look_at: Time,
    /// The receiver of the message has sent data, or, in a drain, one of the hosts.
    pub heard: bool,
    /// Set after the flow was taken back, if it had been spliced at its start, until it is known whether it was the splice that
    /// had made it slow.
    pub slowed: Option<Slowed>,
    /// It was.
    pub was_slow: bool,
    /// All bytes that were forwarded past the sockets are acknowledged.
    pub settled: bool,
    /// While copying, if they are not: the next look.
    pub settle_at: Option<Time>,
    /// Since when a host lacks such bytes whose sender has reset its connection.
    lost_since: Option<Time>,
    /// How the flow ends once it has been taken back.
    pub then: Option<EndReason>,
}

/// When to try again.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Again {
    time: Time,
    /// Number of copied bytes after which it is time as well.
    copied: u64,
}

impl Again {
    fn at(time: Time) -> Again {
        Again { time, copied: u64::MAX }
    }
}

/// An attempt to make queues short enough for a freeze.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Approach {
    /// The first look.
    began: Time,
    /// What the longest of the queues so far would take.
    longest: Duration,
    /// The queues at the last look.
    queues: Pair<Option<Queue>>,
}

impl Control {
    pub fn new(message: Option<&Passing>, copied: Pair<u64>, in_hand: Pair<u64>) -> Control {
        let streams = Pair::from_fn(|from| Stream {
            in_hand: in_hand[from],
            copied: copied[from],
            message: message.map(|m| if m.from == from { m.left } else { 0 }),
            ..Stream::default()
        });
        Control {
            streams,
            mtu: Pair::both(None),
            enough: u64::MAX,
            wanted: false,
            again: None,
            tries: 0,
            is_forced: false,
            is_client_far: false,
            start_until: None,
            approach: None,
            began: (copied, Time::MAX),
            watch: None,
            moved: (0, Time::ZERO),
            quiet_since: None,
            counts: false,
            tick_at: Time::ZERO,
            passed: false,
            commit_at: Time::ZERO,
            until: Time::ZERO,
            look_at: Time::ZERO,
            heard: false,
            slowed: None,
            was_slow: false,
            settled: false,
            settle_at: None,
            lost_since: None,
            then: None,
        }
    }

    fn copied(&self) -> u64 {
        self.streams.iter().map(|s| s.copied).sum()
    }

    /// Returns the rates of both directions in bytes per second: what the receivers have acknowledged lately, but not
    /// more than the mean, because senders pause. 0 if a direction has carried little.
    fn rates(&self, now: Time, facts: &Pair<PathFacts>) -> Pair<u64> {
        let (before, began) = self.began;
        let elapsed = now.saturating_sub(began).as_secs_f64().max(f64::EPSILON);
        Pair::from_fn(|from| {
            let copied = self.streams[from].copied - before[from];
            let mean = (copied as f64 / elapsed) as u64;
            if copied < WATCHED { 0 } else { mean.min(facts[from.other()].rate) }
        })
    }

    fn is_due(&self) -> bool {
        self.copied() >= self.enough
    }

    /// Notes whether all forwarded bytes are acknowledged.
    pub fn note_settled(&mut self, now: Time, at: &Switched) {
        self.settled = at.is_local();
        self.settle_at = (!self.settled).then(|| now + LOOK_RARELY);
    }

    /// Returns the host that has sent bytes which the other one will never get: they were forwarded past the sockets, and lost, and
    /// their sender has reset its connection. What is under way may still arrive.
    pub fn lost(&mut self, now: Time, at: &Switched) -> Option<Side> {
        let is_reset = |side: &Side| at.flags[*side] & LegFlags::RESET != 0;
        let side = Side::BOTH.into_iter().find(|side| is_reset(side) && at.phase[*side] == Phase::ToLocal);
        self.lost_since = side.map(|_| self.lost_since.unwrap_or(now));
        side.filter(|_| self.lost_since.is_some_and(|since| now >= since + UNDER_WAY_BEHIND))
    }

    /// Gives up all attempts to splice.
    pub fn begins_no_splice(&mut self) {
        (self.enough, self.again, self.approach, self.start_until) = (u64::MAX, None, None, None);
    }

    /// Has the next tick look at the limits.
    pub fn look_at_limits(&mut self, now: Time) {
        self.tick_at = self.tick_at.min(now);
    }

    /// Returns the time since both streams have ended.
    pub fn has_closed_for(&self, now: Time) -> Duration {
        now.saturating_sub(self.moved.1)
    }

    pub fn next_tick(&self) -> Time {
        // an attempt may be left over that is not wanted any more, or not before more bytes were copied
        self.again.filter(|_| self.is_due()).map_or(self.tick_at, |again| again.time.min(self.tick_at))
    }

    /// Returns how many bytes must be copied before a message is spliced: none if it is known to be long enough.
    fn worth(&self, threshold: u64) -> u64 {
        match self.streams.iter().filter_map(|s| s.message).max() {
            Some(u64::MAX) => threshold,
            Some(left) if left >= threshold => 0,
            _ => u64::MAX,
        }
    }
}

impl Core {
    /// Returns how many bytes, both directions together, may be copied for now.
    pub fn most(&self) -> u64 {
        let control = self.control();
        match self.state {
            // the bounds limit what is read
            State::Draining => u64::MAX,
            _ if self.records == Records::Asked => u64::MAX,
            // copying pauses where the windows are to be compared again
            _ if control.is_due() => control.again.map_or(u64::MAX, |again| again.copied),
            _ => control.enough,
        }
    }

    /// Returns whether bytes have moved for the first time in a while. Then [`Event::Moved`] is due.
    pub fn has_moved(&self) -> bool {
        let control = self.control();
        self.state == State::Copying && !control.counts && control.copied() != control.moved.0
    }

    pub(super) fn on_copying(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        match event {
            Event::Attended(true) => match self.failed.take() {
                Some(side) => self.fails(cx, side),
                None => self.copy(cx, None),
            },
            Event::Attended(false) | Event::Stop { .. } => self.end(cx, EndReason::Stopped),
            Event::Moved => self.moved(cx),
            Event::Copied if self.are_over(cx) => self.finish(cx),
            Event::Copied => self.moved(cx),
            Event::Heard => self.finish(cx),
            Event::Failed(side) => self.fails(cx, side),
            Event::Timer => self.tick(cx),
            Event::Command(Command::Splice) if self.failed.is_some() => Action::Wait,
            Event::Command(command) => self.command(cx, command),
            Event::Measured(facts) => self.measured(cx, &facts),
            Event::LookedBehind(false) => self.freeze(cx),
            Event::LookedBehind(true) => {
                // the other direction has to be worth a splice by itself
                let control = self.control_mut();
                control.enough = control.copied() + cx.policy.threshold().unwrap_or(0);
                self.note_copied(cx);
                Action::HoldBack(Pair::both(None))
            }
            Event::Frozen(Ok(frozen)) => self.frozen(cx, &frozen),
            Event::Frozen(Err(error)) => self.unfrozen(cx, error),
            Event::Adopted => {
                self.records = Records::There;
                self.proceed(cx)
            }
            Event::Refused { why, for_good } => {
                let is_asked = self.records == Records::Asked;
                if is_asked {
                    self.records = Records::Lacking; // a command asks again
                }
                // what cannot start with a splice may have one later
                if self.control().is_client_far || (is_asked && !self.control().is_due()) {
                    let was_held = self.starts_copied(cx.shown, cx.policy);
                    return if was_held { Action::HoldBack(Pair::both(None)) } else { Action::Wait };
                }
                cx.refuse(why);
                self.copy(cx, for_good.then_some(why))
            }
            Event::Looked(at) if self.control().settle_at.is_some() => self.settles(cx, at),
            // late answers, or events of another state
            Event::Told
            | Event::Seen(_)
            | Event::Looked(_)
            | Event::Committed(_)
            | Event::Unspliced { .. }
            | Event::Released(_)
            | Event::Recreated(_) => Action::Wait,
        }
    }

    /// Starts to copy. `forget`: why the data path can forget the legs.
    fn copy(&mut self, cx: &mut Context<'_>, mut forget: Option<Refusal>) -> Action {
        // A flow that was refused is not tried again without a command. One that is read to its end is not refused.
        let can_be_spliced = !self.stay && !self.is_read(cx) && cx.shown.refusal.is_none();
        if let Some(why) = self.obstacle(cx).filter(|_| can_be_spliced) {
            cx.refuse(why);
            forget = Some(why);
        }
        let is_message = self.message.is_some();
        let begins = cx.policy.when == SpliceWhen::Auto && cx.policy.path != PathRule::Any && !is_message;
        let pays = self.message.as_mut().is_some_and(|m| std::mem::take(&mut m.pays)); // the first attempt only
        let control = self.control.as_mut().expect("not forwarded");
        let idle = cx.policy.idle_limit.get();
        control.moved = (control.copied(), control.begins_quiet(cx.now, idle));
        control.began.1 = control.began.1.min(cx.now);
        (control.counts, control.tick_at) = (false, control.moved.1 + idle);
        control.enough = match cx.policy.when {
            _ if !can_be_spliced || forget.is_some() => u64::MAX,
            _ if control.wanted || pays => 0,
            _ if control.is_client_far && begins => 0,
            when => match when.threshold() {
                Some(n) if is_message => control.worth(n),
                Some(n) => n,
                None if when == SpliceWhen::AtOnce => 0,
                None => u64::MAX,
            },
        };
        if control.enough != 0 || !begins {
            control.begins_copied(cx.shown); // nobody waits for a start that does not come
        }
        match control.enough {
            u64::MAX => Action::CopyOn { forget, windows: Pair::both(None) },
            _ => self.proceed(cx),
        }
    }

    fn obstacle(&self, cx: &Context<'_>) -> Option<Refusal> {
        self.obstacle.or((cx.policy.when == SpliceWhen::Never).then_some(Refusal::Policy))
    }

    fn moved(&mut self, cx: &mut Context<'_>) -> Action {
        self.note_copied(cx);
        let control = self.control_mut();
        if !control.counts && control.copied() != control.moved.0 {
            (control.counts, control.tick_at) = (true, cx.now + COUNT_EVERY);
        }
        self.proceed(cx)
    }

    fn tick(&mut self, cx: &mut Context<'_>) -> Action {
        self.note_copied(cx);
        let failed = self.failed;
        let control = self.control_mut();
        if let Some(side) = failed.filter(|_| cx.now >= control.until) {
            if control.streams[side].in_hand == 0 {
                return self.finish(cx); // all that its socket had is passed on, but it does not report the reset
            }
            // the other host has yet to take what is in hand
            control.until = cx.now + UNDER_WAY;
        }
        if control.settle_at.is_some_and(|at| cx.now >= at) {
            return Action::Look;
        }
        if control.start_until.is_some_and(|at| cx.now >= at) && self.starts_copied(cx.shown, cx.policy) {
            return Action::HoldBack(Pair::both(None));
        }
        let control = self.control_mut();
        if control.slowed.is_some_and(|slowed| slowed.is_to_be_compared(cx.now, control.began.1)) {
            return Action::Measure;
        }
        if cx.now >= control.tick_at {
            control.counts = control.copied() != control.moved.0;
            if control.counts {
                (control.moved, control.tick_at) = ((control.copied(), cx.now), cx.now + COUNT_EVERY);
            } else if cx.now >= control.moved.1 + cx.policy.idle_limit.get() {
                return self.end(cx, EndReason::Idle);
            } else {
                control.tick_at = control.moved.1 + cx.policy.idle_limit.get();
            }
        }
        self.proceed(cx)
    }

    /// Not everything that was forwarded is acknowledged. A socket does not report that its host has reset the connection if both
    /// FINs had been exchanged before, nor as long as it cannot be read, since the other host takes nothing.
    fn settles(&mut self, cx: &mut Context<'_>, at: Result<Box<Switched>, SwitchError>) -> Action {
        let control = self.control_mut();
        control.settle_at = Some(cx.now + LOOK_RARELY);
        let Ok(at) = at else { return Action::Wait }; // if there is another connection by now, the sockets report it
        control.note_settled(cx.now, &at);
        match control.lost(cx.now, &at) {
            Some(side) => self.end(cx, EndReason::reset_by(side)),
            None => Action::Wait,
        }
    }

    /// Starts a splice if one is due.
    fn proceed(&self, cx: &Context<'_>) -> Action {
        let control = self.control();
        let waits = control.again.is_some_and(|again| again.time > cx.now && again.copied > control.copied());
        let is_now = control.is_due() && !waits && self.records != Records::Asked;
        if is_now { Action::Measure } else { Action::Wait }
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Command) -> Action {
        match command {
            Command::Splice => {
                self.stay = false;
                self.starts_copied(cx.shown, cx.policy);
                if let Some(why) = self.obstacle(cx) {
                    cx.refuse(why);
                } else {
                    cx.shown.refusal = None;
                    let control = self.control_mut();
                    (control.wanted, control.enough, control.again, control.slowed) = (true, 0, None, None);
                }
            }
            Command::Unsplice => {
                self.stay = true;
                let was_held = self.starts_copied(cx.shown, cx.policy);
                let control = self.control_mut();
                (control.wanted, control.enough) = (false, u64::MAX);
                // otherwise the limits on the sockets' buffers would stay
                if control.approach.take().is_some() || was_held {
                    return Action::HoldBack(Pair::both(None));
                }
            }
            Command::Release => {}
            Command::Reset => return self.end(cx, EndReason::Stopped),
        }
        self.proceed(cx)
    }

    /// Decides whether a splice would slow a transfer down.
    fn measured(&mut self, cx: &mut Context<'_>, facts: &Pair<PathFacts>) -> Action {
        let control = self.control.as_mut().expect("not forwarded");
        control.mtu = facts.map(|f| f.mtu);
        if let Some(slowed) = control.slowed.filter(|slowed| slowed.is_to_be_compared(cx.now, control.began.1)) {
            self.compare_with_spliced(cx.now, slowed, facts);
            return self.proceed(cx);
        }
        // a command overrules the rule for paths, but not the queues, in which a sender would time out
        if control.wanted {
            let finding = PathFinding::new(PathCause::Queue, Side::Client, facts.map(|f| f.min_rtt), 0.0);
            return self.approach(cx, facts, finding);
        }
        let distance = Distance {
            policy: cx.policy,
            legs: cx.legs,
            rtt: facts.map(|f| f.min_rtt),
            lost: facts.map(|f| if f.lost < LOST { 0.0 } else { f.lost as f32 / f.sent.max(1) as f32 }),
            carried: control
                .streams
                .each_ref()
                .zip(cx.shown.spliced)
                .map(|(s, spliced)| (s.copied + spliced).saturating_add(s.message.unwrap_or(0))),
            copied: control.copied(),
            is_message: self.message.is_some(),
        };
        if control.is_client_far {
            return match distance.is_to_start() && cx.at.server.consumed == 0 && facts.server.unread == 0 {
                true => self.start(cx, facts, distance.finding(Some(PathCause::Far))),
                false if self.starts_copied(cx.shown, cx.policy) => Action::HoldBack(Pair::both(None)),
                false => self.proceed(cx),
            };
        }
        match distance.judge() {
            Judgement::After(n) => {
                (control.enough, control.approach) = (control.copied() + n, None);
                Action::HoldBack(Pair::both(None))
            }
            Judgement::Copy => {
                let (windows, finding) = (distance.windows(), distance.finding(None));
                self.not_now(cx, windows, finding)
            }
            Judgement::Splice => {
                let finding = distance.finding(Some(PathCause::Queue));
                self.approach(cx, facts, finding)
            }
        }
    }

    /// Copies on because of the path, and looks at it again later.
    fn not_now(&mut self, cx: &mut Context<'_>, windows: Pair<Option<u32>>, finding: PathFinding) -> Action {
        let control = self.control_mut();
        control.approach = None;
        // ever more rarely: a path seldom changes
        control.again = Some(Again::at(cx.now + PATH_AGAIN.max(cx.now.saturating_sub(control.began.1))));
        cx.refuse_path(finding);
        Action::CopyOn { forget: None, windows }
    }

    /// Freezes, once no sender would wait too long for an acknowledgement. Until then, holds senders back.
    pub(super) fn approach(&mut self, cx: &mut Context<'_>, facts: &Pair<PathFacts>, finding: PathFinding) -> Action {
        if self.records == Records::Lacking {
            self.records = Records::Asked;
            return Action::Adopt;
        }
        let control = self.control.as_mut().expect("not forwarded");
        let streams = control.streams.each_ref();
        let queues = Pair::from_fn(|from| {
            let before = control.approach.and_then(|approach| approach.queues[from]);
            // what is left to the caller stays in its socket: no drain waits for it
            Queue::of(facts, from, streams[from].in_hand, before).filter(|_| streams[from].message != Some(0))
        });
        let lasts = queues.iter().flatten().map(Queue::lasts).max().unwrap_or_default();
        // A queue on the way to the receiver may show only after the first look, and by then take longer.
        let approach = control.approach.map_or(Approach { began: cx.now, longest: lasts, queues }, |before| Approach {
            longest: lasts.max(before.longest),
            queues,
            ..before
        });
        let until = approach.began + (4 * approach.longest + APPROACH).min(cx.policy.drain_limit);
        control.approach = Some(approach);
        let held = queues.map(|queue| queue.and_then(|queue| queue.held()));
        let is_short = held == Pair::both(None);
        if !is_short && cx.now < until {
            // it may be much shorter than it seems: a lost SYN-ACK looks like a round trip of a second, until data are acknowledged
            control.again = Some(Again::at(cx.now + (lasts / 8).clamp(AGAIN, LOOK_EVERY)));
            return Action::HoldBack(held);
        }
        control.approach = None;
        // a command does not wait for ever: it is carried out in spite of the queue
        if !is_short && !control.wanted {
            return self.not_now(cx, Pair::both(None), finding);
        }
        if cx.shown.refusal == Some(Refusal::Path) {
            cx.shown.refusal = None;
        }
        let rtt = facts.iter().filter_map(|f| f.min_rtt).sum();
        let is_watched = !control.wanted && cx.policy.path != PathRule::Any && rtt > SHORT;
        let starts = control.start_until.is_some();
        cx.shown.finding = Some(finding); // for the watch
        let before = if starts { Before::Start(Pair::both(0)) } else { Before::Copied(control.rates(cx.now, facts)) };
        control.watch = is_watched.then_some((rtt, before));
        // A stream that ends right after the threshold has nothing left to splice for.
        let counts = cx.policy.threshold().is_some_and(|n| n > 0);
        let looks = counts && !control.wanted && !starts && self.message.is_none();
        if looks { Action::LookBehind } else { self.freeze(cx) }
    }

    fn freeze(&mut self, cx: &mut Context<'_>) -> Action {
        self.note_copied(cx);
        // the message may have ended meanwhile: there is nothing to splice for
        if self.is_read(cx) {
            return self.copy(cx, None);
        }
        if self.message.is_some() {
            self.limits = self.streams().each_ref().map(|s| match s.message {
                None => Limit::None,
                // what this host sends next, such as a request, is for the caller
                Some(0) => Limit::Keep,
                Some(n) => Limit::Bytes(u32::try_from(n).unwrap_or(u32::MAX).min(Limit::MAX)),
            });
        }
        let is_message = self.message.is_some();
        let control = self.control_mut();
        // Windows come to fit as bytes move. If the last pause has passed without enough of them, it is done anyway.
        let fit = match control.tries {
            0 => control.copied() > 0 || is_message,
            n => n < FIT_TRIES && control.again.is_some_and(|again| again.time > cx.now),
        };
        control.is_forced = !fit;
        Action::Freeze { fit }
    }

    fn unfrozen(&mut self, cx: &mut Context<'_>, error: SwitchError) -> Action {
        let control = self.control_mut();
        match error {
            SwitchError::Busy | SwitchError::Window | SwitchError::Silent => {
                control.again = Some(match error {
                    SwitchError::Window => Again { time: cx.now + AGAIN, copied: control.copied() + FIT_STEP },
                    SwitchError::Silent => Again::at(cx.now + SILENT_AGAIN),
                    _ => Again::at(cx.now + AGAIN),
                });
                control.tries += 1;
                self.copy(cx, None)
            }
            // all bytes have arrived
            SwitchError::Short => {
                self.stay = true;
                self.copy(cx, None)
            }
            SwitchError::Untracked
            | SwitchError::Closing
            | SwitchError::Other
            | SwitchError::Fragments
            | SwitchError::Mismatch
            | SwitchError::Full
            | SwitchError::Options
            | SwitchError::Run(_) => {
                let why = error.into();
                cx.refuse(why);
                self.copy(cx, Some(why))
            }
        }
    }

    fn frozen(&mut self, cx: &mut Context<'_>, frozen: &Frozen) -> Action {
        self.state = State::Draining;
        let control = self.control.as_mut().expect("not forwarded");
        (control.again, control.tries, control.wanted) = (None, 0, false);
        (control.is_client_far, control.start_until) = (false, None);
        (control.passed, control.heard, control.settled, control.settle_at) = (false, false, false, None);
        self.message.iter_mut().for_each(|m| m.excess = false);
        (control.commit_at, control.until) = (cx.now, cx.now + cx.policy.drain_limit);
        for from in Side::BOTH {
            control.streams[from].drain(frozen.pending[from], frozen.fin[from]);
        }
        cx.shown.since = frozen.bound;
        if let Some(m) = &mut self.message
            && let Limit::Bytes(n) = self.limits[m.from]
        {
            m.goal = cx.at[m.from].consumed + u64::from(n);
            // All bytes arrived just before the freeze. Do not wait for anything beyond them.
            if frozen.bound[m.from] >= m.goal {
                self.stay = true;
                return self.unsplice(None, None);
            }
            if !cx.policy.hold {
                let rest = m.goal - frozen.bound[m.from];
                control.commit_at += if rest <= SHORT_REST { LOOK_EVERY } else { COMMIT_AFTER };
            }
        }
        if !self.can_fit(cx, &frozen.at) {
            return self.undrained(cx, Refusal::Mtu);
        }
        self.drained(cx, Ok(Box::new(frozen.at)))
    }

    /// Returns whether each host that has data to send can be told to send packets small enough for the other.
    fn can_fit(&self, cx: &Context<'_>, at: &Switched) -> bool {
        let (legs, most) = (&cx.legs, at.most(cx.legs.each_ref(), self.control().mtu));
        let fits = |host: Side| can_fit(&legs[host], &legs[host.other()], most[host.other()]);
        Side::BOTH.into_iter().all(|host| self.streams()[host].message == Some(0) || fits(host))
    }

    pub(super) fn on_draining(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        match event {
            Event::Looked(Err(SwitchError::Other)) | Event::Committed(Err(SwitchError::Other)) => self.replaced(cx),
            Event::Looked(at) => self.drained(cx, at),
            Event::Committed(Ok(at)) => self.committed(cx, &at),
            // since the look, and the data path may have taken it back
            Event::Committed(Err(SwitchError::Short | SwitchError::Busy)) if self.message.is_some() => self.passed(cx),
            Event::Committed(Err(SwitchError::Closing)) => self.unsplice(None, None), // a reset: its answer says whose
            Event::Committed(Err(error)) => self.undrained(cx, error.into()),
            Event::Copied => {
                let control = self.control_mut();
                control.passed = true;
                // an event reports what else happens before the commit
                if cx.now < control.commit_at { Action::Wait } else { Action::Look }
            }
            Event::Heard if self.message.is_some() => {
                // the next message: this one has probably passed
                self.control_mut().heard = true;
                Action::Look
            }
            Event::Told | Event::Timer => Action::Look,
            // The socket reports the failure only once: reading again would find the end of a stream.
            Event::Failed(side) => {
                self.failed = Some(side);
                self.unsplice(None, None)
            }
            Event::Command(Command::Unsplice) => {
                self.stay = true;
                self.unsplice(None, None)
            }
            Event::Command(Command::Reset) => self.unsplice(Some(EndReason::Stopped), None),
            Event::Stop { .. } => self.unsplice(Some(EndReason::Stopped), None),
            Event::Command(Command::Splice | Command::Release)
            | Event::Moved
            | Event::Heard
            | Event::Seen(_)
            | Event::Attended(_)
            | Event::Measured(_)
            | Event::LookedBehind(_)
            | Event::Frozen(_)
            | Event::Adopted
            | Event::Refused { .. }
            | Event::Unspliced { .. }
            | Event::Released(_)
            | Event::Recreated(_) => Action::Wait,
        }
    }

    /// Returns the sizes of [`Action::Commit`] if a commit may be tried in place of the next look: all bytes before the bounds are
    /// passed on, and only their acknowledgement may be missing. `at`: what was found last.
    pub fn may_commit(&self, now: Time, policy: &Policy, legs: Pair<&Tuple>, at: &Switched) -> Option<Pair<u32>> {
        // under the hold policy, held segments have to go on first
        let may = self.state == State::Draining && self.control().passed && !policy.hold;
        let may = may && now >= self.control().commit_at;
        may.then(|| at.most(legs, self.control().mtu))
    }

    /// Waits until the bytes before the bounds are passed on and both directions are forwarded, then commits.
    fn drained(&mut self, cx: &mut Context<'_>, at: Result<Box<Switched>, SwitchError>) -> Action {
        let at = match at {
            Ok(at) => at,
            Err(error) => return self.undrained(cx, error.into()),
        };
        let has_passed = self.message.as_ref().is_some_and(|m| m.is_passed(&at));
        if at.is_drained() {
            if has_passed {
                return self.passed(cx);
            }
            if self.is_closed(&at) {
                return self.closed(cx);
            }
            if cx.now < self.control().commit_at {
                self.control_mut().look_at = self.control().commit_at;
                return Action::Wait;
            }
            let most = at.most(cx.legs.each_ref(), self.control().mtu);
            return Action::Commit { at, most };
        }
        // The data path took one direction back, because data exceeded its limit,
        // and nothing is left in flight in the other. Or a connection was reset.
        let is_over =
            was_reset(&at) || !(at.phase.iter().any(|phase| *phase == Phase::ToForwarding) || at.is_forwarded());
        if is_over {
            return if has_passed && !was_reset(&at) { self.passed(cx) } else { self.unsplice(None, None) };
        }
        let control = self.control_mut();
        if cx.now >= control.until {
            return self.undrained(cx, Refusal::DrainTimeout);
        }
        control.look_at = cx.now + LOOK_EVERY;
        Action::Wait
    }

    /// Ends a flow whose hosts have both closed before it was noticed that it had drained. Most short connections end like
    /// this. The commit would change nothing for them.
    pub(super) fn closed(&mut self, cx: &mut Context<'_>) -> Action {
        self.note_copied(cx);
        cx.shown.splices += 1;
        self.state = State::Ended;
        Action::End { how: EndReason::Closed, forwarded: true }
    }

    /// Takes back a flow whose message has passed before the commit.
    fn passed(&mut self, cx: &mut Context<'_>) -> Action {
        cx.shown.splices += 1;
        self.unsplice(None, None)
    }

    fn undrained(&mut self, cx: &mut Context<'_>, why: Refusal) -> Action {
        cx.refuse(why);
        self.unsplice(None, None)
    }

    /// Returns whether both hosts have closed, and know it of each other.
    fn is_closed(&self, at: &Switched) -> bool {
        self.message.is_none() && at.flags.client & at.flags.server & LegFlags::FIN_ACKED != 0
    }

    fn committed(&mut self, cx: &mut Context<'_>, at: &Switched) -> Action {
        // both hosts may have closed since the last look: the keeper would find nothing to keep
        if self.is_closed(at) {
            return self.closed(cx);
        }
        self.note_copied(cx);
        cx.shown.splices += 1;
        if let (Some(m), Some(control)) = (&mut self.message, &self.control) {
            m.left = control.streams[m.from].message.unwrap_or(0);
            m.passed_early = m.is_passed(at);
        }
        let watch = self
            .control
            .as_mut()
            .and_then(|control| control.watch.take())
            .and_then(|(rtt, before)| RateWatch::new(cx.now, rtt, before));
        let is_forced = self.control().is_forced;
        (self.state, self.control) = (State::Spliced, None);
        self.forwarded = Forwarded::new(cx.now, watch, is_forced);
        Action::Keep
    }
}
