//! What a line of the access log tells.

use super::calendar::rfc3339;
use crate::{commands::Command, fault::Fault};
use longsplice_engine::{Ended, Pair, PathFinding, Refusal};
use serde::{Deserialize, Serialize, Serializer};
use std::{
    borrow::Cow,
    net::SocketAddr,
    sync::Arc,
    time::{Instant, SystemTime},
};

/// Contents of a line.
#[derive(Debug, Clone, Serialize)]
pub struct Record {
    /// Time at which the line was written: RFC 3339, UTC, milliseconds. None until then.
    #[serde(serialize_with = "moment", skip_serializing_if = "Option::is_none")]
    pub time: Option<SystemTime>,
    /// What the line is about, if it is not about an end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// Number of the flow; none if there was no flow.
    pub id: Option<u64>,
    /// Protocol of the listener.
    pub listener: &'static str,
    /// Name of the listener.
    #[serde(serialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub name: Option<Arc<str>>,
    /// Address of the listener; none if an earlier process had it.
    pub listen: Option<SocketAddr>,
    /// The client's address, from the PROXY header if there was one.
    pub client: SocketAddr,
    /// The server's address; none if there was no server.
    pub server: Option<SocketAddr>,
    /// The destination as the client sent it.
    pub target: Option<String>,
    /// Pool of the server.
    #[serde(serialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// The server of the pool, as the configuration names it.
    #[serde(serialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub member: Option<Arc<str>>,
    /// The upstream proxy.
    #[serde(serialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Arc<str>>,
    /// Number of the route, from 1, and name of its pool: `2:api`; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// Command of SOCKS, unless it is CONNECT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Command>,
    /// The user name that was authenticated, or that the client tried.
    pub user: Option<String>,
    /// Method of the request; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Path of the request without its query, which may hold secrets; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// More of the request, if the log wants it; HTTP only.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Box<Extra>>,
    /// Status of the reply, from the server or from us; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Number, from 1, and action of the filter rule that decided on the reply: `2:deny`; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_rule: Option<String>,
    /// Result of the cache: `hit`, `revalidated`, `fill` (the reply is being stored) or `miss`; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<&'static str>,
    /// Reason for the end: [`EndReason`](longsplice_engine::EndReason), or `denied`, `bad-request`,
    /// `auth-failed`, `unreachable`, `bad-reply`, `no-route`, `no-server`, `timeout`, `forbidden`. Empty for what has not ended.
    #[serde(serialize_with = "word")]
    pub how: &'static str,
    /// Bytes from client to server.
    pub bytes_up: u64,
    /// Bytes from server to client.
    pub bytes_down: u64,
    /// Bytes of `bytes_up` that were forwarded while spliced.
    pub spliced_up: u64,
    /// Bytes of `bytes_down` that were forwarded while spliced.
    pub spliced_down: u64,
    /// Number of splices of the flow.
    pub splices: u32,
    /// Datagrams of an association of SOCKS.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub datagrams: Option<Datagrams>,
    /// Reason why the flow was not spliced, or error in the request.
    pub refusal: Option<String>,
    /// What was measured, if the refusal is `path`, or if the flow was spliced before its first byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathFinding>,
    /// Number of processes that the flow has lived through, if more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Time until there was a connection to the server, or it was given up, in milliseconds: look-ups of names, waiting for a
    /// server of a pool, and attempts that failed are included. None if there was none to make.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<u64>,
    /// Time from when the request began to be sent to the server to the head of its reply, in milliseconds; HTTP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_ms: Option<u64>,
    /// Time since accept, in milliseconds.
    pub duration_ms: u64,
}

/// Returns how long it is since then, in milliseconds.
pub fn ms_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Returns a text without what comes after so many bytes, and without spare room: it may wait as long as a connection.
pub fn cut(text: &str, most: usize) -> String {
    let end = (most..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    text[..end].to_owned()
}

fn moment<S: Serializer>(at: &Option<SystemTime>, to: S) -> Result<S::Ok, S::Error> {
    at.map(rfc3339).serialize(to)
}

fn word<S: Serializer>(word: &str, to: S) -> Result<S::Ok, S::Error> {
    Some(word).filter(|word| !word.is_empty()).serialize(to)
}

fn name<S: Serializer>(name: &Option<Arc<str>>, to: S) -> Result<S::Ok, S::Error> {
    name.as_deref().serialize(to)
}

/// What a line is about that is not about an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A connection begins to be relayed.
    Begin,
    /// It goes on.
    Alive,
}

impl Event {
    /// Returns the word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Event::Begin => "begin",
            Event::Alive => "alive",
        }
    }
}

/// What a request says besides. It is not noted unless the log wants it: others need no memory for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extra {
    /// `HTTP/1.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Cow<'static, str>>,
    /// The page that led to it, without its query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub referrer: Option<String>,
    /// The program of the client, as it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_agent: Option<String>,
    /// It names its site, as requests to a proxy do.
    #[serde(skip)]
    pub is_absolute: bool,
}

/// Datagrams of an association.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Datagrams {
    /// Number of those that were sent to destinations.
    #[serde(rename = "datagrams_up")]
    pub up: u64,
    /// Number of those that were sent to the client.
    #[serde(rename = "datagrams_down")]
    pub down: u64,
    /// Number of those of the client or for it that were dropped.
    #[serde(rename = "datagrams_dropped")]
    pub dropped: u64,
}

/// What a flow, or an exchange of HTTP messages, has come to.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Number of the flow, or of the last one that carried a body.
    pub flow: Option<u64>,
    /// Bytes passed on, by the side that sent them.
    pub passed: Pair<u64>,
    /// Of these, those that were forwarded while spliced.
    pub spliced: Pair<u64>,
    /// Number of splices.
    pub splices: u32,
    /// Why it was not spliced.
    pub refusal: Option<Refusal>,
    /// What was measured, if that is `path`.
    pub path: Option<PathFinding>,
    /// Status of the reply, once its head has arrived; HTTP only, as the next three.
    pub status: Option<u16>,
    /// The rule that decided on the reply, and its action.
    pub reply_rule: Option<String>,
    /// Result of the cache.
    pub cache: Option<&'static str>,
    /// Time to the head of the reply: `reply_ms` of [`Record`].
    pub reply_ms: Option<u64>,
}

impl Outcome {
    /// Adds a flow that has ended.
    pub fn add(&mut self, e: &Ended) {
        self.flow = Some(e.id);
        self.passed = self.passed.zip(Pair::new(e.bytes_up, e.bytes_down)).map(|(sum, n)| sum + n);
        self.spliced = self.spliced.zip(Pair::new(e.spliced_up, e.spliced_down)).map(|(sum, n)| sum + n);
        self.splices += e.splices;
        (self.refusal, self.path) = (e.refusal, e.path);
    }
}

impl Record {
    /// Returns the record of a connection that has not transferred anything yet.
    pub fn new(listener: &'static str, listen: impl Into<Option<SocketAddr>>, client: SocketAddr) -> Record {
        Record {
            time: None,
            event: None,
            id: None,
            listener,
            name: None,
            listen: listen.into(),
            client,
            server: None,
            target: None,
            pool: None,
            member: None,
            upstream: None,
            route: None,
            command: None,
            user: None,
            method: None,
            uri: None,
            extra: None,
            status: None,
            reply_rule: None,
            cache: None,
            how: "closed",
            bytes_up: 0,
            bytes_down: 0,
            spliced_up: 0,
            spliced_down: 0,
            splices: 0,
            datagrams: None,
            refusal: None,
            path: None,
            processes: None,
            connect_ms: None,
            reply_ms: None,
            duration_ms: 0,
        }
    }

    /// Fills in the result of a relayed flow.
    pub fn ended(&mut self, e: &Ended) {
        self.how = e.how.as_str();
        let mut outcome = Outcome::default();
        outcome.add(e);
        self.carried(&outcome);
    }

    /// Fills in the result of an exchange.
    pub fn outcome(&mut self, of: Outcome) {
        self.carried(&of);
        (self.status, self.reply_rule, self.cache) = (of.status, of.reply_rule, of.cache);
        self.reply_ms = of.reply_ms;
    }

    fn carried(&mut self, of: &Outcome) {
        self.id = of.flow;
        (self.bytes_up, self.bytes_down) = (of.passed.client, of.passed.server);
        (self.spliced_up, self.spliced_down) = (of.spliced.client, of.spliced.server);
        self.splices = of.splices;
        self.refusal = of.refusal.map(Refusal::as_str).map(String::from);
        self.path = of.path;
    }

    /// Fills in the reason why nothing was relayed.
    pub fn fault(&mut self, fault: &Fault) {
        self.how = fault.how();
        self.refusal = Some(fault.to_string());
        if let Fault::AuthFailed { user, .. } = fault {
            self.user.clone_from(user);
        }
    }

    /// Fills in that it was allowed, and is not any more.
    pub fn forbidden(&mut self, why: &str) {
        (self.how, self.refusal) = ("forbidden", Some(why.to_owned()));
    }
}
