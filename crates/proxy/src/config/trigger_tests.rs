//! Triggers: what they become, and the position and advice of every error.

use super::{tests::mistake, *};
use crate::triggers::{
    Then, When,
    ask::{Answer, LIMIT},
};
use longsplice_engine::{Side, Trigger as OfEngine};
use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

const PLUG: &str = "[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1\"\ntarget = \"192.0.2.1:1\"\n";

fn trigger(more: &str) -> String {
    format!("{PLUG}[[listener.trigger]]\n{more}\n")
}

#[track_caller]
fn expect(text: &str, place: (usize, usize), part: &str) {
    let (line, column, message) = mistake(text);
    assert!((line, column) == place && message.contains(part), "{line}:{column}: {message}");
}

#[test]
fn each_kind() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("decide");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let text = trigger("data = \"server\"\nthen = \"copy\"")
        + "[[listener.trigger]]\nbytes = 5\nthen = \"kill\"\n"
        + "[[listener.trigger]]\nbytes = 6\nof = \"client\"\nthen = \"tap\"\ndir = \"taps\"\n"
        + "[[listener.trigger]]\nidle = 1.5\nthen = \"ask\"\nprogram = \"decide\"\n"
        + "[[listener.trigger]]\nat = \"00:30\"\nthen = \"ask\"\nprogram = \"decide\"\nlimit = 3\notherwise = \"kill\"\n";
    let config = Config::from_toml(&text, &dir.path().join("longsplice.toml")).unwrap();
    let listener = &config.listeners[0];
    let all = &listener.triggers;
    assert_eq!((&all[0].when, listener.policy.trigger), (&When::Data(Side::Server), Some(OfEngine::ServerData)));
    assert_eq!(listener.policy_of_bodies().trigger, None);
    assert!(matches!(all[0].then, Then::Copy) && matches!(all[1].then, Then::Kill));
    assert_eq!(all[1].when, When::Bytes { count: 5, of: None });
    assert_eq!(all[2].when, When::Bytes { count: 6, of: Some(Side::Client) });
    assert_eq!(listener.tap_dirs().collect::<Vec<_>>(), [&dir.path().join("taps")]);
    assert_eq!(all[3].when, When::Idle(Duration::from_millis(1500)));
    assert_eq!(all[4].when, When::At("00:30".parse().unwrap()));
    let asked = |n: usize| if let Then::Ask(asked) = &all[n].then { (asked.limit, asked.otherwise) } else { panic!() };
    assert_eq!((asked(3), asked(4)), ((LIMIT, Answer::GoOn), (Duration::from_secs(3), Answer::Kill)));
}

#[test]
fn mistakes() {
    expect(&trigger("then = \"copy\""), (5, 1), "write one of data, bytes, idle and at");
    expect(&trigger("idle = 1\nbytes = 1\nthen = \"copy\""), (5, 1), "write one of data, bytes, idle and at");
    expect(&trigger("data = \"client\""), (5, 1), "missing field `then`");
    expect(&trigger("data = \"both\"\nthen = \"copy\""), (6, 8), "expected `client` or `server`");
    expect(&trigger("bytes = 0\nthen = \"copy\""), (6, 9), "nonzero");
    expect(&trigger("idle = 1\nof = \"client\"\nthen = \"copy\""), (7, 6), "add bytes = NUMBER");
    expect(&trigger("at = \"25:00\"\nthen = \"copy\""), (6, 6), "hours and minutes of UTC");
    expect(&trigger("idle = 7200\nthen = \"copy\""), (6, 8), "idle_limit");
    expect(&trigger("idle = 1\nthen = \"tap\""), (7, 8), "add dir = ");
    expect(&trigger("idle = 1\nthen = \"copy\"\ndir = \"d\""), (8, 7), "then = \"tap\"");
    expect(&trigger("idle = 1\nthen = \"ask\""), (7, 8), "Add program = ");
    expect(&trigger("idle = 1\nthen = \"kill\"\nlimit = 1"), (8, 9), "no program is asked");
    expect(&trigger("idle = 1\nthen = \"ask\"\nprogram = \"nothing\""), (8, 11), "cannot be run");
    let twice = trigger("data = \"client\"\nthen = \"copy\"\n[[listener.trigger]]\ndata = \"server\"\nthen = \"kill\"");
    expect(&twice, (8, 1), "of one host at most");
    let many = trigger("idle = 1\nthen = \"copy\"") + &"[[listener.trigger]]\nidle = 1\nthen = \"copy\"\n".repeat(16);
    expect(&many, (5 + 16 * 3, 1), "16 triggers at most");
    let with = |key: &str, more: &str| format!("{PLUG}{key}\n[[listener.trigger]]\n{more}\n");
    let never = with("policy.splice = \"never\"", "data = \"client\"\nthen = \"copy\"");
    expect(&never, (7, 8), "remove splice = \"never\"");
    expect(&with("tap = \"t\"", "idle = 1\nthen = \"tap\"\ndir = \"d\""), (9, 7), "a tap from the beginning");
    let ftp = trigger("idle = 1\nthen = \"copy\"").replace("\"plug\"", "\"ftp\"");
    expect(&ftp, (5, 1), "sessions of FTP");
}
