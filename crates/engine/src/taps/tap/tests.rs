use super::*;

/// A tap, its reader with room for `most` bytes, and the source of taps.
fn stream(most: usize) -> (Tap, TapReader, Taps) {
    let (taps, reader) = Taps::new(most);
    (taps.tap(7), reader, taps)
}

fn put(tap: &Tap, at: u64, bytes: &str, sure: bool) {
    lock(&tap.state).stream(TapDirection::FromHost).put(at, Bytes::copy_from_slice(bytes.as_bytes()), sure);
}

fn give_up(tap: &Tap, to: u64) {
    lock(&tap.state).stream(TapDirection::FromHost).give_up(to);
}

/// All data from the host: bytes as they are, gaps as dots. Checks that each piece begins where the last one ended.
fn told(reader: &TapReader) -> String {
    let (mut text, mut next) = (String::new(), None);
    while let Ok(Some(p)) = reader.next_within(Duration::ZERO) {
        if p.way == TapDirection::ToHost {
            continue;
        }
        if let PieceKind::Doubt(n) = p.what {
            text.push_str(&format!("[{} {n}]", p.at));
            continue;
        }
        assert!(next.is_none_or(|n| n == p.at), "{p:?} after {next:?}");
        let length = match p.what {
            PieceKind::Bytes(bytes) => {
                text.push_str(std::str::from_utf8(&bytes).expect("text"));
                bytes.len()
            }
            PieceKind::Gap(n) => {
                text.push_str(&".".repeat(n as usize));
                n as usize
            }
            PieceKind::Doubt(_) => unreachable!("looked at above"),
            PieceKind::End => {
                text.push('$');
                0
            }
        };
        next = Some(p.at + length as u64);
    }
    text
}

#[test]
fn bytes_are_put_in_order_and_come_once() {
    let (tap, reader, taps) = stream(1 << 20);
    for (at, bytes) in [(3, "def"), (0, "abc"), (1, "bcde"), (8, "ijk"), (7, "hi"), (10, "klm"), (6, "gh"), (2, "c")] {
        put(&tap, at, bytes, false);
    }
    assert_eq!(told(&reader), "abcdefghijklm");
    drop(tap);
    assert_eq!(told(&reader), "$");
    assert_eq!(taps.counts(), TapCounts { bytes: 13, gaps: 0, doubts: 0 });
    assert_eq!(taps.shared.used.load(Relaxed), 0, "nothing is held");
}

#[test]
fn what_is_missing_is_a_gap_when_it_is_given_up() {
    let (tap, reader, taps) = stream(1 << 20);
    put(&tap, 2, "cd", false);
    put(&tap, 6, "gh", false);
    assert_eq!(told(&reader), "", "it may still come");
    give_up(&tap, 5);
    assert_eq!(told(&reader), "..cd", "the last gap goes on, perhaps");
    put(&tap, 5, "f", false);
    assert_eq!(told(&reader), ".fgh");
    put(&tap, 0, "ab", false);
    assert_eq!(told(&reader), "", "too late");
    put(&tap, 10, "k", false);
    drop(tap);
    assert_eq!(told(&reader), "..k$");
    assert_eq!(taps.counts(), TapCounts { bytes: 6, gaps: 5, doubts: 0 });
}

#[test]
fn a_reader_that_does_not_read_gets_gaps() {
    let (tap, reader, taps) = stream(2 * (OVERHEAD + 4));
    for at in (0..40).step_by(4) {
        put(&tap, at, "abcd", true);
    }
    assert_eq!(told(&reader), "abcdabcd");
    put(&tap, 40, "efgh", true);
    assert_eq!(told(&reader), format!("{}efgh", ".".repeat(32)));
    drop(tap);
    assert_eq!(told(&reader), "$");
    assert_eq!(taps.counts(), TapCounts { bytes: 12, gaps: 32, doubts: 0 });
}

/// The ring may be behind control mode. Bytes that control mode has copied are not lost while the reader's limit has room.
#[test]
fn what_is_held_is_bounded() {
    let (tap, reader, _taps) = stream((7 << 20) + 100 * OVERHEAD);
    let piece = "x".repeat(1 << 20);
    put(&tap, 100 + (7 << 20), &piece, false);
    for i in 0..7 {
        put(&tap, 100 + (i << 20), &piece, true);
    }
    assert_eq!(told(&reader), "", "more than is held of copies");
    put(&tap, 50, "yyyyyy", false); // a copy
    put(&tap, 0, &"y".repeat(100), false);
    assert_eq!(told(&reader), format!("{}{}", "y".repeat(100), "x".repeat(7 << 20)), "a copy makes room, not it");

    let (tap, reader, _taps) = stream((4 << 20) + 100 * OVERHEAD);
    for i in 0..5 {
        put(&tap, 100 + (i << 20), &piece, true);
    }
    let text = told(&reader);
    assert!(text.starts_with(&".".repeat(100)), "{}", text.len());

    // bytes that are sure do not count as copies, nor does a copy that has become sure
    let (tap, reader, _taps) = stream(64 << 20);
    for sure in [false, true] {
        (0..4).for_each(|i| put(&tap, 100 + (i << 20), &piece, sure));
    }
    (4..8).for_each(|i| put(&tap, 100 + (i << 20), &piece, false));
    put(&tap, 0, &"y".repeat(100), false);
    assert_eq!(told(&reader).len(), 100 + (8 << 20));

    // of the copies from the ring, the farthest has to wait for its retransmission
    let (tap, reader, _taps) = stream(64 << 20);
    for i in (0..5).rev() {
        put(&tap, 100 + (i << 20), &piece, false);
    }
    put(&tap, 0, &"y".repeat(100), false);
    assert_eq!(told(&reader).len(), 100 + (4 << 20));
}

fn acknowledged(tap: &Tap, to: u64) {
    lock(&tap.state).stream(TapDirection::FromHost).acknowledged(to);
}

/// Nobody here knows which copy the receiver has taken.
#[test]
fn copies_that_are_not_alike_are_in_doubt() {
    let (tap, reader, taps) = stream(1 << 20);
    put(&tap, 0, "abcdefgh", false);
    put(&tap, 2, "cdeXYh", false);
    put(&tap, 8, "ij", false);
    assert_eq!(told(&reader), "abcdefgh[5 2]ij");
    // the first copy is held, and another one arrives before its turn
    put(&tap, 12, "mnop", false);
    put(&tap, 11, "lZZop", false);
    put(&tap, 10, "k", false);
    assert_eq!(told(&reader), "[12 2]klZZop");
    put(&tap, 4, "efgh", true);
    assert_eq!(told(&reader), "", "alike, from control mode");
    put(&tap, 0, "aXcXe", false);
    drop(tap);
    assert_eq!(told(&reader), "[1 3]$", "told at the end at the latest");
    let TapCounts { bytes, gaps, doubts } = taps.counts();
    assert_eq!((bytes, gaps, doubts), (16, 0, 2 + 2 + 3));
    assert_eq!((taps.shared.used.load(Relaxed), taps.shared.kept.load(Relaxed)), (0, 0));
}

#[test]
fn what_was_acknowledged_long_ago_is_not_compared() {
    let (tap, reader, taps) = stream(1 << 20);
    let all = "x".repeat(BEHIND as usize);
    put(&tap, 0, "abcd", false);
    put(&tap, 4, &all, false);
    acknowledged(&tap, 4);
    put(&tap, 0, "Abcd", false);
    put(&tap, 3, "D", false); // the garbage of a keep-alive, which was never taken
    acknowledged(&tap, 4 + BEHIND);
    put(&tap, 0, "aBcd", false);
    drop(tap);
    assert_eq!(told(&reader), format!("abcd{all}[0 1]$"));
    assert_eq!(taps.shared.kept.load(Relaxed), 0);
}

/// Bytes that cannot be kept until the receiver has them are in doubt as well.
#[test]
fn what_cannot_be_compared_is_in_doubt() {
    let (tap, reader, _taps) = stream(2000);
    for (at, to) in [(0, 300), (300, 600), (600, 600)] {
        put(&tap, at, &"x".repeat(300), false);
        acknowledged(&tap, to);
        assert!(told(&reader).ends_with(&"x".repeat(300)));
    }
    put(&tap, 900, &"x".repeat(300), false);
    put(&tap, 1200, &"x".repeat(300), false);
    drop(tap);
    assert_eq!(told(&reader), format!("{0}[600 300]{0}$", "x".repeat(300)), "the first two were acknowledged");
}

#[test]
fn the_end_waits_for_what_was_forwarded() {
    let (tap, reader, _taps) = stream(1 << 20);
    let state = tap.state.clone();
    lock(&state).begin();
    put(&tap, 0, "ab", true);
    drop(tap);
    assert_eq!(told(&reader), "ab");
    lock(&state).stream(TapDirection::FromHost).put(2, Bytes::from_static(b"cd"), false);
    lock(&state).settled();
    assert_eq!(told(&reader), "cd$");
}
