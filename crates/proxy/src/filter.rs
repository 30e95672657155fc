//! Rules for HTTP replies: which replies may pass to clients. The first rule that matches
//! decides. Without a match, the reply is allowed.
//!
//! A rule may have conditions on the head, on the first bytes of the body, and on the whole body; all of them have
//! to match. While a condition is undecided, the rule stays open. The decision stays open with it, unless all open
//! rules would lead to the same decision. The decision therefore never depends on how a body is cut into segments.
//!
//! | decision | effect on the reply |
//! | --- | --- |
//! | allowed | sent, and spliced if it is long enough |
//! | denied | replaced by a 403, or reset if its head has been sent |
//! | open, needs more of the first bytes | head and body are held back, within the limits of [`Filter`] |
//! | open for another reason | copied as far as it was read |
//!
//! The coding of the content is taken off to read it ([`crate::coding`]), and so is chunk framing; lengths are those of what
//! was sent. What passes may be changed then ([`crate::rewrite`]). Bodies of requests are judged by rules of their own in the
//! same way, but are not held back: the server never gets the end of what is denied.

use crate::{
    access::Action,
    coding::{BadContent, Coding, Decoder},
    media::{MediaType, elements, is_token, list},
    pattern::{Known, Pattern},
    rewrite::{BodyChange, BodyChanges, Unreadable, Wanted},
};
use longsplice_http::{Framing, Request, Response};
use std::{ops::RangeInclusive, str::FromStr, sync::Arc, time::Duration};

/// Maximum number of first bytes of a body: each reply that is held back takes that much memory.
pub const FIRST_MAX: usize = 32 * 1024;

/// The reply rules of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// The rules in order.
    pub rules: Vec<ReplyRule>,
    /// Changes of the bodies of replies that pass.
    pub changes: BodyChanges,
    /// Rules on the bodies of requests, in order; they have no statuses.
    pub upload_rules: Vec<ReplyRule>,
    /// Changes of the bodies of requests that pass.
    pub upload_changes: Vec<BodyChange>,
    /// Number of bytes that count as the first bytes of a body, from 1 to [`FIRST_MAX`].
    pub first: usize,
    /// Maximum time for which a reply is held back. After that, its first bytes are checked
    /// while they are sent, too late for a 403.
    pub wait: Duration,
}

impl Default for Filter {
    fn default() -> Filter {
        // 4096 bytes include every signature of a content type. An event stream is delayed no longer than a slow page.
        Filter {
            rules: Vec::new(),
            changes: BodyChanges::default(),
            upload_rules: Vec::new(),
            upload_changes: Vec::new(),
            first: 4096,
            wait: Duration::from_secs(5),
        }
    }
}

/// A rule on replies. Conditions that are empty or none match everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyRule {
    /// Effect if the rule matches.
    pub action: Action,
    /// Status of the reply.
    pub status: Vec<RangeInclusive<u16>>,
    /// Content-Type. With several values, a deny rule needs one match, and an allow rule needs all to match.
    pub media: Vec<MediaType>,
    /// Codings of Content-Encoding, matched like `media`; `identity` if there is none.
    pub encoding: Vec<CodingName>,
    /// Length of the content, as announced, or otherwise as counted.
    pub length: Vec<Lengths>,
    /// Expression to be found in the first bytes of the body.
    pub body_begins: Option<Pattern>,
    /// Expression to be found anywhere in the body.
    pub body_contains: Option<Pattern>,
}

/// The name of a content coding (RFC 9110, 8.4.1), in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodingName(String);

/// Range of lengths in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths(RangeInclusive<u64>);

/// A rule that may still match.
#[derive(Debug)]
struct Candidate {
    /// Index in the list.
    rule: usize,
    begins: Known,
    contains: Known,
}

/// Decision on a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilterDecision {
    /// Allowed by the rule of this number, from 1, or because no rule matches.
    Allowed(Option<usize>),
    /// Denied by the rule of this number, from 1.
    Denied(usize),
    /// A rule has to read the body, and cannot.
    Unreadable(BadContent),
    /// Undecided.
    Open {
        /// The first bytes of the body may decide.
        hold: bool,
    },
}

/// State of the filter for one reply.
#[derive(Debug)]
pub struct ReplyFilter {
    filter: Arc<Filter>,
    /// The body is that of a request.
    is_upload: bool,
    open: Vec<Candidate>,
    /// Number of content bytes so far.
    count: u64,
    /// Total number of content bytes, once it is known.
    length: Option<u64>,
    /// Number of bytes that the expressions have seen.
    seen: u64,
    /// Takes the coding off.
    decoder: Option<Decoder>,
    /// Why rules could not read the content.
    unread: Option<BadContent>,
}

impl Filter {
    /// Returns what becomes of the body of a request.
    pub fn wanted_of_upload(&self, request: &Request) -> Wanted {
        self.changes.wanted_of_upload(&self.upload_changes, request)
    }

    fn rules_on(&self, uploads: bool) -> &[ReplyRule] {
        if uploads { &self.upload_rules } else { &self.rules }
    }
}

impl ReplyFilter {
    /// Starts with the head of the reply.
    pub fn new(filter: &Arc<Filter>, reply: &Response) -> ReplyFilter {
        let coding = match Coding::of(reply.passed_on("content-encoding")) {
            // of a part, what is before it is not known
            Ok(Some(_)) if reply.status == 206 => Err(BadContent::Unknown),
            coding => coding,
        };
        ReplyFilter::start(filter, Some(reply.status), (reply.length(), coding), |name| list(reply, name))
    }

    /// Starts with the head of a request, whose body is judged.
    pub fn of_upload(filter: &Arc<Filter>, request: &Request) -> ReplyFilter {
        let length = if let Framing::Exact(n) = request.framing { Some(n) } else { None };
        let coding = Coding::of(request.passed_on("content-encoding"));
        ReplyFilter::start(filter, None, (length, coding), |name| elements(request.passed_on(name)))
    }

    /// `status`: none of a request. `list`: the elements of a field.
    fn start(
        filter: &Arc<Filter>,
        status: Option<u16>,
        (length, coding): (Option<u64>, Result<Option<Coding>, BadContent>),
        list: impl Fn(&str) -> Vec<String>,
    ) -> ReplyFilter {
        let is_upload = status.is_none();
        let rules = filter.rules_on(is_upload);
        let begin = |pattern: &Option<Pattern>| pattern.as_ref().map_or(Known::Yes, Pattern::start);
        let candidate = |(rule, r): (usize, &ReplyRule)| Candidate {
            rule,
            begins: begin(&r.body_begins),
            contains: begin(&r.body_contains),
        };
        let heads = rules.iter().enumerate().filter(|(_, rule)| rule.matches_head(status, &list));
        let open: Vec<Candidate> = heads.map(candidate).collect();
        let reads = open.iter().any(|c| rules[c.rule].reads());
        let filter = filter.clone();
        let mut judge = ReplyFilter { filter, is_upload, open, count: 0, length, seen: 0, decoder: None, unread: None };
        if reads {
            let decoder = |coding| Decoder::new(coding, judge.filter.changes.decoded);
            match coding.and_then(|coding| coding.map(decoder).transpose()) {
                Ok(decoder) => judge.decoder = decoder,
                Err(why) => judge.give_up(why),
            }
        }
        judge
    }

    /// Whether a rule could not read the body, which passes all the same.
    pub fn is_unread(&self) -> bool {
        self.unread.is_some() && self.filter.changes.unreadable == Unreadable::Pass
    }

    /// The content cannot be read: rules that have to read it match nothing, or refuse it.
    fn give_up(&mut self, why: BadContent) {
        self.unread = Some(why);
        if self.is_unread() {
            let rules = self.filter.rules_on(self.is_upload);
            self.open.retain(|c| !rules[c.rule].reads());
        }
    }

    /// Reads the next bytes of the content.
    pub fn read(&mut self, content: &[u8]) {
        self.count += content.len() as u64;
        match &mut self.decoder {
            Some(decoder) => {
                decoder.add(content);
                self.decode();
            }
            None if self.unread.is_none() => self.see(content),
            None => {}
        }
    }

    fn decode(&mut self) {
        let Some(mut decoder) = self.decoder.take() else { return };
        let mut piece = Vec::new();
        loop {
            piece.clear();
            let more = decoder.next(&mut piece);
            self.see(&piece);
            match more {
                Ok(true) => {}
                Ok(false) => break self.decoder = Some(decoder),
                // nobody knows how it goes on
                Err(why) => break self.give_up(why),
            }
        }
    }

    fn see(&mut self, content: &[u8]) {
        let first = self.filter.first as u64; // at most FIRST_MAX
        let begin = usize::try_from(first.saturating_sub(self.seen)).unwrap_or(usize::MAX).min(content.len());
        self.seen += content.len() as u64;
        for c in &mut self.open {
            let rule = &self.filter.rules_on(self.is_upload)[c.rule];
            if let (Some(pattern), Known::Open(Some(_))) = (&rule.body_begins, c.begins) {
                c.begins = pattern.next(c.begins, &content[..begin]);
                if self.seen >= first {
                    c.begins = pattern.end(c.begins);
                }
            }
            if let Some(pattern) = &rule.body_contains {
                c.contains = pattern.next(c.contains, content);
            }
        }
        self.open.retain(|c| c.begins != Known::No && c.contains != Known::No);
    }

    /// Handles the end of the content.
    pub fn end(&mut self) {
        self.length.get_or_insert(self.count);
        if let Some(decoder) = &mut self.decoder {
            decoder.end();
            self.decode();
        }
        if self.unread.is_some() {
            return; // nothing is known of the content
        }
        for c in &mut self.open {
            let rule = &self.filter.rules_on(self.is_upload)[c.rule];
            c.begins = rule.body_begins.as_ref().map_or(Known::Yes, |p| p.end(c.begins));
            c.contains = rule.body_contains.as_ref().map_or(Known::Yes, |p| p.end(c.contains));
        }
    }

    /// Returns the decision on what has been read so far.
    pub fn decision(&self) -> FilterDecision {
        let (mut may_be_allowed, mut may_be_denied, mut hold) = (false, false, false);
        for c in &self.open {
            let rule = &self.filter.rules_on(self.is_upload)[c.rule];
            let known = [c.begins, c.contains, self.knows_length(rule)];
            if known.contains(&Known::No) {
                continue;
            }
            if known.iter().all(|k| *k == Known::Yes) {
                return match rule.action {
                    Action::Allow if !may_be_denied => FilterDecision::Allowed(Some(c.rule + 1)),
                    Action::Deny if !may_be_allowed => FilterDecision::Denied(c.rule + 1),
                    Action::Allow | Action::Deny => FilterDecision::Open { hold },
                };
            }
            if let Some(why) = self.unread.filter(|_| rule.reads()) {
                return FilterDecision::Unreadable(why);
            }
            may_be_allowed |= rule.action == Action::Allow;
            may_be_denied |= rule.action == Action::Deny;
            hold |= c.begins != Known::Yes;
        }
        if may_be_denied { FilterDecision::Open { hold } } else { FilterDecision::Allowed(None) }
    }

    fn knows_length(&self, rule: &ReplyRule) -> Known {
        let mut all = rule.length.iter().map(|l| &l.0);
        let is = |known| if known { Known::Yes } else { Known::No };
        match self.length {
            _ if rule.length.is_empty() => Known::Yes,
            Some(n) => is(all.any(|l| l.contains(&n))),
            None if all.clone().any(|l| *l.end() == u64::MAX && *l.start() <= self.count) => Known::Yes,
            None if all.all(|l| *l.end() < self.count) => Known::No,
            None => Known::Open(None),
        }
    }
}

impl ReplyRule {
    /// Whether it reads the body.
    pub fn reads(&self) -> bool {
        self.body_begins.is_some() || self.body_contains.is_some()
    }

    fn matches_head(&self, status: Option<u16>, list: &impl Fn(&str) -> Vec<String>) -> bool {
        // If a field has several values, a deny rule needs one of them to match, an allow rule all.
        let among = |found: &[String], matches: &dyn Fn(&str) -> bool| match self.action {
            Action::Deny => found.iter().any(|f| matches(f)),
            Action::Allow => !found.is_empty() && found.iter().all(|f| matches(f)),
        };
        let codings = match &list("content-encoding")[..] {
            [] => vec!["identity".to_owned()],
            some => some.to_vec(),
        };
        (self.status.is_empty() || self.status.iter().any(|s| status.is_some_and(|status| s.contains(&status))))
            && (self.media.is_empty() || among(&list("content-type"), &|m| self.media.iter().any(|own| own.matches(m))))
            && (self.encoding.is_empty() || among(&codings, &|c| self.encoding.iter().any(|own| own.0 == c)))
    }
}

impl FromStr for CodingName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = is_token(text);
        if good {
            Ok(CodingName(text.to_ascii_lowercase()))
        } else {
            Err("bad coding: write one such as gzip, or identity")
        }
    }
}

impl FromStr for Lengths {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let last = if last.trim().is_empty() { Ok(u64::MAX) } else { last.trim().parse() };
        match (first.trim().parse(), last) {
            (Ok(first), Ok(last)) if first <= last => Ok(Lengths(first..=last)),
            _ => Err("bad length: write bytes such as 0, FIRST-LAST such as 1-1000, or FIRST- for all that are longer"),
        }
    }
}

#[cfg(test)]
#[path = "filter_tests.rs"]
mod tests;
