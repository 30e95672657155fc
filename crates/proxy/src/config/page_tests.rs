//! docs/configuration.md has every key, word and default, and its examples are right.

use super::{
    pool::{Check, Get, HealthLimits},
    tests::{HTTP, mistake, read},
    *,
};
use crate::{
    commands::Commands,
    first_bytes::Conditions,
    limits::CONNECTIONS,
    users::hashes::{ARGON2_MEMORY_MAX, ARGON2_WORK_MAX, BCRYPT_COST_MAX, SHA_ROUNDS_MAX},
};
use longsplice_engine::{OpenOptions, PathRule, SpliceWhen};
use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt, time::Duration};

/// The reference of the file for users.
const PAGE: &str = include_str!("../../../../docs/configuration.md");

/// For each table: a file with an unknown key in it, and the headings under which the page describes the table.
const TABLES: [(&str, &[&str]); 34] = [
    ("unknown = 1", &["Top level"]),
    ("tpot.unknown = 1", &["Asking for proxies"]),
    ("control.unknown = 1", &["Control sockets"]),
    ("admin.unknown = 1", &["Metrics"]),
    ("log.unknown = 1", &["Log"]),
    (
        "[[listener]]\nunknown = 1",
        &[
            "Listeners",
            "SOCKS",
            "HTTP",
            "TLS",
            "FTP",
            "Login gateway",
            "Plugs",
            "Handshakes end to end",
            "Translucent",
            "Routed connections",
        ],
    ),
    ("[[listener]]\nrules = [{ unknown = 1 }]", &["Rules"]),
    ("[[listener]]\ntrigger = [{ unknown = 1 }]", &["Triggers"]),
    ("[[listener]]\npolicy.unknown = 1", &["Policy"]),
    ("[[listener]]\nlimits.unknown = 1", &["Limits"]),
    ("[[listener]]\nproxy_protocol.unknown = 1", &["PROXY protocol"]),
    ("[[listener]]\nftp.unknown = 1", &["FTP options"]),
    ("[[listener]]\nbind.unknown = 1", &["BIND"]),
    ("[[listener]]\nudp.unknown = 1", &["UDP ASSOCIATE"]),
    ("[[listener]]\nfilter.unknown = 1", &["Filter", "First bytes"]),
    ("[[listener]]\nfilter.client.unknown = 1", &["Conditions on first bytes"]),
    ("[[listener]]\nfilter.change = [{ unknown = 1 }]", &["Changes of bodies"]),
    ("[[listener]]\nfilter.rules = [{ unknown = 1 }]", &["Filter rules"]),
    ("[[listener]]\nfilter.upload.unknown = 1", &["Uploads"]),
    ("[[listener]]\nfields.unknown = 1", &["Fields"]),
    ("[[listener]]\nfields.reply = [{ unknown = 1 }]", &["Changes of fields"]),
    ("[[listener]]\ncache.unknown = 1", &["Cache"]),
    ("[[listener]]\nlogin.unknown = 1", &["Conversation"]),
    ("[[listener]]\nlogin.check.unknown = 1", &["External check"]),
    ("[[listener]]\ndestination = [{ unknown = 1 }]", &["Destinations"]),
    ("[[listener]]\nroute = [{ unknown = 1 }]", &["Reverse proxy", "TLS routes"]),
    ("[[listener]]\nroute = [{ rewrite = { unknown = 1 } }]", &["Rewriting"]),
    ("[[listener]]\nroute = [{ redirect = { unknown = 1 } }]", &["Redirects"]),
    ("[[listener]]\nerror_page = [{ unknown = 1 }]", &["Error pages"]),
    ("[pool.p]\nunknown = 1", &["Pools"]),
    ("[pool.p]\nsticky.unknown = 1", &["Sticky cookies"]),
    ("[pool.p]\nservers = [{ unknown = 1 }]", &["Servers"]),
    ("[pool.p]\ncheck.unknown = 1", &["Health checks"]),
    ("[upstream.u]\nunknown = 1", &["Upstream proxies"]),
];

/// For each key with a fixed set of words: a file with an unknown word, the key, and its heading.
const WORDS: [(&str, &str, &[&str]); 24] = [
    ("splice = \"unknown\"", "splice", &["Top level"]),
    ("log.format = \"unknown\"", "format", &["Log"]),
    ("log.add = \"unknown\"", "add", &["Log"]),
    ("[[listener]]\nprotocol = \"unknown\"", "protocol", &["Listeners"]),
    ("[[listener]]\ninside = \"unknown\"", "inside", &["Translucent"]),
    ("[[listener]]\nsource = \"unknown\"", "source", &["Routed connections"]),
    ("[[listener]]\nforwarded = \"unknown\"", "forwarded", &["HTTP"]),
    ("[[listener]]\nhandshake = \"unknown\"", "handshake", &["Plugs", "Translucent"]),
    ("[[listener]]\nrules = [{ action = \"unknown\" }]", "action", &["Rules"]),
    ("[[listener]]\ntrigger = [{ data = \"unknown\" }]", "data", &["Triggers"]),
    ("[[listener]]\ntrigger = [{ of = \"unknown\" }]", "of", &["Triggers"]),
    ("[[listener]]\ntrigger = [{ then = \"unknown\" }]", "then", &["Triggers"]),
    ("[[listener]]\ntrigger = [{ otherwise = \"unknown\" }]", "otherwise", &["Triggers"]),
    ("[[listener]]\ncommands = \"unknown\"", "commands", &["SOCKS"]),
    ("[[listener]]\nudp.replies = \"unknown\"", "replies", &["UDP ASSOCIATE"]),
    ("[[listener]]\nproxy_protocol.send = \"unknown\"", "send", &["PROXY protocol"]),
    ("[[listener]]\nftp.data = \"unknown\"", "data", &["FTP options"]),
    ("[[listener]]\nftp.tls = \"unknown\"", "tls", &["FTP options"]),
    ("[[listener]]\nfilter.rules = [{ action = \"unknown\" }]", "action", &["Filter rules"]),
    ("[[listener]]\nfilter.accept_encoding = \"unknown\"", "accept_encoding", &["Filter"]),
    ("[[listener]]\nfilter.unreadable = \"unknown\"", "unreadable", &["Filter"]),
    ("[[listener]]\nfilter.no_transform = \"unknown\"", "no_transform", &["Filter"]),
    ("[pool.p]\nbalance = \"unknown\"", "balance", &["Pools"]),
    ("[upstream.u]\nprotocol = \"unknown\"", "protocol", &["Upstream proxies"]),
];

/// Returns the text of the page under a heading, up to the next one.
#[track_caller]
fn section(heading: &str) -> &'static str {
    let mut parts = PAGE.split("\n#").map(|part| part.trim_start_matches('#').split_once('\n').unwrap());
    parts.find(|(first, _)| first.trim() == heading).unwrap_or_else(|| panic!("no heading `{heading}`")).1
}

/// Returns the words between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns key, value, default and meaning of each row that describes a key.
fn rows(section: &str) -> impl Iterator<Item = Vec<&str>> {
    section.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').map(str::trim).collect())
}

#[track_caller]
fn row(heading: &str, key: &str) -> Vec<&'static str> {
    let row = rows(section(heading)).find(|row| quoted(row[1]).any(|k| k == key));
    row.unwrap_or_else(|| panic!("docs/configuration.md, \"{heading}\": no row for `{key}`"))
}

fn blocks(text: &str) -> impl Iterator<Item = &str> {
    text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap())
}

/// Returns the words that serde would accept in place of `unknown`.
fn accepted(text: &str) -> Vec<String> {
    let (_, _, message) = mistake(text);
    let (unknown, list) = message.split_once(", expected ").unwrap_or_else(|| panic!("{text}: {message}"));
    assert!(unknown.ends_with("`unknown`"), "{text}: {message}");
    quoted(list).map(str::to_owned).collect()
}

/// Fails if a key is added and not described.
#[test]
fn the_page_describes_every_key_and_no_other() {
    for (text, headings) in TABLES {
        let keys: BTreeSet<String> = accepted(text).into_iter().collect();
        let sections: String = headings.iter().map(|h| section(h)).collect();
        let described: BTreeSet<String> =
            rows(&sections).flat_map(|row| quoted(row[1]).map(str::to_owned).collect::<Vec<_>>()).collect();
        assert_eq!(keys, described, "keys, and rows of docs/configuration.md below {headings:?}");
        for key in keys {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let mut shown = blocks(&sections).flat_map(|block| block.split(|c| !is_word(c)));
            assert!(shown.any(|word| word == key), "docs/configuration.md, {headings:?}: no example of `{key}`");
        }
    }
    // `TABLES` has every table.
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config");
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let code = files
        .filter(|file| !file.to_string_lossy().ends_with("tests.rs"))
        .map(|file| fs::read_to_string(file).unwrap());
    let refuse = |code: &str| ["(deny_unknown_fields", "(field_identifier"].map(|word| code.matches(word).count());
    let tables: usize = code.flat_map(|code| refuse(&code)).sum();
    assert_eq!(tables, TABLES.len(), "tables in src/config, and in TABLES");
}

#[test]
fn the_page_names_every_word() {
    for (text, key, headings) in WORDS {
        let values: String = headings.iter().map(|heading| row(heading, key)[2]).collect();
        for word in accepted(text) {
            let written = format!("`\"{word}\"`");
            assert!(values.contains(&written), "docs/configuration.md, {headings:?}, `{key}`: no {written}");
        }
    }
}

#[test]
fn the_page_has_the_right_defaults() {
    let seconds = |d: Duration| d.as_secs_f64().to_string();
    let (policy, limits, filter) = (Policy::default(), Limits::default(), Filter::default());
    let (commands, conditions) = (Commands::default(), Conditions::default());
    let (pool, check, health) = (PoolConfig::new(String::new(), Vec::new()), Check::default(), HealthLimits::default());
    let status = Get::new("/".into()).status;
    assert_eq!(policy.when, SpliceWhen::Auto);
    let ports = OpenOptions::default().source_ports;
    let cache = read(&format!("{HTTP}cache.dir = \"c\"")).unwrap().listeners[0].cache().unwrap().size;
    let word = |text: &str| format!("\"{text}\"");
    for (heading, key, default) in [
        ("Top level", "source_ports", word(&format!("{}-{}", ports.start(), ports.end()))),
        ("Top level", "connections", CONNECTIONS.to_string()),
        ("Policy", "splice", word("auto")),
        ("Policy", "path", word("auto")),
        ("Policy", "hold", policy.hold.to_string()),
        ("Policy", "drain_limit", seconds(policy.drain_limit)),
        ("Policy", "release_after", seconds(policy.release_after.unwrap())),
        ("Policy", "idle_limit", seconds(policy.idle_limit.get())),
        ("Limits", "handshake", seconds(limits.handshake)),
        ("Limits", "resolve", seconds(limits.resolve)),
        ("Limits", "connect", seconds(limits.connect)),
        ("Limits", "reply", seconds(limits.reply)),
        ("Limits", "keep_alive", seconds(limits.keep_alive)),
        ("Limits", "request_head", limits.request_head.to_string()),
        ("Limits", "connections_per_client", limits.connections_per_client.to_string()),
        ("BIND", "wait", seconds(commands.bind.wait)),
        ("BIND", "any_peer", commands.bind.any_peer.to_string()),
        ("BIND", "per_client", commands.bind.per_client.to_string()),
        ("UDP ASSOCIATE", "idle_limit", seconds(commands.udp.idle_limit)),
        ("UDP ASSOCIATE", "replies", word("addressed")),
        ("UDP ASSOCIATE", "destinations", commands.udp.destinations.to_string()),
        ("UDP ASSOCIATE", "per_client", commands.udp.per_client.to_string()),
        ("HTTP", "via", word(&Http::default().via.unwrap())),
        ("HTTP", "strict_replies", Http::default().strict_replies.to_string()),
        ("Filter", "first", filter.first.to_string()),
        ("Filter", "wait", seconds(filter.wait)),
        ("Conditions on first bytes", "first", conditions.first.to_string()),
        ("Conditions on first bytes", "wait", seconds(conditions.wait)),
        ("Cache", "size", cache.to_string()),
        ("Conversation", "prompt", seconds(Login::default().prompt)),
        ("Conversation", "time", seconds(Login::default().time)),
        ("Conversation", "failures", Login::default().max_failures.to_string()),
        ("Triggers", "of", word("both")),
        ("Triggers", "limit", seconds(crate::triggers::ask::LIMIT)),
        ("Triggers", "otherwise", word("go-on")),
        ("External check", "limit", seconds(crate::users::external_check::LIMIT)),
        ("Pools", "tries", pool.tries.to_string()),
        ("Pools", "queue", pool.queue.to_string()),
        ("Pools", "queue_wait", seconds(pool.queue_wait)),
        ("Pools", "idle_connections", pool.idle_connections.to_string()),
        ("Pools", "idle_time", seconds(pool.idle_time)),
        ("Pools", "failures", health.failures.to_string()),
        ("Pools", "out", seconds(health.out)),
        ("Health checks", "interval", seconds(check.interval)),
        ("Health checks", "timeout", seconds(check.timeout)),
        ("Health checks", "status", word(&format!("{}-{}", status.start(), status.end()))),
        ("Health checks", "rise", health.rise.to_string()),
        ("Health checks", "fall", health.fall.to_string()),
    ] {
        assert_eq!(row(heading, key)[3], format!("`{default}`"), "docs/configuration.md, \"{heading}\", `{key}`");
    }
    assert_eq!(policy.path, PathRule::Within { rtt_ratio: PathRule::RTT_RATIO, loss: PathRule::LOSS });
    let stands = format!("`\"auto\"` stands for {} and {}.", PathRule::RTT_RATIO, PathRule::LOSS);
    assert!(row("Policy", "path")[4].contains(&stands), "{stands}");
    assert!(PAGE.contains(&format!("bodies from {} KB on", Http::BODY_PAYS_FROM >> 10)));
    for maximum in [
        format!("| cost {BCRYPT_COST_MAX} |"),
        format!("| {SHA_ROUNDS_MAX} rounds |"),
        format!("| m = {ARGON2_MEMORY_MAX} (KiB), and m times t = {ARGON2_WORK_MAX} |"),
    ] {
        assert!(PAGE.contains(&maximum), "{maximum}");
    }
}

#[test]
fn the_examples_of_the_page_are_right() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("users"), "carl:pw\n").unwrap();
    for page in ["404.html", "error.html"] {
        fs::write(dir.path().join(page), "<p>sorry</p>").unwrap();
    }
    let keys = dir.path().join("tpot.keys");
    fs::write(&keys, "000102030405060708090a0b0c0d0e0f\n").unwrap();
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
    let read = |text: &str| Config::from_toml(text, &dir.path().join("longsplice.toml"));
    let all: Vec<Config> = blocks(PAGE).map(|text| read(text).unwrap_or_else(|e| panic!("{e}\n{text}"))).collect();
    assert!(all.len() >= TABLES.len() && all[0].listeners.len() == 2, "{}", all.len());
}
