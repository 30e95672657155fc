//! The control socket: a Unix stream socket on which operators ask and the running proxy answers.
//!
//! # Protocol
//! One JSON object per line each way, one answer per request, any number of requests per connection:
//! ```text
//! {"version":1,"ask":"ls"}                        {"version":1,"flows":[...]}
//! {"version":1,"ask":"ls","after":7,"limit":100,"state":"spliced"}   the first 100 of those after number 7
//! {"version":1,"ask":"inspect","id":7}            {"version":1,"flow":{...}}, with all that is known of it (`FlowDetail`)
//! {"version":1,"ask":"trace","id":7,"count":null,"seconds":60}   {"version":1,"segments":[...]}, again and again, at least once a
//! second (`TracedSegment`); then {"version":1,"segments":[],"lost":0}, the number of those that are missing
//! {"version":1,"ask":"counters"}                  {"version":1,"verdicts":{...},"proxy":{...},"listeners":[...]}
//! {"version":1,"ask":"splice","id":7}             {"version":1,"done":true}
//! {"version":1,"ask":"unsplice","id":7}           {"version":1,"done":true}
//! {"version":1,"ask":"stop","drain":30,"flush":false}   {"version":1,"stopping":true,"within":35}, seconds at most but for
//! the rest; then, when all is over, {"version":1,"stopped":true} or an error; then end of stream with the process
//! ```
//! What cannot be done is answered with `{"version":1,"error":"..."}`. `done` means that the flow was told: whether it
//! was spliced, `ls` shows. There are no passwords: the socket has mode 0600, and whoever may open it may do everything.

use crate::{args::TRACE_SECONDS_MAX, paths};
use longsplice_engine::{Command, FlowState, Splicer, TraceError};
use longsplice_proxy::Server;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    fs, io,
    net::Shutdown,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
        unix::net::UnixListener as StdListener,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream, unix::WriteHalf},
    sync::{
        Semaphore,
        mpsc::{self, error::TrySendError},
    },
    time::timeout,
};

/// Of requests and answers; raised when a field changes its meaning. New fields do not raise it.
pub const VERSION: u32 = 1;
/// Flows that are kept in memory for an answer at a time.
pub const PAGE: usize = 500;
/// Longest request in bytes: the longest that makes sense has about a hundred.
const REQUEST: u64 = 4096;
/// Operators and monitors at a time; more are turned away, so that a leak of theirs does not become one of ours.
const CLIENTS: usize = 32;
/// Segments that wait for a client to read them, some 3 MB: one that is slower misses some.
const WAITING: usize = 10_000;
/// A client that says nothing for so long is hung up on.
const SILENCE: Duration = Duration::from_secs(60);
/// A client that does not read its answer for so long, too.
const SLOWNESS: Duration = Duration::from_secs(10);
/// How long flows that were told to end may take to do so, and the access log to be written.
const END: Duration = Duration::from_secs(5);
/// One second more for this many connections.
const ENDS: u64 = 20_000;

/// How long `live` connections take to end, at most.
pub fn end_limit(live: u64) -> Duration {
    END + Duration::from_secs(live / ENDS)
}

/// A request with the version it is written in.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// What is asked.
    #[serde(flatten)]
    pub ask: Ask,
}

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Ask {
    /// Live flows, in the order of their numbers.
    Ls {
        /// Those with higher numbers than this.
        #[serde(default)]
        after: u64,
        /// So many at most; null: all.
        #[serde(default)]
        limit: Option<usize>,
        /// Those in this state; null: in any.
        #[serde(default)]
        state: Option<FlowState>,
    },
    /// One flow in every detail.
    Inspect {
        /// Its number.
        id: u64,
    },
    /// The segments of a flow, as they come.
    Trace {
        /// Its number.
        id: u64,
        /// So many at most; null: all.
        #[serde(default)]
        count: Option<u64>,
        /// For so long, at most [`TRACE_SECONDS_MAX`].
        seconds: u32,
    },
    /// All counters.
    Counters,
    /// Splice a flow.
    Splice {
        /// Its number.
        id: u64,
    },
    /// Take a flow back.
    Unsplice {
        /// Its number.
        id: u64,
    },
    /// End the program.
    Stop {
        /// Seconds to wait for flows that end by themselves; null: end them now.
        #[serde(default)]
        drain: Option<u64>,
        /// Leave nothing behind in the kernel.
        #[serde(default)]
        flush: bool,
    },
}

/// How the program is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// How long to wait for flows that end by themselves.
    pub drain: Option<Duration>,
    /// Leave nothing behind in the kernel, whatever the configuration says.
    pub flush: bool,
}

/// Who has told the program to end, and is told in turn how it has.
#[derive(Debug)]
pub struct Stopper {
    /// What was asked for.
    pub ending: Ending,
    stream: UnixStream,
}

impl Stopper {
    /// The last line. The stream ends with the process, for that is what is waited for.
    pub fn tell(self, how: &Result<(), String>) {
        let answer = match how {
            Ok(()) => json!({ "version": VERSION, "stopped": true }),
            Err(why) => error(why),
        };
        // Whoever has gone away, or has left no room for a line, does not want to know.
        let _ = self.stream.try_write(format!("{answer}\n").as_bytes());
        std::mem::forget(self.stream);
    }
}

/// The socket's file. Removed at drop.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    slots: Arc<Semaphore>,
    spare: Spare,
    _file: SocketFile,
}

/// A descriptor for a client that comes when there is no other. Its own is kept when it goes, before anybody else can have it.
type Spare = Arc<Mutex<Option<OwnedFd>>>;

#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Gone already, or the directory is: either way nobody finds it any more.
        let _ = fs::remove_file(&self.0);
    }
}

impl Control {
    /// Listens on `path`. A file there is replaced only if it is a socket that nobody listens on.
    pub fn bind(path: &Path) -> io::Result<Control> {
        make_directory(path)?;
        match paths::connect(path) {
            Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another longsplice listens there")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => fs::remove_file(path)?,
            Err(e) => return Err(e),
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        // Under another name until somebody listens, with the right mode: one that refuses is one that is left over.
        let new = path.with_extension(format!("new-{}", std::process::id()));
        let _ = fs::remove_file(&new); // of a process that died here
        bind(fd.as_raw_fd(), &UnixAddr::new(&new)?)?;
        let mut file = SocketFile(new);
        fs::set_permissions(&file.0, fs::Permissions::from_mode(0o600))?;
        listen(&fd, Backlog::new(CLIENTS as i32)?)?;
        fs::rename(&file.0, path)?;
        path.clone_into(&mut file.0);
        let spare = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        let listener = UnixListener::from_std(StdListener::from(fd))?;
        let (slots, spare) = (Arc::new(Semaphore::new(CLIENTS)), Arc::new(Mutex::new(Some(spare))));
        Ok(Control { listener, slots, spare, _file: file })
    }

    /// Answers until dropped. `stop` hears what `longsplice stop` wants.
    pub async fn serve(&self, splicer: &Splicer, server: &Arc<Server>, stop: &mpsc::UnboundedSender<Stopper>) {
        loop {
            let Ok((mut stream, _)) = self.listener.accept().await else {
                // For want of descriptors: those who want to know why should learn it.
                if lock(&self.spare).take().is_none() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                continue;
            };
            let office = Office { splicer: splicer.clone(), server: server.clone() };
            // Without a slot the stream is closed at once: the client sees an end of stream in place of an answer.
            if let Ok(slot) = self.slots.clone().try_acquire_owned() {
                let (spare, stop) = (self.spare.clone(), stop.clone());
                tokio::spawn(async move {
                    // A client that hangs up, or is hung up on, has no one to tell.
                    if let Ok(Some(ending)) = office.attend(&mut stream).await {
                        // Fails when the program is about to end anyway.
                        let _ = stop.send(Stopper { ending, stream });
                    } else if let Ok(stream) = stream.into_std() {
                        let _ = stream.shutdown(Shutdown::Both);
                        lock(&spare).get_or_insert(stream.into());
                    }
                    drop(slot);
                });
            }
        }
    }
}

fn lock(spare: &Spare) -> MutexGuard<'_, Option<OwnedFd>> {
    spare.lock().expect("nothing panics under this lock")
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
}

/// Makes the directory of the socket, if need be, for nobody but us; /tmp is everybody's, so who owns it matters.
fn make_directory(socket: &Path) -> io::Result<()> {
    let Some(dir) = socket.parent().filter(|d| !d.as_os_str().is_empty()) else { return Ok(()) };
    if let Err(e) = fs::DirBuilder::new().mode(0o700).create(dir)
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(e);
    }
    let owner = fs::metadata(dir)?.uid();
    if owner != 0 && owner != nix::unistd::Uid::effective().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} belongs to another user", dir.display()),
        ));
    }
    Ok(())
}

/// What answers need.
struct Office {
    splicer: Splicer,
    server: Arc<Server>,
}

impl Office {
    /// Until the client goes, or wants the program to end.
    async fn attend(&self, stream: &mut UnixStream) -> io::Result<Option<Ending>> {
        let (read, mut write) = stream.split();
        let mut read = BufReader::new(read);
        loop {
            let mut line = Vec::new();
            let n = timeout(SILENCE, (&mut read).take(REQUEST).read_until(b'\n', &mut line)).await??;
            if n == 0 {
                return Ok(None);
            }
            let answer = match request(&line) {
                Ok(Ask::Ls { after, limit, state }) => {
                    self.list(&mut write, after, limit.unwrap_or(usize::MAX), state).await?;
                    continue;
                }
                Ok(Ask::Trace { id, count, seconds }) => {
                    self.trace(&mut write, id, count.unwrap_or(u64::MAX), seconds.min(TRACE_SECONDS_MAX)).await?;
                    continue;
                }
                Ok(Ask::Stop { drain, flush }) => {
                    let ending = Ending { drain: drain.map(Duration::from_secs), flush };
                    let within = drain.unwrap_or(0).saturating_add(end_limit(self.server.counters().live).as_secs());
                    let answer = json!({ "version": VERSION, "stopping": true, "within": within });
                    // Heard or not, it was said.
                    let _ = timeout(SLOWNESS, write.write_all(format!("{answer}\n").as_bytes())).await;
                    return Ok(Some(ending));
                }
                Ok(ask) => self.answer(ask),
                Err(why) => error(&why),
            };
            let mut text = answer.to_string();
            text.push('\n');
            timeout(SLOWNESS, write.write_all(text.as_bytes())).await??;
            if line.last() != Some(&b'\n') {
                return Ok(None); // cut off, or too long: what follows is no beginning of a request
            }
        }
    }

    /// A page at a time: an answer with a million flows is never in memory as a whole.
    async fn list(
        &self,
        write: &mut WriteHalf<'_>,
        mut after: u64,
        mut limit: usize,
        state: Option<FlowState>,
    ) -> io::Result<()> {
        let mut text = "{\"flows\":[".to_owned();
        let mut first = true;
        while limit > 0 {
            let page = self.splicer.flows_after(after, PAGE.min(limit), state);
            let Some(end) = page.last() else { break };
            after = end.id;
            limit -= page.len();
            for flow in &page {
                text.push_str(if first { "" } else { "," });
                text.push_str(&serde_json::to_string(flow)?);
                first = false;
            }
            timeout(SLOWNESS, write.write_all(text.as_bytes())).await??;
            text.clear();
        }
        text.push_str(&format!("],\"version\":{VERSION}}}\n"));
        timeout(SLOWNESS, write.write_all(text.as_bytes())).await?
    }

    /// Something is written at least once a second: a client that has gone is noticed, and so is a process that hangs.
    async fn trace(&self, write: &mut WriteHalf<'_>, id: u64, mut left: u64, seconds: u32) -> io::Result<()> {
        const BEAT: Duration = Duration::from_secs(1);
        const AT_ONCE: usize = 100;
        let (tell, mut told) = mpsc::channel(WAITING);
        let (splicer, mut missed) = (self.splicer.clone(), 0);
        let tracing = tokio::task::spawn_blocking(move || {
            let lost = splicer.trace(id, |segment| {
                let Some(segment) = segment else { return !tell.is_closed() };
                let sent = tell.try_send(segment);
                missed += u64::from(matches!(sent, Err(TrySendError::Full(_))));
                !matches!(sent, Err(TrySendError::Closed(_)))
            })?;
            Ok::<u64, TraceError>(lost + missed)
        });
        let end = Instant::now() + Duration::from_secs(seconds.into());
        while left > 0 && Instant::now() < end {
            let mut segments = Vec::new();
            let wait = BEAT.min(end.saturating_duration_since(Instant::now()));
            // None at all: the trace has ended. The time is up: nothing has come.
            if timeout(wait, told.recv_many(&mut segments, AT_ONCE)).await == Ok(0) {
                break;
            }
            segments.truncate(left.try_into().unwrap_or(usize::MAX));
            left -= segments.len() as u64;
            let text = json!({ "version": VERSION, "segments": segments }).to_string();
            timeout(SLOWNESS, write.write_all((text + "\n").as_bytes())).await??;
        }
        drop(told);
        let last = match tracing.await {
            Ok(Ok(lost)) => json!({ "version": VERSION, "segments": [], "lost": lost }),
            Ok(Err(e)) => error(&e.to_string()),
            Err(e) => error(&format!("the trace has failed: {e}")),
        };
        timeout(SLOWNESS, write.write_all(format!("{last}\n").as_bytes())).await?
    }

    fn answer(&self, ask: Ask) -> Value {
        match ask {
            Ask::Ls { .. } | Ask::Trace { .. } | Ask::Stop { .. } => unreachable!("answered by attend()"),
            Ask::Inspect { id } => match self.splicer.inspect(id) {
                Some(flow) => json!({ "version": VERSION, "flow": flow }),
                None => no_flow(id),
            },
            Ask::Counters => self.counters(),
            Ask::Splice { id } => self.command(id, Command::Splice),
            Ask::Unsplice { id } => self.command(id, Command::Unsplice),
        }
    }

    fn command(&self, id: u64, command: Command) -> Value {
        if let Some(why) = self.splicer.refusal() {
            return error(&format!("no flow of this process can be spliced: {why}"));
        }
        if self.splicer.command(id, command) { json!({ "version": VERSION, "done": true }) } else { no_flow(id) }
    }

    fn counters(&self) -> Value {
        let verdicts: serde_json::Map<String, Value> = match self.splicer.verdicts() {
            Ok(verdicts) => verdicts.into_iter().map(|(name, n)| (name.to_owned(), json!(n))).collect(),
            Err(e) => return error(&format!("cannot read the verdicts: {e}")),
        };
        let (proxy, listeners) = (self.server.counters(), self.server.listeners());
        json!({ "version": VERSION, "verdicts": verdicts, "proxy": proxy, "listeners": listeners })
    }
}

fn error(why: &str) -> Value {
    json!({ "version": VERSION, "error": why })
}

fn no_flow(id: u64) -> Value {
    error(&format!("there is no flow {id}"))
}

fn request(line: &[u8]) -> Result<Ask, String> {
    if line.last() != Some(&b'\n') {
        return Err(format!("a request is one line of at most {REQUEST} bytes"));
    }
    let value: Value = serde_json::from_slice(line).map_err(|e| format!("no JSON: {e}"))?;
    match value.get("version").and_then(Value::as_u64) {
        Some(v) if v == u64::from(VERSION) => {}
        Some(v) => return Err(format!("version {v} of the protocol is unknown; this is version {VERSION}")),
        None => return Err(format!("no \"version\": this is version {VERSION}")),
    }
    let request: Request = serde_json::from_value(value).map_err(|e| e.to_string())?;
    Ok(request.ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let all = Ask::Ls { after: 0, limit: None, state: None };
        assert_eq!(request(b"{\"version\":1,\"ask\":\"ls\"}\n"), Ok(all));
        assert_eq!(request(b"{\"version\":1,\"ask\":\"splice\",\"id\":7}\n"), Ok(Ask::Splice { id: 7 }));
        let stop = Ask::Stop { drain: None, flush: false };
        assert_eq!(request(b"{\"version\":1,\"ask\":\"stop\"}\n"), Ok(stop));
    }

    #[test]
    fn requests_go_there_and_back() {
        for ask in [
            Ask::Counters,
            Ask::Inspect { id: 7 },
            Ask::Trace { id: 7, count: None, seconds: 60 },
            Ask::Unsplice { id: u64::MAX },
            Ask::Stop { drain: Some(5), flush: true },
        ] {
            let line = serde_json::to_string(&Request { version: VERSION, ask }).unwrap() + "\n";
            assert_eq!(request(line.as_bytes()), Ok(ask));
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, want) in [
            ("{\"version\":1,\"ask\":\"ls\"}", "one line"),
            ("ls\n", "no JSON"),
            ("{\"ask\":\"ls\"}\n", "no \"version\""),
            ("{\"version\":2,\"ask\":\"ls\"}\n", "version 2"),
            ("{\"version\":1,\"ask\":\"dance\"}\n", "dance"),
            ("{\"version\":1,\"ask\":\"splice\"}\n", "id"),
        ] {
            let why = request(line.as_bytes()).unwrap_err();
            assert!(why.contains(want), "{line}: {why}");
        }
    }
}
