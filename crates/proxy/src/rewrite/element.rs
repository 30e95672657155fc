//! Removes elements of HTML from a stream, by their names.
//!
//! `<script` followed by white space, `/` or `>` begins an element wherever it stands: in text, in an attribute, in a comment, in
//! another element's text. Which of these is markup depends on all that was before it and on the parser (in SVG, the text of
//! `<style>` is markup), so a filter that decides can be led astray. An element ends with its end tag, or with the body: one
//! whose end is missing is removed to the end. Attributes are read as the HTML standard says (13.2.5.32 to 13.2.5.40).
//!
//! What is before and behind a removed element must not become a new one, as in `<scr<script></script>ipt>`. Where it could, `_`
//! stands between them.

use std::{str::FromStr, sync::Arc};

/// Longest name of an element in bytes.
const NAME_MAX: usize = 64;
/// Elements without an end tag.
const VOID: [&str; 19] = [
    "area", "base", "basefont", "bgsound", "br", "col", "embed", "frame", "hr", "image", "img", "input", "keygen",
    "link", "meta", "param", "source", "track", "wbr",
];
/// Elements whose content is text, which ends at the first end tag.
const TEXT: [&str; 9] = ["iframe", "noembed", "noframes", "noscript", "script", "style", "textarea", "title", "xmp"];

/// The name of an element, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element(String);

/// Removes elements from one stream.
#[derive(Debug)]
pub struct Remover {
    elements: Arc<[Element]>,
    /// All that are removed, here or by others.
    unwanted: Arc<[Element]>,
    /// Tags may close themselves.
    is_xml: bool,
    state: State,
    /// What may be the beginning of a tag: `<`, or `</`, and a part of its name.
    held: Vec<u8>,
    /// The last bytes that were passed on.
    last: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Text,
    /// In a start tag of an element, at this depth; 1 is the outermost.
    Start(usize, u32, Attribute),
    Content(usize, u32),
    End(usize, u32, Attribute),
}

/// Where a tag is, behind its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attribute {
    /// Before a name; behind `/` if so.
    Before(bool),
    Name,
    AfterName,
    BeforeValue,
    Quoted(u8),
    Unquoted,
    /// Behind the tag; it has closed itself if so.
    Over(bool),
}

impl Attribute {
    fn next(self, b: u8) -> Attribute {
        let is_space = is_space(b);
        match (self, b) {
            (Attribute::Quoted(quote), b) if b == quote => Attribute::Before(false),
            (Attribute::Quoted(_), _) => self,
            (Attribute::Before(closes), b'>') => Attribute::Over(closes),
            (_, b'>') => Attribute::Over(false),
            (Attribute::BeforeValue, _) if is_space => self,
            (Attribute::BeforeValue, b'"' | b'\'') => Attribute::Quoted(b),
            (Attribute::BeforeValue, _) => Attribute::Unquoted,
            (Attribute::Unquoted, _) if !is_space => self,
            (Attribute::Unquoted, _) => Attribute::Before(false),
            (_, b'/') => Attribute::Before(true),
            (Attribute::Name | Attribute::AfterName, b'=') => Attribute::BeforeValue,
            (Attribute::Name | Attribute::AfterName, _) if is_space => Attribute::AfterName,
            (Attribute::Before(_), _) if is_space => Attribute::Before(false),
            _ => Attribute::Name,
        }
    }
}

fn is_space(b: u8) -> bool {
    matches!(b, b'\t' | b'\n' | b'\x0c' | b'\r' | b' ')
}

impl Remover {
    /// Starts at the first byte. `unwanted`: elements that must not come into being.
    pub fn new(elements: Arc<[Element]>, unwanted: Arc<[Element]>, is_xml: bool) -> Remover {
        Remover { elements, unwanted, is_xml, state: State::Text, held: Vec::new(), last: Vec::new() }
    }

    /// Whether an element has begun.
    pub fn is_within(&self) -> bool {
        self.state != State::Text
    }

    /// Reads the next bytes.
    pub fn read(&mut self, input: &[u8], out: &mut Vec<u8>) {
        let from = out.len();
        let mut rest = input;
        while let Some((b, behind)) = rest.split_first() {
            if self.state == State::Text && self.held.is_empty() && *b != b'<' {
                let n = rest.iter().position(|b| *b == b'<').unwrap_or(rest.len());
                out.extend_from_slice(&rest[..n]);
                rest = &rest[n..];
                continue;
            }
            self.byte(*b, from, out);
            rest = behind;
        }
        self.remember(&out[from..]);
    }

    /// Reads the rest of an element that has begun, and lets go of what is held back: no other element begins. Returns the number
    /// of bytes of `input` that were read.
    pub fn finish(&mut self, input: &[u8], out: &mut Vec<u8>) -> usize {
        let from = out.len();
        let mut read = 0;
        while self.state != State::Text && read < input.len() {
            self.byte(input[read], from, out);
            read += 1;
        }
        if self.state == State::Text {
            out.append(&mut self.held);
        }
        read
    }

    fn remember(&mut self, passed: &[u8]) {
        self.last.extend_from_slice(&passed[passed.len().saturating_sub(NAME_MAX + 1)..]);
        let spare = self.last.len().saturating_sub(NAME_MAX + 1);
        self.last.drain(..spare);
    }

    /// `from`: where the output of this call begins.
    fn byte(&mut self, b: u8, from: usize, out: &mut Vec<u8>) {
        match self.state {
            State::Text => match self.tag(b, b"<") {
                Some(Some(n)) => self.state = State::Start(n, 1, Attribute::Before(false).next(b)),
                Some(None) => {
                    out.append(&mut self.held);
                    self.hold(b, out);
                }
                None => {}
            },
            State::Content(n, depth) => {
                let begun = self.held.clone();
                let found = match self.tag(b, b"</") {
                    Some(Some(end)) if end == n => Some((State::End as fn(_, _, _) -> _, depth)),
                    Some(_) if !self.elements[n].is_text() => {
                        self.held = begun;
                        match self.tag(b, b"<") {
                            Some(Some(start)) if start == n => Some((State::Start as fn(_, _, _) -> _, depth + 1)),
                            Some(_) => None,
                            None => return,
                        }
                    }
                    Some(_) => None,
                    None => return,
                };
                self.held.clear();
                match found {
                    Some((state, depth)) => self.state = state(n, depth, Attribute::Before(false).next(b)),
                    None if b == b'<' => self.held.push(b),
                    None => {}
                }
            }
            State::Start(n, depth, attribute) => self.state = State::Start(n, depth, attribute.next(b)),
            State::End(n, depth, attribute) => self.state = State::End(n, depth, attribute.next(b)),
        }
        let depth = match self.state {
            State::Start(n, depth, Attribute::Over(closed)) => {
                let is_over = self.elements[n].is_void() || self.is_xml && closed;
                if is_over { depth - 1 } else { depth }
            }
            State::End(_, depth, Attribute::Over(_)) => depth - 1,
            _ => return,
        };
        let (State::Start(n, ..) | State::End(n, ..)) = self.state else { return };
        self.state = if depth > 0 { State::Content(n, depth) } else { State::Text };
        if depth == 0 && self.may_join(&out[from..]) {
            out.push(b'_');
        }
    }

    /// Holds a byte back that may begin a tag, or passes it on.
    fn hold(&mut self, b: u8, out: &mut Vec<u8>) {
        if b == b'<' { self.held.push(b) } else { out.push(b) }
    }

    /// Adds a byte to what is held back. `None`: it may become a tag. Otherwise it is one, of that element, or none.
    fn tag(&mut self, b: u8, open: &[u8]) -> Option<Option<usize>> {
        let held = &self.held[..];
        let is_end = is_space(b) || matches!(b, b'/' | b'>');
        if let Some(name) = held.strip_prefix(open)
            && is_end
            && let Some(n) = self.elements.iter().position(|e| name.eq_ignore_ascii_case(e.0.as_bytes()))
        {
            self.held.clear();
            return Some(Some(n));
        }
        let may_be = |tag: &[u8]| match tag.len() <= open.len() {
            true => open.starts_with(tag),
            false => tag.strip_prefix(open).is_some_and(|name| self.elements.iter().any(|e| e.begins_with(name))),
        };
        let longer = [held, &[b]].concat();
        if may_be(&longer) {
            self.held = longer;
            return None;
        }
        Some(None)
    }

    /// Whether what was passed on may become a tag with what follows.
    fn may_join(&self, passed: &[u8]) -> bool {
        let before = [&self.last, passed].concat();
        let tag = before.iter().rposition(|b| *b == b'<').map(|at| &before[at + 1..]);
        tag.is_some_and(|name| self.unwanted.iter().any(|e| e.begins_with(name)))
    }
}

impl Element {
    fn begins_with(&self, name: &[u8]) -> bool {
        self.0.as_bytes().get(..name.len()).is_some_and(|own| own.eq_ignore_ascii_case(name))
    }

    fn is_void(&self) -> bool {
        VOID.contains(&self.0.as_str())
    }

    fn is_text(&self) -> bool {
        TEXT.contains(&self.0.as_str())
    }
}

impl FromStr for Element {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = |b: u8| b.is_ascii_alphanumeric() || b"-_:".contains(&b);
        let begins = text.bytes().next().is_some_and(|b| b.is_ascii_alphabetic());
        match begins && text.len() <= NAME_MAX && text.bytes().all(good) {
            true => Ok(Element(text.to_ascii_lowercase())),
            false => Err("bad name of an element: write one such as script, of letters, digits, `-`, `_` and `:`"),
        }
    }
}
