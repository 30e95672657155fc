//! Login gateways: defaults, and the position and advice of every error.

use super::*;
use longsplice_engine::SpliceWhen;
use std::fs;

const LOGIN: &str = "[[listener]]\nprotocol = \"login\"\nlisten = \"127.0.0.1:23\"\n";
const PLACE: &str = "[[listener.destination]]\nname = \"db\"\ntarget = \"192.0.2.1:23\"\n";

fn read(text: &str) -> Result<Config, ConfigError> {
    Config::from_toml(text, Path::new("/etc/longsplice.toml"))
}

#[track_caller]
fn expect(text: &str, place: (usize, usize), part: &str) {
    let Err(ConfigError::Wrong { line, column, message, .. }) = read(text) else { panic!("{text}") };
    assert!((line, column) == place && message.contains(part), "{line}:{column}: {message}");
}

fn login(text: &str) -> (ListenerConfig, Login) {
    let listener = read(text).unwrap().listeners.remove(0);
    let Protocol::Login(login) = listener.protocol.clone() else { panic!() };
    (listener, login)
}

#[test]
fn a_gateway() {
    let (listener, found) = login(&format!("{LOGIN}{PLACE}"));
    assert!(!found.asks_users() && !found.telnet && !listener.rules.guarded);
    assert_eq!((found.destinations[0].telnet, listener.policy.when), (false, SpliceWhen::AtOnce));
    assert_eq!(listener.targets().count(), 1);
    let more =
        "telnet = true\nusers = { ann = \"pw\" }\npolicy = { splice = 1 }\nlogin = { free = true, prompt = 1 }\n";
    let (listener, found) = login(&format!("{LOGIN}{more}{PLACE}users = [\"ann\", \"bob\"]\n"));
    assert!(found.asks_users() && found.telnet && listener.rules.guarded && found.destinations[0].telnet);
    assert_eq!((found.prompt.as_secs(), listener.policy.when), (1, SpliceWhen::AfterBytes(1)));
    assert!(found.destination("DB", Some("bob")).is_some() && found.destination("db", Some("eve")).is_none());
    let (listener, _) = login(&format!("{LOGIN}policy = {{ hold = true }}\n{PLACE}"));
    assert_eq!(listener.policy.when, SpliceWhen::AtOnce, "the policy says nothing about it");
}

#[test]
fn mistakes() {
    expect(LOGIN, (1, 1), "no client could go anywhere");
    expect(&format!("{LOGIN}target = \"a:1\"\n{PLACE}"), (4, 10), "[[listener.destination]]");
    expect(&format!("{LOGIN}{PLACE}{PLACE}"), (8, 8), "another destination has this name");
    expect(&format!("{LOGIN}{PLACE}users = \"ann\"\n"), (5, 8), "nobody logs in");
    expect(&format!("{LOGIN}[[listener.destination]]\nname = \"a b\"\ntarget = \"a:1\"\n"), (5, 8), "without spaces");
    expect(&format!("{LOGIN}login.user_variable = true\n{PLACE}"), (4, 23), "add telnet = true and users");
    expect(&format!("{LOGIN}login.check = {{}}\n{PLACE}"), (4, 15), "either program");
    expect(&format!("{LOGIN}login.check.program = \"nothing\"\n{PLACE}"), (4, 23), "cannot be run");
    expect(&format!("{LOGIN}login.check.socket = \"/etc/passwd\"\n{PLACE}"), (4, 22), "no socket");
    expect(&format!("{LOGIN}users = {{ a = \"b\" }}\nlogin.check.socket = \"s\"\n{PLACE}"), (4, 9), "or `check`");
    expect(&format!("{LOGIN}route = [{{ pool = \"p\" }}]\n{PLACE}"), (4, 10), "only HTTP and TLS have routes");
    for key in ["telnet = true", "login = {}", "destination = [{ name = \"a\", target = \"a:1\" }]"] {
        let text = format!("[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1\"\n{key}\n");
        let column = key.find("= ").unwrap() + 3 + usize::from(key.contains("[{"));
        expect(&text, (4, column), "only login gateways have this");
    }
}

#[test]
fn programs_that_others_may_change_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("check");
    fs::write(&program, "").unwrap();
    let text = format!("{LOGIN}login.check.program = \"{}\"\n{PLACE}", program.display());
    for (mode, part) in [(0o600, "chmod +x"), (0o722, "chmod go-w"), (0o755, "")] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        match part {
            "" => assert!(read(&text).is_ok()),
            part => expect(&text, (4, 23), part),
        }
    }
}
