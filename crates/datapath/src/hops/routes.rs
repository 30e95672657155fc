//! The kernel's next hop for a socket's packets. Routes are looked up; devices and neighbours are known from notifications.

use crate::{
    Tuple,
    names::MAX_VIAS,
    network::devices::{Device, devices},
    network::netlink::{Message, Netlink, address, attributes, find, messages, number, octets, request},
    switching::switch::Hop,
};
use nix::{libc, sys::socket::MsgFlags};
use std::{
    collections::{HashMap, HashSet},
    io, mem,
    net::IpAddr,
};

/// Number of look-ups sent together. Their answers fit into a socket's buffer.
pub(crate) const BATCH: usize = 16;
/// Maximum number of neighbours that flows wait for, or that the kernel has forgotten: as many as there are next hops.
const WANTED: usize = MAX_VIAS as usize;

/// A neighbour (`struct ndmsg`).
#[derive(Clone, Copy, Debug)]
struct Neighbour {
    /// The last known MAC address. It stays while nobody answers.
    mac: Option<[u8; 6]>,
    /// State, NUD_*; 0: the kernel has forgotten the neighbour.
    state: u16,
    /// Flags, NTF_*.
    flags: u8,
}

impl Neighbour {
    /// Returns whether the neighbour is reachable, as far as the kernel knows.
    fn is_valid(&self) -> bool {
        const VALID: u16 = libc::NUD_PERMANENT
            | libc::NUD_NOARP
            | libc::NUD_REACHABLE
            | libc::NUD_PROBE
            | libc::NUD_STALE
            | libc::NUD_DELAY;
        self.state & VALID != 0
    }

    /// Returns whether the kernel checks the neighbour only when somebody sends to it. Our packets bypass the kernel.
    fn is_neglected(&self) -> bool {
        const NTF_EXT_LEARNED: u8 = 1 << 4;
        const LOOKED_AFTER: u16 = libc::NUD_PERMANENT
            | libc::NUD_NOARP
            | libc::NUD_REACHABLE
            | libc::NUD_DELAY
            | libc::NUD_PROBE
            | libc::NUD_INCOMPLETE;
        self.state & LOOKED_AFTER == 0 && self.flags & NTF_EXT_LEARNED == 0
    }
}

/// A sender whose next hop is looked up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sender {
    pub leg: Tuple,
    /// The device over which it sends now, for addresses that mean nothing without a device.
    pub device: u32,
    /// Mark of its packets.
    pub mark: u32,
}

/// What the kernel would do with packets to a leg's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Send them to this next hop.
    To(Hop),
    /// Resolve a neighbour that has not answered yet.
    Unresolved,
    /// Drop them: no route, or none over a device that is or will be attached.
    Unreachable,
    /// Send them over a device that is up, but will never be attached.
    Elsewhere,
}

/// Whether the data path is attached to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It is attached.
    Attached,
    /// It will be attached.
    Soon,
    /// It will not be attached.
    Never,
}

/// A neighbour whose Ethernet address has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replaced {
    pub device: u32,
    pub old: [u8; 6],
    pub new: [u8; 6],
}

/// The result of processing notifications.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub replaced: Vec<Replaced>,
    /// A change that may affect next hops.
    pub changed: bool,
    /// A change of devices or their abilities.
    pub devices: bool,
}

#[derive(Debug)]
pub(crate) struct Routes {
    devices: HashMap<u32, Device>,
    neighbours: HashMap<(u32, IpAddr), Neighbour>,
    /// Neighbours on routes whose address is not known.
    wanted: HashSet<(u32, IpAddr)>,
    /// Neighbours that share an address which another neighbour no longer has. A host announces a new address
    /// for one of its IP addresses only, and the kernel would trust the others for three quarters of a minute.
    doubted: HashSet<(u32, IpAddr)>,
    netlink: Netlink,
}

impl Routes {
    /// Creates an empty state. Call [`Routes::read_all`].
    pub fn new() -> io::Result<Routes> {
        let netlink = Netlink::open(&[])?;
        let (devices, neighbours, wanted, doubted) = Default::default();
        Ok(Routes { devices, neighbours, wanted, doubted, netlink })
    }

    /// Reads the complete state from the kernel.
    pub fn read_all(&mut self) -> io::Result<Heard> {
        let mut heard = Heard { changed: true, devices: true, ..Heard::default() };
        self.devices = devices()?.into_iter().map(|d| (d.index, d)).collect();
        // those that are not mentioned are gone
        self.neighbours.values_mut().for_each(|n| n.state = 0);
        let mut netlink = Netlink::open(&[])?;
        netlink.dump(libc::RTM_GETNEIGH, &[0; 12], &[], |(_, body)| {
            self.neighbour(true, body, &mut heard);
        })?;
        Ok(heard)
    }

    /// Returns the devices as last reported, by index.
    pub fn devices(&self) -> Vec<Device> {
        let mut all: Vec<_> = self.devices.values().cloned().collect();
        all.sort_by_key(|d| d.index);
        all
    }

    /// Processes all notifications. Reads everything again if some were lost.
    pub fn hear(&mut self, netlink: &mut Netlink) -> io::Result<Heard> {
        let mut heard = Heard::default();
        let mut lost = false;
        loop {
            match netlink.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(datagram) => messages(datagram).for_each(|m| self.take_in(m, &mut heard)),
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if lost {
            let all = self.read_all()?;
            heard = Heard { replaced: [heard.replaced, all.replaced].concat(), ..all };
        }
        Ok(heard)
    }

    fn take_in(&mut self, (kind, body): Message<'_>, heard: &mut Heard) {
        match kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => {
                let Some(d) = Device::read(body) else { return };
                let (index, there) = (d.index, kind == libc::RTM_NEWLINK);
                let before = if there { self.devices.insert(index, d) } else { self.devices.remove(&index) };
                let is_new = before.as_ref() != self.devices.get(&index);
                heard.changed |= is_new;
                heard.devices |= is_new;
            }
            libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => {
                self.neighbour(kind == libc::RTM_NEWNEIGH, body, heard);
            }
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
                // struct rtmsg ends with its flags; clones are results of look-ups
                let flags = body.get(8..).and_then(number).unwrap_or(0);
                heard.changed |= flags & libc::RTM_F_CLONED == 0;
            }
            _ => heard.changed = true, // addresses, rules, next hops with an id
        }
    }

    /// Processes `struct ndmsg`.
    fn neighbour(&mut self, there: bool, body: &[u8], heard: &mut Heard) -> Option<()> {
        let (head, rest) = body.split_at_checked(12)?;
        if ![libc::AF_INET, libc::AF_INET6].contains(&head[0].into()) {
            return None; // of a bridge
        }
        let of = attributes(rest);
        let (device, who) = (number(&head[4..])?, find(&of, libc::NDA_DST).and_then(address)?);
        let state = if there { u16::from_ne_bytes([head[8], head[9]]) } else { 0 };
        let mac = find(&of, libc::NDA_LLADDR).and_then(|m| m.try_into().ok());
        let entry = self.neighbours.entry((device, who));
        let n = entry.or_insert(Neighbour { mac: None, state: 0, flags: 0 });
        let before = mem::replace(n, Neighbour { state, flags: head[10], ..*n });
        if let Some(new) = mac.filter(|_| n.is_valid()) {
            n.mac = Some(new);
            heard.changed |= self.wanted.remove(&(device, who));
            if let Some(old) = before.mac.filter(|old| *old != new) {
                heard.changed = true;
                heard.replaced.push(Replaced { device, old, new });
                let same = |(d, _): &&(u32, IpAddr), n: &Neighbour| *d == device && n.mac == Some(old) && n.is_valid();
                let doubted = self.neighbours.iter().filter(|(who, n)| same(who, n)).map(|(who, _)| *who);
                self.doubted.extend(doubted.take(WANTED - self.doubted.len().min(WANTED)));
            }
        }
        Some(())
    }

    /// Returns whether a neighbour has this address.
    pub fn has(&self, device: u32, mac: [u8; 6]) -> bool {
        self.neighbours.iter().any(|((d, _), n)| *d == device && n.mac == Some(mac) && n.is_valid())
    }

    /// Returns a hop that a socket has used, without its mark if that was set on packets after their routing.
    pub fn explained(&mut self, leg: &Tuple, shown: &Hop) -> Hop {
        let mut leads_there = |mark| self.device(leg, mark) == Some(shown.ifindex);
        let is_plain = shown.mark != 0 && !leads_there(shown.mark) && leads_there(0);
        Hop { mark: if is_plain { 0 } else { shown.mark }, ..*shown }
    }

    /// Returns the device over which packets to a leg's host would leave. `None` without a route, or if an error leaves it open.
    pub fn device(&mut self, leg: &Tuple, mark: u32) -> Option<u32> {
        if is_link_local(leg) {
            return None; // such an address exists on every device
        }
        let of = [Sender { leg: *leg, device: 0, mark }];
        let found = self.query(&of, true).inspect_err(|_| self.forget_answers()).ok()?;
        found[0].map(|(device, _)| device)
    }

    /// Looks up where packets to these legs' hosts would go now.
    pub fn look_up(&mut self, legs: &[Sender], reach: impl Fn(u32) -> Reach) -> io::Result<Vec<Route>> {
        let routes = self.query(legs, true).inspect_err(|_| self.forget_answers())?;
        // our address may belong to another host, as with transparent connections
        let again: Vec<_> = (0..legs.len()).filter(|i| routes[*i].is_none()).collect();
        let without: Vec<_> = again.iter().map(|i| legs[*i]).collect();
        let mut second = self.query(&without, false).inspect_err(|_| self.forget_answers())?.into_iter();
        let found = routes.into_iter().map(|route| route.or_else(|| second.next().flatten()));
        let found: Vec<_> = found.zip(legs).collect();
        Ok(found.into_iter().map(|(route, of)| self.route(route, of.mark, &reach)).collect())
    }

    /// Reopens the socket after an error, because answers may be in flight.
    fn forget_answers(&mut self) {
        if let Ok(fresh) = Netlink::open(&[]) {
            self.netlink = fresh;
        }
    }

    fn route(&mut self, route: Option<(u32, IpAddr)>, mark: u32, reach: impl Fn(u32) -> Reach) -> Route {
        let Some((device, gateway)) = route else { return Route::Unreachable };
        let Some(d) = self.devices.get(&device).filter(|d| d.up) else { return Route::Unreachable };
        match reach(device) {
            Reach::Attached => {}
            Reach::Soon => return Route::Unreachable,
            Reach::Never => return Route::Elsewhere,
        }
        let mac = self.neighbours.get(&(device, gateway)).filter(|n| n.is_valid()).and_then(|n| n.mac);
        if let Some(dmac) = mac {
            return Route::To(Hop { ifindex: device, dmac, smac: d.mac, mark });
        }
        if self.wanted.len() < WANTED {
            self.wanted.insert((device, gateway));
        }
        Route::Unresolved
    }

    /// Looks up device and neighbour of each leg.
    fn query(&mut self, legs: &[Sender], with_source: bool) -> io::Result<Vec<Option<(u32, IpAddr)>>> {
        let mut found = Vec::with_capacity(legs.len());
        for batch in legs.chunks(BATCH) {
            let questions: Vec<_> = batch.iter().flat_map(|of| question(of, with_source)).collect();
            self.netlink.send(&questions)?;
            let mut legs = batch.iter();
            while legs.len() > 0 {
                for (kind, body) in messages(self.netlink.receive(MsgFlags::empty())?) {
                    let Some(of) = legs.next() else { break };
                    found.push(if kind == libc::RTM_NEWROUTE { answer(body, &of.leg) } else { None });
                }
            }
        }
        Ok(found)
    }

    /// Makes the kernel check neighbours that nobody checks: those that flows wait for,
    /// those in `used` (device and address), and those in doubt, at most `most` at a time.
    pub fn look_after(&mut self, used: &HashSet<(u32, [u8; 6])>, most: usize) -> io::Result<()> {
        let asked = |n: &Neighbour| n.state & (libc::NUD_PERMANENT | libc::NUD_NOARP) == 0 && n.is_valid();
        let doubted: Vec<_> = self.doubted.drain().filter(|who| self.neighbours.get(who).is_some_and(asked)).collect();
        for (device, who) in doubted.into_iter().take(most) {
            self.ask_kernel(device, who, libc::NLM_F_REPLACE, libc::NUD_PROBE, 0);
        }
        let is_up = |d: u32| self.devices.get(&d).is_some_and(|d| d.up);
        let is_used = |d: u32, n: &Neighbour| is_up(d) && n.mac.is_some_and(|mac| used.contains(&(d, mac)));
        self.wanted.retain(|(d, _)| is_up(*d));
        // those that are gone and no longer needed; or somebody invents neighbours with the address of one that is needed
        let mut kept = 0..WANTED;
        self.neighbours.retain(|(d, _), n| n.state != 0 || (is_used(*d, n) && kept.next().is_some()));
        let is_idle = |who| self.neighbours.get(who).is_none_or(Neighbour::is_neglected);
        let wanted = self.wanted.iter().filter(|who| is_idle(*who));
        let neglected = self.neighbours.iter().filter(|((d, _), n)| n.is_neglected() && is_used(*d, n));
        let all: Vec<_> = wanted.chain(neglected.map(|(who, _)| who)).copied().take(most).collect();
        for (device, who) in all {
            self.ask_kernel(device, who, libc::NLM_F_CREATE, 0, libc::NTF_USE);
        }
        Ok(())
    }

    /// Sets the state of a neighbour (NUD_*), or marks it as used (NTF_*).
    fn ask_kernel(&mut self, device: u32, who: IpAddr, how: libc::c_int, state: u16, flags: u8) {
        let (bytes, family) = octets(who);
        let mut head = [0; 12];
        head[0] = family;
        head[4..8].copy_from_slice(&device.to_ne_bytes());
        head[8..10].copy_from_slice(&state.to_ne_bytes());
        head[10] = flags;
        let question = request(libc::RTM_NEWNEIGH, how | libc::NLM_F_ACK, &head, &[(libc::NDA_DST, &bytes)]);
        // its device may be gone or down, and the table may be full
        if let Err(error) = self.netlink.ask(&question) {
            tracing::debug!(%error, device, %who, "not asked");
        }
    }
}

fn is_link_local(leg: &Tuple) -> bool {
    matches!(leg.remote.ip(), IpAddr::V6(a) if a.is_unicast_link_local())
}

/// Builds RTM_GETROUTE, as for a packet of our socket.
fn question(Sender { leg, device, mark }: &Sender, with_source: bool) -> Vec<u8> {
    const RTA_IP_PROTO: u16 = 27;
    const RTA_SPORT: u16 = 28;
    const RTA_DPORT: u16 = 29;
    let ((to, family), (from, _)) = (octets(leg.remote.ip()), octets(leg.local.ip()));
    let ports = [leg.local, leg.remote].map(|a| a.port().to_be_bytes());
    let (device, mark) = (device.to_ne_bytes(), mark.to_ne_bytes());
    let mut head = [0; 12];
    head[..2].copy_from_slice(&[family, 8 * to.len() as u8]);
    let mut attributes: Vec<(u16, &[u8])> = vec![
        (libc::RTA_DST, &to),
        (RTA_IP_PROTO, &[libc::IPPROTO_TCP as u8]),
        (RTA_SPORT, &ports[0]),
        (RTA_DPORT, &ports[1]),
        (libc::RTA_MARK, &mark),
    ];
    if with_source {
        head[2] = 8 * from.len() as u8;
        attributes.push((libc::RTA_SRC, &from));
    }
    // such an address belongs to a host on one link, and a leg does not say on which
    if is_link_local(leg) {
        attributes.push((libc::RTA_OIF, &device));
    }
    request(libc::RTM_GETROUTE, 0, &head, &attributes)
}

/// Returns device and neighbour from an answer (`struct rtmsg`).
fn answer(body: &[u8], leg: &Tuple) -> Option<(u32, IpAddr)> {
    let (head, rest) = body.split_at_checked(12)?;
    if head[7] != libc::RTN_UNICAST {
        return None; // local, or rejected
    }
    let of = attributes(rest);
    let device = find(&of, libc::RTA_OIF).and_then(number)?;
    // RTA_VIA: a family first, for a gateway of the other family (RFC 8950)
    const RTA_VIA: u16 = 18;
    let via = || find(&of, RTA_VIA).and_then(|v| v.get(2..)).and_then(address);
    let gateway = find(&of, libc::RTA_GATEWAY).and_then(address).or_else(via);
    Some((device, gateway.unwrap_or(leg.remote.ip())))
}
