//! Changes of the fields of HTTP heads that the configuration asks for: set, added, removed, replaced.
//!
//! They are made last, in the head as it is about to be sent, so they also see what the proxy itself writes (Via, Date, the
//! client's address). Fields that say where a message ends, or that concern one connection, cannot be named
//! ([`forward::is_own`]): no change can make two programs disagree about a message. A request's Host may be set.
//!
//! A client cannot stand in for what is set: of requests, names that a server may read as that name (`X_User` as `X-User`) are
//! removed with it. A cache stores replies as servers send them; they are changed when they leave ([`FieldChanges`]).

use longsplice_http::{Authority, forward};
use std::{fmt, net::IpAddr, ops::RangeInclusive, str::FromStr};

/// Longest value in the configuration, in bytes: more of them than a head may have would not be accepted by servers.
const VALUE_MAX: usize = 4096;

/// The changes of a listener, or of one of its routes. The latter follow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldChanges {
    /// Changes of requests, in order.
    pub request: Vec<FieldChange>,
    /// Changes of replies, in order: of servers, of the cache, and of our own.
    pub reply: Vec<FieldChange>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldChange {
    /// Statuses of the replies that are changed; empty: all.
    pub status: Vec<RangeInclusive<u16>>,
    /// What is done.
    pub what: Change,
}

/// What is done to the fields of a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// All fields with these names are removed.
    Remove(Vec<Names>),
    /// The field has this value, once. It is removed if the value is empty.
    Set(Name, Value),
    /// One more field of this name, unless the value is empty.
    Add(Name, Value),
    /// The field gets this value if there is none of its name.
    Default(Name, Value),
    /// What matches in values of the field becomes this text, with groups as `$1`. A field whose value becomes empty is removed.
    Replace(Name, Expression, String),
}

/// The name of a field that may be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(String);

/// A name, or the beginning of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    name: Name,
    /// Any name that begins so.
    all: bool,
}

/// A text with variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Client,
    Host,
    User,
}

/// An expression over the bytes of a value. Expressions with the same text are equal.
#[derive(Debug, Clone)]
pub struct Expression(regex::bytes::Regex);

/// What the variables of values stand for.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// The client's address.
    pub client: IpAddr,
    /// The host that was asked for, with its port unless it is the default.
    pub host: &'a str,
    /// Who has logged in.
    pub user: Option<&'a str>,
}

/// Which head is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Head {
    /// That of a request.
    Request,
    /// That of a reply with this status.
    Reply(u16),
}

impl FieldChanges {
    /// Whether servers are sent what differs between clients with equal requests. Their replies must not be shared.
    pub fn are_personal(&self) -> bool {
        let personal = |value: &Value| value.0.iter().any(|part| matches!(part, Part::Client | Part::User));
        self.request.iter().any(|change| match &change.what {
            Change::Set(_, value) | Change::Add(_, value) | Change::Default(_, value) => personal(value),
            Change::Remove(_) | Change::Replace(..) => false,
        })
    }
}

/// Changes the fields of a complete head.
pub fn change<'a>(
    head: Vec<u8>,
    which: Head,
    changes: impl IntoIterator<Item = &'a FieldChange>,
    about: &About<'_>,
) -> Vec<u8> {
    let mut changes = changes.into_iter().filter(|change| change.concerns(which)).peekable();
    if changes.peek().is_none() {
        return head;
    }
    edit(head, |fields| changes.for_each(|change| change.what.apply(fields, which, about)))
}

/// Changes the lines behind the first one.
pub(crate) fn edit(head: Vec<u8>, with: impl FnOnce(&mut Vec<Vec<u8>>)) -> Vec<u8> {
    let text = head.strip_suffix(b"\r\n\r\n").unwrap_or(&head);
    let mut lines: Vec<Vec<u8>> = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        lines.push(rest[..end].to_vec());
        rest = &rest[end + 2..];
    }
    lines.push(rest.to_vec());
    let mut fields = lines.split_off(1);
    with(&mut fields);
    lines.append(&mut fields);
    lines.push(Vec::new());
    let mut out = lines.join(&b"\r\n"[..]);
    out.extend(b"\r\n");
    out
}

/// Removes fields from a complete head.
pub fn without(head: Vec<u8>, names: &[&str]) -> Vec<u8> {
    let is_one = |line: &[u8]| names.iter().any(|name| name_of(line).eq_ignore_ascii_case(name.as_bytes()));
    edit(head, |fields| fields.retain(|line| !is_one(line)))
}

impl FieldChange {
    fn concerns(&self, which: Head) -> bool {
        match which {
            Head::Request => true,
            Head::Reply(status) => self.status.is_empty() || self.status.iter().any(|s| s.contains(&status)),
        }
    }
}

impl Change {
    fn apply(&self, fields: &mut Vec<Vec<u8>>, which: Head, about: &About<'_>) {
        let is = |line: &[u8], name: &Name| name.is(name_of(line), which);
        match self {
            Change::Remove(names) => {
                fields.retain(|line| !names.iter().any(|n| n.matches(name_of(line), which)));
            }
            Change::Set(name, value) => {
                let at = fields.iter().position(|line| is(line, name)).unwrap_or(fields.len());
                fields.retain(|line| !is(line, name));
                if let Some(line) = name.line(value, about) {
                    fields.insert(at.min(fields.len()), line);
                }
            }
            Change::Add(name, value) => fields.extend(name.line(value, about)),
            Change::Default(name, value) => {
                if !fields.iter().any(|line| is(line, name)) {
                    fields.extend(name.line(value, about));
                }
            }
            Change::Replace(name, expression, with) => {
                for line in fields.iter_mut().filter(|line| is(line, name)) {
                    let start = name_of(line).len() + 2; // behind ": "
                    let value = line.get(start..).unwrap_or_default();
                    let value = expression.0.replace_all(value, with.as_bytes()).trim_ascii().to_vec();
                    line.truncate(if value.is_empty() { 0 } else { start });
                    line.extend(value);
                }
                fields.retain(|line| !line.is_empty());
            }
        }
    }
}

pub(crate) fn name_of(line: &[u8]) -> &[u8] {
    line.split(|b| *b == b':').next().unwrap_or_default()
}

impl Name {
    fn is(&self, name: &[u8], which: Head) -> bool {
        name.eq_ignore_ascii_case(self.0.as_bytes()) || which == Head::Request && forward::is_disguised(name, &self.0)
    }

    fn line(&self, value: &Value, about: &About<'_>) -> Option<Vec<u8>> {
        let value = value.of(about)?;
        Some(format!("{}: {value}", self.0).into_bytes())
    }

    /// Whether it is the Host of requests, which only [`Change::Set`] may name.
    pub fn is_host(&self) -> bool {
        self.0.eq_ignore_ascii_case("host")
    }
}

impl Names {
    fn matches(&self, name: &[u8], which: Head) -> bool {
        let own = self.name.0.as_bytes();
        let begins = self.all && name.len() >= own.len() && name[..own.len()].eq_ignore_ascii_case(own);
        // beginnings may include those of fields that are not for change
        self.name.is(name, which) || begins && !std::str::from_utf8(name).is_ok_and(forward::is_own)
    }

    /// Whether the Host of requests is named.
    pub fn is_host(&self) -> bool {
        self.name.is_host()
    }
}

impl Value {
    /// Returns the text; `None` if it is empty or a variable has no value.
    fn of(&self, about: &About<'_>) -> Option<String> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(part) => text += part,
                Part::Client => text += &about.client.to_canonical().to_string(),
                Part::Host => text += Some(about.host).filter(|h| !h.is_empty())?,
                Part::User => text += about.user?,
            }
        }
        // what a user may be called is not limited elsewhere
        let good = !text.trim_ascii().is_empty() && text.bytes().all(is_of_value);
        good.then(|| text.trim_ascii().to_owned())
    }

    /// Whether it may be the value of Host: a host of the configuration, or the one that was asked for.
    pub fn is_good_host(&self) -> bool {
        match &self.0[..] {
            [Part::Host] => true,
            [Part::Text(text)] => Authority::parse(text).is_ok(),
            _ => false,
        }
    }
}

/// Whether a value may have this byte (RFC 9110, 5.5).
fn is_of_value(b: u8) -> bool {
    b == b'\t' || b >= b' ' && b != 0x7f
}

impl FromStr for Name {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if text.is_empty() || !text.bytes().all(good) {
            return Err("bad field name: write one such as X-User, of letters, digits, `-` and `_`");
        }
        let name = Name(text.to_owned());
        if forward::is_own(text) && !name.is_host() {
            return Err("this field says where a message ends, or is about one connection: the proxy writes it itself");
        }
        Ok(name)
    }
}

impl FromStr for Names {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_suffix('*') {
            Some(begin) => Ok(Names { name: begin.parse()?, all: true }),
            None => Ok(Names { name: text.parse()?, all: false }),
        }
    }
}

impl FromStr for Value {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > VALUE_MAX || !text.bytes().all(is_of_value) {
            return Err(format!(
                "bad value: write at most {VALUE_MAX} bytes, without line breaks and control characters"
            ));
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (variable, behind) = after.split_once('}').unwrap_or(("", ""));
            let part = match variable {
                "client" => Part::Client,
                "host" => Part::Host,
                "user" => Part::User,
                _ => return Err(format!("there is no ${{{variable}}}: write ${{client}}, ${{host}} or ${{user}}")),
            };
            parts.extend((!before.is_empty()).then(|| Part::Text(before.to_owned())));
            parts.push(part);
            rest = behind;
        }
        parts.extend((!rest.is_empty()).then(|| Part::Text(rest.to_owned())));
        Ok(Value(parts))
    }
}

/// Whether a text may replace what matches in a value.
pub fn may_replace(text: &str) -> Result<(), String> {
    text.parse::<Value>().map(drop).or_else(|e| if e.starts_with("bad") { Err(e) } else { Ok(()) })
}

impl FromStr for Expression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let built = regex::bytes::RegexBuilder::new(text).unicode(false).build();
        built.map(Expression).map_err(|e| {
            let text = e.to_string();
            let last = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            format!("bad regular expression: {last}; see https://docs.rs/regex, without Unicode")
        })
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Expression) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Expression {}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABOUT: About<'static> =
        About { client: IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7)), host: "a.example:81", user: Some("ann") };

    fn set(name: &str, value: &str) -> Change {
        Change::Set(name.parse().unwrap(), value.parse().unwrap())
    }

    fn add(name: &str, value: &str) -> Change {
        Change::Add(name.parse().unwrap(), value.parse().unwrap())
    }

    fn default(name: &str, value: &str) -> Change {
        Change::Default(name.parse().unwrap(), value.parse().unwrap())
    }

    fn remove(names: &[&str]) -> Change {
        Change::Remove(names.iter().map(|n| n.parse().unwrap()).collect())
    }

    fn replace(name: &str, expression: &str, with: &str) -> Change {
        Change::Replace(name.parse().unwrap(), expression.parse().unwrap(), with.into())
    }

    /// Changes a head of these fields, each a line.
    fn changed(which: Head, fields: &str, all: &[Change]) -> String {
        let changes: Vec<_> = all.iter().map(|what| FieldChange { status: Vec::new(), what: what.clone() }).collect();
        let lines = |f: &str| f.split_inclusive('\n').map(|l| l.replace('\n', "\r\n")).collect::<String>();
        let head = format!("START\r\n{}\r\n", lines(fields));
        let out = String::from_utf8(change(head.into_bytes(), which, &changes, &ABOUT)).unwrap();
        out.strip_prefix("START\r\n").and_then(|o| o.strip_suffix("\r\n")).unwrap().replace("\r\n", "\n")
    }

    #[test]
    fn fields_are_set_added_removed_and_replaced_in_order() {
        let reply = |fields: &str, all: &[Change]| changed(Head::Reply(200), fields, all);
        let fields = "Server: x\nX-A: 1\nx-a: 2\nVary: *\n";
        for (changes, want) in [
            (vec![set("X-A", "3")], "Server: x\nX-A: 3\nVary: *\n"),
            (vec![set("X-B", "3")], "Server: x\nX-A: 1\nx-a: 2\nVary: *\nX-B: 3\n"),
            (vec![set("X-A", "")], "Server: x\nVary: *\n"),
            (vec![add("x-a", "3")], "Server: x\nX-A: 1\nx-a: 2\nVary: *\nx-a: 3\n"),
            (vec![default("x-A", "3"), default("X-C", "4")], "Server: x\nX-A: 1\nx-a: 2\nVary: *\nX-C: 4\n"),
            (vec![remove(&["SERVER", "x-*"])], "Vary: *\n"),
            (vec![remove(&["Server", "X-A", "Vary"])], ""),
            (vec![replace("X-A", "^(2)$", "<$1>"), replace("Vary", ".*", "")], "Server: x\nX-A: 1\nx-a: <2>\n"),
            (
                vec![remove(&["x-a"]), set("X-A", "${client} ${host} ${user}$")],
                "Server: x\nVary: *\nX-A: 192.0.2.7 a.example:81 ann$\n",
            ),
        ] {
            assert_eq!(reply(fields, &changes), want, "{changes:?}");
        }
        assert_eq!(reply("", &[set("A", "b")]), "A: b\n");
    }

    #[test]
    fn no_change_touches_what_delimits_messages() {
        let fields = "Content-Length: 1\nContent-Type: a/b\nConnection: close\n";
        assert_eq!(changed(Head::Reply(200), fields, &[remove(&["Con*"])]), "Content-Length: 1\nConnection: close\n");
        for name in ["Content-Length", "transfer-encoding", "Connection", "TE", "Keep-Alive", "Upgrade", "Trailer"] {
            assert!(name.parse::<Name>().is_err() && name.parse::<Names>().is_err(), "{name}");
        }
        for text in ["", "a b", "a:", "a\r\n", "*"] {
            assert!(text.parse::<Name>().is_err() && text.parse::<Names>().is_err(), "{text}");
        }
        for text in ["a\r\nb: c", "\0", "${nobody}", "${client", &"x".repeat(VALUE_MAX + 1)] {
            assert!(text.parse::<Value>().is_err(), "{text}");
        }
        assert!(may_replace("a$1${x}b").is_ok() && may_replace("a\nb").is_err());
    }

    #[test]
    fn a_client_cannot_stand_in_for_what_is_set() {
        let fields = "X_User: root\nX-User: root\nx-user : no\nX--User: root\nX-Users: 1\n";
        let set = [set("X-User", "${user}")];
        assert_eq!(changed(Head::Request, fields, &set), "X-User: ann\nX-Users: 1\n");
        let nobody = About { user: None, ..ABOUT };
        let hostile = About { user: Some("a\r\nX-Admin: 1"), ..ABOUT };
        let changes = [FieldChange { status: Vec::new(), what: set[0].clone() }];
        for about in [nobody, hostile] {
            let out = change(b"START\r\nX-User: root\r\n\r\n".to_vec(), Head::Request, &changes, &about);
            assert_eq!(out, b"START\r\n\r\n");
        }
    }

    #[test]
    fn only_replies_have_statuses() {
        let changes = [FieldChange { status: vec![500..=599], what: set("A", "b") }];
        let of = |which| change(b"START\r\n\r\n".to_vec(), which, &changes, &ABOUT).len();
        assert_eq!([Head::Reply(503), Head::Reply(200)].map(of), [15, 9]);
    }

    #[test]
    fn replies_to_requests_that_name_clients_are_personal() {
        let personal = |what| {
            FieldChanges {
                request: vec![FieldChange { status: Vec::new(), what }],
                reply: vec![FieldChange { status: Vec::new(), what: set("A", "${user}") }],
            }
            .are_personal()
        };
        assert!(personal(set("A", "${client}")) && personal(add("A", "x${user}")));
        assert!(!personal(set("A", "${host}")) && !personal(remove(&["A"])));
    }
}
