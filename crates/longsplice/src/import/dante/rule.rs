//! A rule of Dante, and what can be said of it.

use super::words::Word;
use crate::import::{
    model::{Line, Listener, Mistake},
    rules::{Host, Match, Step},
    values::{Net, host_name},
};
use std::collections::BTreeSet;

/// A key of a rule, and its values.
pub type Pair = (String, Vec<String>);

/// Splits the inside of a block.
pub fn pairs(line: &Line, inner: &[Word]) -> Result<Vec<Pair>, Mistake> {
    let mut all: Vec<Pair> = Vec::new();
    for word in inner {
        match all.last_mut() {
            _ if word.is_name => all.push((word.text.clone(), Vec::new())),
            Some((_, values)) => values.push(word.text.clone()),
            None => {
                return Err(Mistake::new(
                    word.line,
                    format!("`{}` in the rule of line {}: write NAME: VALUE", word.text, line.number),
                ));
            }
        }
    }
    Ok(all)
}

/// What an address in a rule names.
#[derive(Clone, Debug)]
enum Address {
    All,
    Net(Net),
    Name(String),
    /// All names below, and perhaps the name itself.
    Domain(String),
    /// A device, or what cannot be read.
    Unknown,
}

/// A rule.
#[derive(Clone, Debug)]
pub struct Rule {
    pub line: Line,
    pub pass: bool,
    from: Address,
    to: Address,
    ports: Vec<(u16, u16)>,
    commands: Vec<String>,
    protocols: Vec<String>,
    pub methods: Vec<String>,
    pub users: Vec<String>,
    /// Conditions that are not translated.
    unknown: Vec<String>,
    /// What else is not.
    more: Vec<String>,
}

impl Rule {
    /// A rule that blocks everybody.
    pub fn nobody(line: &Line) -> Rule {
        Rule {
            line: line.clone(),
            pass: false,
            from: Address::All,
            to: Address::All,
            ports: Vec::new(),
            commands: Vec::new(),
            protocols: Vec::new(),
            methods: Vec::new(),
            users: Vec::new(),
            unknown: Vec::new(),
            more: Vec::new(),
        }
    }

    pub fn read(line: &Line, pass: bool, of_clients: bool, pairs: Vec<Pair>) -> Result<Rule, Mistake> {
        let mut rule = Rule { pass, ..Rule::nobody(line) };
        let (mut from, mut to) = (None, None);
        for (name, values) in pairs {
            match name.as_str() {
                "from" => {
                    let (address, ports) = rule.address(&values)?;
                    if !ports.is_empty() {
                        rule.unknown.push("ports of clients".to_owned());
                    }
                    from = Some(address);
                }
                "to" => {
                    let (address, ports) = rule.address(&values)?;
                    (to, rule.ports) = (Some(address), ports);
                }
                "command" => rule.commands = values,
                "protocol" => rule.protocols = values,
                "socksmethod" | "method" if !of_clients => rule.methods = values,
                "clientmethod" | "socksmethod" | "method" if values.iter().all(|method| method == "none") => {}
                "user" => rule.users = values,
                "proxyprotocol"
                    if ["socks_v4", "socks_v5"].iter().all(|version| values.iter().any(|v| v == version)) => {}
                // The access log has everything.
                "log" => {}
                "session.max"
                | "session.throttle"
                | "session.state.key"
                | "session.state.max"
                | "session.inheritable"
                | "session.state.throttle" => {
                    rule.more.push(format!("{name}, for which there are limits.connections and new_per_client"))
                }
                "bandwidth" => rule.more.push("bandwidth, of which there is no limit".to_owned()),
                name if name.starts_with("timeout.") || name.starts_with("udp.") => {
                    rule.more.push(format!("{name}, since times and ports are those of a listener"));
                }
                _ => rule.unknown.push(format!("{name}: {}", values.join(" "))),
            }
        }
        rule.from = from.ok_or_else(|| Mistake::new(line.number, "this rule has no `from`: add from: ADDRESS"))?;
        rule.to = to.ok_or_else(|| Mistake::new(line.number, "this rule has no `to`: add to: ADDRESS"))?;
        Ok(rule)
    }

    /// `ADDRESS`, and `port = N`, `port ge N` or `port N - M`.
    fn address(&self, values: &[String]) -> Result<(Address, Vec<(u16, u16)>), Mistake> {
        let wrong = |what: &str| Mistake::new(self.line.number, format!("{}: {what}", values.join(" ")));
        let (address, ports) = match values {
            [address] => (address, Vec::new()),
            [address, port, rest @ ..] if port == "port" => {
                let ports = ports(rest)
                    .ok_or_else(|| wrong("write `port = NUMBER` or `port NUMBER-NUMBER`, from 1 to 65535"))?;
                (address, ports)
            }
            _ => return Err(wrong("write an address, and perhaps a port")),
        };
        let domain = address.strip_prefix('.').and_then(host_name);
        let is_device = !address.contains('.') && !address.contains(':');
        Ok(match (address.as_str(), address.parse::<Net>(), domain) {
            ("0/0", ..) => (Address::All, ports),
            (_, Ok(net), _) => (Address::Net(net), ports),
            (_, _, Some(domain)) => (Address::Domain(domain), ports),
            (name, ..) => match host_name(name).filter(|_| !is_device) {
                Some(name) => (Address::Name(name), ports),
                None if name.contains('/') => return Err(wrong("this is no address")),
                None => (Address::Unknown, ports),
            },
        })
    }

    /// Commands of clients that the rule is about.
    pub fn commands(&self) -> BTreeSet<&'static str> {
        let named = |command: &str| self.commands.is_empty() || self.commands.iter().any(|c| c == command);
        let by = |protocol: &str| self.protocols.is_empty() || self.protocols.iter().any(|p| p == protocol);
        let all = [("connect", "connect", "tcp"), ("bind", "bind", "tcp"), ("udpassociate", "udp-associate", "udp")];
        all.into_iter().filter(|(dante, _, protocol)| named(dante) && by(protocol)).map(|(_, ours, _)| ours).collect()
    }

    /// Returns the step for a listener. What cannot be said makes a rule block more, or pass nothing.
    pub fn step(&self, one: &mut Listener, of_clients: bool) -> Option<Step> {
        let mut unknown = self.unknown.clone();
        let mut when = Match::default();
        match &self.from {
            Address::All => {}
            // all clients of such a listener
            Address::Net(net) if net.is_all() && net.is_ipv4() == one.listen.is_ipv4() => {}
            // Such a listener has no clients of the other family.
            Address::Net(net) if net.is_ipv4() != one.listen.is_ipv4() => return None,
            Address::Net(net) => when.client = vec![*net],
            Address::Name(_) | Address::Domain(_) | Address::Unknown => {
                unknown.push("from, since clients are known by addresses alone".to_owned());
            }
        }
        if of_clients {
            // the address that clients connect to
            match &self.to {
                Address::All => {}
                Address::Net(net) if net.is_all() && net.is_ipv4() == one.listen.is_ipv4() => {}
                Address::Net(net) if net.is_ipv4() != one.listen.is_ipv4() => return None,
                Address::Net(net) if !one.listen.ip().is_unspecified() => {
                    if !net.contains(one.listen.ip()) {
                        return None;
                    }
                }
                _ => unknown.push("to, the address that clients connect to".to_owned()),
            }
            let is_port = |(first, last): &(u16, u16)| (*first..=*last).contains(&one.listen.port());
            if !self.ports.is_empty() && !self.ports.iter().any(is_port) {
                return None;
            }
            if !self.users.is_empty() {
                unknown.push("user".to_owned());
            }
        } else {
            when.ports.clone_from(&self.ports);
            match &self.to {
                Address::All => {}
                Address::Net(net) => when.target = vec![Host::Net(*net)],
                Address::Name(name) => when.target = vec![Host::Name(name.clone())],
                Address::Domain(name) if self.pass => when.target = vec![Host::Below(name.clone())],
                Address::Domain(name) => when.target = vec![Host::Name(name.clone()), Host::Below(name.clone())],
                Address::Unknown => unknown.push("to, since targets are addresses and names".to_owned()),
            }
            if !self.pass && !self.methods.is_empty() {
                unknown.push("socksmethod".to_owned());
            }
            if !self.pass {
                when.users.clone_from(&self.users);
            }
        }
        if !self.more.is_empty() {
            one.notes.changed(&self.line, &format!("left out: {}", self.more.join(", ")));
        }
        if unknown.is_empty() {
            return Some(Step::new(self.pass, when));
        }
        let what = unknown.join("; ");
        if self.pass {
            let why = format!("{what}: this cannot be said, so the rule lets nobody in (write an allow rule)");
            one.notes.left_out(&self.line, &why);
            return None;
        }
        let how = format!("{what}: this cannot be said, so the rule blocks whether or not it holds");
        one.notes.changed(&self.line, &how);
        Some(Step::new(false, when))
    }
}

fn ports(words: &[String]) -> Option<Vec<(u16, u16)>> {
    let number = |text: &str| text.parse::<u16>().ok();
    let range = |first: u32, last: u32| {
        let ports = (u16::try_from(first.max(1)).ok()?, u16::try_from(last).ok()?);
        (ports.0 <= ports.1).then_some(vec![ports])
    };
    let joined = words.concat();
    let ports = match words {
        [by, port] if by.parse::<u16>().is_err() && !port.contains('-') => {
            let port = u32::from(number(port).or_else(|| service(port))?);
            match by.as_str() {
                "=" | "eq" => range(port.max(1), port)?,
                "!=" | "ne" | "neq" => {
                    let below = range(1, port.saturating_sub(1)).unwrap_or_default();
                    let above = range(port + 1, 65535).unwrap_or_default();
                    [below, above].concat()
                }
                ">=" | "ge" => range(port, 65535)?,
                "<=" | "le" => range(1, port)?,
                ">" | "gt" => range(port + 1, 65535)?,
                "<" | "lt" => range(1, port.saturating_sub(1))?,
                _ => return None,
            }
        }
        _ => {
            let joined = joined.trim_start_matches('=');
            let (first, last) = joined.split_once('-').unwrap_or((joined, joined));
            let (first, last) = (number(first).or_else(|| service(first))?, number(last).or_else(|| service(last))?);
            range(first.into(), last.into())?
        }
    };
    // all ports are no condition
    Some(if ports == [(1, 65535)] { Vec::new() } else { ports })
}

/// Ports that files name, as /etc/services has them.
fn service(name: &str) -> Option<u16> {
    let all = [
        ("ftp", 21),
        ("ssh", 22),
        ("telnet", 23),
        ("smtp", 25),
        ("domain", 53),
        ("http", 80),
        ("pop3", 110),
        ("imap", 143),
        ("https", 443),
    ];
    all.into_iter().find(|(one, _)| *one == name).map(|(_, port)| port)
}
