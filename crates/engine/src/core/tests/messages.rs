//! Flows that relay one message.

use super::*;
use crate::core::control::{COMMIT_AFTER, SHORT_REST};

#[test]
fn a_message_is_spliced_up_to_its_end() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let new = |bytes| Flow::new(policy.clone(), Some(Message::from_server(bytes)));
    // too short, unknown, and long enough
    assert!(matches!(new(Some(9999)).on(Event::Attended(true)), Action::CopyOn { forget: None, .. }));
    assert!(matches!(new(None).on(Event::Attended(true)), Action::Wait));
    assert!(matches!(new(Some(10_000)).on(Event::Attended(true)), Action::Measure));
    let mut flow = new(Some(20_000));
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(flow.measured(), Action::Freeze { fit: true }));
    let leg = Tuple { remote: ([10, 0, 0, 1], 1).into(), local: ([10, 0, 0, 2], 2).into() };
    let limits = Pair::from_fn(|side| flow.core.half(side, leg, &flow.at[side]).limit);
    assert_eq!(limits, Pair::new(Limit::Keep, Limit::Bytes(20_000)));
    let mut flow = new(Some(20_000)).into_spliced();
    assert_eq!(flow.core.release_at(&flow.policy), None);

    for why in [Why::Told(EventKind::LimitReached), Why::Kept, Why::Look] {
        assert!(flow.core.wants_legs(why), "{why:?}");
    }
    assert!(!flow.core.wants_legs(Why::Due) && !Flow::spliced(Policy::default()).core.wants_legs(Why::Look));
    let legs = |end| Some(Switched { end: Pair::new(0, end), ..Switched::default() });
    let mut passed = |end| {
        let seen = Seen { why: Why::Told(EventKind::LimitReached), paths: Some(forwarded()), legs: legs(end) };
        flow.on(Event::Seen(Box::new(seen)))
    };
    assert!(matches!(passed(19_999), Action::Wait), "the event came too early");
    assert!(matches!(passed(20_000), Action::Unsplice { .. }));
    let (end, bound) = (Pair::new(0, 20_000), Pair::new(0, 20_000));
    let phase = Pair::new(Phase::Local, Phase::ToLocal);
    let at = Switched { phase, end, bound, was_forwarded: Pair::new(false, true), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { .. }));
    // the legs part only when everything is acknowledged
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    let at = Switched { phase, ..Switched::default() };
    assert!(matches!(flow.on(Event::Looked(Ok(Box::new(at)))), Action::Wait));
    assert!(flow.core.listens_to(Side::Client) && !flow.core.listens_to(Side::Server));
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
        assert_eq!((flow.shown.copied, flow.core.timer().is_some()), (Pair::new(100, 0), true));
        assert!(matches!(flow.on(Event::Moved), Action::Wait));
        flow
    };
    ends(&settling().on(Event::Stop { leave: false }), EndReason::Stopped, false);
    assert!(matches!(settling().on(Event::Timer), Action::Look));
    assert!(matches!(settling().on(Event::Told), Action::Look));
    ends(&settling().on(Event::Looked(Err(SwitchError::Untracked))), EndReason::Stopped, false);
    // without records, nothing was forwarded: the client's leg is shimmed since an earlier message
    let mut flow =
        Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(Message::from_server(Some(9))));
    flow.core = flow.core.without_records();
    flow.at.client.shimmed = true;
    flow.on(Event::Attended(true));
    assert!(matches!(flow.measured(), Action::Adopt));
    flow.copy(Side::Server, 9);
    ends(&flow.on(Event::Copied), EndReason::MessageRelayed, false);
    let reset = |phase, flags| {
        let at = Switched { phase: Pair::both(phase), flags, ..Switched::default() };
        Event::Looked(Ok(Box::new(at)))
    };
    let (one, by_sender) = (LegFlags::RESET, LegFlags::RESET | LegFlags::RESET_IN);
    ends(&settling().on(reset(Phase::Local, Pair::both(one))), EndReason::ServerReset, false);
    // what was forwarded has arrived, whatever becomes of its sender
    ends(&settling().on(reset(Phase::Local, Pair::new(by_sender, 0))), EndReason::MessageRelayed, false);
    for (left, most) in [(0, 1), (1000, 5)] {
        let mut flow = settling();
        let began = flow.now;
        while flow.now < began + Duration::from_secs(most) {
            assert!(matches!(flow.on(reset(Phase::ToLocal, Pair::new(by_sender, 0))), Action::Measure));
            assert!(matches!(flow.on(failures::outstanding(left)), Action::Wait), "it may still arrive");
            assert!(flow.core.timer() > Some(flow.now));
            flow.now += Duration::from_millis(100);
        }
        flow.on(reset(Phase::ToLocal, Pair::new(by_sender, 0)));
        ends(&flow.on(failures::outstanding(left)), EndReason::ClientReset, false);
    }
    let mut flow = settling();
    flow.now += flow.policy.idle_limit.get();
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

#[test]
fn a_splice_of_a_message_that_has_paid_may_be_tried_again() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    for (forwarded, stays) in [(9_999, true), (10_000, false)] {
        let mut flow = Flow::new(policy.clone(), Some(Message::from_server(Some(40_000)))).into_spliced();
        flow.see(Why::Told(EventKind::Triggered));
        let (end, bound) = (Pair::new(0, forwarded), Pair::new(0, forwarded as u32));
        let at = Switched { end, bound, was_forwarded: Pair::both(true), ..Switched::default() };
        flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false });
        assert_eq!(flow.core.stay, stays);
    }
}

/// The rest of a message whose whole length has been compared with the policy.
#[test]
fn the_rest_of_a_long_message_is_spliced() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let rest = Message::from_server(Some(5000));
    let mut flow = Flow::new(policy.clone(), Some(rest.that_pays()));
    assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
    assert!(matches!(Flow::new(policy, Some(rest)).on(Event::Attended(true)), Action::CopyOn { .. }));
    let never = Policy { when: SpliceWhen::Never, ..Policy::default() };
    assert!(matches!(Flow::new(never, Some(rest.that_pays())).on(Event::Attended(true)), Action::CopyOn { .. }));
}

/// It has passed while the flow drained: the commit is refused, or the data path has taken the flow back already.
#[test]
fn a_message_that_passes_before_its_commit_was_spliced() {
    for error in [SwitchError::Short, SwitchError::Busy] {
        let mut flow = Flow::new(Policy::default(), Some(Message::from_server(Some(1 << 30))));
        assert!(matches!(flow.on(Event::Attended(true)), Action::Measure));
        assert!(matches!(flow.measured(), Action::Freeze { .. }));
        assert!(matches!(flow.frozen(), Action::Wait));
        flow.on(Event::Copied);
        flow.now += COMMIT_AFTER;
        assert!(matches!(flow.drained(), Action::Commit { .. }));
        assert!(matches!(flow.on(Event::Committed(Err(error))), Action::Unsplice { away: None }));
        assert_eq!((flow.shown.splices, flow.shown.refusal), (1, None));
    }
    // not seen before the data path took it back
    for (end, splices) in [(19_999, 0), (20_000, 1)] {
        let mut flow = Flow::new(Policy::default(), Some(Message::from_server(Some(20_000))));
        flow.on(Event::Attended(true));
        flow.measured();
        flow.frozen();
        let at = Switched { end: Pair::new(0, end), ..Switched::default() };
        assert!(matches!(flow.on(Event::Looked(Ok(Box::new(at)))), Action::Unsplice { away: None }));
        assert_eq!((flow.shown.splices, flow.shown.refusal), (splices, None));
    }
}

/// A message whose bytes before the bound were passed on, and what the look after that finds.
fn nearly_passed(bytes: u64) -> (Flow, Action, Action) {
    let mut flow =
        Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(Message::from_server(Some(bytes))));
    flow.on(Event::Attended(true));
    flow.measured();
    assert!(matches!(flow.frozen(), Action::Wait));
    assert!(!flow.core.listens(), "not before the drain is over");
    let (copied, looked) = (flow.on(Event::Copied), flow.drained());
    (flow, copied, looked)
}

/// It has probably passed before it would be worth parking the sockets.
#[test]
fn the_commit_of_a_message_is_put_off() {
    let leg = Tuple { remote: ([10, 0, 0, 1], 1).into(), local: ([10, 0, 0, 2], 2).into() };
    let may =
        |flow: &Flow| flow.core.may_commit(flow.now, &flow.policy, Pair::both(&leg), &Switched::default()).is_some();
    for (bytes, after) in [(SHORT_REST, LOOK_EVERY), (SHORT_REST + 1, COMMIT_AFTER)] {
        let (mut flow, copied, looked) = nearly_passed(bytes);
        assert!(matches!((copied, looked), (Action::Wait, Action::Wait)) && !may(&flow));
        assert_eq!(flow.core.timer(), Some(flow.now + after));
        flow.now += after;
        assert!(may(&flow) && matches!(flow.on(Event::Timer), Action::Look));
        assert!(matches!(flow.drained(), Action::Commit { .. }));
    }
}

/// Nobody has to be woken up for the end of a message where the next one, or its next chunk, reaches a socket that is not parked.
#[test]
fn the_next_bytes_show_that_a_message_has_passed() {
    let found = |end| {
        let phase = Pair::new(Phase::Local, Phase::Forwarding);
        Event::Looked(Ok(Box::new(Switched { phase, end: Pair::new(0, end), ..Switched::default() })))
    };
    let (mut flow, ..) = nearly_passed(20_000);
    assert!(flow.core.listens_to(Side::Client) && flow.core.listens_to(Side::Server));
    assert!(matches!(flow.on(Event::Heard), Action::Look));
    assert!(!flow.core.listens(), "once is enough");
    assert!(matches!(flow.on(found(20_000)), Action::Unsplice { away: None }));
    assert_eq!((flow.shown.splices, flow.shown.refusal), (1, None));
    // the look has found that it is not over, but a splice cannot go on without the receiver's direction
    let (mut flow, ..) = nearly_passed(20_000);
    flow.on(Event::Heard);
    assert!(matches!(flow.on(found(19_999)), Action::Unsplice { away: None }));
    assert_eq!(flow.shown.splices, 0);
}

/// The unsplice tells whether everything is acknowledged: no look is needed after it.
#[test]
fn legs_part_at_once_if_everything_is_acknowledged() {
    for phase in [Phase::Local, Phase::ToLocal] {
        let (mut flow, ..) = nearly_passed(20_000);
        let (end, bound) = (Pair::new(0, 20_000), Pair::new(0, 20_000));
        let at = Switched { end, phase: Pair::both(Phase::Forwarding), ..Switched::default() };
        flow.on(Event::Looked(Ok(Box::new(at))));
        let phase = Pair::new(Phase::Local, phase);
        let at = Switched { phase, end, bound, was_forwarded: Pair::both(true), ..Switched::default() };
        assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
        flow.on(Event::Attended(true));
        let action = flow.on(Event::Copied);
        assert_eq!(is_end(&action, EndReason::MessageRelayed, false), at.is_local(), "{action:?}");
        assert_eq!(matches!(action, Action::Look), !at.is_local());
    }
}

/// The event of the end is lost, or comes before the flow is kept.
#[test]
fn the_end_of_a_message_is_found_by_looking() {
    for why in [Why::Kept, Why::Look] {
        let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
        let mut flow = Flow::new(policy, Some(Message::from_server(Some(20_000)))).into_spliced();
        let legs = Some(Switched { end: Pair::new(0, 20_000), ..Switched::default() });
        let seen = Seen { why, paths: Some(forwarded()), legs };
        assert!(matches!(flow.on(Event::Seen(Box::new(seen))), Action::Unsplice { .. }), "{why:?}");
    }
}

/// The last bytes arrive while the flow is spliced: there is nothing left to forward.
#[test]
fn a_message_that_ends_before_its_splice_is_copied() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let new = |bytes| {
        let mut flow = Flow::new(policy.clone(), Some(Message::from_server(bytes)));
        flow.on(Event::Attended(true));
        flow
    };
    // its sender closes right after the threshold, and some of it is still in hand
    let mut flow = new(None);
    flow.copy(Side::Server, 10_000);
    flow.core.streams_mut().server.took(10);
    flow.at.server.took(10);
    flow.at.server.took(0);
    assert!(matches!(flow.on(Event::Copied), Action::Measure), "not all of it was written");
    assert!(matches!(flow.measured(), Action::CopyOn { forget: None, .. }));
    flow.core.streams_mut().server.gave(10);
    ends(&flow.on(Event::Copied), EndReason::MessageRelayed, false);

    let at = || Switched { phase: Pair::both(Phase::ToForwarding), mss: Pair::both(1460), ..Switched::default() };
    // all of it has arrived before the freeze, and waits in the socket
    let mut flow = new(Some(20_000));
    flow.measured();
    let frozen = Frozen { at: at(), bound: Pair::new(0, 20_000), ..Frozen::default() };
    assert!(matches!(flow.on(Event::Frozen(Ok(Box::new(frozen)))), Action::Unsplice { away: None }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(!flow.core.streams().server.is_draining());
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }), "it is not tried again");

    // it ends while the flow drains
    let mut flow = new(Some(20_000));
    flow.measured();
    flow.frozen();
    let at = Switched { phase: Pair::both(Phase::Forwarding), end: Pair::new(0, 20_000), ..at() };
    assert!(matches!(flow.on(Event::Looked(Ok(Box::new(at)))), Action::Unsplice { away: None }));
}

#[test]
fn bytes_of_a_message_that_were_copied_before_its_splice_count() {
    let policy = Policy { when: SpliceWhen::AfterBytes(10_000), ..Policy::default() };
    let mut flow = Flow::new(policy, Some(Message::from_server(Some(20_000))));
    flow.on(Event::Attended(true));
    assert!(!flow.core.listens(), "its receiver may speak");
    flow.measured();
    flow.frozen();
    flow.copy(Side::Server, 1000);
    flow.now += LOOK_EVERY;
    assert!(matches!(flow.drained(), Action::Commit { .. }));
    flow.on(Event::Committed(Ok(Box::default())));
    flow.see(Why::Told(EventKind::Triggered));
    assert_eq!(flow.core.streams().server.message, Some(19_000));
}

/// There is nothing to splice for, so nothing is refused either, until somebody asks.
#[test]
fn an_empty_message_is_not_refused() {
    let mut flow =
        Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(Message::from_client(Some(0))));
    flow.core.obstacle = Some(Refusal::Loopback);
    assert!(matches!(flow.on(Event::Attended(true)), Action::CopyOn { forget: None, .. }));
    assert_eq!(flow.shown.refusal, None);
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait));
    assert_eq!(flow.shown.refusal, Some(Refusal::Loopback));
}

/// Two streams have the limits that the caller has set.
#[test]
fn only_a_message_sets_limits() {
    let mut flow = Flow::at_once();
    let limits = Pair::new(Limit::Keep, Limit::Bytes(7));
    flow.core.set_limits(limits);
    flow.on(Event::Attended(true));
    assert!(matches!(flow.measured(), Action::Freeze { .. }));
    let leg = Tuple { remote: ([10, 0, 0, 1], 1).into(), local: ([10, 0, 0, 2], 2).into() };
    assert_eq!(Pair::from_fn(|side| flow.core.half(side, leg, &flow.at[side]).limit), limits);
}
