//! `longsplice import` from outside: a file of another proxy becomes one that the program runs with.

use crate::running::{LONGSPLICE, Running, connect, longsplice, loopback_echo, round_trip};
use std::{fs, path::Path, process::Command};

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/import").join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_file_of_haproxy_is_imported_checked_and_run() {
    let echo = loopback_echo();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (theirs, ours) = (path("haproxy.cfg"), path("longsplice.toml"));
    let text = format!(
        "global\n    daemon\ndefaults\n    mode tcp\n    timeout connect 5s\n    timeout client 1m\n    timeout server 1m\n\
         frontend front\n    bind 127.0.0.1:10001\n    tcp-request connection reject unless {{ src 127.0.0.0/8 }}\n    \
         default_backend back\nbackend back\n    balance leastconn\n    server one {echo} check inter 1s\n    \
         server two 127.0.0.1:9 backup\n"
    );
    fs::write(&theirs, text).unwrap();
    let output = longsplice(&["import", &theirs]);
    assert!(output.status.success(), "{output:?}");
    let written = String::from_utf8(output.stdout).unwrap();
    assert!(written.contains("\n# line 2: daemon: left out: "), "{written}");
    // any port that is free
    fs::write(&ours, written.replace("127.0.0.1:10001", "127.0.0.1:0")).unwrap();
    let check = longsplice(&["check", "--config", &ours, "--copy-only"]);
    assert!(check.status.success(), "{check:?}");
    let proxy = Running::start(Command::new(LONGSPLICE), None, &["--copy-only", "--config", &ours], &[]);
    let mut client = connect(proxy.address());
    round_trip(&mut client, b"through what HAProxy was told");
}

#[test]
fn what_cannot_be_imported_is_explained_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("haproxy.cfg");
    fs::write(&file, "frontend a\n    bind :80\n    default_backend b\n").unwrap();
    let output = longsplice(&["import", file.to_str().unwrap()]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{message}");
    assert!(message.contains("haproxy.cfg:3: there is no backend b"), "{message}");
    let missing = longsplice(&["import", "/nowhere/haproxy.cfg"]);
    assert_eq!((missing.status.code(), missing.stdout.len()), (Some(1), 0));
    assert!(String::from_utf8(missing.stderr).unwrap().contains("/nowhere/haproxy.cfg: "));
}

#[test]
fn the_format_can_be_given() {
    let file = data("nginx-included.conf");
    let output = longsplice(&["import", "--from", "nginx", &file]);
    let expected = fs::read_to_string(format!("{file}.toml")).unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    let wrong = longsplice(&["import", "--from", "dante", &file]);
    assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
}
