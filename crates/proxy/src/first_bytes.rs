//! Conditions on the first bytes of connections that are otherwise not read: plugs, SOCKS, login gateways and the like.
//!
//! | condition | effect |
//! | --- | --- |
//! | `must` | what its sender sends is held back until the expression is found in the first bytes; reset if it cannot be found there any more, or in time |
//! | `never` | what its sender sends is passed on as it is read; reset before the last byte of what matches is passed on |
//!
//! While a condition is undecided, both directions are copied ([`crate::onward::opening`]). Then the connection is relayed, and spliced, like any other.
//! The result does not depend on how a stream is cut into segments. `never` has no time limit: a host that waits for its end
//! would get anything through.

use crate::{
    access::Unfit,
    pattern::{Known, Pattern},
};
use std::time::Duration;

/// Maximum number of first bytes: each connection that is held back takes that much memory.
pub const FIRST_MAX: usize = 32 * 1024;

/// Conditions on the first bytes of both hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FirstBytes {
    /// Of the client.
    pub client: Option<Conditions>,
    /// Of the server.
    pub server: Option<Conditions>,
}

/// Conditions on the first bytes of one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conditions {
    /// Has to be found in the first bytes.
    pub must: Option<Pattern>,
    /// Must not be found in the first bytes.
    pub never: Option<Pattern>,
    /// Number of first bytes, from 1 to [`FIRST_MAX`].
    pub first: usize,
    /// Time for which `must` is waited for.
    pub wait: Duration,
}

impl Default for Conditions {
    fn default() -> Conditions {
        // A greeting of any protocol is shorter than 256 bytes, or tells what it is within them. No greeting takes ten seconds.
        Conditions { must: None, never: None, first: 256, wait: Duration::from_secs(10) }
    }
}

impl FirstBytes {
    /// Whether there are no conditions.
    pub fn is_empty(&self) -> bool {
        *self == FirstBytes::default()
    }
}

/// The state of the conditions on one host.
#[derive(Debug)]
pub struct Judge<'a> {
    conditions: Option<&'a Conditions>,
    must: Known,
    never: Known,
    count: usize,
}

impl<'a> Judge<'a> {
    /// Starts at the first byte.
    pub fn new(conditions: Option<&'a Conditions>) -> Judge<'a> {
        let start = |pattern: Option<&Pattern>| pattern.map(Pattern::start);
        let must = start(conditions.and_then(|c| c.must.as_ref())).unwrap_or(Known::Yes);
        let never = start(conditions.and_then(|c| c.never.as_ref())).unwrap_or(Known::No);
        Judge { conditions, must, never, count: 0 }
    }

    /// Reads the next bytes, or the end of the stream.
    pub fn read(&mut self, bytes: Option<&[u8]>) -> Result<(), Unfit> {
        let Some(Conditions { must, never, first, .. }) = self.conditions else { return Ok(()) };
        let bytes = bytes.map(|bytes| &bytes[..bytes.len().min(first - self.count)]);
        self.count += bytes.map_or(0, <[u8]>::len);
        let over = bytes.is_none() || self.count == *first;
        let next = |pattern: &Option<Pattern>, known: Known| {
            let Some(pattern) = pattern else { return known };
            let known = bytes.map_or(known, |bytes| pattern.next(known, bytes));
            if over { pattern.end(known) } else { known }
        };
        (self.must, self.never) = (next(must, self.must), next(never, self.never));
        match (self.must, self.never) {
            (_, Known::Yes) => Err(Unfit::Found),
            (Known::No, _) => Err(Unfit::Missing),
            _ => Ok(()),
        }
    }

    /// Whether nothing may be passed on yet.
    pub fn holds(&self) -> bool {
        self.must != Known::Yes
    }

    /// Whether everything is decided.
    pub fn is_done(&self) -> bool {
        self.must == Known::Yes && self.never == Known::No
    }

    /// Returns how many bytes may be held back.
    pub(crate) fn room(&self) -> usize {
        self.conditions.map_or(0, |c| c.first - self.count)
    }

    /// Returns the time for which more is waited for.
    pub(crate) fn wait(&self) -> Option<Duration> {
        self.conditions.filter(|_| self.holds()).map(|c| c.wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(must: Option<&str>, never: Option<&str>, first: usize) -> Conditions {
        let of = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        Conditions { must: of(must), never: of(never), first, ..Conditions::default() }
    }

    /// What is known after each piece; the last one is followed by the end if `ends`.
    fn judge(conditions: &Conditions, text: &str, at: usize, ends: bool) -> Result<(bool, bool), Unfit> {
        let mut judge = Judge::new(Some(conditions));
        let (one, two) = text.as_bytes().split_at(at.min(text.len()));
        for piece in [one, two].into_iter().filter(|piece| !piece.is_empty()) {
            judge.read(Some(piece))?;
        }
        if ends {
            judge.read(None)?;
        }
        Ok((judge.holds(), judge.is_done()))
    }

    #[test]
    fn first_bytes_are_judged_however_they_are_cut() {
        let (held, passing, done) = (Ok((true, false)), Ok((false, false)), Ok((false, true)));
        let ssh = conditions(Some(r"^SSH-2\.0-"), None, 16);
        let not_evil = conditions(None, Some("evil"), 8);
        let both = conditions(Some("hello"), Some("evil"), 12);
        for (conditions, text, want, at_end) in [
            (&ssh, "SSH-", held, Err(Unfit::Missing)),
            (&ssh, "SSH-2.0-x", done, done),
            (&ssh, "SSH-1.5", Err(Unfit::Missing), Err(Unfit::Missing)),
            (&ssh, "GET / HTTP/1.1", Err(Unfit::Missing), Err(Unfit::Missing)),
            (&not_evil, "", passing, done),
            (&not_evil, "123 evi", passing, done),
            (&not_evil, "1234evil", Err(Unfit::Found), Err(Unfit::Found)),
            (&not_evil, "12345evil", done, done),
            (&not_evil, "12345678evil", done, done),
            (&both, "hello", passing, done),
            (&both, "hello evil", Err(Unfit::Found), Err(Unfit::Found)),
            (&both, "help", held, Err(Unfit::Missing)),
            (&both, "123456789012hello", Err(Unfit::Missing), Err(Unfit::Missing)),
            (&both, "hello 123456evil", done, done),
        ] {
            for at in 0..=text.len() {
                assert_eq!(judge(conditions, text, at, false), want, "{text} at {at}");
                assert_eq!(judge(conditions, text, at, true), at_end, "{text} at {at}, and its end");
            }
        }
    }
}
