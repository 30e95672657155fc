//! Parts of stored replies (RFC 9110, 14).

use super::policy::Meta;
use longsplice_http::Request;
use std::ops::Range;

/// How much of a stored reply answers a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it, with the status that is stored.
    Whole,
    /// Nothing: the client has it (304).
    Known,
    /// These bytes of the body (206).
    Bytes(Range<u64>),
    /// Nothing: the body has no such bytes (416).
    Outside,
}

impl Part {
    /// Returns the part for a request. A request for several ranges is answered with all of it, as it may be (14.2).
    pub fn of(request: &Request, meta: &Meta, length: u64) -> Part {
        let value = |name: &str| {
            let mut all = request.end_to_end().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v);
            (all.next(), all.next())
        };
        if meta.is_known(request) {
            return Part::Known;
        }
        let (Some(range), None) = value("range") else { return Part::Whole };
        if request.method != "GET" || meta.status != 200 {
            return Part::Whole;
        }
        let same = match value("if-range") {
            (None, _) => true,
            (Some(validator), None) => meta.is_certainly(validator),
            (Some(_), Some(_)) => false,
        };
        if !same {
            return Part::Whole;
        }
        std::str::from_utf8(range).ok().and_then(|range| part(range, length)).unwrap_or(Part::Whole)
    }
}

/// Returns the part of a body that this range names; `None` if it is to be ignored: it is no range, or several.
fn part(range: &str, length: u64) -> Option<Part> {
    let (unit, range) = range.split_once('=')?;
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
    Some(if bytes.start < bytes.end { Part::Bytes(bytes) } else { Part::Outside })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (range, want) in [
            ("bytes=0-0", Some(Part::Bytes(0..1))),
            ("bytes=2-", Some(Part::Bytes(2..10))),
            ("Bytes = 2-4", Some(Part::Bytes(2..5))),
            ("bytes=2-99", Some(Part::Bytes(2..10))),
            ("bytes=-3", Some(Part::Bytes(7..10))),
            ("bytes=-99", Some(Part::Bytes(0..10))),
            ("bytes=9-99999999999999999999999", Some(Part::Bytes(9..10))),
            ("bytes=-0", Some(Part::Outside)),
            ("bytes=10-", Some(Part::Outside)),
            ("bytes=99999999999999999999999-", Some(Part::Outside)),
            ("bytes=4-2", None),
            ("bytes=0-1,4-5", None),
            ("bytes=-", None),
            ("bytes=a-", None),
            ("bytes=+1-", None),
            ("lines=0-1", None),
            ("bytes", None),
        ] {
            assert_eq!(part(range, 10), want, "{range}");
        }
        assert_eq!(part("bytes=0-", 0), Some(Part::Outside));
    }
}
