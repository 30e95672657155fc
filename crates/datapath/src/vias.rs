//! Next hops, which flows share: a flow names one of [`VIAS`] places (`struct via` of bpf/flow.h), so one write changes the way of
//! all that name it.

use crate::{Datapath, PathView, SwitchError, Tuple, abi, devices::LinkFacts, switch::Hop};
use nix::libc;
use std::{collections::HashSet, io, time::Instant};

/// `MAX_VIAS` of bpf/verdict.h.
pub(crate) const VIAS: u16 = 1024;

/// A place that is taken.
#[derive(Debug)]
pub(crate) struct Via {
    pub raw: abi::via,
    /// Sockets send this way for reasons that the kernel does not tell (packets are marked by a firewall, say): no route is
    /// followed, only the neighbour.
    /// `None`: not known yet.
    pub steered: Option<bool>,
    /// When a flow got it last.
    pub given: Instant,
    /// It was in use when the entries were last looked through.
    pub used: bool,
}

impl Via {
    fn new(hop: &Hop, link: LinkFacts, local: [u32; 4], steered: Option<bool>) -> Via {
        let Hop { ifindex, dmac, smac } = *hop;
        let raw = link.entry(&abi::via { ifindex, mtu: 0, dmac, smac, local, can: 0 });
        Via { raw, steered, given: Instant::now(), used: true }
    }

    pub fn hop(&self) -> Hop {
        Hop { ifindex: self.raw.ifindex, dmac: self.raw.dmac, smac: self.raw.smac }
    }

    /// Is it what its device can?
    pub fn is_as(&self, link: LinkFacts) -> bool {
        let now = link.entry(&self.raw);
        (now.mtu, now.can) == (self.raw.mtu, self.raw.can)
    }

    /// The same for another hop.
    pub fn with(&self, hop: &Hop, link: LinkFacts) -> Via {
        Via { given: self.given, used: self.used, ..Via::new(hop, link, self.raw.local, self.steered) }
    }
}

/// As an earlier process has left it.
impl From<abi::via> for Via {
    fn from(raw: abi::via) -> Via {
        Via { raw, steered: None, given: Instant::now(), used: true }
    }
}

impl Datapath {
    /// The place of a next hop towards a leg's host, as its socket has shown it.
    pub(crate) fn via_for(&self, leg: &Tuple, hop: &Hop) -> Result<u16, SwitchError> {
        let steered = || self.ways().is_steered(leg, hop);
        self.via(hop, leg.to_abi().local, steered).map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => SwitchError::Full,
            _ => SwitchError::Run(e.raw_os_error().unwrap_or(libc::EIO)),
        })
    }

    /// The place of a next hop; [`io::ErrorKind::StorageFull`]: flows use all there are. `steered`: is asked of a new one.
    pub(crate) fn via(&self, hop: &Hop, local: [u32; 4], steered: impl FnOnce() -> bool) -> io::Result<u16> {
        let link = self.links().of(hop.ifindex);
        let mut vias = self.vias();
        let same = |v: &Via| (v.hop(), v.raw.local) == (*hop, local) && v.is_as(link);
        if let Some(i) = vias.iter().position(same) {
            vias[i].given = Instant::now();
            return Ok(i as u16);
        }
        let want = Via::new(hop, link, local, Some(steered()));
        let i = if vias.len() < usize::from(VIAS) {
            vias.push(want);
            vias.len() - 1
        } else {
            // next hops have changed: take a place that no flow uses any more
            let mut used = HashSet::new();
            self.maps.each_path(|_, e| used.extend([PathView::new(&e.p).via]))?;
            let free = (0..VIAS).find(|i| !used.contains(i)).ok_or(io::ErrorKind::StorageFull)?;
            vias[usize::from(free)] = want;
            usize::from(free)
        };
        self.maps.set_via(i as u16, &vias[i].raw)?;
        Ok(i as u16)
    }
}
