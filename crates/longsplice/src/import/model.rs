//! What every format is translated to, before it is written: listeners, pools, and notes about what could not be said.

use super::{
    rules::{NOBODY, Rule},
    values::quote,
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
};

/// Most listeners: a range of ports is one for each.
const LISTENERS_MAX: usize = 1000;
/// Most routes, rules and users of all listeners together: each listener has those that a file says once for several.
const PARTS_MAX: usize = 100_000;
/// Most servers of a pool, as the configuration has it.
pub const SERVERS_MAX: usize = 256;

/// A line, or the first one of a block, of the file that is read.
#[derive(Clone, Debug, Default)]
pub struct Line {
    pub number: usize,
    pub text: String,
}

/// Why a file cannot be translated at all.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistake {
    pub line: usize,
    pub what: String,
}

impl Mistake {
    pub fn new(line: usize, what: impl Into<String>) -> Mistake {
        Mistake { line, what: what.into() }
    }
}

/// What is said about lines, as comments.
#[derive(Clone, Debug, Default)]
pub struct Notes(pub Vec<(usize, String)>);

impl Notes {
    /// Nothing was made of this line. `why` says why, and what to do instead.
    pub fn left_out(&mut self, line: &Line, why: &str) {
        self.add(line, "left out", why);
    }

    /// Something else was made of this line than it says.
    pub fn changed(&mut self, line: &Line, how: &str) {
        self.add(line, "changed", how);
    }

    fn add(&mut self, line: &Line, what: &str, why: &str) {
        self.0.push((line.number, format!("{}: {what}: {why}", line.text)));
    }
}

/// Keys, and their values as TOML.
pub type Keys = BTreeMap<&'static str, String>;

/// Where connections are led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lead {
    Target(String),
    Pool(String),
    Redirect(Keys),
}

/// A route of HTTP or TLS.
#[derive(Clone, Debug)]
pub struct Route {
    /// Conditions, and other keys of the route.
    pub keys: Keys,
    pub to: Lead,
}

/// Changes of fields, each an inline table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub request: Vec<String>,
    pub reply: Vec<String>,
}

/// A listener.
#[derive(Clone, Debug)]
pub struct Listener {
    pub notes: Notes,
    pub line: Line,
    pub name: String,
    pub protocol: &'static str,
    pub listen: SocketAddr,
    pub lead: Option<Lead>,
    pub routes: Vec<Route>,
    pub rules: Vec<Rule>,
    pub users: BTreeMap<String, String>,
    pub keys: Keys,
    pub policy: Keys,
    pub limits: Keys,
    pub proxy_protocol: Keys,
    pub fields: Fields,
}

impl Listener {
    pub fn new(line: &Line, name: &str, protocol: &'static str, listen: SocketAddr) -> Listener {
        Listener {
            notes: Notes::default(),
            line: line.clone(),
            name: name.to_owned(),
            protocol,
            listen,
            lead: None,
            routes: Vec::new(),
            rules: Vec::new(),
            users: BTreeMap::new(),
            keys: Keys::new(),
            policy: Keys::new(),
            limits: Keys::new(),
            proxy_protocol: Keys::new(),
            fields: Fields::default(),
        }
    }

    /// Lets nobody in, since something that would have kept clients out is not there.
    pub fn close(&mut self, line: &Line, why: &str) {
        self.notes.left_out(
            line,
            &format!(
                "{why}. Without it the listener would be open, so its first rule denies \
                everybody: replace that"
            ),
        );
        if self.rules.first() != Some(&NOBODY) {
            self.rules.insert(0, NOBODY);
        }
    }
}

/// A server of a pool.
#[derive(Clone, Debug)]
pub struct Server {
    pub address: String,
    pub keys: Keys,
}

/// A pool.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    pub notes: Notes,
    pub name: String,
    pub servers: Vec<Server>,
    pub keys: Keys,
    pub check: Option<Keys>,
    pub sticky: Keys,
}

/// The whole configuration.
#[derive(Clone, Debug, Default)]
pub struct Site {
    pub notes: Notes,
    pub top: Keys,
    pub listeners: Vec<Listener>,
    pub pools: Vec<Pool>,
    /// Routes, rules and users of all listeners.
    parts: usize,
}

impl Site {
    /// Adds a listener, unless there are too many, or what they share is too much to be written for each.
    pub fn listen(&mut self, listener: Listener) -> Result<(), Mistake> {
        self.parts += listener.routes.len() + listener.rules.len() + listener.users.len();
        if self.parts > PARTS_MAX {
            let what =
                format!("more than {PARTS_MAX} routes, rules and users, of all listeners together: split the file");
            return Err(Mistake::new(listener.line.number, what));
        }
        if self.listeners.len() == LISTENERS_MAX {
            let what = format!("more than {LISTENERS_MAX} addresses and ports to listen on: split the file");
            return Err(Mistake::new(listener.line.number, what));
        }
        self.listeners.push(listener);
        Ok(())
    }

    /// Whether a listener leads to the pool of this name.
    pub fn leads_to(&self, pool: &str) -> bool {
        let is_it = |to: &Lead| matches!(to, Lead::Pool(name) if name == pool);
        self.listeners.iter().any(|one| one.lead.iter().chain(one.routes.iter().map(|route| &route.to)).any(is_it))
    }

    /// Checks what is about several listeners, and gives each a name of its own.
    pub fn finish(&mut self) -> Result<(), Mistake> {
        let mut seen: HashMap<u16, Vec<(IpAddr, usize)>> = HashMap::new();
        let mut names = HashSet::new();
        for listener in &mut self.listeners {
            let (ip, port, line) = (listener.listen.ip(), listener.listen.port(), listener.line.number);
            let others = seen.entry(port).or_default();
            let collides = |other: &IpAddr| {
                *other == ip || (other.is_ipv4() == ip.is_ipv4() && (other.is_unspecified() || ip.is_unspecified()))
            };
            if let Some((_, other)) = others.iter().find(|(other, _)| collides(other)) {
                let what = format!("{} is listened on by line {other} already: remove one of them", listener.listen);
                return Err(Mistake::new(line, what));
            }
            others.push((ip, line));
            listener.name = unique(&listener.name, &mut names);
        }
        // What several listeners inherit is said once.
        let mut said = HashSet::new();
        let of_listeners = self.listeners.iter_mut().map(|one| &mut one.notes);
        let of_pools = self.pools.iter_mut().map(|one| &mut one.notes);
        for notes in std::iter::once(&mut self.notes).chain(of_listeners).chain(of_pools) {
            notes.0.retain(|note| said.insert(note.clone()));
        }
        Ok(())
    }
}

/// Returns a name for a listener: this one without what a name cannot have, and with a number if others have it.
fn unique(name: &str, names: &mut HashSet<String>) -> String {
    let is_good = |c: &char| c.is_ascii_alphanumeric() || "-_.:[]".contains(*c);
    let mut short: String = name.chars().map(|c| if is_good(&c) { c } else { '-' }).take(56).collect();
    if short.is_empty() {
        short = "listener".to_owned();
    }
    let mut one = short.clone();
    let mut number = 1;
    while !names.insert(one.clone()) {
        number += 1;
        one = format!("{short}-{number}");
    }
    one
}

/// The servers of PROXY headers that stand for all addresses.
pub fn everybody() -> String {
    format!("[{}, {}]", quote("0.0.0.0/0"), quote("::/0"))
}
