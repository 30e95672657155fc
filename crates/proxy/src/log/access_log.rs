//! The access log: one line for each connection that has ended and for each HTTP request, in a format of choice; if asked
//! for, also for connections that begin, and for those that go on.
//!
//! Lines go through a bounded queue to a writer thread. If a disk, a pipe or a socket does not accept them,
//! the queue fills up; further lines are dropped and counted. The log never delays a connection. docs/access-log.md describes
//! the fields.

pub use super::record::{Datagrams, Event, Extra, Outcome, Record, cut, ms_since};
use super::{
    batch::Batch,
    complaints::Complaints,
    out::Out,
    sockets::{Connection, Envelope, Receiver, Wrote},
    template::Template,
};
use crate::room::can_have;
use longsplice_engine::EndReason;
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver as Lines, Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::sync::watch;

/// Capacity of the queue in lines: usually two megabytes.
const QUEUE: usize = 8192;
/// The same in bytes. Clients choose a part of their lines, and templates may repeat it.
const QUEUE_BYTES: u64 = 32 * 1024 * 1024;
/// Size in bytes at which a batch is written.
const BATCH: usize = 64 * 1024;
/// Time for which the writer collects more lines after the first one. Waking the writer for each line costs more
/// than all the rest of its work. With this delay, the queue still has room for more than a million lines a second.
const GATHER: Duration = Duration::from_millis(5);
/// First and longest pause before a receiver that is away is looked for again; the pause is doubled each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Time for which a writer that nobody sends lines any more waits for its receiver to take what it has.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// Format of a line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// `TIME key=value ...`, values quoted where they have to be.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
    /// Fields at places of a text.
    Template(Arc<Template>),
}

impl LogFormat {
    /// Returns the format that web servers call common.
    pub fn common() -> LogFormat {
        LogFormat::Template(Template::common().into())
    }

    /// Returns the format that web servers call combined.
    pub fn combined() -> LogFormat {
        LogFormat::Template(Template::combined().into())
    }

    /// Returns the line of a record, without its end.
    fn line(&self, record: &Record) -> String {
        match self {
            LogFormat::Text => record.text(),
            // A record consists of strings, numbers and options of them, so JSON can hold all of it.
            LogFormat::Json => serde_json::to_string(record).unwrap_or_default(),
            LogFormat::Template(template) => template.line(record),
        }
    }

    fn has(&self, field: &str) -> bool {
        if let LogFormat::Template(template) = self { template.has(field) } else { false }
    }
}

/// Which parts of requests lines have besides: [`Extra`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wants {
    /// `version`.
    pub version: bool,
    /// `referrer`.
    pub referrer: bool,
    /// `user_agent`.
    pub user_agent: bool,
}

impl Wants {
    fn bits(self) -> u8 {
        u8::from(self.version) | u8::from(self.referrer) << 1 | u8::from(self.user_agent) << 2
    }

    fn of(bits: u8) -> Wants {
        Wants { version: bits & 1 > 0, referrer: bits & 2 > 0, user_agent: bits & 4 > 0 }
    }

    /// Whether it is any of them.
    pub fn any(self) -> bool {
        self.bits() > 0
    }
}

/// Destination and format of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// Format of a line.
    pub format: LogFormat,
    /// Destination.
    pub to: LogTarget,
    /// What lines have besides, whatever the format.
    pub add: Wants,
    /// Connections that begin have lines, too.
    pub begin: bool,
    /// Connections that last have a line each time that so much has passed.
    pub interval: Option<Duration>,
}

impl LogConfig {
    /// Returns whether there are lines that are not about ends.
    pub fn tells_more(&self) -> bool {
        self.begin || self.interval.is_some()
    }

    fn wanted(&self) -> Wants {
        let has = |field| self.format.has(field);
        Wants {
            version: self.add.version || has("version") || has("request"),
            referrer: self.add.referrer || has("referrer"),
            user_agent: self.add.user_agent || has("user_agent"),
        }
    }
}

/// Destination of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard output: `-`.
    #[default]
    Stdout,
    /// Append to this file.
    File(PathBuf),
    /// Another program, by a socket.
    Receiver(Box<Receiver>),
    /// No log: `off`.
    Off,
}

impl fmt::Display for LogTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogTarget::Stdout => f.write_str("on standard output"),
            LogTarget::File(path) => path.display().fmt(f),
            LogTarget::Receiver(to) => to.kind.fmt(f),
            LogTarget::Off => f.write_str("off"),
        }
    }
}

impl LogTarget {
    /// Returns the path of the file or socket, if lines go to one.
    pub(crate) fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            LogTarget::File(path) => Some(path),
            LogTarget::Receiver(to) => to.kind.path_mut(),
            LogTarget::Stdout | LogTarget::Off => None,
        }
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

enum Message {
    Line(Vec<u8>),
    Wake,
    Flush(Sender<()>),
}

/// What all destinations share, those of before included.
#[derive(Debug, Default)]
struct LogState {
    dropped: AtomicU64,
    complaints: Complaints,
    /// Those that are open, or whose writers have not ended.
    open: Mutex<Vec<Weak<Shared>>>,
}

/// What an open destination shares with its writer. Each has its own: one that stands still takes no room from the next one.
#[derive(Debug, Default)]
struct Shared {
    /// Lines that are accepted and neither written nor dropped.
    waiting: AtomicU64,
    /// Size in bytes of those in the queue.
    bytes: AtomicU64,
    dropped: AtomicU64,
    /// The writer has to open the file or connection anew.
    reopen: AtomicBool,
    /// No more lines will come.
    leave: AtomicBool,
    all: Arc<LogState>,
}

impl Shared {
    fn new(all: &Arc<LogState>) -> Arc<Shared> {
        let shared = Arc::new(Shared { all: all.clone(), ..Shared::default() });
        let mut open = all.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|of| of.strong_count() > 0);
        open.push(Arc::downgrade(&shared));
        drop(open);
        shared
    }

    fn written(&self, lines: u64) {
        self.waiting.fetch_sub(lines, Relaxed);
    }

    fn lost(&self, lines: u64) {
        self.waiting.fetch_sub(lines, Relaxed);
        self.missed(lines);
    }

    /// Counts lines that seemed to be written, and were not.
    fn missed(&self, lines: u64) {
        self.dropped.fetch_add(lines, Relaxed);
        self.all.dropped.fetch_add(lines, Relaxed);
    }
}

/// The access log. Where its lines go may change.
#[derive(Debug)]
pub struct AccessLog {
    now: RwLock<Arc<OpenLog>>,
    /// What of requests is noted for it.
    wanted: AtomicU8,
    /// Whether connections that begin have lines.
    begin: AtomicBool,
    /// How often those that go on have.
    interval: watch::Sender<Option<Duration>>,
    all: Arc<LogState>,
}

/// An open destination. When the last user of it is gone, its writer writes what it has got, and ends.
#[derive(Debug)]
pub(crate) struct OpenLog {
    config: LogConfig,
    /// What comes around a line; nothing but its end in a file.
    envelope: Option<Envelope>,
    /// Queue to the writer, if there is a log.
    queue: Option<SyncSender<Message>>,
    shared: Arc<Shared>,
}

impl Drop for OpenLog {
    fn drop(&mut self) {
        self.shared.leave.store(true, Relaxed);
    }
}

impl AccessLog {
    /// Opens the file and starts the writer. Fails if the file cannot be opened or the thread not started.
    pub fn open(config: &LogConfig) -> io::Result<AccessLog> {
        let all = Arc::default();
        let log = AccessLog {
            now: RwLock::new(Arc::new(OpenLog::open(config, &all)?)),
            wanted: AtomicU8::default(),
            begin: AtomicBool::default(),
            interval: watch::Sender::default(),
            all,
        };
        log.settle(config);
        Ok(log)
    }

    /// Opens another destination, for [`AccessLog::switch_to`].
    pub(crate) fn prepare(&self, config: &LogConfig) -> io::Result<OpenLog> {
        OpenLog::open(config, &self.all)
    }

    /// Sends all further lines there.
    pub(crate) fn switch_to(&self, next: OpenLog) {
        self.settle(&next.config);
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
    }

    fn settle(&self, config: &LogConfig) {
        let is_on = config.to != LogTarget::Off;
        self.wanted.store(if is_on { config.wanted().bits() } else { 0 }, Relaxed);
        self.begin.store(is_on && config.begin, Relaxed);
        let interval = config.interval.filter(|_| is_on);
        self.interval.send_if_modified(|now| std::mem::replace(now, interval) != interval);
    }

    fn now(&self) -> Arc<OpenLog> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns which parts of requests lines have besides.
    pub fn wanted(&self) -> Wants {
        Wants::of(self.wanted.load(Relaxed))
    }

    /// Returns whether connections that begin have lines.
    pub fn tells_begins(&self) -> bool {
        self.begin.load(Relaxed)
    }

    /// Tells how often connections that go on have lines.
    pub(crate) fn interval(&self) -> watch::Receiver<Option<Duration>> {
        self.interval.subscribe()
    }

    /// Checks whether the file can be written, without creating it, and what is known of other destinations.
    pub(crate) fn check(config: &LogConfig) -> io::Result<()> {
        let path = match &config.to {
            LogTarget::File(path) => path,
            LogTarget::Receiver(to) => return to.kind.check(),
            LogTarget::Stdout | LogTarget::Off => return Ok(()),
        };
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match Out::file(path, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && dir.is_dir() => can_have(dir),
            opened => opened.map(drop),
        }
    }

    /// Queues a line, or counts it as dropped if the queue is full. Never waits. Leaves out what this log is not to have.
    pub fn write(&self, mut record: Record) {
        let now = self.now();
        let OpenLog { queue: Some(queue), shared, .. } = &*now else { return };
        if !now.has(&record) {
            return;
        }
        record.time = Some(SystemTime::now());
        let line = now.message(&record);
        let size = line.len() as u64;
        shared.waiting.fetch_add(1, Relaxed);
        let has_room = shared.bytes.fetch_add(size, Relaxed) + size <= QUEUE_BYTES;
        if !has_room || queue.try_send(Message::Line(line)).is_err() {
            shared.bytes.fetch_sub(size, Relaxed);
            shared.lost(1);
            shared.all.complaints.tell("the access log does not take lines as fast as they come: lines are dropped");
        }
    }

    /// Returns the number of lines that are not written yet.
    pub fn waiting(&self) -> u64 {
        let open = self.all.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter_map(Weak::upgrade).map(|of| of.waiting.load(Relaxed)).sum()
    }

    /// Returns whether lines that can be left out should be: those that have to be written may soon find no room.
    pub(crate) fn is_busy(&self) -> bool {
        let Shared { waiting, bytes, .. } = &*self.now().shared;
        waiting.load(Relaxed) > QUEUE as u64 / 2 || bytes.load(Relaxed) > QUEUE_BYTES / 2
    }

    /// Reopens the file before the next line, after log rotation has renamed it.
    pub fn reopen(&self) {
        let now = self.now();
        now.shared.reopen.store(true, Relaxed);
        // If the queue is full, the writer is awake anyway.
        let _ = now.queue.as_ref().map(|q| q.try_send(Message::Wake));
    }

    /// Returns the number of lines that were not written.
    pub fn dropped(&self) -> u64 {
        self.all.dropped.load(Relaxed)
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
    fn open(config: &LogConfig, all: &Arc<LogState>) -> io::Result<OpenLog> {
        let mut log = OpenLog { config: config.clone(), envelope: None, queue: None, shared: Shared::new(all) };
        if let LogTarget::Receiver(to) = &config.to {
            to.kind.check()?;
            log.envelope = Some(Envelope::new(to));
        }
        if let Some(out) = open(&config.to)? {
            let (queue, lines) = sync_channel(QUEUE);
            let writer = Writer::new(out, log.shared.clone());
            thread::Builder::new().name("access-log".into()).spawn(move || writer.run(&lines))?;
            log.queue = Some(queue);
        }
        Ok(log)
    }

    /// Returns whether a record has a line here. What it is about may have been wanted by the log of a moment ago.
    fn has(&self, record: &Record) -> bool {
        match (record.event, &self.config.format) {
            (Some(Event::Begin), _) => self.config.begin,
            (Some(Event::Alive), _) => self.config.interval.is_some(),
            // it would look like the end, which the next process tells of
            (None, LogFormat::Template(template)) if record.how == EndReason::Left.as_str() => template.has("how"),
            (None, _) => true,
        }
    }

    /// Returns what the destination gets of a record.
    fn message(&self, record: &Record) -> Vec<u8> {
        let mut line = self.config.format.line(record);
        match &self.envelope {
            Some(envelope) => envelope.with(record, &line),
            None => {
                line.push('\n');
                line.into_bytes()
            }
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        // Write the last lines of a program that ends. A pipe without a reader must not keep it from ending.
        self.flush(Duration::from_secs(1));
    }
}

fn open(to: &LogTarget) -> io::Result<Option<Out>> {
    Ok(match to {
        LogTarget::Off => None,
        LogTarget::Stdout => Some(Out::Stdout),
        LogTarget::File(path) => Some(Out::File(path.into(), Out::file(path, true)?)),
        LogTarget::Receiver(to) => Some(Out::Socket(Connection::new(to.kind.clone()))),
    })
}

/// Writes lines in a thread of its own.
struct Writer {
    out: Out,
    shared: Arc<Shared>,
    /// The last attempt has failed, or has just before.
    failing: bool,
    /// When a receiver was last found to be away.
    away: Option<Instant>,
    /// Until when a receiver is waited for, once no more lines come.
    until: Option<Instant>,
    /// Number of lines that were dropped when that was last said.
    missing: u64,
}

impl Writer {
    fn new(out: Out, shared: Arc<Shared>) -> Writer {
        Writer { out, shared, failing: false, away: None, until: None, missing: 0 }
    }

    fn run(mut self, lines: &Lines<Message>) {
        // a receiver that is not there is better known before there are lines for it
        self.send(&mut Batch::default());
        while let Ok(first) = lines.recv() {
            if matches!(first, Message::Line(_)) {
                thread::sleep(GATHER);
            }
            let (mut batch, mut flushed) = (Batch::default(), Vec::new());
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    Message::Line(line) => batch.push(&line),
                    Message::Wake => {}
                    Message::Flush(done) => flushed.push(done),
                }
                next = if batch.len() < BATCH { lines.try_recv().ok() } else { None };
            }
            self.shared.bytes.fetch_sub(batch.len() as u64, Relaxed);
            if self.shared.reopen.swap(false, Relaxed) {
                self.out.reopen();
            }
            if batch.left() > 0 {
                self.write(batch);
            }
            // The waiting thread may have timed out by now.
            for done in flushed {
                let _ = done.send(());
            }
        }
        let dropped = self.shared.dropped.load(Relaxed);
        if let (Out::Socket(connection), true) = (&self.out, dropped > self.missing) {
            tracing::warn!("{} lines of the access log to {} are missing", dropped - self.missing, connection.to());
        }
    }

    /// Writes these lines, or counts those that are lost.
    fn write(&mut self, mut batch: Batch) {
        let shared = self.shared.clone();
        let result = match &mut self.out {
            Out::Socket(_) => {
                self.send(&mut batch);
                Ok(())
            }
            out => out.write_all(&mut batch, |lines| shared.written(lines)),
        };
        let left = batch.left();
        shared.lost(left);
        match result {
            Ok(()) if left == 0 => self.works(),
            Ok(()) => {} // it is given up
            Err(e) => {
                if !self.failing {
                    tracing::error!("cannot write the access log: {e}; lines are dropped until it works again");
                }
                self.failing = true;
            }
        }
    }

    fn works(&mut self) {
        // one that comes and goes is not told of each time
        if self.away.is_some_and(|at| at.elapsed() < PAUSE.1) {
            return;
        }
        let dropped = self.shared.dropped.load(Relaxed);
        // as long as the queue is nearly full, it does not keep up yet
        if dropped > self.missing && self.shared.waiting.load(Relaxed) < QUEUE as u64 / 2 {
            tracing::info!("the access log is written again; {} lines are missing", dropped - self.missing);
            self.missing = dropped;
        } else if self.failing && self.away.is_some() {
            tracing::info!("the access log is written again");
        }
        (self.failing, self.away) = (false, None);
    }

    /// Returns whether nobody waits for this receiver any longer, since the log goes elsewhere: not two seconds per batch, but in all.
    fn gives_up(&mut self) -> bool {
        let leaves = self.shared.leave.load(Relaxed);
        leaves && Instant::now() >= *self.until.get_or_insert_with(|| Instant::now() + LEAVES_WITHIN)
    }

    /// Sends these lines to a receiver. While it is away, lines wait here and in the queue; those that find it full are lost. Gives
    /// up only after the log goes elsewhere.
    fn send(&mut self, batch: &mut Batch) {
        let mut pause = PAUSE.0;
        loop {
            let gives_up = self.gives_up();
            let Writer { out: Out::Socket(connection), shared, failing, away, .. } = self else { return };
            if gives_up {
                // of a line that was begun, the rest will not come
                return connection.close();
            }
            match connection.write(batch) {
                Wrote::All => return,
                Wrote::Some(lines) => shared.written(lines),
                Wrote::TooLong => {
                    batch.skip_line();
                    shared.lost(1);
                    let complaint = "a line of the access log is too long for its receiver, and is dropped";
                    shared.all.complaints.tell(complaint);
                }
                Wrote::Away(e, lost) => {
                    shared.missed(lost);
                    if !*failing {
                        tracing::warn!(
                            "cannot send the access log to {}: {e}; {QUEUE} lines wait until it works again, others are dropped",
                            connection.to()
                        );
                    }
                    (*failing, *away) = (true, Some(Instant::now()));
                    if batch.left() == 0 {
                        return;
                    }
                    rest(pause, shared);
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
            // it may stand still for ever, and another one may have its place
            if shared.reopen.swap(false, Relaxed) {
                connection.close();
                batch.repeat_line();
            }
        }
    }
}

/// Waits, for less if the writer is told something.
fn rest(pause: Duration, shared: &Shared) {
    let end = Instant::now() + pause;
    while Instant::now() < end {
        thread::sleep(PAUSE.0);
        if shared.leave.load(Relaxed) || shared.reopen.load(Relaxed) {
            return;
        }
    }
}

#[cfg(test)]
#[path = "access_log_tests.rs"]
pub(in crate::log) mod tests;
