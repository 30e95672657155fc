//! `longsplice rule`: which rule would decide, asked of the running program. These tests need no root.

use crate::running::{Control, LONGSPLICE, Running, listener, longsplice};
use serde_json::{Value, json};
use std::{fs, process::Command};
use tempfile::TempDir;

/// A program that copies, with listeners that have rules.
fn site() -> (Running, TempDir) {
    let socks = "name = \"office\"\nrules = [\n\
        { action = \"deny\", client = [\"192.0.2.128/25\", \"2001:db8::7\"] },\n\
        { action = \"allow\", users = [\"ann\"], target = [\"10.0.0.0/8\", \"*.example.org\"], ports = [80, \"8000-8999\"] },\n\
        { action = \"deny\", target = \"never.example\" },\n\
        { action = \"allow\", target = \"127.0.0.0/8\" },\n]";
    let http = "name = \"web\"\nrules = [{ action = \"deny\", methods = \"PUT\", path = [\"/admin*\", \"/up\"] }]";
    let plug = "name = \"db\"\ntarget = \"10.1.2.3:5432\"\nrules = [{ action = \"deny\" }]";
    let one = |protocol: &str, more: &str| listener(protocol, "127.0.0.1:0", more);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, one("socks5", socks) + &one("http", http) + &one("plug", plug)).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    (Running::start(Command::new(LONGSPLICE), None, &arguments, &[]), dir)
}

/// What `longsplice rule` prints, and whether it says that somebody would allow it.
fn said(proxy: &Running, arguments: &[&str]) -> (String, bool) {
    let control = proxy.control().to_str().unwrap().to_owned();
    let out = longsplice(&[&["rule", "--control", &control], arguments].concat());
    assert!(out.stderr.is_empty(), "{arguments:?}: {out:?}");
    (String::from_utf8(out.stdout).unwrap(), out.status.success())
}

#[test]
fn the_rule_that_decides_is_named() {
    let (proxy, _dir) = site();
    let of_user = "office: 10.9.9.9:8080: allowed by rule 2: { action = \"allow\", \
        target = [\"10.0.0.0/8\", \"*.example.org\"], ports = [\"80-80\", \"8000-8999\"], users = [\"ann\"] }\n";
    let of_client = "{ action = \"deny\", client = [\"192.0.2.128/25\", \"2001:db8::7\"] }\n";
    for (arguments, want, allowed) in [
        (&["192.0.2.1", "10.9.9.9:8080", "--user", "ann"][..], of_user, true),
        (&["192.0.2.1", "10.9.9.9:8080"], "office: 10.9.9.9:8080: allowed: no rule matches\n", true),
        (&["192.0.2.200", "10.9.9.9:80"], &format!("office: any address: denied by rule 1: {of_client}"), false),
        (&["2001:db8::7", "[2001:db8::1]:80"], &format!("office: any address: denied by rule 1: {of_client}"), false),
        (
            &["192.0.2.1", "localhost:80"],
            "127.0.0.1:80: allowed by rule 4: { action = \"allow\", target = [\"127.0.0.0/8\"] }\n",
            true,
        ),
        (&["192.0.2.1", "169.254.169.254:80"], "office: 169.254.169.254:80: denied: guarded address", false),
        // it is not looked up
        (&["192.0.2.1", "never.example:1"], "office: any address: denied by rule 3: ", false),
    ] {
        let (text, is_allowed) = said(&proxy, &[arguments, &["--listener", "office"]].concat());
        assert!(text.contains(want) && is_allowed == allowed, "{arguments:?}: {is_allowed}: {text}");
    }
    let (text, allowed) =
        said(&proxy, &["192.0.2.1", "10.1.1.1:80", "--listener", "web", "--method", "PUT", "--path", "/admin/x"]);
    let of_path = "{ action = \"deny\", methods = [\"PUT\"], path = [\"/admin*\", \"/up\"] }\n";
    assert_eq!((&*text, allowed), (&*format!("web: any address: denied by rule 1: {of_path}"), false));
}

/// Listeners whose clients cannot choose this target are left out; one that would allow it is enough.
#[test]
fn all_listeners_are_asked_that_could() {
    let (proxy, _dir) = site();
    let lines = |text: &str| text.lines().map(|l| l.split(':').next().unwrap().to_owned()).collect::<Vec<_>>();
    let (text, allowed) = said(&proxy, &["192.0.2.200", "10.1.1.1:80"]);
    assert_eq!((lines(&text), allowed), (vec!["office".to_owned(), "web".to_owned()], true), "{text}");
    let (text, _) = said(&proxy, &["192.0.2.200", "10.1.2.3:5432"]);
    assert_eq!(lines(&text), ["office", "web", "db"], "{text}");
    let (text, allowed) = said(&proxy, &["192.0.2.200", "10.1.2.3:5432", "--listener", "db", "--json"]);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["decided"][0]["rule"], 1, "{text}");
    assert!(!allowed);
}

/// The domain of names without addresses. No label has more than 63 bytes (RFC 1035, 2.3.4), so nobody asks a server of the DNS.
fn none() -> String {
    "x".repeat(64)
}

/// Where a connection would go is told with the rule; a name that leads there without its address need not have one.
#[test]
fn where_it_would_go_is_told() {
    let none = none();
    let rules = format!(
        "rules = [\n\
        {{ action = \"allow\", target = \"db.{none}\", groups = \"staff\", pool = \"db\" }},\n\
        {{ action = \"allow\", target = \"*.far.{none}\", upstream = \"shared\" }},\n\
        {{ action = \"allow\", target = \"10.0.0.0/8\", upstream = \"one\" }},\n\
        {{ action = \"allow\", target = \"*.near.{none}\", upstream = false }},\n]\n\
        upstream = \"one\"\nusers = {{ ann = \"secret\" }}\n"
    );
    let rest = "[upstream.one]\nprotocol = \"socks5\"\nservers = \"192.0.2.1:1080\"\nresolve = false\n\
        [upstream.shared]\nprotocol = \"http\"\npool = \"proxies\"\nresolve = false\n\
        [pool.db]\nservers = [\"192.0.2.2:5432\"]\n[pool.proxies]\nservers = [\"192.0.2.3:3128\"]\n";
    let socks = listener("socks5", "127.0.0.1:0", &format!("name = \"office\"\ncommands = \"connect\"\n{rules}"));
    let other = listener("http", "127.0.0.1:0", "name = \"web\"");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, format!("groups = {{ staff = \"ann\" }}\n{socks}{other}{rest}")).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    let [db, far, near] = ["db", "a.far", "a.near"].map(|name| format!("{name}.{none}:5432"));
    for (arguments, want) in [
        (&[&*db, "--user", "ann"][..], "office: any address: allowed, to a server of pool db, by rule 1: {"),
        (&[&*db], "office: any address: allowed, through upstream proxy one: no rule matches\n"),
        (&[&*far], "allowed, through upstream proxy shared (pool proxies), by rule 2: {"),
        (&["10.1.1.1:1"], "office: 10.1.1.1:1: allowed, through upstream proxy one, by rule 3: {"),
        (&["192.0.2.9:1"], "office: 192.0.2.9:1: allowed, through upstream proxy one: no rule matches\n"),
    ] {
        let (text, is_allowed) = said(&proxy, &[&["192.0.2.1"], arguments].concat());
        assert!(text.contains(want) && is_allowed, "{arguments:?}: {text}");
        let has_no_address = text.contains("web: any address: denied: no address");
        assert_eq!(has_no_address, arguments[0].contains(&none), "{arguments:?}: {text}");
    }
    let error = proxy.client_error(&["rule", "192.0.2.1", &near]);
    assert!(error.contains(&format!("{near}: no address")), "{error}");
    let (text, _) = said(&proxy, &["192.0.2.1", &far, "--json", "--listener", "office"]);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let decided = &answer["decided"][0];
    assert_eq!(
        (&decided["upstream"], &decided["pool"], &decided["server"]),
        (&"shared".into(), &"proxies".into(), &Value::Null)
    );
}

/// What nobody is connected to goes nowhere, wherever the listener leads.
#[test]
fn what_is_denied_goes_nowhere() {
    let none = none();
    let rules = format!(
        "upstream = \"one\"\ncommands = \"connect\"\nrules = [\n\
        {{ action = \"allow\", target = \"192.0.2.0/24\" }},\n{{ action = \"deny\", target = \"10.0.0.0/8\" }}, \
        {{ action = \"allow\", target = \"*.{none}\" }}, {{ action = \"deny\" }},\n]\n"
    );
    let rest = "[upstream.one]\nprotocol = \"socks5\"\nservers = \"192.0.2.1:1080\"\nresolve = true\n\
        [upstream.two]\nprotocol = \"socks5\"\nservers = \"192.0.2.2:1080\"\nresolve = false\n";
    let leading = listener("socks5", "127.0.0.1:0", &format!("name = \"leading\"\n{rules}"));
    let other = listener("http", "127.0.0.1:0", "name = \"web\"\nupstream = \"two\"");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, format!("{leading}{other}{rest}")).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    for (target, allowed, why) in [
        ("192.0.2.9:1", true, "{ action = \"allow\", target = [\"192.0.2.0/24\"] }"),
        ("10.1.1.1:1", false, "{ action = \"deny\", target = [\"10.0.0.0/8\"] }"),
        ("198.51.100.1:1", false, "{ action = \"deny\" }"),
    ] {
        let (text, _) = said(&proxy, &["192.0.2.1", target, "--json", "--listener", "leading"]);
        let answer: Value = serde_json::from_str(&text).unwrap();
        let one = &answer["decided"][0];
        assert_eq!((&one["allowed"], &one["why"]), (&allowed.into(), &why.into()), "{target}: {text}");
        assert_eq!(one["upstream"], if allowed { "one".into() } else { Value::Null }, "{target}: {text}");
    }
    // a name without addresses, which does not matter to the other one
    let (text, _) = said(&proxy, &["192.0.2.1", &format!("a.{none}:1")]);
    assert!(text.contains("web: any address: allowed, through upstream proxy two: no rule matches\n"), "{text}");
    assert!(text.contains("leading: any address: denied: no address: "), "{text}");
}

/// The hours of now deny, and those of later do not yet.
#[test]
fn rules_hold_at_their_times() {
    let hour = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() / 3600;
    let hours = |from: u64, to: u64| format!("{:02}:00-{:02}:00", (hour + from) % 24, (hour + to) % 24);
    let deny = |hours: &str| format!("rules = [{{ action = \"deny\", hours = \"{hours}\", days = \"mon-sun\" }}]");
    let one = |name: &str, hours: &str| listener("http", "127.0.0.1:0", &format!("name = \"{name}\"\n{}", deny(hours)));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    // whatever the hour becomes meanwhile
    fs::write(&file, one("now", &hours(0, 3)) + &one("later", &hours(3, 23))).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    let (text, _) = said(&proxy, &["192.0.2.1", "192.0.2.9:1"]);
    assert!(text.contains("now: any address: denied by rule 1: { action = \"deny\", hours = ["), "{text}");
    assert!(text.contains("later: 192.0.2.9:1: allowed: no rule matches"), "{text}");
}

#[test]
fn questions_without_sense_are_explained() {
    let (proxy, _dir) = site();
    for (arguments, want) in [
        (&["rule", "192.0.2.1", "10.1.1.1:80", "--listener", "ofice"][..], "no listener has the name ofice"),
        (&["rule", "192.0.2.1", "10.1.1.1:80", "--listener", "db"], "no listener lets its clients choose 10.1.1.1:80"),
        (&["rule", "192.0.2.1", "nowhere.invalid:80"], "nowhere.invalid:80: "),
        (&["rule", "192.0.2.1", "10.1.1.1"], "no port: write HOST:PORT"),
        (&["rule", "192.0.2.1/24", "10.1.1.1:80"], "192.0.2.1/24"),
    ] {
        let error = proxy.client_error(arguments);
        assert!(error.contains(want), "{arguments:?}: {error}");
    }
    let mut control = Control::of(&proxy);
    let typo = json!({ "version": 1, "ask": "rule", "client": "192.0.2.1", "target": "10.1.1.1:80", "usr": "ann" });
    assert!(control.ask(&typo).unwrap()["error"].as_str().unwrap().contains("usr"));
}
