//! Redirects: a route that sends its clients elsewhere (RFC 9110, 15.4).

use std::str::FromStr;

/// A redirect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// 301, 302, 303, 307 or 308.
    pub status: u16,
    /// Where to.
    pub to: Location,
}

/// A URL, or a path, with variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Host,
    Hostname,
    Path,
    Uri,
}

impl Location {
    /// Returns the value of the field. `host`: the host that was asked for, with its port if it has one; `target`: path and
    /// query.
    pub fn of(&self, host: &str, target: &str) -> String {
        // `//host` would be another server, and so would `/\host` for browsers
        let target = format!("/{}", target.trim_start_matches(['/', '\\']));
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(part) => text += part,
                Part::Host => text += host,
                Part::Hostname => text += without_port(host),
                Part::Path => text += &escaped(target.split('?').next().unwrap_or("/")),
                Part::Uri => text += &escaped(&target),
            }
        }
        text
    }
}

fn without_port(host: &str) -> &str {
    match host.rfind(':') {
        Some(at) if !host.ends_with(']') => &host[..at],
        _ => host,
    }
}

/// Escapes what a URL cannot have (RFC 3986, 2).
fn escaped(target: &str) -> String {
    let is_good = |b: u8| b.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&b);
    target.bytes().map(|b| if is_good(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (variable, behind) = after.split_once('}').unwrap_or(("", ""));
            let part = match variable {
                "host" => Part::Host,
                "hostname" => Part::Hostname,
                "path" => Part::Path,
                "uri" => Part::Uri,
                _ => {
                    let known = "${host}, ${hostname}, ${path} or ${uri}";
                    return Err(format!("there is no ${{{variable}}}: write {known}"));
                }
            };
            parts.extend((!before.is_empty()).then(|| Part::Text(before.to_owned())));
            parts.push(part);
            rest = behind;
        }
        parts.extend((!rest.is_empty()).then(|| Part::Text(rest.to_owned())));
        let begins = match parts.first() {
            Some(Part::Text(text)) => {
                let first = text.split(['/', '?', '#']).next().unwrap_or_default();
                text.starts_with('/') && !text.starts_with("//") || first == "http:" || first == "https:"
            }
            Some(Part::Path | Part::Uri) => true,
            Some(Part::Host | Part::Hostname) | None => false,
        };
        let good = text.bytes().all(|b| b.is_ascii_graphic());
        if begins && good {
            Ok(Location(parts))
        } else {
            Err("bad URL: begin it with http://, https:// or `/`, and write other than ASCII as %XX".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables() {
        for (to, want) in [
            ("https://${hostname}${uri}", "https://a.example/x%C3%A4?q=%22"),
            ("https://${host}${path}", "https://a.example:81/x%C3%A4"),
            ("/new${uri}", "/new/x%C3%A4?q=%22"),
            ("${path}", "/x%C3%A4"),
            ("https://other.example/", "https://other.example/"),
        ] {
            assert_eq!(to.parse::<Location>().unwrap().of("a.example:81", "/x\u{e4}?q=\""), want, "{to}");
        }
        let uri: Location = "${uri}".parse().unwrap();
        assert_eq!(uri.of("[::1]:8080", "//evil.example/"), "/evil.example/");
        assert_eq!(uri.of("x", "/\\evil.example"), "/evil.example");
        assert_eq!("http://${hostname}/".parse::<Location>().unwrap().of("[::1]", "/"), "http://[::1]/");
    }

    #[test]
    fn what_is_no_url() {
        for text in ["", "x", "//evil", "ftp://x", "https://a b", "/\u{e4}", "${host}", "/${port}", "/${uri", "/a\r\nb"]
        {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
    }
}
