//! Connections that fail: what their hosts have sent before goes on before the reset does.

use super::*;
use crate::types::Message;

pub(super) fn outstanding(bytes: u32) -> Event {
    Event::Measured(Pair::both(PathFacts { outstanding: bytes, ..PathFacts::default() }))
}

/// The client has not acknowledged what was forwarded from the server.
fn still_forwarded() -> Event {
    Event::Looked(Ok(Box::new(Switched { phase: Pair::new(Phase::Local, Phase::ToLocal), ..Switched::default() })))
}

fn next(flow: &Flow, from: Side) -> Next {
    flow.core.streams()[from].next(&flow.at[from], &flow.at[from.other()], u64::MAX)
}

/// One leg was reset by its host, and the other host does not know of it.
fn reset_by_server() -> Box<Switched> {
    Box::new(Switched { flags: Pair::new(0, LegFlags::RESET | LegFlags::RESET_IN), ..Switched::default() })
}

fn copying() -> Flow {
    let mut flow = Flow::new(Policy::default(), None);
    assert!(matches!(flow.on(Event::Attended(true)), Action::Wait));
    flow
}

fn draining() -> Flow {
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.measured();
    flow.frozen();
    flow
}

/// Goes on from where the server has failed: its last bytes are read, and acknowledged.
fn last_bytes_go_on(flow: &mut Flow) {
    assert_eq!((next(flow, Side::Client), next(flow, Side::Server)), (Next::Read(u64::MAX), Next::Read(u64::MAX)));
    assert!(flow.core.streams().client.discards(), "the client may have to send before it listens");
    flow.copy(Side::Server, 1000);
    assert!(matches!(flow.on(Event::Moved), Action::Wait));
    flow.at.server.took(0); // the socket reports a failure only once, and then the end of the stream
    assert_eq!(next(flow, Side::Server), Next::Done, "the client is shown no end");
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    if !flow.at.client.shimmed {
        assert!(matches!(flow.on(outstanding(1000)), Action::Wait));
        assert!(flow.core.copies() && flow.core.timer() > Some(flow.now));
        assert!(matches!(flow.on(Event::Timer), Action::Measure));
        ends(&flow.on(outstanding(0)), EndReason::ServerReset, false);
        return assert_eq!(flow.shown.copied.server, 1000);
    }
    // of what was forwarded, some may be under way
    for left in [1000, 0] {
        assert!(matches!(flow.on(outstanding(left)), Action::Look));
        assert!(matches!(flow.on(still_forwarded()), Action::Wait));
        assert!(flow.core.copies() && flow.core.timer() > Some(flow.now));
        assert!(matches!(flow.on(Event::Timer), Action::Measure));
    }
    assert!(matches!(flow.on(outstanding(0)), Action::Look));
    ends(&flow.on(Event::Looked(Ok(Box::default()))), EndReason::ServerReset, false);
    assert_eq!(flow.shown.copied.server, 1000);
}

#[test]
fn what_came_before_a_failure_is_read_and_acknowledged_first() {
    let mut flow = copying();
    assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::HoldBack(_)));
    last_bytes_go_on(&mut flow);
    // nothing is written for it any more
    let mut flow = copying();
    flow.at.client.took(10);
    flow.core.streams_mut().client.took(10);
    flow.on(Event::Failed(Side::Server));
    last_bytes_go_on(&mut flow);
    // the end was read already, and passed on
    let mut flow = copying();
    flow.at.server.took(0);
    flow.at.client.closed();
    flow.on(Event::Failed(Side::Server));
    assert!(matches!(flow.on(Event::Copied), Action::Measure));
    ends(&flow.on(outstanding(0)), EndReason::ServerReset, false);
}

#[test]
fn a_failure_in_a_drain_takes_it_back_first() {
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::Unsplice { away: None }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::HoldBack(_)));
    last_bytes_go_on(&mut flow);
    // the data path knows it first
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Looked(Ok(reset_by_server()))), Action::Unsplice { away: None }));
    let event = Event::Unspliced { at: Ok(reset_by_server()), client_reset: false };
    assert!(matches!(flow.on(event), Action::Attend));
    assert!(matches!(flow.on(Event::Attended(true)), Action::HoldBack(_)));
    last_bytes_go_on(&mut flow);
}

#[test]
fn a_failed_flow_ends_if_nobody_takes_what_is_left() {
    // the other host fails, too
    let mut flow = copying();
    flow.on(Event::Failed(Side::Server));
    ends(&flow.on(Event::Failed(Side::Client)), EndReason::ServerReset, false);
    // the socket has not noticed that its host is gone
    let mut flow = copying();
    flow.on(Event::Failed(Side::Server));
    flow.now = flow.core.timer().expect("it does not wait for ever");
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    // the other one acknowledges nothing, or ever less
    flow.on(outstanding(1000));
    flow.now += crate::lingering::LINGER / 2;
    flow.on(outstanding(500));
    flow.now += crate::lingering::LINGER / 2;
    assert!(matches!(flow.on(outstanding(500)), Action::Wait));
    flow.now += crate::lingering::LINGER / 2;
    ends(&flow.on(outstanding(500)), EndReason::ServerReset, false);
    // it is never spliced again
    let mut flow = copying();
    flow.on(Event::Failed(Side::Server));
    assert!(matches!(flow.on(Event::Command(Command::Splice)), Action::Wait));
    assert_eq!(flow.core.most(), u64::MAX);
    // a stop ends it at once
    ends(&flow.on(Event::Stop { leave: true }), EndReason::Stopped, false);
    let mut flow = copying();
    flow.on(Event::Failed(Side::Server));
    flow.at.server.took(0);
    flow.on(Event::Copied);
    ends(&flow.on(Event::Stop { leave: true }), EndReason::Stopped, false);
}

/// The answer to an upload may be in the socket of a server that has reset the connection: the caller reads it.
#[test]
fn a_receiver_that_was_to_speak_is_left_to_the_caller() {
    let upload = || Message::from_client(Some(100_000)).until_receiver_speaks();
    let mut flow = Flow::new(Policy::default(), Some(upload()));
    flow.on(Event::Attended(true));
    flow.copy(Side::Client, 10);
    ends(&flow.on(Event::Failed(Side::Server)), EndReason::MessageRelayed, false);
    assert!(flow.core.receiver_failed());

    let draining = || {
        let mut flow = Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(upload()));
        flow.on(Event::Attended(true));
        flow.measured();
        flow.frozen();
        flow
    };
    let mut flow = draining();
    assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::Unsplice { away: None }));
    assert!(matches!(flow.taken_back(), Action::Attend));
    ends(&flow.on(Event::Attended(true)), EndReason::MessageRelayed, false);
    let mut flow = draining();
    flow.on(Event::Looked(Ok(reset_by_server())));
    flow.on(Event::Unspliced { at: Ok(reset_by_server()), client_reset: false });
    ends(&flow.on(Event::Attended(true)), EndReason::MessageRelayed, false);
    assert!(flow.core.receiver_failed());

    // a receiver that has nothing to say, and a sender
    let mut flow = Flow::new(Policy::default(), Some(Message::from_server(None)));
    flow.on(Event::Attended(true));
    ends(&flow.on(Event::Failed(Side::Client)), EndReason::ClientReset, false);
    let mut flow = Flow::new(Policy::default(), Some(Message::from_server(Some(2000))));
    flow.on(Event::Attended(true));
    assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::HoldBack(_)));
    flow.copy(Side::Server, 1000);
    assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::Measure), "it has not come whole");
    ends(&flow.on(outstanding(0)), EndReason::ServerReset, false);
    let mut flow = Flow::new(Policy::default(), Some(Message::from_server(Some(2000))));
    flow.on(Event::Attended(true));
    flow.on(Event::Failed(Side::Server));
    flow.copy(Side::Server, 2000);
    ends(&flow.on(Event::Copied), EndReason::MessageRelayed, false);
}

/// What the data path has dropped beyond the end of a message will arrive again.
#[test]
fn more_than_the_message_is_reported() {
    for (flags, excess) in [(0, false), (LegFlags::EXCESS, true)] {
        let message = Message::from_server(Some(100_000));
        let mut flow = Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(message));
        flow.on(Event::Attended(true));
        flow.measured();
        flow.frozen();
        let at = |phase| Switched {
            phase: Pair::both(phase),
            end: Pair::new(0, 100_000),
            bound: Pair::new(0, 100_000),
            was_forwarded: Pair::both(true),
            flags: Pair::new(0, flags),
            ..Switched::default()
        };
        flow.on(Event::Copied);
        let passed = flow.on(Event::Looked(Ok(Box::new(at(Phase::Forwarding)))));
        assert!(matches!(passed, Action::Unsplice { .. }), "{passed:?}");
        let unspliced = Event::Unspliced { at: Ok(Box::new(at(Phase::Local))), client_reset: false };
        assert!(matches!(flow.on(unspliced), Action::Attend));
        flow.on(Event::Attended(true));
        ends(&flow.on(Event::Copied), EndReason::MessageRelayed, false);
        assert_eq!(flow.core.has_excess(), excess);
    }
}

/// Bytes that were forwarded are lost, and their sender is gone: nobody sends them again, and what the socket has sent after them
/// is not acknowledged either.
#[test]
fn forwarded_bytes_that_are_lost_do_not_delay_a_reset_for_long() {
    for (left, most) in [(0, 1), (1000, 5)] {
        let mut flow = copying();
        flow.at.client.shimmed = true;
        flow.at.server.shimmed = true;
        flow.on(Event::Failed(Side::Server));
        flow.at.server.took(0);
        assert!(matches!(flow.on(Event::Copied), Action::Measure));
        let began = flow.now;
        while flow.now < began + Duration::from_secs(most) {
            assert!(matches!(flow.on(outstanding(left)), Action::Look));
            assert!(matches!(flow.on(still_forwarded()), Action::Wait));
            flow.now += Duration::from_millis(100);
        }
        assert!(matches!(flow.on(outstanding(left)), Action::Look));
        ends(&flow.on(still_forwarded()), EndReason::ServerReset, false);
    }
}

/// The event that says how much a drain has forwarded may come after a look has found another connection.
#[test]
fn a_flow_that_is_replaced_in_a_drain_is_counted_as_forwarded() {
    let mut flow = Flow::at_once();
    flow.on(Event::Attended(true));
    flow.measured();
    flow.frozen();
    let other = || Event::Looked(Err(SwitchError::Other));
    assert!(matches!(flow.on(other()), Action::Wait));
    assert!(matches!(flow.on(Event::Told), Action::Look));
    flow.now = flow.core.timer().expect("it looks again");
    ends(&flow.on(other()), EndReason::Closed, true);
    assert_eq!((flow.shown.splices, flow.shown.refusal), (1, None));
}

/// The client has not acknowledged what was forwarded from the server, which has reset its connection: nobody sends it again.
fn lost_by_server() -> Event {
    let at = Switched { phase: Pair::new(Phase::Local, Phase::ToLocal), ..*reset_by_server() };
    Event::Looked(Ok(Box::new(at)))
}

/// A flow that was taken back before everything that was forwarded from the server had been acknowledged.
fn unsettled() -> Flow {
    let mut flow = Flow::spliced(Policy::default());
    assert!(matches!(flow.see(Why::Command(Command::Unsplice)), Action::Unsplice { .. }));
    let at = Switched { phase: Pair::new(Phase::Local, Phase::ToLocal), ..Switched::default() };
    assert!(matches!(flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false }), Action::Attend));
    flow.on(Event::Attended(true));
    flow
}

/// Looks until the flow ends, and returns how, and after what time. `look`: what each look finds.
fn looked(flow: &mut Flow, look: impl Fn() -> Event) -> (Action, Duration) {
    let began = flow.now;
    loop {
        flow.now = flow.core.timer().expect("it does not wait for ever").max(flow.now);
        assert!(matches!(flow.on(Event::Timer), Action::Look));
        let action = flow.on(look());
        if !matches!(action, Action::Wait) {
            return (action, flow.now - began);
        }
    }
}

/// Both FINs were exchanged with the server, so its socket is in TIME-WAIT and does not report the reset. The client lacks bytes that
/// were forwarded before: neither its socket nor anybody else can deliver them.
#[test]
fn a_reset_behind_lost_bytes_reaches_the_other_host_though_both_streams_have_ended() {
    let closing = || {
        let mut flow = unsettled();
        flow.close();
        assert!(matches!(flow.on(Event::Copied), Action::Look));
        flow
    };
    let mut flow = closing();
    let (end, after) = looked(&mut flow, lost_by_server);
    ends(&end, EndReason::ServerReset, false);
    assert!((5 * SECOND..7 * SECOND).contains(&after), "{after:?}");
    // an event tells of the reset; what was under way arrives
    let mut flow = closing();
    assert!(matches!(flow.on(still_forwarded()), Action::Wait));
    assert!(matches!(flow.on(Event::Told), Action::Look));
    assert!(matches!(flow.on(lost_by_server()), Action::Wait));
    flow.now += SECOND;
    ends(&flow.on(Event::Looked(Ok(reset_by_server()))), EndReason::Closed, false);
    // no reset: the client takes its time
    let mut flow = closing();
    assert!(matches!(flow.on(Event::Stop { leave: false }), Action::Wait), "it is about to end");
    let (end, after) = looked(&mut flow, still_forwarded);
    ends(&end, EndReason::Idle, false);
    assert!(after >= flow.policy.idle_limit.get());
    // commands, a stop, and connections that are gone
    ends(&closing().on(Event::Command(Command::Reset)), EndReason::Stopped, false);
    let mut flow = closing();
    flow.now += crate::lingering::LINGER;
    assert!(flow.core.takes_commands() && flow.core.heeds_stop(flow.now));
    ends(&flow.on(Event::Stop { leave: false }), EndReason::Stopped, false);
    ends(&closing().on(Event::Looked(Err(SwitchError::Other))), EndReason::Closed, false);
    assert!(matches!(closing().on(Event::Looked(Err(SwitchError::Run(12)))), Action::Wait));
    let both = Switched { flags: Pair::both(LegFlags::RESET), ..Switched::default() };
    ends(&closing().on(Event::Looked(Ok(Box::new(both)))), EndReason::ServerReset, false);
}

/// The client takes nothing, since it lacks forwarded bytes, so the server's last bytes stay in hand, and its socket is not read.
#[test]
fn a_reset_behind_lost_bytes_reaches_the_other_host_though_bytes_are_in_hand() {
    for failed in [false, true] {
        let mut flow = unsettled();
        flow.core.streams_mut().server.took(10);
        flow.at.server.took(10);
        if failed {
            assert!(matches!(flow.on(Event::Failed(Side::Server)), Action::HoldBack(_)));
        }
        let began = flow.now;
        let end = loop {
            flow.now = flow.core.timer().expect("it does not wait for ever").max(flow.now);
            match flow.on(Event::Timer) {
                Action::Look => match flow.on(lost_by_server()) {
                    Action::Wait => {}
                    end => break end,
                },
                action => assert!(matches!(action, Action::Wait), "{action:?}"),
            }
        };
        ends(&end, EndReason::ServerReset, false);
        assert!((5 * SECOND..8 * SECOND).contains(&(flow.now - began)), "{failed}");
    }
    // what was under way arrives, and nothing is looked for any more
    let mut flow = unsettled();
    assert!(flow.core.settles_at().is_some_and(|at| Some(at) == flow.core.timer()));
    flow.now += SECOND;
    assert!(matches!(flow.on(Event::Timer), Action::Look));
    assert!(matches!(flow.on(Event::Looked(Err(SwitchError::Other))), Action::Wait), "the sockets report it");
    assert!(matches!(flow.on(Event::Looked(Ok(Box::default()))), Action::Wait));
    assert_eq!(flow.core.settles_at(), None);
    flow.close();
    ends(&flow.on(Event::Copied), EndReason::Closed, false);
}

/// A FIN was forwarded past the sockets, and the host that would have to acknowledge it is gone. The other one gets what its socket
/// still has.
#[test]
fn a_host_that_is_gone_acknowledges_no_end() {
    let mut flow = Flow::spliced(Policy::default());
    flow.see(Why::Command(Command::Unsplice));
    let at = Switched {
        end: Pair::new(1, 0),
        bound: Pair::new(1, 0),
        was_forwarded: Pair::new(true, false),
        fin: Pair::new(true, false),
        phase: Pair::new(Phase::ToLocal, Phase::Local),
        ..Switched::default()
    };
    flow.on(Event::Unspliced { at: Ok(Box::new(at)), client_reset: false });
    flow.on(Event::Attended(true));
    flow.at.server.took(0);
    flow.at.client.closed();
    assert!(matches!(flow.on(Event::Copied), Action::Look));
    assert!(matches!(flow.on(Event::Looked(Ok(reset_by_server()))), Action::Measure));
    assert!(matches!(flow.on(outstanding(1000)), Action::Look));
    assert!(matches!(flow.on(Event::Looked(Ok(reset_by_server()))), Action::Wait));
    flow.now += crate::lingering::LINGER / 2;
    assert!(matches!(flow.on(Event::Timer), Action::Measure));
    assert!(matches!(flow.on(outstanding(0)), Action::Look));
    ends(&flow.on(Event::Looked(Ok(reset_by_server()))), EndReason::ServerReset, false);
}
