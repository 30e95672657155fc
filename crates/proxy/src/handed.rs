//! Connections that go on in another process, which takes the place of this one: what is known of each, and its sockets.

use bytes::Bytes;
use longsplice_engine::{FlowAbout, LegAbout, Tuple, monotonic};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

/// What is known of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum About {
    /// A client of whom nothing is read that was not served.
    Client(Box<ClientAbout>),
    /// A client and a server between which bytes are copied.
    Flow(Box<CopiedAbout>),
}

/// A client who has said nothing yet, or waits between two requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientAbout {
    /// Name and protocol of the listener.
    pub name: String,
    /// Its protocol.
    pub protocol: String,
    /// Its leg.
    pub leg: LegAbout,
    /// When it was accepted.
    pub began: Moment,
    /// When its process stopped to read from it.
    pub left: Moment,
    /// No PROXY header is to come any more.
    pub is_known: bool,
    /// HTTP: number of requests so far, and when the last one was answered.
    pub requests: Option<(u64, Moment)>,
}

/// A connection that is copied.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CopiedAbout {
    /// What the engine knows of it.
    pub flow: FlowAbout,
    /// What its line in the access log needs.
    pub line: String,
    /// How far its triggers are.
    pub triggers: Option<Counted>,
}

/// How far the triggers of a connection are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// When bytes were last seen to pass.
    pub quiet_since: Moment,
    /// For each, when it is pulled, as it was configured, and what it takes to pull it next.
    pub next: Vec<(String, u64)>,
}

/// What is known of a server of a pool, and what an operator has told it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KnownServer {
    /// Name of the pool.
    pub pool: String,
    /// Address of the server in the configuration.
    pub name: String,
    /// What it was told last.
    pub duty: Duty,
    /// The weight that it was told, and the one that the configuration had then.
    pub weight: Option<[u32; 2]>,
    /// Its health.
    pub health: KnownHealth,
    /// When it came back.
    pub back: Option<Moment>,
    /// Number of times that it was chosen.
    pub chosen: u64,
    /// Number of times that it has failed.
    pub failed: u64,
}

/// What an operator has told a server last, besides its weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Duty {
    /// To take its share.
    #[default]
    Serve,
    /// To take nothing new.
    Drain,
    /// The same, and that it is not checked.
    Maintain,
}

/// Health of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KnownHealth {
    /// Number of requests and connections that have failed since the last good one.
    pub failures: u32,
    /// It was taken out after failures, and has this time left in milliseconds.
    pub out: Option<u64>,
    /// Checks say that it is down.
    pub down: bool,
}

/// A point in time that two processes of the machine share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment(Duration);

impl Moment {
    /// Returns the time since then.
    pub fn age(self) -> Duration {
        monotonic().saturating_sub(self.0)
    }
}

impl From<Instant> for Moment {
    fn from(at: Instant) -> Moment {
        Moment(monotonic().saturating_sub(at.elapsed()))
    }
}

impl From<Moment> for Instant {
    fn from(Moment(at): Moment) -> Instant {
        let now = Instant::now();
        now.checked_sub(Moment(at).age()).unwrap_or(now)
    }
}

/// A connection that goes to another process. Only one of the two may use its sockets.
#[derive(Debug)]
pub struct Handed {
    /// What is known of it.
    pub about: About,
    /// One for each leg, the client's first.
    pub sockets: Vec<OwnedFd>,
    /// What was read from client and server, and not passed on.
    pub in_hand: [Bytes; 2],
}

/// Which connections another process takes.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Its listeners by name, and their protocols.
    pub listeners: HashMap<String, String>,
    /// Number of sockets that it has room for.
    pub sockets: usize,
    /// It takes over the tables of the data path.
    pub splices: bool,
}

impl Wanted {
    /// Returns whether it has a listener of this name and protocol.
    pub fn has(&self, name: Option<&str>, protocol: &str) -> bool {
        name.and_then(|name| self.listeners.get(name)).is_some_and(|has| has == protocol)
    }
}

impl About {
    /// It has gone to another process.
    pub fn has_moved(&mut self) {
        if let About::Flow(copied) = self {
            copied.flow.processes += 1;
        }
    }

    /// Returns the number of sockets.
    pub fn sockets(&self) -> usize {
        match self {
            About::Client(_) => 1,
            About::Flow(_) => 2,
        }
    }

    /// Returns name and protocol of its listener.
    pub fn listener(&self) -> (Option<&str>, &str) {
        match self {
            About::Client(client) => (Some(&client.name), &client.protocol),
            About::Flow(copied) => (copied.flow.name.as_deref(), &copied.flow.protocol),
        }
    }

    /// Returns its legs, in the order of its sockets.
    pub fn legs(self) -> Vec<LegAbout> {
        match self {
            About::Client(client) => vec![client.leg],
            About::Flow(copied) => <[LegAbout; 2]>::from(copied.flow.legs).into(),
        }
    }

    /// Returns the number of the flow, if it is one.
    pub fn flow(&self) -> Option<u64> {
        if let About::Flow(copied) = self { Some(copied.flow.id) } else { None }
    }

    /// Returns whether another process takes it.
    pub fn is_wanted(&self, by: &Wanted) -> bool {
        let (name, protocol) = self.listener();
        by.has(name, protocol) && (by.splices || self.recorded().next().is_none())
    }

    /// Returns the legs that the data path has records of.
    pub fn recorded(&self) -> impl Iterator<Item = Tuple> {
        let legs = match self {
            About::Client(client) => [client.leg.recorded(), None],
            About::Flow(copied) => [copied.flow.legs.client.recorded(), copied.flow.legs.server.recorded()],
        };
        legs.into_iter().flatten()
    }
}
