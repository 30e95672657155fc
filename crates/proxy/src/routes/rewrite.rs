//! Other paths for servers, and for redirects: what a route matches is replaced. The query stays.

use super::{PlainPath, Regex};
use longsplice_http::path;

/// What becomes of the path of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rewrite {
    /// What the route's path matches at the beginning becomes the second one.
    Prefix(PlainPath, PlainPath),
    /// What the expression finds first in the path, as routes compare it, becomes this text, with groups as `$1`. A query
    /// in the text comes before that of the request.
    Regex(Regex, String),
}

impl Rewrite {
    /// Returns the target (path and query) for a server; `None` if nothing matches, or if the path has several readings.
    pub fn apply(&self, target: &str) -> Option<String> {
        let (written, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
        let with = |path: String, query: Option<&str>| match query {
            Some(query) => format!("{path}{}{query}", if path.contains('?') { '&' } else { '?' }),
            None => path,
        };
        match self {
            Rewrite::Prefix(PlainPath(from), PlainPath(to)) => {
                let rest = below(written, from.trim_end_matches('/'))?;
                let path = if rest.is_empty() { to.clone() } else { format!("{}/{rest}", to.trim_end_matches('/')) };
                Some(with(path, query))
            }
            Rewrite::Regex(Regex(regex), to) => {
                let plain = path::plain(written).ok()?;
                let found = regex.captures(&plain)?;
                let whole = found.get(0)?;
                let mut text = String::new();
                // only groups may have what a path cannot
                let mut rest = to.as_str();
                while let Some(at) = rest.find('$') {
                    let mut part = String::new();
                    text += &rest[..at];
                    let name = name_of_group(&rest[at..]);
                    found.expand(&rest[at..at + name], &mut part);
                    text += &encoded(&part);
                    rest = &rest[at + name..];
                }
                text += rest;
                let [before, after] = [&plain[..whole.start()], &plain[whole.end()..]].map(encoded);
                let (path, own) = text.split_once('?').map_or((text.as_str(), None), |(p, q)| (p, Some(q)));
                let path = format!("/{}", format!("{before}{path}{after}").trim_start_matches('/'));
                Some(with(with(path, own), query))
            }
        }
    }
}

/// Returns how much of a text that begins with `$` is the name of a group.
fn name_of_group(text: &str) -> usize {
    let rest = &text[1..];
    if rest.starts_with('$') {
        return 2;
    }
    if rest.starts_with('{') {
        return rest.find('}').map_or(1, |end| end + 2);
    }
    1 + rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())
}

/// Returns what follows this path in one that was written in any way, without the slashes between them.
pub(super) fn below<'a>(written: &'a str, top: &str) -> Option<&'a str> {
    // The places where a segment ends: each reading of a slash, and the end.
    let ends = written.char_indices().filter(|(_, c)| matches!(c, '/' | '\\' | '%')).map(|(at, _)| at);
    let end = ends.chain([written.len()]).find(|end| {
        let is_end = slash(&written[*end..]) > 0 || *end == written.len();
        let plain = || path::plain(&written[..*end]);
        is_end && (top.is_empty() && *end == 0 || plain().is_ok_and(|plain| plain.trim_end_matches('/') == top))
    })?;
    let mut rest = &written[end..];
    while let n @ 1.. = slash(rest) {
        rest = &rest[n..];
    }
    Some(rest)
}

/// Returns the length of the slash at the beginning, if there is one.
fn slash(text: &str) -> usize {
    let escape = text.get(..3).unwrap_or_default();
    match text.chars().next() {
        Some('/' | '\\') => 1,
        _ if escape.eq_ignore_ascii_case("%2f") || escape.eq_ignore_ascii_case("%5c") => 3,
        _ => 0,
    }
}

/// Writes a text such that it can be part of a path (RFC 3986, 3.3).
pub(super) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        if b.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/".contains(&b) {
            out.push(char::from(b));
        } else {
            out += &format!("%{b:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_route_matches_is_replaced() {
        for (from, to, target, want) in [
            ("/api", "/", "/api", Some("/")),
            ("/api", "/", "/api/", Some("/")),
            ("/api", "/", "/api?q=/api", Some("/?q=/api")),
            ("/api", "/", "/api/v1/%2Fx?q", Some("/v1/%2Fx?q")),
            ("/api", "/v2", "/api/x", Some("/v2/x")),
            ("/api", "/v2/", "/api", Some("/v2/")),
            ("/api", "/v2", "//%61pi//x", Some("/v2/x")),
            ("/api", "/", "/api//evil.example/", Some("/evil.example/")),
            ("/api", "/", "/api/%2f\\evil.example/", Some("/evil.example/")),
            ("/api", "/", "\\api%5Cx", Some("/x")),
            ("/a/b", "/", "/a%2fb/c", Some("/c")),
            ("/api", "/v2", "/apis", None),
            ("/api", "/v2", "/", None),
            ("/", "/v2", "/", Some("/v2")),
            ("/", "/v2", "/x/y?z", Some("/v2/x/y?z")),
            ("/\u{e4}", "/", "/%C3%A4/%C3%B6", Some("/%C3%B6")),
        ] {
            let rewrite = Rewrite::Prefix(from.parse().unwrap(), to.parse().unwrap());
            assert_eq!(rewrite.apply(target).as_deref(), want, "{from} {to} {target}");
        }
    }

    #[test]
    fn what_an_expression_finds_is_replaced() {
        for (regex, to, target, want) in [
            (r"^/user/(\d+)$", "/profile?id=$1", "/user/7", Some("/profile?id=7")),
            (r"^/user/(\d+)$", "/profile?id=$1", "/user/7?x=1", Some("/profile?id=7&x=1")),
            (r"^/user/(\d+)$", "/profile", "/user/x", None),
            (r"^/([a-z]+)/", "/new/${1}s/", "/old/x%20y", Some("/new/olds/x%20y")),
            (r"\.php$", "", "/a.php?q", Some("/a?q")),
            ("^/(.*)$", "/q/$1", "/a%3Fb%23c%0d", None),
            ("^/(.*)$", "/q/$1", "/a%3Fb%23c%25", Some("/q/a%3Fb%23c%25")),
            ("^/x(.*)$", "$1", "/x//evil.example", Some("/evil.example")),
            ("^/x$", "/$$1", "/x", Some("/$1")),
        ] {
            let rewrite = Rewrite::Regex(regex.parse().unwrap(), to.into());
            assert_eq!(rewrite.apply(target).as_deref(), want, "{regex} {to} {target}");
        }
    }
}
