//! Changes of bodies: what an expression matches is replaced, elements of HTML are removed. A body is read piece by piece; the
//! result does not depend on how it is cut, and what is kept meanwhile is bounded ([`replace`], [`element`]).
//!
//! A change has a limit, `until`: what begins behind that many bytes is not changed. Once no change has anything left to do, the
//! rest of the body is as the server sent it, and can be spliced.

pub mod element;
pub mod replace;

use crate::{
    coding::{Coding, Expansion},
    media::{MediaType, elements, list},
};
use element::{Element, Remover};
use longsplice_http::{Request, Response};
use replace::{Expression, Replacer};
use serde::Deserialize;
use std::{ops::RangeInclusive, sync::Arc};

/// A change of bodies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyChange {
    /// Status of the reply; empty: all.
    pub status: Vec<RangeInclusive<u16>>,
    /// Content-Type; one has to match.
    pub media: Vec<MediaType>,
    /// What is done.
    pub what: Edit,
    /// Number of bytes of the body within which changes begin.
    pub until: Option<u64>,
}

/// What is done to a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// What matches is replaced by this text.
    Replace(Expression, Arc<[u8]>),
    /// These elements of HTML are removed, with what is in them.
    Remove(Arc<[Element]>),
}

/// What becomes of a body that cannot be read: by the coding of its content, or by a charset whose text is not ASCII.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unreadable {
    /// It is refused.
    #[default]
    Deny,
    /// It is passed on as it is.
    Pass,
}

/// What becomes of a body whose sender forbids changes (`Cache-Control: no-transform`; RFC 9110, 7.7).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoTransform {
    /// It is passed on as it is.
    #[default]
    Pass,
    /// It is refused.
    Deny,
    /// It is changed all the same.
    Change,
}

/// The changes of bodies, in order: each gets what the one before has left. Elements are removed at the end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BodyChanges {
    /// The list.
    pub list: Vec<BodyChange>,
    /// What becomes of replies that cannot be read.
    pub unreadable: Unreadable,
    /// What becomes of replies that are not to be changed.
    pub no_transform: NoTransform,
    /// How much may come of coded content.
    pub decoded: Expansion,
    /// Whether changed content gets its coding again, if the client accepts it.
    pub encode: bool,
}

/// What a head says of its body.
#[derive(Debug)]
pub enum Wanted {
    /// No change concerns it, or it is passed on as it is.
    Nothing,
    /// It ought to be changed, and is passed on as it is: it cannot be read.
    Unread,
    /// It is changed, once its coding is taken off.
    Changes(Rewriter, Option<Coding>),
    /// It is a part of what would be changed, and nobody knows what is before it.
    Whole,
    /// It must not be passed on as it is, and its sender forbids changes.
    Denied(&'static str),
    /// It must not be passed on as it is, and cannot be read; why.
    Unreadable(&'static str),
}

impl BodyChanges {
    /// Returns what becomes of the body of a reply.
    pub fn wanted(&self, reply: &Response) -> Wanted {
        let types = list(reply, "content-type");
        // The types of its parts are not known.
        let parts = reply.status == 206 && types.iter().any(|t| t == "multipart/byteranges");
        let concerns = |change: &&BodyChange| {
            let status = |s: &RangeInclusive<u16>| s.contains(&reply.status) || reply.status == 206 && s.contains(&200);
            let by_status = change.status.is_empty() || change.status.iter().any(status);
            by_status && (parts || types.iter().any(|t| change.media.iter().any(|own| own.matches(t))))
        };
        let mut changes = self.list.iter().filter(concerns).peekable();
        if changes.peek().is_none() || matches!(reply.status, 100..=199 | 204 | 304) {
            return Wanted::Nothing;
        }
        match self.of_head(changes, &types, &|name| reply.passed_on(name).collect()) {
            Wanted::Changes(..) if reply.status == 206 => Wanted::Whole,
            wanted => wanted,
        }
    }

    /// Returns what becomes of the body of a request by these changes.
    pub fn wanted_of_upload(&self, changes: &[BodyChange], request: &Request) -> Wanted {
        let types = elements(request.passed_on("content-type"));
        let concerns = |change: &&BodyChange| types.iter().any(|t| change.media.iter().any(|own| own.matches(t)));
        let mut changes = changes.iter().filter(concerns).peekable();
        if changes.peek().is_none() || request.framing.is_empty() {
            return Wanted::Nothing;
        }
        match self.of_head(changes, &types, &|name| request.passed_on(name).collect()) {
            // its length is said in its head (RFC 9110, 14.5)
            Wanted::Changes(..) if request.passed_on("content-range").next().is_some() => {
                self.unreadable("the body is a part, and has to be changed as a whole")
            }
            wanted => wanted,
        }
    }

    /// `field`: the values of a field.
    fn of_head<'c, 'f>(
        &self,
        changes: impl Iterator<Item = &'c BodyChange>,
        types: &[String],
        field: &dyn Fn(&'static str) -> Vec<&'f [u8]>,
    ) -> Wanted {
        if elements(field("cache-control").into_iter()).iter().any(|directive| directive == "no-transform") {
            match self.no_transform {
                NoTransform::Pass => return Wanted::Nothing,
                NoTransform::Deny => return Wanted::Denied("its sender forbids changes of the body (no-transform)"),
                NoTransform::Change => {}
            }
        }
        match Coding::of(field("content-encoding").into_iter()) {
            Err(_) => self.unreadable("the coding of the content is not known, and it has to be changed"),
            Ok(_) if is_wide(field("content-type").into_iter()) => {
                self.unreadable("the charset cannot be read to be changed")
            }
            Ok(coding) => Wanted::Changes(Rewriter::new(changes, is_xml(types)), coding),
        }
    }

    fn unreadable(&self, why: &'static str) -> Wanted {
        match self.unreadable {
            Unreadable::Pass => Wanted::Unread,
            Unreadable::Deny => Wanted::Unreadable(why),
        }
    }
}

fn is_xml(types: &[String]) -> bool {
    types.iter().any(|t| t.ends_with("/xml") || t.ends_with("+xml"))
}

/// Whether the charset of a message, by its Content-Type, has other bytes for letters than ASCII.
fn is_wide<'a>(mut types: impl Iterator<Item = &'a [u8]>) -> bool {
    const WIDE: [&str; 6] = ["utf-16", "utf-32", "utf-7", "ucs-", "iso-10646", "hz-gb"];
    types.any(|value| {
        let text = String::from_utf8_lossy(value).to_ascii_lowercase();
        let charset = text.split(';').skip(1).find_map(|p| p.trim().strip_prefix("charset").map(str::to_owned));
        let charset = charset.unwrap_or_default();
        let name = charset.trim_start_matches(|c: char| c.is_whitespace() || "='\"".contains(c));
        WIDE.iter().any(|wide| name.starts_with(wide)) || name.starts_with("iso-2022-")
    })
}

/// Changes one body.
#[derive(Debug)]
pub struct Rewriter {
    stages: Vec<Stage>,
}

#[derive(Debug)]
struct Stage {
    what: Doing,
    /// Bytes left within which changes begin.
    left: u64,
    ended: bool,
}

#[derive(Debug)]
enum Doing {
    Replace(Replacer),
    Remove(Remover),
}

impl Rewriter {
    fn new<'a>(changes: impl Iterator<Item = &'a BodyChange>, is_xml: bool) -> Rewriter {
        let (replaced, removed): (Vec<_>, Vec<_>) = changes.partition(|c| matches!(c.what, Edit::Replace(..)));
        let elements = |change: &&BodyChange| match &change.what {
            Edit::Remove(elements) => elements.to_vec(),
            Edit::Replace(..) => Vec::new(),
        };
        let unwanted: Arc<[Element]> = removed.iter().flat_map(elements).collect();
        let stage = |change: &BodyChange| {
            let what = match &change.what {
                Edit::Replace(expression, with) => Doing::Replace(Replacer::new(expression, with.clone())),
                Edit::Remove(elements) => Doing::Remove(Remover::new(elements.clone(), unwanted.clone(), is_xml)),
            };
            Stage { what, left: change.until.unwrap_or(u64::MAX), ended: false }
        };
        // Last, so that no replacement brings an element into being.
        Rewriter { stages: replaced.into_iter().chain(removed.iter().copied()).map(stage).collect() }
    }

    /// Reads the next bytes of the content, and appends what becomes of them to `out`. `end`: they are the last.
    pub fn read(&mut self, content: &[u8], end: bool, out: &mut Vec<u8>) {
        let (mut now, mut next) = (content.to_vec(), Vec::new());
        for stage in &mut self.stages {
            stage.read(&now, end, &mut next);
            now = std::mem::take(&mut next);
        }
        out.extend_from_slice(&now);
    }

    /// Whether all changes have a limit, so that the rest may be passed on as it is.
    pub fn is_limited(&self) -> bool {
        self.stages.iter().all(|stage| stage.left < u64::MAX)
    }

    /// Whether all that follows stays as it is.
    pub fn is_over(&self) -> bool {
        self.stages.iter().all(|stage| stage.ended)
    }
}

impl Stage {
    fn read(&mut self, input: &[u8], end: bool, out: &mut Vec<u8>) {
        if self.ended {
            return out.extend_from_slice(input);
        }
        let within = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
        let (input, behind) = input.split_at(within);
        self.left -= within as u64;
        let last = end || self.left == 0;
        let rest = match &mut self.what {
            Doing::Replace(replacer) => {
                self.ended = replacer.read(input, last, out) || last;
                behind
            }
            Doing::Remove(remover) => {
                remover.read(input, out);
                // an element that has begun is removed to its end
                let used = if last { remover.finish(behind, out) } else { 0 };
                self.ended = last && (end || !remover.is_within());
                &behind[used..]
            }
        };
        out.extend_from_slice(rest);
    }
}

#[cfg(test)]
#[path = "rewrite/tests.rs"]
mod tests;
