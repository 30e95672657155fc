//! Format of lines, calendar, and a writer that is stuck.

use super::*;
use crate::access::Denied;
use longsplice_engine::EndReason;

fn record() -> Record {
    let mut r =
        Record::new("socks5", "192.0.2.9:1080".parse::<SocketAddr>().unwrap(), "192.0.2.1:1000".parse().unwrap());
    r.time = "2025-03-01T12:00:00.000Z".into();
    r.server = Some("[2001:db8::1]:443".parse().unwrap());
    r.target = Some("example.org:443".into());
    r.user = Some("ann".into());
    let mut ended = Ended::new(7, r.client, "[2001:db8::1]:443".parse().unwrap(), EndReason::ServerReset);
    (ended.bytes_up, ended.bytes_down, ended.spliced_up, ended.spliced_down) = (10, 20, 3, 4);
    (ended.splices, ended.refusal, ended.duration_ms) = (1, Some(Refusal::DrainTimeout), 99);
    r.ended(&ended);
    r.duration_ms = 100;
    r
}

#[test]
fn text() {
    let mut named = record();
    named.name = Some("office".into());
    assert!(named.line(LogFormat::Text).contains(" listener=socks5 name=office listen="));
    assert!(named.line(LogFormat::Json).contains("\"name\":\"office\""));
    assert_eq!(
        record().line(LogFormat::Text),
        "2025-03-01T12:00:00.000Z id=7 listener=socks5 listen=192.0.2.9:1080 client=192.0.2.1:1000 server=[2001:db8::1]:443 \
         target=example.org:443 user=ann how=server-reset bytes_up=10 bytes_down=20 spliced_up=3 spliced_down=4 \
         splices=1 refusal=drain-timeout duration_ms=100\n"
    );
}

#[test]
fn json() {
    let line = record().line(LogFormat::Json);
    let v: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&v["id"], &v["how"], &v["refusal"]), (&7.into(), &"server-reset".into(), &"drain-timeout".into()));
    assert_eq!((&v["server"], &v["bytes_up"]), (&"[2001:db8::1]:443".into(), &10.into()));
    assert_eq!(line.matches('\n').count(), 1);
}

#[test]
fn rejected_requests_and_hostile_values() {
    let mut r =
        Record::new("socks5", "192.0.2.9:1080".parse::<SocketAddr>().unwrap(), "192.0.2.1:1000".parse().unwrap());
    r.fault(&Fault::Denied(Denied::Guarded("loopback")));
    let line = r.line(LogFormat::Text);
    assert!(line.contains("id=- ") && line.contains("how=denied ") && line.contains("user=- "), "{line}");
    assert!(line.contains(r#"refusal="guarded address (loopback)""#), "{line}");
    r.fault(&Fault::AuthFailed { user: Some("a\nid=9 how=closed \"".into()), why: "wrong name or password" });
    let line = r.line(LogFormat::Text);
    assert!(line.contains(r#"user="a\nid=9 how=closed \"""#) && line.matches('\n').count() == 1, "{line}");
}

#[test]
fn words_are_those_of_the_engine() {
    for how in [
        EndReason::Closed,
        EndReason::ClientReset,
        EndReason::ServerReset,
        EndReason::Idle,
        EndReason::Stopped,
        EndReason::Left,
        EndReason::Lost,
    ] {
        assert_eq!(serde_json::to_value(how).unwrap(), how.as_str());
    }
}

#[test]
fn the_page_describes_every_field_and_word() {
    let page = include_str!("../../../../docs/access-log.md");
    let names = |row: &str| row.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let cells = page.lines().filter(|l| l.starts_with("| `")).flat_map(|l| names(l.split('|').nth(1).unwrap()));
    let described: std::collections::BTreeSet<String> = cells.collect();
    let mut whole = record();
    (whole.route, whole.method, whole.uri) = (Some("1:a".into()), Some("GET".into()), Some("/".into()));
    (whole.status, whole.reply_rule, whole.cache) = (Some(200), Some("1:deny".into()), Some("hit"));
    (whole.command, whole.datagrams) = (Some(Command::Bind), Some(Datagrams::default()));
    (whole.name, whole.processes) = (Some("front".into()), Some(2));
    (whole.pool, whole.member) = (Some("db".into()), Some("a:1".into()));
    (whole.connect_ms, whole.reply_ms) = (Some(1), Some(2));
    let json: serde_json::Value = serde_json::from_str(&whole.line(LogFormat::Json)).unwrap();
    let mut words: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
    let text = whole.line(LogFormat::Text);
    assert!(words.iter().filter(|w| *w != "time").all(|w| text.contains(&format!(" {w}="))), "{text}");
    for how in [
        EndReason::Closed,
        EndReason::ClientReset,
        EndReason::ServerReset,
        EndReason::Idle,
        EndReason::Stopped,
        EndReason::Left,
        EndReason::Lost,
        EndReason::MessageRelayed,
    ] {
        words.push(how.as_str().into());
    }
    let io = || io::Error::other("test");
    let step = crate::fault::Step::Connect;
    for fault in [
        Fault::BadRequest(String::new()),
        Fault::AuthFailed { user: None, why: "" },
        Fault::Denied(Denied::Loop),
        Fault::NoAddress(io()),
        Fault::Unreachable(io()),
        Fault::BadReply(String::new()),
        Fault::NoRoute(String::new()),
        Fault::NoServer(String::new()),
        Fault::Timeout(step),
        Fault::Limit(""),
    ] {
        words.push(fault.how().into());
    }
    words.extend(["damaged".into(), "path".into(), "forbidden".into()]); // of replies in the cache, and of flows that were measured
    assert_eq!(words.into_iter().collect::<std::collections::BTreeSet<_>>(), described);
}

#[test]
fn a_fifo_needs_a_reader_and_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let config = LogConfig { format: LogFormat::Text, to: LogTarget::File(path.clone()) };
    let e = AccessLog::open(&config).unwrap_err().to_string();
    assert!(e.contains("a FIFO that nobody reads"), "{e}");
    let mut reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let log = AccessLog::open(&config).unwrap();
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    let mut line = [0; 4096];
    let n = io::Read::read(&mut reader, &mut line).unwrap();
    assert!(line[..n].ends_with(b"duration_ms=100\n"));
}

/// A pipe takes 64 KB. Of what it does not take, the number is known.
#[test]
fn what_is_not_written_is_counted_line_by_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let log = AccessLog::open(&LogConfig { format: LogFormat::Text, to: LogTarget::File(path) }).unwrap();
    let all = 2000;
    (0..all).for_each(|_| log.write(record()));
    assert!(!log.flush(Duration::from_millis(200)));
    let (waiting, mut seen) = (log.waiting(), Vec::new());
    assert!(waiting > 0 && waiting < all, "{waiting}");
    // the rest is written as it is read
    let mut part = [0; 65536];
    while !log.flush(Duration::from_millis(1)) {
        if let Ok(n) = io::Read::read(&mut reader, &mut part) {
            seen.extend_from_slice(&part[..n]);
        }
    }
    while let Ok(n @ 1..) = io::Read::read(&mut reader, &mut part) {
        seen.extend_from_slice(&part[..n]);
    }
    let lines = seen.iter().filter(|b| **b == b'\n').count() as u64;
    assert_eq!((lines, log.waiting(), log.dropped()), (all, 0, 0));
    // nobody reads any more
    drop(reader);
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    assert_eq!((log.waiting(), log.dropped()), (0, 1));
}

#[test]
fn calendar() {
    let at = |secs, ms| rfc3339(UNIX_EPOCH + Duration::from_secs(secs) + Duration::from_millis(ms));
    assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
    assert_eq!(at(951_782_399, 999), "2000-02-28T23:59:59.999Z");
    assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
    assert_eq!(at(1_735_689_599, 0), "2024-12-31T23:59:59.000Z");
    assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
}

#[test]
fn there_may_be_none() {
    let words = ["-", "off", "./off"].map(|word| LogTarget::from(Path::new(word)));
    assert_eq!(words, [LogTarget::Stdout, LogTarget::Off, LogTarget::File("./off".into())]);
    let log = AccessLog::open(&LogConfig { format: LogFormat::Text, to: LogTarget::Off }).unwrap();
    log.write(record());
    log.reopen();
    assert!(log.flush(Duration::ZERO) && log.dropped() == 0);
}

#[test]
fn appends_and_reopens() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("log"), dir.path().join("log.1"));
    std::fs::write(&path, "before\n").unwrap();
    let log = AccessLog::open(&LogConfig { format: LogFormat::Text, to: LogTarget::File(path.clone()) }).unwrap();
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    std::fs::rename(&path, &moved).unwrap();
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    log.reopen();
    log.write(record());
    drop(log);
    let lines = |p: &Path| std::fs::read_to_string(p).unwrap().lines().count();
    assert_eq!((lines(&moved), lines(&path)), (3, 1));
}

#[test]
fn another_destination() {
    let dir = tempfile::tempdir().unwrap();
    let to = |name: &str| LogConfig { format: LogFormat::Text, to: LogTarget::File(dir.path().join(name)) };
    let lines = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap().lines().count();
    assert!(AccessLog::check(&to("first")).is_ok() && !dir.path().join("first").exists(), "nothing is created");
    assert!(AccessLog::check(&to("nowhere/log")).is_err());
    let log = AccessLog::open(&to("first")).unwrap();
    (0..100).for_each(|_| log.write(record()));
    log.switch_to(log.prepare(&to("second")).unwrap());
    log.write(record());
    drop(log);
    let end = Instant::now() + Duration::from_secs(30);
    while lines("first") < 100 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1)); // its writer ends by itself
    }
    assert_eq!((lines("first"), lines("second")), (100, 1), "what was written before is where it belongs");
}

/// With a pipe that nobody reads, `write` still returns at once, and lost lines are counted.
#[test]
fn a_writer_that_stands_still_drops_lines() {
    let (queue, lines) = sync_channel(2);
    let open = OpenLog { format: LogFormat::Text, queue: Some(queue), reopen: Arc::default() };
    let log = AccessLog { now: RwLock::new(Arc::new(open)), shared: Arc::default() };
    for _ in 0..5 {
        log.write(record());
    }
    assert_eq!(log.dropped(), 3);
    assert!(!log.flush(Duration::from_millis(20)));
    drop(lines);
}

#[test]
fn a_full_disk_is_counted() {
    let log = AccessLog::open(&LogConfig { format: LogFormat::Json, to: LogTarget::File("/dev/full".into()) }).unwrap();
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    assert_eq!(log.dropped(), 1);
}

#[test]
fn a_file_that_cannot_be_opened_is_an_error() {
    assert!(
        AccessLog::open(&LogConfig { format: LogFormat::Text, to: LogTarget::File("/nowhere/log".into()) }).is_err()
    );
}
