//! What is refused because it cannot be meant, and what is only warned of; and errors with their places.

use super::*;
use std::{fs, os::unix::fs::PermissionsExt};

const SOCKS: &str = "[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1080\"\n";
const PLUG: &str = "[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1080\"\ntarget = \"10.0.0.1:1\"\n";

fn read(text: &str) -> Result<Config, ConfigError> {
    Config::from_toml(text, Path::new("/etc/l.toml"))
}

/// Checks that `text` is wrong at this place, and that the message contains `part`.
#[track_caller]
fn refused(text: &str, place: &str, part: &str) {
    let e = read(text).expect_err(text).to_string();
    assert!(e.starts_with(&format!("/etc/l.toml:{place}: ")) && e.contains(part), "{e}");
}

/// Checks the only warning.
#[track_caller]
fn warned(text: &str, place: &str, part: &str) {
    let warnings = read(text).unwrap().warnings;
    let [warning] = &warnings[..] else { panic!("{text}: {warnings:?}") };
    assert!(warning.starts_with(&format!("/etc/l.toml:{place}: ")) && warning.contains(part), "{warning}");
}

#[track_caller]
fn quiet(text: &str) {
    assert_eq!(read(text).unwrap().warnings, Vec::<String>::new(), "{text}");
}

#[test]
fn numbers_that_would_be_changed_or_serve_nobody() {
    for wrong in ["0", "-1", "40000", "99999999", "0.4", "1.5", "\"x\""] {
        refused(&format!("{SOCKS}policy.keepalive = {wrong}"), "4:20", "a number of whole seconds from 1 to 32767");
    }
    quiet(&format!("{SOCKS}policy.keepalive = 32767"));
    for wrong in ["0", "-1", "4294967296"] {
        refused(&format!("connections = {wrong}"), "1:15", "a number from 1 to 4294967295");
        refused(&format!("{SOCKS}limits.connections = {wrong}"), "4:22", "a number from 1");
        refused(&format!("{SOCKS}limits.connections_per_client = {wrong}"), "4:33", "a number from 1");
    }
    for wrong in ["0", "-1", "1000001", "\"1/day\"", "\"/second\""] {
        refused(
            &format!("{SOCKS}limits.new_per_client = {wrong}"),
            "4:25",
            "no rate: write a number from 1 to 1000000",
        );
    }
    refused(&format!("{SOCKS}policy.idle_limit = 1e30"), "4:21", "ten years at most");
}

#[test]
fn prefixes_have_no_bits_beyond_their_length() {
    for key in ["client", "target"] {
        let text = format!("{SOCKS}rules = [{{ action = \"deny\", {key} = \"10.9.9.9/8\" }}]");
        refused(&text, "4:38", "write 10.0.0.0/8 for the network, or the address alone");
    }
    refused(&format!("{SOCKS}proxy_protocol.from = \"fe80::1/64\""), "4:23", "write fe80::/64");
    refused("tpot = { proxies = \"10.1.2.3/16\", ports = 80 }", "1:20", "write 10.1.0.0/16");
}

#[test]
fn one_pair_of_brackets() {
    let cure = "write [[NAME]] with two brackets";
    refused("[listener]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1\"", "1:1", cure);
    refused(
        "[[listener]]\nprotocol = \"tls\"\nlisten = \"127.0.0.1:1\"\n[listener.route]\nname = \"a.b\"",
        "4:1",
        cure,
    );
    refused(&format!("{SOCKS}[listener.rules]\naction = \"deny\""), "4:1", cure);
}

#[test]
fn listeners_that_would_take_each_others_clients() {
    let at = |listen: &str, protocol: &str| format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"{listen}\"\n");
    let both = |a: &str, b: &str| at(a, "socks5") + &at(b, "http");
    refused(&both("0.0.0.0:8080", "10.0.1.1:8080"), "6:10", "another listener has 0.0.0.0:8080 already");
    refused(&both("[::1]:8080", "[::]:8080"), "6:10", "another listener has [::1]:8080 already");
    quiet(&both("0.0.0.0:8080", "[::1]:8080"));
    quiet(&both("0.0.0.0:8080", "10.0.1.1:8081"));
    quiet(&(at("0.0.0.0:80", "transparent") + &at("10.0.1.1:80", "http"))); // it has no socket
    let mut c = read(SOCKS).unwrap();
    let e = c.add_args(&[], &["0.0.0.0:1080"], &[], &[]).unwrap_err().to_string();
    assert!(e.contains("--http 0.0.0.0:1080: another listener has 127.0.0.1:1080"), "{e}");
}

#[test]
fn handshakes_end_to_end_are_there_to_be_spliced_at_once() {
    let plug = |policy: &str| format!("{PLUG}handshake = \"end-to-end\"\n{policy}");
    refused(&plug("policy.splice = \"never\""), "5:13", "remove splice = \"never\"");
    warned(&plug(""), "5:13", "splice = \"at-once\"");
    warned(&plug("policy.splice = 4096"), "5:13", "splice = \"at-once\"");
    quiet(&plug("policy.splice = \"at-once\""));
    quiet(&format!("{PLUG}handshake = \"proxy\"\npolicy.splice = \"never\""));
}

#[test]
fn rules_that_are_never_reached() {
    let socks = |rules: &str| format!("{SOCKS}rules = [\n{rules}\n]");
    for all in [
        "{ action = \"deny\" }",
        "{ action = \"deny\", target = [\"0.0.0.0/0\", \"::/0\"], ports = \"1-65535\" }",
        "{ action = \"allow\" }",
    ] {
        let text = socks(&format!("{all},\n{{ action = \"allow\", ports = 80 }}"));
        warned(&text, "6:1", "rule 2 is never reached: rule 1 matches everything");
    }
    quiet(&socks("{ action = \"allow\", ports = 80 },\n{ action = \"deny\" }"));
    quiet(&socks("{ action = \"deny\", target = \"0.0.0.0/0\" },\n{ action = \"allow\" }")); // there is IPv6
    // what allows everything does not open guarded addresses
    quiet(&socks("{ action = \"allow\" },\n{ action = \"allow\", target = \"127.0.0.1\" }"));
    warned(&socks("{ action = \"deny\" },\n{ action = \"allow\", target = \"127.0.0.1\" }"), "6:1", "never reached");
}

#[test]
fn pools_without_routes() {
    let pool = "[pool.web]\nservers = [\"10.0.0.1:80\"]\n";
    warned(&format!("{SOCKS}{pool}"), "4:1", "nothing leads to pool web");
    let site = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:80\"\nroute = [{ pool = \"web\" }]\n";
    quiet(&format!("{site}{pool}"));
}

#[test]
fn what_would_bypass_tunnels() {
    let tpot = "[[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n";
    refused(&format!("xdp = \"eth0\"\n{tpot}"), "1:7", "remove xdp and peer");
    refused(&format!("devices = \"eth0\"\npeer = [\"v0\"]\n{tpot}"), "2:8", "remove xdp and peer");
    let config = {
        let mut config = read(tpot).unwrap();
        config.engine.datapath.xdp = vec!["eth0".into()]; // --xdp
        config
    };
    let e = crate::Prepared::new(config, &[]);
    assert!(e.err().unwrap().to_string().contains("would bypass the tunnels"));
}

#[test]
fn secrets_have_one_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (file, users) = (dir.path().join("l.toml"), dir.path().join("users"));
    let chmod = |file: &Path, mode| fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
    let warnings = |text: &str, mode| {
        fs::write(&file, text).unwrap();
        chmod(&file, mode);
        Config::from_file(&file).unwrap().warnings
    };
    let plain = format!("{SOCKS}users = {{ ann = \"secret\" }}\n");
    assert!(
        warnings(&plain, 0o644)[0].ends_with("l.toml holds passwords, and others may read or write it: chmod 600 it")
    );
    assert_eq!(warnings(&plain, 0o600).len(), 0);
    let hashed = "ann = \"$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\"";
    assert_eq!(warnings(&format!("{SOCKS}users = {{ {hashed} }}\n"), 0o644).len(), 0);
    fs::write(&users, "ann:secret\n").unwrap();
    chmod(&users, 0o644);
    let from_users = format!("{SOCKS}users_file = \"users\"\n");
    let said = warnings(&from_users, 0o644);
    assert!(said.len() == 1 && said[0].contains("l.toml:4:14: ") && said[0].contains("others may read it"), "{said:?}");
    chmod(&users, 0o600);
    assert_eq!(warnings(&from_users, 0o644).len(), 0);
    if nix::unistd::Uid::effective().is_root() {
        std::os::unix::fs::chown(&users, Some(12345), None).unwrap();
        let e = Config::from_file(&file).unwrap_err().to_string();
        assert!(e.contains("l.toml:4:14: ") && e.contains("belongs to another user (number 12345)"), "{e}");
        let keys = crate::secrets::keys::read_keys(&users).unwrap_err().to_string();
        assert!(keys.contains("belongs to another user"), "{keys}");
    }
}

#[test]
fn a_file_in_another_encoding() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("l.toml");
    fs::write(&file, b"# fine\n# \xc3\xa4 b\xe4d\n").unwrap();
    let e = Config::from_file(&file).unwrap_err().to_string();
    assert_eq!(e, format!("{}:2:6: not UTF-8: save the file in this encoding", file.display()));
}

#[test]
fn what_fails_at_the_start_has_a_place() {
    let at_start = |text: &str| crate::Prepared::new(read(text).unwrap(), &[]).err().unwrap().to_string();
    let socks = SOCKS.replace(":1080", ":0");
    let log = at_start(&format!("log.file = \"/nowhere/log\"\n{socks}"));
    assert!(log.starts_with("/etc/l.toml:1:12: cannot open the access log /nowhere/log: "), "{log}");
    let tap = at_start(&format!("{socks}tap = \"/proc/taps\""));
    assert!(tap.starts_with("/etc/l.toml:4:7: cannot write taps into /proc/taps: "), "{tap}");
    let listen = at_start("[[listener]]\nprotocol = \"socks5\"\nlisten = \"192.0.2.1:1\"");
    assert!(listen.starts_with("/etc/l.toml:3:10: cannot listen on 192.0.2.1:1: "), "{listen}");
    let sources = read("source = [\"192.0.2.1\", \"192.0.2.2\"]").unwrap().places;
    assert_eq!(sources.of("192.0.2.2"), "/etc/l.toml:1:10: ");
}
