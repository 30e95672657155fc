//! Lines as a template has them, for programs that read them by position: `{client} {user} "{uri}"`.
//!
//! Whoever reads such a line splits it at what stands between the fields. So no value may contain that: in a value, quotation
//! marks, backslashes, control characters and all that is not ASCII are written `\xHH`, as nginx does. Between quotation marks,
//! so is the character that follows the field in the template; outside of them, each that follows any field, and spaces.

use super::{
    calendar::{ncsa, unix},
    fields::{FIELDS, Field, Of, Value},
    record::Record,
};
use std::ops::Range;

/// Longest template in bytes. A line repeats it, and lines wait in memory.
const LONGEST: usize = 4096;
/// Most fields of a template: one may have all of them.
const MOST: usize = 64;
const HEX: &[u8; 16] = b"0123456789ABCDEF";
/// Names that differ from a known one by so much are taken for it.
const NEAR: usize = 3;

/// The format that web servers call common.
const COMMON: &str = "{client_ip} - {user} [{time_ncsa}] \"{request}\" {request_status} {bytes_down}";
/// The same with two more fields.
const COMBINED: &str = concat!(
    "{client_ip} - {user} [{time_ncsa}] \"{request}\" {request_status} {bytes_down}",
    " \"{referrer}\" \"{user_agent}\""
);

/// A template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Field {
        /// Index among [`FIELDS`], or behind them among [`DERIVED`].
        index: usize,
        /// It stands between quotation marks.
        quoted: bool,
        /// Characters that it must not have, as they end fields.
        stops: Vec<u8>,
    },
}

/// Why a text is no template, and where in it.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Number of the brace that is wrong, or begins what is wrong, among all braces; none: it is about the whole.
    pub brace: Option<usize>,
    /// What is wrong, and what to write instead.
    pub message: String,
}

/// What only templates have: parts of fields, and fields as others write them.
pub(super) static DERIVED: [Field; 7] = [
    derived("time_ncsa", |r| Some(Value::Plain(ncsa(r.time?).into()))),
    derived("time_unix", |r| Some(Value::Plain(unix(r.time?).into()))),
    derived("client_ip", |r| Some(Value::Plain(r.client.ip().to_canonical().to_string().into()))),
    derived("client_port", |r| Some(Value::Number(r.client.port().into()))),
    derived("server_ip", |r| Some(Value::Plain(r.server?.ip().to_canonical().to_string().into()))),
    derived("request", |r| request(r).map(|text| Value::Text(text.into()))),
    derived("request_status", |r| Some(Value::Number(status(r).into()))),
];

const fn derived(name: &'static str, of: Of) -> Field {
    Field { name, is_always_there: true, of }
}

fn field(index: usize) -> &'static Field {
    FIELDS.get(index).unwrap_or_else(|| &DERIVED[index - FIELDS.len()])
}

fn known() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().chain(&DERIVED).map(|field| field.name)
}

impl Template {
    /// Returns that of the common format.
    pub fn common() -> Template {
        Template::built_in(COMMON)
    }

    /// Returns that of the combined format.
    pub fn combined() -> Template {
        Template::built_in(COMBINED)
    }

    fn built_in(text: &str) -> Template {
        let template = Template::parse(text);
        debug_assert!(template.is_ok(), "{template:?}");
        template.unwrap_or(Template { text: String::new(), parts: Vec::new() })
    }

    /// Reads a template. `{{` and `}}` stand for braces.
    pub fn parse(text: &str) -> Result<Template, Mistake> {
        let whole = |message: String| Err(Mistake { brace: None, message });
        if text.len() > LONGEST {
            return whole(format!("too long: {} bytes, and {LONGEST} are the most", text.len()));
        }
        if text.chars().any(|c| c.is_control() && c != '\t') {
            return whole("a line has no line break and no control character but a tab: remove it".into());
        }
        let (mut parts, mut literal, mut rest, mut brace) = (Vec::new(), String::new(), text, 0);
        while let Some(at) = rest.find(['{', '}']) {
            let wrong = |message: String| Err(Mistake { brace: Some(brace), message });
            let (before, from) = rest.split_at(at);
            literal.push_str(before);
            let first = &from[..1];
            if from[1..].starts_with(first) {
                literal.push_str(first);
                (rest, brace) = (&from[2..], brace + 2);
                continue;
            }
            let Some(name) = from.strip_prefix('{') else {
                return wrong("no field ends here: write }} for a brace".into());
            };
            let Some((name, after)) = name.split_once('}').filter(|(name, _)| !name.contains('{')) else {
                return wrong("this brace is not closed: write {NAME}, or {{ for a brace".into());
            };
            let Some(index) = known().position(|known| known == name) else { return wrong(unknown(name)) };
            if !literal.is_empty() {
                parts.push(Part::Literal(std::mem::take(&mut literal)));
            }
            parts.push(Part::Field { index, quoted: false, stops: Vec::new() });
            (rest, brace) = (after, brace + 2);
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        match parts.iter().filter(|part| matches!(part, Part::Field { .. })).count() {
            0 => whole("all lines would be the same: name a field in braces, such as {client}".into()),
            n if n > MOST => whole(format!("too many fields: {n}, and {MOST} are the most")),
            _ => Ok(Template { text: text.into(), parts: delimited(parts) }),
        }
    }

    /// Returns whether it has a field.
    pub fn has(&self, name: &str) -> bool {
        let is = |part: &Part| matches!(part, Part::Field { index, .. } if field(*index).name == name);
        self.parts.iter().any(is)
    }

    /// Returns the line, without its end.
    pub(super) fn line(&self, record: &Record) -> String {
        let mut t = String::with_capacity(self.text.len() + 256);
        for part in &self.parts {
            match part {
                Part::Literal(text) => t.push_str(text),
                Part::Field { index, quoted, stops } => match (field(*index).of)(record) {
                    Some(Value::Text(text)) if !text.is_empty() => escape(&mut t, &text, (*quoted, stops)),
                    Some(Value::Text(_)) | None => t.push('-'),
                    Some(value) => value.write(&mut t),
                },
            }
        }
        t
    }
}

/// Notes of each field what it must not contain: between quotation marks, what follows it; elsewhere, what follows any field.
fn delimited(mut parts: Vec<Part>) -> Vec<Part> {
    let first = |part: Option<&Part>| match part {
        // what is written in place of a character has letters and digits itself
        Some(Part::Literal(text)) => text.bytes().next().filter(|b| !b.is_ascii_alphanumeric()),
        _ => None,
    };
    let is_field = |part: &Part| matches!(part, Part::Field { .. });
    let after: Vec<_> = (0..parts.len()).map(|at| first(parts.get(at + 1)).filter(|_| is_field(&parts[at]))).collect();
    let mut inside = false;
    for (part, next) in parts.iter_mut().zip(&after) {
        match part {
            Part::Literal(text) => inside ^= text.bytes().filter(|b| *b == b'"').count() % 2 == 1,
            Part::Field { quoted, stops, .. } => {
                *quoted = inside;
                *stops =
                    if inside { next.iter().copied().collect() } else { after.iter().flatten().copied().collect() };
                stops.sort_unstable();
                stops.dedup();
            }
        }
    }
    parts
}

fn escape(t: &mut String, text: &str, (quoted, stops): (bool, &[u8])) {
    for b in text.bytes() {
        let is_plain = (b.is_ascii_graphic() && b != b'"' && b != b'\\') || (b == b' ' && quoted);
        if is_plain && !stops.contains(&b) {
            t.push(char::from(b));
        } else {
            t.push_str("\\x");
            t.extend([b >> 4, b & 15].map(|digit| char::from(HEX[usize::from(digit)])));
        }
    }
}

/// Returns what a client asked for, as a web server that is a proxy writes it. None: it asked for nothing that was understood.
fn request(r: &Record) -> Option<String> {
    let version = r.extra.as_ref().and_then(|extra| extra.version.as_deref()).unwrap_or("HTTP/1.0");
    let target = r.target.as_deref();
    let (method, what) = match (r.listener, r.method.as_deref(), r.uri.as_deref()) {
        ("ftp", Some(verb), uri) => {
            let method = match verb {
                "RETR" | "LIST" | "NLST" | "MLSD" => "GET",
                "STOR" | "STOU" | "APPE" => "PUT",
                _ => verb, // a command that was denied
            };
            let host = target.unwrap_or("-");
            let host = host.strip_suffix(":21").unwrap_or(host);
            let path = uri.unwrap_or_default();
            let start = if path.starts_with('/') { "" } else { "/" };
            (method, format!("ftp://{host}{start}{path}"))
        }
        (_, Some(method), Some(path)) => {
            let site = target.filter(|_| r.extra.as_ref().is_some_and(|extra| extra.is_absolute));
            let site = site.map(|site| format!("http://{}", site.strip_suffix(":80").unwrap_or(site)));
            (method, format!("{}{path}", site.unwrap_or_default()))
        }
        (_, Some(method), None) => (method, target?.to_owned()),
        ("http", None, _) => return None,
        (_, None, _) => ("CONNECT", target?.to_owned()),
    };
    // three words, whatever is in them
    let [method, what] = [method, &what].map(|word| word.replace(' ', "%20"));
    Some(format!("{method} {what} {version}"))
}

/// Returns the status of a reply, or the one that HTTP has for what has become of a connection.
fn status(r: &Record) -> u16 {
    if let Some(status) = r.status {
        return status;
    }
    let is_request = r.listener != "ftp" && r.method.is_some();
    match r.how {
        // a request without a reply
        "client-reset" if is_request => 499, // as nginx
        "server-reset" if is_request => 502,
        "idle" if is_request => 504,
        "denied" | "forbidden" => 403,
        "bad-request" => 400,
        "auth-failed" => 407,
        "no-route" => 404,
        "unreachable" | "bad-reply" => 502,
        "no-server" | "limit" => 503,
        "timeout" => 504,
        // it was told to stop
        _ if is_request || r.server.is_none() => 503,
        _ => 200,
    }
}

/// Returns what to say of a name that no field has.
fn unknown(name: &str) -> String {
    let shown: String = name.chars().take(40).collect();
    let most = NEAR.min(shown.len() / 2);
    let near = known().map(|known| (distance(&shown, known), known)).min().filter(|(far, _)| *far <= most);
    match near {
        Some((_, near)) => format!("no field is called `{shown}`: did you mean {{{near}}}?"),
        _ => format!("no field is called `{shown}`: docs/access-log.md has those that there are"),
    }
}

/// Returns how many characters have to be added, removed or replaced to make one word of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(before + 1);
        }
    }
    row[b.len()]
}

/// Returns where a brace stands in a value of the configuration file, which may have quotation marks around it.
pub fn brace_at(raw: &str, number: usize) -> Range<usize> {
    let at = raw.match_indices(['{', '}']).nth(number).map_or(0, |(at, _)| at);
    at..at
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
