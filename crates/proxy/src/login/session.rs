//! What a client and the gateway say to each other before the client is connected, as one value without I/O.
//!
//! `start -> name -> password -> (check) -> host -> (connect)`: [`Session::feed`] takes what the client sends, and says what to
//! answer and, at the end of a stage, what to do. The caller checks the password, finds the target, and tells the session:
//! [`Session::welcome`], [`Session::again`], [`Session::ask_host`].
//!
//! # Telnet
//! The gateway asks what it may have to tell the server (terminal type, window size, with a user variable the environment), and
//! says `WILL ECHO` while a password is typed, so that the client shows nothing. All else that a client offers or asks for is
//! refused: what the server wants of it, the server negotiates with the client itself ([`Handover`](super::handover::Handover)).
//! A client that never sends a command is taken for one that does not speak telnet.

use super::{
    editor::{Edit, Editor},
    telnet::{
        AYT, Agreed, BRK, EC, ECHO, EL, ENVIRONMENT, IAC, IP, Item, Parser, SEND, Sub, TERMINAL_TYPE, Verb, WINDOW,
        write_do, write_sub, write_will,
    },
};
use crate::users::cleared::Cleared;

/// Maximum number of bytes from a client before it is connected. Whoever logs in with three tries and all telnet options takes a
/// tenth of it.
pub const INPUT_MAX: usize = 16 * 1024;
/// Number of tries to log in.
pub const TRIES: u8 = 3;
/// Number of times that a host is asked for.
pub const HOSTS: u8 = 10;

/// What the gateway has negotiated with a client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether the gateway echoes: nothing, while a password is typed.
    pub echo: Agreed,
    /// What the client does for the gateway, in the order of [`ASKED`].
    pub client: [Agreed; 3],
    /// The client's window in columns and rows.
    pub window: Option<(u16, u16)>,
    /// The type of the client's terminal.
    pub terminal_type: Option<String>,
}

/// The options that the gateway may want of a client.
pub const ASKED: [u8; 3] = [TERMINAL_TYPE, WINDOW, ENVIRONMENT];

/// What the caller has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Check this user.
    Check {
        /// The name.
        name: Vec<u8>,
        /// The password.
        password: Cleared,
    },
    /// Find the target.
    Host(Vec<u8>),
    /// Close the connection.
    HangUp(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waits for the caller.
    Idle,
    Name,
    Password,
    Host,
}

/// What the gateway does with its clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Manner {
    /// Clients may speak telnet.
    pub telnet: bool,
    /// Clients have to log in.
    pub users: bool,
    /// Servers are told the user, in the client's environment.
    pub environment: bool,
}

/// The whole state of a client that is not connected yet.
#[derive(Debug)]
pub struct Session {
    manner: Manner,
    stage: Stage,
    parser: Parser,
    editor: Editor,
    /// A byte of data after the line that was the last event.
    held: Option<u8>,
    sub: Option<Sub>,
    options: Options,
    /// The client has sent a command.
    speaks_telnet: bool,
    name: Vec<u8>,
    tries: u8,
    hosts: u8,
    taken: usize,
}

impl Session {
    /// Begins with the banner and the first question.
    pub fn start(manner: Manner, banner: Option<&str>, out: &mut Vec<u8>) -> Session {
        let mut session = Session {
            manner,
            stage: Stage::Idle,
            parser: Parser::default(),
            editor: Editor::default(),
            held: None,
            sub: None,
            options: Options::default(),
            speaks_telnet: false,
            name: Vec::new(),
            tries: 0,
            hosts: 0,
            taken: 0,
        };
        if manner.telnet {
            for (option, agreed) in ASKED.into_iter().zip(&mut session.options.client) {
                if option != ENVIRONMENT || manner.environment {
                    write_do(option, agreed.ask(true), out);
                }
            }
        }
        if let Some(banner) = banner {
            session.say(banner, out);
        }
        if manner.users {
            session.ask_name(out)
        } else {
            session.ask_host(out)
        }
        session
    }

    /// Takes what the client sends, up to the next event. Returns how many bytes that were.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Option<Event>) {
        if let Some(byte) = self.held.take()
            && let Some(event) = self.typed(byte, out)
        {
            return (0, Some(event));
        }
        for (n, byte) in input.iter().enumerate() {
            if self.taken == INPUT_MAX {
                return (n, Some(Event::HangUp("more than anybody sends to log in")));
            }
            self.taken += 1;
            let items = if self.manner.telnet { self.parser.feed(*byte) } else { [Some(Item::Data(*byte)), None] };
            for item in items.into_iter().flatten() {
                // What yields an event is the last item of its byte.
                if let Some(event) = self.take(item, out) {
                    return (n + 1, Some(event));
                }
            }
        }
        (input.len(), None)
    }

    fn take(&mut self, item: Item, out: &mut Vec<u8>) -> Option<Event> {
        self.speaks_telnet |= !matches!(item, Item::Data(_));
        match item {
            Item::Data(byte) => return self.typed(byte, out),
            Item::Command(IP | BRK) => return Some(Event::HangUp("interrupted")),
            Item::Command(EC) => self.editor.erase(),
            Item::Command(EL) => self.editor.kill(),
            Item::Command(AYT) => self.say("\n[yes]\n", out),
            // Of the others, none means anything here. A Synch ends with the data mark; what it would discard is kept.
            Item::Command(_) => {}
            Item::Negotiate(verb, option) => self.negotiate(verb, option, out),
            Item::Begin(option) => self.sub = Some(Sub::of(option)),
            Item::Part(byte) => self.sub.iter_mut().for_each(|sub| sub.add(byte)),
            Item::End => {
                if let Some(sub) = self.sub.take() {
                    self.options.learn(&sub);
                }
            }
            Item::Cut => self.sub = None,
        }
        None
    }

    fn negotiate(&mut self, verb: Verb, option: u8, out: &mut Vec<u8>) {
        match verb {
            Verb::Do | Verb::Dont => {
                let on = verb == Verb::Do;
                let answer = if option == ECHO { self.options.echo.told(on, false) } else { on.then_some(false) };
                write_will(option, answer, out);
            }
            Verb::Will | Verb::Wont => {
                let on = verb == Verb::Will;
                let Some(n) = self.asked(option) else { return write_do(option, on.then_some(false), out) };
                let agreed = &mut self.options.client[n];
                write_do(option, agreed.told(on, true), out);
                if option == TERMINAL_TYPE && *agreed == Agreed::Yes && on && self.options.terminal_type.is_none() {
                    write_sub(TERMINAL_TYPE, &[SEND], out);
                }
            }
        }
    }

    fn asked(&self, option: u8) -> Option<usize> {
        ASKED.iter().position(|asked| *asked == option && (option != ENVIRONMENT || self.manner.environment))
    }

    fn typed(&mut self, byte: u8, out: &mut Vec<u8>) -> Option<Event> {
        match self.editor.feed(byte) {
            Edit::Open => None,
            Edit::TooLong => Some(Event::HangUp("a line of more than 256 bytes")),
            Edit::Break => Some(Event::HangUp("interrupted")),
            Edit::Line(line) => self.line(line, out),
            Edit::LineBefore(line) => match self.line(line, out) {
                Some(event) => {
                    self.held = Some(byte);
                    Some(event)
                }
                None => self.typed(byte, out),
            },
        }
    }

    fn line(&mut self, line: Cleared, out: &mut Vec<u8>) -> Option<Event> {
        match self.stage {
            // The caller feeds nothing while it checks or connects.
            Stage::Idle => None,
            Stage::Name if line.is_empty() => {
                self.tries += 1;
                if self.tries >= TRIES {
                    return Some(Event::HangUp("no name"));
                }
                self.ask_name(out);
                None
            }
            Stage::Name => {
                self.name = line.to_vec();
                self.stage = Stage::Password;
                if self.manner.telnet {
                    write_will(ECHO, self.options.echo.ask(true), out);
                }
                self.say("password: ", out);
                None
            }
            Stage::Password => {
                self.stage = Stage::Idle;
                if self.manner.telnet {
                    write_will(ECHO, self.options.echo.ask(false), out);
                }
                // The client has not shown the end of the line either.
                if self.speaks_telnet {
                    self.say("\n", out);
                }
                self.tries += 1;
                Some(Event::Check { name: std::mem::take(&mut self.name), password: line })
            }
            Stage::Host => {
                self.stage = Stage::Idle;
                self.hosts += 1;
                Some(Event::Host(line.to_vec()))
            }
        }
    }

    fn ask_name(&mut self, out: &mut Vec<u8>) {
        self.stage = Stage::Name;
        self.say("login: ", out);
    }

    /// The user was wrong. Returns whether there is another try; if so, asks again.
    pub fn again(&mut self, out: &mut Vec<u8>) -> bool {
        self.say("Login incorrect\n", out);
        let more = self.tries < TRIES;
        if more {
            self.ask_name(out);
        }
        more
    }

    /// Asks for the host.
    pub fn ask_host(&mut self, out: &mut Vec<u8>) {
        self.stage = Stage::Host;
        self.say("host: ", out);
    }

    /// Whether a host may be asked for once more.
    pub fn may_ask_host(&self) -> bool {
        self.hosts < HOSTS
    }

    /// Writes a text. What is no text is left out: control characters, and what a telnet client takes for a command.
    pub fn say(&self, text: &str, out: &mut Vec<u8>) {
        for c in text.chars() {
            match c {
                '\n' => out.extend(b"\r\n"),
                c if c.is_control() => out.push(b'?'),
                c => out.extend(c.encode_utf8(&mut [0; 4]).bytes()),
            }
        }
    }

    /// Whether the client has sent a telnet command.
    pub fn speaks_telnet(&self) -> bool {
        self.speaks_telnet
    }

    /// Returns the byte that was sent after the last line and is not used, if there is one. It comes before what was not fed.
    pub fn held(&self) -> Option<u8> {
        self.held
    }

    /// Ends the session: what has to be settled before the client is connected.
    pub fn into_parts(self) -> (Parser, Options, Option<Sub>) {
        (self.parser, self.options, self.sub)
    }
}

impl Options {
    /// Keeps what a subnegotiation says.
    pub fn learn(&mut self, sub: &Sub) {
        if let Some(window) = sub.window() {
            self.window = Some(window);
        }
        if self.terminal_type.is_none() {
            self.terminal_type = sub.terminal_type();
        }
    }
}

const _: () = assert!(IAC > 0xf7, "no byte of UTF-8, so texts need no escape");

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
