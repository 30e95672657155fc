//! Messages of syslog and entries of the journal, and connections that are lost.

use super::*;
use crate::log::access_log::tests::record;
use std::{
    io::Read,
    net::{TcpListener, UdpSocket},
};

fn to(kind: Kind) -> Receiver {
    Receiver { kind, app: "app".parse().unwrap(), facility: "local3".parse().unwrap() }
}

#[test]
fn addresses() {
    for text in [
        "unix:/dev/log",
        "unix-5424:/run/log",
        "udp:192.0.2.1:514",
        "tcp:[2001:db8::1]:601",
        "tcp:logs.example.org:601",
    ] {
        assert_eq!(Kind::Syslog(text.parse().unwrap()).to_string(), text);
    }
    for (text, cure) in [
        ("/dev/log", "write \"unix:PATH\""),
        ("tls:a:1", "no such transport"),
        ("UDP:a:1", "no such transport"),
        ("unix:", "no path"),
        ("udp:192.0.2.1", "no port"),
        ("udp:2001:db8::1:514", "brackets"),
        ("tcp:a:0", "bad port"),
        ("tcp:a b:1", "bad host"),
        ("", "no such transport"),
    ] {
        let e = text.parse::<Address>().unwrap_err();
        assert!(e.contains(cure), "{text}: {e}");
    }
}

#[test]
fn names_and_facilities() {
    for wrong in ["", "a b", "ä", "a\n", "a:", "a[1]", &"x".repeat(49)] {
        assert!(wrong.parse::<App>().is_err(), "{wrong}");
    }
    assert_eq!("local7".parse::<Facility>().unwrap(), Facility(23));
    assert_eq!("daemon".parse::<Facility>().unwrap(), Facility::default());
    assert!("LOCAL7".parse::<Facility>().unwrap_err().contains("write one of kern, user"));
}

#[test]
fn messages_of_syslog() {
    let header = format!("<158>1 2025-03-01T12:00:00.000Z {} app {} access - ", host(), process::id());
    let message = |text: &str| {
        let address = text.parse().unwrap();
        String::from_utf8(Envelope::new(&to(Kind::Syslog(address))).with(&record(), "the line")).unwrap()
    };
    assert_eq!(message("unix:/dev/log"), format!("<158>app[{}]: the line", process::id()));
    assert_eq!(message("unix-5424:/run/log"), format!("{header}the line"));
    assert_eq!(message("udp:a:1"), format!("{header}the line"));
    assert_eq!(message("tcp:a:1"), format!("{} {header}the line", header.len() + 8));
    assert!(!host().contains(char::is_whitespace));
}

/// Fields of an entry, as the journal reads them.
fn fields(mut entry: &[u8]) -> Vec<(String, String)> {
    let mut all = Vec::new();
    while !entry.is_empty() {
        let end = entry.iter().position(|b| *b == b'\n').unwrap();
        let (line, rest) = (&entry[..end], &entry[end + 1..]);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        if let Some(at) = line.iter().position(|b| *b == b'=') {
            all.push((text(&line[..at]), text(&line[at + 1..])));
            entry = rest;
        } else {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            all.push((text(line), text(&rest[8..8 + length])));
            assert_eq!(rest[8 + length], b'\n');
            entry = &rest[9 + length..];
        }
    }
    all
}

#[test]
fn entries_of_the_journal() {
    let hostile = "x\nMESSAGE=forged\nLONGSPLICE_USER=root";
    let record = Record { user: Some(hostile.into()), ..record() };
    let all = fields(&Envelope::new(&to(Kind::Journal(JOURNAL.into()))).with(&record, "the line"));
    let of = |name: &str| {
        let found: Vec<&str> = all.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect();
        assert_eq!(found.len(), 1, "{name}: {all:?}");
        found[0]
    };
    assert_eq!(
        (of("MESSAGE"), of("LONGSPLICE_USER"), of("LONGSPLICE_CLIENT")),
        ("the line", hostile, "192.0.2.1:1000")
    );
    assert_eq!((of("PRIORITY"), of("SYSLOG_FACILITY"), of("SYSLOG_IDENTIFIER")), ("6", "19", "app"));
    assert_eq!((of("LONGSPLICE_BYTES_DOWN"), of("LONGSPLICE_HOW")), ("20", "server-reset"));
    assert!(all.iter().all(|(name, _)| name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_') && name.len() <= 64));
    assert!(!all.iter().any(|(name, _)| name == "LONGSPLICE_STATUS"), "what has no value is left out");
}

#[test]
fn a_path_that_is_no_socket_is_a_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert_eq!(Kind::Journal(file).check().unwrap_err().to_string(), "it is no socket");
    assert!(Kind::Journal(dir.path().join("later")).check().is_ok());
    let long = Kind::Journal(dir.path().join("x".repeat(100)));
    assert_eq!(long.check().unwrap_err().to_string(), "a path of a socket has at most 107 bytes");
}

fn batch(lines: &[&str]) -> Batch {
    let mut batch = Batch::default();
    lines.iter().for_each(|line| batch.push(line.as_bytes()));
    batch
}

/// Writes as much as goes at once.
fn write(connection: &mut Connection, batch: &mut Batch) -> Wrote {
    loop {
        match connection.write(batch) {
            Wrote::Some(1..) => {}
            other => return other,
        }
    }
}

/// Lines that are written after the other end has closed go into a new connection.
#[test]
fn a_stream_that_was_closed_is_opened_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut connection = Connection::new(Kind::Syslog(format!("tcp:localhost:{port}").parse().unwrap()));
    assert!(matches!(write(&mut connection, &mut Batch::default()), Wrote::All), "it connects before there are lines");
    let (mut first, _) = listener.accept().unwrap();
    assert!(matches!(write(&mut connection, &mut batch(&["5 a", "bc", "1 d"])), Wrote::All));
    let mut got = [0; 8];
    first.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"5 abc1 d");
    drop(first);
    // the end has to arrive before it can be seen
    let socket = connection.socket.as_ref().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    assert_eq!(socket.peek(&mut [std::mem::MaybeUninit::uninit()]).unwrap(), 0);
    assert!(matches!(write(&mut connection, &mut batch(&["3 new"])), Wrote::All));
    let (mut second, _) = listener.accept().unwrap();
    let mut got = [0; 5];
    second.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"3 new");
    drop((second, listener));
    connection.close();
    let mut left = batch(&["4 last"]);
    assert!(matches!(write(&mut connection, &mut left), Wrote::Away(..)));
    assert_eq!(left.left(), 1);
}

/// One whose buffers are full is waited for, but not without end; then the line that was begun goes on.
#[test]
fn a_stream_that_stands_still_is_no_loss() {
    let listener = TcpListener::bind("[::1]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut connection = Connection::new(Kind::Syslog(format!("tcp:[::1]:{port}").parse().unwrap()));
    let (line, mut lines) = ("x".repeat(1024 * 1024), Batch::default());
    (0..32).for_each(|_| lines.push(line.as_bytes()));
    assert!(matches!(write(&mut connection, &mut lines), Wrote::Some(0)));
    let (mut peer, _) = listener.accept().unwrap();
    let reader = std::thread::spawn(move || peer.read_to_end(&mut Vec::new()).unwrap());
    while !matches!(connection.write(&mut lines), Wrote::All) {}
    connection.close();
    assert_eq!(reader.join().unwrap(), 32 * 1024 * 1024);
}

/// A datagram that nobody has got is known when the next one is sent.
#[test]
fn datagrams_to_nobody_are_counted() {
    // that of a socket which takes datagrams of another one alone
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect("127.0.0.1:9").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut connection = Connection::new(Kind::Syslog(format!("udp:127.0.0.1:{port}").parse().unwrap()));
    let mut lines = batch(&["a", "b"]);
    let wrote = write(&mut connection, &mut lines);
    assert!(matches!(wrote, Wrote::Away(_, 1)), "{wrote:?}");
    assert_eq!(lines.left(), 1);
    let mut long = batch(&[&"x".repeat(70_000), "b"]);
    assert!(matches!(write(&mut connection, &mut long), Wrote::TooLong));
    long.skip_line();
    assert_eq!(long.line(), b"b");
}
