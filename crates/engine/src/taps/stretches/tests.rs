use super::*;
use crate::taps::{PieceKind, TapReader, Taps};

fn tuple(port: u16) -> Tuple {
    Tuple { remote: ([192, 0, 2, 1], port).into(), local: ([192, 0, 2, 2], 80).into() }
}

/// Begins a stretch of bytes from the client at this position and sequence number.
fn begin(stretches: &mut Stretches, tap: &Tap, start: u64, seq: u32) {
    let legs = Pair::new(tuple(1), tuple(2));
    let taps = Pair::new(Some(tap), None);
    stretches.begin(&Begin { legs, from: Side::Client, start, seq, out: start, taps });
}

fn copied(stretches: &mut Stretches, at: TapPosition, bytes: &str) {
    stretches.copied(&TapRecord { leg: tuple(1), at, acked: 0, bytes: bytes.as_bytes() });
}

fn told(reader: &TapReader) -> String {
    let pieces = std::iter::from_fn(|| reader.next_within(Duration::ZERO).ok().flatten());
    let text = |what| match what {
        PieceKind::Bytes(bytes) => String::from_utf8(bytes.to_vec()).expect("text"),
        other => format!("{other:?}"),
    };
    pieces.map(|piece| text(piece.what)).collect()
}

/// Copies that the ring brings late belong to the splice before, although the next one has begun.
#[test]
fn late_copies_belong_to_the_splice_before() {
    // the next splice: not committed yet; committed; committed after sequence numbers have wrapped around
    for (next_seq, origin) in [(1_006, None), (1_006, Some(0_u64.wrapping_sub(1_000))), (4, Some(2))] {
        let (taps, reader) = Taps::new(1 << 20);
        let tap = taps.tap(7);
        let mut stretches = Stretches::default();
        let first = if next_seq == 4 { u32::MAX - 1 } else { 1_000 };
        begin(&mut stretches, &tap, 0, first);
        stretches.committed(&tuple(1), 0_u64.wrapping_sub(first.into()));
        let extended = |at: u64| TapPosition::Extended(u64::from(first) + at);
        copied(&mut stretches, extended(0), "ab");
        stretches.end(&tuple(1), Some(6));
        begin(&mut stretches, &tap, 6, next_seq);
        if let Some(origin) = origin {
            stretches.committed(&tuple(1), origin);
        }
        copied(&mut stretches, extended(2), "cd");
        copied(&mut stretches, TapPosition::Stream(4), "efgh"); // across both
        if origin.is_some() {
            copied(&mut stretches, TapPosition::Extended(u64::from(next_seq) + 2), "ij");
            copied(&mut stretches, TapPosition::Low(next_seq + 4), "kl");
        }
        assert_eq!(told(&reader), if origin.is_some() { "abcdefghijkl" } else { "abcdefgh" }, "{next_seq} {origin:?}");
    }
}
