use super::*;

fn command(input: &[u8]) -> Result<Option<(Command, usize)>, LineError> {
    parse_command(input)
}

#[test]
fn commands_in_any_spelling() {
    for (input, verb, argument) in [
        (&b"RETR a b\r\n"[..], "RETR", &b"a b"[..]),
        (b"retr  x\n", "RETR", b" x"),
        (b"NOOP\r\n", "NOOP", b""),
        (b"NOOP \r\n", "NOOP", b""),
        (b"SIZE \xff\xff\xc3\xa4\r\n", "SIZE", b"\xff\xc3\xa4"),
        (b"\r\n", "", b""),
        (b"GET / HTTP/1.1\r\n", "GET", b"/ HTTP/1.1"),
        (b"A-B\r\n", "", b""),
        (b"ABCDEFGHIJKLMNOPQ x\r\n", "", b"x"),
    ] {
        let (found, used) = command(input).unwrap().unwrap();
        assert_eq!((found.verb.as_str(), &found.argument[..], used), (verb, argument, input.len()));
        assert!(!found.synch && found.answers.is_empty());
    }
    let (first, used) = command(b"USER a\r\nPASS b\r\n").unwrap().unwrap();
    assert_eq!((first.argument, used), (b"a".to_vec(), 8));
}

#[test]
fn telnet_between_the_bytes_of_a_line() {
    let (abort, _) = command(b"\xff\xf4\xff\xf2ABOR\r\n").unwrap().unwrap();
    assert_eq!((abort.verb.as_str(), abort.synch), ("ABOR", true));
    // the number of an option may be that of a line's end
    let (noop, used) = command(b"\xff\xfd\x0aNO\xff\xfb\x01OP\xff\xfa\x18\x01\n\xff\xf0\r\nX").unwrap().unwrap();
    assert_eq!((noop.verb.as_str(), used), ("NOOP", 19));
    assert_eq!(noop.answers, [IAC, WONT, 10, IAC, DONT, 1]);
    assert_eq!(command(b"\xff\xfd\x0a"), Ok(None));
    let many = [&b"\xff\xfd\x01".repeat(OFFERS_MAX + 1)[..], b"NOOP\r\n"].concat();
    assert_eq!(command(&many), Err(LineError::Options));
}

#[test]
fn what_other_programs_would_read_otherwise() {
    for bad in [&b"RETR a\rDELE b\r\n"[..], b"RETR a\r\0b\r\n", b"RETR \0\r\n", b"RETR a\r\r\n"] {
        assert_eq!(command(bad), Err(LineError::Bare), "{}", bad.escape_ascii());
    }
}

#[test]
fn lines_without_an_end() {
    assert_eq!(command(&[b'a'; LINE_MAX - 1]), Ok(None));
    assert_eq!(command(&[b'a'; LINE_MAX]), Err(LineError::TooLong));
    assert_eq!(parse_reply_line(&[b'2'; LINE_MAX], None), Err(LineError::TooLong));
    let longest = [&[b'a'; LINE_MAX - 2][..], b"\r\n"].concat();
    assert_eq!(command(&longest).unwrap().unwrap().1, LINE_MAX);
    let beyond = [&[b'a'; LINE_MAX][..], b"\r\n"].concat();
    assert_eq!(command(&beyond), Err(LineError::TooLong));
}

#[test]
fn replies_of_one_line_and_of_many() {
    let line = |input: &[u8], within| parse_reply_line(input, within).map(|l| l.map(|(l, _)| (l.code, l.is_last)));
    assert_eq!(line(b"226 done\r\n", None), Ok(Some((226, true))));
    assert_eq!(line(b"226\r\n", None), Ok(Some((226, true))));
    assert_eq!(line(b"211-Features:\r\n", None), Ok(Some((211, false))));
    for (middle, last) in
        [("211-x", false), (" 211 x", false), ("226 x", false), ("211 x", true), ("", false), ("211", true)]
    {
        let found = line(format!("{middle}\n").as_bytes(), Some(211));
        assert_eq!(found, Ok(Some((211, last))), "{middle}");
    }
    for bad in ["hello", "600 x", "099 x", "22", "226x", ""] {
        assert_eq!(line(format!("{bad}\r\n").as_bytes(), None), Err(LineError::NoCode), "{bad}");
    }
    assert_eq!(line(b"226 a", None), Ok(None));
    assert!(parse_reply_line(b"\xff\xf2226 x\r\n", None).unwrap().unwrap().0.synch);
}

#[test]
fn what_is_written_is_read_as_the_same() {
    let command = Command::new("RETR", &b"\xff \xc3\xbf x"[..]);
    assert_eq!(command.encode(), b"RETR \xff\xff \xc3\xbf x\r\n");
    assert_eq!(parse_command(&command.encode()).unwrap().unwrap().0, command);
}
