//! Codings of content.

use longsplice_proxy::coding::{Coding, Decoder, Encoder, Expansion};

/// So much may come of an input: less than takes time.
const MOST: Expansion = Expansion { size: 1 << 20, ratio: u32::MAX };

fn decoded(coding: Coding, coded: &[u8], piece: usize) -> Option<Vec<u8>> {
    let (mut decoder, mut out) = (Decoder::new(coding, MOST).expect("memory"), Vec::new());
    for piece in coded.chunks(piece) {
        decoder.add(piece);
        while decoder.next(&mut out).ok()? {
            assert!(out.len() as u64 <= MOST.size);
        }
    }
    decoder.end();
    while decoder.next(&mut out).ok()? {}
    Some(out)
}

fn coded(coding: Coding, content: &[u8], piece: usize) -> Vec<u8> {
    let (mut encoder, mut out) = (Encoder::new(coding).expect("memory"), Vec::new());
    for piece in content.chunks(piece) {
        encoder.write(piece, &mut out).expect("a vector takes all");
        encoder.flush(&mut out).expect("a vector takes all");
    }
    encoder.end(&mut out).expect("a vector takes all");
    out
}

/// The first byte chooses the coding, and how the rest is cut. The rest is read as coded content, and as content.
pub(crate) fn content(input: &[u8]) {
    let Some((first, rest)) = input.split_first() else { return };
    let coding = [Coding::Gzip, Coding::Deflate, Coding::Brotli, Coding::Zstd][usize::from(first % 4)];
    let piece = 1 + usize::from(first / 4);
    let whole = decoded(coding, rest, usize::MAX);
    assert!(decoded(coding, rest, piece) == whole, "{coding:?}, in pieces of {piece}");
    if piece % 8 > 0 {
        return; // what encodes takes long to make
    }
    if let Some(content) = whole {
        let again = coded(coding, &content, usize::MAX);
        assert!(decoded(coding, &again, piece).as_ref() == Some(&content), "{coding:?}");
    }
    let own = coded(coding, rest, piece);
    assert!(decoded(coding, &own, piece).as_deref() == Some(rest), "{coding:?}, own");
    // behind its end, there is nothing, and it has one
    if !rest.is_empty() {
        assert!(decoded(coding, &own[..own.len() - 1], piece).is_none(), "{coding:?}, cut off");
        assert!(decoded(coding, &[&own[..], b"\0"].concat(), piece).is_none(), "{coding:?}, too long");
    }
}
