//! Rules that lead: what is understood, and what is refused.

use super::*;
use crate::{access::Upstream, config::Config};
use std::{path::Path, sync::Arc};

const REST: &str = "[upstream.up]\nprotocol = \"socks5\"\nservers = \"a:1\"\n[pool.db]\nservers = [\"b:1\"]\n";

fn read(listener: &str, rule: &str) -> Result<Config, String> {
    let text = format!("[[listener]]\nlisten = \"127.0.0.1:1\"\nrules = [{{ {rule} }}]\n{listener}\n{REST}");
    Config::from_toml(&text, Path::new("l.toml")).map_err(|wrong| wrong.to_string())
}

#[test]
fn rules_lead_to_proxies_and_pools() {
    let way = |listener: &str, leads: &str| {
        let config = read(listener, &format!("action = \"allow\", {leads}")).unwrap();
        let way = config.listeners[0].rules.list()[0].way.clone();
        (way, config)
    };
    for listener in [
        "protocol = \"socks5\"",
        "protocol = \"http\"",
        "protocol = \"tls\"",
        "protocol = \"plug\"\ntarget = \"c:1\"",
        "protocol = \"login\"\nlogin = { free = true }",
    ] {
        let (through, config) = way(listener, "upstream = \"up\"");
        assert_eq!(through, Some(Way::Through(config.upstreams[0].clone())), "{listener}");
        let (pool, config) = way(listener, "pool = \"db\"");
        assert_eq!(pool, Some(Way::Pool("db".into())), "{listener}");
        assert_eq!(config.listeners[0].rule_pools().collect::<Vec<_>>(), ["db"]);
        assert_eq!(config.warnings, Vec::<String>::new(), "{listener}");
        assert_eq!(config.listeners[0].pools().next(), None, "only some clients are led there");
    }
    let own = "protocol = \"http\"\nupstream = \"up\"";
    assert_eq!(way(own, "upstream = false").0, Some(Way::Direct));
    assert_eq!(way(own, "pool = \"db\"").0, Some(Way::Pool("db".into())));
    let [unused, no_effect] = &way("protocol = \"http\"", "upstream = false").1.warnings[..] else { panic!() };
    assert!(no_effect.contains("nothing leads to pool db"), "{no_effect}");
    assert!(unused.starts_with("l.toml:3:41: this has no effect"), "{unused}");
    // as an operator reads it again
    let config = way("protocol = \"http\"", "target = \"a\", upstream = \"up\"").1;
    let text = config.listeners[0].rules.list()[0].to_string();
    assert_eq!(text, "{ action = \"allow\", target = [\"a\"], upstream = \"up\" }");
}

#[test]
fn mistakes() {
    let http = "protocol = \"http\"";
    let allow = |leads: &str| format!("action = \"allow\", {leads}");
    for (listener, rule, want) in [
        (http, allow("upstream = \"pu\""), "3:41: there is no upstream proxy \"pu\": add [upstream.pu]"),
        (
            http,
            allow("upstream = \"none\""),
            "3:41: there is no upstream proxy \"none\": add [upstream.none]; in a rule",
        ),
        (http, allow("upstream = true"), "3:41: invalid value: boolean `true`, expected the name of an upstream"),
        (http, allow("upstream = 1"), "3:41: invalid type: integer `1`"),
        (http, allow("pool = \"bd\""), "3:37: there is no pool \"bd\""),
        (http, allow("pool = \"up\""), "3:37: there is no pool \"up\""),
        (http, allow("pool = \"db\", upstream = \"up\""), "3:37: servers of pools are not asked for through a proxy"),
        (http, "action = \"deny\", upstream = \"up\"".into(), "3:40: what a rule denies goes nowhere"),
        (http, "action = \"deny\", pool = \"db\"".into(), "3:36: what a rule denies goes nowhere"),
        ("protocol = \"ftp\"", allow("upstream = \"up\""), "3:41: data connections of FTP"),
        ("protocol = \"ftp\"", allow("pool = \"db\""), "3:37: rules of FTP are about its commands"),
        ("protocol = \"transparent\"", allow("upstream = \"up\""), "3:41: both hosts shake hands"),
        ("protocol = \"transparent\"", allow("pool = \"db\""), "3:37: both hosts shake hands"),
        ("protocol = \"plug\"\npool = \"db\"", allow("upstream = \"up\""), "3:41: servers of pools and sites"),
        ("protocol = \"plug\"\npool = \"db\"", allow("pool = \"db\""), "3:37: clients are led to pools already"),
        ("protocol = \"http\"\nroute = [{ pool = \"db\" }]", allow("pool = \"db\""), "3:37: clients are led to pools"),
        ("protocol = \"tls\"\nroute = [{ pool = \"db\" }]", allow("upstream = \"up\""), "3:41: servers of pools and"),
        ("protocol = \"plug\"\ntransparent = true", allow("pool = \"db\""), "3:37: routed connections go to the"),
        (
            "protocol = \"plug\"\ntarget = \"a:1\"\nhandshake = \"end-to-end\"\npolicy = { splice = \"at-once\" }",
            allow("pool = \"db\""),
            "3:37: both hosts shake hands with each other: remove the key, or the handshake",
        ),
        (
            http,
            "action = \"deny\", target = \"10.0.0.0/8\" }, { action = \"allow\", upstream = \"up\"".into(),
            "3:85: rules before it name addresses",
        ),
    ] {
        let wrong = read(listener, &rule).expect_err(listener);
        assert!(wrong.starts_with(&format!("l.toml:{want}")), "{listener} {rule}: {wrong}");
    }
    // what is led by its address has one, and what comes after a rule does not matter to it
    for rules in [
        "action = \"deny\", target = \"10.6.0.0/16\" }, { action = \"allow\", target = \"10.0.0.0/8\", upstream = \"up\"",
        "action = \"allow\", target = \"*.far\", upstream = \"up\" }, { action = \"deny\", target = \"10.0.0.0/8\"",
    ] {
        assert!(read(http, rules).is_ok(), "{rules}");
    }
}

#[test]
fn upstream_proxies_with_pools() {
    let read = |of_it: &str, more: &str| {
        let listener = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:1\"\nupstream = \"up\"\n";
        let text = format!("{listener}[upstream.up]\nprotocol = \"http\"\n{of_it}\n{more}");
        Config::from_toml(&text, Path::new("l.toml")).map_err(|wrong| wrong.to_string())
    };
    let pool = "[pool.p]\nservers = [\"a:1\", \"b:1\"]\n";
    let config = read("pool = \"p\"", pool).unwrap();
    assert_eq!(config.warnings, Vec::<String>::new());
    let up: &Arc<Upstream> = config.listeners[0].upstream.as_ref().unwrap();
    assert_eq!((up.pool.as_deref(), up.servers.len()), (Some("p"), 0));
    let next = |of_it: &str| format!("{pool}[upstream.next]\nprotocol = \"socks5\"\n{of_it}\n");
    for (of_it, more, want) in [
        ("", pool.to_owned(), "5:1: where does it listen?"),
        ("pool = \"p\"\nservers = \"a:1\"", pool.to_owned(), "7:8: an upstream proxy has servers or a pool of them"),
        ("pool = \"q\"", pool.to_owned(), "7:8: there is no pool \"q\""),
        ("pool = \"p\"\nthrough = \"next\"", next("pool = \"p\""), "7:8: a chain has one pool at most"),
        (
            "pool = \"p\"\nthrough = \"next\"",
            next("servers = \"c:1\"") + "[pool.p.check]\n",
            "7:8: its servers are checked without",
        ),
    ] {
        let wrong = read(of_it, &more).expect_err(of_it);
        assert!(wrong.starts_with(&format!("l.toml:{want}")), "{of_it}: {wrong}");
    }
    assert!(read("pool = \"p\"\nthrough = \"next\"", &next("servers = \"c:1\"")).is_ok());
    assert!(read("servers = \"c:1\"\nthrough = \"next\"", &next("pool = \"p\"")).is_ok());
    let by_field = format!("{pool}balance = \"consistent-hash\"\nhash_field = \"X-User\"\n");
    let [warning] = &read("pool = \"p\"", &by_field).unwrap().warnings[..] else { panic!() };
    assert!(warning.contains("connections through upstream proxy up are led to pool p without a look"), "{warning}");
}

/// Groups are lists of users, and rules may hold at some times only.
#[test]
fn groups_and_times() {
    let read = |rule: &str, groups: &str| {
        let text = format!(
            "groups = {{ {groups} }}\n[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1\"\n\
             rules = [{{ action = \"allow\", {rule} }}]\n"
        );
        Config::from_toml(&text, Path::new("l.toml")).map_err(|wrong| wrong.to_string())
    };
    let staff = "staff = [\"ann\", \"bob\"], guests = \"eve\"";
    let users = |rule: &str| read(rule, staff).unwrap().listeners[0].rules.list()[0].users.clone();
    assert_eq!(users("groups = \"staff\""), ["ann", "bob"]);
    assert_eq!(users("users = \"root\", groups = [\"guests\", \"staff\"]"), ["root", "eve", "ann", "bob"]);
    let rule = &read("hours = [\"22:00-06:00\", \"12:00-13:00\"], days = \"mon-fri\"", "").unwrap().listeners[0].rules;
    let text = rule.list()[0].to_string();
    assert_eq!(text, "{ action = \"allow\", hours = [\"22:00-06:00\", \"12:00-13:00\"], days = [\"mon-fri\"] }");
    for (rule, groups, want) in [
        ("groups = \"stuff\"", staff, "5:39: there is no group \"stuff\""),
        ("groups = [\"staff\", \"\"]", staff, "5:49: nobody has an empty name"),
        ("groups = []", staff, "5:39: empty list"),
        ("hours = \"8-18\"", staff, "5:38: bad hours: write when they begin"),
        ("days = \"weekend\"", staff, "5:37: bad day: write one of mon"),
        ("ports = 1", "staff = []", "1:20: empty list"),
        ("ports = 1", "staff = \"\"", "1:20: nobody has an empty name"),
    ] {
        let wrong = read(rule, groups).expect_err(rule);
        assert!(wrong.starts_with(&format!("l.toml:{want}")), "{rule} {groups}: {wrong}");
    }
    let plug = "[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1\"\ntarget = \"a:1\"\n\
                rules = [{ action = \"deny\", groups = \"staff\" }]\n";
    let wrong = Config::from_toml(plug, Path::new("l.toml")).unwrap_err().to_string();
    assert!(wrong.contains("clients of this listener do not log in"), "{wrong}");
    // a rule that holds at times leaves something to those after it
    let two = "days = \"mon\" }, { action = \"deny\"";
    assert_eq!(read(two, "").unwrap().warnings, Vec::<String>::new());
}
