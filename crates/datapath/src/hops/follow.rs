//! Makes spliced flows follow the network. They bypass the kernel's routes and neighbours, so
//! changes of these are received over rtnetlink and written to the next hops, which flows share.
//!
//! | change | reaction |
//! | --- | --- |
//! | a neighbour's Ethernet address | next hops with the old address get the new one at once |
//! | anything that routes depend on | a pass: for each flow, the kernel is asked where it would send it. If none of a next hop's flows goes there any more, it is rewritten to what most of them need: one write. The others are moved one by one |
//! | a device's abilities or MTU | next hops over that device are rewritten |
//!
//! Flows without a route keep their last next hop until there is a route again: as with a router, it is up to the hosts to give
//! up. Nobody but us sends to the neighbours of spliced flows, so we make the kernel check them. When one of several neighbours
//! with the same Ethernet address gets another one, the kernel is made to check the others at once: they may be the same host.

use crate::{
    Datapath, LegView, PathFlags, PathView, Tuple,
    attaching::attach::wanted,
    hops::routes::{BATCH, Reach, Replaced, Route, Sender},
    hops::vias::{Via, ViaKey},
    network::devices::{Device, xdp_abilities},
    network::netlink::Netlink,
    switching::switch::Hop,
};
use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    collections::{HashMap, HashSet},
    io, mem,
    os::fd::AsFd,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// Interval at which device abilities are read and neighbours are checked.
const TICK: Duration = Duration::from_secs(1);
/// Time until the next check after a pass, which may have found neighbours to check.
const SOON: Duration = Duration::from_millis(100);
/// Maximum number of neighbours checked in that time. A silent neighbour costs a broadcast or two.
const ASKED: usize = 64;
/// Interval between passes without a reason: not every change is reported.
const PASS: Duration = Duration::from_secs(30);
/// Time after which a pass for a change is repeated, because flows were being spliced during it.
const ONCE_MORE: Duration = Duration::from_secs(1);
/// A pass takes at most one part in this many of our time: for a change, and without one.
const SHARE: [u32; 2] = [10, 100];

/// Counters of changes that made flows follow the network, since the data path was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathChanges {
    /// Number of next hops that were rewritten, each for all flows that share it.
    pub hops: u64,
    /// Number of directions of flows that were moved to another next hop.
    pub flows: u64,
    /// Number of directions of flows without a route over an attached device, at the last look.
    pub stranded: u64,
}

/// Maximum number of flows returned at a time because they leave over
/// another device. There is another pass, and taking them back takes time.
const ELSEWHERE: usize = 1000;

/// A watch on the network, for [`Datapath::follow`].
#[derive(Debug)]
pub struct Watch {
    netlink: Netlink,
    tick: Instant,
    pass: Instant,
    /// The next pass has a reason.
    changed: bool,
    /// Earliest time of the next pass.
    rested: Instant,
    /// Flows without a route were logged.
    told: bool,
    /// Devices to which attaching failed, which was logged.
    refused: HashSet<u32>,
}

impl Watch {
    fn tell(&mut self, stranded: u64) {
        if (stranded > 0) != mem::replace(&mut self.told, stranded > 0) {
            match stranded {
                0 => tracing::info!("every spliced connection has a usable route again"),
                n => tracing::warn!(
                    "{n} directions of spliced connections have no way: no route, or none by a device that is spliced on; they wait \
                    for one"
                ),
            }
        }
    }

    /// Waits until something has changed or is due, for at most `most`.
    pub fn wait(&self, most: Duration) {
        let due = self.tick.min(self.pass.max(self.rested)).saturating_duration_since(Instant::now());
        let limit = PollTimeout::try_from(due.min(most)).unwrap_or(PollTimeout::MAX);
        let mut fd = [PollFd::new(self.netlink.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fd, limit); // an interrupted wait is repeated
    }
}

/// Returns why nothing is to be attached to a device any more.
fn why_unwanted(d: &Device, all: &[Device]) -> String {
    let upper = all.iter().find(|upper| d.master == Some(upper.index) || upper.lower == Some(d.index));
    match upper {
        Some(upper) => format!("packets of {} are seen on {}", d.name, upper.name),
        None => format!("{} is not among the devices to splice on any more", d.name),
    }
}

impl Datapath {
    /// Starts to watch the network namespace of the caller, for [`Datapath::follow`].
    pub fn watch(&self) -> io::Result<Watch> {
        const GROUPS: [i32; 9] = [
            libc::RTNLGRP_LINK as i32,
            libc::RTNLGRP_NEIGH as i32,
            libc::RTNLGRP_IPV4_IFADDR as i32,
            libc::RTNLGRP_IPV4_ROUTE as i32,
            libc::RTNLGRP_IPV4_RULE as i32,
            libc::RTNLGRP_IPV6_IFADDR as i32,
            libc::RTNLGRP_IPV6_ROUTE as i32,
            libc::RTNLGRP_IPV6_RULE as i32,
            libc::RTNLGRP_NEXTHOP as i32,
        ];
        let netlink = Netlink::open(&GROUPS.map(|g| g as u32))?;
        self.next_hops.routes().read_all()?;
        let now = Instant::now();
        Ok(Watch { netlink, tick: now, pass: now, changed: true, rested: now, told: false, refused: HashSet::new() })
    }

    /// Processes changes, and updates next hops accordingly. A pass through many flows takes a second for some 200,000.
    /// Returns legs of flows whose route leads over a device to which nothing will be attached, `ELSEWHERE` at most.
    pub fn follow(&self, watch: &mut Watch) -> io::Result<Vec<Tuple>> {
        let mut elsewhere = Vec::new();
        let heard = self.next_hops.routes().hear(&mut watch.netlink)?;
        for r in &heard.replaced {
            self.replace(r)?;
        }
        let now = Instant::now();
        if !heard.replaced.is_empty() {
            watch.tick = now; // others may be in doubt
        }
        if heard.devices {
            self.adjust(&mut watch.refused);
        }
        if heard.devices || now >= watch.tick {
            self.refresh()?;
        }
        if now >= watch.tick {
            watch.tick = now + TICK;
            self.look_after()?;
        }
        if heard.changed {
            (watch.pass, watch.changed) = (now, true);
        }
        if now >= watch.pass.max(watch.rested) {
            let (stranded, legs) = self.pass()?;
            elsewhere = legs;
            let (end, took) = (Instant::now(), now.elapsed());
            watch.rested = end + took * SHARE[0];
            watch.pass = end + if mem::take(&mut watch.changed) { ONCE_MORE } else { PASS.max(took * SHARE[1]) };
            watch.tick = watch.tick.min(end + SOON);
            watch.tell(stranded);
        }
        Ok(elsewhere)
    }

    /// Returns whether the route to a leg's host leads over a device to which nothing is attached.
    pub fn is_elsewhere(&self, leg: &Tuple) -> bool {
        let attached = self.attached();
        let mark = self.leg(leg).map_or(0, |l| l.raw.mark);
        let device = self.next_hops.routes().device(leg, mark);
        device.is_some_and(|device| !attached.contains(&device))
    }

    /// Returns the counters so far.
    pub fn path_changes(&self) -> PathChanges {
        let c = &self.next_hops.changes;
        PathChanges { hops: c.hops.load(Relaxed), flows: c.flows.load(Relaxed), stranded: c.stranded.load(Relaxed) }
    }

    /// Attaches to new devices, and detaches from those whose packets are now seen elsewhere.
    fn adjust(&self, refused: &mut HashSet<u32>) {
        let all = self.next_hops.routes().devices();
        let mut attachment = self.attachment();
        let Some(attachment) = attachment.as_mut() else { return };
        let attached = attachment.devices();
        let mut names = self.devices.clone();
        if !names.is_empty() {
            // a device that was named stays the one that was meant, whatever it is called later
            names.extend(all.iter().filter(|d| attached.contains(&d.index)).map(|d| d.name.clone()));
        }
        let wanted = wanted(&names, &all);
        let is_wanted = |d: &Device| wanted.iter().any(|w| w.index == d.index);
        refused.retain(|device| wanted.iter().any(|w| w.index == *device));
        for device in &attached {
            let d = all.iter().find(|d| d.index == *device);
            let name = attachment.name(*device);
            if let Some(d) = d.filter(|d| d.name != name) {
                tracing::info!("{name} is called {} now: it is spliced on as before", d.name);
            }
            if d.is_some_and(|d| !d.up || is_wanted(d)) {
                continue;
            }
            match (attachment.detach(*device), d) {
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot detach from {name}: its segments still pass through the data path")
                }
                (_, None) => self.tell_gone(&name),
                (_, Some(d)) => tracing::info!("{}: nothing is spliced there", why_unwanted(d, &all)),
            }
        }
        for d in wanted.iter().filter(|d| !attached.contains(&d.index)) {
            let early = self.xdp.contains(&d.name) && xdp_abilities(d.index).receives;
            match attachment.attach(d, early) {
                Ok(()) => tracing::info!("splicing on {}, too", d.name),
                Err(error) if refused.insert(d.index) => {
                    tracing::warn!(%error, "cannot attach to {}: nothing is spliced there", d.name)
                }
                Err(_) => {}
            }
        }
        if let Err(error) = attachment.watch(&all) {
            tracing::warn!(%error, "cannot update the guard: packets on other devices may be dropped or accepted wrongly");
        }
    }

    /// Logs that a device is gone. If devices were named, somebody relies on each.
    pub fn tell_gone(&self, name: &str) {
        match self.devices.is_empty() {
            true => tracing::info!("{name} is gone: nothing is spliced there"),
            false => tracing::warn!("{name} is gone: nothing is spliced there until a device of that name comes"),
        }
    }

    /// Replaces a neighbour's old address in next hops, unless another neighbour still has it: then flows have to be looked up.
    fn replace(&self, r: &Replaced) -> io::Result<()> {
        let hops = &self.next_hops;
        if hops.routes().has(r.device, r.old) {
            return Ok(());
        }
        let link = hops.links().of(r.device);
        for (i, v) in hops.vias().iter_mut().enumerate() {
            if (v.raw.ifindex, v.raw.dmac) == (r.device, r.old) {
                hops.rewrite(&self.maps, i, v, v.with(&Hop { dmac: r.new, ..v.hop() }, link))?;
            }
        }
        Ok(())
    }

    /// Rewrites next hops whose devices have changed.
    fn refresh(&self) -> io::Result<()> {
        let hops = &self.next_hops;
        let used: HashSet<u32> = hops.vias().iter().map(|v| v.raw.ifindex).collect();
        for device in used {
            let link = hops.links().ask(device);
            for (i, v) in hops.vias().iter_mut().enumerate() {
                if v.raw.ifindex == device && !v.is_as(link) {
                    hops.rewrite(&self.maps, i, v, v.with(&v.hop(), link))?;
                }
            }
        }
        Ok(())
    }

    fn look_after(&self) -> io::Result<()> {
        let mut used: HashSet<_> = self.next_hops.vias().iter().filter(|v| v.used).map(Via::hop).collect();
        used.extend(self.next_hops.switch_hops().hops());
        self.next_hops.routes().look_after(&used.iter().map(|hop| (hop.ifindex, hop.dmac)).collect(), ASKED)
    }

    /// Looks up the route of each flow, and updates its next hop. Returns the number
    /// of directions without a route, and the legs whose route leads elsewhere.
    fn pass(&self) -> io::Result<(u64, Vec<Tuple>)> {
        // commits that began before a change are now in the tables
        drop(self.switching.lock().expect("no panic under this lock"));
        let began = Instant::now();
        let mut tallies: HashMap<u16, HashMap<Hop, u64>> = HashMap::new();
        let (mut stranded, mut elsewhere) = (0, Vec::new());
        self.each_route(|leg, via, route| {
            let tally = tallies.entry(via).or_default();
            match route {
                Route::To(hop) => *tally.entry(hop).or_default() += 1,
                Route::Unresolved => {}
                Route::Unreachable => stranded += u64::from(!self.is_over(leg)),
                Route::Elsewhere => {
                    stranded += u64::from(!self.is_over(leg));
                    if elsewhere.len() < ELSEWHERE {
                        elsewhere.push(*leg);
                    }
                }
            }
            Ok(())
        })?;
        if self.settle(&tallies, began)? {
            self.each_route(|leg, via, route| match route {
                Route::To(hop) => self.move_flow(leg, via, &hop),
                _ => Ok(()),
            })?;
        }
        self.lead_switching()?;
        self.next_hops.switch_hops().forget(began);
        self.next_hops.changes.stranded.store(stranded, Relaxed);
        Ok((stranded, elsewhere))
    }

    /// Updates next hops of flows in a switch. They use the one that their socket has used last, and it may be silent.
    fn lead_switching(&self) -> io::Result<()> {
        let reach = self.reach();
        for (leg, _) in self.stopped_paths() {
            let Some(l) = self.leg(&leg).filter(LegView::is_switching) else { continue };
            let shown = Hop { ifindex: l.raw.ifindex, dmac: l.raw.dmac, smac: l.raw.smac, mark: l.raw.mark };
            self.next_hops.switch_hops().add(&[shown]);
            let sender = Sender { leg, device: shown.ifindex, mark: shown.mark };
            let routes = self.next_hops.routes().look_up(&[sender], &reach)?;
            let Route::To(hop) = routes[0] else { continue };
            if hop == shown {
                continue;
            }
            self.next_hops.switch_hops().add(&[hop]);
            let key = self.next_hops.key(&hop, leg.to_abi().local, u32::MAX);
            match self.next_hops.slot(&self.maps, &key) {
                Err(e) if e.kind() == io::ErrorKind::StorageFull => {} // as good as no route
                via => self.maps.lead(&leg, via?)?,
            }
        }
        Ok(())
    }

    /// Returns what flows may expect of a device.
    fn reach(&self) -> impl Fn(u32) -> Reach {
        let attached = self.attached();
        let all = self.next_hops.routes().devices();
        let soon: HashSet<u32> = wanted(&self.devices, &all).iter().map(|d| d.index).collect();
        move |device| match () {
            () if attached.contains(&device) => Reach::Attached,
            () if soon.contains(&device) => Reach::Soon,
            () => Reach::Never,
        }
    }

    /// Calls `f` for each direction of a flow in forwarding mode: the
    /// leg on which its packets arrive, its next hop, and its route.
    fn each_route(&self, mut f: impl FnMut(&Tuple, u16, Route) -> io::Result<()>) -> io::Result<()> {
        let vias: Vec<_> = self.next_hops.vias().iter().map(|v| (v.raw.ifindex, v.raw.mark, v.raw.local)).collect();
        if vias.is_empty() {
            return Ok(());
        }
        let reach = self.reach();
        let (mut batch, mut legs) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let mut look = |batch: &mut Vec<(Tuple, u16)>, legs: &mut Vec<_>| -> io::Result<()> {
            let routes = self.next_hops.routes().look_up(legs, &reach)?;
            legs.clear();
            batch.drain(..).zip(routes).try_for_each(|((leg, via), route)| f(&leg, via, route))
        };
        let mut result = Ok(());
        self.maps.each_path(|t, e| {
            let p = PathView::new(&e.p);
            if p.flags & (PathFlags::SPLICED | PathFlags::DEAD) != PathFlags::SPLICED || result.is_err() {
                return;
            }
            let Some(&(device, mark, local)) = vias.get(usize::from(p.via)) else { return };
            let Some(leg) = self.maps.way_out(&t, e, local) else { return };
            batch.push((t, p.via));
            legs.push(Sender { leg, device, mark });
            if batch.len() == BATCH {
                result = look(&mut batch, &mut legs);
            }
        })?;
        result.and_then(|()| look(&mut batch, &mut legs))
    }

    /// Rewrites next hops that none of their flows uses any more. Returns whether some flows need another one.
    fn settle(&self, tallies: &HashMap<u16, HashMap<Hop, u64>>, began: Instant) -> io::Result<bool> {
        let hops = &self.next_hops;
        let mut is_divided = false;
        for (i, v) in hops.vias().iter_mut().enumerate() {
            let tally = tallies.get(&(i as u16));
            v.used = tally.is_some() || v.given >= began;
            let Some((most, _)) = tally.and_then(|t| t.iter().max_by_key(|(_, n)| **n)) else { continue };
            let agrees = tally.is_some_and(|t| t.contains_key(&v.hop()));
            is_divided |= tally.is_some_and(|t| t.len() > 1);
            if !agrees {
                let link = hops.links().of(most.ifindex);
                hops.rewrite(&self.maps, i, v, v.with(most, link))?;
            }
        }
        Ok(is_divided)
    }

    /// Moves a direction of a flow to another next hop.
    fn move_flow(&self, leg: &Tuple, from: u16, hop: &Hop) -> io::Result<()> {
        /// Packets may interfere, but not for ever.
        const TRIES: u32 = 16;
        let _one = self.switching.lock().expect("no panic under this lock");
        let key = match self.next_hops.vias().get(usize::from(from)) {
            Some(v) if v.hop() != *hop => ViaKey { hop: *hop, ..v.key() },
            _ => return Ok(()),
        };
        let to = match self.next_hops.slot(&self.maps, &key) {
            Err(e) if e.kind() == io::ErrorKind::StorageFull => return Ok(()), // as good as no route
            to => to?,
        };
        for _ in 0..TRIES {
            if self.maps.move_path(leg, [from, to])? {
                self.next_hops.changes.flows.fetch_add(1, Relaxed);
                break;
            }
        }
        Ok(())
    }
}
