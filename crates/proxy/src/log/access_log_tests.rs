//! Format of lines, and a writer that is stuck.

use super::*;
use crate::{
    access::Denied,
    commands::Command,
    fault::Fault,
    log::{
        fields::FIELDS,
        sockets::{Address, App, Facility, Kind},
        template::DERIVED,
    },
};
use longsplice_engine::{EndReason, Ended, Refusal};
use nix::libc;
use std::{
    fs::OpenOptions,
    io::Read as _,
    net::{SocketAddr, TcpListener},
    os::unix::{fs::OpenOptionsExt, net::UnixDatagram},
    time::UNIX_EPOCH,
};

fn to_text(to: LogTarget) -> LogConfig {
    LogConfig { to, ..LogConfig::default() }
}

fn to_json(to: LogTarget) -> LogConfig {
    LogConfig { format: LogFormat::Json, ..to_text(to) }
}

fn line_of(record: &Record, format: &LogFormat) -> String {
    format.line(record) + "\n"
}

pub(in crate::log) fn record() -> Record {
    let mut r =
        Record::new("socks5", "192.0.2.9:1080".parse::<SocketAddr>().unwrap(), "192.0.2.1:1000".parse().unwrap());
    r.time = Some(UNIX_EPOCH + Duration::from_secs(1_740_830_400));
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
    assert!(line_of(&named, &LogFormat::Text).contains(" listener=socks5 name=office listen="));
    assert!(line_of(&named, &LogFormat::Json).contains("\"name\":\"office\""));
    assert_eq!(
        line_of(&record(), &LogFormat::Text),
        "2025-03-01T12:00:00.000Z id=7 listener=socks5 listen=192.0.2.9:1080 client=192.0.2.1:1000 server=[2001:db8::1]:443 \
         target=example.org:443 user=ann how=server-reset bytes_up=10 bytes_down=20 spliced_up=3 spliced_down=4 \
         splices=1 refusal=drain-timeout duration_ms=100\n"
    );
}

#[test]
fn json() {
    let line = line_of(&record(), &LogFormat::Json);
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
    let line = line_of(&r, &LogFormat::Text);
    assert!(line.contains("id=- ") && line.contains("how=denied ") && line.contains("user=- "), "{line}");
    assert!(line.contains(r#"refusal="guarded address (loopback)""#), "{line}");
    r.fault(&Fault::AuthFailed { user: Some("a\nid=9 how=closed \"".into()), why: "wrong name or password" });
    let line = line_of(&r, &LogFormat::Text);
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
    whole.event = Some(Event::Begin);
    let [version, referrer, user_agent] = ["HTTP/1.1", "http://a/", "curl"].map(|text| Some(text.to_owned()));
    whole.extra = Some(Extra { version: version.map(Into::into), referrer, user_agent, is_absolute: false }.into());
    (whole.route, whole.method, whole.uri) = (Some("1:a".into()), Some("GET".into()), Some("/".into()));
    (whole.status, whole.reply_rule, whole.cache) = (Some(200), Some("1:deny".into()), Some("hit"));
    (whole.command, whole.datagrams) = (Some(Command::Bind), Some(Datagrams::default()));
    (whole.name, whole.processes) = (Some("front".into()), Some(2));
    (whole.pool, whole.member) = (Some("db".into()), Some("a:1".into()));
    whole.upstream = Some("abroad".into());
    (whole.connect_ms, whole.reply_ms) = (Some(1), Some(2));
    let json: serde_json::Value = serde_json::from_str(&line_of(&whole, &LogFormat::Json)).unwrap();
    let mut words: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
    let json = line_of(&whole, &LogFormat::Json);
    let places =
        FIELDS.iter().filter(|field| field.name != "path").map(|field| json.find(&format!("\"{}\":", field.name)));
    assert!(places.clone().all(|at| at.is_some()) && places.is_sorted(), "the same fields in the same order: {json}");
    let text = line_of(&whole, &LogFormat::Text);
    assert!(words.iter().filter(|w| *w != "time").all(|w| text.contains(&format!(" {w}="))), "{text}");
    words.extend(FIELDS.iter().chain(&DERIVED).map(|field| field.name.to_owned()));
    words.extend([Event::Begin, Event::Alive].map(|event| event.as_str().to_owned()));
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
    words.extend(["damaged".into(), "forbidden".into()]); // of replies in the cache, and of connections that are judged again
    assert_eq!(words.into_iter().collect::<std::collections::BTreeSet<_>>(), described);
}

#[test]
fn a_fifo_needs_a_reader_and_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let config = to_text(LogTarget::File(path.clone()));
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
    let log = AccessLog::open(&to_text(LogTarget::File(path))).unwrap();
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
fn there_may_be_none() {
    let words = ["-", "off", "./off"].map(|word| LogTarget::from(Path::new(word)));
    assert_eq!(words, [LogTarget::Stdout, LogTarget::Off, LogTarget::File("./off".into())]);
    let log = AccessLog::open(&to_text(LogTarget::Off)).unwrap();
    log.write(record());
    log.reopen();
    assert!(log.flush(Duration::ZERO) && log.dropped() == 0);
}

#[test]
fn appends_and_reopens() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("log"), dir.path().join("log.1"));
    std::fs::write(&path, "before\n").unwrap();
    let log = AccessLog::open(&to_text(LogTarget::File(path.clone()))).unwrap();
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
    let to = |name: &str| to_text(LogTarget::File(dir.path().join(name)));
    let lines = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap().lines().count();
    assert!(AccessLog::check(&to("first")).is_ok() && !dir.path().join("first").exists(), "nothing is created");
    assert!(AccessLog::check(&to("nowhere/log")).is_err());
    let log = AccessLog::open(&to("first")).unwrap();
    (0..100).for_each(|_| log.write(record()));
    log.switch_to(log.prepare(&to("second")).unwrap());
    log.write(record());
    drop(log);
    wait("its writer ends by itself", || lines("first") == 100);
    assert_eq!((lines("first"), lines("second")), (100, 1), "what was written before is where it belongs");
}

/// With a pipe that nobody reads, `write` still returns at once, and lost lines are counted.
#[test]
fn a_writer_that_stands_still_drops_lines() {
    let log = AccessLog::open(&to_text(LogTarget::Off)).unwrap();
    let (queue, lines) = sync_channel(2);
    let config = to_text(LogTarget::Stdout);
    log.switch_to(OpenLog { config, envelope: None, queue: Some(queue), shared: Shared::new(&log.all) });
    for _ in 0..5 {
        log.write(record());
    }
    assert_eq!(log.dropped(), 3);
    assert!(!log.flush(Duration::from_millis(20)));
    drop(lines);
}

#[test]
fn a_full_disk_is_counted() {
    let log = AccessLog::open(&to_json(LogTarget::File("/dev/full".into()))).unwrap();
    log.write(record());
    assert!(log.flush(Duration::from_secs(5)));
    assert_eq!(log.dropped(), 1);
}

#[test]
fn a_file_that_cannot_be_opened_is_an_error() {
    assert!(AccessLog::open(&to_text(LogTarget::File("/nowhere/log".into()))).is_err());
}

/// What is dropped if a queue is too long by its bytes is counted, too.
#[test]
fn long_lines_have_less_room() {
    let log = AccessLog::open(&to_text(LogTarget::Off)).unwrap();
    let (queue, lines) = sync_channel(QUEUE);
    log.switch_to(OpenLog {
        config: LogConfig { format: long(), ..to_text(LogTarget::Stdout) },
        envelope: None,
        queue: Some(queue),
        shared: Shared::new(&log.all),
    });
    let (room, all) = (QUEUE_BYTES / (60 * 4096 + 1), 200);
    assert!(room < all);
    (0..all).for_each(|_| log.write(hostile()));
    assert_eq!((log.waiting(), log.dropped()), (room, all - room));
    assert!(log.is_busy());
    // that is its own affair: another one has all its room
    let before = log.now();
    log.switch_to(log.prepare(&to_text(LogTarget::Off)).unwrap());
    assert!(!log.is_busy());
    assert_eq!(log.waiting(), room, "they are lost if the program ends now");
    drop((before, lines));
    assert_eq!(log.waiting(), 0);
}

/// A format, and a record, of which a line is 240 KB long.
fn long() -> LogFormat {
    LogFormat::Template(Template::parse(&"{uri}".repeat(60)).unwrap().into())
}

fn hostile() -> Record {
    Record { uri: Some("\n".repeat(1024)), ..record() }
}

/// A receiver of syslog or of the journal may come later, and go.
#[test]
fn lines_wait_for_a_receiver_that_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let log = AccessLog::open(&to_text(to_receiver(Kind::Syslog(Address::Unix(path.clone()))))).unwrap();
    let bind = || {
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        socket
    };
    let told = |id| Record { id: Some(id), ..record() };
    let next = |socket: &UnixDatagram| {
        let mut message = [0; 4096];
        let n = socket.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..n]).into_owned()
    };
    (1..=100).for_each(|id| log.write(told(id)));
    assert!(!log.flush(Duration::from_millis(50)) && log.waiting() == 100);
    let socket = bind();
    for id in 1..=100 {
        assert!(next(&socket).contains(&format!(" id={id} ")));
    }
    drop(socket); // gone for good, until another one has its path
    (101..=200).for_each(|id| log.write(told(id)));
    let socket = bind();
    for id in 101..=200 {
        assert!(next(&socket).contains(&format!(" id={id} ")));
    }
    assert!(log.flush(Duration::from_secs(30)));
    assert_eq!((log.waiting(), log.dropped()), (0, 0));
}

fn to_receiver(kind: Kind) -> LogTarget {
    LogTarget::Receiver(Receiver { kind, app: App::default(), facility: Facility::default() }.into())
}

/// Waits until this is so.
fn wait(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A writer whose log goes elsewhere gives up, and counts what it could not send: within two seconds, however much that is.
#[test]
fn nobody_waits_for_ever_for_a_receiver_that_never_comes() {
    let dir = tempfile::tempdir().unwrap();
    let log = AccessLog::open(&to_text(to_receiver(Kind::Journal(dir.path().join("nobody"))))).unwrap();
    let all = QUEUE as u64 / 2; // a hundred batches
    (0..all).for_each(|_| log.write(record()));
    log.switch_to(log.prepare(&to_text(LogTarget::Off)).unwrap());
    wait("its writer ends by itself", || log.dropped() == all);
    assert_eq!(log.waiting(), 0);
}

/// What is given up is not said to be written, and its connection is closed.
#[test]
fn what_is_given_up_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_nonblocking(true).unwrap();
    let shared = Shared::new(&Arc::default());
    let out = Out::Socket(Connection::new(Kind::Syslog(Address::Unix(path))));
    let mut writer = Writer::new(out, shared.clone());
    let written = |writer: &mut Writer, line: &str| {
        let mut batch = Batch::default();
        batch.push(line.as_bytes());
        shared.waiting.fetch_add(1, Relaxed);
        writer.write(batch);
        shared.waiting.load(Relaxed) == 0 && socket.recv(&mut [0; 100]).is_ok()
    };
    assert!(written(&mut writer, "first"));
    shared.leave.store(true, Relaxed);
    assert!(written(&mut writer, "second"), "there is time");
    writer.failing = true;
    writer.until = Some(Instant::now());
    assert!(!written(&mut writer, "third"));
    assert_eq!((shared.waiting.load(Relaxed), shared.dropped.load(Relaxed)), (0, 1));
    assert!(writer.failing && writer.missing == 0, "nothing has been written again");
}

/// A receiver whose writer gives up in the middle of a line gets no other lines behind it.
#[test]
fn a_line_that_is_given_up_is_the_last_one() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let kind = Kind::Syslog(format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap());
    let log = AccessLog::open(&LogConfig { format: long(), ..to_text(to_receiver(kind)) }).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let all = 120; // more than the buffers of a connection hold
    (0..all).for_each(|_| log.write(hostile()));
    log.switch_to(log.prepare(&to_text(LogTarget::Off)).unwrap());
    // its buffers are full by now, and the receiver reads again
    wait("a line that is given up", || log.dropped() > 0);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    wait("the end of the writer", || log.waiting() == 0);
    let (mut rest, mut whole) = (&got[..], 0);
    while let Some(end) = rest.iter().position(|b| *b == b' ') {
        let length: usize = std::str::from_utf8(&rest[..end]).unwrap().parse().unwrap();
        let message = &rest[end + 1..];
        assert!(message.starts_with(b"<30>1 "), "{:?}", String::from_utf8_lossy(&message[..message.len().min(20)]));
        let message = &message[..message.len().min(length)];
        assert!(!message[6..].windows(6).any(|part| part == b"<30>1 "));
        if message.len() < length {
            break;
        }
        (rest, whole) = (&rest[end + 1 + length..], whole + 1);
    }
    assert!(whole < all, "one at least was given up");
    assert_eq!(all, whole + log.dropped());
}

/// One that stands still can be left, as its socket may belong to another one by now.
#[test]
fn a_receiver_that_stands_still_is_left_when_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let bind = || {
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        socket
    };
    let stuck = bind();
    let log = AccessLog::open(&to_text(to_receiver(Kind::Syslog(Address::Unix(path.clone()))))).unwrap();
    let all = 4000; // it has room for fewer
    (1..=all).for_each(|id| log.write(Record { id: Some(id), ..record() }));
    assert!(!log.flush(Duration::from_millis(20)));
    std::fs::remove_file(&path).unwrap();
    let next = bind();
    log.reopen();
    let (mut message, mut last) = ([0; 4096], None);
    while last != Some(all) {
        let n = next.recv(&mut message).unwrap();
        let line = String::from_utf8_lossy(&message[..n]).into_owned();
        let id = line.split(" id=").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
        assert!(last.is_none_or(|last| Some(last + 1) == id), "{last:?} {id:?}");
        last = id;
    }
    wait("the end", || log.waiting() == 0);
    assert_eq!(log.dropped(), 0);
    drop(stuck);
}

/// A record is made for the log of now, and written into that of a moment later.
#[test]
fn what_a_log_does_not_tell_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let lines = |config: LogConfig| {
        let log = AccessLog::open(&LogConfig { to: LogTarget::File(path.clone()), ..config }).unwrap();
        for event in [Event::Begin, Event::Alive] {
            log.write(Record { event: Some(event), how: "", ..record() });
        }
        log.write(Record { how: EndReason::Left.as_str(), ..record() });
        log.write(record());
        drop(log);
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        std::fs::remove_file(&path).unwrap();
        lines
    };
    let template = |text: &str| LogConfig {
        format: LogFormat::Template(Template::parse(text).unwrap().into()),
        ..LogConfig::default()
    };
    assert_eq!(lines(LogConfig::default()), 2, "the end, and that it was left");
    assert_eq!(lines(LogConfig { begin: true, ..LogConfig::default() }), 3);
    assert_eq!(lines(LogConfig { interval: Some(Duration::from_secs(1)), ..LogConfig::default() }), 3);
    assert_eq!(lines(LogConfig { format: LogFormat::combined(), ..LogConfig::default() }), 1);
    assert_eq!(lines(template("{id}")), 1);
    assert_eq!(lines(template("{id} {how}")), 2);
    assert_eq!(lines(LogConfig { begin: true, ..template("{event} {id}") }), 2);
}
