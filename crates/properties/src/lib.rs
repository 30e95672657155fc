//! What must hold for any bytes that strangers send: properties of the parsers, as functions that panic where one does not hold.
//!
//! Two run them: `tests/replay.rs`, on the corpus in fuzz/corpus and on a number of seeded mutations of it; and cargo-fuzz,
//! from fuzz/, for as long as one likes. Of every parser it is asked that
//! - no input makes it panic, and it never says that it has used more than it was given;
//! - bytes one by one lead to the same as all at once, and what follows a message changes nothing;
//! - what is accepted and written again by us is read as the same, to its last byte.

mod codings;
mod ftp;
mod handshakes;
mod haproxy;
mod heads;
mod http;
mod judged;
mod login;
mod rewrite;

/// A property.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, also that of its corpus.
    pub name: &'static str,
    /// Panics if it does not hold for these bytes.
    pub check: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 28] = [
    Target { name: "http_request", check: http::request },
    Target { name: "http_reply", check: http::reply },
    Target { name: "http_chunked", check: http::chunked },
    Target { name: "http_target", check: http::target },
    Target { name: "content_coding", check: codings::content },
    Target { name: "client_hello", check: handshakes::client_hello },
    Target { name: "socks5", check: handshakes::socks5 },
    Target { name: "socks4", check: handshakes::socks4 },
    Target { name: "socks_udp", check: handshakes::socks_udp },
    Target { name: "proxy_protocol", check: handshakes::proxy_protocol },
    Target { name: "telnet", check: login::telnet },
    Target { name: "login", check: login::login },
    Target { name: "target", check: handshakes::target },
    Target { name: "ftp_command", check: ftp::command },
    Target { name: "ftp_reply", check: ftp::reply },
    Target { name: "ftp_address", check: ftp::address },
    Target { name: "socks_reply", check: handshakes::socks_reply },
    Target { name: "http_range", check: http::range },
    Target { name: "http_cookie", check: http::cookie },
    Target { name: "time_of_day", check: handshakes::time_of_day },
    Target { name: "html_element", check: rewrite::elements },
    Target { name: "expression", check: rewrite::expressions },
    Target { name: "ftp_path", check: ftp::path },
    Target { name: "first_bytes", check: judged::first_bytes },
    Target { name: "body_rules", check: judged::body },
    Target { name: "http_fields", check: heads::fields },
    Target { name: "http_location", check: heads::location },
    Target { name: "haproxy", check: haproxy::line },
];

/// Checks the property of this name.
///
/// # Panics
/// If it does not hold, or if there is none.
pub fn check(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of this name");
    (target.check)(input);
}
