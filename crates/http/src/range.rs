//! Parts of a body (RFC 9110, 14).

use std::ops::Range;

/// Returns the bytes of a body of this length that the value of a `Range` field names: an empty range if the body has none of
/// them; `None` if the field is to be ignored, because it is no range of bytes, or several (14.2).
pub fn bytes_of(value: &[u8], length: u64) -> Option<Range<u64>> {
    let (unit, range) = std::str::from_utf8(value).ok()?.split_once('=')?;
    let (first, last) = range.trim().split_once('-')?;
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().unwrap_or(u64::MAX));
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let bytes = match (first, last) {
        ("", "") => return None,
        ("", last) => length.saturating_sub(number(last)?)..length,
        (first, "") => number(first)?..length,
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return None;
            }
            first..last.saturating_add(1).min(length)
        }
    };
    Some(if bytes.is_empty() { 0..0 } else { bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (range, want) in [
            ("bytes=0-0", Some(0..1)),
            ("bytes=2-", Some(2..10)),
            ("Bytes = 2-4", Some(2..5)),
            ("bytes=2-99", Some(2..10)),
            ("bytes=-3", Some(7..10)),
            ("bytes=-99", Some(0..10)),
            ("bytes=9-99999999999999999999999", Some(9..10)),
            ("bytes=-0", Some(0..0)),
            ("bytes=10-", Some(0..0)),
            ("bytes=99999999999999999999999-", Some(0..0)),
            ("bytes=4-2", None),
            ("bytes=0-1,4-5", None),
            ("bytes=-", None),
            ("bytes=a-", None),
            ("bytes=+1-", None),
            ("lines=0-1", None),
            ("bytes", None),
        ] {
            assert_eq!(bytes_of(range.as_bytes(), 10), want, "{range}");
        }
        assert_eq!(bytes_of(b"bytes=0-", 0), Some(0..0));
    }
}
