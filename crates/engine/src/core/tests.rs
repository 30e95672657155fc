use super::*;
use crate::types::{PathRule, SpliceWhen, Trigger};
use longsplice_datapath::{EventKind, Phase};

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

fn reset(flags: u32) -> Box<Switched> {
    Box::new(Switched { flags: Pair::new(LegFlags::RESET | flags, 0), ..Switched::default() })
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
    flow.close();
    ends(&flow.on(Event::Copied), EndReason::Closed, false);
    assert_eq!((flow.shown.copied, flow.shown.refusal), (Pair::new(1000, 0), Some(Refusal::Short)));
    assert!(matches!(flow.on(Event::Timer), Action::Wait), "nothing comes after the end");

    ends(&begin().on(Event::Failed(Side::Client)), EndReason::ClientReset, false);
    ends(&begin().on(Event::Failed(Side::Server)), EndReason::ServerReset, false);
    ends(&begin().on(Event::Command(Command::Reset)), EndReason::Stopped, false);
    ends(&begin().on(Event::Stop { leave: true }), EndReason::Stopped, false);
    ends(&Flow::at_once().on(Event::Attended(false)), EndReason::Stopped, false);
}

#[test]
fn a_silent_flow_ends_at_its_idle_limit_and_one_that_moves_does_not() {
    let mut flow = Flow::new(Policy { idle_limit: 10 * SECOND, ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    assert_eq!(flow.core.timer(), Some(flow.now + 10 * SECOND));
    flow.copy(Side::Server, 10);
    assert!(flow.core.has_moved());
    flow.on(Event::Moved);
    assert!(!flow.core.has_moved());
    let tick = flow.core.timer().expect("counts");
    assert!(tick < flow.now + SECOND, "bytes that move are counted soon");
    for _ in 0..2 {
        flow.now = flow.core.timer().expect("a time");
        assert!(matches!(flow.on(Event::Timer), Action::Wait));
    }
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
    assert!(matches!(flow.on(Event::LookedBehind(true)), Action::Wait));
    assert_eq!(flow.core.most(), 2000);
    flow.copy(Side::Server, 1000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.measured(), Action::LookBehind));
    assert!(matches!(flow.on(Event::LookedBehind(false)), Action::Freeze { fit: true }));
}

#[test]
fn what_cannot_be_spliced_is_copied_and_says_why() {
    let never = Policy { when: SpliceWhen::Never, ..Policy::default() };
    let mut flow = Flow::new(never, None);
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: Some(Refusal::Policy) }));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait));
    assert_eq!((flow.shown.refusal, flow.core.most()), (Some(Refusal::Policy), u64::MAX));

    let mut flow = Flow::at_once();
    flow.core.obstacle = Some(Refusal::Loopback);
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: Some(Refusal::Loopback) }));

    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.measured();
    let refused = Event::Refused { why: Refusal::Unattached, for_good: true };
    assert!(matches!(flow.on(refused), Action::CopyOn { forget: Some(Refusal::Unattached) }));
    // an operator may try again
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert_eq!(flow.shown.refusal, None);
    flow.measured();
    let action = flow.on(Event::Frozen(Err(SwitchError::Full)));
    assert!(matches!(action, Action::CopyOn { forget: Some(Refusal::TableFull) }), "{action:?}");
}

#[test]
fn a_splice_that_would_slow_it_down_is_refused_and_can_be_asked_for() {
    let mut flow =
        Flow::new(Policy { when: SpliceWhen::AfterBytes(1), path: PathRule::Auto, ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 100_000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    let rtt = |ms| PathFacts { min_rtt: Some(Duration::from_millis(ms)), mtu: None };
    let facts = || Event::Measured(Pair::new(rtt(1), rtt(50)));
    assert!(matches!(flow.on(facts()), Action::CopyOn { forget: None }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Path));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert!(matches!(flow.on(facts()), Action::Freeze { .. }));
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
    flow.measured();
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Short))), Action::CopyOn { forget: None }));
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
        flow
    };
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    assert!(!flow.core.copies(), "nothing is left to be read");
    assert!(matches!(flow.on(Event::Told), Action::Look));
    assert!(matches!(flow.drained(), Action::Commit { .. }));
    assert!(matches!(flow.on(Event::Committed(Err(SwitchError::Busy))), Action::Unsplice { away: None }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None }), "not tried again by itself");
    assert_eq!((flow.shown.splices, flow.shown.refusal), (0, Some(Refusal::DrainTimeout)));

    let mut flow = draining();
    assert!(flow.core.timer().expect("looks") < flow.now + SECOND);
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
    assert!(matches!(flow.on(Event::Looked(Ok(reset(0)))), Action::Unsplice { away: None }));
    let at = Ok(reset(LegFlags::RESET_IN));
    ends(&flow.on(Event::Unspliced { at, client_reset: false }), EndReason::ClientReset, false);
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Looked(Err(SwitchError::Untracked))), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Untracked));
    ends(
        &flow.on(Event::Unspliced { at: Err(SwitchError::Untracked), client_reset: false }),
        EndReason::Stopped,
        false,
    );

    for (event, how) in [
        (Event::Failed(Side::Server), Some(EndReason::ServerReset)),
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
    flow.on(Event::Measured(Pair::both(PathFacts { mtu: Some(1000), min_rtt: None })));
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
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None }), "it was asked to stay");
    // the other stream ends in control mode; both FINs have to be acknowledged
    flow.at.server.took(0);
    flow.at.client.closed();
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Wait));
    assert!(flow.core.timer().is_some());
    assert!(matches!(flow.on(Event::Stop { leave: false }), Action::Wait));
    assert!(matches!(flow.on(Event::Timer), Action::Look));
    let acked = Switched { flags: Pair::both(LegFlags::FIN_ACKED), ..Switched::default() };
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
    flow.now += crate::lingering::LINGER;
    ends(&flow.on(Event::Looked(Ok(Box::default()))), EndReason::Closed, false);
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
        Event::Seen(Box::new(Seen { why: Why::Look, paths: None, legs: None })),
    ] {
        let mut flow = spliced();
        assert!(matches!(flow.on(event), Action::Unsplice { away: Some(_) }));
        assert!(flow.core.is_ending());
        ends(&flow.taken_back(), EndReason::Stopped, false);
    }
    ends(&Flow::released(Policy::default()).on(Event::Stop { leave: false }), EndReason::Stopped, true);
}

#[test]
fn a_forwarded_flow_that_is_idle_ends_and_one_that_moves_does_not() {
    let mut flow = Flow::released(Policy { idle_limit: 10 * SECOND, ..Policy::default() });
    flow.now += 9 * SECOND;
    let moved = with(|p| (p.flags, p.end) = (PathFlags::SPLICED, 1));
    assert!(matches!(flow.seen(Why::Look, moved), Action::Wait));
    flow.now += 9 * SECOND;
    assert!(matches!(flow.seen(Why::Look, moved), Action::Wait));
    flow.now += SECOND;
    ends(&flow.seen(Why::Look, moved), EndReason::Idle, true);
}

#[test]
fn triggers_take_a_flow_back() {
    let mut flow = Flow::spliced(Policy { trigger: Some(Trigger::ClientData), ..Policy::default() });
    assert_eq!(flow.core.release_at(&flow.policy), None, "its sockets stay");
    assert!(matches!(flow.see(Why::Command(Command::Release)), Action::Wait));
    assert!(matches!(flow.see(Why::Told(EventKind::Triggered)), Action::Unsplice { .. }));
    assert!(flow.core.stay);
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
    flow.now += 5 * SECOND;
    assert!(matches!(flow.seen(Why::Look, moved), Action::Unsplice { .. }));
    let mut flow = Flow::released(idle);
    flow.now += 5 * SECOND;
    assert!(matches!(flow.see(Why::Look), Action::Recreate { force: false }));
}

#[test]
fn fragments_keep_a_flow_forwarded() {
    let mut flow = Flow::spliced(Policy::default());
    let fragments = flagged(PathFlags::FRAGMENTS);
    assert!(matches!(flow.seen(Why::Command(Command::Unsplice), fragments), Action::Wait));
    assert_eq!((flow.shown.refusal, flow.core.state()), (Some(Refusal::Fragments), State::Spliced));
    assert!(matches!(flow.seen(Why::Elsewhere { transparent: false }, fragments), Action::Wait));
}

#[test]
fn segments_that_do_not_fit_take_a_flow_back_unless_their_host_listens() {
    let mut flow = Flow::spliced(Policy { release_after: None, ..Policy::default() });
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Wait));
    flow.now += 100 * SECOND; // the host has obeyed: this is a new case
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Wait));
    flow.now += 4 * SECOND;
    assert!(matches!(flow.see(Why::Told(EventKind::Oversize)), Action::Unsplice { .. }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Mtu));
    assert!(!flow.core.stay);
}

#[test]
fn a_flow_is_released_in_time_and_comes_back_when_it_is_idle() {
    let mut flow = Flow::spliced(Policy { release_after: Some(60 * SECOND), ..Policy::default() });
    assert_eq!(flow.core.release_at(&flow.policy), Some(flow.now + 60 * SECOND));
    assert!(matches!(flow.see(Why::Due), Action::Wait));
    flow.now += 60 * SECOND;
    assert!(matches!(flow.see(Why::Due), Action::Release));
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
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None }));

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

#[test]
fn a_flow_whose_way_leads_elsewhere_goes_without_its_old_sockets() {
    let mut flow = Flow::spliced(Policy::default());
    assert!(matches!(flow.see(Why::Elsewhere { transparent: true }), Action::Wait));
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Release));
    assert_eq!(flow.shown.refusal, Some(Refusal::Unattached));
    assert!(matches!(flow.on(Event::Released(true)), Action::Recreate { force: false }));
    flow.now += flow.policy.drain_limit;
    assert!(matches!(flow.see(Why::Due), Action::Recreate { force: false }), "never by force");
    assert!(matches!(flow.on(Event::Recreated(Err(SwitchError::Busy))), Action::Wait));
    assert!(!flow.core.is_returning());
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Recreate { force: false }));
}

#[test]
fn a_message_is_spliced_up_to_its_end() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let new = |bytes| Flow::new(policy.clone(), Some(Message::from_server(bytes)));
    // too short, unknown, and long enough
    assert!(matches!(new(Some(9999)).on(Event::Attended(true)), Action::CopyOn { forget: None }));
    assert!(matches!(new(None).on(Event::Attended(true)), Action::Wait));
    let mut flow = new(Some(20_000));
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(flow.measured(), Action::Freeze { fit: true }));
    let leg = Tuple { remote: ([10, 0, 0, 1], 1).into(), local: ([10, 0, 0, 2], 2).into() };
    let limits = Pair::from_fn(|side| flow.core.half(side, leg, &flow.at[side]).limit);
    assert_eq!(limits, Pair::new(Limit::Keep, Limit::Bytes(20_000)));
    let mut flow = new(Some(20_000)).into_spliced();
    assert_eq!(flow.core.release_at(&flow.policy), None);

    assert!(flow.core.wants_legs(Why::Told(EventKind::LimitReached)) && !flow.core.wants_legs(Why::Due));
    let legs = |end| Some(Switched { end: Pair::new(0, end), ..Switched::default() });
    let mut passed = |end| {
        let seen = Seen { why: Why::Told(EventKind::LimitReached), paths: Some(forwarded()), legs: legs(end) };
        flow.on(Event::Seen(Box::new(seen)))
    };
    assert!(matches!(passed(19_999), Action::Wait), "the event came too early");
    assert!(matches!(passed(20_000), Action::Unsplice { .. }));
    let (end, bound) = (Pair::new(0, 20_000), Pair::new(0, 20_000));
    let at = Switched { end, bound, was_forwarded: Pair::new(false, true), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { .. }));
    // the legs part only when everything is acknowledged
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    let at = Switched { phase: Pair::new(Phase::Local, Phase::ToLocal), ..Switched::default() };
    assert!(matches!(flow.on(Event::Looked(Ok(Box::new(at)))), Action::Wait));
    assert!(flow.core.listens());
    assert!(matches!(flow.on(Event::Heard), Action::Look));
    assert!(!flow.core.listens(), "once is enough");
    ends(&flow.on(Event::Looked(Ok(Box::default()))), EndReason::MessageRelayed, false);
}

#[test]
fn a_message_ends_without_its_connections() {
    let until_receiver_speaks = Message::from_server(Some(100)).until_receiver_speaks();
    let mut flow = Flow::new(Policy::default(), Some(until_receiver_speaks));
    flow.on(Event::Attended(true));
    assert!(flow.core.listens());
    ends(&flow.on(Event::Heard), EndReason::MessageRelayed, false);
    assert_eq!(flow.core.streams().server.message, Some(100), "all of it is missing");

    let settling = || {
        let mut flow = Flow::new(Policy::default(), Some(Message::from_client(Some(100))));
        flow.at.client.shimmed = true;
        flow.on(Event::Attended(true));
        flow.copy(Side::Client, 100);
        assert!(matches!(flow.on(Event::Copied), Action::Look));
        flow
    };
    ends(&settling().on(Event::Stop { leave: false }), EndReason::Stopped, false);
    assert!(matches!(settling().on(Event::Timer), Action::Look));
    assert!(matches!(settling().on(Event::Told), Action::Look));
    ends(&settling().on(Event::Looked(Err(SwitchError::Untracked))), EndReason::Stopped, false);
    ends(&settling().on(Event::Looked(Ok(reset(0)))), EndReason::ServerReset, false);
    let mut flow = settling();
    flow.now += flow.policy.idle_limit;
    let at = Switched { phase: Pair::both(Phase::ToLocal), ..Switched::default() };
    ends(&flow.on(Event::Looked(Ok(Box::new(at)))), EndReason::Idle, false);
}

#[test]
fn a_splice_of_a_message_that_has_not_paid_is_not_tried_again() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let mut flow = Flow::new(policy, Some(Message::from_server(Some(20_000)))).into_spliced();
    assert!(matches!(flow.see(Why::Told(EventKind::Triggered)), Action::Unsplice { .. }));
    let (end, bound) = (Pair::new(0, 50), Pair::new(0, 50));
    let at = Switched { end, bound, was_forwarded: Pair::both(true), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert!(flow.core.stay);
    assert_eq!(flow.core.streams().server.message, Some(19_950));
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
