//! Rules: order, matching, guarded addresses and attempts to get around them.

use super::*;
use std::cell::Cell;

thread_local! {
    /// How many rules this thread has looked at.
    pub(crate) static LOOKED_AT: Cell<usize> = const { Cell::new(0) };
}

/// `allow|deny [from CLIENT,..] [to TARGET,..] [port PORTS,..] [users USER,..] [methods METHOD,..] [path PATH,..]`
fn rule(text: &str) -> Rule {
    let mut words = text.split(' ');
    let action = if words.next() == Some("allow") { Action::Allow } else { Action::Deny };
    let (client, target, ports) = (vec![], vec![], vec![]);
    let (users, methods, path, times) = (vec![], vec![], vec![], Times::default());
    let mut rule = Rule { action, client, target, ports, users, methods, path, times, way: None };
    while let (Some(key), Some(values)) = (words.next(), words.next()) {
        for value in values.split(',') {
            match key {
                "from" => rule.client.push(value.parse().unwrap()),
                "to" => rule.target.push(value.parse().unwrap()),
                "users" => rule.users.push(value.into()),
                "methods" => rule.methods.push(value.into()),
                "path" => rule.path.push(value.parse().unwrap()),
                _ => rule.ports.push(value.parse().unwrap()),
            }
        }
    }
    rule
}

fn rules(list: &[&str], guarded: bool) -> Rules {
    Rules::new(list.iter().map(|t| rule(t)).collect(), guarded)
}

const CLIENT: &str = "10.1.2.3";

/// Checks `target`, resolved to `server`.
fn named(rules: &Rules, target: &str, server: &str) -> Result<(), Denied> {
    let target: Target = target.parse().unwrap();
    let server = SocketAddr::new(server.parse().unwrap(), target.port);
    rules.check(&Subject::by(CLIENT.parse().unwrap()), &target, server)
}

fn addressed(rules: &Rules, server: &str) -> Result<(), Denied> {
    let server: SocketAddr = server.parse().unwrap();
    rules.check(&Subject::by(CLIENT.parse().unwrap()), &server.into(), server)
}

#[test]
fn no_rules_allow_what_is_not_guarded() {
    assert_eq!(addressed(&rules(&[], true), "192.0.2.1:80"), Ok(()));
    assert_eq!(addressed(&rules(&[], true), "10.0.0.1:80"), Ok(()));
    assert_eq!(addressed(&rules(&[], true), "127.0.0.1:80"), Err(Denied::Guarded("loopback")));
    assert_eq!(addressed(&rules(&[], false), "127.0.0.1:80"), Ok(()));
}

#[test]
fn the_first_match_decides() {
    let r = rules(&["allow to 192.0.2.1", "deny to 192.0.2.0/24", "allow", "deny"], true);
    assert_eq!(addressed(&r, "192.0.2.1:80"), Ok(()));
    assert_eq!(addressed(&r, "192.0.2.2:80"), Err(Denied::Rule(2)));
    assert_eq!(addressed(&r, "198.51.100.1:80"), Ok(()));
}

#[test]
fn clients_and_ports() {
    let r = rules(&["allow from 10.0.0.0/8 port 443,8000-8999", "deny"], true);
    assert_eq!(addressed(&r, "192.0.2.1:443"), Ok(()));
    assert_eq!(addressed(&r, "192.0.2.1:8500"), Ok(()));
    assert_eq!(addressed(&r, "192.0.2.1:9000"), Err(Denied::Rule(2)));
    assert_eq!(addressed(&rules(&["deny from 10.1.2.4"], true), "192.0.2.1:1"), Ok(()));
    assert_eq!(addressed(&rules(&["deny from ::ffff:10.1.0.0/112"], true), "192.0.2.1:1"), Err(Denied::Rule(1)));
    let mapped_client = "::ffff:10.1.2.3".parse().unwrap();
    let server = "192.0.2.1:1".parse().unwrap();
    let r = rules(&["deny from 10.1.2.3"], true);
    assert_eq!(r.check(&Subject::by(mapped_client), &Target::from(server), server), Err(Denied::Rule(1)));
}

#[test]
fn names_and_suffixes() {
    let r = rules(&["deny to *.example.org,ads.net"], true);
    for (name, denied) in [
        ("www.example.org:80", true),
        ("a.b.example.org:80", true),
        ("WWW.Example.Org.:80", true),
        ("ads.net:80", true),
        ("example.org:80", false),
        ("badexample.org:80", false),
        ("www.ads.net:80", false),
    ] {
        let want = if denied { Err(Denied::Rule(1)) } else { Ok(()) };
        assert_eq!(named(&r, name, "192.0.2.1"), want, "{name}");
        assert_eq!(r.check_name(&Subject::by(CLIENT.parse().unwrap()), &name.parse().unwrap()), want, "{name}");
    }
}

/// The resolved address is checked, even if the name is allowed.
#[test]
fn rebinding_does_not_help() {
    for list in [&[][..], &["allow"], &["allow to good.org"], &["allow to *.org,0.0.0.0/0,::/0"]] {
        let r = rules(list, true);
        for server in ["127.0.0.1", "::1", "169.254.169.254", "fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::7f00:1"] {
            assert!(matches!(named(&r, "good.org:80", server), Err(Denied::Guarded(_))), "{list:?} {server}");
        }
    }
    assert_eq!(named(&rules(&["deny to 10.0.0.0/8"], true), "good.org:80", "10.9.9.9"), Err(Denied::Rule(1)));
}

#[test]
fn a_rule_opens_what_it_names() {
    let r = rules(&["allow to 127.0.0.0/8 port 8080", "allow to 169.254.169.254,::1"], true);
    assert_eq!(addressed(&r, "127.0.0.1:8080"), Ok(()));
    assert_eq!(addressed(&r, "[::ffff:127.0.0.1]:8080"), Ok(()));
    assert_eq!(addressed(&r, "127.0.0.1:80"), Err(Denied::Guarded("loopback")));
    assert_eq!(addressed(&r, "169.254.169.254:80"), Ok(()));
    assert_eq!(addressed(&r, "169.254.169.253:80"), Err(Denied::Guarded("link-local")));
    assert_eq!(addressed(&r, "[::1]:80"), Ok(()));
    // Only the plain address was opened, not the IPv6 address that embeds it.
    assert_eq!(addressed(&r, "[64:ff9b::7f00:1]:8080"), Err(Denied::Guarded("loopback")));
}

#[test]
fn a_deny_sees_through_wrapping() {
    let r = rules(&["deny to 10.0.0.0/8"], false);
    for server in ["10.0.0.1:80", "[::ffff:10.0.0.1]:80", "[2002:a00:1::]:80", "[64:ff9b::a00:1]:80"] {
        assert_eq!(addressed(&r, server), Err(Denied::Rule(1)), "{server}");
    }
}

#[test]
fn what_the_name_decides_is_not_looked_up() {
    let check = |list: &[&str], target: &str| {
        rules(list, true).check_name(&Subject::by(CLIENT.parse().unwrap()), &target.parse().unwrap())
    };
    assert_eq!(check(&["deny"], "a.org:80"), Err(Denied::Rule(1)));
    assert_eq!(check(&["deny port 25"], "a.org:25"), Err(Denied::Rule(1)));
    assert_eq!(check(&["allow to b.org", "deny"], "a.org:80"), Err(Denied::Rule(2)));
    assert_eq!(check(&["allow to a.org", "deny"], "a.org:80"), Ok(()));
    assert_eq!(check(&["allow to 10.0.0.0/8", "deny"], "a.org:80"), Ok(()));
    assert_eq!(check(&[], "a.org:80"), Ok(()));
}

#[test]
fn texts() {
    assert_eq!("443".parse(), Ok(PortRange { first: 443, last: 443 }));
    assert_eq!("1-65535".parse(), Ok(PortRange { first: 1, last: 65535 }));
    for text in ["0", "2-1", "x", "1-", "65536", "0-5", ""] {
        assert_eq!(text.parse::<PortRange>(), Err(PatternError::Ports), "{text}");
    }
    for (text, net) in
        [("10.9.9.9/8", "10.0.0.0/8"), ("::ffff:10.0.0.1/104", "10.0.0.0/8"), ("fe80::1/64", "fe80::/64")]
    {
        assert_eq!(text.parse::<Prefix>(), Err(PatternError::HostBits(net.parse().unwrap())), "{text}");
        assert_eq!(text.parse::<Pattern>(), Err(PatternError::HostBits(net.parse().unwrap())), "{text}");
    }
    assert_eq!("::ffff:10.0.0.0/104".parse::<Prefix>().unwrap().0.to_string(), "10.0.0.0/8");
    assert_eq!("10.0.0.0/33".parse::<Prefix>(), Err(PatternError::Prefix));
    assert_eq!("*.Example.Org".parse(), Ok(Pattern::Below("example.org".into())));
    assert_eq!("localhost".parse(), Ok(Pattern::Name("localhost".into())));
    assert_eq!("*".parse::<Pattern>(), Err(PatternError::Star));
    for text in ["", "*.", "a*b", "10.0.0.0/33", "*.*.org", "a b"] {
        assert_eq!(text.parse::<Pattern>(), Err(PatternError::Target), "{text}");
    }
}

#[test]
fn users() {
    let r = rules(&["allow users ann to 10.0.0.0/8", "deny users bob", "deny to 10.0.0.0/8"], false);
    let check = |user, server: &str| {
        let (subject, server) = (Subject::by(CLIENT.parse().unwrap()).of(user), server.parse().unwrap());
        r.check(&subject, &Target::from(server), server)
    };
    assert_eq!(check(Some("ann"), "10.0.0.1:80"), Ok(()));
    assert_eq!(check(Some("ANN"), "10.0.0.1:80"), Err(Denied::Rule(3)));
    assert_eq!(check(Some("bob"), "192.0.2.1:80"), Err(Denied::Rule(2)));
    // one that has not logged in is no user
    assert_eq!([check(None, "192.0.2.1:80"), check(None, "10.0.0.1:80")], [Ok(()), Err(Denied::Rule(3))]);
    assert!(!rule("deny users ann").matches_all());
}

#[test]
fn methods_and_paths() {
    let r = rules(&["deny methods POST,PUT path /admin*,/x", "allow methods GET", "deny path /only"], false);
    let server: SocketAddr = "192.0.2.1:80".parse().unwrap();
    let check = |method, path| {
        let subject = Subject { client: CLIENT.parse().unwrap(), method, path, user: None };
        assert_eq!(r.check(&subject, &server.into(), server), r.check_name(&subject, &server.into()));
        r.check(&subject, &server.into(), server)
    };
    assert_eq!(check(Some("POST"), Some("/admin/users")), Err(Denied::Rule(1)));
    assert_eq!(check(Some("POST"), Some("/administrator")), Err(Denied::Rule(1)));
    assert_eq!(check(Some("POST"), Some("/x")), Err(Denied::Rule(1)));
    assert_eq!(check(Some("POST"), Some("/x/y")), Ok(()));
    assert_eq!(check(Some("GET"), Some("/only")), Ok(()));
    assert_eq!(check(Some("PATCH"), Some("/only")), Err(Denied::Rule(3)));
    // methods are case-sensitive; rules with methods or paths do not match requests without them
    assert_eq!(check(Some("post"), Some("/x")), Ok(()));
    assert_eq!((check(None, None), check(Some("CONNECT"), None)), (Ok(()), Ok(())));
    for path in ["admin", "/a*b", "/a/../b", "/%61", "*", ""] {
        assert_eq!(path.parse::<PathPattern>(), Err(PatternError::Path), "{path}");
    }
}

/// Returns the rules that are tried for this request, by address, by name before it is looked up, and by name alone.
fn tried(rules: &Rules, client: &str, target: &str, ip: &str) -> [Vec<usize>; 3] {
    let (client, target) = (client.parse().unwrap(), target.parse::<Target>().unwrap());
    let numbers = |known| {
        let subject = Subject::by(client);
        let all = rules.filed.own.candidates(&subject, &target.host, known, target.port);
        all.map(|(n, _)| n).collect()
    };
    [Knowing::Address(ip.parse().unwrap()), Knowing::Name, Knowing::NameAlone].map(numbers)
}

#[test]
fn of_many_rules_few_are_tried() {
    const MANY: usize = 20_000;
    let many = |text: fn(usize) -> String| {
        let mut list: Vec<Rule> = (0..MANY).map(|n| rule(&text(n))).collect();
        list.push(rule("deny"));
        Rules::new(list, true)
    };
    let ask = |rules: &Rules, target: &str, ip: &str| tried(rules, "10.0.1.44", target, ip).map(|t| t.len());
    let by_address = many(|n| format!("deny to 192.{}.{}.0/24", n >> 8, n & 255));
    assert_eq!(ask(&by_address, "192.1.44.7:80", "192.1.44.7")[0], 2);
    assert_eq!(ask(&by_address, "example.org:80", "192.1.44.7"), [2, MANY + 1, 1]);
    let by_client = many(|n| format!("allow from 10.0.{}.{} to 192.0.2.0/24", n >> 8, n & 255));
    assert_eq!(ask(&by_client, "example.org:80", "192.0.2.7"), [2, 2, 1]);
    let by_port = many(|n| format!("allow from 10.0.0.0/8 port {}", n + 1));
    assert_eq!(ask(&by_port, "example.org:80", "192.0.2.7"), [2; 3]);
    let by_name = many(|n| format!("deny to a{n}.example.org,*.b{n}.example.org port 1-9999"));
    assert_eq!(ask(&by_name, "c.b300.example.org:80", "192.0.2.7"), [2; 3]);
    assert_eq!(ask(&by_name, "a300.example.org:80", "192.0.2.7"), [2; 3]);
    assert_eq!(ask(&by_name, "b300.example.org:80", "192.0.2.7"), [1; 3]);
    let both = many(|n| format!("deny to 192.0.2.0/24,a{n}.example.org"));
    assert_eq!(ask(&both, "a300.example.org:80", "198.51.100.7"), [2, MANY + 1, 2]);
}

/// Compares the index with a linear search. Few addresses, names and ports are combined, so that rules overlap.
#[test]
fn none_is_left_out_that_matches() {
    use rand::{RngExt, SeedableRng, rngs::SmallRng};
    const CLIENTS: [&str; 6] =
        ["10.1.0.0/16", "10.1.2.0/24", "10.1.2.3", "2001:db8::/32", "0.0.0.0/0", "::ffff:10.1.2.3"];
    const TARGETS: [&str; 9] = [
        "192.0.2.0/24",
        "192.0.2.7",
        "0.0.0.0/0",
        "64:ff9b::/96",
        "2001:db8::7",
        "example.org",
        "*.example.org",
        "*.org",
        "a.b.example.org",
    ];
    const PORTS: [&str; 4] = ["80", "443", "1-65535", "70-90"];
    let mut rng = SmallRng::seed_from_u64(7);
    let mut matches = 0;
    for _ in 0..300 {
        let mut pick = |from: &[&str], word: &str| {
            let some: Vec<&str> = from.iter().filter(|_| rng.random_bool(0.3)).copied().collect();
            if some.is_empty() { String::new() } else { format!(" {word} {}", some.join(",")) }
        };
        let list = (0..40)
            .map(|_| rule(&format!("deny{}{}{}", pick(&CLIENTS, "from"), pick(&TARGETS, "to"), pick(&PORTS, "port"))));
        let rules = Rules::new(list.collect(), false);
        for client in ["10.1.2.3", "10.1.9.9", "2001:db8::1", "::ffff:10.1.2.3"] {
            for target in ["example.org", "a.b.example.org", "192.0.2.7", "org"] {
                for (ip, port) in [("192.0.2.7", 80), ("64:ff9b::c000:207", 443), ("2001:db8::7", 8080)] {
                    let (subject, ip) = (Subject::by(client.parse().unwrap()), ip.parse().unwrap());
                    let host = format!("{target}:{port}").parse::<Target>().unwrap().host;
                    let matching = |known: Knowing| {
                        let fits = |rule: &&Rule| {
                            let there = match known {
                                Knowing::Address(ip) => rule.denies(&host, ip) || rule.allows(&host, ip, None),
                                Knowing::Name => rule.names_addresses() || rule.names(&host),
                                Knowing::NameAlone => rule.names(&host),
                            };
                            rule.covers(&subject, port, &Now::default()) && there
                        };
                        let all = rules.list().iter().enumerate().filter(|(_, rule)| fits(rule));
                        all.map(|(n, _)| n).collect::<Vec<_>>()
                    };
                    for known in [Knowing::Address(ip), Knowing::Name, Knowing::NameAlone] {
                        let tried = rules.filed.own.candidates(&subject, &host, known, port);
                        let tried: Vec<_> = tried.map(|(n, _)| n).collect();
                        let matching = matching(known);
                        assert!(tried.is_sorted_by(|a, b| a < b), "{tried:?}");
                        assert!(matching.iter().all(|n| tried.contains(n)), "{matching:?} of {tried:?}");
                        matches += matching.len();
                    }
                }
            }
        }
    }
    assert!(matches > 10_000, "{matches}");
}

/// However many rules ask what time it is, a decision is of one moment, and without them nobody asks.
#[test]
fn the_clock_is_read_once() {
    // none holds today, nor tomorrow
    let today = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    let day = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"][(today as usize + 3) % 7];
    let timed = |times: &Times| Rules::new(vec![Rule { times: times.clone(), ..rule("deny") }; 3], false);
    let with_times = timed(&Times { hours: Vec::new(), days: vec![day.parse().unwrap()] });
    let without = Rules::new(vec![rule("deny users nobody"); 3], false);
    type Asks = fn(&Rules, &Subject<'_>, &Target) -> bool;
    let ways: [Asks; 3] = [
        |rules, subject, target| rules.judge(subject, target, SocketAddr::from(([198, 51, 100, 1], 2))).is_ok(),
        |rules, subject, target| rules.judge_known(subject, target, None).is_ok(),
        |rules, subject, target| rules.check_name(subject, target).is_ok(),
    ];
    for way in ways {
        let readings = [&with_times, &without].map(|rules| {
            let before = times::tests::READINGS.get();
            assert!(way(rules, &Subject::by(CLIENT.parse().unwrap()), &"a.test:2".parse().unwrap()));
            times::tests::READINGS.get() - before
        });
        assert_eq!(readings, [1, 0]);
    }
}
