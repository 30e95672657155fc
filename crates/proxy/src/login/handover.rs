//! From the gateway to the server, before a telnet client's connection is spliced, as one value without I/O.
//!
//! A server believes that it negotiates with a client that has agreed on nothing. So what the client has agreed on with the
//! gateway is undone: `DONT` and `WONT`, and the client's answers do not reach the server. To a server that speaks telnet, the
//! options of the terminal are told instead: the gateway offers them as the client would, answers with what it knows, and leaves
//! them on at the client if the server wants them. At the end, both ends know the same of each option.
//!
//! All else passes, in both directions and in order. The handover has a time limit, and it is over for a server that begins to
//! talk. That is safe in every state: the client has on what was offered, so whatever a late answer says, the client does
//! what the server expects of it, or refuses (RFC 854).

use super::{
    session::{ASKED, Options},
    telnet::{
        Agreed, ECHO, ENVIRONMENT, Item, Parser, SEND, Sub, TERMINAL_TYPE, Verb, WINDOW, write, write_do, write_sub,
        write_user, write_will,
    },
};

/// The state of both connections until they are spliced.
#[derive(Debug)]
pub struct Handover {
    options: Options,
    client: Parser,
    server: Parser,
    /// What the gateway has offered to the server, in the order of [`ASKED`].
    offered: [Agreed; 3],
    /// What the server has asked for and was answered by the gateway: the terminal's type, and the environment.
    answered: [bool; 3],
    /// Subnegotiations that are for the gateway.
    of_client: Option<Sub>,
    of_server: Option<Sub>,
    user: Option<String>,
    /// The server has sent data.
    server_talks: bool,
}

impl Handover {
    /// Begins. `tells`: whether the server speaks telnet. `user`: the user that it is told in that case.
    pub fn new(
        (client, options, of_client): (Parser, Options, Option<Sub>),
        (tells, user): (bool, Option<String>),
        to_client: &mut Vec<u8>,
        to_server: &mut Vec<u8>,
    ) -> Handover {
        let user = user.filter(|_| tells);
        let mut handover = Handover {
            options,
            client,
            server: Parser::default(),
            offered: [Agreed::No; 3],
            answered: [false; 3],
            of_client,
            of_server: None,
            user,
            server_talks: false,
        };
        write_will(ECHO, handover.options.echo.ask(false), to_client);
        for (n, option) in ASKED.into_iter().enumerate() {
            let known = match option {
                TERMINAL_TYPE => handover.options.terminal_type.is_some(),
                WINDOW => handover.options.window.is_some(),
                _ => handover.user.is_some(),
            };
            let has = handover.options.client[n] == Agreed::Yes;
            // The user is told even if the client has no environment.
            if tells && known && (has || option == ENVIRONMENT) {
                write_will(option, handover.offered[n].ask(true), to_server);
            } else {
                write_do(option, handover.options.client[n].ask(false), to_client);
            }
        }
        handover
    }

    /// Whether both ends agree, so that the connection can be spliced.
    pub fn is_settled(&self) -> bool {
        let client = self.options.echo.is_settled()
            && self.options.client.iter().all(|agreed| agreed.is_settled())
            && self.of_client.is_none();
        client && self.of_server.is_none() && (self.server_talks || self.is_told())
    }

    /// Whether a message that is for the gateway is only half there.
    pub fn is_within(&self) -> bool {
        self.of_client.is_some() || self.of_server.is_some()
    }

    /// Whether the server has answered all that was offered, and asked for what it wants.
    fn is_told(&self) -> bool {
        let asked = |n: usize| self.answered[n] || ASKED[n] == WINDOW;
        (0..ASKED.len()).all(|n| match self.offered[n] {
            Agreed::No => true,
            Agreed::Yes => asked(n),
            Agreed::WantYes { .. } | Agreed::WantNo { .. } => false,
        })
    }

    /// Returns what belongs to no item yet, and has to be sent on: to the server, and to the client.
    pub fn pending(&self) -> (&'static [u8], &'static [u8]) {
        let of = |parser: &Parser, own: &Option<Sub>| if own.is_none() { parser.pending() } else { &[] };
        (of(&self.client, &self.of_client), of(&self.server, &self.of_server))
    }

    /// Takes what the client sends.
    pub fn from_client(&mut self, input: &[u8], to_server: &mut Vec<u8>, to_client: &mut Vec<u8>) {
        for byte in input {
            for item in self.client.feed(*byte).into_iter().flatten() {
                if !self.is_for_us(item, to_server, to_client) {
                    write(item, to_server);
                }
            }
        }
    }

    fn is_for_us(&mut self, item: Item, to_server: &mut Vec<u8>, to_client: &mut Vec<u8>) -> bool {
        match item {
            Item::Negotiate(verb @ (Verb::Do | Verb::Dont), ECHO) if !self.options.echo.is_settled() => {
                write_will(ECHO, self.options.echo.told(verb == Verb::Do, false), to_client);
                true
            }
            Item::Negotiate(verb @ (Verb::Will | Verb::Wont), option) => {
                let Some(n) = asked(option) else { return false };
                let agreed = &mut self.options.client[n];
                if *agreed == Agreed::No {
                    return false;
                }
                write_do(option, agreed.told(verb == Verb::Will, false), to_client);
                if *agreed == Agreed::No {
                    write_will(option, self.offered[n].ask(false), to_server);
                }
                true
            }
            Item::Begin(option) => {
                let ours = asked(option).is_some_and(|n| self.options.client[n] != Agreed::No);
                self.of_client = ours.then(|| Sub::of(option));
                ours
            }
            Item::Part(byte) => self.of_client.as_mut().map(|sub| sub.add(byte)).is_some(),
            Item::End => self.of_client.take().map(|sub| self.learn(&sub, to_server)).is_some(),
            Item::Cut => self.of_client.take().is_some(),
            _ => false,
        }
    }

    /// Keeps what the client says, and tells the server the new size of a window.
    fn learn(&mut self, sub: &Sub, to_server: &mut Vec<u8>) {
        self.options.learn(sub);
        if asked(sub.option).is_some_and(|n| sub.option == WINDOW && self.offered[n] == Agreed::Yes) {
            self.tell_window(to_server);
        }
    }

    fn tell_window(&self, to_server: &mut Vec<u8>) {
        if let Some((columns, rows)) = self.options.window {
            write_sub(WINDOW, &[columns.to_be_bytes(), rows.to_be_bytes()].concat(), to_server);
        }
    }

    /// Takes what the server sends.
    pub fn from_server(&mut self, input: &[u8], to_client: &mut Vec<u8>, to_server: &mut Vec<u8>) {
        for byte in input {
            for item in self.server.feed(*byte).into_iter().flatten() {
                if !self.is_answer(item, to_client, to_server) {
                    self.server_talks |= matches!(item, Item::Data(_));
                    write(item, to_client);
                }
            }
        }
    }

    fn is_answer(&mut self, item: Item, to_client: &mut Vec<u8>, to_server: &mut Vec<u8>) -> bool {
        match item {
            Item::Negotiate(verb @ (Verb::Do | Verb::Dont), option) => {
                let Some(n) = asked(option).filter(|n| self.offered[*n] != Agreed::No) else { return false };
                let agreed = &mut self.offered[n];
                write_will(option, agreed.told(verb == Verb::Do, false), to_server);
                match *agreed {
                    Agreed::Yes if option == WINDOW => self.tell_window(to_server),
                    // The server does not want it.
                    Agreed::No => write_do(option, self.options.client[n].ask(false), to_client),
                    _ => {}
                }
                true
            }
            Item::Begin(option) => {
                let is_asked = |n: usize| self.offered[n] == Agreed::Yes && option != WINDOW;
                let ours = asked(option).is_some_and(is_asked);
                self.of_server = ours.then(|| Sub::of(option));
                ours
            }
            Item::Part(byte) => self.of_server.as_mut().map(|sub| sub.add(byte)).is_some(),
            Item::End => self.of_server.take().map(|sub| self.answer(&sub, to_server)).is_some(),
            Item::Cut => self.of_server.take().is_some(),
            _ => false,
        }
    }

    /// Answers a question of the server.
    fn answer(&mut self, sub: &Sub, to_server: &mut Vec<u8>) {
        let Some(n) = asked(sub.option).filter(|_| sub.body.first() == Some(&SEND)) else { return };
        self.answered[n] = true;
        match (sub.option, &self.options.terminal_type, &self.user) {
            (TERMINAL_TYPE, Some(name), _) => {
                write_sub(TERMINAL_TYPE, &[&[super::telnet::IS], name.as_bytes()].concat(), to_server);
            }
            (ENVIRONMENT, _, Some(user)) => {
                write_user(user, to_server);
                // The server has got it. A client without an environment must not seem to have one.
                if self.options.client[n] != Agreed::Yes {
                    write_will(ENVIRONMENT, self.offered[n].ask(false), to_server);
                }
            }
            _ => {}
        }
    }
}

fn asked(option: u8) -> Option<usize> {
    ASKED.iter().position(|asked| *asked == option)
}

#[cfg(test)]
#[path = "handover_tests.rs"]
mod tests;
