use super::*;

const ALL: [Coding; 4] = [Coding::Gzip, Coding::Deflate, Coding::Brotli, Coding::Zstd];

/// Encodes in pieces of this size.
fn coded(coding: Coding, content: &[u8], size: usize, flush: bool) -> Vec<u8> {
    let (mut encoder, mut out) = (Encoder::new(coding).unwrap(), Vec::new());
    for piece in content.chunks(size) {
        encoder.write(piece, &mut out).unwrap();
        if flush {
            encoder.flush(&mut out).unwrap();
        }
    }
    encoder.end(&mut out).unwrap();
    out
}

/// Decodes in pieces of this size.
fn decoded(coding: Coding, coded: &[u8], size: usize, most: Expansion) -> Result<Vec<u8>, BadContent> {
    let (mut decoder, mut out) = (Decoder::new(coding, most)?, Vec::new());
    for piece in coded.chunks(size) {
        decoder.add(piece);
        while decoder.next(&mut out)? {}
    }
    decoder.end();
    while decoder.next(&mut out)? {}
    Ok(out)
}

fn text() -> Vec<u8> {
    (0..20_000).flat_map(|n: u32| format!("line {} of {}\n", n, n.wrapping_mul(2_654_435_761)).into_bytes()).collect()
}

#[test]
fn what_is_put_on_is_taken_off_however_it_is_cut() {
    let text = text();
    for coding in ALL {
        for content in [&b""[..], b"x", &text] {
            for size in [1, 7, 4096, usize::MAX] {
                let size = if content.len() > 1000 { size.max(100) } else { size };
                let whole = coded(coding, content, size, size == 4096);
                assert!(content.len() < 1000 || whole.len() < content.len() / 2, "{coding:?}: {}", whole.len());
                let got = decoded(coding, &whole, size, Expansion::default());
                assert!(
                    got.as_deref() == Ok(content),
                    "{coding:?} {} {size}: {:?}",
                    content.len(),
                    got.map(|g| g.len())
                );
            }
        }
    }
}

/// A client of an event stream waits for what was sent, and for no more.
#[test]
fn what_was_flushed_can_be_read() {
    for coding in ALL {
        let (mut encoder, mut decoder) =
            (Encoder::new(coding).unwrap(), Decoder::new(coding, Expansion::default()).unwrap());
        for n in 0..100 {
            let event = format!("event {n}\n\n").into_bytes();
            let (mut made, mut got) = (Vec::new(), Vec::new());
            encoder.write(&event, &mut made).unwrap();
            encoder.flush(&mut made).unwrap();
            decoder.add(&made);
            while decoder.next(&mut got).unwrap() {}
            assert!(got == event, "{coding:?} {n}");
        }
    }
}

#[test]
fn what_is_cut_off_damaged_or_followed_by_more_is_no_content() {
    let text = text();
    for coding in ALL {
        let whole = coded(coding, &text, usize::MAX, false);
        let read = |bytes: &[u8]| decoded(coding, bytes, 1000, Expansion::default());
        assert_eq!(read(&whole), Ok(text.clone()));
        for cut in [1, 2, whole.len() / 2, whole.len() - 1] {
            assert_eq!(read(&whole[..cut]), Err(BadContent::Corrupt), "{coding:?} {cut}");
        }
        assert_eq!(read(&[&whole[..], b"more"].concat()), Err(BadContent::Corrupt), "{coding:?}");
        assert_eq!(read(b"<p>not coded at all</p>"), Err(BadContent::Corrupt), "{coding:?}");
        assert_eq!(read(b""), Ok(Vec::new()), "{coding:?}");
    }
}

#[test]
fn what_becomes_too_much_comes_to_an_end() {
    let zeros = vec![0; 30_000_000];
    for coding in ALL {
        let bomb = coded(coding, &zeros, usize::MAX, false);
        let read = |size, ratio| decoded(coding, &bomb, 1000, Expansion { size, ratio }).map(|got| got.len());
        assert_eq!(read(u64::MAX, u32::MAX), Ok(zeros.len()), "{coding:?}");
        assert_eq!(read(29_999_999, u32::MAX), Err(BadContent::TooLong), "{coding:?}");
        assert_eq!(read(u64::MAX, 100), Err(BadContent::Bomb), "{coding:?}");
        // what is let through before is bounded, too
        let (mut decoder, mut out) = (Decoder::new(coding, Expansion::default()).unwrap(), Vec::new());
        decoder.add(&bomb[..bomb.len().min(1000)]);
        while let Ok(true) = decoder.next(&mut out) {}
        assert!(out.len() as u64 <= FREE, "{coding:?}: {}", out.len());
    }
}

/// Servers send it without its head, although RFC 9110 (8.4.1.2) wants one.
#[test]
fn deflate_without_its_head() {
    let mut raw = flate2::write::DeflateEncoder::new(Vec::new(), Compression::new(6));
    raw.write_all(&text()).unwrap();
    let raw = raw.finish().unwrap();
    for size in [1, 1000] {
        assert_eq!(decoded(Coding::Deflate, &raw, size, Expansion::default()), Ok(text()));
    }
}

/// RFC 9659: a longer window would take memory that no reply is worth.
#[test]
fn zstd_with_a_long_window_is_refused() {
    for (window, fits) in [(23, true), (24, false)] {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window).unwrap();
        encoder.write_all(&text()).unwrap();
        let coded = encoder.finish().unwrap();
        let got = decoded(Coding::Zstd, &coded, 1000, Expansion::default());
        assert_eq!(got.is_ok(), fits, "{window}");
    }
}

/// RFC 7932 has windows of up to 16 MB; what encoders call large ones is a format of its own, and takes up to 1 GB.
#[test]
fn br_with_a_large_window_is_refused() {
    for window in 10..=30 {
        let is_large = window > 24;
        let params = brotli::enc::BrotliEncoderParams {
            quality: 1,
            lgwin: window,
            large_window: is_large,
            ..brotli::enc::BrotliEncoderParams::default()
        };
        let mut encoder = brotli::CompressorWriter::with_params(Vec::new(), 4096, &params);
        encoder.write_all(&text()).unwrap();
        let coded = encoder.into_inner();
        let want = if is_large { Err(BadContent::Corrupt) } else { Ok(text()) };
        for size in [1, 1000] {
            assert!(decoded(Coding::Brotli, &coded, size, Expansion::default()) == want, "{window}");
        }
        // before any memory is taken for it
        let mut decoder = Decoder::new(Coding::Brotli, Expansion::default()).unwrap();
        decoder.add(&coded[..1]);
        assert_eq!(decoder.next(&mut Vec::new()).is_err(), is_large, "{window}");
    }
}

#[test]
fn members_of_gzip_follow_each_other() {
    let two = [coded(Coding::Gzip, b"one ", 10, false), coded(Coding::Gzip, b"two", 10, false)].concat();
    for size in 1..=two.len() {
        assert_eq!(decoded(Coding::Gzip, &two, size, Expansion::default()), Ok(b"one two".to_vec()));
    }
}

#[test]
fn what_servers_are_asked_for_can_be_read() {
    for name in longsplice_http::accept::KNOWN {
        assert!(matches!(Coding::of([name.as_bytes()].into_iter()), Ok(Some(_))), "{name}");
    }
    for (values, want) in [
        (&[][..], Ok(None)),
        (&["", "identity"], Ok(None)),
        (&["identity, , BR"], Ok(Some(Coding::Brotli))),
        (&["gzip, gzip"], Err(BadContent::Unknown)),
        (&["gzip", "br"], Err(BadContent::Unknown)),
        // whoever takes that for no coding sees what a decoder leaves out
        (&["gzip;x"], Err(BadContent::Unknown)),
    ] {
        assert_eq!(Coding::of(values.iter().map(|v| v.as_bytes())), want, "{values:?}");
    }
}

/// Bodies that want long windows leave no room for each other; those that want little get it. Who finds none is told so before
/// anything is read, unless it is a window that grows.
#[test]
fn windows_have_a_limit_together() {
    static FEW: Windows = Windows { used: AtomicU64::new(0), most: 32 << 20 };
    let unlimited = Expansion { size: u64::MAX, ratio: u32::MAX };
    let used = || FEW.used.load(Ordering::Relaxed);
    let start = |coding| Decoder::within(&FEW, coding, unlimited);
    let read = |decoder: &mut Decoder, coding, length: usize| {
        let content = vec![b'a'; length];
        let mut long = brotli::CompressorWriter::new(Vec::new(), 4096, BROTLI_LEVEL, 24);
        let whole = if (coding, length) == (Coding::Brotli, 30 << 20) {
            long.write_all(&content).unwrap();
            long.into_inner()
        } else {
            coded(coding, &content, usize::MAX, false)
        };
        let mut out = Vec::new();
        decoder.add(&whole);
        loop {
            match decoder.next(&mut out) {
                Ok(true) => out.clear(),
                Ok(false) => break Ok(()),
                Err(why) => break Err(why),
            }
        }
    };
    let mut first = start(Coding::Zstd).unwrap();
    assert_eq!((read(&mut first, Coding::Zstd, 30 << 20), used()), (Ok(()), 8 << 20));
    let mut small = start(Coding::Brotli).unwrap();
    assert_eq!(used(), 24 << 20, "whatever it will want");
    assert_eq!(read(&mut small, Coding::Brotli, 1 << 20), Ok(()));
    assert_eq!(used(), (8 << 20) + (1 << BROTLI_WINDOW));
    assert_eq!(start(Coding::Brotli).unwrap_err(), BadContent::Memory);
    drop((first, small));
    let mut long = start(Coding::Brotli).unwrap();
    assert_eq!((read(&mut long, Coding::Brotli, 30 << 20), used()), (Ok(()), 16 << 20));
    // a quarter is for what has begun
    let mut three = [0; 3].map(|_| start(Coding::Zstd).unwrap());
    assert_eq!(read(&mut three[0], Coding::Zstd, 30 << 20), Ok(()));
    assert_eq!(start(Coding::Gzip).unwrap_err(), BadContent::Memory);
    assert_eq!(read(&mut three[1], Coding::Zstd, 30 << 20), Ok(()));
    assert_eq!(read(&mut three[2], Coding::Zstd, 30 << 20), Err(BadContent::Memory));
    drop((long, three));
    assert_eq!(used(), 0);
    start(Coding::Gzip).unwrap();
}
