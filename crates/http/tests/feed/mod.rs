//! Feeds a message in pieces, and formats the parsed result as one line.

use longsplice_http::{Body, Form, Framing, Kind, Request, Response, Scan, Wrong};

/// The sender of a message.
#[derive(Debug, Clone, Copy)]
pub enum From<'a> {
    Client,
    /// A server that answers a request with this method.
    Server(&'a str),
    /// The same, parsed leniently.
    Careless(&'a str),
}

struct Feeder<'a> {
    from: From<'a>,
    buffer: Vec<u8>,
    scan: Scan,
    /// The parsed head, and the body after it.
    head: Option<(String, Body)>,
    content: Vec<u8>,
    /// Chunk framing and content, as they are to be forwarded.
    written: Vec<u8>,
}

impl Feeder<'_> {
    fn piece(&mut self, piece: &[u8]) -> Result<(), String> {
        self.buffer.extend(piece);
        if self.head.is_none() {
            let said = |w: Wrong| format!("{} {w:?}", w.status());
            let Some(end) = self.scan.feed(&self.buffer).map_err(said)? else { return Ok(()) };
            let head: Vec<u8> = self.buffer.drain(..end).collect();
            self.head = Some(match self.from {
                From::Client => {
                    let r = Request::parse(&head).map_err(said)?;
                    (request(&r), Body::new(r.framing))
                }
                From::Server(method) => {
                    let r = Response::parse(&head, method).map_err(said)?;
                    (format!("{} {} {}", r.status, framing(r.framing), keep(r.keep_alive)), Body::new(r.framing))
                }
                From::Careless(method) => {
                    let r = Response::lenient(&head, method).map_err(said)?;
                    let fields: Vec<String> =
                        r.end_to_end().map(|(n, v)| format!(" {n}={}", v.escape_ascii())).collect();
                    let said = format!("{} {} {}{}", r.status, framing(r.framing), keep(r.keep_alive), fields.concat());
                    (said, Body::lenient(r.framing))
                }
            });
        }
        let Some((said, body)) = &mut self.head else { return Ok(()) };
        while !self.buffer.is_empty() && !body.is_done() {
            let step = body.step(&self.buffer).map_err(|w| format!("{said}, {w:?}"))?;
            assert!(!step.is_empty() && step.len() <= self.buffer.len(), "{step:?}");
            let bytes: Vec<u8> = self.buffer.drain(..step.len()).collect();
            self.written.extend(body.mended().unwrap_or_else(|| bytes.clone()));
            if matches!(step, longsplice_http::Step::Content(_)) {
                self.content.extend(bytes);
            }
        }
        Ok(())
    }

    fn end(mut self) -> String {
        let Some((said, mut body)) = self.head.take() else { return "more".into() };
        let end = body.end_of_stream();
        let content = String::from_utf8_lossy(&self.content).into_owned();
        let written = match self.from {
            From::Careless(_) if self.written != self.content => format!(" as {}", self.written.escape_ascii()),
            _ => String::new(),
        };
        let content = if content.is_empty() { String::new() } else { format!(" {content:?}") };
        match end {
            Ok(()) if self.buffer.is_empty() => format!("{said}{content}{written}"),
            Ok(()) => format!("{said}{content}{written}, {} more", self.buffer.len()),
            Err(w) => format!("{said}{content}, {w:?}"),
        }
    }
}

fn keep(keep_alive: bool) -> &'static str {
    if keep_alive { "keep" } else { "close" }
}

fn framing(f: Framing) -> String {
    match f {
        Framing::None => "none".into(),
        Framing::Exact(n) => n.to_string(),
        Framing::Chunked => "chunked".into(),
        Framing::UntilClose => "until-close".into(),
    }
}

fn request(r: &Request) -> String {
    let form = match &r.form {
        Form::Origin(path) => path.clone(),
        Form::Absolute(a, path) => format!("{a} {path}"),
        Form::Authority(a) => a.to_string(),
        Form::Asterisk => "*".into(),
    };
    format!("{} {form} {} {}", r.method, framing(r.framing), keep(r.keep_alive))
}

/// Parses a message that arrives in these pieces, followed by the end of the connection, and formats the result.
pub fn answer<'p>(from: From<'_>, pieces: impl IntoIterator<Item = &'p [u8]>) -> String {
    let scan = match from {
        From::Client => Scan::new(Kind::Request),
        From::Server(_) => Scan::new(Kind::Response),
        From::Careless(_) => Scan::lenient(Kind::Response),
    };
    let mut feeder = Feeder { from, buffer: Vec::new(), scan, head: None, content: Vec::new(), written: Vec::new() };
    for piece in pieces {
        if let Err(wrong) = feeder.piece(piece) {
            return wrong;
        }
    }
    feeder.end()
}

/// Checks that the result is the same however the message is cut:
/// whole, in two at every byte, in single bytes, and at random.
#[track_caller]
pub fn answer_however_cut(from: From<'_>, message: &[u8]) -> String {
    use rand::{RngExt, SeedableRng, rngs::StdRng};
    let whole = answer(from, [message]);
    let same = |cut: &str, other: String| {
        assert_eq!(other, whole, "{cut}: {}", String::from_utf8_lossy(message));
    };
    same("bytes", answer(from, message.chunks(1)));
    for at in 0..=message.len().min(600) {
        let (a, b) = message.split_at(at);
        same("two", answer(from, [a, b]));
    }
    let mut rng = StdRng::seed_from_u64(message.len() as u64);
    for _ in 0..8 {
        let most = rng.random_range(1..=20);
        let mut left = message;
        let mut pieces = Vec::new();
        while !left.is_empty() {
            let (piece, rest) = left.split_at(rng.random_range(1..=most.min(left.len())));
            pieces.push(piece);
            left = rest;
        }
        same("random", answer(from, pieces));
    }
    whole
}

/// Feeds each message of a table, and reports every result that is not the required one.
#[track_caller]
pub fn table(from: From<'_>, rows: impl IntoIterator<Item = (Vec<u8>, String)>) {
    let mut wrong = Vec::new();
    for (message, required) in rows {
        let found = answer_however_cut(from, &message);
        if found != required {
            wrong.push(format!("{}\n    required {required}\n    found    {found}", message.escape_ascii()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
