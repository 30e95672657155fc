//! Commits that are tried in place of a look.

use super::*;

/// A flow whose bytes before the bounds were passed on, and whether a commit could be tried before that, and after it.
fn drained(policy: Policy) -> (Flow, [bool; 2]) {
    let mut flow = Flow::new(Policy { when: SpliceWhen::AtOnce, ..policy }, None);
    flow.on(Event::Attended(true));
    flow.measured();
    let leg = Tuple { remote: ([10, 0, 0, 1], 1).into(), local: ([10, 0, 0, 2], 2).into() };
    let may =
        |flow: &Flow| flow.core.may_commit(flow.now, &flow.policy, Pair::both(&leg), &Switched::default()).is_some();
    flow.frozen();
    let before = may(&flow);
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    let after = may(&flow);
    (flow, [before, after])
}

#[test]
fn it_is_tried_once_all_bytes_are_passed_on() {
    assert_eq!(drained(Policy::default()).1, [false, true]);
    assert_eq!(drained(Policy { hold: true, ..Policy::default() }).1, [false; 2], "held segments go first");
    let (mut flow, _) = drained(Policy::default());
    assert!(matches!(flow.on(Event::Committed(Ok(Box::default()))), Action::Keep));
    assert_eq!((flow.shown.state, flow.shown.splices), (FlowState::Spliced, 1));
}

#[test]
fn what_has_ended_meanwhile_is_not_kept() {
    let (mut flow, _) = drained(Policy::default());
    let closed = Switched { flags: Pair::both(LegFlags::FIN_ACKED), ..Switched::default() };
    ends(&flow.on(Event::Committed(Ok(Box::new(closed)))), EndReason::Closed, true);
    assert_eq!((flow.shown.splices, flow.shown.refusal), (1, None));

    let (mut flow, _) = drained(Policy::default());
    assert!(matches!(flow.on(Event::Committed(Err(SwitchError::Closing))), Action::Unsplice { away: None }));
    let flags = Pair::new(LegFlags::RESET | LegFlags::RESET_IN, LegFlags::RESET);
    let at = Ok(Box::new(Switched { flags, ..Switched::default() }));
    ends(&flow.on(Event::Unspliced { at, client_reset: false }), EndReason::ClientReset, false);
    assert_eq!(flow.shown.refusal, None, "a reset is no refusal");
}

/// Hosts that may both be beyond the other one's window are watched, and taken back if they wait for each other.
#[test]
fn what_was_spliced_whether_or_not_windows_fit_is_watched() {
    let lacking = || {
        let mut paths = forwarded();
        (paths.client.sent, paths.server.sent) = (100, 100);
        paths
    };
    // the windows fit: a copied flow waits for that
    let mut flow = Flow::new(Policy { when: SpliceWhen::AfterBytes(10), ..Policy::default() }, None);
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 10);
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    flow.measured();
    assert!(matches!(flow.on(Event::LookedBehind(false)), Action::Freeze { fit: true }));
    flow.frozen();
    flow.drained();
    assert!(matches!(flow.on(Event::Committed(Ok(Box::default()))), Action::Keep));
    assert_eq!(flow.core.look_within(), None);
    // at once
    let mut flow = Flow::spliced(Policy::default());
    for _ in 0..2 {
        flow.now += flow.core.look_within().expect("it is watched");
        assert!(matches!(flow.seen(Why::Look, lacking()), Action::Wait));
    }
    flow.now += flow.core.look_within().expect("it is watched");
    assert!(matches!(flow.seen(Why::Look, lacking()), Action::Unsplice { .. }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure), "it is spliced again");
    // without sockets
    let mut flow = Flow::released(Policy::default());
    for _ in 0..3 {
        flow.now += flow.core.look_within().expect("it is watched");
        flow.seen(Why::Look, lacking());
    }
    assert!(flow.core.is_returning());
    // fragments
    let mut flow = Flow::spliced(Policy { release_after: None, ..Policy::default() });
    for _ in 0..7 {
        let mut paths = lacking();
        paths.client.flags |= PathFlags::FRAGMENTS;
        flow.now += flow.core.look_within().expect("it is watched");
        assert!(matches!(flow.seen(Why::Look, paths), Action::Wait));
    }
    assert_eq!(flow.core.look_within(), None);
}
