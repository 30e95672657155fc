//! Translucent proxying: the router of a farm of proxies, by the program of bpf/tpot/tpot_router.bpf.c. docs/tpot.md describes it.

use crate::{
    Destinations, OpenError,
    attaching::attach::{Hook, Place, create, wanted_devices},
    attaching::load::load_object,
    attaching::pins::{Owned, is_owned, tpot_router_pin},
    network::devices::{Device, devices},
    tables::maps::{Pod, address, bytes_of, io_error, sum_of, words},
    tpot::proxy::{ip, raw, update},
    tpot::tables::plain,
    tpot_abi::{tpot_address, tpot_config, tpot_constant, tpot_rule_kind},
    tpot_router_abi::tpot_farm,
};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapImpl, Object, ObjectBuilder};
use nix::ifaddrs::getifaddrs;
use std::{
    collections::{HashMap, hash_map::Entry},
    fs,
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher, RandomState},
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Mutex,
};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tpot_router.bpf.o"));
const SLOTS: usize = tpot_constant::TPOT_SLOTS.0 as usize;
/// Maximum number of members of a farm.
pub const TPOT_MEMBERS: usize = tpot_constant::TPOT_MEMBERS.0 as usize;
/// Maximum weight of a member.
pub const TPOT_WEIGHT: u8 = 100;

/// Options of [`TpotRouter::open`].
#[derive(Clone, Debug)]
pub struct TpotRouterOptions {
    /// Name of the device in the farm's network, to which no other proxies or hosts belong.
    pub farm: String,
    /// Addresses of the farm's members in that network, one of each family for each member, at most [`TPOT_MEMBERS`].
    pub members: Vec<IpAddr>,
    /// Which SYNs go to a member if they carry the option: their destinations. At most [`TPOT_RULES`](crate::TPOT_RULES).
    pub to: Vec<Destinations>,
    /// Names of the devices where such SYNs leave. Empty: all Ethernet devices but the farm's.
    pub devices: Vec<String>,
    /// Identifier of the option (RFC 6994).
    pub exid: u16,
    /// Directory of the pins. `None`: one for this network namespace.
    pub pin: Option<PathBuf>,
}

/// Reasons why [`TpotRouter::open`] fails.
#[derive(Debug, thiserror::Error)]
pub enum TpotRouterError {
    /// The options contradict each other or this machine.
    #[error("{0}")]
    Mistake(String),
    /// The program cannot be loaded or attached, or a device does not exist.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// A member of a farm, as its router sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TpotMember {
    /// Address of the member.
    pub address: IpAddr,
    /// Its share of the SYNs of its address family that are sent to the farm, from 0 to 1. 0: it is down.
    pub share: f64,
    /// Number of SYNs sent to it.
    pub syns: u64,
}

/// Sends SYNs that ask for a proxy to the members of a farm. Only the maps are pinned: when the process ends, however it does,
/// the program is detached, and everything is routed. The connections of the members do not depend on it.
pub struct TpotRouter {
    object: Object,
    options: TpotRouterOptions,
    /// The link to each device, by its index.
    links: Mutex<HashMap<u32, OwnedFd>>,
    owned: Owned,
}

impl TpotRouter {
    /// Loads the program and attaches it. No member gets SYNs before [`TpotRouter::set_weights`].
    pub fn open(options: TpotRouterOptions) -> Result<TpotRouter, TpotRouterError> {
        let failed = |what| move |source| OpenError::Kernel { what, source };
        let all = devices().map_err(failed("list of devices"))?;
        check(&options, &all)?;
        let pin = options.pin.clone().map_or_else(tpot_router_pin, Ok).map_err(failed("network namespace"))?;
        let owned = Owned::take(&pin)?;
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(|e| OpenError::Kernel { what: "read programs", source: io::Error::other(e) })?;
        for mut map in open.maps_mut().filter(|map| map.name().to_string_lossy().starts_with("tpot_")) {
            let path = owned.path.join(map.name());
            if path.exists() {
                fs::remove_file(&path).map_err(failed("remove a map of a killed process"))?;
            }
            map.set_pin_path(&path).map_err(|e| OpenError::Kernel { what: "pin maps", source: io::Error::other(e) })?;
        }
        let router = TpotRouter { object: load_object(open)?, options, links: Mutex::default(), owned };
        router.configure().map_err(failed("rules"))?;
        router.follow()?;
        Ok(router)
    }

    fn map(&self, name: &str) -> MapImpl<'_> {
        self.object.maps().find(|m| m.name() == name).expect("the object has it")
    }

    fn configure(&self) -> io::Result<()> {
        let TpotRouterOptions { to, members, exid, .. } = &self.options;
        for (i, to) in (0u32..).zip(to) {
            update(&self.map("tpot_rules"), &i, &raw(to, tpot_rule_kind::TPOT_RULE_TAKE))?;
        }
        for (i, member) in (0u32..).zip(members) {
            update(&self.map("tpot_members"), &i, &tpot_address { words: words(*member) })?;
        }
        let config = tpot_config { rules: to.len() as u32, exid: *exid, ..Default::default() };
        update(&self.map("tpot_config"), &0u32, &config)
    }

    /// Attaches to new devices, and finds the farm's again if it was made anew. Call it when devices change.
    pub fn follow(&self) -> Result<(), OpenError> {
        let failed = |what| move |source| OpenError::Kernel { what, source };
        let all = devices().map_err(failed("list of devices"))?;
        let TpotRouterOptions { farm, devices, .. } = &self.options;
        let ifindex = all.iter().find(|d| d.name == *farm).map_or(0, |d| d.index);
        let mut links = self.links.lock().expect("no panic under this lock");
        // first of all, no device that carries the farm's packets keeps the program
        let wanted = wanted(farm, devices, &all).inspect_err(|_| links.clear())?;
        links.retain(|index, _| wanted.contains(index));
        if self.farm().map_err(failed("farm"))?.ifindex != ifindex {
            let random = RandomState::new();
            let key = [0, 1].map(|word: u64| random.hash_one(word));
            update(&self.map("tpot_farm"), &0u32, &tpot_farm { ifindex, key, ..Default::default() })
                .map_err(failed("farm"))?;
        }
        let program = self.object.progs().find(|p| p.name() == "tpot_router").expect("the object has it");
        for index in wanted {
            if let Entry::Vacant(link) = links.entry(index) {
                let attached = create(Hook::Egress, Place::Last, program.as_fd(), index);
                link.insert(attached.map_err(failed("attach tcx"))?);
            }
        }
        Ok(())
    }

    fn farm(&self) -> io::Result<tpot_farm> {
        let value = self.map("tpot_farm").lookup(bytes_of(&0u32), MapFlags::ANY).map_err(io_error)?;
        value.and_then(|value| plain(&value)).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Distributes SYNs among the members, in the order of the options, in proportion to weights up to [`TPOT_WEIGHT`]. A member
    /// with 0 gets none; if all have 0, SYNs are routed. Only SYNs to members whose weight changes, or from them, move to another
    /// member; a retransmitted SYN goes to the same one as long as nothing moves it.
    pub fn set_weights(&self, weights: &[u8]) -> io::Result<()> {
        for v6 in [false, true] {
            let slots = distribute(&self.options.members, weights, v6);
            self.map("tpot_slots").update(bytes_of(&u32::from(v6)), &slots, MapFlags::ANY).map_err(io_error)?;
        }
        Ok(())
    }

    /// Returns the members, in the order of the options.
    pub fn members(&self) -> io::Result<Vec<TpotMember>> {
        members(&self.options.members, &self.map("tpot_slots"), &self.map("tpot_chosen"))
    }

    /// Returns the counters: names and numbers of SYNs.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        verdicts(&self.map("tpot_routed"))
    }
}

impl Drop for TpotRouter {
    fn drop(&mut self) {
        // what cannot be removed is removed by the next start
        let _ = self.owned.remove();
    }
}

/// The router of a farm in this network namespace.
#[derive(Clone, Debug)]
pub struct TpotFarm {
    /// Its members.
    pub members: Vec<TpotMember>,
    /// Its counters: names and numbers of SYNs.
    pub verdicts: Vec<(&'static str, u64)>,
}

/// Returns the farm whose router runs in this network namespace. Fails with [`io::ErrorKind::NotFound`] if none does.
pub fn tpot_router() -> io::Result<TpotFarm> {
    let pin = tpot_router_pin()?;
    if !is_owned(&pin)? {
        return Err(io::ErrorKind::NotFound.into());
    }
    let map = |name: &str| MapHandle::from_pinned_path(pin.join(name)).map_err(io_error);
    let all = map("tpot_members")?;
    let of = |key: Vec<u8>| plain::<tpot_address>(&all.lookup(&key, MapFlags::ANY).ok()??).map(|a| a.words);
    let addresses: Vec<_> = all.keys().filter_map(of).filter(|words| *words != [0; 4]).map(address).collect();
    let members = members(&addresses, &map("tpot_slots")?, &map("tpot_chosen")?)?;
    Ok(TpotFarm { members, verdicts: verdicts(&map("tpot_routed")?)? })
}

fn members(addresses: &[IpAddr], slots: &impl MapCore, chosen: &impl MapCore) -> io::Result<Vec<TpotMember>> {
    let of_family = |v6: bool| slots.lookup(bytes_of(&u32::from(v6)), MapFlags::ANY).map_err(io_error);
    let slots = [of_family(false)?.unwrap_or_default(), of_family(true)?.unwrap_or_default()];
    let member = |(i, address): (usize, &IpAddr)| {
        let its = slots[usize::from(address.is_ipv6())].iter().filter(|slot| usize::from(**slot) == i + 1).count();
        Ok(TpotMember { address: *address, share: its as f64 / SLOTS as f64, syns: sum_of(chosen, i as u32)? })
    };
    addresses.iter().enumerate().map(member).collect()
}

fn verdicts(routed: &impl MapCore) -> io::Result<Vec<(&'static str, u64)>> {
    let sum = |(i, name): (usize, &&'static str)| Ok((*name, sum_of(routed, i as u32)?));
    crate::tpot::proxy::generated::TPOT_ROUTER_VERDICTS.iter().enumerate().map(sum).collect()
}

/// Returns the index of each slot's member, plus 1; 0 if no member of the family has a weight. Each member draws a number for each
/// slot, and the lowest one, divided by the weight, wins (rendezvous hashing). So a slot moves only to or from a member whose
/// weight changes.
fn distribute(members: &[IpAddr], weights: &[u8], v6: bool) -> Vec<u8> {
    let hash = BuildHasherDefault::<DefaultHasher>::new();
    let draw = |member: &IpAddr, weight: u8, slot: usize| {
        let random = (hash.hash_one((member, slot)) >> 11 | 1) as f64 / (1u64 << 53) as f64;
        -random.ln() / f64::from(weight)
    };
    let are_up = |((_, member), weight): &((u8, &IpAddr), &u8)| member.is_ipv6() == v6 && **weight > 0;
    let up: Vec<_> = (1u8..).zip(members).zip(weights).filter(are_up).collect();
    let winner = |slot| {
        let draws = up.iter().map(|((index, member), weight)| (draw(member, **weight, slot), *index));
        draws.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |(_, index)| index)
    };
    (0..SLOTS).map(winner).collect()
}

/// Returns the indices of the devices where SYNs to be sent to the farm leave: neither its own, nor one that carries its packets,
/// where they would be seen again. Devices that do not exist are left out.
fn wanted(farm: &String, devices: &[String], all: &[Device]) -> Result<Vec<u32>, OpenError> {
    let exists = |name: &&String| all.iter().any(|d| d.name == **name);
    let named: Vec<_> = devices.iter().chain([farm]).filter(exists).cloned().collect();
    let mut wanted = wanted_devices(if devices.is_empty() { &[] } else { &named }, all)?;
    wanted.retain(|index| all.iter().any(|d| d.index == *index && d.name != *farm));
    Ok(wanted)
}

/// Fails if this cannot be a farm.
fn check(options: &TpotRouterOptions, all: &[Device]) -> Result<(), TpotRouterError> {
    let TpotRouterOptions { farm, members, to, devices, .. } = options;
    let wrong = |what: String| Err(TpotRouterError::Mistake(what));
    wanted_devices(devices, all)?;
    let device = all.iter().find(|d| d.ethernet && d.name == *farm).ok_or_else(|| OpenError::Device(farm.clone()))?;
    if let Some(above) = device.master.and_then(|index| all.iter().find(|d| d.index == index)) {
        return wrong(format!("packets arrive on {0}, of which {farm} is a port: name {0}", above.name));
    }
    if devices.contains(farm) {
        return wrong(format!(
            "{farm} is the farm's device, where SYNs to its members leave anyway: leave it out of the others"
        ));
    }
    wanted(farm, devices, all)?;
    if members.len() > TPOT_MEMBERS {
        return wrong(format!("{} members, and there is room for {TPOT_MEMBERS}", members.len()));
    }
    if to.len() > crate::TPOT_RULES {
        let room = crate::TPOT_RULES;
        return wrong(format!(
            "{} rules, one for every prefix with every port, and there is room for {room}",
            to.len()
        ));
    }
    let addresses: Vec<_> =
        getifaddrs().map_err(|e| OpenError::Kernel { what: "addresses", source: e.into() })?.collect();
    let own: Vec<_> = addresses.iter().filter_map(|a| Some((a, ip(a.address.as_ref()?)?))).collect();
    for (i, member) in members.iter().enumerate() {
        let is_near = |(a, own): &(&nix::ifaddrs::InterfaceAddress, IpAddr)| {
            let mask = a.netmask.as_ref().and_then(ip).filter(|_| a.interface_name == *farm).map(words);
            let [one, other] = [own, member].map(|ip| words(*ip));
            own.is_ipv6() == member.is_ipv6()
                && mask.is_some_and(|mask| (0..4).all(|i| (one[i] ^ other[i]) & mask[i] == 0))
        };
        if members[..i].contains(member) {
            return wrong(format!("{member} is named twice"));
        }
        if own.iter().any(|(_, own)| own == member) {
            return wrong(format!("{member} is an address of this machine, and no member's"));
        }
        if matches!(member, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
            return wrong(format!("{member} is a link-local address, and hosts have to reach members by theirs"));
        }
        if !own.iter().any(is_near) {
            return wrong(format!(
                "{member} is in no network of {farm}: give {farm} an address of its network, or correct it"
            ));
        }
    }
    Ok(())
}

// SAFETY: a C struct of integers and arrays of them, with explicit fillers in place of padding.
unsafe impl Pod for tpot_farm {}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(n: u8) -> Vec<IpAddr> {
        (1..=n).map(|host| IpAddr::from([10, 0, 0, host])).collect()
    }

    fn counts(slots: &[u8], n: usize) -> Vec<usize> {
        (0..=n).map(|index| slots.iter().filter(|slot| usize::from(**slot) == index).count()).collect()
    }

    #[test]
    fn slots_are_shared_by_weight() {
        let all = members(TPOT_MEMBERS as u8);
        let each = counts(&distribute(&all, &[TPOT_WEIGHT; TPOT_MEMBERS], false), all.len());
        assert!(each[0] == 0 && each[1..].iter().all(|n| (150..=400).contains(n)), "{each:?}");
        let [_, one, other] = counts(&distribute(&members(2), &[100, 25], false), 2)[..] else { unreachable!() };
        assert!((other * 39 / 10..other * 41 / 10).contains(&one) || one.abs_diff(4 * other) < 400, "{one} {other}");
        assert_eq!(distribute(&all, &[0; TPOT_MEMBERS], false), vec![0; SLOTS]);
        assert_eq!(distribute(&all, &[1; TPOT_MEMBERS], true), vec![0; SLOTS], "no member of that family");
    }

    #[test]
    fn only_slots_of_a_member_whose_weight_changes_move() {
        let all = members(5);
        let before = distribute(&all, &[100; 5], false);
        for weight in [0, 1, 50] {
            let after = distribute(&all, &[100, 100, weight, 100, 100], false);
            let moved: Vec<_> = before.iter().zip(&after).filter(|(before, after)| before != after).collect();
            assert!(!moved.is_empty() && moved.iter().all(|(before, _)| **before == 3), "{weight}");
            assert_eq!(weight == 0, !after.contains(&3));
        }
    }
}
