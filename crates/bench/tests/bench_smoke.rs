//! Checks that the bench measures and keeps what it should; not how fast anything is.

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{Mutex, PoisonError, RwLock},
    thread,
    time::Duration,
};

/// The memory of sockets is measured for the whole kernel, so that measurement needs exclusive access.
static KERNEL: RwLock<()> = RwLock::new(());

/// A flood beside them, or the links of another network, would fill the kernel's queues for received packets.
static LINKS: Mutex<()> = Mutex::new(());

/// The output of `longsplice-bench`, and the directory of its results.
struct BenchOutput {
    said: String,
    dir: PathBuf,
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
    BenchOutput { said: said.into_owned(), dir, _out: out }
}

/// The median of a figure of a line; `None` if it has none.
fn figure(line: &Value, name: &str) -> Option<f64> {
    line["figures"][name]["median"].as_f64()
}

impl BenchOutput {
    fn has(&self, text: &str) {
        assert!(self.said.contains(text), "no {text:?} in\n{}", self.said);
    }

    fn results(&self, name: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(self.dir.join(name)).unwrap()).unwrap()
    }

    /// The lines of a section in a file, row by row.
    fn rows(&self, name: &str, section: &str) -> Vec<Vec<Value>> {
        let lines = self.results(name)["lines"].take();
        let lines: Vec<&Value> = lines.as_array().unwrap().iter().filter(|l| l["section"] == section).collect();
        let rows = lines.chunk_by(|a, b| a["row"] == b["row"]);
        rows.map(|row| row.iter().map(|line| (*line).clone()).collect()).collect()
    }

    /// Checks that all rows of a section have these variants with values, and a ratio for the first, or are refused. Returns
    /// the number of rows.
    fn measured(&self, section: &str, variants: &[&str]) -> usize {
        let rows = self.rows("results.json", section);
        for row in rows.iter().filter(|row| row.iter().all(|line| line["refused"].is_null())) {
            for variant in variants {
                let line = row.iter().find(|line| line["variant"] == *variant);
                let line = line.unwrap_or_else(|| panic!("no {variant} in {row:?}"));
                assert!(figure(line, "value") > Some(0.0), "{line}");
            }
            assert!(row[0]["ratios"]["value"]["median"].as_f64() > Some(0.0), "{row:?}");
        }
        rows.len()
    }

    /// Checks that peers are either measured or reported as missing.
    fn peers(&self, section: &str, peers: &[(&str, &str)]) {
        let skipped = self.results("results.json")["skipped"].to_string();
        let lines = self.rows("results.json", section).concat();
        for (variant, title) in peers {
            let measured = lines.iter().any(|line| line["variant"] == *variant);
            assert!(measured != skipped.contains(title), "{variant}: {lines:?}, {skipped}");
        }
    }
}

#[test]
#[ignore = "root"]
fn bench_smoke() {
    let kept = bench(&["segment", "ratio", "switch", "trace"]);
    let table = fs::read_to_string(kept.dir.join("results.md")).unwrap();
    assert!(kept.said.starts_with(&table), "the tables are kept as they were printed");
    assert!(kept.dir.join("results.rounds.json").exists(), "and the single runs");
    let results = kept.results("results.json");
    assert_eq!((&results["format"], &results["rounds"]), (&6.into(), &1.into()));
    for name in ["cpu", "kernel", "longsplice"] {
        assert!(results["machine"][name].as_str().is_some_and(|text| !text.is_empty()), "{name}");
    }
    let ours = ["direct", "ip-forward", "spliced", "copy", "pipes", "identity"];
    assert_eq!(kept.measured("segment", &ours), 2, "one byte, and a full segment");
    let rules = [("filter", "IP, filtered"), ("nat", "IP, NAT")];
    kept.peers("segment", &[&rules[..], &PEERS].concat());
    let ratio = kept.rows("results.json", "ratio");
    let per_ack = |row: &[Value]| row.iter().map(|line| figure(line, "per-ack")).collect::<Option<Vec<f64>>>();
    assert_eq!((ratio.len(), per_ack(&ratio[0])), (3, None), "three to one is derived only");
    for per_ack in per_ack(&ratio[2]).unwrap() {
        assert!((0.8..1.5).contains(&per_ack), "one acknowledgement for each segment, not for {per_ack}");
    }
    assert!(ratio.iter().flatten().all(|line| figure(line, "derived") > Some(0.0)), "{ratio:?}");
    let switch = kept.rows("results.json", "switch").concat();
    let has = |n: usize, step: &str| figure(&switch[n], step) > Some(0.0);
    assert!(has(0, "unsplice") && has(1, "unsplice") && has(2, "release") && has(2, "recreate"), "{switch:?}");
    kept.has("| splice, release and recreate |");
    let svg = fs::read_to_string(kept.dir.join("trace.svg")).unwrap();
    assert!(svg.contains("<svg") && svg.contains("<text"));
}

const PEERS: [(&str, &str); 4] = [("haproxy", "HAProxy"), ("nginx", "nginx"), ("socat", "socat"), ("dante", "Dante")];

#[test]
#[ignore = "root"]
fn throughput_and_connections() {
    let kept = bench(&["bulk", "response", "rate"]);
    assert_eq!(kept.measured("bulk", &["ip-forward", "spliced", "copy"]), 9, "three kinds of packets, 1, 8 and 64");
    kept.peers("bulk", &PEERS);
    let socks = ["ip-forward", "spliced-socks", "copy-socks"];
    assert_eq!(kept.measured("response", &socks), 6 + 5, "the largest with one client only");
    assert_eq!(kept.measured("rate", &["ip-forward", "spliced", "default", "copy"]), 2);
    kept.has("| packets | IP forwarding | spliced |");
    kept.has("Milliseconds from the request to the last byte");
    kept.has("Share of these connections that were spliced");
}

#[test]
#[ignore = "root"]
fn http() {
    let kept = bench(&["http", "body"]);
    assert_eq!(kept.measured("http", &["ip-forward", "spliced", "default", "copy", "haproxy", "nginx"]), 4);
    assert_eq!(kept.measured("body", &["spliced", "copy"]), 9);
    kept.has("| reply | IP forwarding | spliced |");
    kept.has("Splicing a body takes");
}

#[test]
#[ignore = "root"]
fn memory() {
    let kept = bench(&["memory"]);
    let held = kept.rows("results.json", "memory").concat();
    let of = |variant: &str, name: &str| {
        let line = held.iter().find(|l| l["variant"] == variant);
        figure(line.unwrap_or_else(|| panic!("no {variant} in {held:?}")), name)
    };
    let [parked, released] = ["spliced", "released"].map(|v| of(v, "forwarder").unwrap());
    assert!(released < parked / 2.0, "sockets of released flows are gone: {released} of {parked} bytes");
    assert!(of("copy", "resident") > Some(0.0));
    assert_eq!(of("ip-forward", "resident"), None, "no process is in the middle");
    kept.has("Tables of the data path, allocated at the start:");
}

#[test]
#[ignore = "root"]
fn flood_smoke() {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = bench(&["flood", "--flows", "1,1000"]);
    assert_eq!(kept.measured("flood", &["ip-forward", "tcx", "identity"]), 2);
    kept.peers("flood", &[("filter", "IP, filtered"), ("nat", "IP, NAT")]);
    kept.has("| random among | IP forwarding |");
    let runs = kept.results("results.rounds.json").to_string();
    assert!(!runs.contains("of the packets were lost"), "{}", kept.said);
}

#[test]
#[ignore = "root"]
fn datagrams() {
    let kept = bench(&["datagrams"]);
    assert_eq!(
        kept.measured("datagrams", &["direct", "ip-forward", "copy-socks"]),
        4,
        "two sizes, alone and in numbers"
    );
    kept.peers("datagrams", &[("dante", "Dante")]);
}

#[test]
#[ignore = "root"]
fn a_small_million() {
    let kept = bench(&["million", "--connections", "200"]);
    assert!(!kept.dir.join("results.json").exists(), "what else there is stays as it was");
    let rows = kept.rows("million.json", "million").concat();
    let value = |n: usize| figure(&rows[n], "value").unwrap();
    assert_eq!((value(0), value(6)), (200.0, 100.0), "connections, and those that were checked: {rows:?}");
    assert!(value(8) > 0.0, "a round trip: {rows:?}");
}

#[test]
#[ignore = "root"]
fn wan_smoke() {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let paths = ["c10, 1 MB, cubic, HTTP, IPv6", "s10, 1 MB, cubic, IPv6"].map(|row| ["--path", row]);
    let kept = bench(&[&["wan", "unsplice"][..], &paths.concat()].concat());
    kept.has("| c10, 1 MB, cubic, HTTP, IPv6 |");
    let rows = kept.rows("wan.json", "path");
    assert_eq!(rows.len(), 2, "{}", kept.said);
    // Connecting and the request are two round trips; a request on a warm connection is one.
    for (row, least) in rows.iter().zip([0.01, 0.02]) {
        let line = |variant: &str| row.iter().find(|line| line["variant"] == variant).unwrap();
        for variant in ["ip-forward", "copy", "spliced", "default"] {
            assert!(figure(line(variant), "value") > Some(least), "{row:?}");
            assert_eq!(figure(line(variant), "dropped"), Some(0.0), "{row:?}");
        }
        assert_eq!(figure(line("copy"), "spliced"), Some(0.0), "{row:?}");
        assert!(figure(line("spliced"), "spliced") > Some(0.5), "{row:?}");
    }
    assert_eq!(kept.rows("wan.json", "unsplice").len(), 2, "{}", kept.said);
}

#[test]
#[ignore = "root"]
fn only_the_chosen_variants_are_measured() {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = bench(&["wan", "--path", "c1, 1 KB, reno", "--variants", "copy,spliced"]);
    kept.has("| path and object | copied | spliced at once |");
}

#[test]
#[ignore = "root"]
fn tpot_smoke() {
    let _turn = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let rows = ["b20, 1 B, bbr", "t30, 500 KB, bbr", "b20, 500 KB, bbr, IPv6", "t30, 1 B, bbr, IPv6"];
    let kept = bench(&[&["tpot", "tpot-costs"][..], &rows.map(|row| ["--path", row]).concat()].concat());
    kept.has("| routed | basic, copied | pipelined, copied | pipelined, spliced | two, copied | two, spliced |");
    kept.has("| spliced, TPOT in UDP |");
    for section in ["segment", "rate", "bulk"] {
        let lines = kept.rows("tpot-costs.json", section).concat();
        for variant in ["ip-forward", "beside-tpot", "copy-tpot", "spliced-tpot", "spliced-tpot-udp"] {
            assert!(lines.iter().any(|line| line["variant"] == variant), "{section}, {variant}: {lines:?}");
        }
    }
    for (row, round_trip) in kept.rows("tpot.json", "tpot").iter().zip([0.02, 0.03, 0.02, 0.03]) {
        // Connecting and the request are two round trips. With pipelined proxies, it takes one for the request, and that of the
        // longest segment for connecting: half of the path, or a third.
        for (line, least) in row.iter().zip([2.0, 2.0, 1.5, 1.5, 1.3, 1.3]) {
            assert!(figure(line, "value") >= Some(least * round_trip), "{row:?}");
            assert_eq!(figure(line, "dropped"), Some(0.0), "{row:?}");
        }
        let shares = [0, 1, 2, 3, 4, 5].map(|n| figure(&row[n], "spliced"));
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

/// Ctrl-C at a terminal comes to all its programs, and some press it twice. A log may have nobody who reads it any more.
#[test]
#[ignore = "root"]
fn what_is_interrupted_leaves_nothing() {
    let _others = KERNEL.read().unwrap_or_else(PoisonError::into_inner);
    let out = tempfile::tempdir().unwrap();
    for signal in [Some(Signal::SIGINT), Some(Signal::SIGTERM), Some(Signal::SIGHUP), None] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longsplice-bench"));
        command.args(["threshold", "--rounds", "1000", "--seconds", "0.1", "--out", out.path().to_str().unwrap()]);
        command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut bench = command.spawn().unwrap();
        let mut complaints = BufReader::new(bench.stderr.take().unwrap());
        complaints.read_line(&mut String::new()).unwrap(); // after its first round
        let pid = bench.id();
        let status = match signal {
            None => {
                drop(complaints);
                bench.wait().unwrap()
            }
            Some(signal) => loop {
                if let Some(status) = bench.try_wait().unwrap() {
                    break status;
                }
                killpg(Pid::from_raw(pid as i32), signal).unwrap();
                thread::sleep(Duration::from_millis(1));
            },
        };
        assert!(status.code().is_some_and(|code| code > 0), "{signal:?}: {status}");
        let left = fs::read_dir("/run/netns").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = left.filter(|name| name.starts_with(&format!("ls-{pid}-"))).collect();
        assert_eq!(left, [""; 0], "{signal:?}");
    }
}

#[test]
#[ignore = "root"]
fn a_bench_with_nothing_to_measure_fails_and_says_why() {
    for (arguments, why) in [
        (&["segment", "--variants", "end-to-end"][..], "nothing was measured"),
        (&["segment", "--variants", "splced"], "--variants splced: not one of direct,"),
        (&["segment", "--path", "c1, 1 KB, reno"], "--path chooses rows of wan and tpot"),
        (&["wan", "--path", "t30, 1 KB, reno"], "`wan` has two links"),
        (&["wan", "--path", "c1, 1 KB, vegas"], "not as in `c100, 1 MB, bbr`"),
        (&["trace"], "needs --out"),
    ] {
        let bench = longsplice_bench(arguments);
        let said = String::from_utf8_lossy(&bench.stderr);
        assert!(!bench.status.success() && said.contains(why), "{arguments:?}: {said}");
    }
}
