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

/// A reply that others were sent may have come by way of a proxy, whose address tells nothing of the target.
#[test]
fn stored_replies_of_servers_that_the_rules_do_not_know() {
    let may = |listener: &ListenerConfig, client: &str, target: &str, server: &str| {
        let subject = Subject::by(client.parse().unwrap());
        listener.may_have(&subject, &target.parse().unwrap(), server.parse().unwrap())
    };
    let by_client = "{ action = \"deny\", client = \"10.9.9.9\", target = [\"10.0.0.0/8\", \"*.far\"] },\n";
    let led = listener("", &format!("{by_client}{RULES}"));
    for (client, target, server, want) in [
        ("10.1.1.1", "a.far:80", "192.0.2.9:1080", true),
        ("10.9.9.9", "a.far:80", "192.0.2.9:1080", false),
        // it may have been that of the proxy
        ("10.1.1.1", "other:80", "192.0.2.9:1080", false),
        ("10.1.1.1", "10.1.1.1:80", "192.0.2.9:1080", true),
        ("10.9.9.9", "10.1.1.1:80", "192.0.2.9:1080", false),
    ] {
        assert_eq!(may(&led, client, target, server), want, "{client} {target}");
    }
    let straight = listener("", by_client);
    assert!(straight.is_straight() && !led.is_straight());
    assert!(may(&straight, "10.9.9.9", "other:80", "192.0.2.1:80"));
    assert!(!may(&straight, "10.9.9.9", "other:80", "10.1.1.1:80"));
}
