//! `[admin]`: metrics in the format of OpenMetrics, as Prometheus and others get them.

use crate::running::{AT_ONCE, Running, Setting, eventually, listener, round_trip};
use longsplice_lab::{
    Family,
    process::ChildGuard,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(30);
const ADMIN: &str = "127.0.0.1:9180";

/// A plug named `front` that splices at once, and `[admin]` with these keys.
fn setting(admin: &str) -> Setting {
    let (at, to) = (FORWARDER_TO_CLIENT.port(Family::V4, 7000), SERVER.port(Family::V4, 7000));
    let plug = listener("plug", &at.to_string(), &format!("name = \"front\"\ntarget = \"{to}\"\n{AT_ONCE}"));
    let setting = Setting::new(&format!("{plug}[admin]\n{admin}\n"));
    setting.echo(to);
    setting
}

/// A client whose connection through the plug is spliced.
fn spliced(setting: &Setting, proxy: &Running) -> TcpStream {
    let at = FORWARDER_TO_CLIENT.port(Family::V4, 7000);
    let mut client = setting.lab.client.run(|| crate::running::connect(at));
    proxy.wait_flow("spliced");
    round_trip(&mut client, &[7; 100_000]);
    client
}

fn asking(setting: &Setting, at: SocketAddr) -> TcpStream {
    let stream = setting.lab.forwarder.run(|| TcpStream::connect_timeout(&at, PATIENCE)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends a request and returns what comes until the end of the stream.
fn ask(setting: &Setting, at: SocketAddr, request: &str) -> String {
    let mut stream = asking(setting, at);
    stream.write_all(request.as_bytes()).unwrap();
    let mut got = String::new();
    // a reset may follow the reply, if there is more than was read
    match stream.read_to_string(&mut got) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
        _ => got,
    }
}

/// Returns the values by name and labels, as they are written.
fn metrics(setting: &Setting) -> BTreeMap<String, f64> {
    let got = ask(setting, ADMIN.parse().unwrap(), "GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n");
    let (head, text) = got.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", text.len())), "{head}");
    assert!(text.ends_with("\n# EOF\n"), "{text}");
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
        })
        .collect()
}

/// The values are those of `longsplice counters`, and each of them is there.
#[test]
#[ignore = "root"]
fn what_is_counted_is_served() {
    let setting = setting(&format!("listen = \"{ADMIN}\""));
    let proxy = setting.start();
    drop(spliced(&setting, &proxy));
    proxy.flows_end();
    proxy.client(&["reload"]);
    // nothing moves, between two looks that are alike
    let (counters, got) = eventually("values that are alike", || {
        let (before, got, after) = (proxy.counters(), metrics(&setting), proxy.counters());
        (before == after).then_some((after, got))
    });
    let Value::Object(of_proxy) = &counters["proxy"] else { panic!("{counters}") };
    assert!(of_proxy.len() > 50, "{of_proxy:?}");
    for (name, value) in of_proxy {
        let [gauge, counter] = ["", "_total"].map(|end| got.get(&format!("longsplice_{name}{end}")));
        assert_eq!(gauge.xor(counter).copied(), value.as_f64(), "{name}");
    }
    let Value::Object(verdicts) = &counters["verdicts"] else { panic!("{counters}") };
    for (name, value) in verdicts {
        assert_eq!(
            got.get(&format!("longsplice_verdicts_total{{verdict=\"{name}\"}}")).copied(),
            value.as_f64(),
            "{name}"
        );
    }
    // what the listener's counters say of what has ended
    let of_front = &counters["listeners"][0];
    let [up, down, spliced_up, spliced_down] =
        ["bytes_up", "bytes_down", "spliced_up", "spliced_down"].map(|key| of_front[key].as_f64().unwrap());
    assert!(spliced_up + spliced_down > 0.0, "{of_front}");
    for (metric, labels, value) in [
        ("live", "", 0.0),
        ("ended_total", ",how=\"closed\"", of_front["ended"]["closed"].as_f64().unwrap()),
        ("bytes_total", ",direction=\"up\",stage=\"copied\"", up - spliced_up),
        ("bytes_total", ",direction=\"up\",stage=\"spliced\"", spliced_up),
        ("bytes_total", ",direction=\"down\",stage=\"copied\"", down - spliced_down),
        ("bytes_total", ",direction=\"down\",stage=\"spliced\"", spliced_down),
        ("lifetime_seconds_count", "", 1.0),
        ("lifetime_seconds_sum", "", of_front["lifetimes"]["sum_ms"].as_f64().unwrap() / 1e3),
        ("lifetime_seconds_bucket", ",le=\"86400.0\"", 1.0),
        ("lifetime_seconds_bucket", ",le=\"+Inf\"", 1.0),
        ("connect_seconds_count", "", 1.0),
        ("connect_seconds_sum", "", of_front["connects"]["sum_ms"].as_f64().unwrap() / 1e3),
        ("connect_seconds_bucket", ",le=\"10.0\"", 1.0),
        ("reply_seconds_count", "", 0.0), // it is no listener for HTTP
    ] {
        // the encoder puts the bound of a group first
        let (own, all) = (labels.trim_start_matches(','), format!("listener=\"front\"{labels}"));
        let names = [all, format!("{own},listener=\"front\"")].map(|l| format!("longsplice_listener_{metric}{{{l}}}"));
        assert_eq!(names.iter().find_map(|name| got.get(name)).copied(), Some(value), "{names:?} of {got:?}");
    }
    for name in ["flows_spliced", "flows_taken_back", "reloads"] {
        assert_eq!(of_proxy[name], 1, "{name}: {counters}");
    }
    for (name, least) in [
        ("longsplice_accepted_total", 1.0),
        ("longsplice_listener_spliced_total{listener=\"front\"}", 1.0),
        ("longsplice_verdicts_total{verdict=\"forwarded\"}", 1.0),
        ("longsplice_table_room", 2.0),
        ("longsplice_splices{reason=\"\"}", 1.0),
        (concat!("longsplice_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"}"), 1.0),
        ("process_resident_memory_bytes", 1e6),
        ("process_open_fds", 5.0),
        ("process_max_fds", 5.0),
        ("process_start_time_seconds", 1.7e9),
    ] {
        assert!(got.get(name).is_some_and(|value| *value >= least), "{name}: {:?}", got.get(name));
    }
}

/// Prometheus itself reads them.
#[test]
#[ignore = "root"]
fn prometheus_reads_them() {
    let setting = setting(&format!("listen = \"{ADMIN}\""));
    let proxy = setting.start();
    let _client = spliced(&setting, &proxy);
    let prometheus = Prometheus::start(&setting);
    for (query, want) in [("up", "1"), ("longsplice_accepted_total", "1"), ("longsplice_live", "1")] {
        eventually(query, || {
            let said = prometheus.says("query", query)?;
            (said["data"]["result"][0]["value"][1] == want).then_some(())
        });
    }
}

/// The alerts and the board that are installed as examples: of metrics that exist, in a language that Prometheus understands.
#[test]
#[ignore = "root"]
fn prometheus_understands_the_alerts_and_the_board() {
    let pool = format!("listen = \"{ADMIN}\"\n[pool.web]\nservers = [\"10.77.2.2:80\"]\n");
    let setting = setting(&pool);
    let mut proxy = setting.start();
    drop(spliced(&setting, &proxy));
    proxy.flows_end();
    let served = metrics(&setting);
    let [alerts, board] =
        ["prometheus-alerts.yml", "grafana-dashboard.json"].map(|file| fs::read_to_string(dist(file)).unwrap());
    let of_program =
        |word: &&str| ["longsplice_", "process_"].iter().any(|p| word.strip_prefix(p).is_some_and(|s| !s.is_empty()));
    let words = |text: &str| -> Vec<String> {
        let all = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
        all.filter(of_program).map(str::to_owned).collect()
    };
    for word in [words(&alerts), words(&board)].concat() {
        let is_served =
            |name: &String| name.strip_prefix(&word).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        assert!(served.keys().any(is_served), "{word}");
    }
    let prometheus = Prometheus::start(&setting);
    let rules = || prometheus.says("rules", "").map(|said| said["data"]["groups"][0]["rules"].clone());
    eventually("rules that are evaluated", || {
        let rules = rules()?;
        let rules = rules.as_array().filter(|rules| rules.iter().all(|rule| rule["health"] == "ok"))?;
        (rules.len() == alerts.matches("- alert:").count()).then_some(())
    });
    let board: Value = serde_json::from_str(&board).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut asked = 0;
    for target in targets {
        let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "10s").replace("$instance", ".*");
        let said = prometheus.says("query", &query).unwrap();
        assert_eq!(said["status"], "success", "{query}: {said}");
        asked += 1;
    }
    assert!(asked > 15, "{asked}");
    // of what is no longer there, an alert tells
    proxy.stop(&setting.pins[0]);
    eventually("an alert", || {
        let rules = rules()?;
        rules
            .as_array()?
            .iter()
            .any(|rule| rule["name"] == "LongspliceDown" && rule["state"] == "pending")
            .then_some(())
    });
}

/// A file of those that are installed.
fn dist(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist").join(file)
}

/// A Prometheus that reads the metrics each second, with the alerts that are installed as an example.
struct Prometheus<'s> {
    setting: &'s Setting,
    _process: ChildGuard,
}

impl Prometheus<'_> {
    fn start(setting: &Setting) -> Prometheus<'_> {
        let file = setting.dir.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: ['{}']\n\
             scrape_configs: [{{job_name: longsplice, static_configs: [{{targets: ['{ADMIN}']}}]}}]\n",
            dist("prometheus-alerts.yml").display()
        );
        fs::write(&file, text).unwrap();
        let mut prometheus = setting.lab.forwarder.command("prometheus");
        prometheus.arg(format!("--config.file={}", file.display()));
        prometheus.arg(format!("--storage.tsdb.path={}", setting.dir.path().join("data").display()));
        prometheus.arg("--web.listen-address=127.0.0.1:9090");
        Prometheus { setting, _process: ChildGuard::spawn(&mut prometheus).unwrap() }
    }

    /// What its HTTP interface answers; none while it starts.
    fn says(&self, what: &str, query: &str) -> Option<Value> {
        let (url, query) = (format!("http://127.0.0.1:9090/api/v1/{what}"), format!("query={query}"));
        let said = self.setting.lab.forwarder.execute("curl", &["-sG", "--data-urlencode", &query, &url]).ok()?;
        serde_json::from_str(&said).ok()
    }
}

/// Strangers, clients that say nothing, and what is no request: each gets its answer, and nobody else waits for it.
#[test]
#[ignore = "root"]
fn who_is_answered() {
    let setting = setting("listen = \"0.0.0.0:9180\"\nallow = [\"127.0.0.1\", \"10.77.2.0/24\"]");
    let proxy = setting.start();
    let local = ADMIN.parse().unwrap();
    let silent: Vec<_> = (0..10).map(|_| asking(&setting, local)).collect();
    for (request, want) in [
        ("GET / HTTP/1.1\r\nConnection: close\r\n\r\n", "HTTP/1.1 404 "),
        ("PUT /metrics HTTP/1.1\r\nConnection: close\r\n\r\n", "HTTP/1.1 405 "),
        ("GET /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", "HTTP/1.1 413 "),
        ("\0\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        let got = ask(&setting, local, request);
        assert!(got.starts_with(want), "{request:?}: {got}");
    }
    // two requests at once, by a client that keeps its connection
    let both = "HEAD /metrics HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n";
    let got = ask(&setting, local, both);
    assert_eq!((got.matches("HTTP/1.1 200 OK").count(), got.matches("# EOF").count()), (2, 1), "{got}");
    // an address that `allow` does not have
    let strange = SocketAddr::from(([10, 77, 1, 1], 9180));
    let mut stranger = setting.lab.client.run(|| TcpStream::connect_timeout(&strange, PATIENCE)).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is disconnected");
    drop(silent);
    let _client = spliced(&setting, &proxy);
}

#[test]
#[ignore = "root"]
fn an_address_that_is_taken_is_named() {
    let setting = setting(&format!("listen = \"{ADMIN}\""));
    let _other = setting.lab.forwarder.run(|| std::net::TcpListener::bind(ADMIN)).unwrap();
    let said = setting.refused();
    let want = format!("cannot listen on {ADMIN} for [admin]: Address already in use");
    assert!(said.contains(&want) && said.contains("longsplice.toml:"), "{said}");
}
