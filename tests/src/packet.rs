//! Packets for tests of single packets: built from fields, parsed, and with checksums verified from scratch.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Bits of the TCP header's flags byte (RFC 9293, 3.1).
#[allow(missing_docs)]
pub mod flag {
    pub const FIN: u8 = 0x01;
    pub const SYN: u8 = 0x02;
    pub const RST: u8 = 0x04;
    pub const PSH: u8 = 0x08;
    pub const ACK: u8 = 0x10;
    pub const URG: u8 = 0x20;
    pub const ECE: u8 = 0x40;
    pub const CWR: u8 = 0x80;
}

/// Length of an Ethernet header in bytes.
pub const ETHERNET: usize = 14;
const TCP: u8 = 6;

/// A TCP segment with all of its headers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Packet {
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Type of service or traffic class.
    pub tos: u8,
    /// IPv4: identification.
    pub id: u16,
    /// IPv4: flags and fragment offset, as in the header.
    pub fragment: u16,
    /// IPv4: all options, a multiple of four bytes.
    pub ip_options: Vec<u8>,
    /// IPv6: flow label.
    pub label: u32,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    /// As in the header, unscaled.
    pub window: u16,
    pub urgent: u16,
    /// All TCP options, a multiple of four bytes.
    pub options: Vec<u8>,
    pub payload: Vec<u8>,
    /// Bytes after the IP packet, as in frames of minimum length.
    pub padding: Vec<u8>,
}

impl Packet {
    /// An ordinary segment: ACK, no options, no payload.
    pub fn new(from: SocketAddr, to: SocketAddr) -> Packet {
        Packet {
            dmac: [0; 6], // address of the loopback device, where test runs receive
            smac: [2, 0, 0, 0, 0, 2],
            from,
            to,
            ttl: 64,
            tos: 0,
            id: 0x1234,
            fragment: 0x4000,
            ip_options: Vec::new(),
            label: 0,
            seq: 0,
            ack: 0,
            flags: flag::ACK,
            window: 1000,
            urgent: 0,
            options: Vec::new(),
            payload: Vec::new(),
            padding: Vec::new(),
        }
    }

    /// Builds the frame, with correct checksums.
    pub fn frame(&self) -> Vec<u8> {
        let mut t = Vec::new();
        t.extend(self.from.port().to_be_bytes());
        t.extend(self.to.port().to_be_bytes());
        t.extend(self.seq.to_be_bytes());
        t.extend(self.ack.to_be_bytes());
        assert!(self.options.len().is_multiple_of(4) && self.options.len() <= 40, "a TCP header is 20 to 60 bytes");
        t.push((5 + self.options.len() as u8 / 4) << 4);
        t.push(self.flags);
        t.extend(self.window.to_be_bytes());
        t.extend([0, 0]);
        t.extend(self.urgent.to_be_bytes());
        t.extend(&self.options);
        t.extend(&self.payload);
        let sum = !sum(&t, pseudo(self.from.ip(), self.to.ip(), t.len()));
        t[16..18].copy_from_slice(&sum.to_be_bytes());

        let mut f = Vec::new();
        f.extend(self.dmac);
        f.extend(self.smac);
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                f.extend(0x0800u16.to_be_bytes());
                let n = 20 + self.ip_options.len();
                f.push(0x40 | (n / 4) as u8);
                f.push(self.tos);
                f.extend(((n + t.len()) as u16).to_be_bytes());
                f.extend(self.id.to_be_bytes());
                f.extend(self.fragment.to_be_bytes());
                f.extend([self.ttl, TCP, 0, 0]);
                f.extend(from.octets());
                f.extend(to.octets());
                f.extend(&self.ip_options);
                let check = !self::sum(&f[ETHERNET..], 0);
                f[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&check.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                f.extend(0x86ddu16.to_be_bytes());
                f.extend((6 << 28 | u32::from(self.tos) << 20 | self.label & 0xfffff).to_be_bytes());
                f.extend((t.len() as u16).to_be_bytes());
                f.extend([TCP, self.ttl]);
                f.extend(from.octets());
                f.extend(to.octets());
            }
            _ => panic!("both addresses of a packet are of one family"),
        }
        f.extend(t);
        f.extend(&self.padding);
        f
    }

    /// Parses a frame without verifying checksums.
    pub fn parse(f: &[u8]) -> Option<Packet> {
        let ip = f.get(ETHERNET..)?;
        let word = |b: &[u8], at: usize| Some(u16::from_be_bytes(b.get(at..at + 2)?.try_into().ok()?));
        let long = |b: &[u8], at: usize| Some(u32::from_be_bytes(b.get(at..at + 4)?.try_into().ok()?));
        let v4 = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?));
        let v6 = |at: usize| Some(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?)));
        let (header, len, protocol, ttl, tos, from, to) = match word(f, 12)? {
            0x0800 if ip.len() >= 20 && ip[0] >> 4 == 4 => {
                ((ip[0] & 15) as usize * 4, word(ip, 2)? as usize, ip[9], ip[8], ip[1], v4(12)?, v4(16)?)
            }
            0x86dd if ip.len() >= 40 && ip[0] >> 4 == 6 => {
                let tos = (long(ip, 0)? >> 20) as u8;
                (40, 40 + word(ip, 4)? as usize, ip[6], ip[7], tos, v6(8)?, v6(24)?)
            }
            _ => return None,
        };
        if protocol != TCP || header < 20 {
            return None;
        }
        let t = ip.get(header..len)?;
        let data = (*t.get(12)? >> 4) as usize * 4;
        if data < 20 {
            return None;
        }
        let is_v4 = from.is_ipv4();
        Some(Packet {
            dmac: f[0..6].try_into().ok()?,
            smac: f[6..12].try_into().ok()?,
            from: SocketAddr::new(from, word(t, 0)?),
            to: SocketAddr::new(to, word(t, 2)?),
            ttl,
            tos,
            id: if is_v4 { word(ip, 4)? } else { 0 },
            fragment: if is_v4 { word(ip, 6)? } else { 0 },
            ip_options: if is_v4 { ip.get(20..header)?.to_vec() } else { Vec::new() },
            label: if is_v4 { 0 } else { long(ip, 0)? & 0xfffff },
            seq: long(t, 4)?,
            ack: long(t, 8)?,
            flags: t[13],
            window: word(t, 14)?,
            urgent: word(t, 18)?,
            options: t.get(20..data)?.to_vec(),
            payload: t.get(data..)?.to_vec(),
            padding: ip[len..].to_vec(),
        })
    }
}

/// The one's complement sum (RFC 1071) of 16-bit words.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let mut s = u64::from(start);
    for pair in bytes.chunks(2) {
        s += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    }
    while s > 0xffff {
        s = (s & 0xffff) + (s >> 16);
    }
    s as u16
}

/// The sum of the pseudo-header (RFC 9293, 3.1; RFC 8200, 8.1).
fn pseudo(from: IpAddr, to: IpAddr, len: usize) -> u32 {
    let addresses = |a: IpAddr| match a {
        IpAddr::V4(a) => u32::from(sum(&a.octets(), 0)),
        IpAddr::V6(a) => u32::from(sum(&a.octets(), 0)),
    };
    addresses(from) + addresses(to) + u32::from(TCP) + len as u32
}

/// Verifies lengths and both checksums of a frame from scratch.
pub fn verify(frame: &[u8]) -> Result<Packet, String> {
    let p = Packet::parse(frame).ok_or_else(|| format!("no TCP packet: {}", hex(frame)))?;
    let ip = &frame[ETHERNET..frame.len() - p.padding.len()];
    let header = if p.from.is_ipv4() { 20 + p.ip_options.len() } else { 40 };
    if p.from.is_ipv4() && sum(&ip[..header], 0) != 0xffff {
        return Err(format!("IP checksum wrong: {}", hex(frame)));
    }
    let t = &ip[header..];
    if sum(t, pseudo(p.from.ip(), p.to.ip(), t.len())) != 0xffff {
        return Err(format!("TCP checksum wrong: {}", hex(frame)));
    }
    Ok(p)
}

/// Length of an IPv6 fragment header in bytes.
const FRAGMENT: usize = 8;

/// Fragments an IP packet (RFC 791, 3.2; RFC 8200, 4.5) at these
/// offsets in bytes after the IP header, which are multiples of 8.
pub fn cut(frame: &[u8], at: &[usize], id: u32) -> Vec<Vec<u8>> {
    let v4 = frame[12..14] == [0x08, 0x00];
    let header = ETHERNET + if v4 { usize::from(frame[ETHERNET] & 15) * 4 } else { 40 };
    let data = &frame[header..];
    let mut ends = at.to_vec();
    ends.push(data.len());
    let mut from = 0;
    let mut all = Vec::new();
    for to in ends {
        assert!(from % 8 == 0, "fragments begin at multiples of 8 bytes");
        let more = u16::from(to < data.len());
        let mut f = frame[..header].to_vec();
        if v4 {
            f[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&((header - ETHERNET + to - from) as u16).to_be_bytes());
            f[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&(id as u16).to_be_bytes());
            f[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&(more << 13 | (from / 8) as u16).to_be_bytes());
            check_header(&mut f);
        } else {
            let next = std::mem::replace(&mut f[ETHERNET + 6], 44);
            f[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&((FRAGMENT + to - from) as u16).to_be_bytes());
            f.extend([next, 0]);
            f.extend((from as u16 | more).to_be_bytes());
            f.extend(id.to_be_bytes());
        }
        f.extend(&data[from..to]);
        all.push(f);
        from = to;
    }
    all
}

/// Recomputes the IPv4 header checksum.
pub fn check_header(f: &mut [u8]) {
    let end = ETHERNET + usize::from(f[ETHERNET] & 15) * 4;
    f[ETHERNET + 10..ETHERNET + 12].fill(0);
    let check = !sum(&f[ETHERNET..end], 0);
    f[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&check.to_be_bytes());
}

/// Reassembles fragments in any order. Returns the packet and the identification; an IPv4 packet gets identification 0.
/// Panics if the packet is incomplete, or if the common header fields differ.
pub fn join(fragments: &[Vec<u8>]) -> (Vec<u8>, u32) {
    let mut parts = Vec::new();
    let mut whole: Option<(Vec<u8>, u32)> = None;
    for f in fragments {
        let v4 = f[12..14] == [0x08, 0x00];
        let mut header;
        let (from, more, id, data) = if v4 {
            let n = ETHERNET + usize::from(f[ETHERNET] & 15) * 4;
            header = f[..n].to_vec();
            assert_eq!(sum(&f[ETHERNET..n], 0), 0xffff, "IP checksum: {}", hex(f));
            let len = usize::from(u16::from_be_bytes([f[ETHERNET + 2], f[ETHERNET + 3]]));
            let place = u16::from_be_bytes([f[ETHERNET + 6], f[ETHERNET + 7]]);
            let id = u16::from_be_bytes([f[ETHERNET + 4], f[ETHERNET + 5]]);
            header[ETHERNET + 2..ETHERNET + 8].fill(0);
            check_header(&mut header);
            (usize::from(place & 0x1fff) * 8, place & 0x2000 != 0, id.into(), &f[n..ETHERNET + len])
        } else {
            let len = usize::from(u16::from_be_bytes([f[ETHERNET + 4], f[ETHERNET + 5]]));
            let b = &f[ETHERNET + 40..];
            header = f[..ETHERNET + 40].to_vec();
            assert_eq!(header[ETHERNET + 6], 44, "a fragment header: {}", hex(f));
            header[ETHERNET + 6] = b[0];
            header[ETHERNET + 4..ETHERNET + 6].fill(0);
            let place = u16::from_be_bytes([b[2], b[3]]);
            let id = u32::from_be_bytes([b[4], b[5], b[6], b[7]]);
            (usize::from(place & !7), place & 1 != 0, id, &b[FRAGMENT..len])
        };
        match &whole {
            None => whole = Some((header, id)),
            Some(w) => assert_eq!((hex(&w.0), w.1), (hex(&header), id), "headers of one datagram"),
        }
        parts.push((from, more, data));
    }
    parts.sort_by_key(|p| p.0);
    let (mut f, id) = whole.expect("fragments");
    let header = f.len();
    for (i, (from, more, data)) in parts.iter().enumerate() {
        assert_eq!(*from, f.len() - header, "no gap, no overlap");
        assert_eq!(*more, i + 1 < parts.len(), "all but the last say that more follow");
        f.extend(*data);
    }
    let n = f.len() - header;
    if f[12..14] == [0x08, 0x00] {
        let len = (header - ETHERNET + n) as u16;
        f[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&len.to_be_bytes());
        check_header(&mut f);
    } else {
        f[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&(n as u16).to_be_bytes());
    }
    (f, id)
}

/// An ICMP or ICMPv6 error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Icmp {
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
    pub from: IpAddr,
    pub to: IpAddr,
    pub kind: u8,
    pub code: u8,
    pub mtu: u32,
    /// The quoted packet, from its IP header on.
    pub quote: Vec<u8>,
}

impl Icmp {
    /// Builds the frame, with correct checksums.
    pub fn frame(&self) -> Vec<u8> {
        let mut message = vec![self.kind, self.code, 0, 0];
        message.extend(self.mtu.to_be_bytes());
        message.extend(&self.quote);
        let mut f = [self.dmac, self.smac].concat();
        let start = match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                f.extend([0x08, 0x00, 0x45, 0]);
                f.extend((20 + message.len() as u16).to_be_bytes());
                f.extend([0, 0, 0, 0, 64, 1, 0, 0]);
                f.extend([from.octets(), to.octets()].concat());
                check_header(&mut f);
                0
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                f.extend((message.len() as u16).to_be_bytes());
                f.extend([58, 64]);
                f.extend([from.octets(), to.octets()].concat());
                pseudo(self.from, self.to, message.len()) - u32::from(TCP) + 58
            }
            _ => panic!("both addresses of a packet are of one family"),
        };
        let check = !sum(&message, start);
        message[2..4].copy_from_slice(&check.to_be_bytes());
        f.extend(message);
        f
    }
}

/// Parses an ICMP error, and verifies its checksums and lengths.
pub fn verify_icmp(f: &[u8]) -> Option<Icmp> {
    let ip = f.get(ETHERNET..)?;
    let (from, to, message, start) = if f[12..14] == [0x08, 0x00] {
        let v4 = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?));
        let len = u16::from_be_bytes([*ip.get(2)?, ip[3]]) as usize;
        if ip[0] != 0x45 || ip[9] != 1 || len != ip.len() || sum(&ip[..20], 0) != 0xffff {
            return None;
        }
        (v4(12)?, v4(16)?, ip.get(20..)?, 0)
    } else {
        let v6 = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?));
        let len = u16::from_be_bytes([*ip.get(4)?, ip[5]]) as usize;
        if f[12..14] != [0x86, 0xdd] || ip[0] >> 4 != 6 || ip[6] != 58 || 40 + len != ip.len() {
            return None;
        }
        let (from, to) = (v6(8)?, v6(24)?);
        (from, to, ip.get(40..)?, pseudo(from, to, len) - u32::from(TCP) + 58)
    };
    if message.len() < 8 || sum(message, start) != 0xffff {
        return None;
    }
    Some(Icmp {
        dmac: f[0..6].try_into().ok()?,
        smac: f[6..12].try_into().ok()?,
        from,
        to,
        kind: message[0],
        code: message[1],
        mtu: u32::from_be_bytes(message[4..8].try_into().ok()?),
        quote: message[8..].to_vec(),
    })
}

/// Formats bytes for messages.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// TCP options.
pub mod option {
    /// No operation.
    pub const NOP: u8 = 1;

    /// The timestamps option (RFC 7323, 3.2), ten bytes.
    pub fn ts(val: u32, ecr: u32) -> Vec<u8> {
        [&[8, 10][..], &val.to_be_bytes(), &ecr.to_be_bytes()].concat()
    }

    /// The SACK option (RFC 2018, 3), with left and right edges.
    pub fn sack(blocks: &[(u32, u32)]) -> Vec<u8> {
        let mut o = vec![5, 2 + 8 * blocks.len() as u8];
        for (left, right) in blocks {
            o.extend(left.to_be_bytes());
            o.extend(right.to_be_bytes());
        }
        o
    }

    /// Pads options with NOPs to a multiple of four.
    pub fn fill(mut o: Vec<u8>) -> Vec<u8> {
        o.resize(o.len().next_multiple_of(4), NOP);
        o
    }

    /// Options in the usual layout: two NOPs before each.
    pub fn usual(ts: Option<(u32, u32)>, blocks: &[(u32, u32)]) -> Vec<u8> {
        let mut o = Vec::new();
        if let Some((val, ecr)) = ts {
            o.extend([NOP, NOP]);
            o.extend(self::ts(val, ecr));
        }
        if !blocks.is_empty() {
            o.extend([NOP, NOP]);
            o.extend(sack(blocks));
        }
        o
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        for (from, to) in [("10.0.0.1:1", "10.0.0.2:2"), ("[2001:db8::1]:1", "[2001:db8::2]:2")] {
            let mut p = Packet::new(from.parse().expect("address"), to.parse().expect("address"));
            if p.from.is_ipv6() {
                (p.id, p.fragment) = (0, 0);
            }
            (p.seq, p.ack, p.window, p.urgent) = (1, 2, 3, 4);
            p.options = option::usual(Some((5, 6)), &[(7, 8)]);
            p.payload = vec![9; 11];
            p.padding = vec![0; 3];
            let f = p.frame();
            assert_eq!(verify(&f), Ok(p));
            let mut bad = f.clone();
            bad[f.len() - 5] ^= 1;
            assert!(verify(&bad).is_err());
        }
    }

    /// A worked example: RFC 1071, 3.
    #[test]
    fn rfc_1071() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0), 0xddf2);
    }
}
