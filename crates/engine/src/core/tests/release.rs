//! Flows that go on without their sockets, and those that cannot.

use super::*;
use crate::types::NotReleased;

#[test]
fn what_waits_for_something_keeps_its_sockets() {
    let message = Flow::new(Policy { when: SpliceWhen::AtOnce, ..Policy::default() }, Some(Message::from_client(None)));
    for (flow, why) in [
        (Flow::spliced(Policy { trigger: Some(Trigger::ClientData), ..Policy::default() }), Some(NotReleased::Trigger)),
        (Flow::spliced(Policy { trigger: Some(Trigger::ServerData), ..Policy::default() }), Some(NotReleased::Trigger)),
        (Flow::spliced(Policy { keeps_sockets: true, ..Policy::default() }), Some(NotReleased::Adopted)),
        (message.into_spliced(), Some(NotReleased::Message)),
        (Flow::spliced(Policy { trigger: Some(Trigger::Idle(SECOND)), ..Policy::default() }), None),
        (Flow::spliced(Policy { release_after: None, ..Policy::default() }), None),
    ] {
        let mut flow = flow;
        assert_eq!(flow.core.keeps_sockets(&flow.policy), why);
        let is_released = matches!(flow.see(Why::Command(Command::Release)), Action::Release);
        assert_eq!(is_released, why.is_none(), "{why:?}");
    }
}

#[test]
fn a_flow_whose_way_leads_elsewhere_goes_without_its_old_sockets() {
    let mut flow = Flow::spliced(Policy::default());
    assert!(matches!(flow.see(Why::Elsewhere { transparent: true }), Action::Wait));
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Release));
    assert_eq!(flow.shown.refusal, Some(Refusal::Unattached));
    assert!(matches!(flow.see(Why::Due), Action::Wait), "no new sockets while the old ones are there");
    // the sockets could not be released: a later release is no request for new ones
    assert!(matches!(flow.on(Event::Released(false)), Action::Wait));
    assert!(matches!(flow.see(Why::Command(Command::Release)), Action::Release));
    assert!(matches!(flow.on(Event::Released(true)), Action::Wait));
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Recreate { force: false }));
    flow.now += flow.policy.drain_limit;
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Recreate { .. }), "the limit stays");
    assert!(matches!(flow.see(Why::Due), Action::Recreate { force: false }), "never by force");
    assert!(matches!(flow.on(Event::Recreated(Err(SwitchError::Busy))), Action::Wait));
    assert!(!flow.core.is_returning());
    assert!(matches!(flow.see(Why::Elsewhere { transparent: false }), Action::Recreate { force: false }));
}
