//! What a host has not negotiated is not offered to the other one, and what we ask a host is as complete as its peer's segments.

use super::*;

const SYN: u8 = flag::SYN;
const ANSWER: u8 = flag::SYN | flag::ACK;
/// Options of a SYN in Linux's order: MSS, SACK permitted, timestamps, NOP, window scale.
const OPTIONS: [u8; 20] = [2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 1, 44, 0, 0, 0, 0, 1, 3, 3, 7];
/// The places of SACK permitted and timestamps in it.
const SACK: std::ops::Range<usize> = 4..6;
const STAMPS: std::ops::Range<usize> = 6..16;

/// The options without some of them.
fn without(sack: bool, stamps: bool) -> Vec<u8> {
    let mut options = OPTIONS.to_vec();
    if sack {
        options[SACK].fill(1);
    }
    if stamps {
        options[STAMPS].fill(1);
    }
    options
}

fn packet(from: SocketAddr, to: SocketAddr, flags: u8, (seq, ack): (u32, u32), options: &[u8]) -> Packet {
    let mut p = Packet::new(from, to);
    if from.is_ipv6() {
        (p.id, p.fragment) = (0, 0);
    }
    (p.flags, p.seq, p.ack, p.options) = (flags, seq, ack, options.to_vec());
    p
}

/// All combinations of what a client lacks: SACK, timestamps.
fn lacks() -> impl Iterator<Item = (bool, bool)> {
    [false, true].into_iter().flat_map(|sack| [false, true].map(|stamps| (sack, stamps)))
}

/// Our SYN, each time that it is sent, and a SYN-ACK that accepts what was not offered.
#[test]
#[ignore = "root"]
fn a_server_is_offered_what_its_client_has() {
    bench(64, |b| {
        for (v6, (no_sack, no_stamps)) in [false, true].into_iter().flat_map(|v6| lacks().map(move |l| (v6, l))) {
            let f = Flow::new(Pair::both(v6));
            let offered = without(no_sack, no_stamps);
            let name = format!("v6 {v6}, without SACK {no_sack}, timestamps {no_stamps}");
            b.datapath.listen(f.client.local).expect("listen");
            let (host, ours) = (f.client.remote, f.client.local);
            b.ingress(&packet(host, ours, SYN, (99, 0), &offered).frame());
            b.run(true, &packet(ours, host, ANSWER, (499, 100), &OPTIONS).frame(), TestContext::default());
            b.ingress(&packet(host, ours, flag::ACK, (100, 500), &[]).frame());

            b.datapath.expect(&f.server, Some(&f.client)).expect("room");
            let (host, ours) = (f.server.remote, f.server.local);
            for _ in 0..2 {
                let syn = packet(ours, host, SYN, (99, 0), &OPTIONS);
                let o = b.run(true, &syn.frame(), TestContext::default());
                let want = Packet { options: offered.clone(), ..syn };
                assert_eq!((o.code, verify(&o.frame)), (NEXT, Ok(want)), "{name}");
            }
            let answer = packet(host, ours, ANSWER, (499, 100), &OPTIONS);
            let o = b.ingress(&answer.frame());
            let want = Packet { options: offered, ..answer };
            assert_eq!((o.code, verify(&o.frame)), (NEXT, Ok(want)), "{name}");
            let agreed = [&f.client, &f.server].map(|t| {
                let flags = testing::get_leg(&b.datapath, t).expect("tracked").flags;
                (flags & LegFlags::SACK == 0, flags & LegFlags::TS == 0)
            });
            assert_eq!(agreed, [(no_sack, no_stamps); 2], "{name}");
            b.datapath.forget(&f.client);
            b.datapath.forget(&f.server);
            b.datapath.unlisten(f.client.local).expect("unlisten");
        }
    });
}

/// On behalf of no client, everything is offered, and what the server accepts counts.
fn a_server_without_client_is_offered_everything() {
    bench(64, |b| {
        for (v6, (no_sack, no_stamps)) in [false, true].into_iter().flat_map(|v6| lacks().map(move |l| (v6, l))) {
            let f = Flow::new(Pair::both(v6));
            b.datapath.expect(&f.server, None).expect("room");
            let (host, ours) = (f.server.remote, f.server.local);
            let syn = packet(ours, host, SYN, (99, 0), &OPTIONS);
            assert_eq!(verify(&b.run(true, &syn.frame(), TestContext::default()).frame), Ok(syn));
            b.ingress(&packet(host, ours, ANSWER, (499, 100), &without(no_sack, no_stamps)).frame());
            let flags = testing::get_leg(&b.datapath, &f.server).expect("tracked").flags;
            assert_eq!((flags & LegFlags::SACK == 0, flags & LegFlags::TS == 0), (no_sack, no_stamps), "v6 {v6}");
            b.datapath.forget(&f.server);
        }
    });
}

/// TSval and TSecr, if the segment has timestamps and no other option.
fn stamps(p: &Packet) -> Option<(u32, u32)> {
    let word = |at: usize| u32::from_be_bytes(p.options[at..at + 4].try_into().expect("four bytes"));
    let is = p.options.len() >= 12 && p.options[..4] == [1, 1, 8, 10] && p.options[12..].iter().all(|o| *o == 1);
    is.then(|| (word(4), word(8)))
}

/// SYNs and late resets with headers of any length, and text, which is dropped.
fn to_be_asked_about() -> impl Iterator<Item = (u8, Vec<u8>, usize)> {
    let options = [vec![], vec![2, 4, 5, 180], vec![1; 8], OPTIONS.to_vec(), vec![1; 40]];
    let all = options.into_iter().flat_map(|o| [SYN, flag::RST].map(|flags| (flags, o.clone())));
    all.flat_map(|(flags, o)| [0, 1, 100].map(|text| (flags, o.clone(), text)))
}

/// A host that has negotiated timestamps drops a question without them.
#[test]
#[ignore = "root"]
fn a_question_has_timestamps() {
    bench(1024, |b| {
        let mut ports = 41_000..; // answers are limited for each connection
        for (v6, agreed) in FAMILIES.into_iter().flat_map(|v6| [false, true].map(|agreed| (v6, agreed))) {
            for (flags, options, text) in to_be_asked_about() {
                let mut f = Flow::new(v6);
                f.client.remote.set_port(ports.next().expect("a port"));
                f.down.out_to = f.client.remote;
                f.install(b, 0);
                sockets::spliced_legs(&f, b, 0);
                let now = longsplice_datapath::monotonic();
                for (t, heard) in [(&f.client, 700), (&f.server, 9000)] {
                    let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                    leg.flags &= if agreed { u32::MAX } else { !LegFlags::TS };
                    (leg.tsval_in, leg.clock_in, leg.seen) = (heard, 0, now.as_nanos() as u64);
                    testing::put_leg(&b.datapath, t, &leg).expect("leg");
                }
                let mut p = f.next(text);
                (p.flags, p.options) = (flags, options);
                p.seq = p.seq.wrapping_sub(u32::from(flags == flag::RST));
                let o = b.ingress(&p.frame());
                let name = format!("{v6:?}, timestamps {agreed}: {p:?}: {:?}", o.verdicts);
                assert_eq!(o.code, REDIRECT, "{name}");
                let out = verify(&o.frame).unwrap_or_else(|e| panic!("{e}: {name}"));
                let expected = f.down.max_ack.wrapping_add(f.down.ack_add);
                assert_eq!(
                    (out.flags, out.seq),
                    (flag::ACK, expected.wrapping_sub(1).wrapping_add(f.up.seq_add)),
                    "{name}"
                );
                assert!(out.payload.is_empty() && out.padding.is_empty(), "{name}");
                let Some((val, echo)) = stamps(&out) else {
                    assert!(!agreed && out.options.iter().all(|o| *o == 1), "{name}");
                    continue;
                };
                assert!(agreed, "{name}");
                // the client's clock, which reads as ours, with the offset that its segments get, and a little more
                let least = (now.as_millis() as u32).wrapping_add(f.up.tsval_add);
                assert!(val.wrapping_sub(least) < 60_000, "{val}, at least {least}: {name}");
                assert_eq!(echo, 9000, "{name}");
            }
        }
    });
}

/// The same in a switch, where sockets are muted.
fn a_question_in_a_switch_has_timestamps() {
    bench(64, |b| {
        for (v6, agreed) in FAMILIES.into_iter().flat_map(|v6| [false, true].map(|agreed| (v6, agreed))) {
            for (flags, options, text) in to_be_asked_about().filter(|(flags, ..)| *flags == flag::RST) {
                let f = Flow::new(v6);
                sockets::spliced_legs(&f, b, 0);
                for t in [&f.client, &f.server] {
                    testing::put_path(&b.datapath, t, &abi::path::default(), [0; 4]).expect("path");
                    let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                    leg.flags &= !(LegFlags::SPLICED | LegFlags::TRIGGER | if agreed { 0 } else { LegFlags::TS });
                    (leg.tsval_in, leg.tsval_out) = (9000, 5000);
                    testing::put_leg(&b.datapath, t, &leg).expect("leg");
                }
                let mut p = f.next(text);
                (p.flags, p.options, p.seq) = (flags, options, p.seq.wrapping_sub(1));
                let o = b.ingress(&p.frame());
                let name = format!("{v6:?}, timestamps {agreed}: {p:?}: {:?}", o.verdicts);
                assert_eq!(o.code, REDIRECT, "{name}");
                let out = verify(&o.frame).unwrap_or_else(|e| panic!("{e}: {name}"));
                assert!(out.payload.is_empty() && out.flags == flag::ACK, "{name}");
                assert_eq!(stamps(&out).filter(|_| agreed), agreed.then_some((5000, 9000)), "{name}");
            }
        }
    });
}

/// Options are stripped, and the header keeps its length.
fn options_are_stripped_in_every_layout() {
    bench(64, |b| {
        for v6 in FAMILIES {
            for (strip_ts, strip_sack) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut f = Flow::new(v6);
                (f.up.strip_ts, f.up.strip_sack) = (strip_ts, strip_sack);
                for (name, options) in layouts(f.up.max_ack) {
                    for n in [0, 1, 333] {
                        let mut p = f.next(n);
                        p.options = options.clone();
                        let name = format!("{name}, strip {strip_ts} {strip_sack}, v6 {v6:?}, {n} bytes");
                        let o = agree(b, &name, &f, &p.frame(), None);
                        let out = verify(&o.frame).expect("checksums");
                        assert_eq!(out.options.len(), p.options.len(), "{name}: the header keeps its length");
                        assert_eq!(out.payload, p.payload, "{name}");
                    }
                }
            }
        }
    });
}

together!(
    a_server_without_client_is_offered_everything,
    a_question_in_a_switch_has_timestamps,
    options_are_stripped_in_every_layout
);
