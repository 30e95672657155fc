//! The conversation of a login gateway: telnet, lines, and what is settled before the splice.

use longsplice_proxy::login::{
    handover::Handover,
    session::{Event, INPUT_MAX, Manner, Session},
    telnet::{Item, Parser, write},
};

/// The items of a stream, and the bytes that belong to none yet.
fn items(input: &[u8]) -> (Vec<Item>, &'static [u8]) {
    let mut parser = Parser::default();
    let items = input.iter().flat_map(|b| parser.feed(*b)).flatten().collect();
    (items, parser.pending())
}

/// What is taken apart can be put together again, to its last byte.
pub(crate) fn telnet(input: &[u8]) {
    let (items, pending) = items(input);
    let mut again = Vec::new();
    items.iter().for_each(|item| write(*item, &mut again));
    again.extend(pending);
    assert_eq!(again, input);
    assert!(items.len() <= 2 * input.len());
}

/// A whole conversation, up to the splice: events, what the client is told, what the server gets.
#[derive(Debug, PartialEq, Eq)]
struct Course {
    events: Vec<String>,
    to_client: Vec<u8>,
    to_server: Vec<u8>,
}

/// Runs a conversation. Whoever gives a password may go on, if it does not begin with `w`; every host is right, but an empty one.
fn run<'a>(manner: Manner, pieces: impl Iterator<Item = &'a [u8]>) -> Course {
    let mut course = Course { events: Vec::new(), to_client: Vec::new(), to_server: Vec::new() };
    let mut pieces = pieces.chain([&b""[..]]);
    let mut session = Session::start(manner, Some("hello\n"), &mut course.to_client);
    let mut taken = 0;
    let rest = 'host: loop {
        let Some(mut piece) = pieces.next() else { return course };
        loop {
            let before = course.to_client.len();
            let (used, event) = session.feed(piece, &mut course.to_client);
            assert!(course.to_client.len() - before <= 9 * used + 64, "answers are not much longer than questions");
            (piece, taken) = (&piece[used..], taken + used);
            assert!(taken <= INPUT_MAX);
            let Some(event) = event else {
                assert!(piece.is_empty());
                break;
            };
            course.events.push(match &event {
                Event::Check { name, password } => format!("{} {}", name.escape_ascii(), password.escape_ascii()),
                other => format!("{other:?}"),
            });
            match event {
                Event::Check { password, .. } if password.first() == Some(&b'w') => {
                    if !session.again(&mut course.to_client) {
                        return course;
                    }
                }
                Event::Check { .. } => session.ask_host(&mut course.to_client),
                Event::Host(line) if line.is_empty() && session.may_ask_host() => {
                    session.ask_host(&mut course.to_client)
                }
                Event::Host(_) => break 'host piece,
                Event::HangUp(_) => return course,
            }
        }
    };
    let held = session.held();
    if !session.speaks_telnet() {
        course.to_server.extend(held);
        std::iter::once(rest).chain(pieces).for_each(|piece| course.to_server.extend(piece));
        return course;
    }
    let tell = (manner.environment, Some("ann".to_owned()));
    let (to_client, to_server) = (&mut course.to_client, &mut course.to_server);
    let mut handover = Handover::new(session.into_parts(), tell, to_client, to_server);
    held.into_iter().for_each(|byte| write(Item::Data(byte), to_server));
    std::iter::once(rest).chain(pieces).for_each(|piece| handover.from_client(piece, to_server, to_client));
    to_server.extend(handover.pending().0);
    course
}

/// However the input is cut, the conversation is the same. A client that does not speak telnet loses no byte.
pub(crate) fn login(input: &[u8]) {
    for manner in [
        Manner { telnet: true, users: true, environment: true },
        Manner { telnet: true, users: false, environment: false },
        Manner { telnet: false, users: true, environment: false },
    ] {
        let whole = run(manner, std::iter::once(input));
        assert_eq!(run(manner, input.chunks(1)), whole, "byte by byte");
        assert_eq!(run(manner, input.chunks(7)), whole, "in sevens");
        if !manner.telnet {
            assert!(input.ends_with(&whole.to_server));
        }
    }
    handover(input);
}

/// A handover with the client's bytes and the server's in turn: what is data for the one comes from the other, in order.
fn handover(input: &[u8]) {
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let mut session = Session::start(Manner { telnet: true, ..Manner::default() }, None, &mut to_client);
    session.feed(b"\xff\xfb\x18\xff\xfb\x1f\xff\xfa\x18\0X\xff\xf0\xff\xfa\x1f\0\x50\0\x18\xff\xf0", &mut to_client);
    to_client.clear();
    let tell = (true, Some("ann".to_owned()));
    let mut both = Handover::new(session.into_parts(), tell, &mut to_client, &mut to_server);
    let (client, server) = input.split_at(input.len() / 2);
    let turns = client.chunks(5).zip(server.chunks(5).chain(std::iter::repeat(&b""[..])));
    let (mut from_client, mut from_server) = (Vec::new(), Vec::new());
    for (up, down) in turns {
        both.from_client(up, &mut to_server, &mut to_client);
        both.from_server(down, &mut to_client, &mut to_server);
        from_client.extend(up);
        from_server.extend(down);
    }
    let data = |bytes: &[u8]| {
        let only = |item: Item| if let Item::Data(byte) = item { Some(byte) } else { None };
        items(bytes).0.into_iter().filter_map(only).collect::<Vec<u8>>()
    };
    // What the gateway adds are whole commands; it stands between items, but for a subnegotiation that passes.
    if !passes_subs(&from_client) && !passes_subs(&from_server) {
        assert_eq!(data(&to_server), data(&from_client));
        assert_eq!(data(&to_client), data(&from_server));
    }
}

fn passes_subs(bytes: &[u8]) -> bool {
    items(bytes).0.iter().any(|item| matches!(item, Item::Begin(_)))
}
