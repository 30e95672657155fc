//! Flows of far clients and near servers: spliced before their first byte, watched, and taken back if that was wrong.

use super::*;

const RTT: Duration = Duration::from_millis(100);
/// Time between two counts of copied bytes.
const COUNTED: Duration = Duration::from_millis(250);

/// A flow without records whose client is 100 ms away.
fn far(policy: Policy) -> Flow {
    let mut flow = Flow::new(policy, None);
    flow.core = Core::new(None, None, Pair::new(300, 0)).without_records().for_far_client();
    flow
}

/// Both legs are measured, and so many bytes from the server wait.
fn facts(server: Duration, unread: u32) -> Event {
    let leg =
        |rtt| PathFacts { rtt: Some(rtt), min_rtt: Some(rtt), rate: 1_000_000, cwnd: 14_600, ..PathFacts::default() };
    Event::Measured(Pair::new(leg(RTT), PathFacts { unread, ..leg(server) }))
}

fn near() -> Event {
    facts(RTT / 200, 0)
}

/// Such a flow, when it is being adopted: nothing is copied.
fn starting() -> Flow {
    let mut flow = far(Policy::default());
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(flow.on(near()), Action::Adopt));
    assert!(!flow.core.copies(), "the server must not answer before the splice");
    flow
}

#[test]
fn a_near_server_of_a_far_client_is_spliced_before_its_first_byte() {
    let mut flow = starting();
    assert!(matches!(flow.on(Event::Adopted), Action::Measure));
    assert!(matches!(flow.on(near()), Action::Freeze { fit: false }));
    assert!(matches!(flow.frozen(), Action::Wait));
    assert!(flow.core.copies(), "what was in hand goes on in the drain");
    flow.drained();
    assert!(matches!(flow.on(Event::Committed(Ok(Box::default()))), Action::Keep));
    let found = flow.shown.path_finding().expect("the numbers that have decided");
    assert_eq!((found.cause, found.rtt_us, flow.shown.refusal), (PathCause::Far, Pair::new(100_000, 500), None));

    // it was busy, and tries again
    let mut flow = starting();
    flow.on(Event::Adopted);
    flow.on(near());
    assert!(matches!(flow.on(Event::Frozen(Err(SwitchError::Busy))), Action::Wait));
    flow.now = flow.core.timer().expect("it tries again");
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    assert!(!flow.core.copies());
}

#[test]
fn others_are_copied_first() {
    let counts = |mut flow: Flow, event: Event| {
        assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
        assert!(matches!(flow.on(event), Action::Wait));
        assert_eq!((flow.core.copies(), flow.core.most()), (true, Policy::PAYS_FROM));
        assert_eq!(flow.shown.path_finding(), None);
    };
    counts(far(Policy::default()), facts(RTT / 10, 0)); // a server that is not near
    counts(far(Policy::default()), facts(RTT / 200, 1)); // one that has spoken
    let mut heard = far(Policy::default());
    heard.at.server.took(1);
    counts(heard, near());
    let trigger = Policy { trigger: Some(Trigger::ClientData), ..Policy::default() };
    counts(far(trigger), near());

    // a policy that says when is followed, and one that asks for no path
    for policy in [
        Policy { when: SpliceWhen::AfterBytes(1000), ..Policy::default() },
        Policy { path: PathRule::Any, ..Policy::default() },
    ] {
        assert!(matches!(far(policy).on(Event::Attended(true)), Action::Wait));
    }
    let message = |length| {
        let mut flow = far(Policy::default());
        flow.core = Core::new(Some(Message::from_server(length)), None, Pair::both(0)).for_far_client();
        flow
    };
    assert!(matches!(message(None).on(Event::Attended(true)), Action::Wait));
    // one that is long enough is judged at once, as ever
    let mut long = message(Some(2 * Policy::PAYS_FROM));
    assert!(matches!(long.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(long.on(facts(RTT, 0)), Action::Freeze { .. }));
}

#[test]
fn what_cannot_start_with_a_splice_may_have_one_later() {
    let refused = || Event::Refused { why: Refusal::TableFull, for_good: true };
    let mut flow = starting();
    assert!(matches!(flow.on(refused()), Action::Wait));
    assert_eq!((flow.core.copies(), flow.shown.refusal, flow.core.most()), (true, None, Policy::PAYS_FROM));
    // it comes when the flow is copied already
    let mut flow = starting();
    flow.now += RTT;
    flow.on(Event::Timer);
    assert!(matches!(flow.on(refused()), Action::Wait));
    flow.copy(Side::Server, 40_000);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    assert!(matches!(flow.on(facts(RTT, 0)), Action::HoldBack(_)), "1 MB first: both legs are long");
    // one that cannot be frozen
    let mut flow = starting();
    flow.on(Event::Adopted);
    flow.on(near());
    flow.on(Event::Frozen(Err(SwitchError::Mismatch)));
    assert_eq!((flow.core.copies(), flow.shown.refusal), (true, Some(Refusal::Mismatch)));
    assert_eq!(flow.shown.path_finding(), None, "it was not spliced");
}

#[test]
fn nobody_waits_long_for_a_start() {
    let mut flow = starting();
    flow.now += RTT / 4;
    assert_eq!(flow.core.timer(), Some(flow.now));
    assert!(matches!(flow.on(Event::Timer), Action::Wait));
    assert_eq!((flow.core.copies(), flow.shown.path_finding()), (true, None));
    assert!(matches!(flow.on(Event::Adopted), Action::Wait), "too late");
    assert_eq!(flow.core.most(), Policy::PAYS_FROM);
    // a command does not wait either
    let mut flow = starting();
    flow.on(Event::Command(Command::Unsplice));
    assert_eq!((flow.core.copies(), flow.core.most()), (true, u64::MAX));
    let mut flow = starting();
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait), "it is being adopted");
    assert!(matches!(flow.on(Event::Adopted), Action::Measure));
}

/// A flow that was taken back, since its server has sent 1 MB in its first round trips, and then 10 KB in each.
fn slow() -> Flow {
    let mut flow = starting();
    flow.on(Event::Adopted);
    flow.on(near());
    flow.frozen();
    flow.drained();
    assert!(matches!(flow.on(Event::Committed(Ok(Box::default()))), Action::Keep));
    let mut paths = forwarded();
    paths.server.sent = 10_000; // in flight
    for bytes in [0, 1_000_000, 20_000, 20_000] {
        paths.server.end = paths.server.end.wrapping_add(bytes);
        flow.now += flow.core.look_within().expect("it is watched");
        let action = flow.seen(Why::Look, paths);
        if matches!(action, Action::Unsplice { .. }) {
            assert_eq!(flow.shown.path_finding().map(|found| found.cause), Some(PathCause::Rate));
            assert!(matches!(flow.taken_back(), Action::Attend));
            assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { .. }));
            return flow;
        }
    }
    panic!("it is not taken back")
}

#[test]
fn a_server_is_slow_only_if_copying_is_faster() {
    // 20 KB in each look of 200 ms; ten round trips are a second
    // a small window carries 233 KB in a second
    for (copied, outstanding, is_slow) in [(1_000_000, 0, true), (1_000_000, 200_000, false), (700_000, 0, false)] {
        let mut flow = slow();
        flow.copy(Side::Server, copied);
        flow.on(Event::Moved);
        let measures = (0..10).any(|_| {
            flow.now += COUNTED;
            matches!(flow.on(Event::Timer), Action::Measure)
        });
        assert!(measures && !flow.core.take_was_slow());
        let client = PathFacts { outstanding, ..PathFacts::default() };
        assert!(matches!(flow.on(Event::Measured(Pair::new(client, PathFacts::default()))), Action::Wait));
        assert_eq!(flow.core.take_was_slow(), is_slow, "{copied} {outstanding}");
        assert!(!flow.core.take_was_slow() && !matches!(flow.on(Event::Timer), Action::Measure), "once");
    }
}
