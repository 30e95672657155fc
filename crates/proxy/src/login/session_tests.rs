use super::*;

const TELNET: Manner = Manner { telnet: true, users: true, environment: false };
const PLAIN: Manner = Manner { telnet: false, users: true, environment: false };

/// Feeds all, and notes what comes out: what is said, and events in brackets.
fn converse(session: &mut Session, mut input: &[u8]) -> String {
    let mut all = String::new();
    loop {
        let mut out = Vec::new();
        let (used, event) = session.feed(input, &mut out);
        input = &input[used..];
        all += &out.escape_ascii().to_string();
        match event {
            Some(Event::Check { name, password }) => {
                all += &format!("[{}/{}]", name.escape_ascii(), password.escape_ascii());
                let mut out = Vec::new();
                if &*password == b"secret" {
                    session.ask_host(&mut out);
                } else if !session.again(&mut out) {
                    return all + &out.escape_ascii().to_string() + "[over]";
                }
                all += &out.escape_ascii().to_string();
            }
            Some(Event::Host(line)) => return all + &format!("[to {}|{}]", line.escape_ascii(), input.escape_ascii()),
            Some(Event::HangUp(why)) => return all + &format!("[{why}]"),
            None => return all,
        }
    }
}

fn begin(manner: Manner) -> (Session, String) {
    let mut out = Vec::new();
    let session = Session::start(manner, Some("Hello\n"), &mut out);
    (session, out.escape_ascii().to_string())
}

#[test]
fn a_plain_client() {
    let (mut session, said) = begin(PLAIN);
    assert_eq!(said, r"Hello\r\nlogin: ");
    assert_eq!(converse(&mut session, b"an"), "");
    assert_eq!(converse(&mut session, b"n\n"), "password: ");
    assert_eq!(converse(&mut session, b"secret\r\n"), "[ann/secret]host: ");
    assert_eq!(converse(&mut session, b"db\r\ntyped\xffahead"), r"[to db|typed\xffahead]");
}

/// All at once, as one that pipelines, and byte by byte, as one that is slow.
#[test]
fn however_the_input_is_cut() {
    let input = b"ann\r\0\nwrong\nann\nsecret\rdb\rx";
    let (mut session, _) = begin(PLAIN);
    let whole = converse(&mut session, input);
    assert_eq!(
        whole,
        r"password: [ann/]Login incorrect\r\nlogin: password: [wrong/ann]Login incorrect\r\nlogin: password: [secret/db]"
            .to_owned()
            + r"Login incorrect\r\n[over]"
    );
    let input = b"ann\r\nsecret\rdb\rx";
    let (mut session, _) = begin(PLAIN);
    assert_eq!(converse(&mut session, input), "password: [ann/secret]host: [to db|]");
    assert_eq!(session.held(), Some(b'x'));
    let (mut session, _) = begin(PLAIN);
    let slow: String = input.iter().map(|b| converse(&mut session, &[*b])).collect();
    assert_eq!(slow, "password: [ann/secret]host: [to db|]");
}

#[test]
fn a_telnet_client() {
    let (mut session, said) = begin(TELNET);
    // DO TERMINAL-TYPE, DO NAWS
    assert_eq!(said, r"\xff\xfd\x18\xff\xfd\x1fHello\r\nlogin: ");
    // WILL both; offers and wishes that are refused: WILL LINEMODE, DO SGA, DO ECHO
    assert_eq!(
        converse(
            &mut session,
            b"\xff\xfb\x18\xff\xfb\x1f\xff\xfa\x1f\0\x84\0\x2b\xff\xf0\xff\xfb\x22\xff\xfd\x03\xff\xfd\x01"
        ),
        r#"\xff\xfa\x18\x01\xff\xf0\xff\xfe\"\xff\xfc\x03\xff\xfc\x01"#
    );
    assert_eq!(converse(&mut session, b"\xff\xfa\x18\0XTERM\xff\xf0"), "");
    assert_eq!(session.options.terminal_type.as_deref(), Some("XTERM"));
    assert_eq!(session.options.window, Some((132, 43)));
    // erased: EC, EL
    assert_eq!(converse(&mut session, b"xx\xff\xf8anx\xff\xf7n\r\0"), r"\xff\xfb\x01password: ");
    assert_eq!(converse(&mut session, b"\xff\xfd\x01secret\r\n"), r"\xff\xfc\x01\r\n[ann/secret]host: ");
    assert_eq!(converse(&mut session, b"\xff\xfe\x01\xff\xf6"), r"\r\n[yes]\r\n");
    // a Synch: IP would end it; AO and the mark do not
    assert_eq!(converse(&mut session, b"\xff\xf5\xff\xf2db\r\n"), "[to db|]");
    assert!(session.speaks_telnet());
}

#[test]
fn hostile_clients_get_no_more_than_so_much() {
    let endless = |input: &[u8]| {
        let (mut session, _) = begin(TELNET);
        for n in 0.. {
            let mut out = Vec::new();
            match session.feed(input, &mut out).1 {
                Some(Event::HangUp(why)) => return (why, n * input.len()),
                Some(_) => panic!(),
                None => assert!(out.len() <= 9 * input.len().max(2), "{}", out.escape_ascii()),
            }
        }
        unreachable!()
    };
    assert_eq!(endless(b"x"), ("a line of more than 256 bytes", 256));
    for input in [&b"\xff\xf1"[..], b"\xff\xfb\x07", b"\x08", b"\xff\xf6", b"\x15", b"\xff\xfa\x18\0abc"] {
        let (why, taken) = endless(input);
        assert_eq!((why, taken / input.len()), ("more than anybody sends to log in", INPUT_MAX / input.len()));
    }
    let (mut session, _) = begin(TELNET);
    assert_eq!(converse(&mut session, b"\n\n\n"), "login: login: [no name]");
    for input in [&b"\x03"[..], b"\x04", b"\xff\xf4", b"\xff\xf3"] {
        let (mut session, _) = begin(TELNET);
        assert_eq!(converse(&mut session, input), "[interrupted]");
    }
}

#[test]
fn texts_have_no_control_characters() {
    let (session, _) = begin(PLAIN);
    let mut out = Vec::new();
    session.say("a\x1b[31m\u{9b}é\n\0", &mut out);
    assert_eq!(out, "a?[31m?é\r\n?".as_bytes());
}

/// CR before a byte that telnet doubles: the byte is not lost, and is not taken for half a command.
#[test]
fn a_doubled_byte_after_a_bare_return() {
    let (mut session, _) = begin(Manner { users: false, ..TELNET });
    assert_eq!(converse(&mut session, b"db\r\xff\xffz"), "[to db|z]");
    assert_eq!(session.held(), Some(IAC));
}
