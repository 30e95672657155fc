//! The demo itself.

use std::{fs, process::Command};

/// Runs the demo to its end. Returns its output.
fn demo(arguments: &[&str]) -> String {
    let program = env!("CARGO_BIN_EXE_longsplice-bench");
    let demo = Command::new(program).arg("demo").args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&demo.stdout);
    assert!(demo.status.success(), "{text}\n{}", String::from_utf8_lossy(&demo.stderr));
    text.into_owned()
}

/// Takes half a minute, and longer where digests are not optimised.
#[test]
#[ignore = "root"]
fn the_demo_works() {
    let dir = tempfile::tempdir().unwrap();
    let text = demo(&["--out", dir.path().to_str().unwrap()]);
    assert!(text.contains("complete: 1.1 GB"), "{text}");
    assert!(fs::read_to_string(dir.path().join("switch.svg")).unwrap().contains("</svg>"));
}

#[test]
#[ignore = "root"]
fn the_demo_of_ftp_works() {
    let dir = tempfile::tempdir().unwrap();
    let text = demo(&["ftp", "--out", dir.path().to_str().unwrap()]);
    assert!(text.contains("spliced before its first byte") && text.contains("complete: 268.4 MB"), "{text}");
    assert!(fs::read_to_string(dir.path().join("ftp.svg")).unwrap().contains("</svg>"));
}

#[test]
#[ignore = "root"]
fn the_demo_of_http_works() {
    let text = demo(&["http"]);
    assert!(text.contains("all 1000 replies are what was asked for") && text.contains("went past the proxy"), "{text}");
}

#[test]
#[ignore = "root"]
fn the_demo_of_tpot_works() {
    let text = demo(&["tpot"]);
    assert!(text.contains("the download stays with its proxies") && text.contains("as served"), "{text}");
}
