//! Access rules: which client may connect to which target. The first rule that matches decides.
//!
//! The *resolved* address is checked, and the connection goes to that address, so a name cannot point somewhere else
//! in between. A `deny` rule looks at every address that is embedded in the target's address
//! ([`guarded_ranges::faces`]), an `allow` rule only at the address itself. If no rule matches, everything is allowed,
//! except on a guarded listener, whose clients choose their targets: there, [`guarded_ranges::guarded`] addresses are
//! denied. An `allow` rule opens a guarded address only if it names a prefix that lies wholly within a guarded range,
//! for example 127.0.0.0/8 or 169.254.169.254. `0.0.0.0/0`, a name or an empty target list does not open one. All other
//! addresses of this machine are guarded as well ([`own`](crate::access::own)); a rule opens one by naming just that address.
//!
//! Rules with methods or paths match HTTP requests only: bytes relayed after CONNECT or SOCKS are not inspected.
//!
//! A rule that allows may say where a connection goes instead of to its target ([`Way`]). Only connections can go there: whatever
//! else is allowed or denied by rules asks [`Rules::check_here`].

pub mod guarded_ranges;
mod index;
pub mod own;
mod times;
mod way;

use crate::{
    later::Later,
    target::{Host, Target},
};
use index::{Index, Knowing};
use ipnet::{IpNet, Ipv4Net};
use longsplice_http::path;
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};
use times::Now;
pub use times::{Days, Hours, Times};
pub use way::{Upstream, UpstreamProtocol, Way};

/// Effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Allow the request.
    Allow,
    /// Refuse the request.
    Deny,
}

/// A range of ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// Lowest port.
    pub first: u16,
    /// Highest port.
    pub last: u16,
}

/// A prefix; a single address is a prefix of full length. IPv4-mapped IPv6 prefixes are
/// converted to IPv4 prefixes, as are the addresses that are compared with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix(pub IpNet);

/// One entry of a rule's target list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pattern {
    /// Addresses within this prefix.
    Prefix(Prefix),
    /// Exactly this name.
    Name(String),
    /// `*.suffix`: every name below the suffix, at any depth, and not the suffix itself.
    Below(String),
}

/// An access rule. An empty list matches everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Effect if the rule matches.
    pub action: Action,
    /// Client addresses.
    pub client: Vec<Prefix>,
    /// Targets. A name matches only the name that the client asked for, so a `deny` by name
    /// does not stop a client that knows the address.
    pub target: Vec<Pattern>,
    /// Target ports.
    pub ports: Vec<PortRange>,
    /// Users that have logged in; others never match.
    pub users: Vec<String>,
    /// HTTP methods, case-sensitive (RFC 9110, 9.1).
    pub methods: Vec<String>,
    /// Paths of HTTP requests.
    pub path: Vec<PathPattern>,
    /// When it holds.
    pub times: Times,
    /// Where a connection goes that it allows; none: where the listener leads.
    pub way: Option<Way>,
}

/// What allows a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Number of the rule, from 1; none if no rule matches.
    pub rule: Option<usize>,
    /// Where that rule leads.
    pub way: Option<Way>,
}

/// One entry of a rule's list of paths, compared with the result of [`longsplice_http::path::plain`]. Case-sensitive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathPattern {
    /// Exactly this path.
    Exact(String),
    /// Every path with this prefix: `/admin*`.
    Begins(String),
}

/// The parts of a request, besides its target, that rules look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// Client address.
    pub client: IpAddr,
    /// HTTP method.
    pub method: Option<&'a str>,
    /// HTTP path; none for CONNECT.
    pub path: Option<&'a str>,
    /// The user that has logged in.
    pub user: Option<&'a str>,
}

impl<'a> Subject<'a> {
    /// Returns the subject of a protocol without methods and paths.
    pub fn by(client: IpAddr) -> Subject<'static> {
        Subject { client, method: None, path: None, user: None }
    }

    /// Returns the same subject, for a user that has logged in.
    #[must_use]
    pub fn of(self, user: Option<&'a str>) -> Subject<'a> {
        Subject { user, ..self }
    }
}

/// The rules of a listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    filed: Later<Filed>,
    /// Whether guarded addresses are denied unless a rule opens them.
    pub guarded: bool,
    /// Whether all addresses of this machine are guarded, if any are.
    pub own_too: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Filed {
    /// The rules in order.
    list: Vec<Rule>,
    by_address: Index,
    /// For names whose addresses are not known yet.
    by_name: Index,
    /// For names whose addresses never will be.
    by_name_alone: Index,
    know_paths: bool,
    /// Some rule leads elsewhere than to the target.
    lead: bool,
}

/// Reason for a denial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// A rule; its number in the list, from 1.
    Rule(usize),
    /// A rule that leads to a proxy or a pool, where nothing but connections can go; its number in the list, from 1.
    Led(usize),
    /// A guarded address; the name of its range.
    Guarded(&'static str),
    /// A rule on replies; its number in the list, from 1.
    Reply(usize),
    /// A reply that has to be read or changed and cannot be; why.
    Unchanged(&'static str),
    /// A rule on the bodies of requests; its number in the list, from 1.
    Upload(usize),
    /// A request whose body has to be read or changed and cannot be; why.
    Unread(&'static str),
    /// The client is outside the networks whose PROXY headers are trusted, and the listener requires such a header.
    Untrusted,
    /// The connection would come back to the listener that it comes from.
    Loop,
    /// The server that the client wants is none of its destinations.
    NoDestination,
    /// SOCKS: BIND without the address of the peer.
    Unnamed,
    /// The first bytes of a host are not as the listener requires; whose, and why.
    FirstBytes(&'static str, Unfit),
}

/// What is wrong with the first bytes of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfit {
    /// What must be there is missing.
    Missing,
    /// It is not there in time.
    Late,
    /// What must never be there is there.
    Found,
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Denied::Rule(n) => write!(f, "rule {n}"),
            Denied::Led(n) => write!(f, "rule {n} leads connections elsewhere, and nothing else"),
            Denied::Reply(n) => write!(f, "reply rule {n}"),
            Denied::Upload(n) => write!(f, "upload rule {n}"),
            Denied::Unchanged(why) | Denied::Unread(why) => f.write_str(why),
            Denied::Guarded(name) => write!(f, "guarded address ({name})"),
            Denied::FirstBytes(whose, why) => {
                let why = match why {
                    Unfit::Missing => "lack what they must have",
                    Unfit::Late => "are not there in time",
                    Unfit::Found => "have what they must never have",
                };
                write!(f, "the first bytes of the {whose} {why}")
            }
            Denied::NoDestination => f.write_str("the server is no destination of the client"),
            Denied::Unnamed => f.write_str("no address of the peer"),
            Denied::Loop => f.write_str("the target leads back to this listener"),
            Denied::Untrusted => f.write_str("not from where PROXY headers may come from"),
        }
    }
}

impl Rules {
    /// Keeps the rules in the order of `list`. `guarded`: whether guarded addresses are denied unless a rule opens them.
    pub fn new(list: Vec<Rule>, guarded: bool) -> Rules {
        Rules { filed: Later::new(Filed::new(list)), guarded, own_too: guarded }
    }

    /// Returns the rules in order.
    pub fn list(&self) -> &[Rule] {
        &self.filed.own.list
    }

    /// Takes their place behind those that the listener has had before, if it had any.
    pub(crate) fn follow(&mut self, before: Option<&Rules>) {
        self.filed.follow(before.map(|rules| &rules.filed));
    }

    /// Whether they are those of a listener, and not of something within.
    pub(crate) fn are_of_listener(&self) -> bool {
        self.filed.is_of_listener()
    }

    /// From now on, connections that began with earlier ones are judged by these.
    pub(crate) fn replace_earlier(&self) {
        self.filed.replace_earlier();
    }

    /// Returns the same rules with guarded addresses open.
    pub fn unguarded(&self) -> Rules {
        Rules { filed: self.filed.clone(), guarded: false, own_too: false }
    }

    /// Returns the same rules for clients that have connected to the target themselves: its address is that of this machine only
    /// if they have asked for this machine.
    #[must_use]
    pub fn for_intercepted(self) -> Rules {
        Rules { own_too: false, ..self }
    }

    /// Returns what guards the address, if anything does.
    fn guard(&self, ip: IpAddr) -> Option<&'static str> {
        let range = || guarded_ranges::guarded(ip).map(|range| range.name);
        let own = || (self.own_too && own::is_own(ip)).then_some(own::NAME);
        if self.guarded { range().or_else(own) } else { None }
    }

    /// Checks whether the request may go to `server`, an address of `target`.
    pub fn check(&self, subject: &Subject<'_>, target: &Target, server: SocketAddr) -> Result<(), Denied> {
        self.judge(subject, target, server).map(drop)
    }

    /// The same. Returns what allows it.
    pub fn judge(&self, subject: &Subject<'_>, target: &Target, server: SocketAddr) -> Result<Allowed, Denied> {
        let ip = server.ip().to_canonical();
        let (guard, filed, now) = (self.guard(ip), self.filed.now(), Now::default());
        for (i, rule) in filed.candidates(subject, &target.host, Knowing::Address(ip), server.port()) {
            if !rule.covers(subject, server.port(), &now) {
                continue;
            }
            match rule.action {
                Action::Deny if rule.denies(&target.host, ip) => return Err(Denied::Rule(i + 1)),
                Action::Allow if rule.allows(&target.host, ip, guard) => return Ok(rule.allowed(i)),
                Action::Deny | Action::Allow => {}
            }
        }
        guard.map_or(Ok(Allowed::default()), |name| Err(Denied::Guarded(name)))
    }

    /// Checks whether the request may go to `server`, or, if there is no address, to the name: an upstream proxy looks it up. Rules
    /// that name addresses do not match it then.
    pub fn check_known(
        &self,
        subject: &Subject<'_>,
        target: &Target,
        server: Option<SocketAddr>,
    ) -> Result<(), Denied> {
        self.judge_known(subject, target, server).map(drop)
    }

    /// The same. Returns what allows it.
    pub fn judge_known(
        &self,
        subject: &Subject<'_>,
        target: &Target,
        server: Option<SocketAddr>,
    ) -> Result<Allowed, Denied> {
        if let Some(server) = server {
            return self.judge(subject, target, server);
        }
        let (filed, now) = (self.filed.now(), Now::default());
        let mut candidates = filed.candidates(subject, &target.host, Knowing::NameAlone, target.port);
        match candidates.find(|(_, rule)| rule.covers(subject, target.port, &now) && rule.names(&target.host)) {
            Some((i, Rule { action: Action::Deny, .. })) => Err(Denied::Rule(i + 1)),
            found => Ok(found.map(|(i, rule)| rule.allowed(i)).unwrap_or_default()),
        }
    }

    /// Checks whether something else than a connection of ours may go to `server`, an address of `target`: it cannot go where a rule
    /// leads.
    pub fn check_here(&self, subject: &Subject<'_>, target: &Target, server: SocketAddr) -> Result<(), Denied> {
        self.judge(subject, target, server)?.is_here(target)
    }

    /// The same of [`Rules::check_name`]: names that lead elsewhere are not looked up either.
    pub fn check_name_here(&self, subject: &Subject<'_>, target: &Target) -> Result<(), Denied> {
        self.check_name(subject, target)?;
        if target.host.ip().is_some() || !self.lead() {
            return Ok(());
        }
        // if the name is denied, only the address decides
        self.judge_known(subject, target, None).map_or(Ok(()), |allowed| allowed.is_here(target))
    }

    /// The same for who wants to know the address alone, for whatever port: a name is not looked up that is led elsewhere at some
    /// port.
    pub fn check_look_up(&self, subject: &Subject<'_>, target: &Target) -> Result<(), Denied> {
        self.check_name_here(subject, target)?;
        if !self.lead() {
            return Ok(());
        }
        let (filed, host) = (self.filed.now(), &target.host);
        let leads = |rule: &&Rule| rule.way.as_ref().is_some_and(|way| way.leads_away(target)) && rule.names(host);
        for port in filed.list.iter().filter(leads).flat_map(|rule| &rule.ports).map(|ports| ports.first) {
            let target = Target { host: host.clone(), port };
            if let Err(led @ Denied::Led(_)) = self.check_name_here(subject, &target) {
                return Err(led);
            }
        }
        Ok(())
    }

    /// Whether any rule has paths, so that request paths have to be parsed.
    pub fn know_paths(&self) -> bool {
        self.filed.now().know_paths
    }

    /// Checks whether the request is denied for every address of the name. Such names are not looked up at all.
    pub fn check_name(&self, subject: &Subject<'_>, target: &Target) -> Result<(), Denied> {
        let (filed, now) = (self.filed.now(), Now::default());
        for (i, rule) in filed.candidates(subject, &target.host, Knowing::Name, target.port) {
            if !rule.covers(subject, target.port, &now) {
                continue;
            }
            let certain = rule.names(&target.host);
            let open = rule.target.iter().any(|p| matches!(p, Pattern::Prefix(_)));
            match (certain, rule.action) {
                (true, Action::Deny) => return Err(Denied::Rule(i + 1)),
                (true, Action::Allow) => return Ok(()),
                // Only the address decides.
                (false, _) if open => return Ok(()),
                (false, _) => {}
            }
        }
        Ok(())
    }
}

impl Filed {
    fn new(list: Vec<Rule>) -> Filed {
        let [by_address, by_name, by_name_alone] = Index::all_of(&list);
        let know_paths = list.iter().any(|rule| !rule.path.is_empty());
        let lead = list.iter().any(|rule| !matches!(rule.way, None | Some(Way::Direct)));
        Filed { list, by_address, by_name, by_name_alone, know_paths, lead }
    }

    /// Returns the rules that may match, with their numbers, in order.
    fn candidates(
        &self,
        subject: &Subject<'_>,
        host: &Host,
        known: Knowing,
        port: u16,
    ) -> impl Iterator<Item = (usize, &Rule)> {
        let (index, ip) = match known {
            Knowing::Address(ip) => (&self.by_address, Some(ip)),
            Knowing::Name => (&self.by_name, None),
            Knowing::NameAlone => (&self.by_name_alone, None),
        };
        let looked_at = |i| {
            #[cfg(test)]
            tests::LOOKED_AT.set(tests::LOOKED_AT.get() + 1);
            (i, &self.list[i])
        };
        index.candidates(subject.client.to_canonical(), host, ip, port).map(looked_at)
    }
}

impl Allowed {
    fn is_here(&self, target: &Target) -> Result<(), Denied> {
        match (self.rule, &self.way) {
            (Some(n), Some(way)) if way.leads_away(target) => Err(Denied::Led(n)),
            _ => Ok(()),
        }
    }
}

impl Rule {
    /// `i`: its place in the list, from 0.
    fn allowed(&self, i: usize) -> Allowed {
        Allowed { rule: Some(i + 1), way: self.way.clone() }
    }

    /// Whether it matches this host, whatever its address is.
    fn names(&self, host: &Host) -> bool {
        self.target.is_empty() || self.target.iter().any(|p| p.matches_name(host))
    }

    fn covers(&self, subject: &Subject<'_>, port: u16, now: &Now) -> bool {
        let client = subject.client.to_canonical();
        (self.client.is_empty() || self.client.iter().any(|p| p.0.contains(&client)))
            && (self.ports.is_empty() || self.ports.iter().any(|r| r.contains(port)))
            && (self.methods.is_empty() || subject.method.is_some_and(|m| self.methods.iter().any(|own| own == m)))
            && (self.users.is_empty() || subject.user.is_some_and(|u| self.users.iter().any(|own| own == u)))
            && (self.path.is_empty() || subject.path.is_some_and(|p| self.path.iter().any(|own| own.matches(p))))
            && self.times.hold(now)
    }

    /// Whether it matches every request.
    pub(crate) fn matches_all(&self) -> bool {
        let Rule { action: _, client, target, ports, users, methods, path, times, way: _ } = self;
        let any = |net: &IpNet| net.prefix_len() == 0;
        // both families
        let all =
            |nets: Vec<&IpNet>| [true, false].iter().all(|v4| nets.iter().any(|n| any(n) && n.addr().is_ipv4() == *v4));
        let prefixes = target.iter().filter_map(|p| if let Pattern::Prefix(net) = p { Some(&net.0) } else { None });
        (client.is_empty() || all(client.iter().map(|p| &p.0).collect()))
            && (target.is_empty() || all(prefixes.collect()))
            && (ports.is_empty() || ports.iter().any(|r| r.first <= 1 && r.last == u16::MAX))
            && users.is_empty()
            && methods.is_empty()
            && path.is_empty()
            && times.is_always()
    }

    fn denies(&self, host: &Host, ip: IpAddr) -> bool {
        self.target.is_empty()
            || self
                .target
                .iter()
                .any(|p| p.matches_name(host) || guarded_ranges::faces(ip).any(|face| p.matches_ip(face)))
    }

    fn allows(&self, host: &Host, ip: IpAddr, guard: Option<&str>) -> bool {
        if let Some(name) = guard {
            let opens = |p: &Pattern| match p {
                Pattern::Prefix(net) if name == own::NAME => net.0.prefix_len() == net.0.max_prefix_len(),
                Pattern::Prefix(net) => guarded_ranges::wholly_guarded(&net.0),
                Pattern::Name(_) | Pattern::Below(_) => false,
            };
            return self.target.iter().any(|p| opens(p) && p.matches_ip(ip));
        }
        self.target.is_empty() || self.target.iter().any(|p| p.matches_name(host) || p.matches_ip(ip))
    }
}

/// As in a configuration.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, key: &str, of: &[T]) -> fmt::Result {
            let quoted: Vec<_> = of.iter().map(|one| format!("\"{one}\"")).collect();
            if of.is_empty() { Ok(()) } else { write!(f, ", {key} = [{}]", quoted.join(", ")) }
        }
        let Rule { action, client, target, ports, users, methods, path, times, way } = self;
        f.write_str(match action {
            Action::Allow => "{ action = \"allow\"",
            Action::Deny => "{ action = \"deny\"",
        })?;
        list(f, "client", client)?;
        list(f, "target", target)?;
        list(f, "ports", ports)?;
        list(f, "users", users)?;
        list(f, "methods", methods)?;
        list(f, "path", path)?;
        list(f, "hours", &times.hours)?;
        list(f, "days", &times.days)?;
        match way {
            Some(Way::Direct) => f.write_str(", upstream = false")?,
            Some(Way::Through(upstream)) => write!(f, ", upstream = \"{}\"", upstream.name)?,
            Some(Way::Pool(pool)) => write!(f, ", pool = \"{pool}\"")?,
            None => {}
        }
        f.write_str(" }")
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathPattern::Exact(path) => f.write_str(path),
            PathPattern::Begins(path) => write!(f, "{path}*"),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Prefix(prefix) => prefix.fmt(f),
            Pattern::Name(name) => f.write_str(name),
            Pattern::Below(suffix) => write!(f, "*.{suffix}"),
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
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
    /// Whether the pattern matches this host. Names are not resolved.
    pub fn matches(&self, host: &Host) -> bool {
        match host {
            Host::Ip(ip) => self.matches_ip(*ip),
            Host::Name(_) => self.matches_name(host),
        }
    }

    pub(crate) fn matches_ip(&self, ip: IpAddr) -> bool {
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

/// Parse error in a part of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Not a port or a range of ports.
    #[error("bad port range: write a port such as 443, or FIRST-LAST with FIRST not above LAST, from 1 to 65535")]
    Ports,
    /// A prefix with bits beyond its length, so that it is unclear what it means.
    #[error("an address prefix with bits beyond its length: write {0} for the network, or the address alone")]
    HostBits(IpNet),
    /// Not a prefix or an address.
    #[error("bad address prefix: write one such as 192.0.2.0/24 or 2001:db8::/32, or a single address")]
    Prefix,
    /// Not a name, suffix, prefix or address.
    #[error("bad target: write a prefix (192.0.2.0/24), an address, a name (example.org) or *.SUFFIX (*.example.org)")]
    Target,
    /// `*` alone.
    #[error("`*` is no target: leave `target` out to match every target")]
    Star,
    /// Not a path.
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

fn exact(net: IpNet) -> Result<Prefix, PatternError> {
    if net.trunc() == net { Ok(Prefix(net)) } else { Err(PatternError::HostBits(net.trunc())) }
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
            return exact(Ipv4Net::new(v4, len).map_err(|_| PatternError::Prefix)?.into());
        }
        exact(net)
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        if text == "*" {
            return Err(PatternError::Star);
        }
        match text.parse() {
            Ok(prefix) => return Ok(Pattern::Prefix(prefix)),
            Err(e @ PatternError::HostBits(_)) => return Err(e),
            Err(_) => {}
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
pub(crate) mod tests;
