//! The access log: one line for each connection that has ended and for each HTTP request, as text or JSON.
//!
//! Lines go through a bounded queue to a writer thread. If the disk or pipe does not accept them,
//! the queue fills up; further lines are dropped and counted. The log never delays a connection. docs/access-log.md describes
//! the fields.

use crate::{commands::Command, fault::Fault, log::complaints::Complaints, room::can_have};
use longsplice_engine::{Ended, Pair, PathFinding, Refusal};
use nix::{
    errno::Errno,
    fcntl, libc,
    sys::stat::{SFlag, fstat},
};
use serde::{Deserialize, Serialize, Serializer};
use std::{
    fmt::{self, Write as _},
    fs::{File, OpenOptions},
    io::{self, Write as _},
    net::SocketAddr,
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Capacity of the queue in lines: usually two megabytes, and at most about twenty.
const QUEUE: usize = 8192;
/// Size in bytes at which a batch is written.
const BATCH: usize = 64 * 1024;
/// Time for which the writer collects more lines after the first one. Waking the writer for each line costs more
/// than all the rest of its work. With this delay, the queue still has room for more than a million lines a second.
const GATHER: Duration = Duration::from_millis(5);

/// Format of a line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// `TIME key=value ...`, values quoted where they have to be.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Destination and format of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// Format of a line.
    pub format: LogFormat,
    /// Destination.
    pub to: LogTarget,
}

/// Destination of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard output: `-`.
    #[default]
    Stdout,
    /// Append to this file.
    File(PathBuf),
    /// No log: `off`.
    Off,
}

impl fmt::Display for LogTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogTarget::Stdout => f.write_str("on standard output"),
            LogTarget::File(path) => path.display().fmt(f),
            LogTarget::Off => f.write_str("off"),
        }
    }
}

impl LogTarget {
    /// Returns the path of the file, if lines go to one.
    pub(crate) fn file_mut(&mut self) -> Option<&mut PathBuf> {
        if let LogTarget::File(path) = self { Some(path) } else { None }
    }
}

impl From<&Path> for LogTarget {
    /// The path `off` means no log; write `./off` for a file of that name.
    fn from(path: &Path) -> LogTarget {
        match path.to_str() {
            Some("-") => LogTarget::Stdout,
            Some("off") => LogTarget::Off,
            _ => LogTarget::File(path.into()),
        }
    }
}

/// Contents of a line.
#[derive(Debug, Clone, Serialize)]
pub struct Record {
    /// Time at which the connection ended: RFC 3339, UTC, milliseconds. Empty until the line is written.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub time: String,
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
    /// `auth-failed`, `unreachable`, `bad-reply`, `no-route`, `no-server`, `timeout`, `forbidden`.
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
    /// What was measured, if the refusal is `path`.
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

fn name<S: Serializer>(name: &Option<Arc<str>>, to: S) -> Result<S::Ok, S::Error> {
    name.as_deref().serialize(to)
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
            time: String::new(),
            id: None,
            listener,
            name: None,
            listen: listen.into(),
            client,
            server: None,
            target: None,
            pool: None,
            member: None,
            route: None,
            command: None,
            user: None,
            method: None,
            uri: None,
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

    fn line(&self, format: LogFormat) -> String {
        let mut line = match format {
            LogFormat::Text => self.text(),
            // A record consists of strings, numbers and options of them, so JSON can hold all of it.
            LogFormat::Json => serde_json::to_string(self).unwrap_or_default(),
        };
        line.push('\n');
        line
    }

    fn text(&self) -> String {
        let mut t = String::with_capacity(512);
        t.push_str(&self.time);
        let t = &mut t;
        match self.id {
            Some(id) => number(t, "id", id),
            None => plain(t, "id", "-"),
        }
        plain(t, "listener", self.listener);
        if let Some(name) = &self.name {
            plain(t, "name", name);
        }
        match self.listen {
            Some(listen) => address(t, "listen", listen),
            None => plain(t, "listen", "-"),
        }
        address(t, "client", self.client);
        match self.server {
            Some(server) => address(t, "server", server),
            None => plain(t, "server", "-"),
        }
        text(t, "target", self.target.as_deref().unwrap_or("-"));
        for (key, of) in [("pool", &self.pool), ("member", &self.member)] {
            of.iter().for_each(|of| text(t, key, of));
        }
        if let Some(route) = &self.route {
            text(t, "route", route);
        }
        if let Some(command) = self.command {
            plain(t, "command", command.as_str());
        }
        text(t, "user", self.user.as_deref().unwrap_or("-"));
        if let Some(method) = &self.method {
            text(t, "method", method);
        }
        if let Some(uri) = &self.uri {
            text(t, "uri", uri);
        }
        if let Some(status) = self.status {
            number(t, "status", status.into());
        }
        if let Some(rule) = &self.reply_rule {
            text(t, "reply_rule", rule);
        }
        if let Some(cache) = self.cache {
            plain(t, "cache", cache);
        }
        plain(t, "how", self.how);
        number(t, "bytes_up", self.bytes_up);
        number(t, "bytes_down", self.bytes_down);
        number(t, "spliced_up", self.spliced_up);
        number(t, "spliced_down", self.spliced_down);
        number(t, "splices", self.splices.into());
        if let Some(Datagrams { up, down, dropped }) = self.datagrams {
            number(t, "datagrams_up", up);
            number(t, "datagrams_down", down);
            number(t, "datagrams_dropped", dropped);
        }
        text(t, "refusal", self.refusal.as_deref().unwrap_or("-"));
        if let Some(path) = &self.path {
            text(t, "path", &path.to_string());
        }
        if let Some(processes) = self.processes {
            number(t, "processes", processes.into());
        }
        for (key, of) in [("connect_ms", self.connect_ms), ("reply_ms", self.reply_ms)] {
            of.iter().for_each(|of| number(t, key, *of));
        }
        number(t, "duration_ms", self.duration_ms);
        std::mem::take(t)
    }
}

// Fields of a line. They are written for each request, so they avoid the formatter, which takes ten times as long.

fn plain(t: &mut String, key: &str, value: &str) {
    for part in [" ", key, "=", value] {
        t.push_str(part);
    }
}

fn number(t: &mut String, key: &str, n: u64) {
    plain(t, key, itoa::Buffer::new().format(n));
}

fn address(t: &mut String, key: &str, a: SocketAddr) {
    let SocketAddr::V4(v4) = a else { return plain(t, key, &a.to_string()) };
    plain(t, key, "");
    for (byte, end) in v4.ip().octets().into_iter().zip(['.', '.', '.', ':']) {
        t.push_str(itoa::Buffer::new().format(byte));
        t.push(end);
    }
    t.push_str(itoa::Buffer::new().format(v4.port()));
}

/// Writes a value that clients or servers chose; quoted if it contains special characters.
fn text(t: &mut String, key: &str, value: &str) {
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_graphic() && !b"\"\\=".contains(&b)) {
        return plain(t, key, value);
    }
    plain(t, key, "");
    let _ = write!(t, "{value:?}"); // writing to a String cannot fail
}

/// RFC 3339 in UTC with milliseconds. The calendar follows Howard Hinnant's `civil_from_days`:
/// years of the era begin in March, so that the leap day comes last.
pub(crate) fn rfc3339(t: SystemTime) -> String {
    let t = t.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, s) = (t.as_secs() / 86400, t.as_secs() % 86400);
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + u64::from(month <= 2);
    let (h, m, s, ms) = (s / 3600, s / 60 % 60, s % 60, u64::from(t.subsec_millis()));
    let mut text = String::with_capacity(24);
    let parts = [(4, year), (2, month), (2, day), (2, h), (2, m), (2, s), (3, ms)];
    for ((width, n), end) in parts.into_iter().zip(['-', '-', 'T', ':', ':', '.', 'Z']) {
        let digits = (0..width).rev().map(|at| b'0' + (n / 10_u64.pow(at) % 10) as u8);
        text.extend(digits.map(char::from).chain([end]));
    }
    text
}

enum Message {
    Line(String),
    Wake,
    Flush(Sender<()>),
}

#[derive(Debug, Default)]
struct LogState {
    dropped: AtomicU64,
    /// Lines that are accepted and neither written nor dropped.
    waiting: AtomicU64,
    complaints: Complaints,
}

/// The access log. Where its lines go may change.
#[derive(Debug)]
pub struct AccessLog {
    now: RwLock<Arc<OpenLog>>,
    shared: Arc<LogState>,
}

/// An open destination. When the last user of it is gone, its writer writes what it has got, and ends.
#[derive(Debug)]
pub(crate) struct OpenLog {
    format: LogFormat,
    /// Queue to the writer, if there is a log.
    queue: Option<SyncSender<Message>>,
    reopen: Arc<AtomicBool>,
}

impl AccessLog {
    /// Opens the file and starts the writer. Fails if the file cannot be opened or the thread not started.
    pub fn open(config: &LogConfig) -> io::Result<AccessLog> {
        let shared = Arc::new(LogState::default());
        let now = RwLock::new(Arc::new(OpenLog::open(config, &shared)?));
        Ok(AccessLog { now, shared })
    }

    /// Opens another destination, for [`AccessLog::switch_to`].
    pub(crate) fn prepare(&self, config: &LogConfig) -> io::Result<OpenLog> {
        OpenLog::open(config, &self.shared)
    }

    /// Sends all further lines there.
    pub(crate) fn switch_to(&self, next: OpenLog) {
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
    }

    fn now(&self) -> Arc<OpenLog> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks whether the file can be written, without creating it.
    pub(crate) fn check(config: &LogConfig) -> io::Result<()> {
        let LogTarget::File(path) = &config.to else { return Ok(()) };
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match Out::file(path, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && dir.is_dir() => can_have(dir),
            opened => opened.map(drop),
        }
    }

    /// Queues a line, or counts it as dropped if the queue is full. Never waits.
    pub fn write(&self, mut record: Record) {
        let now = self.now();
        let Some(queue) = &now.queue else { return };
        record.time = rfc3339(SystemTime::now());
        self.shared.waiting.fetch_add(1, Relaxed);
        if queue.try_send(Message::Line(record.line(now.format))).is_err() {
            self.shared.waiting.fetch_sub(1, Relaxed);
            self.shared.dropped.fetch_add(1, Relaxed);
            self.shared.complaints.tell("cannot write the access log as fast as connections end: lines are dropped");
        }
    }

    /// Returns the number of lines that are not written yet.
    pub fn waiting(&self) -> u64 {
        self.shared.waiting.load(Relaxed)
    }

    /// Reopens the file before the next line, after log rotation has renamed it.
    pub fn reopen(&self) {
        let now = self.now();
        now.reopen.store(true, Relaxed);
        // If the queue is full, the writer is awake anyway.
        let _ = now.queue.as_ref().map(|q| q.try_send(Message::Wake));
    }

    /// Returns the number of lines that were not written.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Relaxed)
    }

    /// Waits until all lines so far are written, for `limit` at most; false if that was not enough. Blocks the thread.
    pub fn flush(&self, limit: Duration) -> bool {
        let now = self.now();
        let Some(queue) = &now.queue else { return true };
        let end = Instant::now() + limit;
        let (done, wait) = channel();
        let mut message = Message::Flush(done);
        loop {
            message = match queue.try_send(message) {
                Ok(()) => return wait.recv_timeout(end.saturating_duration_since(Instant::now())).is_ok(),
                Err(TrySendError::Full(m)) if Instant::now() < end => m,
                Err(_) => return false,
            };
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl OpenLog {
    fn open(config: &LogConfig, shared: &Arc<LogState>) -> io::Result<OpenLog> {
        let mut log = OpenLog { format: config.format, queue: None, reopen: Arc::default() };
        if let Some(out) = Out::open(&config.to)? {
            let (queue, lines) = sync_channel(QUEUE);
            let (shared, reopen) = (shared.clone(), log.reopen.clone());
            let write = move || write_lines(&lines, out, &shared, &reopen);
            thread::Builder::new().name("access-log".into()).spawn(write)?;
            log.queue = Some(queue);
        }
        Ok(log)
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        // Write the last lines of a program that ends. A pipe without a reader must not keep it from ending.
        self.flush(Duration::from_secs(1));
    }
}

fn write_lines(lines: &Receiver<Message>, mut out: Out, shared: &LogState, reopen: &AtomicBool) {
    let (mut failing, mut missing) = (false, 0);
    while let Ok(first) = lines.recv() {
        if matches!(first, Message::Line(_)) {
            thread::sleep(GATHER);
        }
        let (mut batch, mut flushed) = (String::new(), Vec::new());
        let mut next = Some(first);
        while let Some(message) = next {
            match message {
                Message::Line(line) => batch.push_str(&line),
                Message::Wake => {}
                Message::Flush(done) => flushed.push(done),
            }
            next = if batch.len() < BATCH { lines.try_recv().ok() } else { None };
        }
        if reopen.swap(false, Relaxed) {
            out.reopen();
        }
        let written = out.write_all(batch.as_bytes(), |lines| {
            shared.waiting.fetch_sub(lines, Relaxed);
        });
        let dropped = shared.dropped.load(Relaxed);
        match written {
            Ok(()) if batch.is_empty() => {}
            Ok(()) => {
                // as long as the queue is nearly full, it does not keep up yet
                if dropped > missing && shared.waiting.load(Relaxed) < QUEUE as u64 / 2 {
                    tracing::info!("the access log is written again; {} lines are missing", dropped - missing);
                    missing = dropped;
                }
                failing = false;
            }
            Err((lost, e)) => {
                shared.waiting.fetch_sub(lost, Relaxed);
                shared.dropped.fetch_add(lost, Relaxed);
                if !failing {
                    tracing::error!("cannot write the access log: {e}; lines are dropped until it works again");
                }
                failing = true;
            }
        }
        // The waiting thread may have timed out by now.
        for done in flushed {
            let _ = done.send(());
        }
    }
}

enum Out {
    Stdout,
    File(PathBuf, File),
}

impl Out {
    fn open(to: &LogTarget) -> io::Result<Option<Out>> {
        Ok(match to {
            LogTarget::Off => None,
            LogTarget::Stdout => Some(Out::Stdout),
            LogTarget::File(path) => Some(Out::File(path.into(), Out::file(path, true)?)),
        })
    }

    /// Opens the file. Does not wait for somebody to read a FIFO: the program could not be stopped meanwhile.
    fn file(path: &Path, create: bool) -> io::Result<File> {
        // Other users of the machine must not read which client connected where.
        let mut options = OpenOptions::new();
        options.append(true).create(create).mode(0o640).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(|e| match e.raw_os_error() {
            Some(libc::ENXIO) => io::Error::other("it is a FIFO that nobody reads; start its reader first"),
            _ => e,
        })?;
        // The writer may wait.
        let flags = fcntl::fcntl(file.as_fd(), fcntl::FcntlArg::F_GETFL)?;
        let flags = fcntl::OFlag::from_bits_retain(flags) - fcntl::OFlag::O_NONBLOCK;
        fcntl::fcntl(file.as_fd(), fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(file)
    }

    fn reopen(&mut self) {
        let Out::File(path, file) = self else { return };
        match Out::file(path, true) {
            Ok(new) => *file = new,
            Err(e) => {
                tracing::error!("cannot reopen the access log {}: {e}; still writing to the old file", path.display());
            }
        }
    }

    /// Writes complete lines. `written` is told how many have been written as it goes on. An error comes with the number of
    /// lines that were not.
    fn write_all(&mut self, mut bytes: &[u8], written: impl Fn(u64)) -> Result<(), (u64, io::Error)> {
        let lines = |bytes: &[u8]| bytes.iter().filter(|b| **b == b'\n').count() as u64;
        let most = self.piece();
        while !bytes.is_empty() {
            let piece = lines_within(bytes, most);
            let n = match self.write(piece) {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                Err(e) if e.raw_os_error() == Some(Errno::EINTR as i32) => continue,
                done => done,
            };
            let n = n.map_err(|e| (lines(bytes), e))?;
            written(lines(&bytes[..n]));
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Returns how many bytes to write at a time. A pipe takes a call that is not longer as a whole or not at all (POSIX, `PIPE_BUF`),
    /// so it is known what has been written when it is full.
    fn piece(&self) -> usize {
        let of = match self {
            Out::Stdout => fstat(io::stdout()),
            Out::File(_, file) => fstat(file),
        };
        let is_file = of.is_ok_and(|of| SFlag::from_bits_truncate(of.st_mode).contains(SFlag::S_IFREG));
        if is_file { usize::MAX } else { libc::PIPE_BUF }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Out::Stdout => {
                let mut out = io::stdout().lock();
                let n = out.write(bytes)?;
                out.flush()?;
                Ok(n)
            }
            Out::File(_, file) => file.write(bytes),
        }
    }
}

/// Returns as many of these lines as fit into `most` bytes, and one at least.
fn lines_within(lines: &[u8], most: usize) -> &[u8] {
    if lines.len() <= most {
        return lines;
    }
    let last = lines[..most].iter().rposition(|b| *b == b'\n');
    let end = last.or_else(|| lines.iter().position(|b| *b == b'\n'));
    end.map_or(lines, |end| &lines[..=end])
}

#[cfg(test)]
#[path = "access_log_tests.rs"]
mod tests;
