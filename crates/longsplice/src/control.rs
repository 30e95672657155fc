//! The control socket: a Unix stream socket on which the running proxy answers operators' requests.
//!
//! # Protocol
//! One JSON object per line each way, one answer per request, any number of requests per connection:
//! ```text
//! {"version":1,"ask":"ls"}                        {"version":1,"flows":[...]}
//! {"version":1,"ask":"ls","after":7,"limit":100,"state":"spliced"}   the first 100 flows after ID 7
//! {"version":1,"ask":"ls","which":{"listener":"front","client":"10.0.0.0/8"}}   flows with all of this (`Which`)
//! {"version":1,"ask":"kill","ids":[7]}            {"version":1,"killed":1,"left":[]}, and the numbers of those that are not there
//! {"version":1,"ask":"kill","which":{"user":"ann"}}   {"version":1,"killed":3,"left":[]}; `{}` is all flows
//! {"version":1,"ask":"inspect","id":7}            {"version":1,"flow":{...}}, with all details (`FlowDetail`)
//! {"version":1,"ask":"trace","id":7,"count":null,"seconds":60}   {"version":1,"segments":[...]}, repeated at least once per
//! second (`TracedSegment`); then {"version":1,"segments":[],"lost":0}, with the number of missing segments
//! {"version":1,"ask":"counters"}                  {"version":1,"verdicts":{...},"tpot":{...},"proxy":{...},"listeners":[...]}
//! {"version":1,"ask":"pools"}                     {"version":1,"pools":[...]} (`PoolValues`)
//! {"version":1,"ask":"drain","member":"db/10.0.0.1:5432"}   {"version":1,"told":1}, the number of servers; with
//! `"maintenance":true` it is not checked, either; so `undrain`, and `weight` with `"weight":7`, or null: the one configured
//! {"version":1,"ask":"pause","listeners":["front"]}   {"version":1,"paused":["front"],"already":[]}, or an error, and none is; so
//! `resume`, with `resumed`
//! {"version":1,"ask":"splice","id":7}             {"version":1,"done":true}
//! {"version":1,"ask":"unsplice","id":7}           {"version":1,"done":true}
//! {"version":1,"ask":"release","ids":[7,8]}       {"version":1,"released":1,"left":[{"id":8,"reason":"copying","why":"..."}]}, or with
//! `which` as for `kill`: {"version":1,"released":1,"left":[{"count":3,"reason":"copying","why":"..."}]} (`NotReleased`)
//! {"version":1,"ask":"purge","url":"http://a.example/x","below":true,"after":null}   {"version":1,"removed":3,"after":[0,4096]}:
//! replies that caches have, some thousand files at a time; again with this `after`, until it is null
//! {"version":1,"ask":"reload","enforce":true}   {"version":1,"reloaded":true,"added":["NAME"],"moved":[],"removed":[],"reset":0},
//! the names of listeners, and the number of connections that were reset; or an error, and nothing has changed
//! {"version":1,"ask":"upgrade","binary":null,"limit":60}   {"version":1,"upgrading":true,"within":250}, the most seconds until the
//! next answer; then {"version":1,"process":4711,"program":"0.1.0","listeners":["NAME"],"left":7,"stay":3} (`Upgraded`), or an error
//! {"version":1,"ask":"events","listener":null,"kinds":[]}   {"time":"...","event":"subscribed","version":1,...}; then a line for each
//! event (docs/operating.md), without a version, until the client sends something; or an error
//! {"version":1,"ask":"rule","client":"10.0.0.1","target":"a.example:443","user":"ann"}   {"version":1,"decided":[{"listener":"front",
//! "server":"192.0.2.1:443","allowed":true,"rule":2,"why":"{ action = ... }"}]}, what rules would say (`Question`)
//! {"version":1,"ask":"stop","drain":30,"flush":false}   {"version":1,"stopping":true,"within":35}, the most
//! seconds until the flows have ended; then, when detached, {"version":1,"stopped":true} or an error; then end of stream
//! when the process exits
//! ```
//! A request that fails is answered with `{"version":1,"error":"..."}`. `done` means that the request was handed to the
//! flow; `ls` shows whether the flow was spliced. There is no authentication: the socket has mode 0600, unless the configuration gives it to a group, and any process that
//! can open it can use all requests.

use crate::{
    args::TRACE_SECONDS_MAX,
    configuring::Reloader,
    handing::successor::Asked,
    socket_file::{SocketFile, give, listen_at},
    telling,
    which::{Chosen, PAGE, Which},
};
use longsplice_engine::{Command, FlowState, NotReleased, Splicer, TraceError};
use longsplice_proxy::{Purge, Purged, Question, Reloaded, Server, SocketAccess, Tell, ToldListeners, events::Wanted};
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener as StdListener, UnixStream as StdStream},
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
        oneshot,
    },
    time::timeout,
};

/// Protocol version of requests and answers. It is raised when a field changes its meaning, not when a field is added.
pub const VERSION: u32 = 1;
/// Longest request in bytes. Real requests have about a hundred.
const REQUEST: u64 = 4096;
/// Most clients connected at a time. Others are turned away, so that
/// a client that leaks connections cannot exhaust our descriptors.
const CLIENTS: usize = 32;
/// Segments queued for a client, about 3 MB. A client that reads too slowly misses segments.
const WAITING: usize = 10_000;
/// A client that sends nothing for this long is disconnected.
const SILENCE: Duration = Duration::from_secs(60);
/// A client that does not read its answer for this long is disconnected.
const SLOWNESS: Duration = Duration::from_secs(10);
/// Time allowed for flows to end once told to, and for writing the access log.
const END: Duration = Duration::from_secs(5);
/// Flows for which one more second is allowed.
const ENDS: u64 = 20_000;

/// Longest time that this number of live connections takes to end.
pub fn end_limit(live: u64) -> Duration {
    END + Duration::from_secs(live / ENDS)
}

/// A request and its protocol version.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The request itself.
    #[serde(flatten)]
    pub ask: Ask,
}

/// The requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Ask {
    /// List live flows by ascending number.
    Ls {
        /// Only flows with a higher number.
        #[serde(default)]
        after: u64,
        /// Maximum number of flows; null: no limit.
        #[serde(default)]
        limit: Option<usize>,
        /// Only flows in this state; null: any state.
        #[serde(default)]
        state: Option<FlowState>,
        /// Only flows with all of this.
        #[serde(default)]
        which: Which,
    },
    /// End flows with a reset to both hosts.
    Kill {
        /// Flow numbers; null: those of `which`.
        #[serde(default)]
        ids: Option<Vec<u64>>,
        /// Flows with all of this; null: those of `ids`. One of the two is needed: a misspelt one must not end all flows.
        #[serde(default)]
        which: Option<Which>,
    },
    /// Close the parked sockets of flows.
    Release {
        /// Flow numbers; null: those of `which`.
        #[serde(default)]
        ids: Option<Vec<u64>>,
        /// Flows with all of this; null: those of `ids`.
        #[serde(default)]
        which: Option<Which>,
    },
    /// Show all details of one flow.
    Inspect {
        /// Flow number.
        id: u64,
    },
    /// Report the segments of a flow as they pass.
    Trace {
        /// Flow number.
        id: u64,
        /// Maximum number of segments; null: no limit.
        #[serde(default)]
        count: Option<u64>,
        /// Duration in seconds, at most [`TRACE_SECONDS_MAX`].
        seconds: u32,
    },
    /// Return all counters.
    Counters,
    /// Return all pools.
    Pools,
    /// Let a server of a pool take nothing new.
    Drain {
        /// `POOL/HOST:PORT`, or `HOST:PORT` for that of all pools.
        member: String,
        /// It is not checked meanwhile, either.
        #[serde(default)]
        maintenance: bool,
    },
    /// Let it take its share again.
    Undrain {
        /// The server.
        member: String,
    },
    /// Give a server another weight.
    Weight {
        /// The server.
        member: String,
        /// 0 to 256; null: that of the configuration.
        weight: Option<u16>,
    },
    /// Let listeners accept nobody for now.
    Pause {
        /// Their names.
        listeners: Vec<String>,
    },
    /// Let them accept again.
    Resume {
        /// Their names.
        listeners: Vec<String>,
    },
    /// Splice a flow.
    Splice {
        /// Flow number.
        id: u64,
    },
    /// Unsplice a flow.
    Unsplice {
        /// Flow number.
        id: u64,
    },
    /// Remove stored replies.
    Purge {
        /// `http://SITE/PATH`.
        url: String,
        /// Those of all URLs that begin so.
        #[serde(default)]
        below: bool,
        /// How far the last answer has come.
        #[serde(default)]
        after: Option<(usize, u64)>,
    },
    /// Read the configuration anew.
    Reload {
        /// Reset live connections that it forbids.
        #[serde(default)]
        enforce: bool,
    },
    /// Let another program take over.
    Upgrade {
        /// Its path; null: the file from which this process was started.
        #[serde(default)]
        binary: Option<PathBuf>,
        /// Seconds that each step may take.
        limit: u32,
    },
    /// Tell what happens from now on.
    Events(Wanted),
    /// Say what the rules would do with a connection.
    Rule(Question),
    /// Shut the proxy down.
    Stop {
        /// Seconds to wait for flows to end by themselves; null: end them now.
        #[serde(default)]
        drain: Option<u64>,
        /// Leave nothing behind in the kernel.
        #[serde(default)]
        flush: bool,
    },
}

/// How to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// How long to wait for flows to end by themselves. `None`: end them now.
    pub drain: Option<Duration>,
    /// Leave nothing behind in the kernel, even if the configuration says otherwise.
    pub flush: bool,
}

/// The client that asked for the shutdown, which gets the result.
#[derive(Debug)]
pub struct Stopper {
    /// The requested kind of shutdown.
    pub ending: Ending,
    stream: UnixStream,
}

impl Stopper {
    /// Writes the last line. The stream stays open until the process exits, because that is what the client waits for.
    pub fn tell(self, how: &Result<(), String>) {
        let answer = match how {
            Ok(()) => json!({ "version": VERSION, "stopped": true }),
            Err(why) => error(why),
        };
        // The result no longer interests a client that has gone or does not read.
        let _ = self.stream.try_write(format!("{answer}\n").as_bytes());
        std::mem::forget(self.stream);
    }
}

/// The file of the socket. It is removed on drop.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    slots: Arc<Semaphore>,
    spare: Spare,
    /// `None`: it belongs to an earlier process.
    file: Option<SocketFile>,
}

/// Whom to tell of requests that concern the whole program.
#[derive(Clone, Debug)]
pub struct Orders {
    /// Requests to shut down.
    pub stop: mpsc::UnboundedSender<Stopper>,
    /// Requests to be replaced.
    pub upgrade: mpsc::UnboundedSender<Asked>,
}

/// A descriptor in reserve, for accepting a client when no other is available. When that client leaves, its own descriptor
/// becomes the reserve before anything else can take it.
type Spare = Arc<Mutex<Option<OwnedFd>>>;

impl Control {
    /// Listens on `path`.
    pub fn bind(path: &Path, access: SocketAccess) -> io::Result<Control> {
        let (listener, file) = listen_at(path, access)?;
        Control::new(listener, Some(file))
    }

    /// Listens at the socket of an earlier process, to which the file belongs.
    pub fn at(socket: StdListener) -> io::Result<Control> {
        Control::new(socket, None)
    }

    fn new(socket: StdListener, file: Option<SocketFile>) -> io::Result<Control> {
        let spare = StdStream::pair()?.0.into();
        let listener = UnixListener::from_std(socket)?;
        let (slots, spare) = (Arc::new(Semaphore::new(CLIENTS)), Arc::new(Mutex::new(Some(spare))));
        Ok(Control { listener, slots, spare, file })
    }

    /// Makes the file this process's, if it was that of an earlier one.
    pub fn take_file(&mut self, path: &Path, access: SocketAccess) {
        // the other process may have had another one
        if let Err(error) = give(path, access) {
            tracing::warn!("cannot change who may open the control socket: {error}");
        }
        self.file.get_or_insert_with(|| SocketFile(path.to_owned()));
    }

    /// Leaves the file to another process.
    pub fn leave_file(&mut self) {
        self.file.take().into_iter().for_each(std::mem::forget);
    }

    /// Returns another descriptor of the socket.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Answers requests until dropped. Those that concern the whole program are sent on.
    pub async fn serve(&self, splicer: &Splicer, reloader: &Reloader, orders: &Orders) {
        loop {
            let Ok((mut stream, _)) = self.listener.accept().await else {
                // Out of descriptors. Use the one in reserve: an operator who looks for the cause must still get in.
                if lock(&self.spare).take().is_none() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                continue;
            };
            let (server, reloader) = (reloader.server.clone(), reloader.clone());
            let (spare, orders) = (self.spare.clone(), orders.clone());
            let office = Office { splicer: splicer.clone(), server, reloader, orders };
            // Without a free slot the stream is closed at once, and the
            // client sees the end of the stream instead of an answer.
            if let Ok(slot) = self.slots.clone().try_acquire_owned() {
                tokio::spawn(async move {
                    // Errors are ignored: the client has gone or was disconnected.
                    if let Ok(Some(ending)) = office.attend(&mut stream).await {
                        // Fails only if the program is already ending.
                        let _ = office.orders.stop.send(Stopper { ending, stream });
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

/// State needed to answer requests.
struct Office {
    splicer: Splicer,
    server: Arc<Server>,
    reloader: Reloader,
    orders: Orders,
}

impl Office {
    /// Serves one client until it leaves or asks for a shutdown.
    async fn attend(&self, stream: &mut UnixStream) -> io::Result<Option<Ending>> {
        // a group may have access to the socket, and the program has capabilities that it has not
        let may_name_binary = stream.peer_cred().is_ok_and(|peer| [0, Uid::effective().as_raw()].contains(&peer.uid()));
        let (read, mut write) = stream.split();
        let mut read = BufReader::new(read);
        loop {
            let mut line = Vec::new();
            let n = timeout(SILENCE, (&mut read).take(REQUEST).read_until(b'\n', &mut line)).await??;
            if n == 0 {
                return Ok(None);
            }
            let answer = match request(&line) {
                Ok(Ask::Ls { after, limit, state, which }) => match which.read() {
                    Ok(which) => {
                        self.list(&mut write, after, limit.unwrap_or(usize::MAX), (state, &which)).await?;
                        continue;
                    }
                    Err(why) => error(&why),
                },
                Ok(Ask::Kill { ids: Some(ids), which: None }) => self.kill(ids),
                Ok(Ask::Kill { ids: None, which: Some(which) }) => match which.read() {
                    Ok(which) => self.kill_chosen(&which).await,
                    Err(why) => error(&why),
                },
                Ok(Ask::Kill { .. }) => error("\"kill\" needs \"ids\" or \"which\", and not both"),
                Ok(Ask::Release { ids: Some(ids), which: None }) => self.release(&ids),
                Ok(Ask::Release { ids: None, which: Some(which) }) => match which.read() {
                    Ok(which) => self.release_chosen(&which).await,
                    Err(why) => error(&why),
                },
                Ok(Ask::Release { .. }) => error("\"release\" needs \"ids\" or \"which\", and not both"),
                Ok(Ask::Trace { id, count, seconds }) => {
                    self.trace(&mut write, id, count.unwrap_or(u64::MAX), seconds.min(TRACE_SECONDS_MAX)).await?;
                    continue;
                }
                Ok(Ask::Stop { drain, flush }) => {
                    let ending = Ending { drain: drain.map(Duration::from_secs), flush };
                    let within = drain.unwrap_or(0).saturating_add(end_limit(self.server.counters().live).as_secs());
                    let answer = json!({ "version": VERSION, "stopping": true, "within": within });
                    // Best effort: the client may have gone.
                    let _ = timeout(SLOWNESS, write.write_all(format!("{answer}\n").as_bytes())).await;
                    return Ok(Some(ending));
                }
                Ok(Ask::Reload { enforce }) => match self.reloader.reload(enforce).await {
                    Ok(Reloaded { added, moved, removed, reset }) => json!({
                        "version": VERSION, "reloaded": true, "added": added, "moved": moved, "removed": removed, "reset": reset
                    }),
                    Err(why) => error(&why),
                },
                Ok(Ask::Upgrade { binary: Some(_), .. }) if !may_name_binary => {
                    error("only root, and the user who runs the program, may name a binary for an upgrade")
                }
                Ok(Ask::Upgrade { binary, limit }) => {
                    // the program does not end before this is written
                    let (_writes, written) = oneshot::channel();
                    let answer = self.upgrade(&mut write, binary, (limit, written)).await?;
                    timeout(SLOWNESS, write.write_all(format!("{answer}\n").as_bytes())).await??;
                    continue;
                }
                Ok(Ask::Events(wanted)) => match telling::subscribe(&self.server, &self.splicer, wanted) {
                    Ok(subscription) => {
                        telling::write((subscription, VERSION), (&mut read, &mut write)).await?;
                        continue;
                    }
                    Err(why) => error(&why),
                },
                Ok(Ask::Rule(question)) => match self.server.explain(&question).await {
                    Ok(decided) => json!({ "version": VERSION, "decided": decided }),
                    Err(why) => error(&why),
                },
                Ok(Ask::Purge { url, below, after }) => self.purge(Purge { url, below, after }).await,
                Ok(ask) => self.answer(ask),
                Err(why) => error(&why),
            };
            let mut text = answer.to_string();
            text.push('\n');
            timeout(SLOWNESS, write.write_all(text.as_bytes())).await??;
            if line.last() != Some(&b'\n') {
                return Ok(None); // cut off or too long: the rest is not the start of a request
            }
        }
    }

    /// Lists flows a page at a time, so that an answer with a million flows is never in memory as a whole.
    async fn list(
        &self,
        write: &mut WriteHalf<'_>,
        mut after: u64,
        mut limit: usize,
        (state, which): (Option<FlowState>, &Chosen),
    ) -> io::Result<()> {
        let mut text = "{\"flows\":[".to_owned();
        let mut first = true;
        while limit > 0 {
            let most = if which.is_any() { PAGE.min(limit) } else { PAGE };
            let page = self.splicer.flows_after(after, most, state);
            let Some(end) = page.last() else { break };
            after = end.id;
            for flow in page.iter().filter(|flow| which.has(flow)).take(limit) {
                text.push_str(if first { "" } else { "," });
                text.push_str(&serde_json::to_string(flow)?);
                first = false;
                limit -= 1;
            }
            timeout(SLOWNESS, write.write_all(text.as_bytes())).await??;
            text.clear();
        }
        text.push_str(&format!("],\"version\":{VERSION}}}\n"));
        timeout(SLOWNESS, write.write_all(text.as_bytes())).await?
    }

    /// Ends a flow. Returns false if this process has none with this number.
    fn end(&self, id: u64) -> bool {
        self.splicer.command(id, Command::Reset)
    }

    fn kill(&self, ids: Vec<u64>) -> Value {
        let (killed, left): (Vec<u64>, Vec<u64>) = ids.into_iter().partition(|id| self.end(*id));
        json!({ "version": VERSION, "killed": killed.len(), "left": left })
    }

    /// Ends flows a page at a time.
    async fn kill_chosen(&self, which: &Chosen) -> Value {
        let (mut after, mut killed) = (0, 0);
        loop {
            let page = self.splicer.flows_after(after, PAGE, None);
            let Some(last) = page.last() else { break };
            after = last.id;
            killed += page.iter().filter(|flow| which.has(flow) && self.end(flow.id)).count();
            tokio::task::yield_now().await;
        }
        json!({ "version": VERSION, "killed": killed, "left": [] })
    }

    /// Closes the sockets of flows.
    fn release(&self, ids: &[u64]) -> Value {
        if let Some(why) = self.cannot_splice() {
            return error(&why);
        }
        let (mut released, mut left) = (0, Vec::new());
        for id in ids {
            match self.splicer.release(*id) {
                Ok(()) => released += 1,
                Err(why) => left.push(json!({ "id": id, "reason": why.as_str(), "why": why.to_string() })),
            }
        }
        json!({ "version": VERSION, "released": released, "left": left })
    }

    /// The same a page at a time.
    async fn release_chosen(&self, which: &Chosen) -> Value {
        if let Some(why) = self.cannot_splice() {
            return error(&why);
        }
        let (mut after, mut released, mut left) = (0, 0, BTreeMap::<NotReleased, u64>::new());
        loop {
            let page = self.splicer.flows_after(after, PAGE, None);
            let Some(last) = page.last() else { break };
            after = last.id;
            for flow in page.iter().filter(|flow| which.has(flow)) {
                match self.splicer.release(flow.id) {
                    Ok(()) => released += 1,
                    Err(NotReleased::NoFlow) => {} // it has just ended
                    Err(why) => *left.entry(why).or_default() += 1,
                }
            }
            tokio::task::yield_now().await;
        }
        let of = |(why, n): (NotReleased, u64)| json!({ "count": n, "reason": why.as_str(), "why": why.to_string() });
        let left: Vec<_> = left.into_iter().map(of).collect();
        json!({ "version": VERSION, "released": released, "left": left })
    }

    /// Writes something at least once a second, so that both sides notice when the other is gone or hangs.
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
            // Zero segments mean that the trace has ended; a timeout means that none came.
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
            Ask::Ls { .. }
            | Ask::Kill { .. }
            | Ask::Release { .. }
            | Ask::Trace { .. }
            | Ask::Purge { .. }
            | Ask::Reload { .. }
            | Ask::Upgrade { .. }
            | Ask::Events(_)
            | Ask::Rule(_)
            | Ask::Stop { .. } => unreachable!("answered by attend()"),
            Ask::Inspect { id } => match self.splicer.inspect(id) {
                Some(flow) => json!({ "version": VERSION, "flow": flow }),
                None => no_flow(id),
            },
            Ask::Counters => self.counters(),
            Ask::Pools => json!({ "version": VERSION, "pools": self.server.pools() }),
            Ask::Drain { member, maintenance: false } => self.tell(&member, Tell::Drain),
            Ask::Drain { member, maintenance: true } => self.tell(&member, Tell::Maintain),
            Ask::Undrain { member } => self.tell(&member, Tell::Undrain),
            Ask::Weight { weight: Some(weight), .. } if weight > 256 => error("a weight is a number from 0 to 256"),
            Ask::Weight { member, weight } => self.tell(&member, Tell::Weigh(weight)),
            Ask::Pause { listeners } => self.pause(&listeners, true),
            Ask::Resume { listeners } => self.pause(&listeners, false),
            Ask::Splice { id } => self.command(id, Command::Splice),
            Ask::Unsplice { id } => self.command(id, Command::Unsplice),
        }
    }

    /// Has another program take over. Returns the last answer.
    async fn upgrade(
        &self,
        write: &mut WriteHalf<'_>,
        binary: Option<PathBuf>,
        (limit, written): (u32, oneshot::Receiver<()>),
    ) -> io::Result<Value> {
        // to prepare and to serve, for the new program and, if that fails too late, for this one again
        let within = u64::from(limit) * 4 + end_limit(self.server.counters().live).as_secs() * 2;
        let begun = json!({ "version": VERSION, "upgrading": true, "within": within });
        let (answer, answered) = oneshot::channel();
        let asked = Asked { binary, limit: Duration::from_secs(limit.into()), answer, written };
        // if the program is ending, nobody answers
        let _ = self.orders.upgrade.send(asked);
        timeout(SLOWNESS, write.write_all(format!("{begun}\n").as_bytes())).await??;
        Ok(match answered.await {
            Ok(Ok(upgraded)) => {
                let mut answer = json!({ "version": VERSION });
                if let (Value::Object(all), Value::Object(said)) = (&mut answer, serde_json::to_value(upgraded)?) {
                    all.extend(said);
                }
                answer
            }
            Ok(Err(why)) => error(&why),
            Err(_) => error("the program ends, or was replaced meanwhile"),
        })
    }

    async fn purge(&self, what: Purge) -> Value {
        let server = self.server.clone();
        match tokio::task::spawn_blocking(move || server.purge(&what)).await {
            Ok(Purged { removed, after }) => json!({ "version": VERSION, "removed": removed, "after": after }),
            Err(e) => error(&format!("the caches cannot be searched: {e}")),
        }
    }

    fn cannot_splice(&self) -> Option<String> {
        self.splicer.refusal().map(|why| format!("no flow of this process can be spliced: {why}"))
    }

    fn command(&self, id: u64, command: Command) -> Value {
        if let Some(why) = self.cannot_splice() {
            return error(&why);
        }
        match self.splicer.command(id, command) {
            true => json!({ "version": VERSION, "done": true }),
            false if self.splicer.is_recovered(id) => error(&format!(
                "flow {id} is of an earlier process: it is forwarded to its end, and cannot be taken back"
            )),
            false => no_flow(id),
        }
    }

    fn pause(&self, listeners: &[String], is_paused: bool) -> Value {
        match self.server.pause(listeners, is_paused) {
            Ok(ToldListeners { done, already }) => {
                let did = if is_paused { "paused" } else { "resumed" };
                json!({ "version": VERSION, did: done, "already": already })
            }
            Err(why) => error(&why),
        }
    }

    fn tell(&self, member: &str, what: Tell) -> Value {
        match self.server.tell(member, what) {
            Some(told) => json!({ "version": VERSION, "told": told }),
            None => error(&format!("no pool has a server {member}: `longsplice pools` lists them")),
        }
    }

    fn counters(&self) -> Value {
        let named = |all: Vec<(&'static str, u64)>| -> serde_json::Map<String, Value> {
            all.into_iter().map(|(name, n)| (name.to_owned(), json!(n))).collect()
        };
        let tpot = self.server.tpot().map_or(Ok(Vec::new()), |tpot| tpot.verdicts());
        let (verdicts, tpot) = match self.splicer.verdicts().and_then(|verdicts| Ok((named(verdicts), named(tpot?)))) {
            Ok(both) => both,
            Err(e) => return error(&format!("cannot read the verdicts: {e}")),
        };
        let (proxy, listeners) = (self.server.counters(), self.server.listeners());
        json!({ "version": VERSION, "verdicts": verdicts, "tpot": tpot, "proxy": proxy, "listeners": listeners })
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
    use longsplice_proxy::events::Kind;

    #[test]
    fn requests() {
        let all = Ask::Ls { after: 0, limit: None, state: None, which: Which::default() };
        assert_eq!(request(b"{\"version\":1,\"ask\":\"ls\"}\n"), Ok(all));
        assert_eq!(request(b"{\"version\":1,\"ask\":\"splice\",\"id\":7}\n"), Ok(Ask::Splice { id: 7 }));
        let stop = Ask::Stop { drain: None, flush: false };
        assert_eq!(request(b"{\"version\":1,\"ask\":\"stop\"}\n"), Ok(stop));
    }

    #[test]
    fn requests_go_there_and_back() {
        for ask in [
            Ask::Counters,
            Ask::Reload { enforce: true },
            Ask::Upgrade { binary: Some("/usr/bin/longsplice".into()), limit: 60 },
            Ask::Kill { ids: Some(vec![7]), which: None },
            Ask::Kill { ids: None, which: Some(Which { user: Some("ann".into()), ..Which::default() }) },
            Ask::Release { ids: Some(vec![7, 8]), which: None },
            Ask::Release { ids: None, which: Some(Which::default()) },
            Ask::Inspect { id: 7 },
            Ask::Trace { id: 7, count: None, seconds: 60 },
            Ask::Unsplice { id: u64::MAX },
            Ask::Pools,
            Ask::Drain { member: "db/a:1".into(), maintenance: true },
            Ask::Weight { member: "a:1".into(), weight: Some(7) },
            Ask::Pause { listeners: vec!["front".into(), "back".into()] },
            Ask::Resume { listeners: vec!["front".into()] },
            Ask::Purge { url: "http://a.example/x".into(), below: true, after: Some((0, 7)) },
            Ask::Events(Wanted { listener: Some("front".into()), kinds: vec![Kind::Ended, Kind::MemberDown] }),
            Ask::Stop { drain: Some(5), flush: true },
        ] {
            let line = serde_json::to_string(&Request { version: VERSION, ask: ask.clone() }).unwrap() + "\n";
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
