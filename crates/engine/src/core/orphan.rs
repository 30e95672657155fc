//! What happens to a flow of an earlier process, which has no sockets in this one. Like [`Core`](super::Core),
//! it does no I/O: an [`Event`] goes in, an [`Action`] comes out, and the answer to an action is the next event.
//!
//! | the flow is | result |
//! | --- | --- |
//! | forwarded | [`Found::Live`]; [`Found::Gone`] after the idle limit |
//! | over: both ends are acknowledged, or a host has reset it | [`Found::Over`] |
//! | draining: the kernel has its sockets, and sends what they hold | [`Found::Live`], and committed when it has drained |
//! | draining, but both hosts have been silent for a minute | taken back: [`Found::Deserted`] |
//! | draining, and its message has passed | taken back: [`Found::Live`] until all is acknowledged |
//! | reset or in control mode | [`Found::Deserted`] |
//! | removed | [`Found::Gone`] |

use super::{Time, forwarded::end_of, was_reset};
use crate::{
    lingering::LINGER,
    types::{EndReason, FlowState},
};
use longsplice_datapath::{Pair, PathFlags, PathView, SwitchError, Switched};
use std::{mem::take, time::Duration};

/// What a look at an orphan shows, and the answers to actions.
#[derive(Clone, Debug)]
pub enum Event {
    /// A look begins: the path entries, if they still exist.
    Paths(Option<Pair<PathView>>),
    /// The answer to [`Action::LookAtLegs`].
    Legs {
        /// Phases and positions. `None`: a record is missing.
        at: Option<Box<Switched>>,
        /// When each host was last heard. `None`: its record is missing.
        heard: Pair<Option<Time>>,
    },
    /// The answer to [`Action::Commit`].
    Committed(Result<(), SwitchError>),
    /// The answer to [`Action::Unsplice`], whether or not it was possible.
    Unspliced,
}

/// What is to be done about an orphan.
#[derive(Clone, Debug)]
pub enum Action {
    /// Read the records of the legs.
    LookAtLegs,
    /// Commit the flow, which has drained.
    Commit(Box<Switched>),
    /// Take the flow back.
    Unsplice,
    /// Nothing: the look is over.
    Done(Found),
}

/// The result of a look at an orphan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Forwarded, or switching to forwarding. To be looked at again.
    Live,
    /// Ended by both hosts, or reset. Its entries linger.
    Over(EndReason),
    /// In control mode, without sockets. Its hosts are to be told.
    Deserted,
    /// Idle for too long, or removed. Whatever is left is to be reset.
    Gone(EndReason),
}

/// The state of an orphan between two looks.
#[derive(Clone, Debug)]
pub struct Watch {
    state: FlowState,
    /// Changes with every byte: wraps, end and acknowledgement of each direction.
    fingerprint: Pair<(u16, u32, u32)>,
    /// When the fingerprint was first seen.
    since: Time,
    /// Its message had passed before it could be committed: it is taken back.
    passed: bool,
}

impl Watch {
    /// Begins to watch a flow at `now`.
    pub fn new(now: Time) -> Watch {
        Watch { state: FlowState::Released, fingerprint: Pair::default(), since: now, passed: false }
    }

    /// Returns the state to be shown.
    pub fn state(&self) -> FlowState {
        self.state
    }

    /// Takes the next event. A flow is reset after the time `idle` without a byte.
    pub fn on(&mut self, now: Time, idle: Duration, event: Event) -> Action {
        match event {
            Event::Paths(None) | Event::Legs { at: None, heard: _ } => Action::Done(Found::Gone(EndReason::Lost)),
            Event::Paths(Some(paths)) => match end_of(&paths) {
                Some(how) => Action::Done(Found::Over(how)),
                None if is_forwarded(&paths) => Action::Done(self.forwarded(now, idle, &paths)),
                None => Action::LookAtLegs,
            },
            Event::Legs { at: Some(at), heard } => self.switching(now, at, heard),
            Event::Committed(Ok(())) => {
                self.state = FlowState::Released;
                Action::Done(Found::Live)
            }
            // the data path has taken it back just now
            Event::Committed(Err(SwitchError::Busy)) => Action::Done(Found::Live),
            // no segment will reach its limit, at which the data path would take it back
            Event::Committed(Err(SwitchError::Short)) => {
                self.passed = true;
                Action::Unsplice
            }
            Event::Unspliced if take(&mut self.passed) => Action::Done(Found::Live),
            Event::Committed(Err(
                SwitchError::Untracked
                | SwitchError::Closing
                | SwitchError::Fragments
                | SwitchError::Mismatch
                | SwitchError::Full
                | SwitchError::Window
                | SwitchError::Silent
                | SwitchError::Options
                | SwitchError::Other
                | SwitchError::Run(_),
            ))
            | Event::Unspliced => Action::Done(Found::Deserted),
        }
    }

    fn forwarded(&mut self, now: Time, idle: Duration, paths: &Pair<PathView>) -> Found {
        self.state = FlowState::Released;
        let fingerprint = paths.each_ref().map(|p| (p.wraps, p.end, p.max_ack));
        if fingerprint != self.fingerprint {
            (self.fingerprint, self.since) = (fingerprint, now);
        }
        if now.saturating_sub(self.since) < idle { Found::Live } else { Found::Gone(EndReason::Idle) }
    }

    /// Decides about a flow that is not in forwarding mode: its process died during a switch, or a limit has taken it back.
    fn switching(&mut self, now: Time, at: Box<Switched>, heard: Pair<Option<Time>>) -> Action {
        if was_reset(&at) || at.is_local() {
            return Action::Done(Found::Deserted);
        }
        self.state = FlowState::Draining;
        if at.is_drained() {
            return Action::Commit(at);
        }
        // the kernel has its sockets, and drains on
        let is_under_way = at.phase.iter().any(|phase| phase.is_switching());
        if is_under_way && !heard.iter().all(|heard| is_silent(now, *heard)) {
            return Action::Done(Found::Live);
        }
        Action::Unsplice
    }
}

fn is_forwarded(paths: &Pair<PathView>) -> bool {
    paths.iter().all(|p| p.flags & PathFlags::SPLICED != 0)
}

/// Returns whether nothing has arrived for so long that no last segment needs a leg's entries any more.
pub(crate) fn is_silent(now: Time, heard: Option<Time>) -> bool {
    heard.is_none_or(|heard| heard < now.saturating_sub(LINGER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longsplice_datapath::{LegFlags, Phase};

    const NOW: Time = Time::from_secs(1000);
    const IDLE: Duration = Duration::from_secs(100);

    fn entry(flags: u16, end: u32) -> PathView {
        let mut path = PathView::default();
        (path.flags, path.end) = (flags, end);
        path
    }

    fn paths(flags: Pair<u16>) -> Event {
        Event::Paths(Some(flags.map(|flags| entry(flags, 0))))
    }

    fn legs(phase: Phase, flags: u32, heard: Time) -> Event {
        let at = Switched { phase: Pair::both(phase), flags: Pair::both(flags), ..Switched::default() };
        Event::Legs { at: Some(Box::new(at)), heard: Pair::both(Some(heard)) }
    }

    fn found(action: &Action) -> Option<Found> {
        match action {
            Action::Done(found) => Some(*found),
            Action::LookAtLegs | Action::Commit(_) | Action::Unsplice => None,
        }
    }

    fn first(event: Event) -> (Action, FlowState) {
        let mut watch = Watch::new(NOW);
        (watch.on(NOW, IDLE, event), watch.state())
    }

    #[test]
    fn the_path_entries_show_what_has_ended() {
        let (spliced, acked) = (PathFlags::SPLICED, PathFlags::SPLICED | PathFlags::FIN_ACKED);
        assert_eq!(found(&first(Event::Paths(None)).0), Some(Found::Gone(EndReason::Lost)));
        assert_eq!(found(&first(paths(Pair::both(spliced))).0), Some(Found::Live));
        assert_eq!(found(&first(paths(Pair::new(spliced, acked))).0), Some(Found::Live), "half closed");
        assert_eq!(found(&first(paths(Pair::both(acked))).0), Some(Found::Over(EndReason::Closed)));
        let reset = paths(Pair::new(spliced | PathFlags::DEAD, spliced));
        assert_eq!(found(&first(reset).0), Some(Found::Over(EndReason::ServerReset)));
        assert!(matches!(first(paths(Pair::new(spliced, 0))).0, Action::LookAtLegs));
        assert!(matches!(first(paths(Pair::both(0))).0, Action::LookAtLegs));
    }

    #[test]
    fn a_forwarded_flow_is_idle_when_no_byte_has_passed() {
        let mut watch = Watch::new(NOW);
        let at = |end| Event::Paths(Some(Pair::both(entry(PathFlags::SPLICED, end))));
        assert_eq!(found(&watch.on(NOW, IDLE, at(1))), Some(Found::Live));
        assert_eq!(found(&watch.on(NOW + IDLE / 2, IDLE, at(2))), Some(Found::Live));
        assert_eq!(found(&watch.on(NOW + IDLE, IDLE, at(2))), Some(Found::Live));
        assert_eq!(found(&watch.on(NOW + IDLE * 3 / 2, IDLE, at(2))), Some(Found::Gone(EndReason::Idle)));
    }

    #[test]
    fn a_drain_goes_on_while_a_host_is_heard() {
        let (draining, state) = first(legs(Phase::ToForwarding, 0, NOW));
        assert_eq!((found(&draining), state), (Some(Found::Live), FlowState::Draining));
        assert_eq!(found(&first(legs(Phase::ToForwarding, 0, NOW - LINGER)).0), Some(Found::Live));
        let long_ago = NOW - LINGER - Duration::from_nanos(1);
        assert!(matches!(first(legs(Phase::ToForwarding, 0, long_ago)).0, Action::Unsplice));
        let held = first(legs(Phase::Forwarding, LegFlags::HOLD, NOW)).0;
        assert!(matches!(held, Action::Unsplice), "the segments were held by the process that died");
        assert_eq!(found(&first(Event::Unspliced).0), Some(Found::Deserted));
    }

    #[test]
    fn what_has_drained_is_committed() {
        let mut watch = Watch::new(NOW);
        assert!(matches!(watch.on(NOW, IDLE, legs(Phase::Forwarding, 0, NOW)), Action::Commit(_)));
        assert_eq!(watch.state(), FlowState::Draining);
        assert_eq!(found(&watch.on(NOW, IDLE, Event::Committed(Err(SwitchError::Busy)))), Some(Found::Live));
        assert_eq!(found(&watch.on(NOW, IDLE, Event::Committed(Err(SwitchError::Full)))), Some(Found::Deserted));
        assert_eq!(found(&watch.on(NOW, IDLE, Event::Committed(Ok(())))), Some(Found::Live));
        assert_eq!(watch.state(), FlowState::Released);
    }

    #[test]
    fn a_message_that_has_passed_is_acknowledged_before_its_hosts_are_told() {
        let mut watch = Watch::new(NOW);
        watch.on(NOW, IDLE, legs(Phase::Forwarding, 0, NOW));
        assert!(matches!(watch.on(NOW, IDLE, Event::Committed(Err(SwitchError::Short))), Action::Unsplice));
        assert_eq!(found(&watch.on(NOW, IDLE, Event::Unspliced)), Some(Found::Live));
        assert_eq!(found(&watch.on(NOW, IDLE, legs(Phase::ToLocal, 0, NOW))), Some(Found::Live));
        assert_eq!(found(&watch.clone().on(NOW, IDLE, legs(Phase::Local, 0, NOW))), Some(Found::Deserted));
        // unless nobody acknowledges it
        let silent = legs(Phase::ToLocal, 0, NOW - Duration::from_secs(61));
        assert!(matches!(watch.on(NOW, IDLE, silent), Action::Unsplice));
        assert_eq!(found(&watch.on(NOW, IDLE, Event::Unspliced)), Some(Found::Deserted));
    }

    #[test]
    fn what_nobody_can_continue_is_deserted() {
        assert_eq!(found(&first(legs(Phase::Local, 0, NOW)).0), Some(Found::Deserted));
        assert_eq!(found(&first(legs(Phase::ToForwarding, LegFlags::RESET, NOW)).0), Some(Found::Deserted));
        assert_eq!(
            found(&first(Event::Legs { at: None, heard: Pair::default() }).0),
            Some(Found::Gone(EndReason::Lost))
        );
    }
}
