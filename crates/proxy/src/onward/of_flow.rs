//! What is kept of a connection while it is relayed, for its line in the access log ([`OfFlow`]). It can be described to another
//! process that goes on with the connection.

use super::{Relayed, forbidden, write};
use crate::{
    commands::Command,
    context::{Front, Live},
    handed::Moment,
    log::access_log::{Extra, Record, ms_since},
    pool::Lease,
};
use longsplice_engine::{Ended, Finish, FlowInfo, Pair};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, sync::Arc, time::Instant};

/// A description of more bytes goes without what the log has besides, and without the path of its request, or else there may be no
/// room for it.
const LONGEST: usize = 400;

/// A request that leads to a relay.
pub(crate) struct Asked {
    pub method: String,
    pub uri: Option<String>,
    pub status: Option<u16>,
    pub extra: Option<Box<Extra>>,
}

/// What is kept of a connection while it is relayed.
pub(crate) struct OfFlow {
    pub relayed: Relayed,
    /// Protocol of the listener.
    pub listener: &'static str,
    pub lease: Option<Lease>,
    pub route: Option<Box<str>>,
    pub command: Option<Command>,
    /// See [`Record::connect_ms`].
    pub connect_ms: Option<u64>,
    /// Boxed: other connections have none of this, and all wait in memory.
    pub http: Option<Box<Asked>>,
    /// What there is only after another process.
    pub earlier: Option<Box<Earlier>>,
}

/// What is known of an earlier process.
pub(crate) struct Earlier {
    /// Number of processes, with this one.
    pub processes: u32,
    /// Pool and server, if there is no lease on it here.
    pub member: Option<(Arc<str>, Arc<str>)>,
}

/// The description for another process. It is written at each splice, so that what is not there takes no room.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    pub started: Moment,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    passed: Option<[u64; 2]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    route: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    command: Option<Command>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    connect_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    http: Option<(String, Option<String>, Option<u16>)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    extra: Option<Box<Extra>>,
    /// Names of a pool and its server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<(String, String)>,
}

impl Line {
    /// Describes what was said of a flow. `None`: nothing, or nothing that is understood.
    pub fn of(description: Option<&str>) -> Option<Line> {
        serde_json::from_str(description?).ok()
    }

    /// Describes a flow of which nothing was said.
    pub fn since(started: Instant) -> Line {
        let (passed, route, command, connect_ms, http, extra) = (None, None, None, None, None, None);
        Line { started: started.into(), passed, route, command, connect_ms, http, extra, member: None }
    }

    /// Fills in a line of the access log.
    pub fn note(self, record: &mut Record) {
        (record.pool, record.member) = self.member.map(|(pool, name)| (pool.into(), name.into())).unzip();
        (record.route, record.command, record.connect_ms) = (self.route, self.command, self.connect_ms);
        if let Some((method, uri, status)) = self.http {
            (record.method, record.uri, record.status) = (Some(method), uri, status);
            record.extra = self.extra;
        }
        let [up, down] = self.passed.unwrap_or_default();
        (record.bytes_up, record.bytes_down) = (record.bytes_up + up, record.bytes_down + down);
    }
}

impl Finish for OfFlow {
    fn begun(&self, id: u64, hosts: Pair<SocketAddr>, info: &FlowInfo) {
        let started = self.relayed.started;
        self.relayed.live.shared.begins(id, || Record { duration_ms: ms_since(started), ..self.record(hosts, info) });
    }

    fn finish(self: Box<Self>, ended: Ended, info: &FlowInfo) {
        let mut record = self.record(Pair::new(ended.client, ended.server), info);
        let (up, down) = (record.bytes_up, record.bytes_down);
        record.ended(&ended);
        let Relayed { live, started, .. } = self.relayed;
        forbidden(&live.shared, &ended, &mut record);
        (record.bytes_up, record.bytes_down) = (record.bytes_up + up, record.bytes_down + down);
        drop(self.lease);
        write(&live, record, started);
    }

    fn description(&self) -> Option<String> {
        let member = match (&self.lease, &self.earlier) {
            (Some(Lease(member)), _) => Some((member.pool.to_string(), member.name.to_string())),
            (None, Some(earlier)) => earlier.member.as_ref().map(|(pool, name)| (pool.to_string(), name.to_string())),
            (None, None) => None,
        };
        let mut line = Line {
            started: self.relayed.started.into(),
            passed: self.relayed.passed.as_deref().copied(),
            route: self.route.as_deref().map(String::from),
            command: self.command,
            connect_ms: self.connect_ms,
            http: self.http.as_deref().map(|asked| (asked.method.clone(), asked.uri.clone(), asked.status)),
            extra: self.http.as_deref().and_then(|asked| asked.extra.clone()),
            member,
        };
        let text = serde_json::to_string(&line).ok()?; // it consists of texts and numbers, so there is one
        if text.len() <= LONGEST {
            return Some(text);
        }
        if line.extra.take().is_some() {
            let text = serde_json::to_string(&line).ok()?;
            if text.len() <= LONGEST {
                return Some(text);
            }
        }
        line.http = line.http.map(|(method, _, status)| (method, None, status));
        serde_json::to_string(&line).ok()
    }
}

impl OfFlow {
    /// Returns what is known of the flow before its end, with the bytes that were passed on before it began.
    fn record(&self, hosts: Pair<SocketAddr>, info: &FlowInfo) -> Record {
        let mut record = Record::new(self.listener, info.listen, hosts.client);
        record.name.clone_from(&info.name);
        if let Some(Earlier { processes, member }) = self.earlier.as_deref() {
            record.processes = Some(*processes);
            (record.pool, record.member) = member.clone().unzip();
        }
        self.lease.iter().for_each(|lease| lease.note(&mut record));
        record.server = Some(hosts.server);
        record.target = Some(info.target.to_string());
        record.user = info.user().map(String::from);
        record.route = self.route.as_deref().map(String::from);
        (record.command, record.connect_ms) = (self.command, self.connect_ms);
        if let Some(Asked { method, uri, status, extra }) = self.http.as_deref() {
            (record.method, record.uri, record.status) = (Some(method.clone()), uri.clone(), *status);
            record.extra.clone_from(extra);
        }
        [record.bytes_up, record.bytes_down] = self.relayed.passed.as_deref().copied().unwrap_or_default();
        record
    }

    /// Goes on with what another process has described.
    pub fn going_on(line: Line, live: Live, front: &Front, lease: Option<Lease>, processes: u32) -> OfFlow {
        let Line { started, passed, route, command, connect_ms, http, extra, member } = line;
        let member = member.map(|(pool, name)| (pool.into(), name.into())).filter(|_| lease.is_none());
        OfFlow {
            relayed: Relayed { live, started: started.into(), passed: passed.map(Box::new) },
            listener: front.listener.protocol.name(),
            lease,
            route: route.map(String::into_boxed_str),
            command,
            connect_ms,
            http: http.map(|(method, uri, status)| Box::new(Asked { method, uri, status, extra })),
            earlier: Some(Box::new(Earlier { processes, member })),
        }
    }
}
