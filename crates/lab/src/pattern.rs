//! Streams whose every byte follows from a seed and its position.
//!
//! Word 0 (the first eight bytes) is the seed itself, so that a receiver can learn it from the stream: a proxy may deliver
//! connections in any order. Each connection has its own seed, so that bytes of one that appear in another are detected as
//! wrong. Word `i` is the mix of `seed + i * GOLDEN` (splitmix64). The mix is invertible: near a wrong byte, the check can
//! compute where in the stream the bytes belong, which distinguishes a shift or a repetition from noise.

use std::fmt;

/// The odd constant of splitmix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD: usize = 8;

/// A byte that differs from the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Position in the stream.
    pub pos: u64,
    /// The expected byte.
    pub expected: u8,
    /// The received byte.
    pub got: u8,
    /// The position in the same stream where the following bytes belong, if they are part of it.
    pub belongs_at: Option<u64>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} is {:#04x}, not {:#04x}", self.pos, self.got, self.expected)?;
        match self.belongs_at {
            Some(at) => write!(f, " (it belongs at {at}: {} bytes off)", self.pos.abs_diff(at)),
            None => write!(f, " (the bytes after it belong nowhere in this stream)"),
        }
    }
}

/// The seed of a connection's answering stream, given that of its opening stream.
pub fn answer_seed(seed: u64) -> u64 {
    mix(seed ^ GOLDEN)
}

/// Fills `buf` with the bytes from position `pos` on.
pub fn fill(seed: u64, pos: u64, buf: &mut [u8]) {
    let (head, words) = split(pos, buf.len());
    let (first, rest) = buf.split_at_mut(head);
    let start = pos % WORD as u64;
    first.copy_from_slice(&word(seed, pos / WORD as u64)[start as usize..][..head]);
    let chunks = rest.chunks_mut(WORD);
    for (chunk, index) in chunks.zip(words..) {
        chunk.copy_from_slice(&word(seed, index)[..chunk.len()]);
    }
}

/// Compares `buf` with the bytes from position `pos` on. Fails with the first mismatch.
pub fn check(seed: u64, pos: u64, buf: &[u8]) -> Result<(), Mismatch> {
    let (head, words) = split(pos, buf.len());
    let (first, rest) = buf.split_at(head);
    let start = (pos % WORD as u64) as usize;
    if first != &word(seed, pos / WORD as u64)[start..][..head] {
        return Err(mismatch(seed, pos, buf));
    }
    for (chunk, index) in rest.chunks(WORD).zip(words..) {
        if chunk != &word(seed, index)[..chunk.len()] {
            return Err(mismatch(seed, pos, buf));
        }
    }
    Ok(())
}

/// How many of `len` bytes from `pos` on precede the next word boundary, and the number of that word.
fn split(pos: u64, len: usize) -> (usize, u64) {
    let word = WORD as u64;
    let head = (pos.next_multiple_of(word) - pos) as usize;
    (head.min(len), pos.div_ceil(word))
}

fn word(seed: u64, index: u64) -> [u8; WORD] {
    let value = if index == 0 { seed } else { mix(seed.wrapping_add(index.wrapping_mul(GOLDEN))) };
    value.to_le_bytes()
}

/// Finds the mismatch byte by byte, which is slow: called only when a byte is known to be wrong.
fn mismatch(seed: u64, pos: u64, buf: &[u8]) -> Mismatch {
    let byte = |at: u64| word(seed, at / WORD as u64)[(at % WORD as u64) as usize];
    let wrong = (0..buf.len()).find(|&i| buf[i] != byte(pos + i as u64)).expect("a chunk differs, so does a byte");
    let at = pos + wrong as u64;
    Mismatch { pos: at, expected: byte(at), got: buf[wrong], belongs_at: locate(seed, &buf[wrong..]) }
}

/// Finds the position in the stream where `bytes` begin, from the first whole word in them.
fn locate(seed: u64, bytes: &[u8]) -> Option<u64> {
    /// Beyond the end of any stream used, so that the chance of a false hit is one in a million.
    const FAR: u64 = 1 << 40;
    bytes.windows(WORD).take(WORD).zip(0u64..).find_map(|(window, before)| {
        let value = u64::from_le_bytes(window.try_into().ok()?);
        let index = unmix(value).wrapping_sub(seed).wrapping_mul(inverse(GOLDEN));
        (index > 0 && index < FAR).then(|| (index * WORD as u64).checked_sub(before))?
    })
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn unmix(mut z: u64) -> u64 {
    z = (z ^ (z >> 31) ^ (z >> 62)).wrapping_mul(inverse(0x94d0_49bb_1331_11eb));
    z = (z ^ (z >> 27) ^ (z >> 54)).wrapping_mul(inverse(0xbf58_476d_1ce4_e5b9));
    z ^ (z >> 30) ^ (z >> 60)
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration: each step doubles the number of correct bits.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut step = 0;
    while step < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        step += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_same_stream_as_the_whole() {
        let mut whole = vec![0; 1000];
        fill(7, 0, &mut whole);
        for start in 0..40 {
            for len in 0..40 {
                let mut piece = vec![0; len];
                fill(7, start as u64, &mut piece);
                assert_eq!(piece, whole[start..start + len]);
                assert_eq!(check(7, start as u64, &piece), Ok(()));
            }
        }
    }

    #[test]
    fn the_first_word_is_the_seed() {
        let mut buf = [0; 8];
        fill(0x0123_4567_89ab_cdef, 0, &mut buf);
        assert_eq!(u64::from_le_bytes(buf), 0x0123_4567_89ab_cdef);
    }

    #[test]
    fn an_altered_byte_is_found_where_it_is() {
        let mut buf = vec![0; 300];
        fill(9, 5, &mut buf);
        buf[123] ^= 0x40;
        let found = check(9, 5, &buf).unwrap_err();
        assert_eq!((found.pos, found.expected ^ found.got), (128, 0x40));
    }

    #[test]
    fn a_shift_is_told_from_noise() {
        let mut stream = vec![0; 4000];
        fill(11, 0, &mut stream);
        for shift in [1, 7, 8, 1448] {
            assert_eq!(
                check(11, 1000, &stream[1000 + shift..2000 + shift]).unwrap_err().belongs_at,
                Some(1000 + shift as u64)
            );
        }
        assert_eq!(check(11, 1000, &[0x55; 100]).unwrap_err().belongs_at, None);
    }

    #[test]
    fn the_mix_can_be_undone() {
        for value in [0, 1, GOLDEN, u64::MAX, 0x1234_5678] {
            assert_eq!(unmix(mix(value)), value);
        }
    }
}
