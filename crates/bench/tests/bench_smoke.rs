//! Checks that the bench measures and keeps what it should; not how fast anything is.

use serde_json::Value;
use std::{
    collections::HashSet,
    fs,
    path::PathBuf,
    process::{Command, Output},
    sync::{Mutex, PoisonError, RwLock},
};

/// The memory of sockets is measured for the whole kernel, so that measurement needs exclusive access.
static KERNEL: RwLock<()> = RwLock::new(());

/// The output and the results of `longsplice-bench`.
struct BenchOutput {
    said: String,
    dir: PathBuf,
    results: Value,
    cases: Value,
    _out: tempfile::TempDir,
}

fn longsplice_bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_longsplice-bench")).args(arguments).output().unwrap()
}

/// Measures these parts with the shortest possible rounds.
fn bench(what: &[&str]) -> BenchOutput {
    let out = tempfile::tempdir().unwrap();
    let options = ["--rounds", "1", "--seconds", "0.1", "--out", out.path().to_str().unwrap()];
    let run = || longsplice_bench(&[what, &options].concat());
    let bench = if what == ["memory"] {
        let _alone = KERNEL.write().unwrap_or_else(PoisonError::into_inner);
        run()
    } else {
        let _others = KERNEL.read().unwrap_or_else(PoisonError::into_inner);
        run()
    };
    let (said, complained) = (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
    assert!(bench.status.success(), "{said}\n{complained}");
    let dir = fs::read_dir(out.path()).unwrap().next().expect("a directory of results").unwrap().path();
    let [results, cases] = ["results.json", "results.rounds.json"]
        .map(|name| serde_json::from_str(&fs::read_to_string(dir.join(name)).unwrap()).unwrap());
    BenchOutput { said: said.into_owned(), dir, results, cases, _out: out }
}

impl BenchOutput {
    fn has(&self, text: &str) {
        assert!(self.said.contains(text), "no {text:?} in\n{}", self.said);
    }

    fn drew(&self, name: &str) {
        let svg = fs::read_to_string(self.dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(svg.contains("<svg") && svg.contains("<text"), "{name}");
    }

    /// Checks that all cases of a kind have these variants with figures. Returns the number of cases.
    fn cases(&self, what: &str, variants: &[&str]) -> usize {
        let all = self.cases.as_array().unwrap();
        let of_kind: Vec<&Value> = all.iter().filter(|case| case["subject"]["what"] == what).collect();
        for case in &of_kind {
            let runs = case["rounds"][0]["runs"].as_array().unwrap();
            for variant in variants {
                let run = runs.iter().find(|run| run["variant"] == *variant);
                let run = run.unwrap_or_else(|| panic!("no {variant} in {}", case["subject"]));
                let figure = |name: &str| run["figures"][name].as_f64();
                assert!(figure("amount") > Some(0.0) && figure("value") > Some(0.0), "{run}");
            }
            let lines = self.results["lines"].as_array().unwrap();
            let line = lines.iter().find(|l| l["subject"] == case["subject"] && l["variant"] == variants[0]).unwrap();
            assert!(line["ratios"]["value"]["median"].as_f64() > Some(0.0), "{line}");
        }
        of_kind.len()
    }

    fn lines(&self, which: impl Fn(&Value) -> bool) -> Vec<&Value> {
        self.results["lines"].as_array().unwrap().iter().filter(|l| which(l)).collect()
    }

    /// Checks that peers are either measured or reported as missing.
    fn peers(&self, what: &str, peers: &[(&str, &str)]) {
        let skipped = self.results["skipped"].to_string();
        let lines = self.results["lines"].as_array().unwrap();
        let measured: HashSet<&str> =
            lines.iter().filter(|l| l["subject"]["what"] == what).map(|l| l["variant"].as_str().unwrap()).collect();
        for (variant, title) in peers {
            assert!(measured.contains(variant) != skipped.contains(title), "{variant}: {measured:?}, {skipped}");
        }
    }
}

#[test]
#[ignore = "root"]
fn datagrams() {
    let kept = bench(&["datagrams"]);
    assert_eq!(kept.cases("datagrams", &["direct", "ip-forward", "copy-socks"]), 4, "two sizes, alone and in numbers");
    kept.peers("datagrams", &[("dante", "Dante")]);
}

#[test]
#[ignore = "root"]
fn bench_smoke() {
    let kept = bench(&["segment", "ratio", "switch", "trace"]);
    let table = fs::read_to_string(kept.dir.join("results.md")).unwrap();
    assert!(kept.said.starts_with(&table), "the tables are kept as they were printed");
    assert_eq!((&kept.results["format"], &kept.results["rounds"]), (&5.into(), &1.into()));
    for name in ["cpu", "kernel", "longsplice"] {
        assert!(kept.results["machine"][name].as_str().is_some_and(|text| !text.is_empty()), "{name}");
    }
    let ours = ["direct", "ip-forward", "spliced", "copy", "pipes", "identity"];
    assert_eq!(kept.cases("segment", &ours), 2, "one byte, and a full segment");
    kept.peers(
        "segment",
        &[
            ("filter", "IP, filtered"),
            ("nat", "IP, NAT"),
            ("haproxy", "HAProxy"),
            ("nginx", "nginx"),
            ("socat", "socat"),
            ("dante", "Dante"),
        ],
    );
    assert_eq!(kept.cases("ratio", &["ip-forward", "spliced", "copy"]), 2, "three to one is derived only");
    kept.has("| 3:1 | spliced |");
    let forced = kept.lines(|l| l["subject"]["what"] == "ratio");
    let forced = forced.into_iter().filter(|l| l["subject"]["segments"] == 1);
    let forced = forced.map(|l| l["figures"]["per-ack"]["median"].as_f64().unwrap());
    for per_ack in forced {
        assert!((0.8..1.5).contains(&per_ack), "one acknowledgement for each segment, not for {per_ack}");
    }
    let switch = kept.lines(|l| l["subject"]["what"] == "switch");
    let has = |n: usize, step: &str| switch[n]["figures"][step]["median"].as_f64() > Some(0.0);
    assert!(has(0, "unsplice") && has(1, "unsplice") && has(2, "release") && has(2, "recreate"), "{switch:?}");
    kept.has("| splice, release and recreate |");
    kept.drew("segments.svg");
    kept.drew("trace.svg");
}

#[test]
#[ignore = "root"]
fn throughput_and_connections() {
    let kept = bench(&["bulk", "response", "rate"]);
    assert_eq!(kept.cases("bulk", &["ip-forward", "spliced", "copy"]), 9, "three kinds of packets, 1, 8 and 64");
    kept.peers("bulk", &[("haproxy", "HAProxy"), ("nginx", "nginx"), ("socat", "socat"), ("dante", "Dante")]);
    let socks = ["ip-forward", "spliced-socks", "copy-socks"];
    assert_eq!(kept.cases("response", &socks), 6 + 5, "the largest with one client only");
    assert_eq!(kept.cases("rate", &["ip-forward", "spliced", "default", "copy"]), 2);
    ["bulk.svg", "response.svg", "rate.svg"].iter().for_each(|name| kept.drew(name));
    kept.has("| packets | IP forwarding | spliced |");
    kept.has("Milliseconds from the request to the last byte");
    kept.has("Share of these connections that were spliced");
}

#[test]
#[ignore = "root"]
fn http() {
    let kept = bench(&["http"]);
    assert_eq!(kept.cases("http", &["ip-forward", "spliced", "default", "copy", "haproxy", "nginx"]), 4);
    assert_eq!(kept.cases("body", &["spliced", "copy"]), 9);
    kept.has("| reply | IP forwarding | spliced |");
    kept.has("Splicing a body takes");
    kept.drew("http.svg");
}

#[test]
#[ignore = "root"]
fn memory() {
    let kept = bench(&["memory"]);
    let held = kept.lines(|l| l["subject"]["what"] == "memory");
    let of = |variant: &str| {
        let found = held.iter().find(|l| l["variant"] == variant);
        &found.unwrap_or_else(|| panic!("no {variant} in {held:?}"))["figures"]
    };
    let [parked, released] = ["spliced", "released"].map(|v| of(v)["forwarder"]["median"].as_f64().unwrap());
    assert!(released < parked / 2.0, "sockets of released flows are gone: {released} of {parked} bytes");
    assert!(of("copy")["resident"]["median"].as_f64() > Some(0.0));
    assert!(of("ip-forward")["resident"].is_null(), "nobody is in the middle");
    assert_eq!(kept.lines(|l| l["subject"]["what"] == "table").len(), 3);
}

/// A flood beside them, or the links of another network, would fill the kernel's queues for received packets.
static LINKS: Mutex<()> = Mutex::new(());

#[test]
#[ignore = "root"]
fn flood_smoke() {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = bench(&["flood", "--flows", "1,1000"]);
    assert_eq!(kept.cases("flood", &["ip-forward", "tcx", "identity"]), 2);
    kept.peers("flood", &[("filter", "IP, filtered"), ("nat", "IP, NAT")]);
    kept.has("| random among | IP forwarding |");
    let lost = kept.cases.to_string().contains("of the packets were lost");
    assert!(!lost, "{}", kept.said);
}

#[test]
#[ignore = "root"]
fn a_small_million() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let bench = longsplice_bench(&["million", "--connections", "200", "--out", out]);
    let (said, complained) = (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
    assert!(bench.status.success(), "{said}\n{complained}");
    assert!(said.contains("200 connections, spliced and released"), "{said}");
    let entry = fs::read_dir(dir.path()).unwrap().next().expect("a directory of results").unwrap();
    assert!(!entry.path().join("results.json").exists(), "what else there is stays as it was");
    let kept: Value = serde_json::from_str(&fs::read_to_string(entry.path().join("million.json")).unwrap()).unwrap();
    let line = &kept["lines"][0];
    let figure = |name: &str| line["figures"][name]["median"].as_f64().unwrap();
    assert_eq!((&line["subject"]["connections"], figure("checked")), (&200.into(), 100.0), "{line}");
    assert!(figure("micros-all") > 0.0, "{line}");
}

/// Measures chosen cells over long paths in one round. Returns the output, and the lines of each file.
fn far(arguments: &[&str]) -> (String, impl Fn(&str) -> Vec<Value> + use<>) {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let out = ["--rounds", "1", "--out", dir.path().to_str().unwrap()];
    let bench = longsplice_bench(&[arguments, &out].concat());
    let (said, complained) = (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
    assert!(bench.status.success(), "{said}\n{complained}");
    let lines = move |name: &str| {
        let entry = fs::read_dir(dir.path()).unwrap().next().expect("a directory of results").unwrap();
        let kept: Value = serde_json::from_str(&fs::read_to_string(entry.path().join(name)).unwrap()).unwrap();
        kept["lines"].as_array().unwrap().clone()
    };
    (said.into_owned(), lines)
}

/// The figure of a line; `None` if it has none.
fn figure(line: &Value, name: &str) -> Option<f64> {
    line["figures"][name]["median"].as_f64()
}

/// The lines of each transfer.
fn transfers(lines: &[Value]) -> Vec<Vec<&Value>> {
    let paths: Vec<&Value> = lines.iter().filter(|l| l["subject"]["what"] == "path").collect();
    paths.chunk_by(|a, b| a["subject"] == b["subject"]).map(<[&Value]>::to_vec).collect()
}

#[test]
#[ignore = "root"]
fn wan_smoke() {
    let chosen = ["--rtt", "c10,s10", "--size", "1m", "--cc", "cubic", "--proto", "plug,http", "--ip", "v6"];
    let (said, lines) = far(&[&["wan", "--parts", "cells,unsplice"][..], &chosen].concat());
    assert!(said.contains("| c10, 1 MB, cubic, HTTP, IPv6 |"), "{said}");
    let lines = lines("wan.json");
    let rows = transfers(&lines);
    assert_eq!(rows.len(), 4, "{said}");
    for row in rows {
        let line = |variant: &str| *row.iter().find(|line| line["variant"] == variant).unwrap();
        // Connecting and the request are two round trips; a request on a warm connection is one.
        let least = if row[0]["subject"]["protocol"] == "http" { 0.01 } else { 0.02 };
        for variant in ["ip-forward", "copy", "spliced", "default"] {
            assert!(figure(line(variant), "value") > Some(least), "{row:?}");
            assert_eq!(figure(line(variant), "dropped"), Some(0.0), "{row:?}");
        }
        assert_eq!(figure(line("copy"), "spliced"), Some(0.0), "{row:?}");
        assert!(figure(line("spliced"), "spliced") > Some(0.5), "{row:?}");
    }
    assert_eq!(lines.iter().filter(|l| l["subject"]["what"] == "unsplice").count(), 2, "{said}");
}

#[test]
#[ignore = "root"]
fn tpot_smoke() {
    let chosen = ["--rtt", "b20,t30", "--size", "1,500k", "--ip", "v4,v6"];
    let (said, lines) = far(&[&["tpot", "--parts", "cells,costs", "--seconds", "0.1"][..], &chosen].concat());
    let head = "| routed | basic, copied | pipelined, copied | pipelined, spliced | two, copied | two, spliced |";
    assert!(said.contains(head), "{said}");
    let costs = lines("tpot-costs.json");
    for what in ["segment", "rate"] {
        let variants: Vec<&Value> =
            costs.iter().filter(|line| line["subject"]["what"] == what).map(|line| &line["variant"]).collect();
        for variant in ["ip-forward", "beside-tpot", "copy-tpot", "spliced-tpot", "spliced-tpot-udp"] {
            assert!(variants.iter().any(|v| *v == variant), "{variant}: {variants:?}");
        }
    }
    assert!(said.contains("| spliced, TPOT in UDP |"), "{said}");
    let lines = lines("tpot.json");
    let rows = transfers(&lines);
    assert_eq!(rows.len(), 8, "{said}");
    for row in rows {
        let round_trip = row[0]["subject"]["distance"]["ms"].as_f64().unwrap() / 1000.0;
        let variants: Vec<_> = row.iter().map(|line| line["variant"].as_str().unwrap()).collect();
        let one = ["ip-forward", "tpot-basic", "tpot-pipelined", "tpot-spliced"];
        assert_eq!(variants, [&one[..], &["tpot-two", "tpot-two-spliced"]].concat(), "{row:?}");
        // Connecting and the request are two round trips. With pipelined proxies, it takes one for the request, and that of the
        // longest segment for connecting: half of the path, or a third.
        for (line, least) in row.iter().zip([2.0, 2.0, 1.5, 1.5, 1.3, 1.3]) {
            assert!(figure(line, "value") >= Some(least * round_trip), "{row:?}");
            assert_eq!(figure(line, "dropped"), Some(0.0), "{row:?}");
        }
        let shares = [0, 1, 2, 3, 4, 5].map(|n| figure(row[n], "spliced"));
        assert_eq!([shares[0], shares[1], shares[2], shares[4]], [None, Some(0.0), Some(0.0), Some(0.0)], "{row:?}");
        assert!(shares[3] > Some(0.5) && shares[5] > Some(0.5), "{row:?}");
    }
}

#[test]
fn without_results_there_are_no_figures() {
    let dir = tempfile::tempdir().unwrap();
    let bench = longsplice_bench(&["--readme", "--out", dir.path().to_str().unwrap()]);
    assert!(!bench.status.success());
    assert!(String::from_utf8_lossy(&bench.stderr).contains("run `longsplice-bench`"));
}
