//! The telnet protocol (RFC 854, 855) without I/O: taken apart, put together, and the state of an option (RFC 1143).
//!
//! The parser takes one byte at a time, so the input is read alike however it is cut. What it yields is never longer than what it
//! took, and can be [written](write()) again byte by byte, so a stream may pass through it unchanged.

/// Interpret as command: the byte that begins every command.
pub const IAC: u8 = 255;
/// End of a subnegotiation.
const SE: u8 = 240;
/// Begin of a subnegotiation.
const SB: u8 = 250;
/// Data Mark, the end of a Synch.
pub const DM: u8 = 242;
/// Break.
pub const BRK: u8 = 243;
/// Interrupt Process.
pub const IP: u8 = 244;
/// Are You There.
pub const AYT: u8 = 246;
/// Erase Character.
pub const EC: u8 = 247;
/// Erase Line.
pub const EL: u8 = 248;

/// The option ECHO (RFC 857).
pub const ECHO: u8 = 1;
/// The option TERMINAL-TYPE (RFC 1091).
pub const TERMINAL_TYPE: u8 = 24;
/// The option NAWS, the window size (RFC 1073).
pub const WINDOW: u8 = 31;
/// The option NEW-ENVIRON (RFC 1572).
pub const ENVIRONMENT: u8 = 39;

/// Value follows, in TERMINAL-TYPE and NEW-ENVIRON.
pub const IS: u8 = 0;
/// Value is wanted, likewise.
pub const SEND: u8 = 1;
// NEW-ENVIRON; 1 stands before a value.
const VAR: u8 = 0;
const VALUE: u8 = 1;
const ESC: u8 = 2;
const USERVAR: u8 = 3;

/// A verb of a negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Verb {
    /// The sender wants to do it, or does it.
    Will = 251,
    /// The sender does not do it.
    Wont = 252,
    /// The receiver should do it.
    Do = 253,
    /// The receiver should not do it.
    Dont = 254,
}

/// A part of a telnet stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item {
    /// A byte of data.
    Data(u8),
    /// A command without an option.
    Command(u8),
    /// A request or an answer about an option.
    Negotiate(Verb, u8),
    /// A subnegotiation of this option begins.
    Begin(u8),
    /// A byte of it.
    Part(u8),
    /// It is complete.
    End,
    /// It was broken off by another command, which follows.
    Cut,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Data,
    Iac,
    Verb(Verb),
    Begin,
    Part,
    PartIac,
}

/// Takes a stream apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parser(State);

impl Parser {
    /// Takes the next byte. It completes one item, two at a cut, or none.
    pub fn feed(&mut self, byte: u8) -> [Option<Item>; 2] {
        let one = |item| [Some(item), None];
        let (state, items) = match (self.0, byte) {
            (State::Data, IAC) => (State::Iac, [None; 2]),
            (State::Data, b) => (State::Data, one(Item::Data(b))),
            (State::Iac, b) => Parser::command(b, None),
            (State::Verb(verb), option) => (State::Data, one(Item::Negotiate(verb, option))),
            (State::Begin, option) => (State::Part, one(Item::Begin(option))),
            (State::Part, IAC) => (State::PartIac, [None; 2]),
            (State::Part, b) => (State::Part, one(Item::Part(b))),
            (State::PartIac, IAC) => (State::Part, one(Item::Part(IAC))),
            (State::PartIac, SE) => (State::Data, one(Item::End)),
            // RFC 855 knows nothing else here. Like other programs, take it for the next command.
            (State::PartIac, b) => Parser::command(b, Some(Item::Cut)),
        };
        self.0 = state;
        items
    }

    fn command(byte: u8, before: Option<Item>) -> (State, [Option<Item>; 2]) {
        let state = match byte {
            251 => State::Verb(Verb::Will),
            252 => State::Verb(Verb::Wont),
            253 => State::Verb(Verb::Do),
            254 => State::Verb(Verb::Dont),
            SB => State::Begin,
            _ => {
                let item = if byte == IAC { Item::Data(IAC) } else { Item::Command(byte) };
                return (State::Data, if before.is_some() { [before, Some(item)] } else { [Some(item), None] });
            }
        };
        (state, [before, None])
    }

    /// Returns the bytes that are taken and belong to no item yet.
    pub fn pending(&self) -> &'static [u8] {
        match self.0 {
            State::Data | State::Part => &[],
            State::Iac | State::PartIac => &[IAC],
            State::Verb(Verb::Will) => &[IAC, Verb::Will as u8],
            State::Verb(Verb::Wont) => &[IAC, Verb::Wont as u8],
            State::Verb(Verb::Do) => &[IAC, Verb::Do as u8],
            State::Verb(Verb::Dont) => &[IAC, Verb::Dont as u8],
            State::Begin => &[IAC, SB],
        }
    }
}

/// Writes an item as it stands in a stream.
pub fn write(item: Item, out: &mut Vec<u8>) {
    match item {
        Item::Data(IAC) | Item::Part(IAC) => out.extend([IAC, IAC]),
        Item::Data(b) | Item::Part(b) => out.push(b),
        Item::Command(c) => out.extend([IAC, c]),
        Item::Negotiate(verb, option) => out.extend([IAC, verb as u8, option]),
        Item::Begin(option) => out.extend([IAC, SB, option]),
        Item::End => out.extend([IAC, SE]),
        Item::Cut => {}
    }
}

/// Writes a whole subnegotiation.
pub fn write_sub(option: u8, body: &[u8], out: &mut Vec<u8>) {
    write(Item::Begin(option), out);
    body.iter().for_each(|b| write(Item::Part(*b), out));
    write(Item::End, out);
}

/// Writes the variable USER of NEW-ENVIRON (RFC 1572, 2).
pub fn write_user(user: &str, out: &mut Vec<u8>) {
    let mut body = vec![IS, VAR];
    body.extend(b"USER");
    body.push(VALUE);
    for b in user.bytes() {
        if matches!(b, VAR | VALUE | ESC | USERVAR) {
            body.push(ESC);
        }
        body.push(b);
    }
    write_sub(ENVIRONMENT, &body, out);
}

/// A subnegotiation that is kept: up to so many bytes, which is more than any that is understood has. Longer ones are skipped.
pub const SUB_MAX: usize = 64;

/// The body of a subnegotiation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sub {
    /// The option.
    pub option: u8,
    /// The body, or its beginning.
    pub body: Vec<u8>,
    /// It was longer than what is kept.
    pub is_long: bool,
}

impl Sub {
    /// Begins with one.
    pub fn of(option: u8) -> Sub {
        Sub { option, ..Sub::default() }
    }

    /// Adds a byte.
    pub fn add(&mut self, byte: u8) {
        if self.body.len() < SUB_MAX {
            self.body.push(byte);
        } else {
            self.is_long = true;
        }
    }

    /// Returns columns and rows, if it is a window size (RFC 1073).
    pub fn window(&self) -> Option<(u16, u16)> {
        match (self.option, &self.body[..], self.is_long) {
            (WINDOW, [a, b, c, d], false) => Some((u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d]))),
            _ => None,
        }
    }

    /// Returns the name, if it is a terminal type (RFC 1091, 4: at most 40 letters).
    pub fn terminal_type(&self) -> Option<String> {
        match (self.option, &self.body[..], self.is_long) {
            (TERMINAL_TYPE, [IS, name @ ..], false) if (1..=40).contains(&name.len()) => {
                let is_plain = name.iter().all(u8::is_ascii_graphic);
                is_plain.then(|| String::from_utf8_lossy(name).into_owned())
            }
            _ => None,
        }
    }
}

/// The state of an option on one side, as the other one knows it (RFC 1143, 7).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Agreed {
    /// It is off.
    #[default]
    No,
    /// It is on.
    Yes,
    /// It was asked to be on, and there is no answer yet; then, to be off again.
    WantYes {
        /// Whether to ask again, for the opposite, once it is answered.
        then_no: bool,
    },
    /// It was asked to be off, and there is no answer yet; then, to be on again.
    WantNo {
        /// Whether to ask again, for the opposite, once it is answered.
        then_yes: bool,
    },
}

impl Agreed {
    /// Wants it on or off. Returns what has to be sent now.
    pub fn ask(&mut self, on: bool) -> Option<bool> {
        let (next, sent) = match (*self, on) {
            (Agreed::No, true) => (Agreed::WantYes { then_no: false }, Some(true)),
            (Agreed::Yes, false) => (Agreed::WantNo { then_yes: false }, Some(false)),
            (Agreed::WantYes { .. }, on) => (Agreed::WantYes { then_no: !on }, None),
            (Agreed::WantNo { .. }, on) => (Agreed::WantNo { then_yes: on }, None),
            (settled, _) => (settled, None),
        };
        *self = next;
        sent
    }

    /// Notes what the other side says. Returns what has to be sent now. `welcome`: whether it may be on if the other side asks.
    pub fn told(&mut self, on: bool, welcome: bool) -> Option<bool> {
        let (next, sent) = match (*self, on) {
            (Agreed::No, true) if welcome => (Agreed::Yes, Some(true)),
            (Agreed::No, true) => (Agreed::No, Some(false)),
            (Agreed::Yes, false) => (Agreed::No, Some(false)),
            (Agreed::WantYes { then_no: true }, true) => (Agreed::WantNo { then_yes: false }, Some(false)),
            (Agreed::WantYes { then_no: false }, true) => (Agreed::Yes, None),
            (Agreed::WantNo { then_yes: true }, false) => (Agreed::WantYes { then_no: false }, Some(true)),
            // An answer that must not be given (RFC 854): it is as the other side says.
            (Agreed::WantNo { then_yes }, true) => (if then_yes { Agreed::Yes } else { Agreed::No }, None),
            (Agreed::WantYes { .. } | Agreed::WantNo { .. }, false) => (Agreed::No, None),
            (settled, _) => (settled, None),
        };
        *self = next;
        sent
    }

    /// Whether no answer is missing.
    pub fn is_settled(self) -> bool {
        matches!(self, Agreed::No | Agreed::Yes)
    }
}

/// Writes a request or an answer about what the other side does.
pub fn write_do(option: u8, on: Option<bool>, out: &mut Vec<u8>) {
    if let Some(on) = on {
        write(Item::Negotiate(if on { Verb::Do } else { Verb::Dont }, option), out);
    }
}

/// Writes a request or an answer about what we do.
pub fn write_will(option: u8, on: Option<bool>, out: &mut Vec<u8>) {
    if let Some(on) = on {
        write(Item::Negotiate(if on { Verb::Will } else { Verb::Wont }, option), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(input: &[u8]) -> Vec<Item> {
        let mut parser = Parser::default();
        input.iter().flat_map(|b| parser.feed(*b)).flatten().collect()
    }

    #[test]
    fn a_stream_is_taken_apart() {
        assert_eq!(
            items(b"a\xff\xff\xff\xf6\xff\xfd\x18\xff\xfa\x1f\0\x50\xff\xff\x18\xff\xf0b"),
            [
                Item::Data(b'a'),
                Item::Data(IAC),
                Item::Command(AYT),
                Item::Negotiate(Verb::Do, TERMINAL_TYPE),
                Item::Begin(WINDOW),
                Item::Part(0),
                Item::Part(80),
                Item::Part(IAC),
                Item::Part(24),
                Item::End,
                Item::Data(b'b'),
            ]
        );
        assert_eq!(
            items(b"\xff\xfa\x18\x01\xff\xf4\xff\xfa\x18\xff\xfb\x01"),
            [
                Item::Begin(24),
                Item::Part(1),
                Item::Cut,
                Item::Command(IP),
                Item::Begin(24),
                Item::Cut,
                Item::Negotiate(Verb::Will, ECHO),
            ]
        );
    }

    #[test]
    fn subnegotiations_that_are_understood() {
        let sub = |option, body: &[u8]| {
            let mut sub = Sub::of(option);
            body.iter().for_each(|b| sub.add(*b));
            sub
        };
        assert_eq!(sub(WINDOW, &[0, 132, 1, 0]).window(), Some((132, 256)));
        assert_eq!([sub(WINDOW, &[0, 80, 0]).window(), sub(TERMINAL_TYPE, &[0, 80, 0, 24]).window()], [None, None]);
        assert_eq!(sub(TERMINAL_TYPE, b"\0XTERM").terminal_type().as_deref(), Some("XTERM"));
        for no in [&b"\0"[..], b"\x01", b"", b"\0a\x1b[", &[b'x'; 1000], &[&b"\0"[..], &[b'x'; 41]].concat()] {
            assert_eq!(sub(TERMINAL_TYPE, no).terminal_type(), None, "{no:?}");
        }
        assert_eq!(sub(9, &[b'x'; 1000]).body.len(), SUB_MAX);
    }

    #[test]
    fn users_are_escaped() {
        let mut out = Vec::new();
        write_user("a\u{1}", &mut out);
        assert_eq!(out, b"\xff\xfa\x27\0\0USER\x01a\x02\x01\xff\xf0");
    }

    /// Each side asks at any time; once all is answered, both know the same.
    #[test]
    fn two_sides_agree_in_every_order() {
        fn explore(ours: Agreed, theirs: Agreed, to_them: &[bool], to_us: &[bool], asks: u32) {
            assert!(to_them.len() + to_us.len() < 12, "they go on for ever");
            if to_them.is_empty() && to_us.is_empty() {
                assert!(ours.is_settled() && theirs.is_settled(), "{ours:?} {theirs:?}");
                assert_eq!(ours, theirs);
            }
            let sent = |queue: &[bool], more: Option<bool>| [queue, more.as_slice()].concat();
            if let Some((on, rest)) = to_them.split_first() {
                let mut theirs = theirs;
                let more = theirs.told(*on, true);
                explore(ours, theirs, rest, &sent(to_us, more), asks);
            }
            if let Some((on, rest)) = to_us.split_first() {
                let mut ours = ours;
                let more = ours.told(*on, true);
                explore(ours, theirs, &sent(to_them, more), rest, asks);
            }
            for on in [true, false].into_iter().filter(|_| asks > 0) {
                let mut asked = ours;
                let more = asked.ask(on);
                explore(asked, theirs, &sent(to_them, more), to_us, asks - 1);
                let mut asked = theirs;
                let more = asked.ask(on);
                explore(ours, asked, to_them, &sent(to_us, more), asks - 1);
            }
        }
        explore(Agreed::No, Agreed::No, &[], &[], 4);
    }
}
