//! Format of lines, calendar, and a writer that is stuck.

use super::*;
use crate::access::Denied;
use longsplice_engine::EndReason;

fn record() -> Record {
    let mut r = Record::new("socks5", "192.0.2.1:1000".parse().unwrap());
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
    assert_eq!(
        record().line(LogFormat::Text),
        "2025-03-01T12:00:00.000Z id=7 listener=socks5 client=192.0.2.1:1000 server=[2001:db8::1]:443 \
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
    let mut r = Record::new("socks5", "192.0.2.1:1000".parse().unwrap());
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

/// With a pipe that nobody reads, `write` still returns at once, and lost lines are counted.
#[test]
fn a_writer_that_stands_still_drops_lines() {
    let (queue, lines) = sync_channel(2);
    let log = AccessLog { format: LogFormat::Text, queue: Some(queue), shared: Arc::default() };
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
