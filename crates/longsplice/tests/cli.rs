//! The program from outside: flags, messages, control socket, and shutdown.
//!
//! None of these tests needs root.

use crate::running::{LONGSPLICE, Running, connect, eventually, longsplice, loopback_echo, round_trip};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixStream,
    },
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Standard error of a command that must fail.
fn complaint(arguments: &[&str]) -> String {
    let output = longsplice(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn wrong_flags_are_explained() {
    let help = complaint(&["run", "--copy-only"]);
    assert!(help.contains("--socks5") && help.contains("[[listener]]"), "{help}");
    let plug = complaint(&["run", "--copy-only", "--plug", "nonsense"]);
    assert!(plug.contains("--plug nonsense") && plug.contains("ADDR:PORT=HOST:PORT"), "{plug}");
    let when = complaint(&["run", "--splice", "soon"]);
    assert!(when.contains("auto, never, at-once, or a number of bytes"), "{when}");
}

#[test]
fn more_listeners_than_can_be_spliced_are_counted_before_anything_is_done() {
    let plugs = ["--plug", "127.0.0.1:0=127.0.0.1:9"].repeat(1025);
    let message = complaint(&[&["run"], &plugs[..]].concat());
    assert!(message.contains("1025 listeners, of which 1024 can be spliced"), "{message}");
}

#[test]
fn a_wrong_configuration_file_is_explained_to_the_column() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    fs::write(&file, "[[listener]]\nprotocol = \"socks5\"\nlisten = \"nowhere\"\n").unwrap();
    let message = complaint(&["run", "--config", file.to_str().unwrap()]);
    assert!(message.contains("longsplice.toml:3:10: ") && message.contains("ADDR:PORT"), "{message}");
    let message = complaint(&["run", "--config", "/nowhere/at/all.toml"]);
    assert!(message.contains("cannot read /nowhere/at/all.toml"), "{message}");
}

#[test]
fn without_a_running_proxy_clients_say_where_they_looked() {
    let message = complaint(&["ls", "--control", "/nowhere/control.sock"]);
    assert!(message.contains("/nowhere/control.sock") && message.contains("--control"), "{message}");
}

#[test]
fn sources_are_those_of_copied_connections_too() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "source = [\"127.0.0.2\", \"127.0.0.3\"]\n").unwrap();
    let target = server.local_addr().unwrap().to_string();
    let proxy = Running::copying(&target, &["--config", file.path().to_str().unwrap()]);
    let clients = [0; 2].map(|_| connect(proxy.address()));
    let mut seen = clients.each_ref().map(|_| server.accept().unwrap().1.ip().to_string());
    seen.sort();
    assert_eq!(seen, ["127.0.0.2", "127.0.0.3"]);
}

#[test]
fn a_flow_is_listed_with_the_reason_why_it_is_copied() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    assert_eq!(proxy.client(&["ls", "--json"]), "[]\n");
    let mut connection = connect(proxy.address());
    round_trip(&mut connection, b"hello");
    let flow = proxy.flow();
    assert_eq!(
        (&flow["protocol"], &flow["state"], &flow["refusal"]),
        (&"plug".into(), &"copying".into(), &"policy".into())
    );
    eventually("the bytes to show", || {
        let flow = proxy.flow();
        (flow["bytes_up"] == 5 && flow["bytes_down"] == 5).then_some(())
    });
    let table = proxy.client(&["ls"]);
    assert!(table.starts_with("ID  PROTO") && table.contains("not spliced: policy"), "{table}");
    let counters = proxy.counters();
    assert_eq!((&counters["proxy"]["relayed"], &counters["proxy"]["live"]), (&1.into(), &1.into()));
    assert!(proxy.client(&["counters"]).contains("relayed "));
    let mut second = connect(proxy.address());
    round_trip(&mut second, b"hello");
    let count = |arguments: &[&str]| -> usize {
        let flows: Value = serde_json::from_str(&proxy.client(&[&["ls", "--json"], arguments].concat())).unwrap();
        flows.as_array().unwrap().len()
    };
    assert_eq!((count(&[]), count(&["--limit", "1"]), count(&["--limit", "0"])), (2, 1, 0));
    assert_eq!((count(&["--state", "copying"]), count(&["--state", "spliced"])), (2, 0));
    drop(second);
    let id = flow["id"].to_string();
    let detail: Value = serde_json::from_str(&proxy.client(&["inspect", &id, "--json"])).unwrap();
    assert_eq!(
        (&detail["state"], &detail["refusal"], &detail["bytes_up"]),
        (&"copying".into(), &"policy".into(), &5.into())
    );
    for leg in ["client_leg", "server_leg"] {
        assert_eq!((&detail[leg]["record"], &detail[leg]["phase_in"]), (&Value::Null, &Value::Null), "no data path");
        assert_eq!(
            (&detail[leg]["socket"]["state"], &detail[leg]["socket"]["unread"]),
            (&"established".into(), &0.into())
        );
    }
    let report = proxy.client(&["inspect", &id]);
    assert!(report.starts_with(&format!("flow {id}: plug, copying")) && report.contains("policy"), "{report}");
    assert_eq!(proxy.client_error(&["inspect", "99"]), "longsplice: there is no flow 99\n");
    assert!(proxy.client_error(&["trace", &id]).contains("no flow of this process can be traced: policy"));
    for command in ["splice", "unsplice"] {
        let why = proxy.client_error(&[command, &flow["id"].to_string()]);
        assert!(why.contains("policy"), "{why}");
    }
    drop(connection);
    proxy.shut_down();
}

#[test]
fn stop_ends_flows_writes_their_lines_and_removes_the_socket() {
    let mut proxy = Running::copying(&loopback_echo(), &["--log-format", "json"]);
    let mut connection = connect(proxy.address());
    round_trip(&mut connection, b"hello");
    proxy.shut_down();
    assert!(!proxy.control().exists());
    let log = proxy.log();
    let line: Value = serde_json::from_str(log.trim()).unwrap();
    assert_eq!((&line["how"], &line["bytes_up"]), (&"stopped".into(), &5.into()), "{line}");
    assert!(matches!(connection.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn a_drain_waits_for_live_connections_and_takes_no_new_ones() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    let mut connection = connect(proxy.address());
    round_trip(&mut connection, b"hello");
    let mut stop = Command::new(LONGSPLICE);
    stop.args(["stop", "--drain", "20", "--control"]).arg(proxy.control());
    let mut stop = stop.spawn().unwrap();
    let address = proxy.address();
    eventually("listening to end", || std::net::TcpStream::connect(address).is_err().then_some(()));
    round_trip(&mut connection, b"still here");
    assert!(proxy.client(&["ls"]).contains("plug"), "the operator can look while flows drain");
    drop(connection);
    assert!(proxy.wait().success());
    assert!(stop.wait().unwrap().success());
    assert!(proxy.log().contains("how=closed"));
}

#[test]
fn a_second_stop_cuts_a_drain_short() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    let mut connection = connect(proxy.address());
    round_trip(&mut connection, b"hello");
    let began = Instant::now();
    let mut stop = Command::new(LONGSPLICE);
    stop.args(["stop", "--drain", "60", "--control"]).arg(proxy.control());
    let mut stop = stop.spawn().unwrap();
    proxy.wait_message("draining for at most 60 s");
    proxy.client(&["stop"]);
    assert!(proxy.wait().success() && stop.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// Also if nothing has been relayed yet.
#[test]
fn a_stop_is_in_the_access_log_for_each_connection() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let request = format!("GET http://{}/ HTTP/1.1\r\nHost: a\r\n\r\n", server.local_addr().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config");
    let open = "rules = [{ action = \"allow\", target = \"127.0.0.1/32\" }]";
    for (protocol, said, logged) in [("socks5", "\x05", "socks5"), ("http", &request, "method=GET")] {
        let listener = format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"127.0.0.1:0\"\n{open}\n");
        fs::write(&config, listener).unwrap();
        let arguments = ["--copy-only", "--config", config.to_str().unwrap()];
        let mut proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
        let mut client = connect(proxy.address());
        client.write_all(said.as_bytes()).unwrap();
        let asked = (protocol == "http").then(|| server.accept().unwrap());
        eventually("a connection", || (proxy.count("proxy", "accepted") == 1).then_some(()));
        proxy.shut_down();
        let log = proxy.log();
        assert!(log.lines().count() == 1 && log.contains("how=stopped") && log.contains(logged), "{log:?}");
        assert!(client.read(&mut [0; 1]).is_err(), "it is reset");
        drop(asked);
    }
}

#[test]
fn sigterm_and_sigint_end_it_cleanly() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut proxy = Running::copying(&loopback_echo(), &[]);
        let mut connection = connect(proxy.address());
        round_trip(&mut connection, b"hello");
        proxy.signal(signal);
        assert!(proxy.wait().success(), "{signal}");
        assert!(!proxy.control().exists());
        assert!(proxy.log().contains("how=stopped"));
    }
}

#[test]
fn sighup_and_sigusr1_open_the_access_log_anew_and_sigusr2_does_nothing() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    let logged = |bytes: &str| {
        round_trip(&mut connect(proxy.address()), bytes.as_bytes());
        let line = format!("bytes_up={}", bytes.len());
        proxy.wait_line(&[&line]);
    };
    logged("first");
    for (signal, name, text) in [(Signal::SIGHUP, "1", "second"), (Signal::SIGUSR1, "2", "the third")] {
        let rotated = proxy.access_log().with_extension(name);
        fs::rename(proxy.access_log(), &rotated).unwrap();
        proxy.signal(signal);
        eventually("the new file", || proxy.access_log().exists().then_some(()));
        logged(text);
        assert_eq!(fs::read_to_string(&rotated).unwrap().lines().count(), 1);
    }
    proxy.signal(Signal::SIGUSR2);
    proxy.wait_message("SIGUSR2 has no meaning here: ignored");
    logged("and the last one");
    proxy.shut_down();
}

/// A client of the control socket does not wait forever.
#[test]
fn a_process_that_does_not_run_is_named() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    proxy.signal(Signal::SIGSTOP);
    thread::scope(|s| {
        for command in ["ls", "inspect 1", "counters", "stop"] {
            let proxy = &proxy;
            s.spawn(move || {
                let why = proxy.client_error(&command.split(' ').collect::<Vec<_>>());
                assert!(why.contains("no answer within 10 s"), "{command}: {why}");
            });
        }
    });
    proxy.signal(Signal::SIGCONT);
    // the process handles the `stop` that arrived while it did not run
    assert!(proxy.wait().success());
}

#[test]
fn a_stop_that_ends_with_a_kill_is_no_success() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    let mut connection = connect(proxy.address());
    round_trip(&mut connection, b"hello");
    let mut stop = Command::new(LONGSPLICE);
    stop.args(["stop", "--drain", "60", "--control"]).arg(proxy.control()).stderr(Stdio::piped());
    let stop = stop.spawn().unwrap();
    proxy.wait_message("draining for at most 60 s");
    proxy.kill();
    let output = stop.wait_with_output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("it was killed, or has crashed"));
}

#[test]
fn the_control_socket_is_ours_alone_and_outlives_no_kill() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    assert_eq!(fs::metadata(proxy.control()).unwrap().permissions().mode() & 0o777, 0o600);
    let control = proxy.control().to_owned();
    let run = ["run", "--copy-only", "--socks5", "127.0.0.1:0", "--control", control.to_str().unwrap()];
    assert!(complaint(&run).contains("another process listens there"));
    proxy.signal(Signal::SIGKILL);
    proxy.wait();
    assert!(control.exists(), "SIGKILL leaves the file");
    let mut next = Running::copying_at(&control, &loopback_echo(), &[]);
    assert_eq!(next.client(&["ls", "--json"]), "[]\n");
    next.client(&["stop"]);
    next.wait();
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (precious, link) = (dir.path().join("precious"), dir.path().join("link"));
    fs::write(&precious, "data").unwrap();
    symlink(&precious, &link).unwrap();
    for path in [&precious, &link] {
        let run = ["run", "--copy-only", "--socks5", "127.0.0.1:0", "--control", path.to_str().unwrap()];
        assert!(complaint(&run).contains("control socket"));
    }
    assert_eq!(fs::read_to_string(&precious).unwrap(), "data");
}

/// Of several caches, which are asked one after the other.
#[test]
fn a_purge_looks_into_each_cache() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x", server.local_addr().unwrap());
    thread::spawn(move || {
        while let Ok((mut stream, _)) = server.accept() {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.extend(byte);
            }
            let fields = "Cache-Control: max-age=1000\r\nContent-Length: 2\r\nConnection: close";
            write!(stream, "HTTP/1.1 200 OK\r\n{fields}\r\n\r\nhi").unwrap();
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longsplice.toml");
    let listeners = ["127.0.0.1", "127.0.0.2", "127.0.0.3"].map(|at| {
        format!(
            "[[listener]]\nprotocol = \"http\"\nlisten = \"{at}:0\"\ncache.dir = \"of-{at}\"\n\
             rules = [{{ action = \"allow\", target = \"127.0.0.0/8\" }}]\n"
        )
    });
    fs::write(&file, listeners.concat()).unwrap();
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    let mut proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    let messages = proxy.messages();
    for (n, at) in (1..).zip(["127.0.0.1:", "127.0.0.2:", "127.0.0.3:"]) {
        let (_, rest) = messages.split_once(&format!(" on {at}")).expect("a listener");
        let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let mut client = TcpStream::connect(format!("{at}{port}")).unwrap();
        write!(client, "GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("\r\n\r\nhi"), "{answer}");
        eventually("a stored reply", || (proxy.count("proxy", "cache_stored") == n).then_some(()));
    }
    assert_eq!(proxy.client(&["purge", &url]), "removed 3\n");
    assert_eq!((proxy.client(&["purge", &url]), proxy.count("proxy", "cache_entries")), ("removed 0\n".into(), 0));
    proxy.shut_down();
}

#[test]
fn nonsense_on_the_control_socket_is_answered_and_does_no_harm() {
    let proxy = Running::copying(&loopback_echo(), &[]);
    let ask = |request: &[u8]| {
        let mut stream = UnixStream::connect(proxy.control()).unwrap();
        // The answer may arrive before all of the request was read.
        let _ = stream.write_all(request);
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        serde_json::from_str::<Value>(&answer).unwrap()
    };
    assert!(ask(b"hello\n")["error"].as_str().unwrap().contains("no JSON"));
    assert!(ask(b"{\"version\":9,\"ask\":\"ls\"}\n")["error"].as_str().unwrap().contains("version 9"));
    assert!(ask(&vec![b'x'; 10_000])["error"].as_str().unwrap().contains("4096"));
    assert!(ask(b"{\"version\":1,\"ask\":\"splice\",\"id\":99}\n")["error"].is_string());
    // More idle clients than allowed: the excess one is disconnected, and slots become free again.
    let ls = || longsplice(&["ls", "--control", proxy.control().to_str().unwrap()]);
    let mut idle = Vec::new();
    let refused = eventually("no room", || {
        // The earlier clients may still be connected when the first of these arrives.
        idle.extend((0..40).map(|_| UnixStream::connect(proxy.control()).unwrap()));
        Some(ls()).filter(|output| !output.status.success())
    });
    assert!(String::from_utf8_lossy(&refused.stderr).contains("hung up"), "{refused:?}");
    idle.clear();
    eventually("room", || ls().status.success().then_some(()));
}

#[test]
fn doctor_says_the_same_to_people_and_programs() {
    let (text, json) = (longsplice(&["doctor"]), longsplice(&["doctor", "--json"]));
    assert_eq!(text.status.code(), json.status.code());
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["splicing"].as_bool().unwrap(), json.status.success());
    let text = String::from_utf8(text.stdout).unwrap();
    for check in report["checks"].as_array().unwrap() {
        assert!(text.contains(check["name"].as_str().unwrap()), "{check} not in {text}");
        assert!(check["state"] != "missing" || check["cure"].is_string(), "{check}");
    }
}

#[test]
fn the_man_page_has_every_command_and_flag() {
    let page = String::from_utf8(longsplice(&["man"]).stdout).unwrap();
    assert!(page.contains(".TH longsplice 1"), "{page}");
    for command in ["RUN", "LS", "INSPECT", "TRACE", "SPLICE", "UNSPLICE", "COUNTERS", "STOP", "DOCTOR", "MAN"] {
        assert!(page.contains(&format!("LONGSPLICE {command}\"")), "{command}");
    }
    for flag in ["socks5", "plug", "config", "device", "splice", "leave", "copy", "access", "max", "drain", "flush"] {
        assert!(page.contains(&format!("\\-\\-{flag}")), "{flag}");
    }
    assert!(page.contains("longsplice.toml(5)"), "{page}");
}

#[test]
fn the_man_page_of_the_file_has_every_key() {
    let page = String::from_utf8(longsplice(&["man", "longsplice.toml"]).stdout).unwrap();
    assert!(page.starts_with(".TH \"longsplice.toml\" 5\n"), "{page}");
    let docs = include_str!("../../../docs/configuration.md");
    let keys: Vec<_> =
        docs.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(key, _)| key).collect();
    assert!(keys.len() > 200, "{keys:?}");
    for key in keys {
        let term = format!(".TP\n\\fB{}\\fR", key.replace('-', "\\-"));
        assert!(page.contains(&term), "{key}");
    }
}

/// groff understands both pages: it warns of nothing.
#[test]
fn man_pages_are_good_roff() {
    for page in ["longsplice", "longsplice.toml"] {
        let roff = longsplice(&["man", page]).stdout;
        let groff = ["-man", "-Tutf8", "-ww", "-z", "-k", "-t", "-rLL=100n"];
        let mut child = Command::new("groff").args(groff).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&roff).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{page}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

/// Each shell reads its completions without complaint, and they know every command.
#[test]
fn shells_read_their_completions() {
    let help = String::from_utf8(longsplice(&["--help"]).stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().lines().take_while(|line| !line.is_empty());
    let commands: Vec<_> =
        commands.filter_map(|l| l.strip_prefix("  ")?.split(' ').next()).filter(|c| !c.is_empty()).collect();
    assert!(commands.contains(&"ls") && commands.contains(&"completions"), "{help}");
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(longsplice(&["completions", shell]).stdout).unwrap();
        for command in &commands {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    let script = longsplice(&["completions", "bash"]).stdout;
    let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(&script).unwrap();
    let done = bash.wait_with_output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
}
