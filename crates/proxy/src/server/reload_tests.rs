//! Judging again: by whom, and by which address.

use super::*;
use std::path::Path;

/// A listener with these rules, and an upstream proxy for some of its connections. `of_it`: further keys of the listener.
fn listener(of_it: &str, rules: &str) -> ListenerConfig {
    let text = format!(
        "[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1\"\n{of_it}\nrules = [\n{rules}\n]\n\
         [upstream.up]\nprotocol = \"socks5\"\nservers = \"a:1080\"\nresolve = false\n"
    );
    Config::from_toml(&text, Path::new("l.toml")).unwrap().listeners.remove(0)
}

fn flow<'a>(target: &'a str, server: &str, judged: Judged) -> Relayed<'a> {
    Relayed { client: "10.9.9.9".parse().unwrap(), user: None, target, server: server.parse().unwrap(), judged }
}

#[test]
fn messages_are_judged_on_the_roll() {
    let (allowed, forbidden): (Told, Told) = (None, Some("rule 1".into()));
    let roll = |is_forbidden| JudgedBy::Roll { is_forbidden };
    for (flow, is_http, task, want) in [
        (6, true, Some(&allowed), roll(false)),
        (6, true, Some(&forbidden), roll(true)),
        (8, true, Some(&forbidden), roll(true)),
        // it was left by another process, or is a tunnel
        (6, true, None, JudgedBy::List),
        // its client has come after the rules: nobody but the client's task knows by which address it is allowed
        (7, true, None, roll(false)),
        // others are judged here: how they are led is entered before they are listed
        (6, false, Some(&allowed), JudgedBy::List),
        (8, false, None, JudgedBy::List),
    ] {
        assert_eq!(judged_by((flow, is_http), 7, task), want, "{flow} {is_http} {task:?}");
    }
}

/// The configuration may have another upstream proxy now, or none: what counts is how the connection went.
#[test]
fn a_flow_is_judged_by_the_address_by_which_it_was_allowed() {
    let rules = "{ action = \"allow\", target = [\"*.near\", \"192.0.2.0/24\"], upstream = false },
        { action = \"deny\", target = \"10.0.0.0/8\" },
        { action = \"deny\", target = \"*.never\" },
        { action = \"allow\", target = \"*.far\" },";
    let [leads, straight] =
        ["upstream = \"up\"", ""].map(|of_it| listener(of_it, &rules.replace(", upstream = false", "")));
    let by_rule = listener("upstream = \"up\"", rules);
    let led = |at: Option<&str>| Judged::Led(at.map(|at| at.parse().unwrap()));
    for (target, server, judged, want) in [
        // straight, by a rule or before the listener had an upstream proxy
        ("other:1", "10.1.1.1:1", Judged::Server, Some("rule 2")),
        ("other:1", "198.51.100.1:1", Judged::Server, None),
        ("a.near:1", "10.1.1.1:1", Judged::Server, None),
        // the proxy is at a denied address
        ("other:1", "10.1.1.1:1080", led(Some("198.51.100.1:1")), None),
        ("other:1", "10.1.1.1:1080", led(None), None),
        ("a.never:1", "10.1.1.1:1080", led(None), Some("rule 3")),
        ("other:1", "198.51.100.1:1080", led(Some("10.1.1.1:1")), Some("rule 2")),
        ("10.2.2.2:1", "198.51.100.1:1080", led(Some("10.2.2.2:1")), Some("rule 2")),
    ] {
        for listener in [&leads, &straight, &by_rule] {
            let why = forbids(listener, flow(target, server, judged), &Pools::default());
            assert_eq!(why.as_deref(), want, "{target} {server} {judged:?} {:?}", listener.upstream.is_some());
        }
    }
}

/// Of a message that another process has left, nobody knows how it was led.
#[test]
fn what_is_not_known_forbids_nothing() {
    let rules =
        "{ action = \"deny\", target = [\"10.0.0.0/8\", \"*.never\"] }, { action = \"allow\", target = \"192.0.2.1\" },
        { action = \"deny\" }";
    let [leads, straight] = ["upstream = \"up\"", ""].map(|of_it| listener(of_it, rules));
    for (target, server, of_led, of_straight) in [
        ("other:1", "10.1.1.1:1080", None, Some("rule 1")),
        ("a.never:1", "192.0.2.1:1", Some("rule 1"), Some("rule 1")),
        ("192.0.2.1:1", "10.1.1.1:1080", None, Some("rule 1")),
        ("10.2.2.2:1", "192.0.2.1:1080", Some("rule 1"), None),
    ] {
        for (listener, want) in [(&leads, of_led), (&straight, of_straight)] {
            let why = forbids(listener, flow(target, server, Judged::Unknown), &Pools::default());
            assert_eq!(why.as_deref(), want, "{target} {server}");
        }
    }
}
