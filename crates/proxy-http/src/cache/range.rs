//! Parts of stored replies (RFC 9110, 14).

use super::policy::Meta;
use longsplice_http::{Request, range};
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
        match range::bytes_of(range, length) {
            None => Part::Whole,
            Some(bytes) if bytes.is_empty() => Part::Outside,
            Some(bytes) => Part::Bytes(bytes),
        }
    }
}
