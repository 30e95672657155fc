//! Conditions of HAProxy: named ones (acl), and those that are written in braces.

use super::words::Words;
use crate::import::{
    model::{Keys, Mistake},
    rules::{Host, Match, TooHard},
    values::{Net, escape, host_name, quote, quote_all},
};
use std::collections::HashMap;

/// Most alternatives that a condition becomes.
const ALTERNATIVES_MAX: usize = 200;

/// One test of a connection or request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    /// What rules can say. Any of them has to hold; none of them: it never holds.
    Rule(Vec<Match>),
    /// Server names in the ClientHello.
    Names(Vec<String>),
    /// An expression about the path, which routes can have, and rules not.
    Path(String),
    /// What always holds here.
    Always,
    /// That a client speaks TLS at all.
    Hello,
    /// The user of `http_auth`, of this list.
    Login(String),
    Unknown(String),
}

/// All named conditions of a section: the tests of one name are alternatives.
#[derive(Clone, Debug, Default)]
pub struct Acls(HashMap<String, Vec<Test>>);

/// A condition: alternatives, in each of which all have to hold. `true` turns a test round.
#[derive(Clone, Debug)]
pub struct Condition(Vec<Vec<(bool, Vec<Test>)>>);

/// What a condition says of an access rule.
pub struct Access {
    /// Alternatives: where each holds, and where not.
    pub when: Vec<(Match, Vec<Match>)>,
    /// What could not be said.
    pub unknown: Vec<String>,
}

impl Acls {
    pub fn add(&mut self, of: &Words) -> Result<(), Mistake> {
        if of.words.len() < 3 {
            return Err(of.wrong("write acl NAME CRITERION VALUE"));
        }
        let test = test(of.from(2));
        let all = self.0.entry(of.word(1).to_owned()).or_default();
        // A list that goes over many lines is one condition.
        if let (Some(Test::Rule(last)), Test::Rule(next)) = (all.last_mut(), &test)
            && let ([last], [next]) = (&mut last[..], &next[..])
            && last.or(next)
        {
            return Ok(());
        }
        all.push(test);
        Ok(())
    }

    /// Why the condition of this name cannot be said.
    pub fn unknown(&self, name: &str) -> Option<String> {
        let all = self.0.get(name)?;
        all.iter().find_map(|test| if let Test::Unknown(what) = test { Some(what.clone()) } else { None })
    }

    /// Reads what follows `if` or `unless`; without either, it always holds.
    pub fn condition(&self, of: &Words, words: &[String]) -> Result<Condition, Mistake> {
        let (turned, words) = match words.split_first() {
            None => return Ok(Condition(vec![Vec::new()])),
            Some((word, rest)) if word == "if" => (false, rest),
            Some((word, rest)) if word == "unless" => (true, rest),
            Some((word, _)) => return Err(of.wrong(format!("`{word}`: write if or unless"))),
        };
        let mut all = vec![Vec::new()];
        let mut words = words.iter();
        let mut is_not = false;
        while let Some(word) = words.next() {
            let (not, word) = word.strip_prefix('!').map_or((false, word.as_str()), |rest| (true, rest));
            is_not ^= not;
            let tests = match word {
                "" => continue,
                "or" | "||" => {
                    all.push(Vec::new());
                    continue;
                }
                "{" => {
                    let inner: Vec<String> = words.by_ref().take_while(|word| *word != "}").cloned().collect();
                    if inner.is_empty() {
                        return Err(of.wrong("an empty condition"));
                    }
                    vec![test(&inner)]
                }
                name => match self.0.get(name).cloned().or_else(|| predefined(name).map(|test| vec![test])) {
                    Some(tests) => tests,
                    None => return Err(of.wrong(format!("there is no acl {name}"))),
                },
            };
            if let Some(last) = all.last_mut() {
                last.push((is_not, tests));
            }
            is_not = false;
        }
        if all.iter().any(Vec::is_empty) {
            return Err(of.wrong("a condition is missing"));
        }
        if turned {
            // not (a b or c d): one of each alternative does not hold
            let mut none = vec![Vec::new()];
            for alternative in all {
                none = none
                    .iter()
                    .flat_map(|so_far: &Vec<(bool, Vec<Test>)>| {
                        alternative
                            .iter()
                            .map(move |(not, tests)| [so_far.as_slice(), &[(!not, tests.clone())]].concat())
                    })
                    .take(ALTERNATIVES_MAX + 1)
                    .collect();
            }
            all = none;
        }
        if all.len() > ALTERNATIVES_MAX {
            Err(of.wrong("this condition has too many alternatives"))
        } else {
            Ok(Condition(all))
        }
    }
}

impl Condition {
    pub fn is_always(&self) -> bool {
        self.0.iter().any(Vec::is_empty)
    }

    /// Whether it asks nothing but whether clients speak TLS: `true` if it holds for those that do.
    pub fn hello(&self) -> Option<bool> {
        match &self.0[..] {
            [all] => match &all[..] {
                [(is_not, tests)] if tests[..] == [Test::Hello] => Some(!is_not),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether it holds unless a user of this list has logged in.
    pub fn without_login(&self) -> Option<&str> {
        match &self.0[..] {
            [all] => match &all[..] {
                [(true, tests)] => match &tests[..] {
                    [Test::Login(list)] => Some(list),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    /// For a rule. `wide`: what cannot be said is taken to hold, and otherwise not to hold.
    pub fn access(&self, wide: bool) -> Result<Access, TooHard> {
        let mut unknown = Vec::new();
        let mut when = Vec::new();
        for alternative in &self.0 {
            let (mut holds, mut not) = (vec![Match::default()], Vec::new());
            for (is_not, tests) in alternative {
                let mut any: Vec<Match> = Vec::new();
                for test in tests {
                    match test {
                        Test::Rule(all) => any.extend(all.iter().cloned()),
                        Test::Always => any.push(Match::default()),
                        Test::Hello | Test::Names(_) => {
                            // Rules of TLS are about servers.
                            unknown.push("what a ClientHello says".to_owned());
                            if wide != *is_not {
                                any.push(Match::default());
                            }
                        }
                        Test::Path(what) | Test::Unknown(what) | Test::Login(what) => {
                            unknown.push(what.clone());
                            // turned round, too little is more
                            if wide != *is_not {
                                any.push(Match::default());
                            }
                        }
                    }
                }
                if *is_not {
                    not.extend(any);
                } else {
                    is_short(&holds, &any)?;
                    let mut both = Vec::new();
                    for one in &holds {
                        for other in &any {
                            both.extend(one.and(other)?);
                        }
                    }
                    holds = both;
                }
                is_short(&holds, &not)?;
            }
            if !not.iter().any(Match::is_all) {
                when.extend(holds.into_iter().map(|one| (one, not.clone())));
            }
        }
        Ok(Access { when, unknown })
    }

    /// For routes of HTTP: the keys of each, or what routes cannot say.
    pub fn routes(&self) -> Result<Vec<Keys>, String> {
        let mut routes = Vec::new();
        for alternative in &self.0 {
            let mut all = vec![Keys::new()];
            for (is_not, tests) in alternative {
                let mut any = Vec::new();
                for test in tests {
                    match test {
                        Test::Rule(matches) => {
                            for one in matches {
                                any.push(route_keys(one)?);
                            }
                        }
                        Test::Always => any.push(Keys::new()),
                        Test::Path(expression) => any.push(Keys::from([("path_regex", quote(expression))])),
                        Test::Names(_) | Test::Hello => {
                            return Err("the requested server name, in a proxy of HTTP".to_owned());
                        }
                        Test::Login(_) => return Err("users".to_owned()),
                        Test::Unknown(what) => return Err(what.clone()),
                    }
                }
                if *is_not {
                    match (any.is_empty(), any.iter().any(Keys::is_empty)) {
                        (true, _) => continue,
                        (_, true) => all.clear(),
                        _ => return Err("a condition that must not hold".to_owned()),
                    }
                    continue;
                }
                if is_short(&all, &any).is_err() {
                    return Err("too many alternatives".to_owned());
                }
                let mut both = Vec::new();
                for one in &all {
                    for other in &any {
                        both.push(join(one, other)?);
                    }
                }
                all = both;
            }
            routes.extend(all);
        }
        Ok(routes)
    }

    /// For routes of TLS: the names of each.
    pub fn names(&self) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for alternative in &self.0 {
            let named: Vec<_> = alternative
                .iter()
                .filter(|(not, tests)| *not || !tests.iter().all(|test| *test == Test::Hello))
                .collect();
            match &named[..] {
                [(false, tests)] => {
                    for test in tests {
                        match test {
                            Test::Names(names) => all.extend(names.iter().cloned()),
                            Test::Unknown(what) => return Err(what.clone()),
                            _ => return Err("something else than the requested server name".to_owned()),
                        }
                    }
                }
                _ => return Err("more than the requested server name".to_owned()),
            }
        }
        Ok(all)
    }

    /// Whether it asks for the requested server name anywhere.
    pub fn asks_for_names(&self) -> bool {
        self.0.iter().flatten().any(|(_, tests)| tests.iter().any(|test| matches!(test, Test::Names(_))))
    }
}

/// Whether two lists of alternatives can be joined to one.
fn is_short<A, B>(all: &[A], others: &[B]) -> Result<(), TooHard> {
    if all.len().saturating_mul(others.len().max(1)) > ALTERNATIVES_MAX { Err(TooHard) } else { Ok(()) }
}

fn names_match(names: &[String]) -> Match {
    let host = |name: &String| match name.strip_prefix("*.") {
        Some(below) => Host::Below(below.to_owned()),
        None => Host::Name(name.clone()),
    };
    Match { target: names.iter().map(host).collect(), ..Match::default() }
}

/// The keys of a route that matches what a rule matches.
fn route_keys(one: &Match) -> Result<Keys, String> {
    let Match { client, target, ports, users, methods, path } = one;
    if !client.is_empty() || !ports.is_empty() || !users.is_empty() || !methods.is_empty() {
        return Err("clients, ports or methods".to_owned());
    }
    let mut keys = Keys::new();
    if !target.is_empty() {
        keys.insert("host", quote_all(target));
    }
    match &path[..] {
        [] => {}
        [one] if !one.ends_with('*') => drop(keys.insert("path_exact", quote(one))),
        all => {
            let part = |path: &String| path.strip_suffix('*').map_or_else(|| format!("{}$", escape(path)), escape);
            let parts: Vec<String> = all.iter().map(part).collect();
            let expression =
                if let [one] = &parts[..] { format!("^{one}") } else { format!("^(?:{})", parts.join("|")) };
            keys.insert("path_regex", quote(&expression));
        }
    }
    Ok(keys)
}

fn join(one: &Keys, other: &Keys) -> Result<Keys, String> {
    let is_path = |keys: &Keys| keys.keys().any(|key| key.starts_with("path"));
    if (is_path(one) && is_path(other)) || (one.contains_key("host") && other.contains_key("host")) {
        return Err("two conditions on the path, or on the host".to_owned());
    }
    Ok(one.iter().chain(other).map(|(key, value)| (*key, value.clone())).collect())
}

/// Conditions that HAProxy knows by itself.
fn predefined(name: &str) -> Option<Test> {
    let methods = |all: &[&str]| {
        Test::Rule(vec![Match { methods: all.iter().map(|m| (*m).to_owned()).collect(), ..Match::default() }])
    };
    Some(match name {
        "TRUE" | "HTTP" => Test::Always,
        "FALSE" => Test::Rule(Vec::new()),
        "LOCALHOST" => {
            Test::Rule(vec![Match::client(["127.0.0.1/8", "::1"].iter().flat_map(|net| net.parse()).collect())])
        }
        "METH_GET" => methods(&["GET", "HEAD"]),
        "METH_CONNECT" | "METH_DELETE" | "METH_HEAD" | "METH_OPTIONS" | "METH_POST" | "METH_PUT" | "METH_TRACE" => {
            methods(&[&name[5..]])
        }
        "HTTP_1.0" | "HTTP_1.1" | "HTTP_2.0" | "HTTP_CONTENT" | "HTTP_URL_ABS" | "HTTP_URL_SLASH" | "HTTP_URL_STAR"
        | "RDP_COOKIE" | "REQ_CONTENT" | "WAIT_END" => Test::Unknown(name.to_owned()),
        _ => return None,
    })
}

/// Reads a criterion, flags, and values.
fn test(words: &[String]) -> Test {
    let unknown = || Test::Unknown(words.join(" "));
    let (full, rest) = words.split_first().map_or(("", &words[..0]), |(first, rest)| (first.as_str(), rest));
    // converters that change nothing of what is compared here
    let mut parts = full.split(',');
    let mut criterion = parts.next().unwrap_or("").to_owned();
    let converters = full[criterion.len()..].replace(",field(1,:)", "").replace(",host_only", "").replace(",lower", "");
    if !converters.is_empty() {
        return unknown();
    }
    let (mut how, mut any_case, mut values) = (None, false, Vec::new());
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-i" => any_case = true,
            "-n" | "-u" => {}
            "-m" => how = rest.next().cloned(),
            "--" => {
                values.extend(rest.by_ref().cloned());
            }
            "-f" | "-M" => return Test::Unknown(format!("{} (files are not read: write the values)", words.join(" "))),
            _ => values.push(word.clone()),
        }
    }
    let aliases = [
        ("req_ssl_sni", "req.ssl_sni"),
        ("req_ssl_hello_type", "req.ssl_hello_type"),
        ("req.fhdr(host)", "hdr(host)"),
        ("req.hdr(host)", "hdr(host)"),
        ("req.hdr(Host)", "hdr(host)"),
        ("hdr(Host)", "hdr(host)"),
        ("path_str", "path"),
        ("base_dom", ""),
    ];
    if let Some((_, same)) = aliases.iter().find(|(alias, _)| *alias == criterion) {
        criterion = (*same).to_owned();
    }
    for (ending, means) in [
        ("_beg", "beg"),
        ("_end", "end"),
        ("_reg", "reg"),
        ("_sub", "sub"),
        ("_dom", "dom"),
        ("_dir", "dir"),
        ("_len", "len"),
    ] {
        let (name, argument) =
            criterion.split_once('(').map_or((criterion.as_str(), ""), |(name, argument)| (name, argument));
        if let Some(bare) = name.strip_suffix(ending) {
            if how.is_some() {
                return unknown();
            }
            how = Some(means.to_owned());
            criterion = if argument.is_empty() { bare.to_owned() } else { format!("{bare}({argument}") };
            break;
        }
    }
    criterion = criterion.replace("(Host)", "(host)").replace("req.hdr(", "hdr(");
    let how = how.unwrap_or_else(|| "str".to_owned());
    let rule = |one: Match| Test::Rule(vec![one]);
    let hosts = || -> Option<Vec<String>> {
        let one = |value: &String| match how.as_str() {
            "str" => host_name(value),
            "end" => value.strip_prefix('.').and_then(host_name).map(|name| format!("*.{name}")),
            _ => None,
        };
        values.iter().map(one).collect::<Option<Vec<String>>>().filter(|all| !all.is_empty())
    };
    match criterion.as_str() {
        "src" => match values.iter().map(|value| value.parse::<Net>()).collect::<Result<Vec<_>, ()>>() {
            Ok(nets) if !nets.is_empty() => rule(Match::client(nets)),
            _ => unknown(),
        },
        "hdr(host)" => hosts().map_or_else(unknown, |names| rule(names_match(&names))),
        "req.ssl_sni" if values.is_empty() && how == "found" => Test::Hello,
        "req.ssl_sni" => hosts().map_or_else(unknown, Test::Names),
        "req.ssl_hello_type" if values == ["1"] => Test::Hello,
        "method"
            if how == "str"
                && !values.is_empty()
                && values.iter().all(|m| m.bytes().all(|b| b.is_ascii_uppercase())) =>
        {
            rule(Match { methods: values, ..Match::default() })
        }
        "path" => path(&how, any_case, &values).unwrap_or_else(unknown),
        // Nothing is decrypted here.
        "ssl_fc" if values.is_empty() => Test::Rule(Vec::new()),
        "always_true" => Test::Always,
        "always_false" => Test::Rule(Vec::new()),
        _ => match criterion.strip_prefix("http_auth(").and_then(|rest| rest.strip_suffix(')')) {
            Some(list) => Test::Login(list.to_owned()),
            None => unknown(),
        },
    }
}

fn path(how: &str, any_case: bool, values: &[String]) -> Option<Test> {
    let is_plain = |path: &String| {
        path.starts_with('/')
            && !path.contains(['*', '%', '?'])
            && !path.contains("//")
            && path.bytes().all(|b| b.is_ascii_graphic())
            && !path.split('/').any(|part| part == "." || part == "..")
    };
    if values.is_empty() {
        return None;
    }
    let case = if any_case { "(?i)" } else { "" };
    let all = || values.iter().map(|value| escape(value)).collect::<Vec<_>>().join("|");
    let parts = if values.len() == 1 { all() } else { format!("(?:{})", all()) };
    Some(match how {
        "str" | "beg" if !any_case && values.iter().all(is_plain) => {
            let star = if how == "beg" { "*" } else { "" };
            let paths = values.iter().map(|value| format!("{value}{star}")).collect();
            Test::Rule(vec![Match { path: paths, ..Match::default() }])
        }
        "str" => Test::Path(format!("{case}^{parts}$")),
        "beg" => Test::Path(format!("{case}^{parts}")),
        "end" => Test::Path(format!("{case}{parts}$")),
        "sub" => Test::Path(format!("{case}{parts}")),
        "reg" if values.len() == 1 => {
            let expression = format!("{case}{}", values[0]);
            crate::import::is_expression(&expression).then_some(Test::Path(expression))?
        }
        _ => return None,
    })
}
