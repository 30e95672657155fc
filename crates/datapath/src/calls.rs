//! The calls that switch a flow between control mode and forwarding mode.

use crate::{
    Datapath, FreezeOptions, Frozen, Half, SwitchError, Switched, Tuple, abi,
    maps::run_program,
    switch::{bare, call, frozen, outcome, switched},
};

impl Datapath {
    /// Runs the program for one call. `set`: arguments besides those of the legs.
    pub(crate) fn run(
        &self,
        op: abi::switch_op,
        a: &Half,
        b: &Half,
        set: impl FnOnce(&mut abi::switch_args),
    ) -> Result<abi::switch_call, SwitchError> {
        let mut call = call(op, a, b);
        set(&mut call.args);
        run_program(&self.switch, &mut call).map_err(SwitchError::Run)?;
        outcome(call.args.result).map(|()| call)
    }

    /// Sets the bounds on both legs. Nobody may read or write the sockets during the call. Afterwards the caller reads
    /// `pending` bytes from each socket, writes leftovers and these to the other, and waits for `EventKind::Forwarding`.
    pub fn freeze(&self, a: &Half, b: &Half, options: FreezeOptions) -> Result<Frozen, SwitchError> {
        let FreezeOptions { hold, fit, tap } = options;
        let _one = self.switching.lock().expect("no panic under this lock");
        let r = self.run(abi::switch_op::OP_FREEZE, a, b, |g| {
            g.hold = hold.into();
            g.fit = fit.into();
            g.tap = tap.into();
        })?;
        let frozen = frozen(&r, [a.consumed, b.consumed]);
        self.next_hops.switch_hops().add(&frozen.at.hops);
        Ok(frozen)
    }

    /// Completes forwarding mode: creates path entries that need no lock. Both directions must be forwarded
    /// already, as found in `at`; otherwise fails with [`SwitchError::Busy`]. `most`: see
    /// [`Switched::most`]. `trigger`: for each host, set the limit at its present position, if it has none.
    pub fn commit(
        &self,
        [a, b]: [&Tuple; 2],
        at: &Switched,
        most: [u32; 2],
        trigger: [bool; 2],
    ) -> Result<Switched, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let via = |leg, i: usize| self.next_hops.slot_for(&self.maps, leg, &at.hops[i], most[i]);
        let (via_a, via_b) = (via(a, 0)?, via(b, 1)?);
        let remotes = match (a.is_v4(), b.is_v4()) {
            (true, false) => (self.remote_for(a)?, 0),
            (false, true) => (0, self.remote_for(b)?),
            _ => (0, 0),
        };
        let r = self.run(abi::switch_op::OP_COMMIT, &bare(a), &bare(b), |g| {
            g.via_a = via_a;
            g.via_b = via_b;
            (g.remote_b, g.remote_a) = remotes;
            g.trigger = u32::from(trigger[0]) | u32::from(trigger[1]) << 1;
        })?;
        Ok(switched(&r))
    }

    /// Takes a flow back to control mode, from any state of a switch. Do not use it on a flow that has had fragments
    /// forwarded (`PathFlags::FRAGMENTS`): data that its host retransmits across the bound may never get through.
    pub fn unsplice(&self, a: &Tuple, b: &Tuple) -> Result<Switched, SwitchError> {
        let _one = self.switching.lock().expect("no panic under this lock");
        let at = self.run(abi::switch_op::OP_UNSPLICE, &bare(a), &bare(b), |_| {}).map(|r| switched(&r))?;
        self.next_hops.switch_hops().add(&at.hops);
        Ok(at)
    }

    /// Returns the phases and positions of a flow.
    pub fn look(&self, a: &Tuple, b: &Tuple) -> Result<Switched, SwitchError> {
        self.run(abi::switch_op::OP_LOOK, &bare(a), &bare(b), |_| {}).map(|r| switched(&r))
    }
}
