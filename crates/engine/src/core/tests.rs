use super::{control::LOOK_EVERY, *};
use crate::types::{PathRule, SpliceWhen, Trigger};
use longsplice_datapath::{EventKind, Phase};

mod approach;
mod commit;
mod failures;
mod messages;
mod progress;
mod release;
mod start;
const SECOND: Duration = Duration::from_secs(1);

fn forwarded() -> Pair<PathView> {
    with(|p| p.flags = PathFlags::SPLICED)
}

fn with(set: impl Fn(&mut PathView)) -> Pair<PathView> {
    let mut path = PathView::default();
    set(&mut path);
    Pair::both(path)
}

/// A flow that the test drives.
struct Flow {
    core: Core,
    policy: Policy,
    shown: Progress,
    at: Pair<Position>,
    now: Time,
}

impl Flow {
    fn new(policy: Policy, message: Option<Message>) -> Flow {
        Flow {
            core: Core::new(message, None, Pair::both(0)),
            policy,
            shown: Progress::new(None),
            at: Pair::default(),
            now: 100 * SECOND,
        }
    }

    /// A flow with a policy that splices at once.
    fn at_once() -> Flow {
        Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, None)
    }

    /// A flow that is spliced and kept.
    fn spliced(policy: Policy) -> Flow {
        Flow::new(Policy { when: SpliceWhen::AtOnce, ..policy }, None).into_spliced()
    }

    fn into_spliced(mut self) -> Flow {
        assert!(matches!(self.on(Event::Attended(true)), Action::Measure));
        assert!(matches!(self.measured(), Action::Freeze { .. }));
        assert!(matches!(self.frozen(), Action::Wait));
        self.now += LOOK_EVERY; // the commit of a short message is put off
        assert!(matches!(self.drained(), Action::Commit { .. }));
        assert!(matches!(self.on(Event::Committed(Ok(Box::default()))), Action::Keep));
        self
    }

    fn released(policy: Policy) -> Flow {
        let mut flow = Flow::spliced(policy);
        assert!(matches!(flow.see(Why::Command(Command::Release)), Action::Release));
        assert!(matches!(flow.on(Event::Released(true)), Action::Wait));
        flow
    }

    fn on(&mut self, event: Event) -> Action {
        let leg = |n| Tuple { remote: ([10, 0, n, 1], 1).into(), local: ([10, 0, n, 2], 2).into() };
        let Flow { core, policy, shown, at, now } = self;
        let was = *shown;
        let legs = Pair::new(leg(0), leg(1));
        let action = core.on(&mut Context { now: *now, policy, legs, at: at.each_mut(), shown }, event);
        assert_eq!(shown.state, core.state.shown(), "from {was:?}");
        action
    }

    fn measured(&mut self) -> Action {
        self.on(Event::Measured(Pair::default()))
    }

    /// Freezes; something is still to be read.
    fn frozen(&mut self) -> Action {
        let at = Switched { phase: Pair::both(Phase::ToForwarding), mss: Pair::both(1460), ..Switched::default() };
        self.on(Event::Frozen(Ok(Box::new(Frozen { at, ..Frozen::default() }))))
    }

    fn drained(&mut self) -> Action {
        self.on(Event::Looked(Ok(Box::new(Switched {
            phase: Pair::both(Phase::Forwarding),
            mss: Pair::both(1460),
            ..Switched::default()
        }))))
    }

    fn see(&mut self, why: Why) -> Action {
        self.seen(why, forwarded())
    }

    fn seen(&mut self, why: Why, paths: Pair<PathView>) -> Action {
        self.on(Event::Seen(Box::new(Seen { why, paths: Some(paths), legs: None })))
    }

    /// Counts `n` bytes from this host that were read and written.
    fn copy(&mut self, from: Side, n: usize) {
        self.at[from].took(n);
        self.at[from.other()].gave(n);
        let stream = &mut self.core.streams_mut()[from];
        stream.took(n);
        stream.gave(n);
    }

    fn close(&mut self) {
        for at in self.at.iter_mut() {
            at.took(0);
            at.closed();
        }
    }

    fn taken_back(&mut self) -> Action {
        self.on(Event::Unspliced { at: Ok(Box::default()), client_reset: false })
    }
}

fn flagged(flags: u16) -> Pair<PathView> {
    with(|p| p.flags = PathFlags::SPLICED | flags)
}

fn is_end(action: &Action, why: EndReason, is_forwarded: bool) -> bool {
    matches!(action, Action::End { how, forwarded } if (*how, *forwarded) == (why, is_forwarded))
}

#[track_caller]
fn ends(action: &Action, why: EndReason, is_forwarded: bool) {
    assert!(is_end(action, why, is_forwarded), "{action:?}");
}

#[test]
fn what_is_copied_ends_as_its_connections_do() {
    let begin = || {
        let mut flow = Flow::new(Policy::default(), None);
        assert!(matches!(flow.on(Event::Attended(true)), Action::Wait));
        flow
    };
    let mut flow = begin();
    flow.copy(Side::Client, 1000);
    assert!(matches!(flow.on(Event::Copied), Action::Wait));
    flow.at.client.took(0);
    flow.at.server.closed();
    assert!(matches!(flow.on(Event::Copied), Action::Wait), "the server may still send");
    flow.close();
    ends(&flow.on(Event::Copied), EndReason::Closed, false);
    assert_eq!((flow.shown.copied, flow.shown.refusal), (Pair::new(1000, 0), Some(Refusal::Short)));
    assert!(matches!(flow.on(Event::Timer), Action::Wait), "nothing comes after the end");
    assert_eq!((flow.core.state(), flow.core.timer()), (State::Ended, None));

    ends(&begin().on(Event::Command(Command::Reset)), EndReason::Stopped, false);
    ends(&begin().on(Event::Stop { leave: true }), EndReason::Stopped, false);
    ends(&Flow::at_once().on(Event::Attended(false)), EndReason::Stopped, false);
}

#[test]
fn a_silent_flow_ends_at_its_idle_limit_and_one_that_moves_does_not() {
    let mut flow = Flow::new(Policy { idle_limit: (10 * SECOND).into(), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    assert_eq!(flow.core.timer(), Some(flow.now + 10 * SECOND));
    flow.copy(Side::Server, 10);
    assert!(flow.core.has_moved());
    flow.on(Event::Moved);
    assert!(!flow.core.has_moved());
    assert_eq!(flow.shown.copied, Pair::new(0, 10));
    let tick = flow.core.timer().expect("counts");
    assert!(tick < flow.now + SECOND, "bytes that move are counted soon");
    flow.now += SECOND / 10;
    flow.copy(Side::Server, 10);
    flow.on(Event::Copied);
    flow.on(Event::Timer);
    assert_eq!(
        (flow.shown.copied.server, flow.core.timer()),
        (20, Some(tick)),
        "an early look does not move the count"
    );
    flow.copy(Side::Server, 10);
    flow.now = tick;
    flow.on(Event::Timer);
    assert_eq!(flow.shown.copied, Pair::new(0, 30), "lists show what has moved since the last count");
    flow.now = flow.core.timer().expect("a time");
    assert!(matches!(flow.on(Event::Timer), Action::Wait));
    assert_eq!(flow.core.timer(), Some(tick + 10 * SECOND));
    flow.now = tick + 10 * SECOND;
    ends(&flow.on(Event::Timer), EndReason::Idle, false);
}

#[test]
fn the_threshold_is_looked_behind() {
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1000), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    assert_eq!(flow.core.most(), 1000);
    flow.copy(Side::Client, 1000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.measured(), Action::LookBehind));
    // one stream has ended: the other has to carry that much again
    assert!(matches!(flow.on(Event::LookedBehind(true)), Action::HoldBack(_)));
    assert_eq!(flow.core.most(), 2000);
    flow.copy(Side::Server, 1000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.measured(), Action::LookBehind));
    flow.copy(Side::Server, 1);
    assert!(matches!(flow.on(Event::LookedBehind(false)), Action::Freeze { fit: true }));
    assert_eq!(flow.shown.copied, Pair::new(1000, 1001), "with the byte that was read behind the threshold");

    // without a threshold there is nothing to look behind
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(0), ..Policy::default() }, None);
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(flow.measured(), Action::Freeze { fit: false }));
}

#[test]
fn what_cannot_be_spliced_is_copied_and_says_why() {
    let never = Policy { when: SpliceWhen::Never, ..Policy::default() };
    let mut flow = Flow::new(never, None);
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: Some(Refusal::Policy), .. }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Policy));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait));
    assert_eq!((flow.shown.refusal, flow.core.most()), (Some(Refusal::Policy), u64::MAX));

    let mut flow = Flow::at_once();
    flow.core.obstacle = Some(Refusal::Loopback);
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: Some(Refusal::Loopback), .. }));

    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.measured();
    let refused = Event::Refused { why: Refusal::Unattached, for_good: true };
    assert!(matches!(flow.on(refused), Action::CopyOn { forget: Some(Refusal::Unattached), .. }));
    // an operator may try again
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert_eq!(flow.shown.refusal, None);
    flow.measured();
    let refused = Event::Refused { why: Refusal::Unattached, for_good: false };
    assert!(matches!(flow.on(refused), Action::CopyOn { forget: None, .. }), "the data path keeps the legs");
    assert_eq!((flow.shown.refusal, flow.core.most()), (Some(Refusal::Unattached), u64::MAX));

    for error in [
        SwitchError::Untracked,
        SwitchError::Closing,
        SwitchError::Fragments,
        SwitchError::Mismatch,
        SwitchError::Full,
        SwitchError::Run(5),
    ] {
        let mut flow = Flow::at_once();
        flow.on(Event::Attended(true));
        flow.measured();
        let (why, action) = (Refusal::from(error), flow.on(Event::Frozen(Err(error))));
        assert!(matches!(action, Action::CopyOn { forget: Some(said), .. } if said == why), "{error}: {action:?}");
        assert_eq!(flow.shown.refusal, Some(why));
    }
}

#[test]
fn commands_overrule_the_policy_of_a_copied_flow() {
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1000), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    assert!(flow.core.takes_commands());
    assert!(matches!(flow.on(Event::Command(Command::Release)), Action::Wait), "there is nothing to release");
    assert_eq!(flow.core.most(), 1000);
    assert!(matches!(flow.on(Event::Command(Command::Unsplice)), Action::Wait));
    assert_eq!(flow.core.most(), u64::MAX);
    flow.copy(Side::Client, 1000);
    assert!(matches!(flow.on(Event::Moved), Action::Wait), "it is to stay");

    // a command that meets an unfinished switch is carried out later, with a drain that takes all bytes
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1000), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.on(Event::Command(Command::Unsplice));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert!(matches!(flow.measured(), Action::Freeze { .. }), "not behind the threshold, which was not reached");
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Busy))), Action::Wait));
    assert_eq!(flow.core.most(), u64::MAX, "what arrives in the meantime is copied");
    let soon = flow.core.timer().expect("another attempt");
    flow.now = soon;
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    flow.measured();
    // the opposite command takes the attempt back, and the timer with it
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Busy))), Action::Wait));
    assert!(matches!(flow.on(Event::Command(Command::Unsplice)), Action::Wait));
    assert!(flow.core.timer() > Some(soon + SECOND), "an attempt that is not due wakes nobody");

    // a freeze under way must not be tried again either
    flow.on(Event::Command(Command::Splice));
    flow.measured();
    flow.on(Event::Command(Command::Unsplice));
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Busy))), Action::CopyOn { forget: None, .. }));

    // a command asks for one splice: the policy decides about the next
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1000), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.on(Event::Command(Command::Splice));
    flow.measured();
    flow.frozen();
    assert!(flow.core.takes_commands());
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Unsplice { away: None }));
    assert!(!flow.core.takes_commands() && !flow.core.is_ending());
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::Wait));
    assert_eq!(flow.core.most(), 1000);
}

#[test]
fn what_the_data_path_cannot_splice_yet_is_tried_again() {
    for (error, pause) in
        [(SwitchError::Busy, SECOND / 200), (SwitchError::Window, SECOND / 200), (SwitchError::Silent, 5 * SECOND)]
    {
        let mut flow = Flow::at_once();
        flow.on(Event::Attended(true));
        flow.copy(Side::Client, 10);
        assert!(matches!(flow.measured(), Action::Freeze { fit: true }));
        assert!(matches!(flow.on(Event::Frozen(Err(error))), Action::Wait));
        assert_eq!(flow.core.timer(), Some(flow.now + pause));
        assert!(matches!(flow.on(Event::Moved), Action::Wait), "not before");
        flow.now += pause;
        assert!(matches!(flow.on(Event::Timer), Action::Measure));
        assert!(matches!(flow.measured(), Action::Freeze { fit: false }), "windows are waited for once");
    }
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.copy(Side::Server, 10);
    for n in 0..4 {
        assert!(matches!(flow.measured(), Action::Freeze { fit: true }), "bytes move");
        assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Window))), Action::Wait));
        let step = flow.core.most() - flow.core.streams()[Side::Server].copied;
        assert_eq!(step, 32 * 1024, "{n}: copying pauses, and windows are compared again");
        flow.copy(Side::Server, step as usize);
        assert!(matches!(flow.on(Event::Copied), Action::Measure));
    }
    assert!(matches!(flow.measured(), Action::Freeze { fit: false }), "windows are waited for a few times");
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.measured();
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Short))), Action::CopyOn { forget: None, .. }));
    assert_eq!(flow.shown.refusal, None);
}

#[test]
fn a_drain_comes_to_an_end() {
    let draining = || {
        let mut flow = Flow::at_once();
        flow.on(Event::Attended(true));
        flow.measured();
        assert!(matches!(flow.frozen(), Action::Wait));
        assert_eq!((flow.shown.state, flow.core.copies()), (FlowState::Draining, true));
        assert_eq!(
            (flow.core.most(), flow.core.listens()),
            (u64::MAX, false),
            "all bytes before the bounds are copied"
        );
        flow
    };
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    assert!(!flow.core.copies(), "nothing is left to be read");
    assert!(matches!(flow.on(Event::Told), Action::Look));
    assert!(matches!(flow.drained(), Action::Commit { .. }));
    assert!(matches!(flow.on(Event::Committed(Err(SwitchError::Busy))), Action::Unsplice { away: None }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }), "not tried again by itself");
    assert_eq!((flow.shown.splices, flow.shown.refusal), (0, Some(Refusal::DrainTimeout)));

    let mut flow = draining();
    assert_eq!(flow.core.timer(), Some(flow.now + control::LOOK_EVERY));
    flow.now += flow.policy.drain_limit;
    assert!(matches!(flow.on(Event::Timer), Action::Look));
    let at = Switched { phase: Pair::both(Phase::ToForwarding), ..Switched::default() };
    assert!(matches!(flow.on(Event::Looked(Ok(Box::new(at)))), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.refusal, Some(Refusal::DrainTimeout));

    // taken back by the data path and reset
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.refusal, None);
    let mut flow = draining();
    let at = || Ok(Box::new(Switched { flags: Pair::both(LegFlags::RESET), ..Switched::default() }));
    assert!(matches!(flow.on(Event::Looked(at())), Action::Unsplice { away: None }));
    // the reset was forwarded: only the path entry knows who sent it
    for (client_reset, how) in [(false, EndReason::ServerReset), (true, EndReason::ClientReset)] {
        let mut flow = draining();
        flow.on(Event::Looked(at()));
        ends(&flow.on(Event::Unspliced { at: at(), client_reset }), how, false);
    }
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Looked(Err(SwitchError::Untracked))), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Untracked));
    ends(
        &flow.on(Event::Unspliced { at: Err(SwitchError::Untracked), client_reset: false }),
        EndReason::Stopped,
        false,
    );

    for (event, how) in [
        (Event::Command(Command::Reset), Some(EndReason::Stopped)),
        (Event::Stop { leave: true }, Some(EndReason::Stopped)),
        (Event::Command(Command::Unsplice), None),
    ] {
        let mut flow = draining();
        assert!(matches!(flow.on(event), Action::Unsplice { away: None }));
        match (how, flow.taken_back()) {
            (Some(how), action) => ends(&action, how, false),
            (None, action) => assert!(matches!(action, Action::Attend) && flow.core.stay),
        }
    }
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait));
}

#[test]
fn packets_that_would_not_fit_are_not_spliced() {
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.on(Event::Measured(Pair::both(PathFacts { mtu: Some(1000), ..PathFacts::default() })));
    assert!(matches!(flow.frozen(), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Mtu));
}

#[test]
fn what_was_forwarded_is_counted_and_moves_the_sockets() {
    let mut flow = Flow::spliced(Policy::default());
    flow.now += SECOND;
    let action = flow.see(Why::Command(Command::Unsplice));
    assert!(matches!(action, Action::Unsplice { away: Some(SECOND) }), "{action:?}");
    let at = Switched {
        end: Pair::new(5000, 70),
        bound: Pair::new(5000, 70),
        was_forwarded: Pair::both(true),
        fin: Pair::new(true, false),
        ..Switched::default()
    };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert_eq!((flow.shown.spliced, flow.shown.splices), (Pair::new(4999, 70), 1));
    assert_eq!((flow.at.client.consumed, flow.at.server.produced, flow.at.server.consumed), (5000, 5000, 70));
    assert!(flow.at.client.eof && flow.at.server.shut && flow.at.iter().all(|at| at.shimmed));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }), "it was asked to stay");
    // the other stream ends in control mode; both FINs have to be acknowledged
    flow.at.server.took(0);
    flow.at.client.closed();
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Wait));
    assert_eq!(flow.core.timer(), Some(flow.now + control::LOOK_EVERY));
    assert!(matches!(flow.on(Event::Stop { leave: false }), Action::Wait));
    assert!(matches!(flow.on(Event::Timer), Action::Look));
    assert!(matches!(flow.on(Event::Told), Action::Look));
    // the server is done, and answers a duplicate; the client has yet to acknowledge its FIN
    let over = LegFlags::FIN_IN | LegFlags::FIN_ACKED | LegFlags::RESET | LegFlags::RESET_IN;
    let done = Switched { flags: Pair::new(LegFlags::FIN_IN, over), ..Switched::default() };
    assert!(matches!(flow.on(Event::Looked(Ok(Box::new(done)))), Action::Wait));
    // ... which it has, before it answers a duplicate, too
    let acked = Switched { flags: Pair::both(over), ..Switched::default() };
    ends(&flow.on(Event::Looked(Ok(Box::new(acked)))), EndReason::Closed, false);
    assert!(flow.core.is_fin_past());
}

#[test]
fn fins_that_nobody_acknowledges_are_not_waited_for_for_ever() {
    let mut flow = Flow::spliced(Policy::default());
    flow.see(Why::Command(Command::Unsplice));
    let (one, yes) = (Pair::both(1), Pair::both(true));
    let at = Switched { end: one, bound: Pair::both(1), was_forwarded: yes, fin: yes, ..Switched::default() };
    flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false });
    flow.on(Event::Attended(true));
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    flow.now += flow.policy.idle_limit.get() - SECOND;
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Wait), "a host may be slow");
    flow.now += SECOND;
    ends(&flow.on(Event::Looked(Ok(Box::default()))), EndReason::Idle, false);
    assert_eq!(flow.shown.refusal, None, "it was spliced");
}

/// Short connections end before anybody notices that they have drained: nothing is left to commit.
#[test]
fn what_was_closed_in_a_drain_is_not_committed() {
    let closed = |fins: Pair<u32>| {
        let mut flow = Flow::at_once();
        flow.on(Event::Attended(true));
        flow.measured();
        flow.frozen();
        let phase = Pair::both(Phase::Forwarding);
        let at = Switched { phase, flags: fins, mss: Pair::both(1460), ..Switched::default() };
        let action = flow.on(Event::Looked(Ok(Box::new(at))));
        (action, flow.shown.splices)
    };
    let (action, splices) = closed(Pair::both(LegFlags::FIN_ACKED));
    assert!(matches!(action, Action::End { how: EndReason::Closed, forwarded: true }), "{action:?}");
    assert_eq!(splices, 1, "it was forwarded all the same");
    let (action, _) = closed(Pair::new(LegFlags::FIN_ACKED, 0));
    assert!(matches!(action, Action::Commit { .. }), "one half is open: {action:?}");
}

/// A direction whose bytes were drained but never forwarded leaves the sockets where they are.
#[test]
fn what_was_drained_only_is_read_from_the_sockets() {
    let mut flow = Flow::at_once();
    assert!(!flow.core.is_fin_past());
    flow.on(Event::Attended(true));
    flow.measured();
    let at = Switched { phase: Pair::both(Phase::ToForwarding), mss: Pair::both(1460), ..Switched::default() };
    let (pending, bound) = (Pair::new(10, 0), Pair::new(1000, 500));
    let frozen = Frozen { at, pending, bound, ..Frozen::default() };
    assert!(matches!(flow.on(Event::Frozen(Ok(Box::new(frozen)))), Action::Wait));
    let next =
        |flow: &Flow, from: Side| flow.core.streams()[from].next(&flow.at[from], &flow.at[from.other()], u64::MAX);
    assert_eq!((next(&flow, Side::Client), next(&flow, Side::Server)), (Next::Read(10), Next::Done));
    flow.on(Event::Command(Command::Unsplice));
    let (end, bound) = (Pair::new(1200, 700), Pair::new(1200, 700));
    let at = Switched { end, bound, was_forwarded: Pair::new(false, true), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert_eq!((flow.shown.spliced, flow.at.client.consumed, flow.at.client.produced), (Pair::new(0, 200), 0, 200));
    assert_eq!(next(&flow, Side::Client), Next::Read(u64::MAX), "the drain is over");
}

#[test]
fn a_forwarded_flow_ends_as_its_hosts_do() {
    let by_client = Pair::new(PathFlags::DEAD | PathFlags::RST, 0).map(|flags| flagged(flags).client);
    let spliced = || Flow::spliced(Policy::default());
    ends(&spliced().seen(Why::Told(EventKind::Closed), flagged(PathFlags::FIN_ACKED)), EndReason::Closed, true);
    ends(&spliced().seen(Why::Told(EventKind::Reset), by_client), EndReason::ClientReset, true);
    ends(&spliced().seen(Why::Told(EventKind::Reset), by_client.swapped()), EndReason::ServerReset, true);
    ends(&spliced().seen(Why::Look, flagged(PathFlags::DEAD | PathFlags::FIN)), EndReason::Closed, true);
    ends(&spliced().on(Event::Stop { leave: true }), EndReason::Left, true);
    // the sockets inform the hosts
    for event in [
        Event::Stop { leave: false },
        Event::Seen(Box::new(Seen { why: Why::Command(Command::Reset), paths: Some(forwarded()), legs: None })),
    ] {
        let mut flow = spliced();
        assert!(matches!(flow.on(event), Action::Unsplice { away: Some(_) }));
        assert!(flow.core.is_ending());
        ends(&flow.taken_back(), EndReason::Stopped, false);
    }
    // a new connection may have the addresses: its sockets say nothing, once it is clear that no event will tell more
    let (mut flow, gone) = (spliced(), || Box::new(Seen { why: Why::Look, paths: None, legs: None }));
    assert!(matches!(flow.on(Event::Seen(gone())), Action::Wait));
    flow.now += 8 * SECOND;
    ends(&flow.on(Event::Seen(gone())), EndReason::Stopped, true);
    let mut flow = Flow::released(Policy::default());
    assert_eq!(flow.core.timer(), None, "the keeper has timers of its own");
    ends(&flow.on(Event::Stop { leave: false }), EndReason::Stopped, true);
    assert_eq!(flow.core.state(), State::Ended);
}

#[test]
fn a_forwarded_flow_that_is_idle_ends_and_one_that_moves_does_not() {
    let mut flow = Flow::released(Policy { idle_limit: (10 * SECOND).into(), ..Policy::default() });
    flow.now += 9 * SECOND;
    let moved = with(|p| (p.flags, p.end) = (PathFlags::SPLICED, 1));
    assert!(matches!(flow.seen(Why::Look, moved), Action::Wait));
    flow.now += 9 * SECOND;
    assert!(matches!(flow.seen(Why::Look, moved), Action::Wait));
    flow.now += SECOND;
    ends(&flow.seen(Why::Look, moved), EndReason::Idle, true);

    // the sockets inform the hosts
    let mut flow = Flow::spliced(Policy { idle_limit: (10 * SECOND).into(), ..Policy::default() });
    flow.see(Why::Look);
    flow.now += 10 * SECOND;
    assert!(matches!(flow.see(Why::Look), Action::Unsplice { away: Some(_) }));
    ends(&flow.taken_back(), EndReason::Idle, false);
}

/// The idle limit of a flow that came back begins when it came back, whatever it had copied before.
#[test]
fn a_flow_that_came_back_has_its_idle_limit_again() {
    let mut flow = Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 10);
    flow.measured();
    flow.frozen();
    flow.copy(Side::Client, 20);
    flow.drained();
    flow.on(Event::Committed(Ok(Box::default())));
    assert_eq!(flow.shown.copied, Pair::new(30, 0), "with the bytes of the drain");
    flow.now += 3600 * SECOND;
    flow.see(Why::Command(Command::Unsplice));
    flow.taken_back();
    flow.on(Event::Attended(true));
    assert!(!flow.core.has_moved());
    flow.now += flow.policy.idle_limit.get();
    assert_eq!(flow.core.timer(), Some(flow.now));
    ends(&flow.on(Event::Timer), EndReason::Idle, false);
}

/// Answers that come too late, or belong to another state, change nothing.
#[test]
fn events_of_other_states_change_nothing() {
    let unchanged = |flow: &mut Flow, events: Vec<Event>| {
        let before = format!("{:?}", flow.core);
        for event in events {
            let what = format!("{event:?} in {:?}", flow.core.state());
            assert!(matches!(flow.on(event), Action::Wait), "{what}");
            assert_eq!(before, format!("{:?}", flow.core), "{what}");
        }
    };
    let gone = || Err(SwitchError::Untracked);
    let ends = || vec![Event::Unspliced { at: gone(), client_reset: true }, Event::Committed(gone())];
    let moves = || vec![Event::Moved, Event::Heard];
    let answers = || {
        let why = Refusal::Failed;
        let refused = Event::Refused { why, for_good: true };
        vec![Event::Attended(false), Event::LookedBehind(false), Event::Frozen(Err(SwitchError::Full)), refused]
    };
    let measured = || vec![Event::Measured(Pair::default())];
    let sockets = || vec![Event::Released(true), Event::Recreated(Ok(Pair::both(1)))];
    let seen = || vec![Event::Seen(Box::new(Seen { why: Why::Look, paths: None, legs: None }))];
    let looked = || vec![Event::Told, Event::Looked(gone())];

    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    unchanged(&mut flow, [ends(), sockets(), seen(), looked()].into_iter().flatten().collect());
    flow.measured();
    flow.frozen();
    let late = [moves(), answers(), measured(), sockets(), seen()].into_iter().flatten();
    let unspliced = Event::Unspliced { at: gone(), client_reset: false };
    unchanged(&mut flow, late.chain([unspliced, Event::Command(Command::Release)]).collect());
    let mut flow = Flow::spliced(Policy::default());
    let hosts = [Event::Copied, Event::Failed(Side::Client), Event::Timer, Event::Command(Command::Reset)];
    let late = [ends(), moves(), answers(), measured(), looked()].into_iter().flatten();
    unchanged(&mut flow, late.chain(hosts).collect());
    assert!(!flow.core.listens() && flow.core.timer().is_none());
    flow.see(Why::Command(Command::Unsplice));
    assert_eq!(flow.core.timer(), None);
    unchanged(&mut flow, [moves(), answers(), vec![Event::Stop { leave: false }]].into_iter().flatten().collect());
}

#[test]
fn triggers_take_a_flow_back() {
    let mut flow = Flow::spliced(Policy { trigger: Some(Trigger::ClientData), ..Policy::default() });
    assert_eq!(flow.core.release_at(&flow.policy), None, "its sockets stay");
    assert!(matches!(flow.see(Why::Command(Command::Release)), Action::Wait));
    assert!(matches!(flow.see(Why::Told(EventKind::Triggered)), Action::Unsplice { .. }));
    assert!(flow.core.stay && flow.shown.triggered);
    // the event was lost
    let mut flow = Flow::spliced(Policy::default());
    let woken = with(|_| ());
    assert!(matches!(flow.seen(Why::Look, woken), Action::Unsplice { .. }));
    assert!(flow.core.stay);

    let idle = Policy { trigger: Some(Trigger::Idle(5 * SECOND)), ..Policy::default() };
    let mut flow = Flow::spliced(idle.clone());
    assert_eq!(flow.core.patience(&flow.policy), 5 * SECOND);
    let moved = with(|p| (p.flags, p.end) = (PathFlags::SPLICED, 1));
    assert!(matches!(flow.seen(Why::Look, moved), Action::Wait));
    assert!(!flow.shown.triggered);
    flow.now += 5 * SECOND;
    assert!(matches!(flow.seen(Why::Look, moved), Action::Unsplice { .. }) && flow.shown.triggered);
    let mut flow = Flow::released(idle);
    flow.now += 5 * SECOND;
    assert!(matches!(flow.see(Why::Look), Action::Recreate { force: false }) && flow.shown.triggered);
}

#[test]
fn hosts_that_wait_for_a_lost_event_do_not_wait_for_the_idle_limit() {
    let patience = |trigger, idle_limit, message| {
        let policy = Policy { trigger, idle_limit: Duration::into(idle_limit), ..Policy::default() };
        Flow::new(policy.clone(), message).core.patience(&policy)
    };
    let hour = 3600 * SECOND;
    assert_eq!(patience(None, hour, None), hour);
    assert_eq!(patience(Some(Trigger::Idle(2 * hour)), hour, None), hour);
    for trigger in [Trigger::ClientData, Trigger::ServerData] {
        assert_eq!(patience(Some(trigger), hour, None), 8 * SECOND);
    }
    assert_eq!(patience(None, hour, Some(Message::from_client(None))), 8 * SECOND);
    assert_eq!(patience(Some(Trigger::ClientData), SECOND, None), SECOND);
}

#[test]
fn fragments_keep_a_flow_forwarded() {
    let mut flow = Flow::spliced(Policy::default());
    let fragments = flagged(PathFlags::FRAGMENTS);
    assert!(matches!(flow.seen(Why::Command(Command::Unsplice), fragments), Action::Wait));
    assert_eq!((flow.shown.refusal, flow.core.state()), (Some(Refusal::Fragments), State::Spliced));
    assert!(matches!(flow.seen(Why::Elsewhere { transparent: false }, fragments), Action::Wait));
    // a trigger must not either
    let mut flow = Flow::spliced(Policy { trigger: Some(Trigger::Idle(5 * SECOND)), ..Policy::default() });
    assert!(matches!(flow.seen(Why::Look, fragments), Action::Wait));
    flow.now += 5 * SECOND;
    assert!(matches!(flow.seen(Why::Look, fragments), Action::Wait));
}

#[test]
fn segments_that_do_not_fit_take_a_flow_back_unless_their_host_listens() {
    let mut flow = Flow::spliced(Policy { release_after: None, ..Policy::default() });
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Wait));
    flow.now += 90 * SECOND; // the host has obeyed: this is a new case
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Wait));
    flow.now += 3 * SECOND;
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Wait));
    flow.now += SECOND;
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Unsplice { .. }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Mtu));
    assert!(!flow.core.stay);

    let mut flow = Flow::released(Policy::default());
    flow.see(Why::Told(EventKind::Oversize));
    flow.now += 4 * SECOND;
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Recreate { .. }));
    flow.on(Event::Recreated(Ok(Pair::both(0))));
    assert!(!flow.core.stay);

    // of this path the host cannot be told: at once, and to stay
    let mut flow = Flow::spliced(Policy { release_after: None, ..Policy::default() });
    assert!(matches!(flow.see(Why::Told(EventKind::Narrow)), Action::Unsplice { .. }) && flow.core.stay);
}

#[test]
fn a_flow_is_released_in_time_and_comes_back_when_it_is_idle() {
    let mut flow = Flow::spliced(Policy { release_after: Some(60 * SECOND), ..Policy::default() });
    assert_eq!(flow.core.release_at(&flow.policy), Some(flow.now + 60 * SECOND));
    assert!(matches!(flow.see(Why::Due), Action::Wait));
    flow.now += 60 * SECOND;
    for why in [
        Why::Due,
        Why::Elsewhere { transparent: true },
        Why::Command(Command::Splice),
        Why::Told(EventKind::Forwarding),
    ] {
        assert!(matches!(flow.see(why), Action::Release), "{why:?}");
    }
    assert!(matches!(flow.on(Event::Released(false)), Action::Wait));
    assert_eq!(flow.core.state(), State::Spliced);
    assert!(matches!(flow.on(Event::Released(true)), Action::Wait));
    assert_eq!(flow.shown.state, FlowState::Released);

    assert!(matches!(flow.see(Why::Command(Command::Unsplice)), Action::Recreate { force: false }));
    assert!(matches!(flow.on(Event::Recreated(Err(SwitchError::Busy))), Action::Wait));
    assert!(flow.core.is_returning());
    flow.now += SECOND;
    assert!(matches!(flow.see(Why::Due), Action::Recreate { force: true }), "it was never idle");
    assert!(matches!(flow.on(Event::Recreated(Ok(Pair::new(7, 8)))), Action::Attend));
    assert_eq!((flow.shown.spliced, flow.at.client.consumed, flow.at.client.produced), (Pair::new(7, 8), 7, 8));
    assert!(flow.core.stay && !flow.core.is_returning());
    assert!(flow.at.iter().all(|at| at.shimmed), "a host may be ahead of its new socket");
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }));

    for error in [SwitchError::Busy, SwitchError::Closing, SwitchError::Fragments] {
        let mut flow = Flow::released(Policy::default());
        flow.see(Why::Command(Command::Unsplice));
        flow.now += SECOND;
        flow.see(Why::Due);
        assert!(matches!(flow.on(Event::Recreated(Err(error))), Action::Wait));
        assert!(!flow.core.is_returning(), "it stays released");
        assert_eq!(flow.shown.refusal.is_some(), error == SwitchError::Fragments);
    }
}

/// Another process can continue a flow.
#[cfg(feature = "serde")]
#[test]
fn it_can_be_written_down_in_any_state() {
    fn again(flow: &mut Flow) {
        let before = format!("{:?}", flow.core);
        let written = serde_json::to_string(&flow.core).expect("written");
        flow.core = serde_json::from_str(&written).expect("read");
        assert_eq!(before, format!("{:?}", flow.core));
    }
    let mut flow = Flow::at_once();
    again(&mut flow);
    let mut flow = flow.into_spliced();
    again(&mut flow);
    flow.see(Why::Command(Command::Release));
    flow.on(Event::Released(true));
    again(&mut flow);
    flow.see(Why::Command(Command::Unsplice));
    again(&mut flow);
    flow.on(Event::Recreated(Ok(Pair::new(1, 2))));
    again(&mut flow);
    let mut flow = Flow::new(Policy::default(), Some(Message::from_client(None)));
    again(&mut flow);
}
