//! The end of a copied flow: what was sent, or forwarded past the sockets, is acknowledged first, unless it is lost.

use super::{
    Action, Context, Core, Event, Records, State,
    control::{LOOK_EVERY, LOOK_RARELY, UNDER_WAY, UNDER_WAY_BEHIND},
    reset_by, reset_side,
    streams::Passing,
    was_reset, were_reset,
};
use crate::{EndReason, types::Command};
use longsplice_datapath::{LegFlags, Pair, PathFacts, Phase, Side, SwitchError};
use std::time::Duration;

/// Time until the next look whether a host has acknowledged all that it is to get before a reset.
const RESET_AGAIN: Duration = Duration::from_millis(1);
/// Time limit for the acknowledgement of bytes before a reset; and of what was forwarded, by when the program stops.
pub(super) const CLOSING: Duration = crate::lingering::LINGER;

/// Flags of the leg of a host that has closed, and knows that the other one has.
const OVER: u32 = LegFlags::FIN_IN | LegFlags::FIN_ACKED;

impl Core {
    /// Both streams have ended, or the message has been relayed. Forwarded data belongs
    /// to the data path until it is acknowledged, and only then may the legs part.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) -> Action {
        self.note_copied(cx);
        let is_whole = |m: &Passing| self.streams()[m.from].message == Some(0) || self.receiver_failed();
        if self.failed.is_some() && !self.message.as_deref().is_some_and(is_whole) {
            return self.resets(cx);
        }
        // Without records of both legs, this flow has forwarded nothing. A leg may be shimmed since one that it was in before.
        let is_settled = !cx.at.client.shimmed || self.control().settled || self.records != Records::There;
        self.state = match self.message {
            Some(_) if is_settled => return self.end(cx, EndReason::MessageRelayed),
            Some(_) => State::Settling,
            None if is_settled && !self.fin_past => return self.end(cx, EndReason::Closed),
            None => State::Closing,
        };
        // a slow host may take that long for what its socket still holds
        let patience = cx.policy.idle_limit.get().max(CLOSING);
        let control = self.control_mut();
        (control.heard, control.moved, control.until) = (false, (u64::MAX, cx.now), cx.now + patience);
        Action::Look
    }

    pub(super) fn on_settling(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let at = match event {
            Event::Looked(Ok(at)) => at,
            Event::Looked(Err(SwitchError::Other)) => return self.replaced(cx),
            Event::Looked(Err(_)) | Event::Stop { .. } | Event::Command(Command::Reset) => {
                return self.end(cx, EndReason::Stopped);
            }
            Event::Heard => {
                // its next message may have carried the last acknowledgement
                self.control_mut().heard = true;
                return Action::Look;
            }
            Event::Told | Event::Timer => return Action::Look,
            Event::Measured(facts) => return self.settles_after_reset(cx, &facts),
            _ => return Action::Wait,
        };
        if were_reset(&at) {
            return self.end(cx, reset_by(&at));
        }
        self.note_excess(&at);
        // before the reset is looked at: what has arrived counts, whatever becomes of its sender
        if at.is_local() {
            return self.end(cx, EndReason::MessageRelayed);
        }
        if was_reset(&at) {
            // only the sockets send again what the receiver has not got
            self.failed = reset_side(&at);
            return Action::Measure;
        }
        self.look_again(cx)
    }

    pub(super) fn on_closing(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let at = match event {
            Event::Looked(Ok(at)) => at,
            Event::Looked(Err(SwitchError::Other)) => return self.replaced(cx),
            Event::Looked(Err(_)) => return self.look_again(cx),
            Event::Stop { .. } if self.heeds_stop(cx.now) => return self.end(cx, EndReason::Stopped),
            Event::Command(Command::Reset) => return self.end(cx, EndReason::Stopped),
            Event::Told | Event::Timer => return Action::Look,
            _ => return Action::Wait,
        };
        // If no FIN was forwarded past the sockets, they take care of the rest after they are closed.
        let are_fins_acked = at.flags.client & at.flags.server & LegFlags::FIN_ACKED != 0;
        if are_fins_acked || (at.is_local() && !self.fin_past && !were_reset(&at)) {
            return self.end(cx, EndReason::Closed);
        }
        if were_reset(&at) {
            return self.end(cx, reset_by(&at));
        }
        // A host that has sent its FIN and acknowledged the other one has closed. It answers a duplicate with a reset, which
        // changes nothing.
        let has_closed = |side: Side| at.flags[side] & OVER == OVER;
        if let Some(side) = reset_side(&at).filter(|side| at.is_local() && !has_closed(*side)) {
            // it acknowledges no FIN any more; what the other socket has of it is delivered first
            self.failed = Some(side);
            return self.resets(cx);
        }
        if let Some(side) = self.control_mut().lost(cx.now, &at) {
            return self.end(cx, EndReason::reset_by(side));
        }
        self.look_again(cx)
    }

    /// Waits for the next look, soon at first, then more rarely: an event tells what happens meanwhile.
    fn look_again(&mut self, cx: &mut Context<'_>) -> Action {
        let control = self.control_mut();
        if cx.now >= control.until {
            return self.end(cx, EndReason::Idle);
        }
        let pause = control.has_closed_for(cx.now) / 4;
        control.look_at = cx.now + pause.clamp(LOOK_EVERY, LOOK_RARELY);
        Action::Wait
    }

    /// Nothing more comes from the host that has failed. Waits until the other one has acknowledged everything: its reset would
    /// discard what its socket still holds.
    pub(super) fn resets(&mut self, cx: &mut Context<'_>) -> Action {
        self.state = State::Resetting;
        self.control_mut().moved = (u64::MAX, cx.now);
        Action::Measure
    }

    pub(super) fn on_resetting(&mut self, cx: &mut Context<'_>, event: Event) -> Action {
        let Some(side) = self.failed else { return self.end(cx, EndReason::Stopped) };
        let is_forwarded = match event {
            Event::Measured(facts) => {
                self.note_outstanding(cx, side, &facts);
                // only after a splice may the other host lack bytes that its socket does not have
                if cx.at[side].shimmed {
                    return Action::Look;
                }
                false
            }
            Event::Looked(at) => at.is_ok_and(|at| at.phase[side] == Phase::ToLocal),
            Event::Timer => return Action::Measure,
            Event::Failed(other) if other != side => return self.end(cx, EndReason::reset_by(side)),
            Event::Stop { .. } => return self.end(cx, EndReason::Stopped),
            _ => return Action::Wait,
        };
        self.awaits_acknowledgement(cx, side, is_forwarded)
    }

    /// The message has passed, but the host on this side has reset its connection before the other one has acknowledged what
    /// was forwarded.
    pub(super) fn settles_after_reset(&mut self, cx: &mut Context<'_>, facts: &Pair<PathFacts>) -> Action {
        let Some(side) = self.failed else { return Action::Wait };
        self.note_outstanding(cx, side, facts);
        self.awaits_acknowledgement(cx, side, true)
    }

    /// Notes how much of what the other socket has sent is not acknowledged.
    fn note_outstanding(&mut self, cx: &Context<'_>, failed: Side, facts: &Pair<PathFacts>) {
        let left = u64::from(facts[failed.other()].outstanding);
        let control = self.control_mut();
        if left < control.moved.0 {
            control.moved = (left, cx.now);
        }
    }

    /// Waits as long as the other host may yet acknowledge what came from the one that has failed. `is_forwarded`: it lacks bytes
    /// that were forwarded, and which fitted its window.
    fn awaits_acknowledgement(&mut self, cx: &mut Context<'_>, failed: Side, is_forwarded: bool) -> Action {
        let control = self.control_mut();
        let (left, moved) = control.moved;
        let patience = match (is_forwarded, left) {
            (false, 0) => Duration::ZERO,
            (false, _) => CLOSING,
            (true, 0) => UNDER_WAY,
            (true, _) => UNDER_WAY_BEHIND,
        };
        if cx.now >= moved + patience {
            return self.end(cx, EndReason::reset_by(failed));
        }
        // soon at first, then more rarely
        control.look_at = cx.now + (cx.now.saturating_sub(moved) / 4).clamp(RESET_AGAIN, LOOK_EVERY);
        Action::Wait
    }

    /// Ends a flow in whose place a new connection has come: this one was over, and no socket has anything to add.
    pub(super) fn replaced(&mut self, cx: &mut Context<'_>) -> Action {
        self.fin_past = true;
        match self.state {
            State::Draining => {
                // an event is under way that says how much was forwarded
                let since = self.forwarded.gone_since(cx.now);
                if cx.now.saturating_sub(since) >= LOOK_EVERY {
                    return self.closed(cx);
                }
                self.control_mut().look_at = since + LOOK_EVERY;
                Action::Wait
            }
            State::Unsplicing => {
                self.state = State::Ended;
                Action::End { how: EndReason::Closed, forwarded: true }
            }
            _ => self.end(cx, EndReason::Closed),
        }
    }

    /// The connection to this host has failed while bytes are copied. What it has sent before is read and passed on: the error
    /// of one direction may come before the last bytes of the other were read.
    pub(super) fn fails(&mut self, cx: &mut Context<'_>, side: Side) -> Action {
        let is_answerer = self.message.as_ref().is_some_and(|m| m.from != side && m.until_receiver_speaks);
        let is_first = self.failed.is_none();
        let failed = *self.failed.get_or_insert(side);
        // Both hosts have failed, or the receiver, which had nothing to say: nobody takes the rest.
        if failed != side || (self.message_from() == Some(side.other()) && !is_answerer) {
            return self.end(cx, EndReason::reset_by(failed));
        }
        // The caller reads the answer. A second failure comes from a read, so the socket is empty.
        if is_answerer || !is_first {
            return self.finish(cx);
        }
        self.stay = true;
        let control = self.control_mut();
        control.begins_no_splice();
        control.until = cx.now + UNDER_WAY;
        let Pair { client, server } = &mut control.streams;
        let (from, to) = if side == Side::Client { (client, server) } else { (server, client) };
        from.message.get_or_insert(u64::MAX); // its end is not passed on
        (to.message, to.in_hand, to.discards) = (Some(0), 0, true);
        Action::HoldBack(Pair::both(None))
    }
}
