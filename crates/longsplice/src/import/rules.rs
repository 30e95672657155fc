//! Access rules while they are translated: conditions, and lists of steps that become lists of rules.
//!
//! Our rules have no "unless", and there is one list of them. Others have several lists, of which each must allow a
//! connection, and conditions that are turned round. Both become one list, as long as conditions can be cut with each other.

use super::values::Net;

/// Longest list of rules that is written: a longer one is for nobody to read.
const RULES_MAX: usize = 1000;

/// Most pairs of values that are compared to find out where two conditions hold: two lists of a thousand networks.
const PAIRS_MAX: usize = 1_000_000;

/// What a target may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Net(Net),
    Name(String),
    /// All names below this one.
    Below(String),
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Host::Net(net) => net.fmt(f),
            Host::Name(name) => f.write_str(name),
            Host::Below(name) => write!(f, "*.{name}"),
        }
    }
}

/// Conditions that must all hold; an empty list is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub client: Vec<Net>,
    pub target: Vec<Host>,
    pub ports: Vec<(u16, u16)>,
    pub users: Vec<String>,
    pub methods: Vec<String>,
    /// Paths as rules have them: `/a`, or `/a*`.
    pub path: Vec<String>,
}

/// Two conditions are too different to say where both hold.
#[derive(Debug, PartialEq, Eq)]
pub struct TooHard;

/// What holds for both lists: all of it if one is empty, and `None` if nothing does.
fn both<T: Clone>(
    a: &[T],
    b: &[T],
    and: impl Fn(&T, &T) -> Result<Option<T>, TooHard>,
) -> Result<Option<Vec<T>>, TooHard> {
    if a.is_empty() || b.is_empty() {
        return Ok(Some(if a.is_empty() { b } else { a }.to_vec()));
    }
    if a.len().saturating_mul(b.len()) > PAIRS_MAX {
        return Err(TooHard);
    }
    let mut all = Vec::new();
    for a in a {
        for b in b {
            all.extend(and(a, b)?);
        }
    }
    if all.len() > RULES_MAX { Err(TooHard) } else { Ok(Some(all).filter(|all| !all.is_empty())) }
}

impl Match {
    pub fn is_all(&self) -> bool {
        *self == Match::default()
    }

    pub fn client(client: Vec<Net>) -> Match {
        Match { client, ..Match::default() }
    }

    /// Makes this hold where the other does as well, if both are about the same one thing.
    pub fn or(&mut self, other: &Match) -> bool {
        let about = |one: &Match| {
            let Match { client, target, ports, users, methods, path } = one;
            [
                client.is_empty(),
                target.is_empty(),
                ports.is_empty(),
                users.is_empty(),
                methods.is_empty(),
                path.is_empty(),
            ]
        };
        let is_one = about(self) == about(other) && about(self).iter().filter(|is_empty| !**is_empty).count() == 1;
        if is_one {
            self.client.extend_from_slice(&other.client);
            self.target.extend_from_slice(&other.target);
            self.ports.extend_from_slice(&other.ports);
            self.users.extend_from_slice(&other.users);
            self.methods.extend_from_slice(&other.methods);
            self.path.extend_from_slice(&other.path);
        }
        is_one
    }

    /// Where both hold; `None` if nowhere.
    pub fn and(&self, other: &Match) -> Result<Option<Match>, TooHard> {
        let same = |a: &String, b: &String| Ok((a == b).then(|| a.clone()));
        let hosts = |a: &Host, b: &Host| match (a, b) {
            (Host::Net(a), Host::Net(b)) => Ok(a.and(*b).map(Host::Net)),
            (Host::Net(_), _) | (_, Host::Net(_)) => Err(TooHard),
            (Host::Below(a), Host::Below(b)) if a == b => Ok(Some(Host::Below(a.clone()))),
            (Host::Name(name) | Host::Below(name), Host::Below(suffix)) if is_below(name, suffix) => {
                Ok(Some(a.clone()))
            }
            (Host::Below(suffix), Host::Name(name) | Host::Below(name)) if is_below(name, suffix) => {
                Ok(Some(b.clone()))
            }
            _ => Ok((a == b).then(|| a.clone())),
        };
        let paths = |a: &String, b: &String| {
            let begins = |long: &String, short: &String| {
                short.strip_suffix('*').is_some_and(|start| long.trim_end_matches('*').starts_with(start))
            };
            Ok(if begins(a, b) || a == b { Some(a.clone()) } else { begins(b, a).then(|| b.clone()) })
        };
        let ports = |a: &(u16, u16), b: &(u16, u16)| {
            let both = (a.0.max(b.0), a.1.min(b.1));
            Ok((both.0 <= both.1).then_some(both))
        };
        let client = both(&self.client, &other.client, |a, b| Ok(a.and(*b)))?;
        let target = both(&self.target, &other.target, hosts)?;
        let ports = both(&self.ports, &other.ports, ports)?;
        let users = both(&self.users, &other.users, same)?;
        let methods = both(&self.methods, &other.methods, same)?;
        let path = both(&self.path, &other.path, paths)?;
        Ok(match (client, target, ports, users, methods, path) {
            (Some(client), Some(target), Some(ports), Some(users), Some(methods), Some(path)) => {
                Some(Match { client, target, ports, users, methods, path })
            }
            _ => None,
        })
    }
}

fn is_below(name: &str, suffix: &str) -> bool {
    name.strip_suffix(suffix).is_some_and(|rest| rest.ends_with('.'))
}

/// One rule, as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub allow: bool,
    pub when: Match,
}

/// What denies everybody.
pub const NOBODY: Rule = Rule {
    allow: false,
    when: Match {
        client: Vec::new(),
        target: Vec::new(),
        ports: Vec::new(),
        users: Vec::new(),
        methods: Vec::new(),
        path: Vec::new(),
    },
};

/// One step of a list that is read from the top: it decides when `when` holds and none of `unless` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub allow: bool,
    pub when: Match,
    pub unless: Vec<Match>,
}

impl Step {
    pub fn new(allow: bool, when: Match) -> Step {
        Step { allow, when, unless: Vec::new() }
    }
}

/// Returns the rules that decide as the steps do, and as `otherwise` says where none does.
pub fn compile(steps: &[Step], otherwise: bool) -> Result<Vec<Rule>, TooHard> {
    let mut rules = vec![Rule { allow: otherwise, when: Match::default() }];
    for step in steps.iter().rev() {
        let mut all = Vec::new();
        for unless in &step.unless {
            if let Some(left) = step.when.and(unless)? {
                cut(&rules, &left, &mut all)?;
            }
        }
        all.push(Rule { allow: step.allow, when: step.when.clone() });
        if !step.when.is_all() {
            all.append(&mut rules);
        }
        rules = all;
        if rules.len() > RULES_MAX {
            return Err(TooHard);
        }
    }
    Ok(rules)
}

/// Adds what the rules say where this holds. The last of them says something of everything.
fn cut(rules: &[Rule], to: &Match, all: &mut Vec<Rule>) -> Result<(), TooHard> {
    for rule in rules {
        if let Some(when) = rule.when.and(to)? {
            all.push(Rule { allow: rule.allow, when });
        }
    }
    Ok(())
}

/// Returns the rules that allow what both lists allow. Both end with a rule about everything.
pub fn and(first: &[Rule], second: &[Rule]) -> Result<Vec<Rule>, TooHard> {
    let mut all = Vec::new();
    for rule in first {
        if rule.allow {
            cut(second, &rule.when, &mut all)?;
        } else {
            all.push(rule.clone());
        }
        if all.len() > RULES_MAX {
            return Err(TooHard);
        }
    }
    Ok(all)
}

/// Removes what decides nothing: what stands behind a rule about everything, or says what is said anyway.
pub fn tidy(mut rules: Vec<Rule>) -> Vec<Rule> {
    if let Some(last) = rules.iter().position(|rule| rule.when.is_all()) {
        rules.truncate(last + 1);
    }
    // Without any rule that matches, a connection is allowed.
    let says = |rule: &Rule, allow| rule.allow == allow && rule.when.is_all();
    if rules.last().is_some_and(|rule| says(rule, true)) {
        rules.pop();
        while rules.last().is_some_and(|rule| rule.allow && rule.when.target.is_empty()) {
            rules.pop();
        }
    } else if rules.last().is_some_and(|rule| says(rule, false)) {
        let last = rules.iter().rposition(|rule| rule.allow).map_or(0, |at| at + 1);
        rules.truncate(last);
        rules.push(NOBODY);
    }
    rules.dedup();
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(net: &str) -> Match {
        Match::client(vec![net.parse().unwrap()])
    }

    fn shown(rules: &[Rule]) -> String {
        let one = |rule: &Rule| {
            let of: Vec<String> = rule.when.client.iter().map(ToString::to_string).collect();
            let of: Vec<String> = of.into_iter().chain(rule.when.path.iter().cloned()).collect();
            format!("{}{}", if rule.allow { "+" } else { "-" }, of.join("&"))
        };
        rules.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn steps_that_are_turned_round() {
        let but = |net: &str| Step { allow: false, when: Match::default(), unless: vec![from(net)] };
        let path = Match { path: vec!["/admin*".into()], ..Match::default() };
        let rules = |steps: &[Step]| shown(&tidy(compile(steps, true).unwrap()));
        assert_eq!(rules(&[but("10.0.0.0/8")]), "+10.0.0.0/8 -");
        assert_eq!(rules(&[but("10.0.0.0/8"), Step::new(false, from("10.1.0.0/16"))]), "-10.1.0.0/16 +10.0.0.0/8 -");
        let staff = Step { allow: false, when: path.clone(), unless: vec![from("10.0.0.0/8")] };
        assert_eq!(
            rules(&[staff, Step::new(false, from("10.1.0.0/16"))]),
            "-10.1.0.0/16&/admin* +10.0.0.0/8&/admin* -/admin* -10.1.0.0/16"
        );
        assert_eq!(rules(&[Step::new(true, from("10.0.0.0/8"))]), "");
        assert_eq!(rules(&[]), "");
    }

    #[test]
    fn two_lists() {
        let clients =
            compile(&[Step::new(false, from("10.1.0.0/16")), Step::new(true, from("10.0.0.0/8"))], false).unwrap();
        let targets =
            compile(&[Step::new(false, from("10.2.0.0/16")), Step::new(true, from("0.0.0.0/0"))], false).unwrap();
        let both = tidy(and(&clients, &targets).unwrap());
        assert_eq!(shown(&both), "-10.1.0.0/16 -10.2.0.0/16 +10.0.0.0/8 -");
    }

    #[test]
    fn names_and_networks_are_not_cut() {
        let target = |host| Match { target: vec![host], ..Match::default() };
        let net = target(Host::Net("10.0.0.0/8".parse().unwrap()));
        let (name, below) = (target(Host::Name("a.b.org".into())), target(Host::Below("b.org".into())));
        assert_eq!(net.and(&name), Err(TooHard));
        assert_eq!(name.and(&below), Ok(Some(name.clone())));
        assert_eq!(below.and(&target(Host::Name("cb.org".into()))), Ok(None));
    }

    #[test]
    fn lists_that_grow_without_end_are_refused() {
        let path = |n: usize| Match { path: vec![format!("/{n}*")], ..Match::default() };
        let steps: Vec<Step> = (0..20)
            .map(|n| Step { allow: false, when: path(n), unless: vec![from("10.0.0.0/8"), from("11.0.0.0/8")] })
            .collect();
        // each step needs what follows only where its own condition holds
        assert!(compile(&steps, true).unwrap().len() < RULES_MAX);
        let steps: Vec<Step> =
            (0..20).map(|n| Step { allow: false, when: from("10.0.0.0/8"), unless: vec![path(n)] }).collect();
        assert!(compile(&steps, true).is_ok());
        let many: Vec<Step> = (0..RULES_MAX + 1).map(|n| Step::new(false, path(n))).collect();
        assert_eq!(compile(&many, true), Err(TooHard));
    }
}
