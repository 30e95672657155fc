//! ICMP errors about forwarded segments (bpf/icmp.h): the sending host receives them as errors about its own packets.

use super::{tap::TAP, *};
use longsplice_datapath::EventKind;
use longsplice_tests::packet::Icmp;
use std::net::IpAddr;

/// An error about `sent`, a packet as it left us, from a router behind us.
fn error(sent: &[u8], kind: [u8; 2], mtu: u32, quoted: usize) -> Icmp {
    let p = Packet::parse(sent).expect("a packet");
    let from = if p.from.is_ipv4() { addr("10.99.0.1:0").ip() } else { addr("[2001:db8:99::1]:0").ip() };
    let headers = if p.from.is_ipv4() { 20 } else { 40 };
    let quote = sent[ETHERNET..][..headers + quoted].to_vec();
    // test runs use the loopback device
    Icmp { dmac: [0; 6], smac: p.dmac, from, to: p.from.ip(), kind: kind[0], code: kind[1], mtu, quote }
}

fn too_big(sent: &[u8], mtu: u32, quoted: usize) -> Icmp {
    let kind = if sent[12] == 8 { [3, 4] } else { [2, 0] };
    error(sent, kind, mtu, quoted)
}

/// What a host reads from an error: the addresses of the quoted segment, and its sequence number.
fn quoted(icmp: &Icmp) -> (SocketAddr, SocketAddr, u32) {
    let q = &icmp.quote;
    let address = |at: usize, n: usize| match n {
        4 => IpAddr::from(<[u8; 4]>::try_from(&q[at..at + 4]).expect("four bytes")),
        _ => IpAddr::from(<[u8; 16]>::try_from(&q[at..at + 16]).expect("sixteen bytes")),
    };
    let ([from, to], tcp) = if q[0] >> 4 == 4 {
        assert_eq!((q[9], verify_header(&q[..20])), (6, true), "IPv4");
        ([address(12, 4), address(16, 4)], &q[20..])
    } else {
        assert_eq!(q[6], 6, "next header");
        ([address(8, 16), address(24, 16)], &q[40..])
    };
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    let seq = u32::from_be_bytes(tcp[4..8].try_into().expect("four bytes"));
    (SocketAddr::new(from, port(0)), SocketAddr::new(to, port(2)), seq)
}

fn verify_header(header: &[u8]) -> bool {
    let words = header.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum::<u32>();
    (words & 0xffff) + (words >> 16) == 0xffff
}

fn its_sender_is_told_in_its_own_words() {
    bench(64, |b| {
        for (v6, via) in FAMILIES.into_iter().flat_map(|v6| [0, TAP].map(|via| (v6, via))) {
            let f = Flow::new(v6);
            // bytes of the segment quoted by the router
            for (n, mtu) in [8, 20, 61].into_iter().flat_map(|n| [1400, 1300].map(|mtu| (n, mtu))) {
                f.install_with(b, 0, via);
                let p = f.next(100);
                let sent = b.ingress(&p.frame()).frame;
                let o = b.ingress(&too_big(&sent, mtu, n).frame());
                let name = format!("v6 {v6:?}, via {via:x}, {n} bytes, {mtu}");
                assert_eq!((o.code, &o.verdicts[..]), (REDIRECT, &["icmp-translated"][..]), "{name}");
                let icmp = verify_icmp(&o.frame).unwrap_or_else(|| panic!("{name}: {}", hex(&o.frame)));
                let want = mtu + if v6.client { 20 } else { 0 } - if v6.server { 20 } else { 0 };
                let kind = if v6.client { (2, 0) } else { (3, 4) };
                assert_eq!((icmp.kind, icmp.code, icmp.mtu), (kind.0, kind.1, want), "{name}");
                assert_eq!((icmp.from, icmp.to), (p.to.ip(), p.from.ip()), "{name}");
                assert_eq!((icmp.dmac, icmp.smac), (f.down.dmac, f.down.smac), "{name}");
                assert_eq!(quoted(&icmp), (p.from, p.to, p.seq), "{name}");
            }
        }
    });
}

/// No IPv6 host sends smaller packets (RFC 8200, 5), and old routers do not report an MTU (RFC 1191, 5).
fn what_they_say_is_understood_by_the_other_family() {
    bench(64, |b| {
        // families, the MTU in the error, the MTU in the error to the client
        for (v6, mtu, told) in [
            (V6, 1000, 1280),
            (Pair::new(true, false), 600, 1280),
            (Pair::new(true, false), 0, 1280),
            (V4, 1280, 1280),
            (V6, 0x1_0500, 0xffff),
        ] {
            let f = Flow::new(v6);
            f.install(b, 0);
            let sent = b.ingress(&f.next(100).frame()).frame;
            let o = b.ingress(&too_big(&sent, mtu, 20).frame());
            assert_eq!(verify_icmp(&o.frame).map(|i| i.mtu), Some(told), "v6 {v6:?}, {mtu}");
        }
    });
}

/// Hosts apply what they are told to all connections to the same address: to everybody's behind us. So an IPv4 host is told of no
/// less than 1280 bytes, nor of an unknown MTU, for which Linux assumes 552. User space is told instead.
#[test]
#[ignore = "root"]
fn nobody_makes_a_host_send_small_packets_to_others() {
    bench(64, |b| {
        let mut events = b.datapath.events().expect("the ring");
        for (v6, mtu) in [(V4, 1279), (V4, 552), (V4, 68), (V4, 0), (Pair::new(false, true), 1299)] {
            let mut f = Flow::new(v6);
            f.client.remote.set_port(50_000 + mtu as u16); // the rate is limited for each leg
            f.install(b, 0);
            let sent = b.ingress(&f.next(100).frame()).frame;
            let o = b.ingress(&too_big(&sent, mtu, 20).frame());
            assert_eq!((o.code, &o.verdicts[..]), (DROP, &["icmp-translated"][..]), "v6 {v6:?}, {mtu}");
            let told: Vec<_> = events.wait(Duration::ZERO).expect("events").map(|e| (e.leg, e.kind)).collect();
            assert!(told.contains(&(f.client, EventKind::Narrow)), "v6 {v6:?}, {mtu}: {told:?}");
        }
    });
}

/// Nor by an answer of our own, to a segment that does not fit: the part that fits goes on.
fn nobody_is_told_of_so_little_by_us() {
    bench(64, |b| {
        for (port, v6) in (50_000..).zip(FAMILIES) {
            let mut f = Flow::new(v6);
            f.up.mtu = 1000;
            f.client.remote.set_port(port); // the rate is limited for each leg
            f.down.out_to = f.client.remote;
            let o = agree_with(b, 0, &format!("{v6:?}"), &f, &f.next(1200).frame(), None);
            assert_eq!(o.verdicts, ["forwarded"], "{v6:?}");
        }
    });
}

fn what_is_no_such_message_moves_nothing() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let f = Flow::new(v6);
            f.install(b, 0);
            let sent = b.ingress(&f.next(100).frame()).frame;
            let good = too_big(&sent, 1400, 20);
            let tcp = if v6.server { 40 } else { 20 };
            let changed = |work: fn(&mut Icmp, usize)| {
                let mut icmp = good.clone();
                work(&mut icmp, tcp);
                icmp.frame()
            };
            // below the last acknowledgement; beyond the data sent
            for frame in [changed(|i, at| i.quote[at + 4] ^= 0x80), changed(|i, at| i.quote[at + 5] ^= 1)] {
                let o = b.ingress(&frame);
                assert_eq!((o.code, &o.verdicts[..]), (DROP, &["out-of-window"][..]), "v6 {v6:?}");
            }
            // unreachable: a soft error
            let soft = error(&sent, if v6.server { [1, 0] } else { [3, 1] }, 0, 20);
            let o = b.ingress(&soft.frame());
            assert_eq!((o.code, &o.verdicts[..]), (DROP, &["icmp-translated"][..]), "v6 {v6:?}");
            let mut damaged = good.frame();
            *damaged.last_mut().expect("a byte") ^= 1;
            let strange = changed(|i, at| i.quote[at + 1] ^= 1); // another port
            for frame in [damaged, strange, changed(|i, _| i.kind = 128), changed(|i, at| i.quote.truncate(at + 7))] {
                let o = b.ingress(&frame);
                assert_eq!((o.code, &o.verdicts[..], o.frame), (NEXT, &[][..], frame), "v6 {v6:?}");
            }
        }
    });
}

/// In control mode an error goes to the socket, with the socket's numbers.
fn a_socket_hears_its_own_numbers() {
    bench(64, |b| {
        for (v6, shim) in SAME.into_iter().flat_map(|v6| [0, 100_000].map(|shim| (v6, shim))) {
            let f = Flow::new(v6);
            control_leg(&f, b, [0, shim, 0]);
            let mut p = Packet::new(f.client.local, f.client.remote);
            p.seq = f.up.max_ack;
            p.payload = vec![1; 100];
            let said = too_big(&p.frame(), 1400, 20);
            let o = b.ingress(&said.frame());
            assert_eq!((o.code, &o.verdicts[..]), (NEXT, &[][..]), "v6 {v6:?}, {shim}");
            let heard = verify_icmp(&o.frame).unwrap_or_else(|| panic!("{}", hex(&o.frame)));
            assert_eq!(quoted(&heard), (p.from, p.to, p.seq.wrapping_sub(shim)), "v6 {v6:?}");
            assert_eq!((heard.from, heard.mtu), (said.from, 1400));
        }
    });
}

together!(
    its_sender_is_told_in_its_own_words,
    what_they_say_is_understood_by_the_other_family,
    nobody_is_told_of_so_little_by_us,
    what_is_no_such_message_moves_nothing,
    a_socket_hears_its_own_numbers
);
