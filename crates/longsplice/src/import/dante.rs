//! Dante: danted.conf, also called sockd.conf.

mod rule;
mod words;

use super::{
    model::{Keys, Line, Listener, Mistake, Notes, Site},
    rules::{NOBODY, Step, TooHard, and, compile, tidy},
    values::{quote, quote_all, seconds},
};
use rule::{Rule, pairs};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};
use words::{Statement, statements};

/// What SOCKS clients may ask for, as the configuration calls it.
const COMMANDS: [&str; 3] = ["connect", "bind", "udp-associate"];

/// What was read of the file.
#[derive(Default)]
struct Server {
    internal: Vec<(Line, SocketAddr)>,
    external: Vec<(Line, IpAddr)>,
    rotation: Option<String>,
    /// Methods of clients that no rule names others for. None: no line says.
    methods: Vec<String>,
    client: Vec<Rule>,
    socks: Vec<Rule>,
    policy: Keys,
    limits: Keys,
    udp_idle: Option<String>,
    /// Connections go through another proxy.
    route: Option<Line>,
}

/// Translates a file of Dante.
pub fn translate(text: &str) -> Result<Site, Mistake> {
    let mut site = Site::default();
    let mut server = Server::default();
    for statement in statements(text)? {
        match statement {
            Statement::Setting { line, name, values } => server.setting(&line, &name, &values, &mut site.notes)?,
            Statement::Block { line, kind, inner } => server.block(&line, &kind, &inner, &mut site.notes)?,
        }
    }
    server.listeners(&mut site)?;
    Ok(site)
}

impl Server {
    fn setting(&mut self, line: &Line, name: &str, values: &[String], notes: &mut Notes) -> Result<(), Mistake> {
        let value = values.first().map_or("", String::as_str);
        match name {
            "internal" => self.internal(line, values, notes)?,
            "external" => match value.parse::<IpAddr>() {
                Ok(ip) if !ip.is_unspecified() => self.external.push((line.clone(), ip)),
                Ok(_) => {}
                Err(_) => notes.left_out(
                    line,
                    "the kernel chooses the address to connect from (write the device's address: source = [...])",
                ),
            },
            "external.rotation" => self.rotation = Some(value.to_owned()),
            "socksmethod" | "method" => self.methods = values.to_vec(),
            "clientmethod" if values.iter().all(|method| method == "none") => {}
            "clientmethod" => {
                notes.left_out(
                    line,
                    "clients are not asked for a name before they speak SOCKS. All client rules \
                    are taken as if they asked for one, and let nobody in",
                );
                self.client.push(Rule::nobody(line));
            }
            "timeout.connect" => self.time(line, value, "connect", notes)?,
            "timeout.negotiate" => self.time(line, value, "handshake", notes)?,
            "timeout.io" | "timeout.io.tcp" => self.time(line, value, "idle_limit", notes)?,
            "timeout.io.udp" => self.time(line, value, "udp", notes)?,
            "logoutput" | "errorlog" => {
                notes.left_out(
                    line,
                    "messages go to standard error, and the access log to standard output (log = { \
                        file = \"PATH\" })",
                );
            }
            _ => notes.left_out(line, why(name)),
        }
        Ok(())
    }

    fn internal(&mut self, line: &Line, values: &[String], notes: &mut Notes) -> Result<(), Mistake> {
        let value = values.first().ok_or_else(|| Mistake::new(line.number, "internal needs an address"))?;
        let port = match &values[1..] {
            [] => 1080,
            [word, equal, port] if word == "port" && equal == "=" => port.parse().unwrap_or(0),
            _ => 0,
        };
        if port == 0 {
            return Err(Mistake::new(
                line.number,
                "write `internal: ADDRESS port = PORT`, with a port from 1 to 65535",
            ));
        }
        match value.parse() {
            Ok(ip) => self.internal.push((line.clone(), SocketAddr::new(ip, port))),
            Err(_) => notes.left_out(
                line,
                "listeners have addresses, and no devices or names (write the address of the \
                    device)",
            ),
        }
        Ok(())
    }

    fn time(&mut self, line: &Line, value: &str, key: &'static str, notes: &mut Notes) -> Result<(), Mistake> {
        let wrong = || Mistake::new(line.number, format!("{value:?} is no number of seconds"));
        let number: u64 = value.parse().map_err(|_| wrong())?;
        let Some(time) = number.checked_mul(1000).and_then(seconds) else {
            if number != 0 {
                return Err(wrong());
            }
            notes.left_out(
                line,
                "there is always a limit (10 seconds to connect and to negotiate, 7200 without a byte)",
            );
            return Ok(());
        };
        match key {
            "idle_limit" => drop(self.policy.insert(key, time)),
            "udp" => self.udp_idle = Some(time),
            _ => drop(self.limits.insert(key, time)),
        }
        Ok(())
    }

    fn block(&mut self, line: &Line, kind: &[String], inner: &[words::Word], notes: &mut Notes) -> Result<(), Mistake> {
        let words: Vec<&str> = kind.iter().map(String::as_str).collect();
        let (of, action) = match words[..] {
            ["client", action] => (true, action),
            ["socks", action] | [action] => (false, action),
            _ => (false, ""),
        };
        match action {
            "pass" | "block" => {
                let rule = Rule::read(line, action == "pass", of, pairs(line, inner)?)?;
                if of { &mut self.client } else { &mut self.socks }.push(rule);
            }
            "route" => drop(self.route.get_or_insert_with(|| line.clone())),
            "monitor" => notes.left_out(line, "metrics are in another place ([admin], longsplice events)"),
            _ if words.first() == Some(&"hostid") => {
                notes.left_out(
                    line,
                    "clients have no hostid. What this rule would block is blocked with everything else",
                );
                self.client.insert(0, Rule::nobody(line));
            }
            _ => {
                return Err(Mistake::new(
                    line.number,
                    format!("a block `{}`: write client pass, client block, socks pass or socks block", kind.join(" ")),
                ));
            }
        }
        Ok(())
    }

    fn listeners(&self, site: &mut Site) -> Result<(), Mistake> {
        self.sources(site);
        for (line, listen) in &self.internal {
            let mut one = Listener::new(line, "socks", "socks5", *listen);
            one.policy = self.policy.clone();
            // Dante's own, if no line says another.
            one.limits = Keys::from([("connect", "30".to_owned()), ("handshake", "30".to_owned())]);
            one.limits.extend(self.limits.clone());
            self.rules(&mut one);
            if let Some(route) = &self.route {
                one.close(
                    route,
                    "connections would go to servers directly, and not through another proxy \
                    (upstream = \"NAME\", and [upstream.NAME])",
                );
            }
            if let Some(idle) = &self.udp_idle {
                one.keys.insert("udp", format!("{{ idle_limit = {idle} }}"));
            }
            site.listen(one)?;
        }
        Ok(())
    }

    fn sources(&self, site: &mut Site) {
        match self.rotation.as_deref() {
            None | Some("none") => {
                let mut all: Vec<IpAddr> = Vec::new();
                for (line, ip) in &self.external {
                    if all.iter().any(|other| other.is_ipv4() == ip.is_ipv4()) {
                        site.notes.left_out(
                            line,
                            "without a rotation, Dante uses the first address of a family (source has all \
                            that are used in turn)",
                        );
                    } else {
                        all.push(*ip);
                    }
                }
                if !all.is_empty() {
                    site.top.insert("source", quote_all(&all));
                }
            }
            Some("route") => {}
            Some(_) => {
                for (line, _) in &self.external {
                    site.notes.left_out(
                        line,
                        "connections leave from an address that the kernel chooses, not from that of the listener",
                    );
                }
            }
        }
    }

    /// Both lists of rules must allow a connection; what neither names is blocked.
    fn rules(&self, one: &mut Listener) {
        let mut client = Vec::new();
        for rule in &self.client {
            client.extend(rule.step(one, true));
        }
        let (mut socks, mut asks) = (Vec::new(), Vec::new());
        let mut commands: Option<BTreeSet<&'static str>> = None;
        let mut refused = BTreeSet::new();
        for rule in &self.socks {
            let methods = if rule.methods.is_empty() { &self.methods } else { &rule.methods };
            let of = rule.commands();
            if of.is_empty() {
                one.notes.left_out(
                    &rule.line,
                    "replies to BIND and of UDP pass as the keys bind and udp of a listener say \
                    (docs/configuration.md)",
                );
                continue;
            }
            if !rule.pass && !of.contains("connect") {
                one.notes.changed(&rule.line, "these commands are not served at all, to nobody");
                refused.extend(of);
                continue;
            }
            if !rule.pass && of.len() < COMMANDS.len() {
                one.notes.changed(&rule.line, "rules are about all commands: the others are blocked as well");
            }
            let asks_for_name = !methods.iter().any(|method| method == "none");
            if rule.pass && methods.is_empty() {
                one.notes.left_out(&rule.line, "no socksmethod is given, so Dante lets nobody in by it");
                continue;
            }
            let Some(mut step) = rule.step(one, false) else { continue };
            if rule.pass {
                if commands.as_ref().is_some_and(|others| *others != of) {
                    one.notes.changed(
                        &rule.line,
                        "commands are those of a listener, not of a rule: only those that all rules pass are served",
                    );
                }
                commands = Some(commands.map_or(of.clone(), |others| others.intersection(&of).copied().collect()));
                if asks_for_name {
                    asks.push((rule.line.clone(), socks.len()));
                } else if !rule.users.is_empty() {
                    one.notes.changed(&rule.line, "clients without a name do not get in by it");
                }
                step.when.users.clone_from(&rule.users);
            }
            socks.push(step);
        }
        let passes: usize = socks.iter().filter(|step| step.allow).count();
        let all_ask = asks.len() == passes;
        if !all_ask {
            // What is for users only is for nobody then.
            for (line, at) in asks.iter().rev() {
                if socks[*at].when.users.is_empty() {
                    one.notes.left_out(
                        line,
                        "it is for those who have logged in, and other rules are for everybody, which \
                        one listener cannot tell apart (write another listener, with users)",
                    );
                    socks.remove(*at);
                } else {
                    one.notes.changed(
                        line,
                        "nobody can log in yet, so it lets nobody in (write another listener, with users)",
                    );
                }
            }
        }
        one.rules = match both(&client, &socks) {
            Ok(rules) => rules,
            Err(TooHard) => {
                let line = one.line.clone();
                one.close(&line, "its rules cannot be joined to one list");
                return;
            }
        };
        self.commands(one, commands, &refused);
        if all_ask && passes > 0 {
            let line = asks.first().map_or_else(|| one.line.clone(), |(line, _)| line.clone());
            one.close(
                &line,
                "clients log in with passwords of the system, or by GSSAPI, which is not \
                translated: add users = { NAME = \"PASSWORD\" } or users_file = \"PATH\"",
            );
        }
    }

    fn commands(&self, one: &mut Listener, commands: Option<BTreeSet<&'static str>>, refused: &BTreeSet<&'static str>) {
        let served = commands.unwrap_or_else(|| COMMANDS.into());
        let served: Vec<&str> =
            COMMANDS.into_iter().filter(|one| served.contains(one) && !refused.contains(one)).collect();
        if served.is_empty() {
            one.rules.insert(0, NOBODY);
            let line = one.line.clone();
            one.notes.changed(&line, "no command is passed by all rules, so the first rule denies everybody");
        } else if served.len() < COMMANDS.len() {
            let all: Vec<String> = served.iter().map(|one| quote(one)).collect();
            one.keys.insert("commands", format!("[{}]", all.join(", ")));
        }
    }
}

fn both(client: &[Step], socks: &[Step]) -> Result<Vec<super::rules::Rule>, TooHard> {
    Ok(tidy(and(&compile(client, false)?, &compile(socks, false)?)?))
}

/// Why a setting is left out.
fn why(name: &str) -> &'static str {
    match name {
        "user.privileged" | "user.unprivileged" | "user.notprivileged" | "user.libwrap" => {
            "the program runs as the user that starts it (its systemd unit gives it the capabilities that it needs)"
        }
        "srchost" => "addresses of clients are not looked up in the DNS",
        "compatibility" | "extension" => "there are no such variants of SOCKS",
        "timeout.tcp_fin_wait" => "the kernel ends such connections",
        "udp.connectdst" => "udp = { replies = ... } says whose datagrams reach a client",
        "debug" => "-v logs more",
        _ if name.starts_with("internal.") || name.starts_with("external.") => "sockets have no such setting",
        _ if name.starts_with("cpu.") || name.starts_with("child.") => {
            "there is one process, with a thread for each processor"
        }
        _ => "it is not translated",
    }
}
