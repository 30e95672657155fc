//! Before a splice: the paths, and the queues that a drain would have to empty.
use super::*;

#[test]
fn a_splice_that_would_slow_it_down_is_refused_and_can_be_asked_for() {
    let mut flow =
        Flow::new(Policy { when: SpliceWhen::AfterBytes(1), path: PathRule::default(), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 100_000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    let rtt = |ms| PathFacts { min_rtt: Some(Duration::from_millis(ms)), ..PathFacts::default() };
    let facts = || Event::Measured(Pair::new(rtt(1), rtt(50)));
    let Action::CopyOn { forget: None, windows } = flow.on(facts()) else { panic!("it is copied") };
    assert!(windows.client.is_some() && windows.server.is_none(), "the near host needs no large window: {windows:?}");
    assert_eq!(flow.shown.refusal, Some(Refusal::Path));
    assert!(matches!(flow.on(Event::Moved), Action::Wait), "it is not measured again at once");
    // the path may have changed later
    flow.now += 10 * SECOND;
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    assert!(matches!(flow.on(facts()), Action::CopyOn { forget: None, .. }));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert!(matches!(flow.on(facts()), Action::Freeze { .. }));

    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 100_000);
    flow.on(Event::Copied);
    flow.on(facts());
    flow.now += 10 * SECOND;
    flow.on(Event::Timer);
    assert!(matches!(flow.on(Event::Measured(Pair::new(rtt(50), rtt(1)))), Action::LookBehind));
    assert_eq!(flow.shown.refusal, None);

    // it has carried too little to know: it is judged again after an initial window
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 100);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.on(facts()), Action::HoldBack(_)));
    assert_eq!(flow.core.most(), 14_601);
    flow.copy(Side::Client, 14_501);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.on(facts()), Action::CopyOn { forget: None, .. }));
}

/// Both legs are measured, and bytes from the server are queued for a client that takes 1 MB/s.
fn queued(bytes: u32) -> Event {
    let leg = PathFacts {
        rtt: Some(Duration::from_millis(10)),
        min_rtt: Some(Duration::from_millis(10)),
        rate: 1_000_000,
        ..PathFacts::default()
    };
    Event::Measured(Pair::new(PathFacts { outstanding: bytes, ..leg }, leg))
}

#[test]
fn senders_are_held_back_until_their_queues_are_short() {
    let mut flow = Flow::at_once();
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    let Action::HoldBack(held) = flow.on(queued(1_000_000)) else { panic!("a drain would take a second") };
    assert!(held.client.is_none() && held.server.is_some(), "{held:?}");
    assert_eq!((flow.core.most(), flow.core.copies()), (u64::MAX, true), "it is copied meanwhile");
    assert!(matches!(flow.on(Event::Moved), Action::Wait));
    flow.now = flow.core.timer().expect("another look");
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    assert!(matches!(flow.on(queued(50_000)), Action::Freeze { .. }));

    // the command is revoked
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    assert!(matches!(flow.on(Event::Command(Command::Unsplice)), Action::Wait));
    flow.on(Event::Command(Command::Splice));
    assert!(matches!(flow.on(queued(1_000_000)), Action::HoldBack(held) if held.server.is_some()));
    let Action::HoldBack(held) = flow.on(Event::Command(Command::Unsplice)) else { panic!("nobody is held back") };
    assert_eq!(held, Pair::both(None));
}

#[test]
fn a_queue_that_stays_long_is_copied_on() {
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    let began = flow.now;
    let mut action = flow.on(queued(1_000_000));
    while matches!(action, Action::HoldBack(_)) {
        assert!(flow.now <= began + 6 * SECOND, "the limit is five times what the queue takes, and some");
        flow.now = flow.core.timer().expect("another look");
        assert!(matches!(flow.on(Event::Timer), Action::Measure));
        action = flow.on(queued(1_000_000));
    }
    assert!(matches!(action, Action::CopyOn { forget: None, .. }), "{action:?}");
    assert_eq!((flow.now >= began + 5 * SECOND, flow.shown.refusal), (true, Some(Refusal::Path)));
    // a command does not wait for ever
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert!(matches!(flow.on(queued(1_000_000)), Action::HoldBack(_)));
    flow.now += 5 * SECOND;
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    assert!(matches!(flow.on(queued(1_000_000)), Action::Freeze { .. }));
}

#[test]
fn a_queue_that_shows_late_has_its_time() {
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    let began = flow.now;
    let mut action = flow.on(queued(200_000));
    while flow.now < began + 4 * SECOND {
        assert!(matches!(action, Action::HoldBack(_)), "1.8 s are for the first of the queues: {action:?}");
        flow.now = flow.core.timer().expect("another look");
        assert!(matches!(flow.on(Event::Timer), Action::Measure));
        action = flow.on(queued(1_000_000));
    }
    flow.now = flow.core.timer().expect("another look");
    flow.on(Event::Timer);
    assert!(matches!(flow.on(queued(50_000)), Action::Freeze { .. }));
}

#[test]
fn bytes_that_stay_in_their_socket_are_no_queue() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let mut flow = Flow::new(policy, Some(Message::from_server(Some(10_000))));
    flow.on(Event::Attended(true));
    let leg = PathFacts {
        rtt: Some(Duration::from_millis(10)),
        min_rtt: Some(Duration::from_millis(10)),
        rate: 1_000,
        ..PathFacts::default()
    };
    let next_request = PathFacts { unread: 10_000, ..leg };
    assert!(matches!(flow.on(Event::Measured(Pair::new(next_request, leg))), Action::Freeze { .. }));
}

/// A flow whose server has sent 1 MB within a second, over a path of 20 ms, is spliced. Then it sends so many bytes per look.
fn after_a_splice(bytes: u32) -> (Flow, Option<Action>) {
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(1_000_000), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Server, 1_000_000);
    flow.now += SECOND;
    flow.on(Event::Copied);
    let legs = Pair::new(5, 15).map(|ms| {
        let rtt = Some(Duration::from_millis(ms));
        PathFacts { rtt, min_rtt: rtt, rate: 1_000_000, ..PathFacts::default() }
    });
    assert!(matches!(flow.on(Event::Measured(legs)), Action::LookBehind));
    flow.on(Event::LookedBehind(false));
    flow.frozen();
    flow.drained();
    assert!(matches!(flow.on(Event::Committed(Ok(Box::default()))), Action::Keep));
    let mut paths = forwarded();
    paths.server.sent = 1; // in flight
    let mut looks = 0..8;
    let action = looks.find_map(|_| {
        let event = Event::Seen(Box::new(Seen { why: Why::Look, paths: Some(paths), legs: None }));
        let action = flow.on(event);
        paths.server.end = paths.server.end.wrapping_add(bytes);
        flow.now += flow.core.look_within().unwrap_or_default();
        (!matches!(action, Action::Wait)).then_some(action)
    });
    (flow, action)
}

#[test]
fn a_flow_that_becomes_slow_after_its_splice_is_taken_back() {
    let (mut flow, action) = after_a_splice(10_000); // each 80 ms
    assert!(matches!(action, Some(Action::Unsplice { .. })), "{action:?}");
    assert_eq!(flow.shown.refusal, Some(Refusal::Path));
    let at = Switched { was_forwarded: Pair::both(true), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }), "and left alone");
    assert_eq!(flow.core.most(), u64::MAX);

    let (flow, action) = after_a_splice(60_000);
    assert!(action.is_none() && flow.core.look_within().is_none(), "{action:?}");
    assert_eq!((flow.core.state(), flow.shown.refusal), (State::Spliced, None));
}

#[test]
fn a_flow_without_records_gets_them_when_a_splice_is_due() {
    let after = |n| Policy { when: SpliceWhen::AfterBytes(n), ..Policy::default() };
    let mut flow = Flow::new(after(1000), None);
    flow.core = Core::new(None, None, Pair::both(0)).without_records();
    assert!(matches!(flow.on(Event::Attended(true)), Action::Wait));
    flow.core.streams_mut().client.copied = 1000;
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.measured(), Action::Adopt));
    assert_eq!(flow.core.most(), u64::MAX, "bytes are copied on");
    flow.core.streams_mut().client.copied = 5000;
    assert!(matches!(flow.on(Event::Moved), Action::Wait), "it is asked once");
    assert!(matches!(flow.on(Event::Adopted), Action::Measure));
    assert!(matches!(flow.measured(), Action::LookBehind));
    assert!(matches!(flow.on(Event::LookedBehind(false)), Action::Freeze { .. }));

    let mut flow = Flow::new(after(1000), None);
    flow.core = Core::new(None, None, Pair::both(0)).without_records();
    flow.on(Event::Attended(true));
    flow.core.streams_mut().client.copied = 1000;
    flow.on(Event::Copied);
    assert!(matches!(flow.measured(), Action::Adopt));
    let refused = Event::Refused { why: Refusal::Untracked, for_good: true };
    assert!(matches!(flow.on(refused), Action::CopyOn { forget: Some(Refusal::Untracked), .. }));
    assert_eq!(flow.shown.refusal, Some(Refusal::Untracked));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Measure));
    assert!(matches!(flow.measured(), Action::Adopt), "a command asks again");
}
