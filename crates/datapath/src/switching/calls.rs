//! The calls that switch a flow between control mode and forwarding mode.

use crate::{
    Commit, CommitOptions, Connection, Datapath, FreezeOptions, Frozen, Half, LegFlags, Pair, Side, SwitchError,
    Switched, Tuple, abi,
    switching::switch::{bare, call, frozen, outcome, switched},
    tables::maps::run_program,
};

impl Datapath {
    /// Runs the program for one call. `set`: arguments besides those of the legs.
    pub(crate) fn run(
        &self,
        op: abi::switch_op,
        halves: Pair<&Half>,
        generations: Pair<u32>,
        set: impl FnOnce(&mut abi::switch_args),
    ) -> Result<abi::switch_call, SwitchError> {
        let call = self.ask(op, halves, generations, set)?;
        outcome(call.args.result).map(|()| call)
    }

    /// The same, whatever the result says.
    fn ask(
        &self,
        op: abi::switch_op,
        halves: Pair<&Half>,
        generations: Pair<u32>,
        set: impl FnOnce(&mut abi::switch_args),
    ) -> Result<abi::switch_call, SwitchError> {
        let mut call = call(op, halves, generations);
        set(&mut call.args);
        run_program(&self.switch, &mut call).map_err(SwitchError::Run)?;
        Ok(call)
    }

    /// Sets the bounds on both legs. Nobody may read or write the sockets during the call. Afterwards the caller reads
    /// `pending` bytes from each socket, writes leftovers and these to the other, and waits for `EventKind::Forwarding`.
    pub fn freeze(&self, halves: Pair<&Half>, options: FreezeOptions) -> Result<Frozen, SwitchError> {
        let FreezeOptions { hold, fit, tap, generations } = options;
        let _one = self.switching.lock().expect("no panic under this lock");
        let r = self.run(abi::switch_op::OP_FREEZE, halves, generations, |g| {
            g.hold = hold.into();
            g.fit = fit.into();
            g.tap = tap.into();
        })?;
        let frozen = frozen(&r, halves.map(|half| half.consumed));
        self.next_hops.switch_hops().add(frozen.at.hops.iter());
        Ok(frozen)
    }

    /// Completes forwarding mode: creates path entries that need no lock. Both directions must be forwarded
    /// already, as found in `at`; otherwise fails with [`SwitchError::Busy`]. `most`: see
    /// [`Switched::most`].
    pub fn commit(
        &self,
        legs: Pair<&Tuple>,
        at: &Switched,
        most: Pair<u32>,
        options: CommitOptions,
    ) -> Result<Switched, SwitchError> {
        match self.commit_or_look(legs, at, most, options)? {
            Commit::Done(at) => Ok(at),
            Commit::NotYet(_) => Err(SwitchError::Busy),
        }
    }

    /// Commits, or looks if it is too early for that: in one call. Otherwise like [`Datapath::commit`].
    pub fn commit_or_look(
        &self,
        legs: Pair<&Tuple>,
        at: &Switched,
        most: Pair<u32>,
        CommitOptions { trigger, in_time, generations }: CommitOptions,
    ) -> Result<Commit, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let Pair { client, server } = legs;
        let via = |side| self.next_hops.slot_for(&self.maps, legs[side], &at.hops[side], most[side]);
        let (via_a, via_b) = (via(Side::Client)?, via(Side::Server)?);
        let remotes = match (client.is_v4(), server.is_v4()) {
            (true, false) => (self.remote_for(client)?, 0),
            (false, true) => (0, self.remote_for(server)?),
            _ => (0, 0),
        };
        let r = self.ask(abi::switch_op::OP_COMMIT, legs.map(bare).each_ref(), generations, |g| {
            g.via_a = via_a;
            g.via_b = via_b;
            (g.remote_b, g.remote_a) = remotes;
            g.fit = in_time.into();
            g.trigger = u32::from(trigger.client) | u32::from(trigger.server) << 1;
        })?;
        let at = switched(&r);
        match outcome(r.args.result) {
            // otherwise it is too late: another process has committed
            Err(SwitchError::Busy) if (at.flags.client | at.flags.server) & LegFlags::SPLICED == 0 => {
                Ok(Commit::NotYet(at))
            }
            done => done.map(|()| Commit::Done(at)),
        }
    }

    /// Takes a flow back to control mode, from any state of a switch. Do not use it on a flow that has had fragments
    /// forwarded (`PathFlags::FRAGMENTS`): data that its host retransmits across the bound may never get through.
    pub fn unsplice(&self, legs: Pair<impl Into<Connection>>) -> Result<Switched, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let at = self.run_bare(abi::switch_op::OP_UNSPLICE, legs).map(|r| switched(&r))?;
        self.next_hops.switch_hops().add(at.hops.iter());
        Ok(at)
    }

    /// Returns the phases and positions of a flow.
    pub fn look(&self, legs: Pair<impl Into<Connection>>) -> Result<Switched, SwitchError> {
        self.run_bare(abi::switch_op::OP_LOOK, legs).map(|r| switched(&r))
    }

    /// Runs the program for a call that has no other arguments than the connections.
    pub(crate) fn run_bare(
        &self,
        op: abi::switch_op,
        legs: Pair<impl Into<Connection>>,
    ) -> Result<abi::switch_call, SwitchError> {
        let legs: Pair<Connection> = legs.map(Into::into);
        let generations = legs.map(|c| c.generation);
        self.run(op, legs.each_ref().map(|c| bare(&c.leg)).each_ref(), generations, |_| {})
    }
}
