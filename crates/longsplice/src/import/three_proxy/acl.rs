//! Entries of an access list of 3proxy.

use crate::import::{
    model::{Line, Listener, Mistake},
    rules::{Host, Match, Step},
    values::{Net, host_name},
};
use std::{collections::BTreeSet, net::IpAddr};

/// What uses a list.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Http,
    Socks,
    Plug,
}

/// `allow` or `deny`: lists of users, sources, targets, ports, operations, days and times, of which `*` is everything.
pub struct Entry {
    line: Line,
    allow: bool,
    lists: Vec<Vec<String>>,
    /// The line that leads connections to another place, and what would happen without.
    pub elsewhere: Option<(Line, &'static str)>,
}

/// What was read of a list: nothing stands for everything.
type Known<T> = Result<Vec<T>, String>;

impl Entry {
    pub fn read(line: &Line, words: &[String]) -> Result<Entry, Mistake> {
        if words.len() > 8 {
            return Err(Mistake::new(
                line.number,
                "more than seven lists: users, sources, targets, ports, operations, days, times",
            ));
        }
        let split = |word: &String| {
            let all: Vec<String> = word.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
            if all.iter().any(|one| one == "*") { Vec::new() } else { all }
        };
        let entry = Entry {
            line: line.clone(),
            allow: words[0] == "allow",
            lists: words[1..].iter().map(split).collect(),
            elsewhere: None,
        };
        if let Err(what) = entry.ports() {
            return Err(Mistake::new(line.number, what));
        }
        Ok(entry)
    }

    /// What is not to connect directly.
    pub fn elsewhere(line: &Line, why: &'static str) -> Entry {
        Entry { line: line.clone(), allow: true, lists: Vec::new(), elsewhere: Some((line.clone(), why)) }
    }

    fn list(&self, n: usize) -> &[String] {
        self.lists.get(n).map_or(&[], Vec::as_slice)
    }

    fn sources(&self) -> Known<Net> {
        let mut nets = Vec::new();
        for one in self.list(1) {
            nets.extend(addresses(one).ok_or_else(|| format!("{one}, which is no address"))?);
        }
        Ok(nets)
    }

    fn targets(&self) -> Known<Host> {
        let mut hosts = Vec::new();
        for one in self.list(2) {
            if let Some(nets) = addresses(one) {
                hosts.extend(nets.into_iter().map(Host::Net));
            } else if let Some(name) = one.strip_prefix("*.").and_then(host_name) {
                hosts.push(Host::Below(name));
            } else {
                let name = host_name(one).ok_or_else(|| format!("{one}, which is no name and no *.NAME"))?;
                hosts.push(Host::Name(name));
            }
        }
        Ok(hosts)
    }

    fn ports(&self) -> Known<(u16, u16)> {
        let mut ports = Vec::new();
        for one in self.list(3) {
            let (first, last) = one.split_once('-').unwrap_or((one, one));
            match (first.parse::<u16>(), last.parse::<u16>()) {
                (Ok(first), Ok(last)) if first <= last && last > 0 => ports.push((first.max(1), last)),
                _ => return Err(format!("{one} is no port: write one from 1 to 65535, or FIRST-LAST")),
            }
        }
        Ok(if ports.contains(&(1, 65535)) { Vec::new() } else { ports })
    }

    /// Commands of SOCKS that it is about; `None` for all.
    fn commands(&self) -> Option<BTreeSet<&'static str>> {
        let all = self.list(4);
        let ours = [("CONNECT", "connect"), ("BIND", "bind"), ("UDPASSOC", "udp-associate")];
        let named = ours.into_iter().filter(|(theirs, _)| all.iter().any(|one| one.eq_ignore_ascii_case(theirs)));
        (!all.is_empty()).then(|| named.map(|(_, ours)| ours).collect())
    }

    /// Methods of HTTP; `None` if it is about none.
    fn methods(&self) -> Option<Known<String>> {
        let all = self.list(4);
        let mut methods = Vec::new();
        for one in all {
            match one.to_ascii_uppercase().as_str() {
                "HTTP_CONNECT" | "HTTPS" => methods.push("CONNECT".to_owned()),
                "HTTP_OTHER" | "HTTP" => return Some(Err(format!("{one}: methods are told by name"))),
                other => methods.extend(other.strip_prefix("HTTP_").map(str::to_owned)),
            }
        }
        if all.is_empty() || !methods.is_empty() { Some(Ok(methods)) } else { None }
    }

    /// Returns the step for a service. What cannot be said makes an entry deny more, or allow nothing.
    pub fn step(&self, one: &mut Listener, service: Service, asks: bool) -> Option<Step> {
        if let Some((line, why)) = &self.elsewhere {
            one.notes.left_out(line, &format!("{why}. What it is about is denied"));
        }
        let mut unknown = Vec::new();
        let mut when = Match::default();
        match self.sources() {
            Ok(nets) => when.client = nets,
            Err(what) => unknown.push(what),
        }
        match self.targets() {
            Ok(hosts) => when.target = hosts,
            Err(what) => unknown.push(what),
        }
        when.ports = self.ports().unwrap_or_default();
        match self.list(0) {
            [] => {}
            users if asks => when.users = users.to_vec(),
            _ => unknown.push("users, whom nobody asks for a name".to_owned()),
        }
        let of = self.commands();
        match service {
            Service::Http => match self.methods()? {
                Ok(methods) => when.methods = methods,
                Err(what) => unknown.push(what),
            },
            // which commands are served is a key of the listener
            Service::Socks | Service::Plug if of.as_ref().is_some_and(|of| !of.contains("connect")) => {
                if service == Service::Socks
                    && !self.list(4).iter().all(|one| one.starts_with("HTTP") || one.starts_with("FTP"))
                {
                    one.notes.changed(
                        &self.line,
                        "commands are those of a listener: what is not allowed for everybody is not served",
                    );
                }
                return None;
            }
            Service::Socks | Service::Plug => {}
        }
        if !self.list(5).is_empty() || !self.list(6).is_empty() {
            unknown.push("days and times".to_owned());
        }
        let allow = self.allow && self.elsewhere.is_none();
        if unknown.is_empty() {
            return Some(Step::new(allow, when));
        }
        let what = unknown.join("; ");
        if allow {
            one.notes.left_out(
                &self.line,
                &format!("{what}: this cannot be said, so the entry allows nothing (write an allow rule)"),
            );
            return None;
        }
        one.notes
            .changed(&self.line, &format!("{what}: this cannot be said, so the entry denies whether or not it holds"));
        Some(Step::new(false, when))
    }
}

/// Returns the commands that a SOCKS listener serves: those that all entries allow. `None` for the usual ones.
pub fn commands(acl: &[Entry], one: &mut Listener, service: Service) -> Option<Vec<&'static str>> {
    let mut served: BTreeSet<&str> = ["connect", "bind", "udp-associate"].into();
    if service != Service::Socks || acl.iter().all(|entry| entry.commands().is_none()) {
        return None;
    }
    for entry in acl {
        let Some(of) = entry.commands() else { continue };
        if entry.allow && of.contains("connect") {
            if served.iter().any(|command| !of.contains(command)) {
                one.notes.changed(
                    &entry.line,
                    "commands are those of a listener, not of an entry: only those that all entries allow are served",
                );
            }
            served.retain(|command| of.contains(command));
        } else if !entry.allow && !of.contains("connect") {
            served.retain(|command| !of.contains(command));
        } else if !entry.allow && of.len() < 3 {
            one.notes.changed(&entry.line, "rules are about all commands: the others are denied as well");
        }
    }
    Some(["connect", "bind", "udp-associate"].into_iter().filter(|command| served.contains(command)).collect())
}

/// `ADDRESS`, `ADDRESS/LENGTH` or `FIRST-LAST`.
fn addresses(text: &str) -> Option<Vec<Net>> {
    if let Ok(net) = text.parse::<Net>() {
        return Some(vec![net]);
    }
    let (first, last) = text.split_once('-')?;
    Net::range(first.trim().parse::<IpAddr>().ok()?, last.trim().parse::<IpAddr>().ok()?)
}
