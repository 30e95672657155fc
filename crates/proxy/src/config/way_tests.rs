//! Where rules lead: the first that matches decides, by name as long as no address has to be known.

use super::*;
use crate::config::Config;
use std::path::Path;

/// The only listener of a configuration with these rules. `of_it`: further keys of the listener.
fn listener(of_it: &str, rules: &str) -> ListenerConfig {
    let up = |name: &str, more: &str| {
        format!("[upstream.{name}]\nprotocol = \"socks5\"\nservers = \"{name}.test:1080\"\n{more}\n")
    };
    let text = format!(
        "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:1\"\n{of_it}\nrules = [\n{rules}\n]\n{}{}[pool.db]\nservers = [\"a:1\"]\n",
        up("names", "resolve = false"),
        up("addresses", "resolve = true\ndirect = \"192.0.2.0/24\""),
    );
    Config::from_toml(&text, Path::new("l.toml")).unwrap().listeners.remove(0)
}

/// Says where a target goes: by its name, or, for a name that has to be looked up, by this address.
fn goes(listener: &ListenerConfig, target: &str, at: &str) -> String {
    let (subject, target): (_, Target) = (Subject::by("10.9.9.9".parse().unwrap()), target.parse().unwrap());
    let said = |way: &Way| match way {
        Way::Direct => "direct".to_owned(),
        Way::Through(upstream) => upstream.name.clone(),
        Way::Pool(pool) => format!("pool {pool}"),
    };
    match listener.by_name(&listener.rules, &subject, &target) {
        Err(denied) => format!("{denied}, by name"),
        Ok(Some((_, way))) => format!("{}, by name", said(&way)),
        Ok(None) => {
            let address = SocketAddr::new(at.parse().unwrap(), target.port);
            match listener.rules.judge(&subject, &target, address) {
                Err(denied) => denied.to_string(),
                Ok(allowed) => said(&listener.way(allowed.way, &target, None)),
            }
        }
    }
}

const RULES: &str = "{ action = \"deny\", target = \"10.6.0.0/16\" },
{ action = \"allow\", target = \"*.far\", upstream = \"names\" },
{ action = \"allow\", target = \"*.near\", upstream = \"addresses\" },
{ action = \"allow\", target = \"db.internal\", ports = 5432, pool = \"db\" },
{ action = \"allow\", target = [\"10.0.0.0/8\", \"2001:db8::/32\"], upstream = \"names\" },
{ action = \"deny\", target = \"never\" },";

#[test]
fn the_first_rule_that_matches_leads() {
    let listener = listener("", RULES);
    for (target, at, want) in [
        ("a.far:1", "", "names, by name"),
        ("a.near:1", "192.0.2.1", "addresses"),
        ("a.near:1", "10.6.1.1", "rule 1"),
        ("db.internal:5432", "", "pool db, by name"),
        ("db.internal:5433", "192.0.2.1", "direct"),
        // the address decides where no name does
        ("other:1", "10.1.1.1", "names"),
        ("other:1", "10.6.1.1", "rule 1"),
        ("other:1", "2001:db8::1", "names"),
        ("other:1", "192.0.2.1", "direct"),
        ("never:1", "192.0.2.1", "rule 6"),
        ("10.1.1.1:1", "10.1.1.1", "names"),
        ("[::ffff:10.1.1.1]:1", "10.1.1.1", "names"),
        ("[2001:db8::1]:1", "2001:db8::1", "names"),
        ("10.6.1.1:1", "10.6.1.1", "rule 1"),
        ("192.0.2.1:1", "192.0.2.1", "direct"),
        ("127.0.0.1:1", "127.0.0.1", "guarded address (loopback)"),
    ] {
        assert_eq!(goes(&listener, target, at), want, "{target} at {at}");
    }
}

#[test]
fn without_a_rule_the_listener_leads() {
    let rules = "{ action = \"allow\", target = \"*.here\", upstream = false },
        { action = \"allow\", target = \"*.near\", upstream = \"addresses\" },
        { action = \"deny\", target = \"never\" },
        { action = \"allow\", target = \"10.0.0.0/8\", upstream = false },";
    let listener = listener("upstream = \"names\"", rules);
    for (target, at, want) in [
        ("a.here:1", "198.51.100.1", "direct"),
        ("a.near:1", "198.51.100.1", "addresses"),
        ("other:1", "", "names, by name"),
        ("never:1", "", "rule 3, by name"),
        ("10.1.1.1:1", "10.1.1.1", "direct"),
        ("198.51.100.1:1", "198.51.100.1", "names"),
    ] {
        assert_eq!(goes(&listener, target, at), want, "{target} at {at}");
    }
}

/// What an upstream proxy is not for goes straight to its target.
#[test]
fn direct_targets_of_an_upstream_proxy() {
    let listener = listener("", "{ action = \"allow\", upstream = \"addresses\" }");
    assert_eq!(goes(&listener, "192.0.2.1:1", "192.0.2.1"), "direct");
    assert_eq!(goes(&listener, "198.51.100.1:1", "198.51.100.1"), "addresses");
    let (subject, target) = (Subject::by("10.9.9.9".parse().unwrap()), "192.0.2.1:1".parse().unwrap());
    assert_eq!(listener.rules.check_here(&subject, &target, "192.0.2.1:1".parse().unwrap()), Ok(()));
}

/// Peers of BIND, datagrams and look-ups cannot go where a rule leads, nor straight to the target.
#[test]
fn only_connections_are_led() {
    let rules = listener("", RULES).rules;
    let subject = Subject::by("10.9.9.9".parse().unwrap());
    for (target, at, want) in [
        ("a.far:1", "192.0.2.1", Err(Denied::Led(2))),
        ("db.internal:5432", "192.0.2.1", Err(Denied::Led(4))),
        ("other:1", "192.0.2.1", Ok(())),
        ("other:1", "10.1.1.1", Err(Denied::Led(5))),
        ("10.1.1.1:1", "10.1.1.1", Err(Denied::Led(5))),
        ("10.6.1.1:1", "10.6.1.1", Err(Denied::Rule(1))),
    ] {
        let target: Target = target.parse().unwrap();
        let server = SocketAddr::new(at.parse().unwrap(), target.port);
        let judged =
            rules.check_name_here(&subject, &target).and_then(|()| rules.check_here(&subject, &target, server));
        assert_eq!(judged, want, "{target} at {at}");
        let named = rules.check_name_here(&subject, &target);
        assert_eq!(named.is_err(), matches!(want, Err(Denied::Led(2 | 4))), "{target} is not looked up");
    }
}

/// Says of a client without a connection who asks; `wanted`: the address that it has connected to.
fn asker(listener: &ListenerConfig, client: &str, target: &str, wanted: Option<&str>) -> Asker {
    let target: Target = target.parse().unwrap();
    Asker {
        rules: listener.rules.clone(),
        upstream: listener.upstream.clone(),
        client: client.parse().unwrap(),
        method: Some("GET".into()),
        path: None,
        user: None,
        wanted: wanted.map(|at| at.parse().unwrap()),
        known: target.host.ip().map(|ip| SocketAddr::new(ip, target.port)),
        target,
    }
}

/// A reply that others were sent may have come by way of a proxy, whose address tells nothing of the target.
#[test]
fn stored_replies() {
    let by_client = "{ action = \"deny\", client = \"10.9.9.9\", target = [\"10.0.0.0/8\", \"*.far\"] },\n";
    let led = listener("", &format!("{by_client}{RULES}"));
    let came = |way: &str, judged: &str| Some(Came { way: way.into(), judged: judged.parse().ok() });
    let (straight, names) = (None, "through names");
    let may = |listener: &ListenerConfig, client, target, server: &str, came: &Option<Came>| {
        asker(listener, client, target, None).may_have(server.parse().unwrap(), came.as_ref())
    };
    let proxy = "192.0.2.9:1080";
    for (client, target, server, came, want) in [
        ("10.1.1.1", "a.far:80", proxy, &came(names, ""), true),
        ("10.9.9.9", "a.far:80", proxy, &came(names, ""), false),
        ("10.1.1.1", "a.far:80", "192.0.2.1:80", &straight, false),
        ("10.1.1.1", "a.far:80", proxy, &came("through addresses", ""), false),
        // by the address that was judged, and the way that it leads
        ("10.1.1.1", "other:80", proxy, &came(names, "10.1.1.1:80"), true),
        ("10.9.9.9", "other:80", proxy, &came(names, "10.1.1.1:80"), false),
        ("10.1.1.1", "other:80", proxy, &came(names, "192.0.2.1:80"), false),
        ("10.1.1.1", "other:80", proxy, &came("pool db", "10.1.1.1:80"), false),
        ("10.1.1.1", "other:80", "192.0.2.1:80", &straight, true),
        ("10.1.1.1", "other:80", "10.1.1.1:80", &straight, false),
        // it is not known which address that was, or it is guarded
        ("10.1.1.1", "other:80", proxy, &came(names, ""), false),
        ("10.1.1.1", "other:80", "127.0.0.1:80", &straight, false),
        ("10.1.1.1", "other:80", proxy, &came(names, "127.0.0.1:80"), false),
        ("10.1.1.1", "10.1.1.1:80", proxy, &came(names, "10.1.1.1:80"), true),
        ("10.9.9.9", "10.1.1.1:80", proxy, &came(names, "10.1.1.1:80"), false),
        ("10.1.1.1", "db.internal:5432", "192.0.2.7:1", &came("pool db", ""), true),
    ] {
        assert_eq!(may(&led, client, target, server, came), want, "{client} {target} {server} {came:?}");
    }
    // a guarded address that rules with names only have not opened
    let by_name = listener("", "{ action = \"allow\", target = \"*.far\", upstream = \"names\" }");
    assert!(!may(&by_name, "10.1.1.1", "other:80", "127.0.0.1:80", &straight));
    assert!(may(&by_name, "10.1.1.1", "other:80", "192.0.2.1:80", &straight));
    // names that a rule of the listener's upstream proxy leaves alone
    let of_listener = listener(
        "upstream = \"names\"",
        "{ action = \"deny\", target = \"10.6.0.0/16\" }, { action = \"allow\", target = \"*.here\", upstream = false }",
    );
    for (target, server, came, want) in [
        ("a.here:80", "198.51.100.1:80", &straight, true),
        ("a.here:80", "10.6.1.1:80", &straight, false),
        ("a.here:80", proxy, &came(names, ""), false),
        ("other:80", proxy, &came(names, ""), true),
        ("other:80", "198.51.100.1:80", &straight, false),
    ] {
        assert_eq!(may(&of_listener, "10.1.1.1", target, server, came), want, "{target} {server} {came:?}");
    }
    let nothing_leads = listener("", by_client);
    assert!(may(&nothing_leads, "10.9.9.9", "other:80", "192.0.2.1:80", &straight));
    assert!(!may(&nothing_leads, "10.9.9.9", "other:80", "10.1.1.1:80", &straight));
    assert!(!may(&nothing_leads, "10.9.9.9", "other:80", proxy, &came(names, "192.0.2.1:80")));
}

/// What clients ask for who know of no proxy has the address that they have connected to.
#[test]
fn stored_replies_for_intercepted_requests() {
    let of_it = "transparent = true\n";
    let rules = "{ action = \"deny\", client = \"10.9.9.9\", target = \"10.6.0.0/16\" },
        { action = \"allow\", target = \"10.0.0.0/8\", upstream = \"names\" },
        { action = \"allow\", target = \"*.far\", upstream = \"names\" },";
    let listener = listener(of_it, rules);
    let may = |client, wanted, came: &Option<Came>| {
        asker(&listener, client, "a.test:80", Some(wanted)).may_have(wanted.parse().unwrap(), came.as_ref())
    };
    let led = |at: &str| Some(Came { way: "through names".into(), judged: at.parse().ok() });
    for (client, wanted, came, want) in [
        ("10.1.1.1", "10.6.1.1:80", led("10.6.1.1:80"), true),
        ("10.9.9.9", "10.6.1.1:80", led("10.6.1.1:80"), false),
        ("10.1.1.1", "10.6.1.1:80", None, false),
        ("10.1.1.1", "192.0.2.1:80", None, true),
        ("10.1.1.1", "192.0.2.1:80", led("192.0.2.1:80"), false),
    ] {
        assert_eq!(may(client, wanted, &came), want, "{client} {wanted} {came:?}");
    }
    assert_eq!(asker(&listener, "10.1.1.1", "a.far:80", Some("10.6.1.1:80")).is_led().unwrap(), "through names");
    assert_eq!(asker(&listener, "10.1.1.1", "a.test:80", Some("192.0.2.1:80")).is_led(), None);
}

/// A reload may judge by later rules, which lead and name addresses, or do not.
#[test]
fn later_rules_of_a_listener_count() {
    let rules = |text: &str| listener("", text).rules;
    let leading = "{ action = \"deny\", target = \"10.6.0.0/16\" }, { action = \"allow\", target = \"*.far\", upstream = \"names\" }";
    for (before, after) in [("", leading), (leading, "")] {
        let (mut one, mut two) = (rules(before), rules(after));
        one.follow(None);
        two.follow(Some(&one));
        assert_eq!((one.lead(), two.lead()), (!before.is_empty(), !after.is_empty()));
        two.replace_earlier();
        assert_eq!((one.lead(), two.lead()), (!after.is_empty(), !after.is_empty()));
        let held = ListenerConfig { rules: one, ..listener("", before) };
        let far = asker(&held, "10.1.1.1", "a.far:80", None);
        assert_eq!(far.is_led().is_some(), !after.is_empty());
        assert_eq!(goes(&held, "a.far:1", "192.0.2.1") == "names, by name", !after.is_empty());
    }
}

/// Who wants to know an address only has no port.
#[test]
fn names_that_lead_elsewhere_at_some_port_are_not_looked_up() {
    let rules = "{ action = \"deny\", target = \"mixed.internal\", ports = 1 },
        { action = \"allow\", target = \"db.internal\", ports = [1, \"5432-5433\"], pool = \"db\" },
        { action = \"allow\", target = \"mixed.internal\", ports = 1, pool = \"db\" },
        { action = \"allow\", client = \"10.8.8.8\", target = \"other.internal\", ports = 1, pool = \"db\" },
        { action = \"allow\", target = \"*.near\", ports = 80 },";
    let listener = listener("", rules);
    let subject = Subject::by("10.9.9.9".parse().unwrap());
    for (name, want) in [
        ("db.internal", Err(Denied::Led(2))),
        // no connection gets to the rule that leads
        ("mixed.internal", Ok(())),
        ("other.internal", Ok(())),
        ("a.near", Ok(())),
        ("other", Ok(())),
    ] {
        for port in [0, 80, 5432] {
            let target = Target { host: crate::target::Host::Name(name.into()), port };
            assert_eq!(listener.rules.check_look_up(&subject, &target), want, "{name}:{port}");
        }
    }
}

/// Where no rule leads, a name costs as many rules as without rules that lead. Where some do, those by address cost nothing.
#[test]
fn rules_by_address_cost_names_nothing() {
    let prefixes: String = (0..1000)
        .map(|n| format!("{{ action = \"deny\", target = \"10.{}.{}.0/24\" }},\n", n / 256, n % 256))
        .collect();
    let looked_at = |what: &mut dyn FnMut()| {
        let before = crate::access::tests::LOOKED_AT.get();
        what();
        crate::access::tests::LOOKED_AT.get() - before
    };
    let (subject, target) = (Subject::by("10.9.9.9".parse().unwrap()), "a.far:80".parse::<Target>().unwrap());
    let at = SocketAddr::from(([192, 0, 2, 1], 80));
    let count = |listener: &ListenerConfig| {
        let rules = &listener.rules;
        [
            looked_at(&mut || _ = rules.check_name(&subject, &target)),
            looked_at(&mut || _ = listener.by_name(rules, &subject, &target)),
            looked_at(&mut || _ = rules.judge(&subject, &target, at)),
            looked_at(&mut || _ = rules.check_name_here(&subject, &target)),
            looked_at(&mut || _ = rules.check_look_up(&subject, &target)),
            looked_at(&mut || _ = asker(listener, "10.9.9.9", "a.far:80", None).is_led()),
            looked_at(&mut || _ = asker(listener, "10.9.9.9", "a.far:80", None).may_have(at, None)),
        ]
    };
    // the first one may match: only its address decides
    assert_eq!(count(&listener("", &prefixes)), [1, 0, 0, 1, 1, 0, 0]);
    let allow = "{ action = \"allow\", target = \"*.far\" }";
    assert_eq!(count(&listener("", &format!("{prefixes}{allow}"))), [1, 0, 1, 1, 1, 0, 1]);
    let far = "{ action = \"allow\", target = \"*.far\", upstream = \"names\" }";
    assert_eq!(count(&listener("", &format!("{prefixes}{far}"))), [1, 1, 1, 2, 2, 1, 1]);
    assert_eq!(count(&listener("upstream = \"names\"", &prefixes)), [1, 0, 0, 1, 1, 0, 0]);
}
