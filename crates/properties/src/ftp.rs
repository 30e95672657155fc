//! Control connections of FTP.

use crate::handshakes::grows;
use longsplice_proxy::ftp::{
    address::{encode_eprt, encode_port, parse_227, parse_229, parse_eprt, parse_epsv, parse_port},
    line::{LINE_MAX, encode_line, parse_command, parse_reply_line},
    verb::{self, Named, parse_257, resolve},
};
use std::net::IpAddr;

pub(crate) fn command(input: &[u8]) {
    let Some((command, used)) = grows(input, parse_command) else { return };
    assert!(used <= LINE_MAX && input[used - 1] == b'\n');
    assert!(command.verb.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit()));
    let written = command.encode();
    let line = &written[..written.len() - 2];
    assert!(!line.iter().any(|b| b"\r\n\0".contains(b)), "one line: {}", written.escape_ascii());
    if !command.verb.is_empty() && written.len() <= LINE_MAX {
        let (again, used) = parse_command(&written).expect("a command").expect("a whole one");
        assert_eq!((again.verb, again.argument, used), (command.verb, command.argument, written.len()));
        assert!(!again.synch && again.answers.is_empty());
    }
}

pub(crate) fn reply(input: &[u8]) {
    for within in [None, Some(211)] {
        let Some((line, used)) = grows(input, |input| parse_reply_line(input, within)) else { continue };
        assert!(used <= LINE_MAX && within.is_none_or(|code| code == line.code) && (100..600).contains(&line.code));
        let written = encode_line(&line.text);
        if written.len() <= LINE_MAX {
            let (again, used) = parse_reply_line(&written, within).expect("a line").expect("a whole one");
            assert_eq!(
                (again.code, again.is_last, again.text, used),
                (line.code, line.is_last, line.text, written.len())
            );
        }
    }
}

pub(crate) fn address(input: &[u8]) {
    if let Some(at) = parse_port(input) {
        let IpAddr::V4(ip) = at.ip() else { panic!("{at}") };
        assert_eq!(parse_port(encode_port(ip, at.port()).as_bytes()), Some(at));
    }
    for is_ipv4 in [true, false] {
        if let Ok(at) = parse_eprt(input, is_ipv4) {
            assert_eq!(at.is_ipv4(), is_ipv4);
            assert_eq!(parse_eprt(encode_eprt(at).as_bytes(), is_ipv4), Ok(at));
        }
        let _ = parse_epsv(input, is_ipv4);
    }
    for port in [parse_227(input), parse_229(input)] {
        assert_ne!(port, Some(0));
    }
}

/// A reply that names the server's directory, and the argument of a command. Rules are compared with the path that is found.
pub(crate) fn path(input: &[u8]) {
    let at = input.iter().position(|b| *b == b'\n').unwrap_or(input.len());
    let (reply, argument) = (&input[..at], input.get(at + 1..).unwrap_or_default());
    let directory = parse_257(reply);
    if let Some(directory) = &directory {
        let written = format!("257 \"{}\" is here", directory.replace('"', "\"\""));
        assert_eq!(parse_257(written.as_bytes()).as_ref(), Some(directory));
    }
    for verb in ["RETR", "LIST", "CDUP", "MFMT", "SITE", "PASV"] {
        let Named::Path(path) = verb::path(verb, argument) else { continue };
        assert!(path.trim_ascii() == path && !path.iter().any(|b| b"*~\\".contains(b)), "{}", path.escape_ascii());
        let Some(found) = resolve(directory.as_deref(), path) else {
            let is_relative = directory.is_none() && path.first() != Some(&b'/');
            assert!(is_relative || std::str::from_utf8(path).is_err(), "{}", path.escape_ascii());
            continue;
        };
        let mut parts = found.strip_prefix('/').expect("from the root on").split('/');
        assert!(found == "/" || parts.all(|part| !matches!(part, "" | "." | "..")), "{found}");
        assert_eq!(resolve(None, found.as_bytes()).as_ref(), Some(&found));
        // one directory after the other, as a server without links goes
        let start = if path.first() == Some(&b'/') { Some("/") } else { directory.as_deref() };
        let mut at = resolve(None, start.expect("it is known").as_bytes()).expect("one from the root on");
        for part in path.split(|b| *b == b'/') {
            at = resolve(Some(&at), part).expect("its whole is a text");
        }
        assert_eq!(at, found, "{}", path.escape_ascii());
    }
}
