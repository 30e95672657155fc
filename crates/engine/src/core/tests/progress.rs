//! The progress of a flow, as lists show it.

use super::*;

#[test]
fn stretches_are_counted_once() {
    let mut shown = Progress::new(None);
    assert_eq!((shown.forwarded_to(Side::Client, 10), shown.forwarded_to(Side::Client, 15)), (10, 5));
    shown.ends_forwarded(Pair::new(20, 0), Pair::new(true, true));
    assert_eq!(shown.spliced, Pair::new(19, 0), "a FIN is no byte");
}

#[test]
fn lists_show_a_flow_as_copied_unless_it_is_forwarded() {
    for state in [State::Copying, State::Settling, State::Closing, State::Ended] {
        assert_eq!(state.shown(), FlowState::Copying);
    }
    assert_eq!(State::Draining.shown(), FlowState::Draining);
    assert_eq!(State::Spliced.shown(), FlowState::Spliced);
    assert_eq!(State::Released.shown(), FlowState::Released);
    assert_eq!(State::Unsplicing.shown(), FlowState::Unsplicing);
}
