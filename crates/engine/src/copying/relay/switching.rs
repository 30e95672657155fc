//! The actions of a flow's [core](crate::core) that need no waiting: the sockets' part and the data path's part.

use super::Relay;
use crate::{
    adopting::Adopting,
    core::{self, Action, Event, State},
    engine::Leaving,
    leg::Leg,
    passing::holding::Holding,
    refusal::{self, Refusal},
    types::Trigger,
};
use longsplice_datapath::{
    Commit, CommitOptions, Connection, FreezeOptions, LegFlags, Pair, PathFlags, PathView, Phase, Recreated, Side,
    SwitchError, Switched, Tuple, monotonic,
};
use std::{
    io,
    sync::{PoisonError, atomic::Ordering},
    time::Duration,
};

/// Time in forwarding mode after which conntrack entries of the parked sockets' connections are
/// renewed. Short enough for conntrack to remember them: a small part of its smallest timeout for an
/// open connection (nf_conntrack_tcp_timeout_close_wait, 60 s). Long enough for a message or two.
const TRACKED: Duration = Duration::from_secs(5);

/// Window in bytes that an idle socket has, unless net.ipv4.tcp_rmem was made smaller.
const USUAL_WINDOW: u32 = 65_535;

impl Relay {
    /// Performs an action, and returns its answer if there is one.
    pub(super) fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Attend => Some(Event::Attended(self.attend())),
            Action::CopyOn { forget, windows } => {
                forget.into_iter().for_each(|why| self.forget(why));
                self.copy_on(windows);
                None
            }
            Action::Measure => {
                let mut facts = Pair::from_fn(|side| self.legs[side].path_facts());
                // on short paths queues do not matter, which spares a system call for each leg
                if core::needs_queues(&facts) {
                    facts.iter_mut().zip(self.legs.iter()).for_each(|(facts, leg)| facts.unread = leg.unread());
                }
                Some(Event::Measured(facts))
            }
            Action::HoldBack(held) => {
                if held == Pair::both(None) {
                    self.legs.iter_mut().for_each(Leg::relax);
                }
                for (from, held) in Side::BOTH.iter().filter_map(|from| Some((*from, held[*from]?))) {
                    self.legs[from].hold_back(held.window);
                    self.legs[from.other()].limit_outstanding(held.outstanding);
                }
                None
            }
            Action::Adopt => self.adopt(),
            Action::Freeze { fit } => Some(self.freeze(fit)),
            Action::Look => Some(self.look()),
            Action::Commit { at, most } => Some(self.commit(&at, most)),
            Action::Unsplice { away } => {
                let event = self.unsplice(away);
                self.holding = None; // held segments go to the sockets
                Some(event)
            }
            // actions of a forwarded flow, or performed by the caller
            Action::Wait
            | Action::LookBehind
            | Action::Keep
            | Action::Release
            | Action::Recreate { .. }
            | Action::End { .. } => None,
        }
    }

    fn attend(&mut self) -> bool {
        // one that was just accepted may be spliced before anybody has to wait for it
        let attended = self.legs.iter_mut().filter(|leg| !leg.is_idle()).try_for_each(Leg::attend);
        if let Err(error) = attended {
            // out of memory or epoll watches: both sockets are closed now, which ends both connections
            let _named = self.flow().named();
            tracing::error!(%error, "cannot wait for the sockets of a flow: both connections are closed");
            return false;
        }
        let after = self.flow().policy.keepalive;
        self.legs.iter_mut().for_each(|leg| leg.keep_alive(after));
        true
    }

    /// Prepares to copy for the foreseeable future.
    fn copy_on(&mut self, windows: Pair<Option<u32>>) {
        let copies = self.core.streams().iter().any(|stream| stream.message != Some(0));
        for leg in self.legs.iter_mut() {
            if copies {
                leg.unclamp(); // not between messages: the next one may be spliced
            }
            leg.relax();
        }
        // what a slow receiver has not taken waits at its near sender, and not here
        for (from, window) in Side::BOTH.iter().filter_map(|from| Some((*from, windows[*from]?))) {
            self.legs[from].narrow(window);
            self.legs[from.other()].limit_unsent(window);
        }
        // Bytes in a pipe cannot be copied for a tap, nor go back to the caller when a receiver speaks.
        if !self.core.listens() && !self.is_tapped() {
            self.pump.through_pipes();
        }
    }

    /// Makes the data path forget legs that will never be spliced, which makes room for others. Legs
    /// that relay a message are not forgotten: they go back to the caller, and may join other flows.
    fn forget(&self, why: Refusal) {
        let Some(d) = self.engine.datapath() else { return };
        let unknown = !self.legs.iter().any(Leg::is_tracked);
        // A host may be ahead of a shimmed socket, which discards its acknowledgements without the record.
        if unknown || self.core.message_from().is_some() || self.legs.iter().any(|leg| leg.at.shimmed) {
            return;
        }
        let gone = d.give_back(self.flow().connections());
        for (leg, gone) in self.legs.each_ref().zip(gone) {
            if gone {
                leg.refuse(why);
            }
        }
    }

    /// Begins to have those legs adopted that the data path does not know.
    pub(super) fn adopt(&mut self) -> Option<Event> {
        if self.adopting.is_some() {
            return None;
        }
        match Adopting::begin(&self.engine, self.legs.iter()) {
            Ok(adopting) => self.adopting = Some(adopting),
            Err(why) => return Some(Event::Refused { why, for_good: true }),
        }
        None
    }

    /// Completes the records of these legs, unless it has to be tried again.
    pub(super) fn adopted(&mut self) -> Option<Event> {
        let done = self.adopting.as_mut()?.complete(&self.engine, self.legs.iter_mut());
        if let Ok(false) = done {
            return None;
        }
        self.adopting = None;
        if let Err(why) = done {
            return Some(Event::Refused { why, for_good: true });
        }
        for (leg, generation) in self.legs.iter().zip(self.flow().generations.each_ref()) {
            generation.store(leg.connection(None).generation, Ordering::Relaxed);
        }
        Some(Event::Adopted)
    }

    fn generations(&self) -> Pair<u32> {
        self.flow().connections().map(|connection| connection.generation)
    }

    fn freeze(&mut self, fit: bool) -> Event {
        let engine = self.engine.clone();
        // until the flow says that it is in a switch
        let leaving = engine.leaving.read().unwrap_or_else(PoisonError::into_inner);
        match *leaving {
            Leaving::No => {}
            Leaving::Soon => return Event::Frozen(Err(SwitchError::Busy)), // perhaps it stays here
            Leaving::Gone => return Event::Refused { why: Refusal::HandedOver, for_good: true },
        }
        // before the freeze, since its events may come at once
        self.engine.route_events(self.flow());
        self.legs.iter_mut().for_each(Leg::widen); // whoever takes the flow back would not know of it
        let halves = Pair::from_fn(|side| self.core.half(side, self.legs[side].tuple(), &self.legs[side].at));
        let tuples = halves.each_ref().map(|half| half.leg);
        let hold = self.flow().policy.hold.then(|| Holding::of(&self.engine, tuples));
        match hold.transpose() {
            Ok(holding) => self.holding = holding,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Event::Refused { why: Refusal::Unprivileged, for_good: false };
            }
            Err(error) => return Event::Refused { why: refusal::of_errno(error.raw_os_error()), for_good: false },
        }
        let how = FreezeOptions { hold: self.holding.is_some(), fit, tap: false, generations: self.generations() };
        let frozen = self.freeze_both(halves.each_ref(), how);
        match &frozen {
            Ok(frozen) => {
                tracing::debug!(?frozen, "frozen");
                self.let_go(&frozen.at);
                self.seen = Some(Box::new(frozen.at));
                self.flow().now().freezes = true;
            }
            Err(error) => {
                tracing::debug!(%error, "not frozen");
                self.holding = None;
                // the records may have been given back for an earlier refusal
                let given_back = || self.legs.iter().find_map(Leg::refusal);
                let untracked = || refusal::of_untracked(self.datapath(), &<[Tuple; 2]>::from(tuples));
                let why = match error {
                    SwitchError::Untracked => Some(given_back().unwrap_or_else(untracked)),
                    SwitchError::Other => given_back(),
                    _ => None,
                };
                if let Some(why) = why {
                    return Event::Refused { why, for_good: true };
                }
            }
        }
        Event::Frozen(frozen.map(Box::new))
    }

    /// Lets held segments go in directions that are no longer held.
    fn let_go(&self, at: &Switched) {
        if let Some(holding) = &self.holding {
            let is_held = |from: &Side| at.phase[*from] == Phase::ToForwarding;
            Side::BOTH.into_iter().filter(|from| !is_held(from)).for_each(|from| holding.let_go(from));
        }
    }

    /// Looks at both legs. Commits in the same call if the drain may be over.
    fn look(&mut self) -> Event {
        // one that another process has spliced, and this one, which has no data path, goes on with
        if self.engine.datapath().is_none() {
            return Event::Looked(Err(SwitchError::Untracked));
        }
        let (now, tuples) = (monotonic(), self.tuples());
        // A commit that comes too early answers like a look, which then needs no call of its own.
        let seen = self.seen.take().filter(|at| at.has_plain_hops());
        let tries =
            seen.and_then(|at| Some((self.core.may_commit(now, &self.flow().policy, tuples.each_ref(), &at)?, at)));
        match tries {
            Some((most, at)) => self.commit(&at, most),
            None => self.looked(self.datapath().look(self.flow().connections()).map(Box::new)),
        }
    }

    fn looked(&mut self, at: Result<Box<Switched>, SwitchError>) -> Event {
        let at = at.map_err(|error| self.named(error));
        if let (State::Settling, Err(error)) = (self.core.state(), &at)
            && !matches!(error, SwitchError::Other)
        {
            let _named = self.flow().named();
            tracing::warn!(%error, "cannot see whether a message has arrived: both connections are reset");
        }
        at.iter().for_each(|at| self.let_go(at));
        self.seen = at.clone().ok();
        Event::Looked(at)
    }

    fn commit(&mut self, at: &Switched, most: Pair<u32>) -> Event {
        match self.commit_both(at, most) {
            Ok(Commit::Done(at)) => {
                self.legs.iter_mut().for_each(Leg::park);
                tracing::debug!(?at, "spliced");
                self.seen = Some(Box::new(at));
                Event::Committed(Ok(Box::new(at)))
            }
            Ok(Commit::NotYet(at)) => self.looked(Ok(Box::new(at))),
            Err(error) => Event::Committed(Err(error)),
        }
    }

    /// Commits both directions on the data path.
    pub(super) fn commit_untapped(&self, at: &Switched, most: Pair<u32>) -> Result<Commit, SwitchError> {
        let triggers = Pair::new(Trigger::ClientData, Trigger::ServerData);
        let trigger = triggers.map(|t| self.flow().policy.trigger == Some(t));
        let options = CommitOptions { trigger, in_time: true, generations: self.generations() };
        self.datapath().commit_or_look(self.flow().legs.each_ref(), at, most, options)
    }

    /// Installs new sockets, at the positions of the hosts, in a flow that was released.
    pub fn took_over(&mut self, Recreated { sockets, ends }: Recreated) -> Action {
        self.legs.iter_mut().zip(sockets).for_each(|(leg, socket)| leg.reopen(socket));
        self.released = None;
        Side::BOTH.into_iter().for_each(|from| self.end_stretch(from, Some(ends[from])));
        self.on(Event::Recreated(Ok(ends)))
    }

    /// Has the parked sockets accept as many bytes as their hosts were promised. At the end of a message, the data path takes
    /// that back. A host that is near then keeps the small window, with which little of its next message is ahead of a splice; one
    /// that is far would lose a round trip. `at`: where the data path has taken the flow back.
    fn make_room(&mut self, promised: Option<Pair<u32>>, at: Option<&Switched>) {
        let Some(promised) = promised else { return };
        for from in Side::BOTH {
            let stays_small = self.legs[from].is_near() && at.is_some_and(|at| self.core.has_passed(from, at));
            if !stays_small && promised[from] > USUAL_WINDOW {
                self.legs[from].make_room(promised[from]);
            }
        }
    }

    /// Returns the error of a switch, or that it is another connection by now: its first record is gone a moment before its entry.
    fn named(&self, error: SwitchError) -> SwitchError {
        let is_there = |connection: &Connection| self.engine.present(&connection.leg).as_ref() == Some(connection);
        match error {
            SwitchError::Untracked if !self.flow().connections().iter().all(is_there) => SwitchError::Other,
            error => error,
        }
    }

    /// Takes the flow back to control mode, from a drain or from forwarding mode.
    fn unsplice(&mut self, away: Option<Duration>) -> Event {
        self.legs.iter_mut().for_each(Leg::relax);
        let tuples = self.tuples();
        let paths = away.and_then(|_| self.flow().paths(self.datapath())); // a drain has none
        let is_by_client = |paths: &Pair<PathView>| paths.client.flags & PathFlags::RST != 0;
        let client_reset = paths.as_ref().is_some_and(is_by_client);
        let is_back = paths.as_ref().is_some_and(|p| p.iter().all(|p| p.flags & PathFlags::SPLICED == 0));
        let promised = paths.map(|p| Pair::new(p.server.window(), p.client.window()));
        // Before any segment reaches the sockets. If the data path has taken the flow back by itself, not before the
        // answer, which says whether a message has passed: then a near sender keeps its small window.
        if !is_back {
            self.make_room(promised, None);
        }
        let d = self.datapath();
        // Conntrack may have forgotten the connections, and a firewall may drop what it calls invalid then.
        if let Some(away) = away.filter(|away| *away > TRACKED) {
            d.renew_parked(tuples.each_ref(), away);
        }
        let at = d.unsplice(self.flow().connections()).map_err(|error| self.named(error));
        // it may have come between the two, and then only the entry says from whom
        let was_reset = away.is_some() && at.as_ref().is_ok_and(|at| at.flags.iter().all(|f| f & LegFlags::RESET != 0));
        let client_reset = client_reset || (was_reset && self.flow().paths(d).as_ref().is_some_and(is_by_client));
        match &at {
            Ok(at) => {
                if is_back {
                    self.make_room(promised, Some(at));
                }
                // A host that waits for the other's window to open would not hear of that: a probe tells it our window.
                if away.is_some() {
                    self.legs.iter().zip(at.flags).for_each(|(leg, flags)| leg.unpark(flags & LegFlags::PROBE != 0));
                }
                for from in Side::BOTH {
                    let end = at.was_forwarded[from].then(|| at.bound64(from) - u64::from(at.fin[from]));
                    self.end_stretch(from, end);
                }
                tracing::debug!(?at, "unspliced");
            }
            // no fault: the flow was over, and a new connection has its addresses
            Err(error @ SwitchError::Other) => tracing::debug!(%error, "not unspliced"),
            Err(error) => {
                let _named = self.flow().named();
                tracing::warn!(%error, "cannot take the flow back: it ends");
            }
        }
        Event::Unspliced { at: at.map(Box::new), client_reset }
    }
}
