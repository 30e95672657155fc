//! Routes: host and path of a request select a pool, or where else to go. The first route that matches decides.

mod back;
mod redirect;
mod rewrite;

use crate::{access::Pattern, fields::FieldChanges, target::Host, users::Users};
pub use back::Origins;
use longsplice_http::path;
pub use redirect::{Location, Redirect};
pub use rewrite::Rewrite;
use std::{fmt, str::FromStr};

/// A route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Hosts; empty: all, including requests of HTTP/1.0 without a host.
    pub hosts: Vec<Pattern>,
    /// Paths that match.
    pub path: Paths,
    /// Where requests go.
    pub to: RouteTo,
    /// Another path for servers, and for redirects.
    pub rewrite: Option<Rewrite>,
    /// Whether that is undone in what servers say of their paths.
    pub rewrite_replies: bool,
    /// Longest body of a request and of a reply, in bytes, instead of the limits of the listener.
    pub longest: [Option<u64>; 2],
    /// Who may use it, instead of the users of the listener; empty: those.
    pub users: Users,
    /// Changes of fields, after those of the listener.
    pub fields: FieldChanges,
}

/// Where the requests of a route go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteTo {
    /// To the pool of this name.
    Pool(String),
    /// Nowhere: clients are told where else to ask.
    Redirect(Redirect),
}

impl Route {
    /// Returns the name of the pool, if there is one.
    pub fn pool(&self) -> Option<&str> {
        if let RouteTo::Pool(pool) = &self.to { Some(pool) } else { None }
    }
}

/// A set of paths, compared with the result of [`path::plain`]. Case-sensitive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Paths {
    /// This path and everything below it: `/a` matches `/a` and `/a/b`, but not `/ab`.
    Below(PlainPath),
    /// Exactly this path.
    Exact(PlainPath),
    /// Paths that contain a match of the expression; `^` and `$` anchor it.
    Regex(Regex),
}

/// A path in the form in which paths are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainPath(String);

/// A regular expression; matching is linear in the length of the path. Expressions with the same text are equal.
#[derive(Debug, Clone)]
pub struct Regex(regex::Regex);

/// Parse error of a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The path is not in the form in which paths are compared.
    #[error("bad path: begin it with `/`, and write it without query, %XX, `//`, `.` and `..`")]
    Path,
    /// The text is not a regular expression.
    #[error("bad regular expression: {0}; see https://docs.rs/regex for what may be written")]
    Regex(String),
}

impl Default for Paths {
    fn default() -> Paths {
        Paths::Below(PlainPath("/".into()))
    }
}

impl Paths {
    /// Whether the set contains every path.
    pub fn is_all(&self) -> bool {
        matches!(self, Paths::Below(PlainPath(top)) if top == "/")
    }

    /// Whether the set contains `path`, which must be a result of [`path::plain`].
    pub fn contains(&self, path: &str) -> bool {
        match self {
            Paths::Below(PlainPath(top)) => {
                let rest = path.strip_prefix(top.as_str());
                rest.is_some_and(|rest| top.ends_with('/') || rest.is_empty() || rest.starts_with('/'))
            }
            Paths::Exact(PlainPath(own)) => own == path,
            Paths::Regex(Regex(regex)) => regex.is_match(path),
        }
    }
}

/// Returns the first route for `host` and `path`, and its number from 1.
pub fn find<'a>(routes: &'a [Route], host: Option<&Host>, path: &str) -> Option<(usize, &'a Route)> {
    let matches = |route: &Route| {
        let here = route.hosts.is_empty() || host.is_some_and(|h| route.hosts.iter().any(|p| p.matches(h)));
        here && route.path.contains(path)
    };
    routes.iter().enumerate().find(|(_, route)| matches(route)).map(|(n, route)| (n + 1, route))
}

impl fmt::Display for PlainPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PlainPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        let plain = path::plain(text).map_err(|_| PathError::Path)?;
        if !text.starts_with('/') || plain != text { Err(PathError::Path) } else { Ok(PlainPath(plain)) }
    }
}

impl FromStr for Regex {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        let wrong = |e: regex::Error| {
            let text = e.to_string();
            // the last line has the reason; the lines before repeat the expression and point into it
            let last = text.lines().last().unwrap_or_default();
            PathError::Regex(last.trim_start_matches("error: ").to_owned())
        };
        regex::Regex::new(text).map(Regex).map_err(wrong)
    }
}

impl PartialEq for Regex {
    fn eq(&self, other: &Regex) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Regex {}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(hosts: &[&str], path: Paths, pool: &str) -> Route {
        let hosts = hosts.iter().map(|h| h.parse().unwrap()).collect();
        Route {
            hosts,
            path,
            to: RouteTo::Pool(pool.into()),
            rewrite: None,
            rewrite_replies: false,
            longest: [None; 2],
            users: Users::default(),
            fields: FieldChanges::default(),
        }
    }

    fn below(path: &str) -> Paths {
        Paths::Below(path.parse().unwrap())
    }

    #[test]
    fn the_first_match_decides() {
        let routes = [
            route(&["www.example.org"], Paths::Exact("/".parse().unwrap()), "front"),
            route(&["www.example.org", "*.example.net"], below("/api"), "api"),
            route(&[], Paths::Regex(r"\.(png|jpg)$".parse().unwrap()), "images"),
            route(&["192.0.2.0/24"], Paths::default(), "numeric"),
            route(&["www.example.org"], below("/"), "rest"),
        ];
        let at = |host: &str, path: &str| {
            let host = (!host.is_empty()).then(|| Host::from_name(host.as_bytes()).unwrap());
            find(&routes, host.as_ref(), path).map_or("-", |(_, r)| r.pool().unwrap())
        };
        for (host, path, pool) in [
            ("www.example.org", "/", "front"),
            ("www.example.org", "/index", "rest"),
            ("www.example.org", "/api", "api"),
            ("www.example.org", "/api/", "api"),
            ("www.example.org", "/api/x.png", "api"),
            ("www.example.org", "/apix", "rest"),
            ("www.example.org", "/API", "rest"),
            ("a.b.example.net", "/api/x", "api"),
            ("example.net", "/api/x", "-"),
            ("a.example.net", "/", "-"),
            ("other.org", "/a/b.png", "images"),
            ("other.org", "/a/b.png/", "-"),
            ("192.0.2.7", "/", "numeric"),
            ("", "/b.jpg", "images"),
            ("", "/", "-"),
        ] {
            assert_eq!(at(host, path), pool, "{host} {path}");
        }
    }

    #[test]
    fn a_slash_at_the_end_means_what_is_below() {
        assert!(below("/a/").contains("/a/b") && below("/a/").contains("/a/") && !below("/a/").contains("/a"));
    }

    #[test]
    fn paths_are_written_as_they_are_compared() {
        for text in ["", "a", "/a?b", "/%61", "/a//b", "/../a", "/."] {
            assert_eq!(text.parse::<PlainPath>(), Err(PathError::Path), "{text}");
        }
        let wrong = "(".parse::<Regex>().unwrap_err().to_string();
        assert!(wrong.starts_with("bad regular expression: unclosed group; see"), "{wrong}");
        assert_eq!("^/a$".parse::<Regex>(), "^/a$".parse::<Regex>());
    }
}
