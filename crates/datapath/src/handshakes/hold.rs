//! Segments held by the hold policy (bpf/hold.h): unchanged copies, re-injected at the device on which they arrived.

use crate::{
    Datapath, Tuple, abi,
    checksum::{fold, sum},
    names::MARK_HELD,
    sockets::socket::{send_frame, with_virtio_header},
    tables::maps::{bytes_of, from_bytes, io_error},
    watching::events::{TICK, poll_ring},
};
use libbpf_rs::{MapCore, MapFlags};
use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt},
};
use std::{io, os::fd::OwnedFd};

/// Bytes that may be on their way back at once, as the kernel counts them: all that may be held
/// (`HOLD_ALL` of bpf/hold.h), and more than that again for overhead. With less, some of it would be lost.
const MOST: usize = 256 << 20;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const URG: u8 = 0x20;
const CWR: u8 = 0x80;

/// A held segment, or a piece of a large one.
#[derive(Debug)]
pub struct HeldSegment {
    /// The leg on which it arrived.
    pub leg: Tuple,
    /// Number of payload bytes.
    pub len: usize,
    ifindex: u32,
    /// The packet for a packet socket: `struct virtio_net_hdr` and the frame.
    packet: Vec<u8>,
}

/// Constants of `struct virtio_net_hdr` (<linux/virtio_net.h>): work that a packet socket leaves to the kernel.
const WITH_SUM: u8 = 1;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_ECN: u8 = 0x80;
const VNET: usize = 10;
const ETHERNET: usize = 14;

impl HeldSegment {
    fn new(data: &[u8]) -> HeldSegment {
        let r: abi::held_record = from_bytes(data);
        let payload = &data[size_of::<abi::held_record>()..][..r.len as usize];
        let leg = Tuple::from_abi(&r.leg);
        HeldSegment { leg, len: payload.len(), ifindex: r.ifindex, packet: held_packet(&r, leg.is_v4(), payload) }
    }
}

/// Builds the packet. The headers are those of the whole segment; a piece becomes a segment of its own.
pub(crate) fn held_packet(r: &abi::held_record, v4: bool, payload: &[u8]) -> Vec<u8> {
    let doff = (usize::from(r.tcp[12] >> 4) * 4).clamp(20, r.tcp.len());
    let mut tcp = r.tcp[..doff].to_vec();
    let (first, last) = (r.at == 0, r.at + r.len >= r.payload);
    let seq = u32::from_be_bytes(std::array::from_fn(|i| tcp[4 + i])).wrapping_add(r.at);
    tcp[4..8].copy_from_slice(&seq.to_be_bytes());
    if !last {
        tcp[13] &= !(FIN | PSH);
    }
    if !first {
        tcp[13] &= !CWR;
    }
    // the urgent pointer counts from the sequence number of the segment
    let urgent = u32::from(u16::from_be_bytes([tcp[18], tcp[19]]));
    match urgent.checked_sub(r.at).filter(|ahead| *ahead > 0) {
        Some(ahead) => tcp[18..20].copy_from_slice(&(ahead as u16).to_be_bytes()),
        None => tcp[13] &= !URG,
    }
    let length = doff + payload.len();
    let mut ip = r.ip[..if v4 { 20 } else { 40 }].to_vec();
    if v4 {
        ip[0] = 0x45; // IP options are not kept
        ip[2..4].copy_from_slice(&((20 + length) as u16).to_be_bytes());
        ip[10..12].fill(0);
        let check = !fold(sum(&ip));
        ip[10..12].copy_from_slice(&check.to_be_bytes());
    } else {
        ip[4..6].copy_from_slice(&(length as u16).to_be_bytes());
        ip[6] = libc::IPPROTO_TCP as u8;
    }
    // The sum of the pseudo-header, as a local sender leaves it. The checksum of the segment was right.
    let pseudo = sum(if v4 { &ip[12..20] } else { &ip[8..40] }) + length as u32 + libc::IPPROTO_TCP as u32;
    tcp[16..18].copy_from_slice(&fold(pseudo).to_be_bytes());

    let start = ETHERNET + ip.len();
    let large = r.segment > 0 && payload.len() > usize::from(r.segment);
    let ecn = if tcp[13] & CWR != 0 { GSO_ECN } else { 0 };
    let kind = if v4 { GSO_TCP4 } else { GSO_TCP6 } | ecn;
    let mut p = vec![WITH_SUM, if large { kind } else { 0 }];
    let size = if large { r.segment } else { 0 };
    for word in [(start + doff) as u16, size, start as u16, 16] {
        p.extend(word.to_ne_bytes());
    }
    debug_assert_eq!(p.len(), VNET);
    p.extend(r.eth);
    p.extend(ip);
    p.extend(tcp);
    p.extend(payload);
    p
}

/// Re-injects segments that are no longer held.
#[derive(Debug)]
pub struct Reinjector {
    socket: OwnedFd,
    /// Number of bytes that were sent back.
    back: u64,
}

/// Opens a packet socket whose frames the data path turns round, as if they had just arrived. Needs CAP_NET_RAW.
pub(crate) fn returning_socket() -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?; // receives nothing
    setsockopt(&socket, sockopt::Mark, &MARK_HELD)?;
    with_virtio_header(&socket)?;
    Ok(socket)
}

impl Datapath {
    /// Opens the socket for held segments. Needs CAP_NET_RAW. There must be only one: it tells the data path how much is still held.
    pub fn reinjector(&self) -> io::Result<Reinjector> {
        let socket = returning_socket()?;
        setsockopt(&socket, sockopt::SndBufForce, &MOST)?;
        Ok(Reinjector { socket, back: 0 })
    }

    /// Sends a segment that is no longer held to the egress of its device,
    /// where the data path turns it around. If this fails, its host has a copy.
    pub fn reinject(&self, to: &mut Reinjector, held: &HeldSegment) -> io::Result<()> {
        let protocol = if held.leg.is_v4() { libc::ETH_P_IP } else { libc::ETH_P_IPV6 };
        let sent = send_frame(&to.socket, held.ifindex, protocol as u16, &held.packet);
        to.back += held.len as u64;
        let index = abi::held_bytes::HELD_BACK.0;
        self.maps.holding.update(bytes_of(&index), &to.back.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?;
        sent
    }

    /// Returns the number of bytes held since the program was loaded, and how many of them were sent on.
    pub fn held_bytes(&self) -> io::Result<(u64, u64)> {
        let count = |which: abi::held_bytes| {
            let bytes = self.maps.holding.lookup(bytes_of(&which.0), MapFlags::ANY).map_err(io_error)?;
            Ok::<_, io::Error>(bytes.and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes))
        };
        Ok((count(abi::held_bytes::HELD_GIVEN)?, count(abi::held_bytes::HELD_BACK)?))
    }

    /// Passes held segments to `f` until it returns false. Passes `None` when all
    /// present segments have been passed. Blocks: call it from a thread of its own.
    pub fn poll_held(&self, mut f: impl FnMut(Option<HeldSegment>) -> bool) -> io::Result<()> {
        poll_ring(&self.maps.held, |data| f(data.map(HeldSegment::new)).then_some(TICK))
    }
}
