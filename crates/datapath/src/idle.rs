//! Entries in control mode: found one after the other, and removed if they are still as they were found.

use crate::{Datapath, LegFlags, Tuple, abi};
use std::io;

/// An entry that is in control mode, or has no record, as it was found.
#[derive(Clone, Copy, Debug)]
pub struct IdleEntry {
    /// Which.
    pub leg: Tuple,
    /// Device that its host was reached by last; 0: none yet.
    pub device: u32,
    /// Flags of its record; 0: it has none.
    flags: u32,
    /// No other connection of the same addresses has both.
    initial: [u32; 2],
}

impl IdleEntry {
    /// The host has completed the handshake with us, or we with it, and there was no switch since: the socket, if there is one,
    /// does without the entry.
    pub fn is_spare(&self) -> bool {
        self.flags & (LegFlags::TRACKED | LegFlags::PAIRED | LegFlags::FOREIGN) == LegFlags::TRACKED
    }

    /// The same connection as the one that was found before?
    pub fn is(&self, before: &IdleEntry) -> bool {
        (self.leg, self.initial, self.flags == 0) == (before.leg, before.initial, before.flags == 0)
    }
}

/// A walk through the tables of entries, for those that are in control mode.
#[derive(Debug, Default)]
pub struct Idle {
    slot: u64,
}

impl Idle {
    /// Goes on, until `most` have been found or some 16,000 slots been looked at. `None`: there are no more, and it begins again.
    pub fn next(&mut self, d: &Datapath, most: usize) -> io::Result<Option<Vec<IdleEntry>>> {
        const CALLS: usize = 16; // of 1024 slots each
        let (mut found, mut empty) = (Vec::new(), 0);
        while found.len() < most && empty < CALLS {
            let args = d.maps.next_idle(self.slot)?;
            self.slot = args.slot;
            match args.result {
                0 => found.push(IdleEntry {
                    leg: Tuple::from_abi(&args.key),
                    device: args.ifindex,
                    flags: args.leg_flags,
                    initial: [args.irs, args.iss],
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
    /// What is known of a leg now.
    pub fn idle_entry(&self, leg: &Tuple) -> IdleEntry {
        let known = self.leg(leg).map(|l| l.raw).unwrap_or_default();
        IdleEntry { leg: *leg, device: known.ifindex, flags: known.flags, initial: [known.irs, known.iss] }
    }

    /// Removes what is known of a leg, if it is still the connection that was found, and not in forwarding mode. Is it gone?
    pub fn sweep(&self, entry: &IdleEntry) -> bool {
        let _no_switch = self.switching.lock().expect("no panic under this lock");
        let [irs, iss] = entry.initial;
        let op = abi::path_op::PATH_SWEEP;
        let gone = self.maps.forget_as(abi::path_args {
            op,
            key: entry.leg.to_abi(),
            leg_flags: entry.flags,
            irs,
            iss,
            ..Default::default()
        });
        self.free_remotes([Some(&entry.leg), None], gone);
        gone[0]
    }
}
