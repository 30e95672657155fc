//! Templates: what they are read as, lines of web servers, and values that would forge lines.

use super::*;
use crate::log::access_log::{Datagrams, Extra, tests::record};
use std::collections::BTreeSet;

fn of(text: &str) -> Template {
    Template::parse(text).unwrap_or_else(|e| panic!("{text}: {e:?}"))
}

fn line(text: &str, record: &Record) -> String {
    of(text).line(record)
}

fn http(method: &str, uri: Option<&str>, status: Option<u16>) -> Record {
    let extra = Extra { version: Some("HTTP/1.1".into()), ..Extra::default() };
    let mut record = Record { listener: "http", user: None, ..record() };
    (record.method, record.uri, record.status) = (Some(method.into()), uri.map(str::to_owned), status);
    record.target = Some("example.org:80".into());
    record.extra = Some(extra.into());
    record
}

#[test]
fn fields_stand_where_the_template_has_them() {
    assert_eq!(
        line("{time_ncsa}|{client}|{client_ip}|{client_port}|{server}|{server_ip}|{user}|{id}|{how}", &record()),
        "01/Mar/2025:12:00:00 +0000|192.0.2.1:1000|192.0.2.1|1000|[2001:db8::1]:443|2001:db8::1|ann|7|server-reset"
    );
    assert_eq!(line("{{{id}}} {{}} {uri}{status}{event}", &record()), "{7} {} ---");
    assert_eq!(line("{time} {time_unix}\t{datagrams_up}", &record()), "2025-03-01T12:00:00.000Z 1740830400.000\t-");
    let datagrams = Some(Datagrams { up: 3, ..Datagrams::default() });
    assert_eq!(
        line(
            "{datagrams_up} {client_ip}",
            &Record { datagrams, client: "[::ffff:192.0.2.1]:5".parse().unwrap(), ..record() }
        ),
        "3 192.0.2.1"
    );
}

#[test]
fn all_fields_can_be_named_at_once() {
    let names: Vec<&str> = known().collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    assert!(names.len() <= MOST, "{}", names.len());
    let all: String = names.iter().map(|name| format!("{{{name}}} ")).collect();
    let template = of(&all);
    assert!(names.iter().all(|name| template.has(name)) && !template.has("nothing"));
    assert_eq!(template.line(&record()).split(' ').count(), names.len() + 2, "a space is in time_ncsa, and at the end");
}

#[test]
fn mistakes_have_a_place_and_a_cure() {
    for (text, brace, message) in [
        ("{client} {usr}", Some(2), "no field is called `usr`: did you mean {user}?"),
        ("{{ {stauts}", Some(2), "no field is called `stauts`: did you mean {status}?"),
        ("{bytes-down}", Some(0), "no field is called `bytes-down`: did you mean {bytes_down}?"),
        ("{Client}", Some(0), "no field is called `Client`: did you mean {client}?"),
        ("{}", Some(0), "no field is called ``: docs/access-log.md has those that there are"),
        ("{remote_addr}", Some(0), "no field is called `remote_addr`: docs/access-log.md has those that there are"),
        ("{ client }", Some(0), "no field is called ` client `: did you mean {client}?"),
        ("{client", Some(0), "this brace is not closed: write {NAME}, or {{ for a brace"),
        ("{client {user}", Some(0), "this brace is not closed: write {NAME}, or {{ for a brace"),
        ("{client} }x", Some(2), "no field ends here: write }} for a brace"),
        ("$remote_addr", None, "all lines would be the same: name a field in braces, such as {client}"),
        ("", None, "all lines would be the same: name a field in braces, such as {client}"),
        ("{client}\n{user}", None, "a line has no line break and no control character but a tab: remove it"),
    ] {
        assert_eq!(Template::parse(text), Err(Mistake { brace, message: message.into() }), "{text}");
    }
    assert!(Template::parse(&"{id}".repeat(65)).unwrap_err().message.starts_with("too many fields: 65"));
    assert!(Template::parse(&"x".repeat(5000)).unwrap_err().message.starts_with("too long: 5000 bytes"));
    assert!(Template::parse(&format!("{{{}}}", "y".repeat(4000))).unwrap_err().message.len() < 200);
}

#[test]
fn near_words_are_found() {
    for (a, b, far) in [("", "", 0), ("", "abc", 3), ("user", "usr", 1), ("stauts", "status", 2), ("abc", "xyz", 3)] {
        assert_eq!((distance(a, b), distance(b, a)), (far, far), "{a} {b}");
    }
}

#[test]
fn lines_of_web_servers() {
    let common = |record: &Record| Template::common().line(record);
    let start = "192.0.2.1 - - [01/Mar/2025:12:00:00 +0000] ";
    let mut asked = http("GET", Some("/a"), Some(404));
    assert_eq!(common(&asked), format!("{start}\"GET /a HTTP/1.1\" 404 20"));
    assert_eq!(Template::combined().line(&asked), format!("{start}\"GET /a HTTP/1.1\" 404 20 \"-\" \"-\""));
    let extra = asked.extra.as_mut().unwrap();
    extra.is_absolute = true;
    (extra.referrer, extra.user_agent) = (Some("http://b/".into()), Some("curl/8 \"x\"".into()));
    assert_eq!(
        Template::combined().line(&asked),
        format!(r#"{start}"GET http://example.org/a HTTP/1.1" 404 20 "http://b/" "curl/8 \x22x\x22""#)
    );
    // requests without a reply
    for (how, refusal, status) in [
        ("client-reset", None, 499),
        ("server-reset", None, 502),
        ("idle", None, 504),
        ("stopped", None, 503),
        ("stopped", Some("while its body was passed on"), 503),
        ("left", Some("short"), 503),
        ("lost", None, 503),
        ("forbidden", Some("rule 1"), 403),
        ("timeout", Some("reply took too long"), 504),
        ("bad-reply", Some("x"), 502),
    ] {
        let asked = Record { how, refusal: refusal.map(str::to_owned), ..http("GET", Some("/"), None) };
        assert_eq!(status_of(&asked), status, "{how}");
    }
    // what is no request of HTTP
    let mut tunnel = http("CONNECT", None, Some(200));
    assert_eq!(common(&tunnel), format!("{start}\"CONNECT example.org:80 HTTP/1.1\" 200 20"));
    (tunnel.listener, tunnel.method, tunnel.extra, tunnel.status) = ("socks5", None, None, None);
    assert_eq!(common(&tunnel), format!("{start}\"CONNECT example.org:80 HTTP/1.0\" 200 20"));
    (tunnel.how, tunnel.refusal, tunnel.server) = ("denied", Some("rule 1".into()), None);
    assert_eq!(common(&tunnel), format!("{start}\"CONNECT example.org:80 HTTP/1.0\" 403 20"));
    (tunnel.how, tunnel.target) = ("bad-request", None);
    assert_eq!(common(&tunnel), format!("{start}\"-\" 400 20"));
    let mut ftp = http("RETR", Some("/a b"), Some(226));
    (ftp.listener, ftp.target, ftp.extra) = ("ftp", Some("example.org:21".into()), None);
    assert_eq!(common(&ftp), format!("{start}\"GET ftp://example.org/a%20b HTTP/1.0\" 226 20"));
    (ftp.method, ftp.uri) = (Some("STOR".into()), Some("c".into()));
    assert_eq!(common(&ftp), format!("{start}\"PUT ftp://example.org/c HTTP/1.0\" 226 20"));
    // of other commands, only those have a line that are denied
    (ftp.method, ftp.status, ftp.how, ftp.refusal) = (Some("MKD".into()), None, "denied", Some("rule 1".into()));
    assert_eq!(common(&ftp), format!("{start}\"MKD ftp://example.org/c HTTP/1.0\" 403 20"));
}

fn status_of(record: &Record) -> u16 {
    status(record)
}

/// Whatever clients send, a line stays one line, and splits into the same fields.
#[test]
fn no_value_forges_a_line_or_a_field() {
    let hostile = [
        "x\" 200 1 \"-\" \"-\"\n192.0.2.66 - root [01/Mar/2025:12:00:00 +0000] \"GET /forged HTTP/1.1\" 200 1",
        "a b|c]d\te\\\" f",
        "\r\n\0\x1b[31m\u{85}\u{2028}\u{202e}é",
        " ",
        "\\",
        "\"",
    ];
    for text in hostile {
        let mut asked = http(text, Some(text), Some(200));
        (asked.user, asked.target, asked.refusal) = (Some(text.into()), Some(text.into()), Some(text.into()));
        let extra = asked.extra.as_mut().unwrap();
        (extra.referrer, extra.user_agent) = (Some(text.into()), Some(text.into()));
        for is_absolute in [false, true] {
            asked.extra.as_mut().unwrap().is_absolute = is_absolute;
            let line = Template::combined().line(&asked);
            assert!(line.bytes().all(|b| b == b' ' || b.is_ascii_graphic()), "{line}");
            let quoted: Vec<&str> = line.split('"').collect();
            assert_eq!(quoted.len(), 7, "{line}");
            assert_eq!(quoted[1].split(' ').count(), 3, "{line}");
            assert_eq!(quoted[0].split(' ').count(), 6, "{line}");
        }
        for (template, stop, fields) in [
            ("{user}|{uri}|{target}", '|', 3),
            ("{user},{method},{refusal},{id}", ',', 4),
            ("{user}\t{user_agent}\t{id}", '\t', 3),
            ("{user} {uri} {id}", ' ', 3),
            ("{user}:{user}:x", ':', 3),
            ("'{user}' '{referrer}'", '\'', 5),
        ] {
            let line = of(template).line(&asked);
            assert_eq!(line.split(stop).count(), fields, "{line}");
            assert!(!line.contains(char::is_control) || stop == '\t', "{line}");
        }
        let line = of("[{user}] [{uri}] \"{user_agent}\"").line(&asked);
        let (before, quoted) = line.split_once('"').unwrap();
        assert_eq!((before.matches(']').count(), quoted.matches('"').count()), (2, 1), "{line}");
    }
}

#[test]
fn what_is_written_for_a_character_is_not_replaced_itself() {
    let asked = http("GET", Some("/x2\\"), None);
    assert_eq!(line("{uri}x {uri}5", &asked), "/x2\\x5Cx /x2\\x5C5");
    let empty = Record { user: Some(String::new()), ..record() };
    assert_eq!(line("{user}", &empty), "-");
}
