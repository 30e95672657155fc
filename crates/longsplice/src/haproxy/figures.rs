//! `show stat`: rows of HAProxy's columns, and how they are written. What longsplice does not count is left empty.

use longsplice_proxy::{
    ListenerValues, MemberValues, PoolValues,
    haproxy::{Form, Format, Name, Stat},
};
use serde_json::json;
use std::fmt::Write;

/// The columns of HAProxy 2.6, in their order. Later versions add some behind them; those of its modules are left out.
pub const COLUMNS: [&str; 103] = [
    "pxname",
    "svname",
    "qcur",
    "qmax",
    "scur",
    "smax",
    "slim",
    "stot",
    "bin",
    "bout",
    "dreq",
    "dresp",
    "ereq",
    "econ",
    "eresp",
    "wretr",
    "wredis",
    "status",
    "weight",
    "act",
    "bck",
    "chkfail",
    "chkdown",
    "lastchg",
    "downtime",
    "qlimit",
    "pid",
    "iid",
    "sid",
    "throttle",
    "lbtot",
    "tracked",
    "type",
    "rate",
    "rate_lim",
    "rate_max",
    "check_status",
    "check_code",
    "check_duration",
    "hrsp_1xx",
    "hrsp_2xx",
    "hrsp_3xx",
    "hrsp_4xx",
    "hrsp_5xx",
    "hrsp_other",
    "hanafail",
    "req_rate",
    "req_rate_max",
    "req_tot",
    "cli_abrt",
    "srv_abrt",
    "comp_in",
    "comp_out",
    "comp_byp",
    "comp_rsp",
    "lastsess",
    "last_chk",
    "last_agt",
    "qtime",
    "ctime",
    "rtime",
    "ttime",
    "agent_status",
    "agent_code",
    "agent_duration",
    "check_desc",
    "agent_desc",
    "check_rise",
    "check_fall",
    "check_health",
    "agent_rise",
    "agent_fall",
    "agent_health",
    "addr",
    "cookie",
    "mode",
    "algo",
    "conn_rate",
    "conn_rate_max",
    "conn_tot",
    "intercepted",
    "dcon",
    "dses",
    "wrew",
    "connect",
    "reuse",
    "cache_lookups",
    "cache_hits",
    "srv_icur",
    "src_ilim",
    "qtime_max",
    "ctime_max",
    "rtime_max",
    "ttime_max",
    "eint",
    "idle_conn_cur",
    "safe_conn_cur",
    "used_conn_cur",
    "need_conn_est",
    "uweight",
    "agg_server_status",
    "agg_server_check_status",
    "agg_check_status",
];

/// A field that is filled, of `show stat` or `show info`.
#[derive(Debug)]
pub struct Field {
    /// Its place among HAProxy's.
    pub at: usize,
    pub name: &'static str,
    /// Origin, nature and scope, a letter each.
    tags: &'static str,
    kind: &'static str,
    about: &'static str,
}

impl Field {
    pub const fn new(
        at: usize,
        name: &'static str,
        (tags, kind): (&'static str, &'static str),
        about: &'static str,
    ) -> Field {
        Field { at, name, tags, kind, about }
    }
}

const LIMIT: (&str, &str) = ("CLP", "u32");
const GAUGE: (&str, &str) = ("MGP", "u32");
const COUNTER: (&str, &str) = ("MCP", "u64");
const KEY: (&str, &str) = ("KGS", "u32");
const WORD: (&str, &str) = ("CGS", "str");

/// All that are filled, in the order of the columns.
mod of {
    use super::{COUNTER, Field, GAUGE, KEY, LIMIT, WORD};

    pub const PXNAME: Field = Field::new(0, "pxname", ("KNS", "str"), "Name of the listener or pool");
    pub const SVNAME: Field = Field::new(1, "svname", ("KNS", "str"), "FRONTEND, BACKEND, or address of the server");
    pub const QCUR: Field = Field::new(2, "qcur", GAUGE, "Connections and requests that wait for a server of the pool");
    pub const SCUR: Field = Field::new(4, "scur", GAUGE, "Connections, of pools and servers also requests, now");
    pub const SLIM: Field = Field::new(6, "slim", LIMIT, "Limit of these");
    pub const STOT: Field = Field::new(7, "stot", COUNTER, "Number of these that have begun");
    pub const BIN: Field = Field::new(8, "bin", COUNTER, "Bytes from clients, of what has ended");
    pub const BOUT: Field = Field::new(9, "bout", COUNTER, "Bytes to clients, of what has ended");
    pub const DREQ: Field = Field::new(10, "dreq", COUNTER, "Connections that the rules have denied");
    pub const EREQ: Field = Field::new(12, "ereq", COUNTER, "Clients that have sent no request that can be served");
    pub const ECON: Field = Field::new(13, "econ", COUNTER, "Connections and requests at which a server has failed");
    pub const STATUS: Field = Field::new(17, "status", ("SGP", "str"), "OPEN, FULL or STOP; UP, DOWN, DRAIN or MAINT");
    pub const WEIGHT: Field =
        Field::new(18, "weight", ("MaP", "u32"), "Weight; of a pool, the sum of those that are up");
    pub const ACT: Field = Field::new(19, "act", GAUGE, "Servers that are up; of a server, whether it is no backup");
    pub const BCK: Field = Field::new(20, "bck", GAUGE, "Backups that are up; of a server, whether it is one");
    pub const PID: Field = Field::new(26, "pid", ("KGP", "u32"), "Number of the worker, which is 1");
    pub const IID: Field = Field::new(27, "iid", KEY, "Number of the listener or pool");
    pub const SID: Field = Field::new(28, "sid", KEY, "Number of the server in its pool");
    pub const LBTOT: Field = Field::new(30, "lbtot", COUNTER, "Times that a server was chosen");
    pub const TYPE: Field = Field::new(32, "type", ("CGS", "u32"), "0: listener, 1: pool, 2: server");
    pub const ADDR: Field = Field::new(73, "addr", WORD, "Address of the server");
    pub const MODE: Field = Field::new(75, "mode", WORD, "http or tcp");
    pub const CONN_TOT: Field = Field::new(79, "conn_tot", COUNTER, "Connections that have begun");
    pub const UWEIGHT: Field = Field::new(99, "uweight", ("MaP", "u32"), "Weight");
}

/// What a field has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Number(u64),
    Text(String),
}

impl From<u64> for Value {
    fn from(n: u64) -> Value {
        Value::Number(n)
    }
}

impl From<u32> for Value {
    fn from(n: u32) -> Value {
        Value::Number(n.into())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl Value {
    pub fn text(&self) -> String {
        match self {
            Value::Number(n) => n.to_string(),
            Value::Text(text) => text.clone(),
        }
    }
}

/// A field with its value.
pub type Filled = (&'static Field, Value);

/// What a row is about. The numbers are those of `type`, and the bits those by which rows are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Frontend,
    Backend,
    Server,
}

/// A line of `show stat`.
#[derive(Debug)]
pub struct Row {
    kind: Kind,
    iid: u32,
    sid: u32,
    /// By ascending place.
    fields: Vec<Filled>,
}

/// A listener, a pool, or both by one name, as a section `listen` of HAProxy has them. HAProxy's numbers of these begin with 2.
#[derive(Debug)]
pub struct Proxy<'a> {
    pub iid: u32,
    pub name: &'a str,
    pub listener: Option<&'a ListenerValues>,
    pub pool: Option<&'a PoolValues>,
}

impl Proxy<'_> {
    pub fn is(&self, name: &Name) -> bool {
        match name {
            Name::Called(name) => self.name == name,
            Name::Numbered(iid) => self.iid == *iid,
        }
    }
}

/// Returns listeners and pools with their numbers: listeners as the configuration has them, then pools by name.
pub fn proxies<'a>(listeners: &'a [ListenerValues], pools: &'a [PoolValues]) -> Vec<Proxy<'a>> {
    let with_both = |listener: &'a ListenerValues| {
        let pool = pools.iter().find(|pool| pool.name == listener.name);
        (&*listener.name, Some(listener), pool)
    };
    let has_none = |pool: &&PoolValues| !listeners.iter().any(|listener| listener.name == pool.name);
    let alone = pools.iter().filter(has_none).map(|pool| (&*pool.name, None, Some(pool)));
    let all = listeners.iter().map(with_both).chain(alone);
    (2..).zip(all).map(|(iid, (name, listener, pool))| Proxy { iid, name, listener, pool }).collect()
}

/// What is the same for all rows.
#[derive(Debug, Clone, Copy)]
pub struct Whole {
    /// Limit of connections on all listeners together.
    pub max_connections: u32,
    /// No client is accepted any more.
    pub is_stopping: bool,
}

/// Returns the rows that are asked for.
pub fn rows(proxies: &[Proxy<'_>], whole: Whole, asked: &Stat) -> Vec<Row> {
    let mut rows = Vec::new();
    for proxy in proxies.iter().filter(|proxy| asked.of.as_ref().is_none_or(|name| proxy.is(name))) {
        let has = |kind: Kind| asked.kinds & 1 << kind as u32 != 0;
        let is_wanted = |sid: u32| asked.sid.is_none_or(|wanted| wanted == sid);
        if let Some(listener) = proxy.listener.filter(|_| has(Kind::Frontend) && is_wanted(0)) {
            rows.push(frontend(proxy.iid, listener, whole));
        }
        let Some(pool) = proxy.pool else { continue };
        for (sid, member) in (1..).zip(&pool.members).filter(|(sid, _)| has(Kind::Server) && is_wanted(*sid)) {
            let status = status(member);
            let is_left_out = (asked.only_up && status != "UP") || (asked.no_maint && status == "MAINT");
            rows.extend((!is_left_out).then(|| server((proxy.iid, sid), &pool.name, member)));
        }
        let is_left_out = asked.only_up && !is_up(pool);
        if has(Kind::Backend) && is_wanted(0) && !is_left_out {
            rows.push(backend(proxy.iid, pool));
        }
    }
    rows
}

fn is_up(pool: &PoolValues) -> bool {
    pool.members.iter().any(|member| member.state == "up")
}

/// Returns the state of a server in HAProxy's words.
pub fn status(member: &MemberValues) -> &'static str {
    match member.state {
        "up" => "UP",
        "drained" => "DRAIN",
        "maintenance" => "MAINT",
        _ => "DOWN", // by checks, or out after failures
    }
}

fn frontend(iid: u32, listener: &ListenerValues, whole: Whole) -> Row {
    let is_http = listener.protocol == "http";
    let limit = listener.max_connections.unwrap_or(u32::MAX).min(whole.max_connections);
    let status = match listener.live {
        _ if whole.is_stopping || listener.is_paused => "STOP",
        live if live >= limit => "FULL",
        _ => "OPEN",
    };
    let ended = |how: &str| listener.totals.ended.get(how).copied().unwrap_or(0);
    let mut fields: Vec<Filled> = vec![
        (&of::PXNAME, (&*listener.name).into()),
        (&of::SVNAME, "FRONTEND".into()),
        (&of::SCUR, listener.live.into()),
        (&of::SLIM, limit.into()),
        (&of::STOT, listener.begun.into()),
        (&of::BIN, listener.totals.bytes_up.into()),
        (&of::BOUT, listener.totals.bytes_down.into()),
    ];
    // with HTTP, replies that a filter has denied are among them
    fields.extend((!is_http).then(|| (&of::DREQ, ended("denied").into())));
    fields.extend([
        (&of::EREQ, ended("bad-request").into()),
        (&of::STATUS, status.into()),
        (&of::PID, 1_u32.into()),
        (&of::IID, iid.into()),
        (&of::SID, 0_u32.into()),
        (&of::TYPE, (Kind::Frontend as u32).into()),
        (&of::MODE, if is_http { "http" } else { "tcp" }.into()),
        (&of::CONN_TOT, listener.begun.into()),
    ]);
    Row { kind: Kind::Frontend, iid, sid: 0, fields }
}

fn backend(iid: u32, pool: &PoolValues) -> Row {
    let sum = |of: fn(&MemberValues) -> u64| pool.members.iter().map(of).sum::<u64>();
    let up = |backup: bool| pool.members.iter().filter(move |member| member.state == "up" && member.backup == backup);
    let (active, backups) = (up(false).count() as u64, up(true).count() as u64);
    // backups have their share only if there is nobody else
    let weight = up(active == 0).map(|member| u64::from(member.weight)).sum::<u64>();
    let fields: Vec<Filled> = vec![
        (&of::PXNAME, (&*pool.name).into()),
        (&of::SVNAME, "BACKEND".into()),
        (&of::QCUR, pool.waiting.into()),
        (&of::SCUR, sum(|member| member.connections.into()).into()),
        (&of::STOT, sum(|member| member.chosen).into()),
        (&of::ECON, sum(|member| member.failed).into()),
        (&of::STATUS, if is_up(pool) { "UP" } else { "DOWN" }.into()),
        (&of::WEIGHT, weight.into()),
        (&of::ACT, active.into()),
        (&of::BCK, backups.into()),
        (&of::PID, 1_u32.into()),
        (&of::IID, iid.into()),
        (&of::SID, 0_u32.into()),
        (&of::LBTOT, sum(|member| member.chosen).into()),
        (&of::TYPE, (Kind::Backend as u32).into()),
    ];
    Row { kind: Kind::Backend, iid, sid: 0, fields }
}

fn server((iid, sid): (u32, u32), pool: &str, member: &MemberValues) -> Row {
    let mut fields: Vec<Filled> = vec![
        (&of::PXNAME, pool.into()),
        (&of::SVNAME, (&*member.address).into()),
        (&of::SCUR, member.connections.into()),
    ];
    fields.extend(member.max_connections.map(|most| (&of::SLIM, most.into())));
    fields.extend([
        (&of::STOT, member.chosen.into()),
        (&of::ECON, member.failed.into()),
        (&of::STATUS, status(member).into()),
        (&of::WEIGHT, member.weight.into()),
        (&of::ACT, u32::from(!member.backup).into()),
        (&of::BCK, u32::from(member.backup).into()),
        (&of::PID, 1_u32.into()),
        (&of::IID, iid.into()),
        (&of::SID, sid.into()),
        (&of::LBTOT, member.chosen.into()),
        (&of::TYPE, (Kind::Server as u32).into()),
        (&of::ADDR, (&*member.address).into()),
        (&of::UWEIGHT, member.weight.into()),
    ]);
    Row { kind: Kind::Server, iid, sid, fields }
}

/// Returns what stands before the first row.
pub fn begin(form: Form) -> String {
    match form.format {
        Format::Plain => format!("# {},\n", COLUMNS.join(",")),
        Format::Typed => String::new(),
        Format::Json => "[".into(),
    }
}

/// Returns what stands behind the last one.
pub fn end(form: Form) -> &'static str {
    if form.format == Format::Json { "]\n" } else { "" }
}

impl Row {
    /// Writes it. `is_first`: nothing stands before it.
    pub fn write(&self, form: Form, is_first: bool) -> String {
        match form.format {
            Format::Plain => self.csv(),
            Format::Typed => {
                let letter = ["F", "B", "S"][self.kind as usize];
                let before = format!("{letter}.{}.{}.", self.iid, self.sid);
                self.fields.iter().map(|filled| format!("{before}{}", typed(filled, form))).collect()
            }
            Format::Json => {
                let kind = ["Frontend", "Backend", "Server"][self.kind as usize];
                let about = json!({ "objType": kind, "proxyId": self.iid, "id": self.sid });
                let fields: Vec<_> = self.fields.iter().map(|filled| in_json(filled, about.clone())).collect();
                format!("{}[{}]", if is_first { "" } else { "," }, fields.join(","))
            }
        }
    }

    fn csv(&self) -> String {
        let mut line = String::new();
        let mut at = 0;
        for (field, value) in &self.fields {
            line.extend(std::iter::repeat_n(',', field.at - at));
            at = field.at;
            match value {
                Value::Number(n) => {
                    let _ = write!(line, "{n}"); // a String takes everything
                }
                // as RFC 4180 has it
                Value::Text(text) if text.contains([',', '"', '\n', '\r']) => {
                    line.extend(["\"", &text.replace('"', "\"\""), "\""]);
                }
                Value::Text(text) => line.push_str(text),
            }
        }
        line.extend(std::iter::repeat_n(',', COLUMNS.len() - at));
        line.push('\n');
        line
    }
}

/// Writes a field in the typed format, without what stands before it.
pub fn typed((field, value): &Filled, form: Form) -> String {
    let about = if form.described { format!(":\"{}\"", field.about) } else { String::new() };
    format!("{}.{}.1:{}:{}:{}{about}\n", field.at, field.name, field.tags, field.kind, value.text())
}

/// Writes a field in lines of `NAME: VALUE`.
pub fn plain((field, value): &Filled, form: Form) -> String {
    let about = if form.described { format!(":\"{}\"", field.about) } else { String::new() };
    format!("{}: {}{about}\n", field.name, value.text())
}

/// Writes a field as an object, with what it has besides.
pub fn in_json((field, value): &Filled, mut object: serde_json::Value) -> String {
    let tag = |at: usize| match (at, field.tags.as_bytes()[at]) {
        (0, b'M') => "Metric",
        (0, b'S') => "Status",
        (0, b'K') => "Key",
        (0, b'C') => "Config",
        (0, _) => "Product",
        (1, b'a') => "Avg",
        (1, b'C') => "Counter",
        (1, b'D') => "Duration",
        (1, b'G') => "Gauge",
        (1, b'L') => "Limit",
        (1, b'N') => "Name",
        (1, _) => "Output",
        (_, b'P') => "Process",
        _ => "Service",
    };
    let written = match value {
        Value::Number(n) => json!({ "type": field.kind, "value": n }),
        Value::Text(text) => json!({ "type": field.kind, "value": text }),
    };
    object["field"] = json!({ "pos": field.at, "name": field.name });
    object["processNum"] = 1.into();
    object["tags"] = json!({ "origin": tag(0), "nature": tag(1), "scope": tag(2) });
    object["value"] = written;
    object.to_string()
}

#[cfg(test)]
#[path = "figures_tests.rs"]
mod tests;
