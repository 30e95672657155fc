//! Index of rules: finds the few rules that may match a request in a list of thousands.
//!
//! Each rule is filed under all its targets, all its clients or all its ports: the kind of key that it shares
//! with the fewest other rules. A request looks up its own client, target and port, and tries the rules found
//! in the order of the list. Rules that have none of these keys, or too many ports, are always tried.

use super::{Pattern, Rule};
use crate::{access::guarded_ranges, target::Host};
use ipnet::IpNet;
use std::{
    collections::{BTreeSet, HashMap},
    iter,
    net::IpAddr,
};

/// Largest number of ports under which a rule is filed.
const PORTS: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Client(IpNet),
    Target(IpNet),
    Name(String),
    Below(String),
    Port(u16),
}

/// What is known of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Knowing {
    /// Its address, and the name if the client has named one.
    Address(IpAddr),
    /// Its name, which is not resolved yet, so that any rule with a prefix may match.
    Name,
    /// Its name, which is not resolved here, so that no prefix ever matches.
    NameAlone,
}

/// What of a rule's targets a request may match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Matching {
    All,
    AnyPrefix,
    NoPrefix,
}

/// Numbers of rules, from 0, by a key that the request must have for them to match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Index {
    filed: HashMap<Key, Vec<u32>>,
    /// Rules that are always tried.
    rest: Vec<u32>,
    /// Prefix lengths in use, each with its family (true: IPv4): of clients, and of targets.
    lengths: [BTreeSet<(bool, u8)>; 2],
}

impl Index {
    /// Indexes the rules for each kind of [`Knowing`].
    pub fn all_of(list: &[Rule]) -> [Index; 3] {
        [Matching::All, Matching::AnyPrefix, Matching::NoPrefix].map(|matching| Index::of(list, matching))
    }

    fn of(list: &[Rule], matching: Matching) -> Index {
        // those of which nothing can match are left out
        let may_match = |rule: &Rule| matching != Matching::NoPrefix || rule.matches_names();
        let rules = || (0u32..).zip(list).filter(|(_, rule)| may_match(rule));
        let mut shared: HashMap<Key, usize> = HashMap::new();
        for key in rules().flat_map(|(_, rule)| ways(rule, matching)).flatten() {
            *shared.entry(key).or_default() += 1;
        }
        let mut index = Index::default();
        for (n, rule) in rules() {
            let others = |keys: &Vec<Key>| keys.iter().map(|key| shared[key]).sum::<usize>();
            match ways(rule, matching).into_iter().min_by_key(others) {
                Some(keys) => keys.into_iter().for_each(|key| index.file(key, n)),
                None => index.rest.push(n),
            }
        }
        index
    }

    fn file(&mut self, key: Key, n: u32) {
        if let Key::Client(net) | Key::Target(net) = &key {
            let lengths = &mut self.lengths[usize::from(matches!(key, Key::Target(_)))];
            lengths.insert((net.addr().is_ipv4(), net.prefix_len()));
        }
        self.filed.entry(key).or_default().push(n);
    }

    /// Returns the rules to try, in order. `ip`: `None` if the name is not resolved yet.
    pub fn candidates(
        &self,
        client: IpAddr,
        host: &Host,
        ip: Option<IpAddr>,
        port: u16,
    ) -> impl Iterator<Item = usize> {
        let mut keys: Vec<Key> = self.prefixes(0, client).map(Key::Client).collect();
        let faces = ip.into_iter().flat_map(guarded_ranges::faces);
        keys.extend(faces.flat_map(|ip| self.prefixes(1, ip)).map(Key::Target));
        if let Host::Name(name) = host {
            keys.push(Key::Name(name.clone()));
            keys.extend(name.match_indices('.').map(|(dot, _)| Key::Below(name[dot + 1..].to_owned())));
        }
        keys.push(Key::Port(port));
        let found = keys.iter().filter_map(|key| self.filed.get(key)).map(Vec::as_slice);
        Merged(found.chain(iter::once(self.rest.as_slice())).collect())
    }

    /// Returns the prefixes that contain the address, one for each prefix length in use.
    fn prefixes(&self, of: usize, ip: IpAddr) -> impl Iterator<Item = IpNet> {
        let lengths = self.lengths[of].iter().filter(move |(v4, _)| *v4 == ip.is_ipv4());
        lengths.filter_map(move |(_, length)| Some(IpNet::new(ip, *length).ok()?.trunc()))
    }
}

/// Returns the sets of keys under which a rule may be filed: all keys of one set. Empty: the rule is always tried.
fn ways(rule: &Rule, matching: Matching) -> Vec<Vec<Key>> {
    let target = |pattern: &Pattern| match pattern {
        Pattern::Prefix(net) => Key::Target(net.0.trunc()),
        Pattern::Name(name) => Key::Name(name.clone()),
        Pattern::Below(suffix) => Key::Below(suffix.clone()),
    };
    let is_prefix = |p: &&Pattern| matches!(p, Pattern::Prefix(_));
    let targets = match matching {
        // any name may resolve into the prefix
        Matching::AnyPrefix if rule.target.iter().any(|p| is_prefix(&p)) => Vec::new(),
        Matching::NoPrefix => rule.target.iter().filter(|p| !is_prefix(p)).map(target).collect(),
        Matching::All | Matching::AnyPrefix => rule.target.iter().map(target).collect(),
    };
    let clients = rule.client.iter().map(|net| Key::Client(net.0.trunc())).collect();
    let ports: Vec<Key> = rule.ports.iter().flat_map(|r| r.first..=r.last).take(PORTS + 1).map(Key::Port).collect();
    let mut ways = vec![targets, clients];
    ways.extend((ports.len() <= PORTS).then_some(ports));
    ways.retain(|keys| !keys.is_empty());
    ways
}

/// Merges ascending lists; each number appears once.
struct Merged<'a>(Vec<&'a [u32]>);

impl Iterator for Merged<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let least = *self.0.iter().filter_map(|list| list.first()).min()?;
        for list in &mut self.0 {
            // one key may list a rule twice
            while list.first() == Some(&least) {
                *list = &list[1..];
            }
        }
        Some(least as usize)
    }
}
