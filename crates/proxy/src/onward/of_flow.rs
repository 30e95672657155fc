//! What is kept of a connection while it is relayed, for its line in the access log ([`OfFlow`]). It can be described to another
//! process that goes on with the connection.

use super::{Relayed, forbidden, write};
use crate::{
    commands::Command,
    context::{
        Front, Live,
        led::{Led, LedFlow},
    },
    handed::Moment,
    log::access_log::{Extra, Record, ms_since},
    pool::Lease,
};
use longsplice_engine::{Ended, Finish, FlowInfo, Pair};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, ops::Not, sync::Arc, time::Instant};

/// A description of more bytes goes without what the client says of itself, and then without the path of its request, or else there
/// may be no room for it.
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
    pub led: Option<Arc<LedFlow>>,
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
    /// See [`Extra::is_absolute`], which is no field of lines.
    #[serde(default, skip_serializing_if = "Not::not")]
    is_absolute: bool,
    /// Names of a pool and its server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub led: Option<Led>,
}

impl Line {
    /// Describes what was said of a flow. `None`: nothing, or nothing that is understood.
    pub fn of(description: Option<&str>) -> Option<Line> {
        let mut line: Line = serde_json::from_str(description?).ok()?;
        let is_absolute = line.is_absolute;
        line.extra.iter_mut().for_each(|extra| extra.is_absolute = is_absolute);
        Some(line)
    }

    /// Returns what `of` reads, of limited length.
    fn description(mut self) -> Option<String> {
        self.is_absolute = self.extra.as_ref().is_some_and(|extra| extra.is_absolute);
        let shorten: [fn(&mut Line); 2] = [
            |line| line.extra.iter_mut().for_each(|extra| (extra.referrer, extra.user_agent) = (None, None)),
            |line| line.http.iter_mut().for_each(|(_, uri, _)| *uri = None),
        ];
        let mut text = serde_json::to_string(&self).ok()?; // it consists of texts and numbers, so there is one
        for shorten in shorten {
            if text.len() > LONGEST {
                shorten(&mut self);
                text = serde_json::to_string(&self).ok()?;
            }
        }
        Some(text)
    }

    /// Describes a flow of which nothing was said.
    pub fn since(started: Instant) -> Line {
        let (passed, route, command, connect_ms, http, extra, member) = Default::default();
        let (started, led) = (started.into(), Some(Led { is_unknown: true, ..Led::default() }));
        Line { started, passed, route, command, connect_ms, http, extra, is_absolute: false, member, led }
    }

    /// Fills in a line of the access log.
    pub fn note(self, record: &mut Record) {
        (record.pool, record.member) = self.member.map(|(pool, name)| (pool.into(), name.into())).unzip();
        (record.route, record.command, record.connect_ms) = (self.route, self.command, self.connect_ms);
        record.upstream = self.led.and_then(|led| led.upstream).map(Arc::from);
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
        drop((self.lease, self.led));
        write(&live, record, started);
    }

    fn description(&self) -> Option<String> {
        let member = match (&self.lease, &self.earlier) {
            (Some(Lease(member)), _) => Some((member.pool.to_string(), member.name.to_string())),
            (None, Some(earlier)) => earlier.member.as_ref().map(|(pool, name)| (pool.to_string(), name.to_string())),
            (None, None) => None,
        };
        let line = Line {
            started: self.relayed.started.into(),
            passed: self.relayed.passed.as_deref().copied(),
            route: self.route.as_deref().map(String::from),
            command: self.command,
            connect_ms: self.connect_ms,
            http: self.http.as_deref().map(|asked| (asked.method.clone(), asked.uri.clone(), asked.status)),
            extra: self.http.as_deref().and_then(|asked| asked.extra.clone()),
            is_absolute: false,
            member,
            led: self.led.as_ref().map(|flow| flow.led.clone()),
        };
        line.description()
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
        record.upstream = self.led.as_ref().and_then(|flow| flow.led.upstream.as_deref()).map(Arc::from);
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

    /// Goes on with a flow that another process has described. It is not listed yet.
    pub fn going_on(
        (flow, line): (u64, Line),
        live: Live,
        front: &Front,
        lease: Option<Lease>,
        processes: u32,
    ) -> OfFlow {
        let Line { started, passed, route, command, connect_ms, http, extra, member, led, .. } = line;
        let led = led.map(LedFlow::new);
        led.iter().for_each(|led| live.shared.led.enter(flow, led));
        let member = member.map(|(pool, name)| (pool.into(), name.into())).filter(|_| lease.is_none());
        OfFlow {
            relayed: Relayed { live, started: started.into(), passed: passed.map(Box::new) },
            listener: front.listener.protocol.name(),
            lease,
            led,
            route: route.map(String::into_boxed_str),
            command,
            connect_ms,
            http: http.map(|(method, uri, status)| Box::new(Asked { method, uri, status, extra })),
            earlier: Some(Box::new(Earlier { processes, member })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(uri: &str, agent: &str) -> Line {
        let extra = Extra {
            version: Some("HTTP/1.1".into()),
            referrer: Some("http://a/".into()),
            user_agent: Some(agent.into()),
            is_absolute: true,
        };
        let http = Some(("GET".into(), Some(uri.into()), Some(101)));
        Line { http, extra: Some(extra.into()), ..Line::since(Instant::now()) }
    }

    fn noted(line: Line) -> Record {
        let text = line.description().unwrap();
        assert!(text.len() <= LONGEST, "{text}");
        let mut record = Record::new("http", None, "192.0.2.1:1000".parse().unwrap());
        Line::of(Some(&text)).unwrap().note(&mut record);
        record
    }

    /// The line of the end is the same in another process, and what is too long is left out of it in an order.
    #[test]
    fn requests_are_described() {
        let whole = noted(line("/a", "curl"));
        assert_eq!((whole.uri.as_deref(), whole.status), (Some("/a"), Some(101)));
        assert_eq!(whole.extra, line("", "curl").extra);
        let shorter = noted(line("/a", &"x".repeat(512)));
        let version = Extra { referrer: None, user_agent: None, ..*line("", "").extra.unwrap() };
        assert_eq!((shorter.uri.as_deref(), shorter.extra.as_deref()), (Some("/a"), Some(&version)));
        let shortest = noted(line(&"x".repeat(1024), "curl"));
        assert_eq!((shortest.uri, shortest.method.as_deref()), (None, Some("GET")));
        assert_eq!(shortest.extra.as_deref(), Some(&version));
    }

    /// Processes of other versions say less, or more.
    #[test]
    fn other_descriptions_are_read() {
        let text = Line::since(Instant::now()).description().unwrap();
        assert!(!text.contains("is_absolute") && !text.contains("extra"), "{text}");
        assert!(Line::of(Some(&text.replacen('{', "{\"later\":1,", 1))).unwrap().extra.is_none());
    }
}
