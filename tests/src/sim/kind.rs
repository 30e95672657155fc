//! What a run is like: its links, and what happens to hosts and process.

use super::World;

/// Impairments of the links.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Probability of loss.
    pub loss: f64,
    /// Probability of duplication.
    pub duplicate: f64,
    /// Probability of an extra delay.
    pub reorder: f64,
}

/// The kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No loss, duplication or reordering, and little that legitimately makes hosts wait.
    Calm,
    /// Like [`Kind::Calm`], but the flow stays in control mode, for comparison.
    Still,
    /// Like [`Kind::Calm`], with the hold policy.
    Held,
    /// Like [`Kind::Calm`], and segments to us wait in queues that fill and drain.
    Queued,
    /// Everything that can happen to packets.
    Bad,
    /// Like [`Kind::Bad`], but a flow stays spliced.
    Kept,
    /// Like [`Kind::Bad`], and other segments arrive on another processor in the middle of switches and of other segments.
    Crossing,
    /// Like [`Kind::Bad`], with ECN negotiated at random and a network that marks.
    Marked,
    /// Like [`Kind::Bad`], and an off-path attacker sends segments with the hosts' addresses.
    Hostile,
    /// Like [`Kind::Bad`] or [`Kind::Crossing`], and the process dies at a random moment; another one takes over.
    Killed,
    /// Like [`Kind::Bad`] or [`Kind::Crossing`] without loss, and one of the hosts resets the connection at a random moment.
    Reset,
    /// Like [`Kind::Bad`] or [`Kind::Crossing`], and the paths to the hosts change.
    Moved,
    /// [`Kind::Moved`] and [`Kind::Hostile`] combined.
    HostileMoved,
    /// Like [`Kind::Bad`], [`Kind::Crossing`], [`Kind::Hostile`], [`Kind::Killed`] or [`Kind::Moved`], and the queues of our
    /// devices are sometimes full. Our sockets are told.
    Full,
    /// Like [`Kind::Bad`], [`Kind::Crossing`], [`Kind::Hostile`], [`Kind::Killed`] or [`Kind::Reset`], and gigabytes pass between
    /// two steps.
    Long,
    /// Like [`Kind::Bad`], [`Kind::Crossing`] or [`Kind::Reset`], and the hosts connect again from the same ports when it is over.
    Reused,
}

impl World {
    /// Nobody is to take the flow back, unless it needs that.
    pub(super) fn is_to_be_kept(&mut self) {
        let keeps = !self.has_tiny_windows();
        let habits = &mut self.relay.habits;
        habits.keeps = keeps;
        habits.limits &= !keeps;
    }
}
