//! The fields of a line, by their names, and a line of text.

use super::{
    calendar::rfc3339,
    record::{Event, Extra, Record},
};
use crate::commands::Command;
use std::{borrow::Cow, fmt::Write as _, net::SocketAddr, sync::Arc};

/// A value of a field.
pub(super) enum Value<'a> {
    Number(u64),
    Address(SocketAddr),
    /// A word of ours: no special character is in it.
    Plain(Cow<'a, str>),
    /// Text that a client, a server or the configuration chose.
    Text(Cow<'a, str>),
}

/// A field.
pub(super) struct Field {
    pub name: &'static str,
    /// A line has it where there is no value, too.
    pub is_always_there: bool,
    pub of: Of,
}

/// Returns its value.
pub(super) type Of = for<'a> fn(&'a Record) -> Option<Value<'a>>;

const fn always(name: &'static str, of: Of) -> Field {
    Field { name, is_always_there: true, of }
}

const fn some(name: &'static str, of: Of) -> Field {
    Field { name, is_always_there: false, of }
}

/// All fields in their order.
pub(super) static FIELDS: [Field; 38] = [
    always("time", |r| r.time.map(|at| Value::Plain(rfc3339(at).into()))),
    some("event", |r| plain(r.event.map(Event::as_str))),
    always("id", |r| number(r.id)),
    always("listener", |r| plain(Some(r.listener))),
    some("name", |r| name(r.name.as_ref())),
    always("listen", |r| r.listen.map(Value::Address)),
    always("client", |r| Some(Value::Address(r.client))),
    always("server", |r| r.server.map(Value::Address)),
    always("target", |r| text(r.target.as_ref())),
    some("pool", |r| name(r.pool.as_ref())),
    some("member", |r| name(r.member.as_ref())),
    some("upstream", |r| name(r.upstream.as_ref())),
    some("route", |r| text(r.route.as_ref())),
    some("command", |r| plain(r.command.map(Command::as_str))),
    always("user", |r| text(r.user.as_ref())),
    some("method", |r| text(r.method.as_ref())),
    some("uri", |r| text(r.uri.as_ref())),
    some("version", |r| plain(extra(r)?.version.as_deref())),
    some("referrer", |r| text(extra(r)?.referrer.as_ref())),
    some("user_agent", |r| text(extra(r)?.user_agent.as_ref())),
    some("status", |r| number(r.status.map(u64::from))),
    some("reply_rule", |r| text(r.reply_rule.as_ref())),
    some("cache", |r| plain(r.cache)),
    always("how", |r| plain(Some(r.how).filter(|how| !how.is_empty()))),
    always("bytes_up", |r| number(r.bytes_up)),
    always("bytes_down", |r| number(r.bytes_down)),
    always("spliced_up", |r| number(r.spliced_up)),
    always("spliced_down", |r| number(r.spliced_down)),
    always("splices", |r| number(u64::from(r.splices))),
    some("datagrams_up", |r| number(r.datagrams?.up)),
    some("datagrams_down", |r| number(r.datagrams?.down)),
    some("datagrams_dropped", |r| number(r.datagrams?.dropped)),
    always("refusal", |r| text(r.refusal.as_ref())),
    some("path", |r| Some(Value::Text(r.path.as_ref()?.to_string().into()))),
    some("processes", |r| number(r.processes.map(u64::from))),
    some("connect_ms", |r| number(r.connect_ms)),
    some("reply_ms", |r| number(r.reply_ms)),
    always("duration_ms", |r| number(r.duration_ms)),
];

fn extra(record: &Record) -> Option<&Extra> {
    record.extra.as_deref()
}

fn number<'a>(n: impl Into<Option<u64>>) -> Option<Value<'a>> {
    n.into().map(Value::Number)
}

fn text(of: Option<&String>) -> Option<Value<'_>> {
    of.map(|text| Value::Text(Cow::Borrowed(text)))
}

fn name(of: Option<&Arc<str>>) -> Option<Value<'_>> {
    of.map(|text| Value::Text(Cow::Borrowed(text)))
}

fn plain(of: Option<&str>) -> Option<Value<'_>> {
    of.map(|word| Value::Plain(Cow::Borrowed(word)))
}

impl Record {
    /// Returns the line `TIME key=value ...`, without its end.
    pub(super) fn text(&self) -> String {
        let mut t = String::with_capacity(512);
        for (at, field) in FIELDS.iter().enumerate() {
            let value = (field.of)(self);
            if value.is_none() && !field.is_always_there {
                continue;
            }
            if at > 0 {
                [" ", field.name, "="].into_iter().for_each(|part| t.push_str(part));
            }
            match value {
                Some(Value::Text(text)) => quote(&mut t, &text),
                Some(value) => value.write(&mut t),
                None => t.push('-'),
            }
        }
        t
    }
}

impl Value<'_> {
    /// Writes it as it is.
    pub fn write(&self, t: &mut String) {
        // Lines are written for each request, so this avoids the formatter, which takes ten times as long.
        match self {
            Value::Number(n) => t.push_str(itoa::Buffer::new().format(*n)),
            Value::Address(SocketAddr::V4(v4)) => {
                for (byte, end) in v4.ip().octets().into_iter().zip(['.', '.', '.', ':']) {
                    t.push_str(itoa::Buffer::new().format(byte));
                    t.push(end);
                }
                t.push_str(itoa::Buffer::new().format(v4.port()));
            }
            Value::Address(v6) => {
                let _ = write!(t, "{v6}"); // writing to a String cannot fail
            }
            Value::Plain(text) | Value::Text(text) => t.push_str(text),
        }
    }
}

/// Writes text that somebody chose; quoted if it contains special characters.
fn quote(t: &mut String, text: &str) {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && !b"\"\\=".contains(&b)) {
        return t.push_str(text);
    }
    let _ = write!(t, "{text:?}"); // writing to a String cannot fail
}
