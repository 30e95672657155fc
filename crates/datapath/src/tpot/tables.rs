//! The tables of translucent proxying, as anybody reads them: connections in tunnels, and what is known about destinations.

use crate::{
    Tuple,
    attaching::pins::tpot_pin,
    monotonic,
    sockets::diag::socket_state,
    tables::maps::{Pod, address, bytes_of, from_bytes, io_error, words},
    tpot_abi as abi,
};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use std::{io, net::IpAddr, time::Duration};

/// Which end of a tunnel we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpotRole {
    /// This host has asked for a proxy.
    Asker,
    /// We are the proxy.
    Taker,
}

/// A connection in a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpotTunnel {
    /// Address of the other end of the tunnel.
    pub peer: IpAddr,
    /// Our address in the tunnel.
    pub own: IpAddr,
    /// Which end we are.
    pub role: TpotRole,
    /// Whether our packets are in UDP.
    pub in_udp: bool,
    /// Whether both hosts have sent a FIN, or one of them an RST, as far as the packets show.
    pub over: bool,
    /// Whether nobody can have forged that: the FINs were acknowledged, or the RST had the right number.
    pub proven: bool,
    /// Time since the last packet, precise to about two seconds.
    pub silent: Duration,
}

/// Returns whether translucent proxying has been used in this network namespace, and its tables are there.
pub fn tpot_is_there() -> bool {
    tpot_pin().is_ok_and(|pin| pin.join("tpot_config").exists())
}

/// Returns the connections in tunnels of this network namespace, without a running process. Fails if there was none.
pub fn tpot_tunnels() -> io::Result<Vec<(Tuple, TpotTunnel)>> {
    let mut all = tunnels_in(&pinned("tpot_tunnels")?);
    all.iter_mut().for_each(|(t, tunnel)| tunnel.over = is_over(t, tunnel));
    Ok(all)
}

/// Returns whether a connection is over indeed: the end that was seen may be forged.
pub(super) fn is_over(t: &Tuple, tunnel: &TpotTunnel) -> bool {
    tunnel.over && socket_state(t).is_none_or(|socket| socket.state == "time-wait")
}

/// What the connections of this network namespace have shown about the path to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpotKnown {
    /// The destination.
    pub address: IpAddr,
    /// Whether a proxy's answer has only arrived in UDP, so that connections begin in it. Otherwise only SYNs without the option
    /// were answered, and the destination is not asked about.
    pub in_udp: bool,
    /// How long ago.
    pub ago: Duration,
    /// How long it counts.
    pub lasts: Duration,
}

/// Returns what is known about destinations. Fails if translucent proxying has not been used in this network namespace.
pub fn tpot_known() -> io::Result<Vec<TpotKnown>> {
    Ok(all_known()?.into_iter().filter(|known| known.ago < known.lasts).collect())
}

/// Returns what is known, and what was.
fn all_known() -> io::Result<Vec<TpotKnown>> {
    let (map, now) = (pinned("tpot_known")?, monotonic());
    let view = |key: Vec<u8>| {
        let known: abi::tpot_known = plain(&map.lookup(&key, MapFlags::ANY).ok()??)?;
        let address = address(plain::<abi::tpot_address>(&key)?.words);
        let in_udp = known.what == abi::tpot_knowledge::TPOT_IN_UDP.0;
        let lasts = Duration::from_secs(known.lasts.into());
        let ago = (now.as_nanos() as u64).wrapping_sub(known.at) as i64; // the clocks of two processors may differ
        Some(TpotKnown { address, in_udp, ago: Duration::from_nanos(ago.max(0) as u64), lasts })
    };
    Ok(map.keys().filter_map(view).collect())
}

/// Forgets what is known about destinations. Returns the number of destinations forgotten.
pub fn tpot_flush() -> io::Result<usize> {
    let (all, map) = (all_known()?, pinned("tpot_known")?);
    for known in &all {
        // one that is gone already needs no removal
        let _ = map.delete(bytes_of(&abi::tpot_address { words: words(known.address) }));
    }
    Ok(all.iter().filter(|known| known.ago < known.lasts).count())
}

fn pinned(name: &str) -> io::Result<MapHandle> {
    let map = MapHandle::from_pinned_path(tpot_pin()?.join(name));
    map.map_err(io_error)
}

pub(super) fn tunnels_in(map: &impl MapCore) -> Vec<(Tuple, TpotTunnel)> {
    let now = monotonic();
    let view = |key: Vec<u8>| {
        let value = map.lookup(&key, MapFlags::ANY).ok()??;
        let (t, tn): (crate::abi::tuple, abi::tpot_tunnel) = (plain(&key)?, plain(&value)?);
        let role = if tn.role == abi::tpot_role::TPOT_ASKER.0 as u8 { TpotRole::Asker } else { TpotRole::Taker };
        let tunnel = TpotTunnel {
            peer: address(tn.peer),
            own: address(tn.own),
            role,
            in_udp: tn.flags & UDP != 0,
            over: tn.flags & RST != 0 || tn.flags & FINS == FINS,
            proven: tn.flags & RST_EXACT != 0 || tn.flags & FINS_ACKED == FINS_ACKED,
            silent: now.saturating_sub(Duration::from_nanos(tn.seen)),
        };
        Some((Tuple::from_abi(&t), tunnel))
    };
    map.keys().filter_map(view).collect()
}

const RST: u32 = abi::tpot_tunnel_flag::TPOT_RST.0;
pub(super) const UDP: u32 = abi::tpot_tunnel_flag::TPOT_UDP.0;
const FINS: u32 = abi::tpot_tunnel_flag::TPOT_FIN_IN.0 | abi::tpot_tunnel_flag::TPOT_FIN_OUT.0;
const RST_EXACT: u32 = abi::tpot_tunnel_flag::TPOT_RST_EXACT.0;
const FINS_ACKED: u32 = abi::tpot_tunnel_flag::TPOT_FIN_IN_ACKED.0 | abi::tpot_tunnel_flag::TPOT_FIN_OUT_ACKED.0;

/// Reads an entry. `None` if it has another size: the map is of another version.
pub(crate) fn plain<T: Pod>(bytes: &[u8]) -> Option<T> {
    (bytes.len() == size_of::<T>()).then(|| from_bytes(bytes))
}
