//! Where servers name paths of theirs in the heads of replies, clients get those that they have to ask for: what [`Rewrite`] has
//! done to the path of the request is undone.

use super::{PlainPath, Rewrite, rewrite::below};
use crate::fields::{edit, name_of};

/// Who may be meant in a URL: the site, as the client wrote it, and its servers.
#[derive(Debug, Clone, Copy)]
pub struct Origins<'a> {
    /// The site.
    pub site: &'a str,
    /// `HOST:PORT` of each server.
    pub servers: &'a [String],
}

impl Rewrite {
    /// Changes Location, Content-Location, Refresh and the paths of cookies in a complete head.
    pub fn back_in(&self, head: Vec<u8>, origins: &Origins<'_>) -> Vec<u8> {
        const NAMES: [&str; 4] = ["location", "content-location", "refresh", "set-cookie"];
        let Rewrite::Prefix(from, to) = self else { return head };
        edit(head, |lines| {
            for line in lines {
                let Some(field) = NAMES.iter().find(|name| name_of(line).eq_ignore_ascii_case(name.as_bytes())) else {
                    continue;
                };
                let start = field.len() + 2; // behind ": "
                let Some(value) = line.get(start..).and_then(|value| std::str::from_utf8(value).ok()) else { continue };
                let changed = match *field {
                    "refresh" => refresh(value, |url| url_back(url, from, to, origins)),
                    "set-cookie" => cookie(value, |path| cookie_back(path, from, to)),
                    _ => url_back(value, from, to, origins),
                };
                if let Some(changed) = changed {
                    line.truncate(start);
                    line.extend(changed.into_bytes());
                }
            }
        })
    }
}

/// Returns the URL or path for clients; `None`: it stays as it is.
fn url_back(url: &str, from: &PlainPath, to: &PlainPath, origins: &Origins<'_>) -> Option<String> {
    let behind = |scheme: &str| {
        let begins = url.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme));
        begins.then(|| &url[scheme.len()..])
    };
    let (origin, path) = match behind("http://").or(behind("https://")).or(behind("//")) {
        Some(rest) => {
            let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
            let is = |other: &str| {
                let plain = |host: &str| host.to_ascii_lowercase().trim_end_matches(":80").to_owned();
                plain(authority) == plain(other)
            };
            let origin = match is(origins.site) {
                true => &url[..url.len() - path.len()],
                // clients need not know of it
                false if origins.servers.iter().any(|server| is(server)) => "",
                false => return None,
            };
            (origin, if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
        }
        None if url.starts_with('/') => ("", url.to_owned()),
        None => return None, // relative to what the client has asked for
    };
    let (path, rest) = path.split_at(path.find(['?', '#']).unwrap_or(path.len()));
    Some(format!("{origin}{}{rest}", path_back(path, from, to)?))
}

fn path_back(path: &str, PlainPath(from): &PlainPath, PlainPath(to): &PlainPath) -> Option<String> {
    let [from, to] = [from, to].map(|path| path.trim_end_matches('/'));
    // of a server that knows what clients ask for
    if below(path, from).is_some() && !(to.starts_with(from) && below(path, to).is_some()) {
        return None;
    }
    let rest = below(path, to)?;
    let slash = if rest.is_empty() && !path.ends_with('/') && !from.is_empty() { "" } else { "/" };
    Some(format!("{from}{slash}{rest}"))
}

/// Returns the path for a cookie: one without a slash at its end is that of all that is below it (RFC 6265, 5.1.4).
fn cookie_back(path: &str, from: &PlainPath, to: &PlainPath) -> Option<String> {
    let back = path_back(path, from, to)?;
    Some(if path == "/" && back.len() > 1 { back.trim_end_matches('/').to_owned() } else { back })
}

/// Changes the URL of Refresh: `5; url=URL`.
fn refresh(value: &str, back: impl Fn(&str) -> Option<String>) -> Option<String> {
    let at = value.find([';', ','])? + 1;
    let rest = value[at..].trim_start();
    let rest = match rest.get(..3) {
        Some(url) if url.eq_ignore_ascii_case("url") => rest[3..].trim_start().strip_prefix('=')?.trim_start(),
        _ => rest,
    };
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''));
    let url = quote.map_or(rest, |quote| rest[1..].split(quote).next().unwrap_or_default());
    let begin = value.len() - rest.len() + quote.map_or(0, char::len_utf8);
    Some(format!("{}{}{}", &value[..begin], back(url)?, &value[begin + url.len()..]))
}

/// Changes the last path of a cookie, which is the one that counts (RFC 6265, 5.2).
fn cookie(value: &str, back: impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut parts: Vec<String> = value.split(';').map(str::to_owned).collect();
    let path = |part: &String| {
        let (name, path) = part.split_once('=')?;
        name.trim().eq_ignore_ascii_case("path").then(|| path.trim().to_owned())
    };
    let (at, path) = parts.iter().enumerate().skip(1).rev().find_map(|(at, part)| Some((at, path(part)?)))?;
    parts[at] = format!(" Path={}", back(&path)?);
    Some(parts.join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(from: &str, to: &str, field: &str) -> String {
        let rewrite = Rewrite::Prefix(from.parse().unwrap(), to.parse().unwrap());
        let servers = ["10.0.0.1:8080".to_owned(), "web.example:80".to_owned()];
        let head = format!("HTTP/1.1 302 Found\r\nA: /v2/x\r\n{field}\r\n\r\n").into_bytes();
        let out = rewrite.back_in(head, &Origins { site: "a.example", servers: &servers });
        let out = String::from_utf8(out).unwrap();
        out.strip_prefix("HTTP/1.1 302 Found\r\nA: /v2/x\r\n").unwrap().strip_suffix("\r\n\r\n").unwrap().to_owned()
    }

    #[test]
    fn what_was_done_to_the_path_is_undone() {
        for (value, want) in [
            ("/v2/x?y=/v2#z", "/api/x?y=/v2#z"),
            ("/v2", "/api"),
            ("/v2/", "/api/"),
            ("/v2?x", "/api?x"),
            ("http://a.example/v2/x", "http://a.example/api/x"),
            ("HTTPS://A.example/v2/x", "HTTPS://A.example/api/x"),
            ("//a.example:80/v2", "//a.example:80/api"),
            ("http://10.0.0.1:8080/v2/x", "/api/x"),
            ("http://web.example/v2/x", "/api/x"),
            // not the server's own, or known already
            ("/v22/x", "/v22/x"),
            ("/", "/"),
            ("/api/x", "/api/x"),
            ("x/v2", "x/v2"),
            ("http://other.example/v2/x", "http://other.example/v2/x"),
            ("http://a.example@other.example/v2/x", "http://a.example@other.example/v2/x"),
            ("http://10.0.0.1:80801/v2/x", "http://10.0.0.1:80801/v2/x"),
            ("mailto:a@a.example", "mailto:a@a.example"),
        ] {
            assert_eq!(back("/api", "/v2", &format!("Location: {value}")), format!("Location: {want}"));
            assert_eq!(back("/api", "/v2", &format!("content-location: {value}")), format!("content-location: {want}"));
        }
        for (from, to, value, want) in [
            ("/api", "/", "/", "/api/"),
            ("/api", "/", "/x", "/api/x"),
            ("/api", "/", "/api/x", "/api/x"),
            ("/api", "/", "http://10.0.0.1:8080", "/api/"),
            ("/", "/v2", "/v2/x", "/x"),
            ("/", "/v2", "/v2", "/"),
            ("/", "/v2", "/x", "/x"),
            ("/a", "/a/b", "/a/b/c", "/a/c"),
        ] {
            assert_eq!(back(from, to, &format!("Location: {value}")), format!("Location: {want}"), "{from} {to}");
        }
    }

    #[test]
    fn cookies_and_refresh() {
        for (field, want) in [
            ("Set-Cookie: a=/v2; Path=/v2/x; HttpOnly", "Set-Cookie: a=/v2; Path=/api/x; HttpOnly"),
            ("Set-Cookie: path=/v2; path=/v3;PATH = /v2", "Set-Cookie: path=/v2; path=/v3; Path=/api"),
            ("Set-Cookie: a=b; Path=/", "Set-Cookie: a=b; Path=/"),
            ("Set-Cookie: path=/v2", "Set-Cookie: path=/v2"),
            ("Refresh: 5; url=/v2/x", "Refresh: 5; url=/api/x"),
            ("Refresh: 5;URL='http://a.example/v2'", "Refresh: 5;URL='http://a.example/api'"),
            ("Refresh: 5, /v2/x", "Refresh: 5, /api/x"),
            ("Refresh: 5", "Refresh: 5"),
        ] {
            assert_eq!(back("/api", "/v2", field), want);
        }
        assert_eq!(back("/api", "/", "Set-Cookie: a=b; Path=/"), "Set-Cookie: a=b; Path=/api");
    }
}
