//! Writes heads for the other side from the parsed values, so that both sides of a proxy read the same message. Fields about
//! one connection are left out (RFC 9110, 7.6.1).

use crate::{
    Form, Framing, Request, Response, Version,
    accept::Codings,
    fields::{ABOUT_BYTES, OF_CONTENT, OWN},
};
use std::{io::Write, net::IpAddr, time::SystemTime};

/// How servers are told the client's address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Forwarded {
    /// Not at all. Such fields from the client itself are forwarded.
    #[default]
    None,
    /// `Forwarded: for=` (RFC 7239).
    Standard,
    /// `X-Forwarded-For`, which is older and more widely supported;
    /// for a site with `X-Forwarded-Host` and `X-Forwarded-Proto`.
    XForwardedFor,
}

/// Values written into requests.
#[derive(Debug, Clone, Copy)]
pub struct Onward<'a> {
    /// The value of `Host`: the server connected to (RFC 9112, 3.2.2).
    pub host: &'a str,
    /// Our name in `Via`; `None`: do not write `Via`.
    pub via: Option<&'a str>,
    /// The field that tells the client's address.
    pub forwarded: Forwarded,
    /// The client's address.
    pub client: IpAddr,
    /// The codings of content that are asked for.
    pub codings: Codings,
    /// The site the client asked for, if we act for a site. The server is told of it together with the client's address.
    pub site: Option<&'a str>,
}

/// Values written into replies.
#[derive(Debug, Clone, Copy)]
pub struct Back<'a> {
    /// Our name in `Via`; `None`: do not write `Via`.
    pub via: Option<&'a str>,
    /// The client's version: HTTP/1.0 has no chunks (RFC 9112, 6.1).
    pub client: Version,
    /// Whether we close the connection after the reply.
    pub close: bool,
    /// When the reply arrived, for a reply without `Date` (RFC 9110, 6.6.1).
    pub now: SystemTime,
    /// What becomes of the body.
    pub content: Content,
}

/// What becomes of a body. If it is changed, its length is not known, and what the server says of its bytes is not true any more.
/// It has to be written with [`Response::framing_of_changed`](crate::Response::framing_of_changed).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Content {
    /// It stays as it is.
    #[default]
    AsItIs,
    /// It is changed.
    Changed,
    /// It is changed, and has this coding instead of its own.
    Recoded(Option<&'static str>),
}

/// Writes the head of a request to a server, in origin form. The body is to be forwarded unchanged.
pub fn request(r: &Request, to: &Onward<'_>) -> Vec<u8> {
    let path = match &r.form {
        Form::Origin(path) | Form::Absolute(_, path) => path.as_str(),
        Form::Authority(_) | Form::Asterisk => "*",
    };
    let mut out = Vec::with_capacity(512);
    line(&mut out, &[r.method.as_bytes(), b" ", path.as_bytes(), b" HTTP/1.1"]);
    field(&mut out, "Host", to.host.as_bytes());
    let name = match to.forwarded {
        Forwarded::None => "",
        Forwarded::Standard => "forwarded",
        Forwarded::XForwardedFor => "x-forwarded-for",
    };
    let codings = to.codings.asked(r.passed_on("accept-encoding"));
    for (n, value) in r.fields.end_to_end(&r.hop) {
        let is = |other: &str| n.eq_ignore_ascii_case(other.as_bytes());
        // RFC 9110, 10.1.1: an HTTP/1.0 client cannot handle the interim reply 100
        let expects = is("expect") && r.version == Version::Http10;
        let counted = is("max-forwards") && r.max_forwards.is_some();
        let site = to.forwarded == Forwarded::XForwardedFor && to.site.is_some();
        let of_site = ["x-forwarded-host", "x-forwarded-proto"].iter().filter(|_| site);
        let ours = is(name)
            || (is("accept-encoding") && codings.is_some())
            || (is("via") && to.via.is_some())
            || of_site.clone().any(|o| is(o));
        let known = OWN.iter().chain(&OF_CONTENT).chain([&name]).chain(of_site);
        let disguised = known.filter(|o| !o.is_empty()).any(|o| is_disguised(n, o));
        if !(ours || expects || counted || disguised) {
            line(&mut out, &[n, b": ", value]);
        }
    }
    if let Some(codings) = codings {
        field(&mut out, "Accept-Encoding", codings.as_bytes());
    }
    framing(&mut out, r.framing);
    if let Some(n) = r.max_forwards {
        field(&mut out, "Max-Forwards", n.saturating_sub(1).to_string().as_bytes());
    }
    via(&mut out, r.fields.all("via").filter(|_| !r.hop.iter().any(|h| h == "via")), r.version, to.via);
    let client = match (to.forwarded, to.client.to_canonical()) {
        (Forwarded::None, _) => None,
        (Forwarded::XForwardedFor, ip) => Some(ip.to_string()),
        (Forwarded::Standard, IpAddr::V4(ip)) => Some(format!("for={ip}")),
        (Forwarded::Standard, IpAddr::V6(ip)) => Some(format!("for=\"[{ip}]\"")),
    };
    if let Some(mut client) = client {
        let name = if to.forwarded == Forwarded::Standard { "Forwarded" } else { "X-Forwarded-For" };
        let before = r.fields.all(name).filter(|_| !r.hop.iter().any(|h| h.eq_ignore_ascii_case(name)));
        match to.site {
            // quoted, because a token cannot contain the colon before a port (RFC 7239, 4)
            Some(site) if to.forwarded == Forwarded::Standard => client += &format!(";host=\"{site}\";proto=http"),
            Some(site) => {
                field(&mut out, "X-Forwarded-Host", site.as_bytes());
                field(&mut out, "X-Forwarded-Proto", b"http");
            }
            None => {}
        }
        list(&mut out, name, before, &client);
    }
    let upgrade = r.upgrade.as_ref().filter(|_| r.framing.is_empty());
    let options = [
        ("upgrade", upgrade.is_some()),
        ("TE", r.trailers),
        ("close", r.has_odd_content()), // so that the server does not obey the content as a request
    ];
    let options: Vec<&str> = options.into_iter().filter(|(_, said)| *said).map(|(option, _)| option).collect();
    if !options.is_empty() {
        field(&mut out, "Connection", options.join(", ").as_bytes());
    }
    if let Some(protocols) = upgrade {
        field(&mut out, "Upgrade", protocols.as_bytes());
    }
    if r.trailers {
        field(&mut out, "TE", b"trailers");
    }
    out.extend(b"\r\n");
    out
}

/// Writes the head of a reply to the client. A chunked body for an
/// HTTP/1.0 client has to be forwarded without the chunk framing.
pub fn response(r: &Response, to: &Back<'_>) -> Vec<u8> {
    let changed = to.content != Content::AsItIs;
    let recoded = if let Content::Recoded(coding) = to.content { Some(coding) } else { None };
    let mut out = Vec::with_capacity(512);
    line(&mut out, &[b"HTTP/1.1 ", r.status.to_string().as_bytes(), b" ", r.reason.as_bytes()]);
    for (n, value) in r.fields.end_to_end(&r.hop) {
        let untrue = changed && ABOUT_BYTES.iter().any(|about| n.eq_ignore_ascii_case(about.as_bytes()))
            || recoded.is_some() && n.eq_ignore_ascii_case(b"content-encoding");
        if !(untrue || n.eq_ignore_ascii_case(b"via") && to.via.is_some()) {
            line(&mut out, &[n, b": ", value]);
        }
    }
    if r.status >= 200 && r.passed_on("date").next().is_none() {
        field(&mut out, "Date", httpdate::fmt_http_date(to.now).as_bytes());
    }
    if let Some(coding) = recoded {
        coding.into_iter().for_each(|coding| field(&mut out, "Content-Encoding", coding.as_bytes()));
        // another client, who accepts other codings, would get other bytes
        let varies = |value: &[u8]| {
            let text = String::from_utf8_lossy(value).to_ascii_lowercase();
            text.split(',').any(|name| matches!(name.trim(), "accept-encoding" | "*"))
        };
        if !r.passed_on("vary").any(varies) {
            field(&mut out, "Vary", b"Accept-Encoding");
        }
    }
    match (r.framing, r.said) {
        _ if changed => framing(&mut out, r.framing_of_changed(to.client)),
        (Framing::Chunked, _) if to.client == Version::Http10 => {}
        (Framing::None, Some(n)) => framing(&mut out, Framing::Exact(n)),
        (f, _) => framing(&mut out, f),
    }
    via(&mut out, r.fields.all("via").filter(|_| !r.hop.iter().any(|h| h == "via")), r.version, to.via);
    match &r.upgrade {
        Some(protocol) => {
            field(&mut out, "Connection", b"upgrade");
            field(&mut out, "Upgrade", protocol.as_bytes());
        }
        None if to.close && !r.is_interim() => field(&mut out, "Connection", b"close"),
        None => {}
    }
    out.extend(b"\r\n");
    out
}

/// The value of `Host` for a target, without the default port (RFC 9110, 4.2.3).
pub fn host(name: &str, port: u16) -> String {
    if port == 80 { name.to_owned() } else { format!("{name}:{port}") }
}

fn line(out: &mut Vec<u8>, parts: &[&[u8]]) {
    parts.iter().for_each(|p| out.extend_from_slice(p));
    out.extend_from_slice(b"\r\n");
}

fn field(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    line(out, &[name.as_bytes(), b": ", value]);
}

fn framing(out: &mut Vec<u8>, framing: Framing) {
    match framing {
        // writing to a vector cannot fail
        Framing::Exact(n) => drop(write!(out, "Content-Length: {n}\r\n")),
        Framing::Chunked => field(out, "Transfer-Encoding", b"chunked"),
        Framing::None | Framing::UntilClose => {}
    }
}

/// Whether a field is never forwarded: it delimits the message, is about one connection, or is Host.
pub fn is_own(name: &str) -> bool {
    OWN.iter().any(|own| name.eq_ignore_ascii_case(own))
}

/// Whether a name is written such that a server may mistake it for this one.
pub fn is_disguised(name: &[u8], own: &str) -> bool {
    is_odd(name) && is_read_as(name, own)
}

/// Whether a name contains anything but letters, digits and single `-`.
fn is_odd(name: &[u8]) -> bool {
    !name.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-') || name.windows(2).any(|w| w == b"--")
}

/// Whether a server may mistake a name for this one: CGI and similar
/// interfaces read `-` and all other special characters as `_`.
fn is_read_as(name: &[u8], own: &str) -> bool {
    let words = |n: &[u8]| {
        let words = n.split(|b| !b.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        words.map(<[u8]>::to_ascii_lowercase).collect::<Vec<_>>()
    };
    words(name) == words(own.as_bytes())
}

fn via<'a>(out: &mut Vec<u8>, before: impl Iterator<Item = &'a [u8]>, version: Version, name: Option<&str>) {
    if let Some(name) = name {
        list(out, "Via", before, &format!("{} {name}", version.number()));
    }
}

/// Writes one field that contains all values, ours last.
fn list<'a>(out: &mut Vec<u8>, name: &str, before: impl Iterator<Item = &'a [u8]>, last: &str) {
    let mut value = Vec::new();
    for v in before.filter(|v| !v.is_empty()) {
        value.extend(v);
        value.extend(b", ");
    }
    value.extend(last.as_bytes());
    field(out, name, &value);
}
