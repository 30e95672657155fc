//! The side of the running process: it starts another one, and hands everything over.

use super::{
    CONNECTIONS, LONGEST, MOST_IN_HAND, MOST_IN_HAND_OF_ALL, MOST_SERVERS, MOST_SOCKETS, Message, Of, Offer, Pair,
    SERVERS_AT_ONCE, Takes, VERSION,
};
use crate::supervisor;
use longsplice_datapath::AbiId;
use longsplice_engine::{HandedOver, Splicer};
use longsplice_proxy::{
    Server,
    handed::{Handed, KnownServer, Wanted},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    env,
    ffi::OsString,
    fmt, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio, id},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tokio::{sync::oneshot, task::spawn_blocking, time::timeout};

/// The program of this process, whatever has become of its file.
pub const ITSELF: &str = "/proc/self/exe";
/// The flag that tells a new process what its standard input is.
const FLAG: &str = "--take-over";
/// Time in which a process that has closed its end may end.
const ENDS: Duration = Duration::from_secs(1);
/// Time in which an answer is written.
const WRITTEN: Duration = Duration::from_secs(10);
/// Time in which flows that are being spliced come to an end.
const SWITCHES: Duration = Duration::from_secs(5);

/// A request to be replaced.
#[derive(Debug)]
pub struct Asked {
    /// The program. `None`: the file from which this one was started.
    pub binary: Option<PathBuf>,
    /// How long each step may take.
    pub limit: Duration,
    /// Whom to tell.
    pub answer: oneshot::Sender<Result<Upgraded, String>>,
    /// Ends when the answer is written.
    pub written: oneshot::Receiver<()>,
}

impl Asked {
    /// Answers, and waits until that is written.
    pub async fn tell(self, upgraded: Result<Upgraded, String>) {
        // whoever has asked may have gone
        let _ = self.answer.send(upgraded);
        let _ = timeout(WRITTEN, self.written).await;
    }
}

/// What was handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// Number of the process that serves now.
    pub process: u32,
    /// Version of its program.
    pub program: String,
    /// Names of the listeners that were handed over.
    pub listeners: Vec<String>,
    /// Number of flows that the kernel forwards.
    pub left: usize,
    /// Number of other connections that go on in it.
    #[serde(default)]
    pub taken: usize,
    /// Number of connections that stay with this process until they end.
    pub stay: u64,
}

/// What is offered.
pub struct Sockets(Vec<(Of, OwnedFd)>);

impl Sockets {
    /// Duplicates all that can be handed over. `others`: control socket and metrics.
    pub fn of(server: &Server, others: Vec<(Of, OwnedFd)>) -> io::Result<Sockets> {
        let listeners = server
            .sockets()?
            .into_iter()
            .map(|(of, socket)| (of.map_or(Of::Supervisor, Of::Listener), OwnedFd::from(socket)));
        let all: Vec<_> = others.into_iter().chain(listeners).collect();
        match all.len() {
            0..=MOST_SOCKETS => Ok(Sockets(all)),
            n => Err(io::Error::other(format!("{n} listening sockets, of which {MOST_SOCKETS} can be handed over"))),
        }
    }

    fn names(&self) -> Vec<String> {
        let name = |(of, _): &(Of, OwnedFd)| if let Of::Listener(of) = of { Some(of.name.clone()) } else { None };
        self.0.iter().filter_map(name).collect()
    }
}

/// What is replaced.
pub struct Predecessor {
    /// The file from which the program was started.
    pub binary: PathBuf,
    /// Path of the control socket.
    pub control: PathBuf,
    /// The engine.
    pub splicer: Splicer,
    /// The server.
    pub server: Arc<Server>,
}

impl Predecessor {
    /// Starts a new process, and waits until it is prepared, and no connection is in a switch. If that fails, nothing has changed.
    pub async fn prepare(&self, sockets: Sockets, asked: &Asked) -> Result<Prepared, String> {
        let sockets = Arc::new(sockets);
        let binary = asked.binary.as_ref().unwrap_or(&self.binary);
        let new = self.start(binary, &sockets, asked.limit).await?;
        let prepared = self.splicer.prepare_to_let_go(SWITCHES).await;
        prepared.map_err(|n| format!("{n} connections are being spliced, and do not come to an end of it"))?;
        Ok(Prepared { new, sockets, limit: asked.limit })
    }

    /// Hands everything over. If the new process fails now, the program of this one is started once more, and takes over.
    pub async fn finish(&self, Prepared { new, sockets, limit }: Prepared) -> Result<Upgraded, Failed> {
        if let Some(Err(error)) = self.server.tpot().map(|tpot| tpot.stop_pipelines()) {
            tracing::warn!(%error, "cannot pass SYNs to listeners at once: some clients have to send theirs again");
        }
        self.server.leave_doors().await;
        let connections = match &new.wanted {
            Some(wanted) => self.server.hand_on(wanted.clone()).await,
            None => Vec::new(),
        };
        self.server.stop_accepting();
        let handed = self.splicer.let_go().await;
        self.server.tpot().iter().for_each(|tpot| tpot.let_go());
        let (why, connections) = match self.commit(new, &sockets, (handed, connections), limit).await {
            Ok((upgraded, pair)) => {
                drop(sockets);
                supervisor::replaced_by(upgraded.process).await; // before the new one says anything to it
                drop(pair); // at which the new one may close what it does not need, and bind it again
                return Ok(upgraded);
            }
            Err(failed) => failed,
        };
        tracing::error!("cannot hand over: the program that ran is started anew: {why}");
        let again = match self.start(Path::new(ITSELF), &sockets, limit).await {
            Ok(new) => self.commit(new, &sockets, (handed, connections), limit).await,
            Err(why) => Err((why, connections)),
        };
        Err(match again {
            Ok((upgraded, pair)) => {
                drop(sockets);
                supervisor::replaced_by(upgraded.process).await;
                drop(pair);
                Failed { why, restarted: Some(upgraded.process) }
            }
            Err((again, connections)) => {
                self.server.go_on(connections); // they end as all others do
                Failed { why: format!("{why}; nor can the program that ran: {again}"), restarted: None }
            }
        })
    }

    async fn start(&self, binary: &Path, sockets: &Arc<Sockets>, limit: Duration) -> Result<Successor, String> {
        let tables = self.splicer.refusal().is_none().then(|| AbiId::OURS.to_string());
        let (program, control) = (env!("CARGO_PKG_VERSION").to_owned(), self.control.clone());
        let (sockets, binary, process) = (sockets.clone(), binary.to_owned(), Some(id()));
        let offer = Offer {
            version: VERSION,
            program,
            process,
            tables,
            control,
            sockets: sockets.0.len(),
            within: limit.as_secs(),
            connections: CONNECTIONS,
            caches: self.server.cache_dirs(),
        };
        spawn_blocking(move || Successor::start(&binary, offer, &sockets, limit)).await.map_err(|e| e.to_string())?
    }

    /// Lets the new process serve, and go on with these connections. If it fails, they are returned.
    async fn commit(
        &self,
        new: Successor,
        sockets: &Sockets,
        (HandedOver { left, .. }, connections): (HandedOver, Vec<Handed>),
        limit: Duration,
    ) -> Result<(Upgraded, Pair), (String, Vec<Handed>)> {
        let (process, program) = (new.child.0.as_ref().map_or(0, Child::id), new.program.clone());
        // one that was started in place of another may want fewer
        let (go, mut stay) = select(connections, new.wanted.as_ref());
        let (taken, go) = (go.len(), Arc::new(go));
        let of_new = go.clone();
        let known = (self.server.known_servers(), self.server.paused());
        let committed = spawn_blocking(move || new.commit(&known, &of_new, limit)).await;
        let committed = committed.map_err(|e| e.to_string()).and_then(|committed| committed);
        // whoever has sent them has ended
        let go = Arc::into_inner(go).unwrap_or_default();
        let pair = match committed {
            Ok(pair) => pair,
            Err(why) => {
                stay.extend(go.into_iter().map(|one| one.handed));
                return Err((why, stay));
            }
        };
        drop(go);
        self.server.go_on(stay);
        let stay = self.server.counters().live;
        Ok((Upgraded { process, program, listeners: sockets.names(), left, taken, stay }, pair))
    }
}

/// A connection that a new process takes, and the message about it.
struct Outgoing {
    handed: Handed,
    text: Vec<u8>,
}

/// Returns those connections that a new process takes, and the others.
fn select(connections: Vec<Handed>, wanted: Option<&Wanted>) -> (Vec<Outgoing>, Vec<Handed>) {
    let (mut sockets, mut bytes) = (wanted.map_or(0, |wanted| wanted.sockets), MOST_IN_HAND_OF_ALL);
    let (mut go, mut stay) = (Vec::new(), Vec::new());
    for handed in connections {
        let ([up, down], needs) = (handed.in_hand.each_ref().map(|bytes| bytes.len()), handed.about.sockets());
        let takes = wanted.is_some_and(|wanted| handed.about.is_wanted(wanted)) && needs <= sockets;
        let fits = takes && up.max(down) <= MOST_IN_HAND && up + down <= bytes;
        match fits.then(|| text_of(&handed)).flatten() {
            Some(text) => {
                (sockets, bytes) = (sockets - needs, bytes - up - down);
                go.push(Outgoing { handed, text });
            }
            None => stay.push(handed),
        }
    }
    (go, stay)
}

/// Returns what is said of a connection, unless that is too long.
fn text_of(handed: &Handed) -> Option<Vec<u8>> {
    let about = serde_json::to_value(&handed.about).ok()?;
    let in_hand = handed.in_hand.each_ref().map(|bytes| bytes.len());
    let message = Message::Connection { about: Box::new(about), in_hand };
    serde_json::to_vec(&message).ok().filter(|text| text.len() <= LONGEST)
}

/// A new process that waits, and what it was offered.
pub struct Prepared {
    new: Successor,
    sockets: Arc<Sockets>,
    limit: Duration,
}

/// Why the new program does not serve, although this process has let go.
#[derive(Debug)]
pub struct Failed {
    /// The reason.
    pub why: String,
    /// The process that serves in its place. `None`: nobody does.
    pub restarted: Option<u32>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failed { why, restarted } = self;
        match restarted {
            Some(process) => write!(f, "the program that ran was started anew, as process {process}: {why}"),
            None => write!(f, "nobody serves any more: {why}"),
        }
    }
}

/// A new process. It is killed if this is dropped.
struct Successor {
    child: Started,
    pair: Pair,
    program: String,
    /// Which connections it takes, if it takes any.
    wanted: Option<Wanted>,
    /// It wants to know what is known of servers, and which listeners are paused.
    wants_servers: bool,
    wants_paused: bool,
}

/// Kills the process when it is dropped, unless it was taken out.
struct Started(Option<Child>);

impl Started {
    /// How it has ended, if it does so at once.
    fn status(&mut self) -> String {
        let until = Instant::now() + ENDS;
        let Some(child) = &mut self.0 else { return String::new() };
        while Instant::now() < until {
            if let Ok(Some(status)) = child.try_wait() {
                return format!(": {status}");
            }
            thread::sleep(ENDS / 100);
        }
        String::new()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // it may have ended
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Successor {
    /// Starts it with the arguments of this process, and waits until it is prepared.
    fn start(
        binary: &Path,
        mut offer: Offer,
        Sockets(sockets): &Sockets,
        limit: Duration,
    ) -> Result<Successor, String> {
        let until = Instant::now() + limit;
        let (pair, theirs) = Pair::new().map_err(|e| format!("cannot make a pair of sockets: {e}"))?;
        let arguments: Vec<OsString> = env::args_os().skip(1).filter(|argument| argument != FLAG).collect();
        let mut command = Command::new(binary);
        command.args(arguments).arg(FLAG).stdin(Stdio::from(theirs));
        // They are about this process.
        for name in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID"] {
            command.env_remove(name);
        }
        let child = command.spawn().map_err(|e| format!("cannot start {}: {e}", binary.display()))?;
        drop(command); // its end of the pair
        let mut new = Successor {
            child: Started(Some(child)),
            pair,
            program: String::new(),
            wanted: None,
            wants_servers: false,
            wants_paused: false,
        };
        offer.sockets = sockets.len();
        let said = new.pair.say(&Message::Offer(offer), &[], limit).and_then(|()| {
            let say = |(of, socket): &(Of, OwnedFd)| {
                let left = until.saturating_duration_since(Instant::now());
                new.pair.say(&Message::Socket(of.clone()), &[socket.as_fd()], left)
            };
            sockets.iter().try_for_each(say)
        });
        // One that has given up says why, which is still to be heard.
        let mut listeners = HashMap::new();
        let takes = loop {
            match new.hear(until)? {
                Message::Listens { name, protocol } if listeners.len() < MOST_SOCKETS => {
                    listeners.insert(name, protocol);
                }
                Message::Prepared { program, takes, servers, paused } => {
                    (new.program, new.wants_servers, new.wants_paused) = (program, servers, paused);
                    break takes;
                }
                other => return Err(format!("the new program says what was not asked: {other:?}")),
            }
        };
        new.wanted = takes.filter(|takes| takes.version == CONNECTIONS).map(|Takes { sockets, splices, .. }| Wanted {
            listeners,
            sockets,
            splices,
        });
        said.map_err(|e| format!("the new program does not listen: {e}"))?;
        Ok(new)
    }

    /// Lets it serve, and go on with these connections. It takes commands once the pair is closed.
    fn commit(
        mut self,
        (servers, paused): &(Vec<KnownServer>, Vec<String>),
        connections: &[Outgoing],
        limit: Duration,
    ) -> Result<Pair, String> {
        let until = Instant::now() + limit;
        let deaf = |e: io::Error| format!("the new program does not listen: {e}");
        // One that has given up says why, which is still to be heard.
        let left = || until.saturating_duration_since(Instant::now());
        let said = self
            .tell_of(servers, left)
            .and_then(|()| self.tell_of_paused(paused, left))
            .and_then(|()| connections.iter().try_for_each(|one| self.send(one, until)));
        let said = said.and_then(|()| self.pair.say(&Message::Commit, &[], left()));
        if let Err(e) = said {
            return Err(self.hear(Instant::now() + ENDS).map_or_else(|why| why, |_| deaf(e)));
        }
        match self.hear(until)? {
            Message::Serving => {}
            other => return Err(format!("the new program says what was not asked: {other:?}")),
        }
        if !connections.is_empty() {
            self.pair.say(&Message::Yours, &[], limit).map_err(deaf)?;
        }
        if let Some(mut child) = self.child.0.take() {
            // It is waited for as long as this process is there. Without a thread, the rest of it stays until then.
            let _ = thread::Builder::new().name("successor".into()).spawn(move || child.wait());
        }
        Ok(self.pair)
    }

    /// Says what is known of servers, if it wants to know.
    fn tell_of(&self, servers: &[KnownServer], left: impl Fn() -> Duration) -> io::Result<()> {
        let servers = &servers[..if self.wants_servers { servers.len().min(MOST_SERVERS) } else { 0 }];
        let all = servers.chunks(SERVERS_AT_ONCE).map(|some| Message::Servers {
            known: some.iter().filter_map(|one| serde_json::to_value(one).ok()).collect(),
        });
        // names may be longer than they usually are: that must not keep the rest from being handed over
        let mut texts = all.filter_map(|all| serde_json::to_vec(&all).ok().filter(|text| text.len() <= LONGEST));
        texts.try_for_each(|text| self.pair.send(&text, &[], left()))
    }

    /// Says which listeners are paused, if it wants to know.
    fn tell_of_paused(&self, names: &[String], left: impl Fn() -> Duration) -> io::Result<()> {
        let names = names.iter().filter(|_| self.wants_paused);
        names.cloned().try_for_each(|name| self.pair.say(&Message::Paused { name }, &[], left()))
    }

    /// Sends a connection.
    fn send(&self, Outgoing { handed, text }: &Outgoing, until: Instant) -> io::Result<()> {
        let sockets: Vec<_> = handed.sockets.iter().map(AsFd::as_fd).collect();
        self.pair.send(text, &sockets, until.saturating_duration_since(Instant::now()))?;
        handed.in_hand.iter().try_for_each(|bytes| self.pair.send_all(bytes, until))
    }

    /// Waits for what it says, and for its end.
    fn hear(&mut self, until: Instant) -> Result<Message, String> {
        match self.pair.hear(until) {
            Ok(Some((Message::Refused { why }, _))) => Err(why),
            Ok(Some((message, _))) => Ok(message),
            Ok(None) => Err(format!("the new program has ended{}", self.child.status())),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err("the new program does not answer in time".into()),
            Err(e) => Err(format!("the new program is not understood: {e}")),
        }
    }
}
