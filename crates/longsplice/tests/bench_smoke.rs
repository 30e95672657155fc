//! That the bench measures and keeps what it should; not how fast anything is.

mod running;

use running::longsplice;
use serde_json::Value;
use std::fs;

#[test]
fn needs_root_and_bpf_bench_smoke() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let bench = longsplice(&["bench", "bulk", "--rounds", "1", "--seconds", "0.3", "--out", out]);
    let (said, complained) = (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
    assert!(bench.status.success(), "{said}\n{complained}");
    assert!(said.contains("| packets | connections | IP forwarding | spliced |"), "{said}");

    let entry = fs::read_dir(dir.path()).unwrap().next().expect("a directory of results").unwrap();
    let table = fs::read_to_string(entry.path().join("results.md")).unwrap();
    assert!(said.starts_with(&table), "the table is kept as it was printed");
    let results: Value = serde_json::from_str(&fs::read_to_string(entry.path().join("results.json")).unwrap()).unwrap();
    assert_eq!((&results["format"], &results["setup"]["rounds"]), (&1.into(), &1.into()));
    for name in ["cpu", "kernel", "longsplice"] {
        assert!(results["machine"][name].as_str().is_some_and(|text| !text.is_empty()), "{name}");
    }
    let cases = results["bulk"].as_array().unwrap();
    assert_eq!(cases.len(), 4, "large and MTU-sized packets, one connection and eight");
    for case in cases {
        let runs = case["rounds"][0]["runs"].as_array().unwrap();
        for variant in ["ip-forward", "spliced", "copy"] {
            let run = runs.iter().find(|run| run["variant"] == variant).unwrap_or_else(|| panic!("no {variant}"));
            assert!(run["bytes"].as_u64().unwrap() > 0 && run["gbit"].as_f64().unwrap() > 0.0, "{run}");
        }
    }
    let summary = results["summary"]["bulk"].as_array().unwrap();
    let spliced = summary.iter().find(|s| s["variant"] == "spliced").unwrap();
    assert!(spliced["ratio"]["median"].as_f64().unwrap() > 0.0);
    assert!(summary.iter().any(|s| s["variant"] == "haproxy") == results["skipped"].as_array().unwrap().is_empty());
}

#[test]
fn needs_root_and_bpf_a_small_million() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let bench = longsplice(&["bench", "million", "--connections", "200", "--out", out]);
    let (said, complained) = (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
    assert!(bench.status.success(), "{said}\n{complained}");
    assert!(said.contains("200 connections, spliced and released"), "{said}");
    let entry = fs::read_dir(dir.path()).unwrap().next().expect("a directory of results").unwrap();
    let results: Value = serde_json::from_str(&fs::read_to_string(entry.path().join("results.json")).unwrap()).unwrap();
    let million = &results["million"];
    assert_eq!((&million["connections"], &million["checked"]), (&200.into(), &100.into()), "{million}");
    assert!(million["micros_all"].as_f64().unwrap() > 0.0, "{million}");
}

#[test]
fn without_results_there_are_no_figures() {
    let dir = tempfile::tempdir().unwrap();
    let bench = longsplice(&["bench", "--readme", "--out", dir.path().to_str().unwrap()]);
    assert!(!bench.status.success());
    assert!(String::from_utf8_lossy(&bench.stderr).contains("run `longsplice bench`"));
}
