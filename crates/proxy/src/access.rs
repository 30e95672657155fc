//! Who may go where: ordered rules, of which the first that matches decides.
//!
//! The decision falls on the *resolved* address that is then connected to, so a name cannot point somewhere else in
//! between. A `deny` rule looks at every address that the target's address carries inside ([`guarded_ranges::faces`]), an
//! `allow` rule at the address alone. When no rule matches, everything is allowed, except on a guarded listener, whose
//! clients choose their targets: there, [`guarded_ranges::guarded`] addresses are denied. An `allow` rule opens a guarded
//! address only if it names a prefix that lies wholly within a guarded range, such as 127.0.0.0/8 or 169.254.169.254:
//! `0.0.0.0/0`, a name or no target at all do not.
//!
//! Rules that name methods or paths match requests of HTTP alone: what is relayed after CONNECT or SOCKS is not looked at.

mod index;

use crate::{
    guarded_ranges,
    target::{Host, Target},
};
use index::Index;
use ipnet::{IpNet, Ipv4Net};
use longsplice_http::path;
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Let it pass.
    Allow,
    /// Refuse it.
    Deny,
}

/// Ports from first to last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// The lowest.
    pub first: u16,
    /// The highest.
    pub last: u16,
}

/// A prefix, or an address for a prefix of full length. IPv4-mapped IPv6 prefixes become the IPv4 prefixes they
/// stand for, as the addresses they are compared with do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix(pub IpNet);

/// One entry of a rule's target list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pattern {
    /// Addresses.
    Prefix(Prefix),
    /// This very name.
    Name(String),
    /// `*.suffix`: every name below the suffix, at any depth, and not the suffix itself.
    Below(String),
}

/// A rule. An empty list matches everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// What to do when it matches.
    pub action: Action,
    /// Clients.
    pub client: Vec<Prefix>,
    /// Targets. A name in here matches what the client asked for: a `deny` by name is no use against a client that
    /// knows the address.
    pub target: Vec<Pattern>,
    /// Ports of the target.
    pub ports: Vec<PortRange>,
    /// Methods of HTTP. Case counts (RFC 9110, 9.1).
    pub methods: Vec<String>,
    /// Paths of HTTP requests.
    pub path: Vec<PathPattern>,
}

/// One entry of a rule's list of paths, after [`longsplice_http::path::plain`]. Case counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathPattern {
    /// This very path.
    Exact(String),
    /// Every path that begins so: `/admin*`.
    Begins(String),
}

/// Who asks for what, apart from the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The client.
    pub client: IpAddr,
    /// The method; HTTP only.
    pub method: Option<&'a str>,
    /// The path; HTTP only, and not with CONNECT.
    pub path: Option<&'a str>,
}

impl Subject<'_> {
    /// By a protocol without methods and paths.
    pub fn by(client: IpAddr) -> Subject<'static> {
        Subject { client, method: None, path: None }
    }
}

/// The rules of a listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    filed: Arc<Filed>,
    /// Whether guarded addresses are denied unless a rule opens them.
    pub guarded: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Filed {
    /// In order.
    list: Vec<Rule>,
    by_address: Index,
    by_name: Index,
    know_paths: bool,
}

/// Why something is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// By a rule; its number in the list, from 1.
    Rule(usize),
    /// Guarded, by the range of this name.
    Guarded(&'static str),
    /// A reply, by a rule on replies; its number in the list, from 1.
    Reply(usize),
    /// Not from a network whose PROXY headers are believed, where one is required.
    Untrusted,
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Denied::Rule(n) => write!(f, "rule {n}"),
            Denied::Reply(n) => write!(f, "reply rule {n}"),
            Denied::Guarded(name) => write!(f, "guarded address ({name})"),
            Denied::Untrusted => f.write_str("not from where PROXY headers may come from"),
        }
    }
}

impl Rules {
    /// In this order; `guarded`: whether guarded addresses are denied unless a rule opens them.
    pub fn new(list: Vec<Rule>, guarded: bool) -> Rules {
        let (by_address, by_name) = (Index::of(&list, false), Index::of(&list, true));
        let know_paths = list.iter().any(|rule| !rule.path.is_empty());
        Rules { filed: Arc::new(Filed { list, by_address, by_name, know_paths }), guarded }
    }

    /// In order.
    pub fn list(&self) -> &[Rule] {
        &self.filed.list
    }

    /// The same, with guarded addresses open.
    pub fn unguarded(&self) -> Rules {
        Rules { filed: self.filed.clone(), guarded: false }
    }

    /// Those that may match, with their numbers, in order. `ip`: unless it is not known yet.
    fn candidates(
        &self,
        subject: &Subject<'_>,
        host: &Host,
        ip: Option<IpAddr>,
        port: u16,
    ) -> impl Iterator<Item = (usize, &Rule)> {
        let Filed { list, by_address, by_name, .. } = &*self.filed;
        let index = if ip.is_some() { by_address } else { by_name };
        index.candidates(subject.client.to_canonical(), host, ip, port).map(|i| (i, &list[i]))
    }

    /// Whether the request may go to `server`, to which `target` was resolved.
    pub fn check(&self, subject: &Subject<'_>, target: &Target, server: SocketAddr) -> Result<(), Denied> {
        let ip = server.ip().to_canonical();
        let guarded = if self.guarded { guarded_ranges::guarded(ip) } else { None };
        for (i, rule) in self.candidates(subject, &target.host, Some(ip), server.port()) {
            if !rule.covers(subject, server.port()) {
                continue;
            }
            match rule.action {
                Action::Deny if rule.denies(&target.host, ip) => return Err(Denied::Rule(i + 1)),
                Action::Allow if rule.allows(&target.host, ip, guarded.is_some()) => return Ok(()),
                Action::Deny | Action::Allow => {}
            }
        }
        guarded.map_or(Ok(()), |g| Err(Denied::Guarded(g.name)))
    }

    /// Whether a rule looks at paths, so that they have to be read.
    pub fn know_paths(&self) -> bool {
        self.filed.know_paths
    }

    /// What is denied whatever the name resolves to: such names are not looked up at all.
    pub fn check_name(&self, subject: &Subject<'_>, target: &Target) -> Result<(), Denied> {
        for (i, rule) in self.candidates(subject, &target.host, None, target.port) {
            if !rule.covers(subject, target.port) {
                continue;
            }
            let certain = rule.target.is_empty() || rule.target.iter().any(|p| p.matches_name(&target.host));
            let open = rule.target.iter().any(|p| matches!(p, Pattern::Prefix(_)));
            match (certain, rule.action) {
                (true, Action::Deny) => return Err(Denied::Rule(i + 1)),
                (true, Action::Allow) => return Ok(()),
                // Only the address can tell.
                (false, _) if open => return Ok(()),
                (false, _) => {}
            }
        }
        Ok(())
    }
}

impl Rule {
    fn covers(&self, subject: &Subject<'_>, port: u16) -> bool {
        let client = subject.client.to_canonical();
        (self.client.is_empty() || self.client.iter().any(|p| p.0.contains(&client)))
            && (self.ports.is_empty() || self.ports.iter().any(|r| r.contains(port)))
            && (self.methods.is_empty() || subject.method.is_some_and(|m| self.methods.iter().any(|own| own == m)))
            && (self.path.is_empty() || subject.path.is_some_and(|p| self.path.iter().any(|own| own.matches(p))))
    }

    fn denies(&self, host: &Host, ip: IpAddr) -> bool {
        self.target.is_empty()
            || self
                .target
                .iter()
                .any(|p| p.matches_name(host) || guarded_ranges::faces(ip).any(|face| p.matches_ip(face)))
    }

    fn allows(&self, host: &Host, ip: IpAddr, guarded: bool) -> bool {
        if guarded {
            let opens = |p: &Pattern| matches!(p, Pattern::Prefix(net) if guarded_ranges::wholly_guarded(&net.0));
            return self.target.iter().any(|p| opens(p) && p.matches_ip(ip));
        }
        self.target.is_empty() || self.target.iter().any(|p| p.matches_name(host) || p.matches_ip(ip))
    }
}

impl PathPattern {
    fn matches(&self, path: &str) -> bool {
        match self {
            PathPattern::Exact(own) => own == path,
            PathPattern::Begins(own) => path.starts_with(own.as_str()),
        }
    }
}

impl Pattern {
    /// Whether it is this host, without asking for addresses of names.
    pub fn matches(&self, host: &Host) -> bool {
        match host {
            Host::Ip(ip) => self.matches_ip(*ip),
            Host::Name(_) => self.matches_name(host),
        }
    }

    fn matches_ip(&self, ip: IpAddr) -> bool {
        matches!(self, Pattern::Prefix(net) if net.0.contains(&ip))
    }

    pub(crate) fn matches_name(&self, host: &Host) -> bool {
        let Host::Name(name) = host else { return false };
        match self {
            Pattern::Prefix(_) => false,
            Pattern::Name(own) => own == name,
            Pattern::Below(suffix) => name.strip_suffix(suffix.as_str()).is_some_and(|rest| rest.ends_with('.')),
        }
    }
}

impl PortRange {
    /// Whether `port` lies in the range.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Why a text is no part of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// No port or range.
    #[error("bad port range: write a port such as 443, or FIRST-LAST with FIRST not above LAST, from 1 to 65535")]
    Ports,
    /// No prefix or address.
    #[error("bad address prefix: write one such as 192.0.2.0/24 or 2001:db8::/32, or a single address")]
    Prefix,
    /// No name, suffix, prefix or address.
    #[error("bad target: write a prefix (192.0.2.0/24), an address, a name (example.org) or *.SUFFIX (*.example.org)")]
    Target,
    /// `*` alone.
    #[error("`*` is no target: leave `target` out to match every target")]
    Star,
    /// No path.
    #[error(
        "bad path: begin it with `/`, write it without query, %XX, `//`, `.` and `..`, and put `*` at its end or nowhere"
    )]
    Path,
}

impl FromStr for PortRange {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |t: &str| t.trim().parse::<u16>().ok().filter(|p| *p != 0).ok_or(PatternError::Ports);
        let range = PortRange { first: port(first)?, last: port(last)? };
        if range.first > range.last { Err(PatternError::Ports) } else { Ok(range) }
    }
}

impl FromStr for PathPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (path, begins) = text.strip_suffix('*').map_or((text, false), |path| (path, true));
        let plain = path::plain(path).map_err(|_| PatternError::Path)?;
        if !path.starts_with('/') || path.contains('*') || plain != path {
            return Err(PatternError::Path);
        }
        Ok(if begins { PathPattern::Begins(plain) } else { PathPattern::Exact(plain) })
    }
}

impl FromStr for Prefix {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let address = || text.parse::<IpAddr>().map(IpNet::from);
        let net = text.parse::<IpNet>().or_else(|_| address()).map_err(|_| PatternError::Prefix)?;
        if let IpNet::V6(v6) = net
            && let Some(v4) = v6.addr().to_ipv4_mapped()
            && let Some(len) = v6.prefix_len().checked_sub(96)
        {
            return Ok(Prefix(Ipv4Net::new(v4, len).map_err(|_| PatternError::Prefix)?.trunc().into()));
        }
        Ok(Prefix(net.trunc()))
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        if text == "*" {
            return Err(PatternError::Star);
        }
        if let Ok(prefix) = text.parse() {
            return Ok(Pattern::Prefix(prefix));
        }
        let (suffix, below) = text.strip_prefix("*.").map_or((text, false), |s| (s, true));
        match Host::from_name(suffix.as_bytes()) {
            Ok(Host::Name(name)) if below => Ok(Pattern::Below(name)),
            Ok(Host::Name(name)) => Ok(Pattern::Name(name)),
            _ => Err(PatternError::Target),
        }
    }
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
