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
