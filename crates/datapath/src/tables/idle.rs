//! Entries in control mode: finds them one after the other, and removes those that have not changed since.

use crate::{Connection, Datapath, LegFlags, Tuple, abi};
use std::io;

/// An entry in control mode, or without a record, as it was found.
#[derive(Clone, Copy, Debug)]
pub struct IdleEntry {
    /// The leg.
    pub leg: Tuple,
    /// Index of the device over which its host was last reached; 0: none yet.
    pub device: u32,
    /// Flags of its record; 0: it has no record.
    flags: u32,
    /// Tells the connection from others with the same addresses.
    generation: u32,
}

impl IdleEntry {
    /// Returns whether a handshake between the host and us is complete, and there was
    /// no switch since. The socket, if there is one, works without such an entry.
    pub fn is_spare(&self) -> bool {
        // like is_spare() in bpf/calls.h
        let needed = LegFlags::PAIRED | LegFlags::RESTORED | LegFlags::END_TO_END;
        self.flags & (LegFlags::TRACKED | needed) == LegFlags::TRACKED
    }

    /// Returns the connection that has the entry.
    pub fn connection(&self) -> Connection {
        Connection { leg: self.leg, generation: self.generation }
    }

    /// Returns whether this is the same connection as one found before.
    pub fn is(&self, before: &IdleEntry) -> bool {
        (self.leg, self.generation, self.flags == 0) == (before.leg, before.generation, before.flags == 0)
    }
}

/// A walk through the tables of entries in control mode.
#[derive(Debug, Default)]
pub struct IdleWalk {
    slot: u64,
}

impl IdleWalk {
    /// Continues, until `most` entries were found or some 16,000 slots
    /// were examined. `None`: the walk is complete, and starts again.
    pub fn next(&mut self, d: &Datapath, most: usize) -> io::Result<Option<Vec<IdleEntry>>> {
        const CALLS: usize = 16; // each examines 1024 slots
        if self.slot == 0 && d.maps.entries()? == 0 {
            return Ok(None);
        }
        let (mut found, mut empty) = (Vec::new(), 0);
        while found.len() < most && empty < CALLS {
            let args = d.maps.next_idle(self.slot)?;
            self.slot = args.slot;
            match args.result {
                0 => found.push(IdleEntry {
                    leg: Tuple::from_abi(&args.key),
                    device: args.ifindex,
                    flags: args.leg_flags,
                    generation: args.generation,
                }),
                1 => empty += 1,
                _ if found.is_empty() => {
                    self.slot = 0;
                    return Ok(None);
                }
                _ => return Ok(Some(found)),
            }
        }
        Ok(Some(found))
    }
}

impl Datapath {
    /// Returns the present state of a leg's entry.
    pub fn idle_entry(&self, leg: &Tuple) -> IdleEntry {
        let known = self.leg(leg).map(|l| l.raw).unwrap_or_default();
        let generation = self.generation(leg).unwrap_or(Connection::NONE);
        IdleEntry { leg: *leg, device: known.ifindex, flags: known.flags, generation }
    }

    /// Removes the entries of a leg, if it is still the connection that was
    /// found, and not in forwarding mode. Returns whether they are gone.
    pub fn sweep(&self, entry: &IdleEntry) -> bool {
        let _no_switch = self.switching.lock().expect("no panic under this lock");
        let op = abi::path_op::PATH_OP_SWEEP;
        let gone = self.maps.forget_as(abi::path_args {
            op,
            key: entry.leg.to_abi(),
            leg_flags: entry.flags,
            generation: entry.generation,
            ..Default::default()
        });
        self.free_remotes([Some(&entry.leg), None], gone);
        gone[0]
    }
}
