//! Packets as they were on no wire (bpf/offload.h), as far as a test run can make them: super-packets with the jumbo header of BIG
//! TCP, which stays. Lists of segments, and packets of more than 64 KB, need real devices: tests/tests/offloads.rs.

use super::*;

/// Adds the header that Linux, before 7.0, puts between the headers of IPv6 and TCP (RFC 2675, 2).
fn with_jumbo(frame: &[u8]) -> Vec<u8> {
    let (ip, rest) = frame.split_at(ETHERNET + 40);
    let mut f = ip.to_vec();
    f[ETHERNET + 4..ETHERNET + 7].fill(0); // payload length and next header
    f.extend([6, 0, 0xc2, 4]);
    f.extend((rest.len() as u32 + 8).to_be_bytes());
    f.extend(rest);
    f
}

fn joined(segment: u32) -> TestContext {
    TestContext { gso_size: segment, gso_segs: 3, ..TestContext::default() }
}

/// On the wire, a hop-by-hop header is one.
#[test]
#[ignore = "root"]
fn a_jumbo_header_from_a_wire_is_an_extension_header() {
    bench(64, |b| {
        let f = Flow::new(V6);
        f.install(b, 0);
        let frame = with_jumbo(&f.next(1000).frame());
        let o = b.ingress(&frame);
        assert_ne!(o.code, REDIRECT, "not joined by anybody");
        let mut long = frame.clone();
        long[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&(frame.len() as u16 - 54).to_be_bytes());
        let o = b.run(false, &long, joined(500));
        assert_eq!((o.code, &o.verdicts[..]), (DROP, &["fragment"][..]), "with a length of its own");
        assert_eq!(f.read(b).up, f.up);
    });
}

/// In control mode such packets are the socket's like all others, and no reason not to splice. Shims apply to them.
#[test]
#[ignore = "root"]
fn a_jumbo_header_marks_no_leg() {
    bench(64, |b| {
        let f = Flow::new(V6);
        for shim in [0, 1000] {
            control_leg(&f, b, [shim, 0, 0]);
            let p = f.next(3000);
            let frame = with_jumbo(&p.frame());
            let o = b.run(false, &frame, joined(1400));
            assert_eq!((o.code, &o.verdicts[..]), (NEXT, &["local"][..]), "shim {shim}");
            let mut moved = p;
            moved.seq -= shim;
            if shim == 0 {
                assert_eq!(hex(&o.frame), hex(&frame));
            } else {
                assert_eq!(hex(&o.frame[ETHERNET + 48..]), hex(&moved.frame()[ETHERNET + 40..]));
            }
            let leg = testing::get_leg(&b.datapath, &f.client).expect("leg");
            assert_eq!((leg.flags & LegFlags::FRAGMENTS, leg.max_in), (0, f.up.end + 3000), "shim {shim}");
        }
    });
}
