//! Copies of forwarded segments: the right bytes at the right
//! position, while the packet itself is the same as without a tap.

use super::*;
use longsplice_datapath::TapPosition;

pub(super) const TAP: u16 = testing::VIA_TAP as u16;

/// One record: kind, position, acknowledgement, and bytes.
type Record = (&'static str, u64, i32, Vec<u8>);

fn records(b: &Bench, leg: Tuple) -> Vec<Record> {
    let mut all = Vec::new();
    let polled = b.datapath.poll_taps(|copied| {
        let Some(c) = copied else { return false };
        assert_eq!(c.leg, leg);
        let (kind, at) = match c.at {
            TapPosition::Stream(at) => ("stream", at),
            TapPosition::Extended(at) => ("extended", at),
            TapPosition::Low(at) => ("low", at.into()),
        };
        all.push((kind, at, c.acked, c.bytes.to_vec()));
        true
    });
    polled.expect("the ring is there");
    all
}

/// Sends one segment on a tapped path, checks that it is forwarded as usual, and returns the copies.
fn copied(b: &Bench, f: &Flow, p: &Packet) -> Vec<Record> {
    let frame = p.frame();
    let o = b.ingress(&frame);
    let mut want = *f;
    let fate = translate(&mut want.up, &mut want.down, &frame, None);
    compare("tapped", f, &frame, &o.frame, o.code, &fate);
    let labels: &[&str] = match (&fate, p.payload.len()) {
        (Fate::Forwarded(_), 1..) => &["forwarded", "tapped"],
        (Fate::Forwarded(_), 0) => &["forwarded"],
        (Fate::Dropped(v), _) => &[*v],
        _ => panic!("{fate:?}"),
    };
    assert_eq!(o.verdicts, labels);
    let got = f.read(b);
    assert_eq!((got.up, got.down), (want.up, want.down), "tracked as ever");
    records(b, f.client)
}

fn positions_go_on_where_sequence_numbers_come_round() {
    bench(64, |b| {
        for v6 in FAMILIES {
            let mut f = Flow::new(v6);
            (f.up.end, f.up.wraps) = (0xffff_ff00, 3);
            (f.down.max_ack, f.down.ack_add) = (f.up.end.wrapping_add(f.up.seq_add), f.up.seq_add.wrapping_neg());
            f.install_with(b, 0, TAP);
            let across = f.next(600);
            let at = 0x3_ffff_ff00;
            assert_eq!(copied(b, &f, &across), [("extended", at, 0, across.payload.clone())], "{v6:?}");
            f = f.read(b);
            assert_eq!((f.up.end, f.up.wraps), (344, 4));
            // a retransmission from below the wrap
            assert_eq!(copied(b, &f, &across), [("extended", at, 0, across.payload.clone())], "{v6:?}");
            // after a gap, which is reported elsewhere
            let mut later = f.next(10);
            later.seq += 1000;
            assert_eq!(copied(b, &f, &later), [("extended", at + 1600, -1600, later.payload.clone())], "{v6:?}");
            let f = f.read(b);
            assert_eq!(copied(b, &f, &f.next(0)), [], "a bare acknowledgement");
            let mut forged = f.next(10);
            forged.seq = forged.seq.wrapping_add(1 << 30);
            assert_eq!(copied(b, &f, &forged), [], "what is dropped");
        }
    });
}

/// The path's state word holds the limit in place of the upper half of the position.
fn with_a_limit_the_number_alone_is_told() {
    bench(64, |b| {
        let mut f = Flow::new(V4);
        f.up.wraps = 100; // high position
        f.install_with(b, PathFlags::TRIGGER, TAP);
        sockets::spliced_legs(&f, b, 0);
        let mut leg = testing::get_leg(&b.datapath, &f.client).expect("leg");
        leg.limit_in = 100 << 16;
        testing::put_leg(&b.datapath, &f.client, &leg).expect("leg");
        let p = f.next(100);
        let o = b.ingress(&p.frame());
        assert_eq!((o.code, &o.verdicts[..]), (REDIRECT, &["forwarded", "tapped"][..]));
        assert_eq!(records(b, f.client), [("low", 5000, 0, p.payload)]);
    });
}

fn without_room_the_segment_goes_on() {
    bench(64, |b| {
        let f = Flow::new(V6);
        f.install_with(b, 0, TAP);
        let p = f.next(1000);
        let first = b.ingress(&p.frame());
        let outcomes: Vec<Outcome> = (0..100).map(|_| b.ingress(&p.frame())).collect(); // the ring has 64 KB
        assert!(outcomes.iter().all(|o| (o.code, &o.frame) == (REDIRECT, &first.frame)));
        let fits = outcomes.iter().position(|o| o.verdicts == ["forwarded", "tap-lost"]).expect("the ring is full");
        assert!(outcomes[..fits].iter().all(|o| o.verdicts == ["forwarded", "tapped"]), "{outcomes:?}");
        assert!(outcomes[fits..].iter().all(|o| o.verdicts == ["forwarded", "tap-lost"]), "{outcomes:?}");
        let records = records(b, f.client);
        assert!(fits > 50 && records.len() == fits + 1 && records.iter().all(|r| r.3 == p.payload), "{fits}");
        b.datapath.untap(&f.client).expect("untapped");
        let o = b.ingress(&p.frame());
        assert_eq!((o.verdicts, o.frame), (vec!["forwarded"], first.frame), "nobody reads it: as others are");
        assert_eq!(self::records(b, f.client), []);
    });
}

together!(
    positions_go_on_where_sequence_numbers_come_round,
    with_a_limit_the_number_alone_is_told,
    without_room_the_segment_goes_on
);
