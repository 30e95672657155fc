//! Lines of a control connection (RFC 959, 4 and 5.3): commands of clients, and the lines of a server's replies.
//!
//! Both are Telnet strings: 255 (IAC) introduces a command of Telnet, and is doubled where the byte itself is meant (RFC 854).
//! Options that a client asks for or offers are refused (RFC 1123, 4.1.2.12). What is passed on is written anew, so that both
//! ends and we see the same line.

/// Maximum length of a line in bytes, with its end: room for two of the longest paths of Linux.
pub const LINE_MAX: usize = 8192;
/// Maximum number of offers of Telnet options that one line may have; there are not many options.
const OFFERS_MAX: usize = 16;

/// Bytes of Telnet (RFC 854).
const IAC: u8 = 255;
const DONT: u8 = 254;
const DO: u8 = 253;
const WONT: u8 = 252;
const WILL: u8 = 251;
const SB: u8 = 250;
const IP: u8 = 244;
const DM: u8 = 242;
const SE: u8 = 240;

/// What interrupts a server that is busy with a transfer (RFC 959, 4.1.3): "interrupt process", and a data mark, whose last byte
/// is urgent (RFC 854, "Synch").
pub const SYNCH: [u8; 4] = [IAC, IP, IAC, DM];
/// The data mark alone.
pub const MARK: [u8; 2] = [IAC, DM];

/// A command of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// The verb, in capital letters. Empty: it is none.
    pub verb: String,
    /// What follows the space behind it.
    pub argument: Vec<u8>,
    /// The signs of an interrupt stand before or in the line.
    pub synch: bool,
    /// Answers to Telnet options that were offered.
    pub answers: Vec<u8>,
}

/// A line of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyLine {
    /// The code of the reply that it belongs to.
    pub code: u16,
    /// The last line of its reply.
    pub is_last: bool,
    /// The line, without its end.
    pub text: Vec<u8>,
    /// A data mark stands before or in the line.
    pub synch: bool,
}

/// Why bytes are no line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Longer than [`LINE_MAX`].
    #[error("a line of more than {LINE_MAX} bytes")]
    TooLong,
    /// A carriage return that does not end the line, or a zero byte: other programs might see two lines in it.
    #[error("a bare CR or NUL in a line")]
    Bare,
    /// More offers of options than there are.
    #[error("too many Telnet options")]
    Options,
    /// A reply does not begin with a code.
    #[error("a reply without a code")]
    NoCode,
}

/// A line without its end and without Telnet.
#[derive(Debug, Default)]
struct Line {
    text: Vec<u8>,
    synch: bool,
    answers: Vec<u8>,
}

/// Finds the first line. `strict`: a bare CR or NUL is an error; otherwise it is a part of the line, or left out.
fn line(input: &[u8], strict: bool) -> Result<Option<(Line, usize)>, LineError> {
    let mut line = Line::default();
    let mut at = 0;
    let mut cr = false;
    while let Some(&byte) = input.get(at) {
        if at >= LINE_MAX {
            return Err(LineError::TooLong);
        }
        let mut used = 1;
        let mut plain = None;
        match (byte, input.get(at + 1)) {
            (IAC, None) => return unfinished(input),
            (IAC, Some(&IAC)) => (used, plain) = (2, Some(IAC)),
            (IAC, Some(&verb @ (WILL | WONT | DO | DONT))) => {
                let Some(option) = input.get(at + 2) else { return unfinished(input) };
                if line.answers.len() >= 3 * OFFERS_MAX {
                    return Err(LineError::Options);
                }
                match verb {
                    WILL => line.answers.extend([IAC, DONT, *option]),
                    DO => line.answers.extend([IAC, WONT, *option]),
                    _ => {}
                }
                used = 3;
            }
            (IAC, Some(&SB)) => {
                let Some(end) = input[at..].windows(2).position(|pair| pair == [IAC, SE]) else {
                    return unfinished(input);
                };
                used = end + 2;
            }
            (IAC, Some(&verb)) => {
                line.synch |= [IP, DM].contains(&verb);
                used = 2;
            }
            (b'\n', _) => return Ok(Some((line, at + 1))),
            (other, _) => plain = Some(other),
        }
        if let Some(byte) = plain {
            if strict && (cr || byte == 0) {
                return Err(LineError::Bare);
            }
            if cr {
                line.text.push(b'\r');
            }
            cr = byte == b'\r';
            if !cr && byte != 0 {
                line.text.push(byte);
            }
        }
        at += used;
    }
    unfinished(input)
}

fn unfinished<T>(input: &[u8]) -> Result<Option<T>, LineError> {
    if input.len() >= LINE_MAX { Err(LineError::TooLong) } else { Ok(None) }
}

/// Parses a command. Returns it with the number of bytes that it takes, or nothing if it is not complete.
pub fn parse_command(input: &[u8]) -> Result<Option<(Command, usize)>, LineError> {
    let Some((Line { text, synch, answers }, used)) = line(input, true)? else { return Ok(None) };
    let verb = text.split(|b| *b == b' ').next().unwrap_or_default();
    let argument = text.get(verb.len() + 1..).unwrap_or_default().to_vec();
    let is_verb = (1..=16).contains(&verb.len()) && verb.iter().all(u8::is_ascii_alphanumeric);
    let verb = if is_verb { String::from_utf8_lossy(verb).to_ascii_uppercase() } else { String::new() };
    Ok(Some((Command { verb, argument, synch, answers }, used)))
}

/// Parses a line of a reply. `within`: the code of the reply whose first line has come before.
pub fn parse_reply_line(input: &[u8], within: Option<u16>) -> Result<Option<(ReplyLine, usize)>, LineError> {
    let Some((Line { text, synch, .. }, used)) = line(input, false)? else { return Ok(None) };
    let code = match &text[..] {
        [a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9'] => Some(([*a, *b, *c], b' ')),
        [a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9', mark @ (b' ' | b'-'), ..] => Some(([*a, *b, *c], *mark)),
        _ => None,
    };
    let code = code.map(|(digits, mark)| (digits.iter().fold(0, |n, d| n * 10 + u16::from(d - b'0')), mark));
    let (code, is_last) = match (within, code) {
        (None, None) => return Err(LineError::NoCode),
        (None, Some((code, mark))) => (code, mark == b' '),
        (Some(within), code) => (within, code == Some((within, b' '))),
    };
    Ok(Some((ReplyLine { code, is_last, text, synch }, used)))
}

/// Writes a line: IAC is doubled, and CRLF ends it.
pub fn encode_line(text: &[u8]) -> Vec<u8> {
    let mut line = Vec::with_capacity(text.len() + 2);
    for byte in text {
        line.push(*byte);
        if *byte == IAC {
            line.push(IAC);
        }
    }
    line.extend(b"\r\n");
    line
}

impl Command {
    /// Returns a command of ours.
    pub fn new(verb: &str, argument: impl Into<Vec<u8>>) -> Command {
        Command { verb: verb.into(), argument: argument.into(), synch: false, answers: Vec::new() }
    }

    /// Writes it, without [`SYNCH`].
    pub fn encode(&self) -> Vec<u8> {
        let mut text = self.verb.clone().into_bytes();
        if !self.argument.is_empty() {
            text.push(b' ');
            text.extend(&self.argument);
        }
        encode_line(&text)
    }
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
