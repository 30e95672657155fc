//! Which replies may be stored, for which clients, and for how long (RFC 9111). `http-cache-semantics` has the
//! rules of a shared cache. This module decides which parts of messages it is given, and which requests bypass it.
//!
//! It is given only fields with a single meaning: several lines of a name are joined into one
//! list, directives are in lower case (RFC 9111, 5.2), and the age is that at the time of the
//! reply (4.2.3), and dates are in one format (RFC 9110, 5.6.7). It is not given `max-stale`: whether a reply is served
//! stale is up to the reply and to the configuration ([`Meta::may_be_stale`]), and not to clients.

use super::range::Part;
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, request, response};
use http_cache_semantics::{BeforeRequest, CacheOptions, CachePolicy};
use longsplice_http::{Request, Response, accept::Codings};
use longsplice_proxy::config::Came;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    borrow::Cow,
    net::SocketAddr,
    ops::Range,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Maximum age in seconds; greater ages are reduced to it (RFC 9111, 1.2.2).
const AGE_MAX: u64 = 1 << 31;
/// Fields of requests that bypass the cache: conditions that only the server can check (RFC 9111, 4.3.2).
const NOT_OURS: [&str; 3] = ["if-match", "if-unmodified-since", "expect"];
/// Directives of replies that must not be sent stale (RFC 9111, 4.2.4).
const NEVER_STALE: [&str; 4] = ["no-cache", "must-revalidate", "proxy-revalidate", "s-maxage"];
/// Values of Vary that prevent storing: everything, and fields about the client that we set ourselves (RFC 9111, 4.1).
const OURS: [&str; 4] = ["*", "forwarded", "via", "x-forwarded-for"];
/// Fields with secret values: only digests of these are compared and stored.
const SECRETS: [&str; 2] = ["authorization", "cookie"];

/// The parts of a client's request that a cache needs.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    /// The URL. For a site, the name of its pool and a space come before it. An intercepted request goes to the server that
    /// its client wants, whichever host it names. So that server's address and port and a space come before its URL: clients
    /// of other servers get other replies.
    pub url: String,
    pub only_if_cached: bool,
    /// The client sent a condition.
    pub conditional: bool,
    is_get: bool,
    parts: request::Parts,
}

/// Metadata of a stored reply: everything except its body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// As in [`Question::url`].
    pub url: String,
    /// Digest of the filter that the reply passed.
    pub filter: String,
    /// Address of the server that sent the reply.
    pub server: SocketAddr,
    /// How it has come, if not straight from its target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub came: Option<Came>,
    /// Time of the reply (Unix time, seconds), and its age at that time in seconds (RFC 9111, 4.2.3).
    pub time: u64,
    pub age: u64,
    /// `1.0` or `1.1`.
    pub version: String,
    pub status: u16,
    pub reason: String,
    /// Fields of the request that selected this reply (RFC 9111, 4.1).
    pub asked: Vec<(String, String)>,
    /// Fields of the reply. Each byte is a character up to U+00FF.
    pub fields: Vec<(String, String)>,
}

/// How a stored reply fits a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The reply answers the question.
    Fresh,
    /// The reply answers the question once its server has confirmed it.
    Stale,
    /// The reply answers a different question.
    Other,
}

impl Question {
    /// Returns the question of a request; `None` if a cache may neither answer the request nor
    /// store its reply. `codings`: what servers are asked for.
    pub fn new(request: &Request, url: String, codings: Codings) -> Option<Question> {
        let mut all: Vec<(&str, Cow<'_, [u8]>)> = request.end_to_end().map(|(n, v)| (n, v.into())).collect();
        let has = |name: &str| all.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
        let body = !request.framing.is_empty();
        if !matches!(request.method.as_str(), "GET" | "HEAD") || body || request.upgrade.is_some() {
            return None;
        }
        if NOT_OURS.iter().any(|name| has(name)) {
            return None;
        }
        let conditional = has("if-none-match") || has("if-modified-since");
        if let Some(asked) = codings.asked(request.passed_on("accept-encoding")) {
            all.retain(|(n, _)| !n.eq_ignore_ascii_case("accept-encoding"));
            all.push(("accept-encoding", asked.into_bytes().into()));
        }
        for (_, value) in all.iter_mut().filter(|(n, _)| SECRETS.iter().any(|s| n.eq_ignore_ascii_case(s))) {
            *value = digest(value).into_bytes().into();
        }
        let headers = headers(all)?;
        let only_if_cached = directives(&headers).any(|d| d == "only-if-cached");
        Some(Question {
            url,
            only_if_cached,
            conditional,
            is_get: request.method == "GET",
            parts: request_parts(headers),
        })
    }

    /// Whether the reply to another request with the same URL, which is stored, may be the answer.
    pub fn may_wait(&self) -> bool {
        let minds = |d: &str| matches!(d, "no-cache" | "no-store" | "only-if-cached");
        self.is_get && !directives(&self.parts.headers).any(minds) && !self.parts.headers.contains_key("authorization")
    }

    /// Returns the metadata to store with the reply; `None` if it may not be stored, or if
    /// storing is useless because the reply is stale and has no validator.
    pub fn meta(&self, reply: &Response, server: SocketAddr, filter: &str, times: [SystemTime; 2]) -> Option<Meta> {
        if !self.is_get || reply.status == 206 {
            return None; // the reply to HEAD has no body to store, and parts are not put together
        }
        let mut fields: Vec<(String, String)> = reply.end_to_end().map(|(n, v)| (n.to_owned(), text(v))).collect();
        let [asked_at, now] = times;
        let age = initial_age(&fields, asked_at, now);
        fields.retain(|(n, _)| !n.eq_ignore_ascii_case("age"));
        if !fields.iter().any(|(n, _)| n.eq_ignore_ascii_case("date")) {
            fields.push(("Date".into(), httpdate::fmt_http_date(now))); // RFC 9110, 6.6.1
        }
        let vary = list(&fields, "vary");
        // Users must not get each other's cookies.
        if vary.iter().any(|name| OURS.contains(&name.as_str()))
            || fields.iter().any(|(n, _)| n.eq_ignore_ascii_case("set-cookie"))
        {
            return None;
        }
        let mut asked = Vec::new();
        for (name, value) in &self.parts.headers {
            if vary.iter().any(|v| v == name.as_str()) {
                asked.push((name.to_string(), text(value.as_bytes())));
            } else if name == "authorization" {
                asked.push((name.to_string(), String::new())); // its presence matters (RFC 9111, 3.5)
            }
        }
        let meta = Meta {
            url: self.url.clone(),
            filter: filter.into(),
            server,
            came: None,
            time: now.duration_since(UNIX_EPOCH).ok()?.as_secs(),
            age,
            version: reply.version.number().into(),
            status: reply.status,
            reason: reply.reason.clone(),
            asked,
            fields,
        };
        let policy = meta.policy()?;
        // This request may forbid storing in fields that the stored metadata does not include.
        let may = CachePolicy::new_options(&self.parts, &meta.response()?, now, CacheOptions::default()).is_storable();
        (may && (!policy.is_stale(now) || meta.has_validator())).then_some(meta)
    }
}

impl Meta {
    /// Returns how the stored reply fits this question now.
    pub fn fit(&self, q: &Question, now: SystemTime) -> Fit {
        let Some(policy) = self.policy().filter(|_| self.url == q.url) else { return Fit::Other };
        match policy.before_request(&q.parts, now) {
            BeforeRequest::Fresh(_) => Fit::Fresh,
            BeforeRequest::Stale { matches: true, .. } => Fit::Stale,
            BeforeRequest::Stale { .. } => Fit::Other,
        }
    }

    /// Whether the reply may be sent although it is stale (RFC 9111, 4.2.4), by this directive of RFC 5861, or for so long if it
    /// says nothing.
    pub fn may_be_stale(&self, q: &Question, directive: &str, default: Option<Duration>, now: SystemTime) -> bool {
        let name = |d: &str| d.split('=').next().unwrap_or_default().trim().to_owned();
        let minds = |d: &str| matches!(&*name(d), "no-cache" | "max-age" | "min-fresh" | "no-store");
        if directives(&q.parts.headers).any(minds) || q.parts.headers.contains_key("pragma") {
            return false;
        }
        let Some(reply) = self.response() else { return false };
        let said = || directives(&reply.headers);
        if said().any(|d| NEVER_STALE.contains(&&*name(d))) {
            return false;
        }
        let seconds = |d: &str| d.strip_prefix(directive)?.strip_prefix('=')?.trim_matches('"').parse().ok();
        let limit = said().find_map(seconds).map(Duration::from_secs).or(default);
        limit.zip(self.stale_for(now)).is_some_and(|(limit, stale)| stale < limit)
    }

    /// Returns for how long the reply has been stale.
    fn stale_for(&self, now: SystemTime) -> Option<Duration> {
        let asked = request_parts(headers(pairs(&self.asked))?);
        let mut young = self.response()?;
        young.headers.insert("age", 0.into());
        young.headers.remove("date"); // it says the age, too
        let lifetime = CachePolicy::new_options(&asked, &young, self.at(), CacheOptions::default());
        let lifetime = lifetime.time_to_live(self.at()).as_secs();
        Some(Duration::from_secs(self.age(now).saturating_sub(lifetime)))
    }

    /// Whether this validator of If-Range certainly stands for the stored reply (RFC 9110, 13.1.5).
    pub fn is_certainly(&self, validator: &[u8]) -> bool {
        let validator = text(validator);
        if validator.starts_with('"') {
            return self.field("etag") == Some(&validator);
        }
        let date = |name: &str| self.field(name).and_then(|d| httpdate::parse_http_date(d).ok());
        let given = httpdate::parse_http_date(&validator).ok();
        // 8.8.2.2: it is a strong validator if nothing can have changed in the same second
        let strong = date("date").zip(date("last-modified")).is_some_and(|(d, m)| m + Duration::from_secs(1) <= d);
        strong && given.is_some() && given == date("last-modified")
    }

    /// Returns the age of the reply in seconds (RFC 9111, 4.2.3).
    pub fn age(&self, now: SystemTime) -> u64 {
        let resident = now.duration_since(self.at()).unwrap_or_default().as_secs();
        (self.age + resident).min(AGE_MAX)
    }

    fn at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.time.min(u64::from(u32::MAX)))
    }

    fn policy(&self) -> Option<CachePolicy> {
        let asked = request_parts(headers(pairs(&self.asked))?);
        Some(CachePolicy::new_options(&asked, &self.response()?, self.at(), CacheOptions::default()))
    }

    fn response(&self) -> Option<response::Parts> {
        let mut headers = headers(pairs(&self.fields))?;
        write_dates_anew(&mut headers);
        headers.insert("age", self.age.min(AGE_MAX).into());
        let (mut parts, ()) = ::http::Response::new(()).into_parts();
        parts.status = self.status.try_into().ok()?;
        parts.headers = headers;
        Some(parts)
    }

    /// Returns the first value of this field.
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn has_validator(&self) -> bool {
        self.field("etag").or(self.field("last-modified")).is_some()
    }

    /// Returns the fields that ask whether the reply is still valid (RFC 9111, 4.3.1).
    pub fn conditions(&self) -> Vec<(&'static str, Vec<u8>)> {
        let condition = |name, of| Some((name, bytes(self.field(of)?)));
        [condition("If-None-Match", "etag"), condition("If-Modified-Since", "last-modified")]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Returns the metadata updated from this 304 (RFC 9111, 4.3.4); `None` if the 304 belongs to another reply.
    /// `ours`: the only conditions were [`Meta::conditions`], so a 304 without a validator belongs to this reply.
    pub fn freshened(&self, reply: &Response, ours: bool, times: [SystemTime; 2]) -> Option<Meta> {
        // These fields describe the body (RFC 9111, 3.2), and the filter has checked them.
        const KEPT: [&str; 5] = ["age", "content-encoding", "content-range", "content-type", "set-cookie"];
        let new: Vec<(String, String)> = reply.end_to_end().map(|(n, v)| (n.to_owned(), text(v))).collect();
        let said = |name: &str| new.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str());
        let same = match (said("etag"), said("last-modified")) {
            (Some(etag), _) => self.field("etag").is_some_and(|own| opaque(own) == opaque(etag)),
            (None, Some(date)) => self.field("last-modified") == Some(date),
            (None, None) => ours,
        };
        let [asked_at, now] = times;
        let mut meta = self.clone();
        let updates = |name: &str| !KEPT.iter().any(|k| name.eq_ignore_ascii_case(k));
        meta.fields.retain(|(n, _)| !(updates(n) && said(n).is_some()));
        meta.age = initial_age(&new, asked_at, now);
        meta.time = now.duration_since(UNIX_EPOCH).ok()?.as_secs();
        meta.fields.extend(new.iter().filter(|(n, _)| updates(n)).cloned());
        // The fields that select the reply must not have changed.
        (same && list(&meta.fields, "vary") == list(&self.fields, "vary")).then_some(meta)
    }

    /// Whether the reply may stay in the cache: a 304 may have forbidden it.
    pub fn may_stay(&self) -> bool {
        self.policy().is_some_and(|p| p.is_storable())
    }

    /// Whether the client has this reply already, according to the conditions in its request (RFC 9110, 13.1.2 and 13.1.3).
    pub fn is_known(&self, request: &Request) -> bool {
        if !(200..300).contains(&self.status) {
            return false; // RFC 9110, 13.2.1
        }
        let value = |name: &str| request.end_to_end().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v);
        if value("if-none-match").is_some() {
            let mut tags = request.end_to_end().filter(|(n, _)| n.eq_ignore_ascii_case("if-none-match"));
            return tags.any(|(_, v)| names_tag(&text(v), self.field("etag")));
        }
        let date = |text: &str| httpdate::parse_http_date(text).ok();
        let since = value("if-modified-since").and_then(|v| date(&text(v)));
        let modified = self.field("last-modified").or(self.field("date")).and_then(date);
        since.zip(modified).is_some_and(|(since, modified)| modified <= since)
    }

    /// Returns the head for this part, as a server would send it.
    pub fn head(&self, part: &Part, length: u64, now: SystemTime) -> Vec<u8> {
        // The other fields describe the body, which the client has.
        const OF_304: [&str; 7] = ["cache-control", "content-location", "date", "etag", "expires", "vary", "via"];
        let known = *part == Part::Known; // RFC 9110, 15.4.5
        let (status, reason, size, range) = match part {
            Part::Whole => (self.status, self.reason.as_str(), Some(length), None),
            Part::Known => (304, "Not Modified", None, None),
            Part::Bytes(Range { start, end }) => {
                (206, "Partial Content", Some(end - start), Some(format!("{start}-{}/{length}", end - 1)))
            }
            Part::Outside => (416, "Range Not Satisfiable", Some(0), Some(format!("*/{length}"))),
        };
        let mut head = format!("HTTP/{} {status} ", self.version).into_bytes();
        head.extend(bytes(reason));
        for (name, value) in &self.fields {
            if !known || OF_304.iter().any(|n| name.eq_ignore_ascii_case(n)) {
                head.extend_from_slice(format!("\r\n{name}: ").as_bytes());
                head.extend(bytes(value));
            }
        }
        head.extend_from_slice(format!("\r\nAge: {}\r\n", self.age(now)).as_bytes());
        if let Some(size) = size {
            head.extend_from_slice(format!("Content-Length: {size}\r\n").as_bytes());
        }
        if let Some(range) = range {
            head.extend_from_slice(format!("Content-Range: bytes {range}\r\n").as_bytes());
        }
        head.extend_from_slice(b"\r\n");
        head
    }
}

/// Returns `corrected_initial_age` (RFC 9111, 4.2.3) in seconds.
fn initial_age(fields: &[(String, String)], asked_at: SystemTime, now: SystemTime) -> u64 {
    let field = |name: &str| fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str());
    let since = |from: SystemTime| now.duration_since(from).unwrap_or_default().as_secs();
    let apparent = field("date").and_then(|d| httpdate::parse_http_date(d).ok()).map_or(0, since);
    // RFC 9111, 5.1: the first value counts. Not a number: ignored; too large a number: old (1.2.2).
    let said = field("age").and_then(|a| a.split(',').next()).map_or("", str::trim);
    let is_number = !said.is_empty() && said.bytes().all(|b| b.is_ascii_digit());
    let said = if is_number { said.parse().unwrap_or(AGE_MAX) } else { 0 };
    apparent.max(said.saturating_add(since(asked_at))).min(AGE_MAX)
}

/// Returns an entity-tag without its weakness prefix (RFC 9110, 8.8.3.2).
fn opaque(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

/// Whether `If-None-Match` is `*` or contains this tag (weak comparison). Tags may contain commas.
fn names_tag(value: &str, tag: Option<&str>) -> bool {
    if value.trim() == "*" {
        return true;
    }
    let mut rest = value;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let quoted = opaque(rest);
        let Some(end) = quoted.strip_prefix('"').and_then(|r| r.find('"')) else { return false };
        if tag.is_some_and(|tag| opaque(tag) == &quoted[..end + 2]) {
            return true;
        }
        rest = &quoted[end + 2..];
    }
}

/// Returns the elements of a list field, in lower case.
fn list(fields: &[(String, String)], name: &str) -> Vec<String> {
    let lines = fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
    let elements = lines.flat_map(|(_, value)| value.split(',')).map(|e| e.trim().to_ascii_lowercase());
    elements.filter(|e| !e.is_empty()).collect()
}

fn directives(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let value = headers.get("cache-control").and_then(|v| v.to_str().ok()).unwrap_or("");
    value.split(',').map(str::trim)
}

/// Makes the parts of a request with a constant URL, because replies of different URLs are kept apart before.
fn request_parts(headers: HeaderMap) -> request::Parts {
    let (mut parts, ()) = ::http::Request::new(()).into_parts();
    (parts.method, parts.uri, parts.headers) = (Method::GET, Uri::from_static("/"), headers);
    parts
}

/// Joins fields so that each has a single meaning; `None` if that is impossible.
fn headers<'a>(fields: impl IntoIterator<Item = (&'a str, impl AsRef<[u8]>)>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let mut value = value.as_ref().to_vec();
        if let Some(before) = headers.get(&name) {
            value = [HeaderValue::as_bytes(before), b", ", &value].concat();
        }
        headers.insert(name, HeaderValue::from_bytes(&value).ok()?);
    }
    for name in ["cache-control", "pragma"] {
        let Some(value) = headers.get(name) else { continue };
        let value = value.to_str().ok()?.to_ascii_lowercase();
        let said = value.split(',').map(str::trim).filter(|d| *d != "max-stale" && !d.starts_with("max-stale="));
        let value = said.collect::<Vec<_>>().join(", ");
        headers.insert(name, HeaderValue::from_str(&value).ok()?);
    }
    // a value that is not text could not be compared
    if headers.get_all("vary").iter().any(|v| v.to_str().is_err()) { None } else { Some(headers) }
}

/// Writes dates in the only format that `http-cache-semantics` reads as HTTP does: it expects those of mail (RFC 5322). An
/// `Expires` that is no date is in the past (RFC 9111, 5.3); a `Date` or `Last-Modified` that is none says nothing.
fn write_dates_anew(headers: &mut HeaderMap) {
    for name in ["date", "expires", "last-modified"] {
        let Some(value) = headers.get(name) else { continue };
        let date = value.to_str().ok().and_then(|text| httpdate::parse_http_date(text).ok());
        match date.map(httpdate::fmt_http_date).and_then(|text| HeaderValue::from_str(&text).ok()) {
            Some(date) => drop(headers.insert(name, date)),
            None if name == "expires" => drop(headers.insert(name, HeaderValue::from_static("0"))),
            None => drop(headers.remove(name)),
        }
    }
}

fn pairs(fields: &[(String, String)]) -> impl Iterator<Item = (&str, Vec<u8>)> {
    fields.iter().map(|(name, value)| (name.as_str(), bytes(value)))
}

/// Returns 128 bits of SHA-256, in hexadecimal.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..16].iter().map(|b| format!("{b:02x}")).collect()
}

/// Converts bytes to characters, because JSON has no byte strings.
fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(*b)).collect()
}

/// Reverses [`text`]. Stored texts contain no characters above U+00FF.
fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|c| u8::try_from(c).unwrap_or(b'?')).collect()
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
