//! The client side of the control socket.

use crate::{
    Outcome,
    args::{PurgeArgs, RuleArgs, StopArgs, UpgradeArgs},
    control::{Ask, Request, VERSION},
    handing::successor::Upgraded,
    paths::{self, PATIENCE},
    which::{FlowsArgs, ListenerArgs, Which},
};
use longsplice_proxy::{Question, Reloaded};
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    error::Error,
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{self, Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// Errors of a request to the control socket.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No process listens on the socket.
    #[error("no longsplice listens on {}: start one in this network namespace, or name its socket with --control", .0.display())]
    NotRunning(PathBuf),
    /// A process listens, but connecting or exchanging messages with it failed.
    #[error("{}: {source}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// A process listens, but did not answer in time.
    #[error("{}: no answer within {} s: the process is stopped, or hangs", .0.display(), PATIENCE.as_secs())]
    Silent(PathBuf),
    /// The process closed the connection without an answer.
    #[error("{}: hung up without an answer (too many clients?)", .0.display())]
    HungUp(PathBuf),
    /// The answer is not valid JSON.
    #[error("{}: no JSON in the answer: {source}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// The parse error.
        source: serde_json::Error,
    },
    /// The process answered with an error.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a control socket.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to `control`, or to the default socket of this network namespace.
    pub fn connect(control: Option<&Path>) -> Result<Client, AskError> {
        let path = match control {
            Some(path) => path.to_owned(),
            None => paths::control_socket().map_err(|source| AskError::Socket { path: "netns".into(), source })?,
        };
        let stream = match paths::connect(&path) {
            Ok(stream) => stream,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(AskError::Silent(path)),
            Err(e) if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&e.kind()) => {
                return Err(AskError::NotRunning(path));
            }
            Err(source) => return Err(AskError::Socket { path, source }),
        };
        Ok(Client { path, stream: BufReader::new(stream) })
    }

    /// Sends a request and waits for the answer.
    pub fn ask(&mut self, ask: Ask) -> Result<Value, AskError> {
        self.send(ask)?;
        self.answer()
    }

    /// The same for as long as it takes.
    pub fn ask_long(&mut self, ask: Ask) -> Result<Value, AskError> {
        self.send(ask)?;
        self.wait_long()?;
        self.answer()
    }

    /// Sends a request.
    pub fn send(&mut self, ask: Ask) -> Result<(), AskError> {
        let stream = self.stream.get_mut();
        let request = Request { version: VERSION, ask };
        let mut line = serde_json::to_string(&request).expect("numbers and words are JSON");
        line.push('\n');
        let sent = stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.write_all(line.as_bytes()));
        sent.map_err(|e| self.failed(e))
    }

    fn failed(&self, source: io::Error) -> AskError {
        match source.kind() {
            io::ErrorKind::WouldBlock => AskError::Silent(self.path.clone()),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => AskError::HungUp(self.path.clone()),
            _ => AskError::Socket { path: self.path.clone(), source },
        }
    }

    /// Waits for further answers for as long as it takes.
    pub fn wait_long(&mut self) -> Result<(), AskError> {
        self.stream.get_ref().set_read_timeout(None).map_err(|e| self.failed(e))
    }

    /// Waits for the next line. It is empty only at the end.
    pub fn line(&mut self) -> Result<String, AskError> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line);
        read.map_err(|e| self.failed(e))?;
        if line.is_empty() { Err(AskError::HungUp(self.path.clone())) } else { Ok(line) }
    }

    /// Waits for the next answer to a request that has several.
    pub fn answer(&mut self) -> Result<Value, AskError> {
        let answer = self.line()?;
        self.read(&answer)
    }

    /// Reads an answer. Fails if it is an error.
    pub fn read(&self, answer: &str) -> Result<Value, AskError> {
        let answer: Value =
            serde_json::from_str(answer).map_err(|source| AskError::Answer { path: self.path.clone(), source })?;
        match answer.get("error").and_then(Value::as_str) {
            Some(why) => Err(AskError::Refused(why.into())),
            None => Ok(answer),
        }
    }

    /// Waits for the last line and then for the process to exit, at most `limit` for each.
    fn wait_end(mut self, limit: Duration) -> Result<(), Box<dyn Error>> {
        self.stream.get_mut().set_read_timeout(Some(limit))?;
        let mut last = String::new();
        // A reset means that the process has exited, too.
        let runs = |e: &io::Error| e.kind() == io::ErrorKind::WouldBlock;
        if self.stream.read_line(&mut last).is_err_and(|e| runs(&e)) || self.stream.fill_buf().is_err_and(|e| runs(&e))
        {
            return Err(format!("it was told to stop, but still runs after {} s", limit.as_secs()).into());
        }
        match serde_json::from_str::<Value>(&last).ok().as_ref().map(|last| last.get("error").and_then(Value::as_str)) {
            Some(None) => Ok(()),
            Some(Some(why)) => Err(format!("it has stopped, but not cleanly: {why}").into()),
            None => Err("it has ended without a word: it was killed, or has crashed".into()),
        }
    }
}

/// `longsplice splice`.
pub fn splice(control: Option<&Path>, id: u64) -> Outcome {
    Client::connect(control)?.ask(Ask::Splice { id })?;
    Ok(ExitCode::SUCCESS)
}

/// `longsplice unsplice`.
pub fn unsplice(control: Option<&Path>, id: u64) -> Outcome {
    Client::connect(control)?.ask(Ask::Unsplice { id })?;
    Ok(ExitCode::SUCCESS)
}

/// Has the process at this control socket reload. Returns what has changed.
pub fn reload_at(control: &Path, enforce: bool) -> Result<Reloaded, AskError> {
    let mut answer = Client::connect(Some(control))?.ask_long(Ask::Reload { enforce })?;
    let mut names = |key: &str| serde_json::from_value(answer[key].take()).unwrap_or_default();
    let [added, moved, removed] = ["added", "moved", "removed"].map(&mut names);
    Ok(Reloaded { added, moved, removed, reset: answer["reset"].as_u64().unwrap_or_default() })
}

/// `longsplice reload`.
pub fn reload(control: Option<&Path>, enforce: bool) -> Outcome {
    // it may wait for an upgrade
    let answer = Client::connect(control)?.ask_long(Ask::Reload { enforce })?;
    for what in ["added", "moved", "removed"] {
        for name in answer.get(what).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            println!("{what} {name}");
        }
    }
    if let Some(reset) = answer.get("reset").and_then(Value::as_u64).filter(|reset| enforce || *reset > 0) {
        println!("reset {reset}");
    }
    Ok(ExitCode::SUCCESS)
}

/// `longsplice upgrade`.
pub fn upgrade(control: Option<&Path>, UpgradeArgs { binary, limit }: &UpgradeArgs) -> Outcome {
    /// Time allowed beyond what the process needs.
    const BEYOND: u64 = 10;
    // the process may be in another directory
    let binary = binary.as_ref().map(path::absolute).transpose()?;
    let mut client = Client::connect(control)?;
    let answer = client.ask(Ask::Upgrade { binary, limit: *limit })?;
    let within = answer.get("within").and_then(Value::as_u64).unwrap_or(0).saturating_add(BEYOND);
    client.stream.get_mut().set_read_timeout(Some(Duration::from_secs(within)))?;
    let Upgraded { process, program, listeners, left, taken, stay } = Upgraded::deserialize(client.answer()?)?;
    println!("process {process} serves now, longsplice {program}");
    listeners.iter().for_each(|name| println!("handed over {name}"));
    println!("spliced, and handed over: {left}\nnot spliced, and handed over: {taken}");
    println!("stay with the old process: {stay}");
    Ok(ExitCode::SUCCESS)
}

/// `longsplice purge`.
pub fn purge(control: Option<&Path>, args: &PurgeArgs) -> Outcome {
    let mut client = Client::connect(control)?;
    let (mut removed, mut after) = (0, None);
    loop {
        let answer = client.ask(Ask::Purge { url: args.url.clone(), below: args.below, after })?;
        removed += answer.get("removed").and_then(Value::as_u64).unwrap_or(0);
        after = answer.get("after").and_then(|after| Deserialize::deserialize(after).ok());
        if after.is_none() {
            break;
        }
    }
    println!("removed {removed}");
    Ok(ExitCode::SUCCESS)
}

/// `longsplice rule`.
pub fn rule(control: Option<&Path>, args: &RuleArgs) -> Outcome {
    let RuleArgs { client, target, user, method, path, listener, json } = args;
    let question = Question {
        client: *client,
        target: target.to_string(),
        user: user.clone(),
        method: method.clone(),
        path: path.clone(),
        listener: listener.clone(),
    };
    let answer = Client::connect(control)?.ask(Ask::Rule(question))?;
    let decided = answer.get("decided").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut out = io::stdout().lock();
    if *json {
        writeln!(out, "{answer}")?;
    }
    for one in decided.iter().filter(|_| !json) {
        let text = |key| one[key].as_str().unwrap_or("any address");
        let allowed = if one["allowed"] == true { "allowed" } else { "denied" };
        let by = one["rule"].as_u64().map_or_else(String::new, |n| format!(" by rule {n}"));
        let through =
            one["upstream"].as_str().map_or_else(String::new, |name| format!(", through upstream proxy {name}"));
        let pool = one["pool"].as_str().map_or_else(String::new, |name| match through.is_empty() {
            true => format!(", to a server of pool {name}"),
            false => format!(" (pool {name})"),
        });
        let server = text("server");
        let comma = if pool.is_empty() && through.is_empty() || by.is_empty() { "" } else { "," };
        writeln!(out, "{}: {server}: {allowed}{through}{pool}{comma}{by}: {}", text("listener"), text("why"))?;
    }
    if decided.is_empty() {
        return Err(format!("no listener lets its clients choose {target}: all that could have a fixed target").into());
    }
    Ok(if decided.iter().any(|one| one["allowed"] == true) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The flows of a request, by their numbers or by conditions.
type Named = (Option<Vec<u64>>, Option<Which>);

/// Returns the flows of each request. `to`: what happens to them.
fn named(to: &str, ids: &[u64], which: &Which, all: bool) -> Result<Vec<Named>, String> {
    /// Numbers in one request, which has some 20 digits for each.
    const AT_ONCE: usize = 100;
    match (ids.is_empty(), which.is_any()) {
        (true, true) if !all => Err(format!("name the flows to {to}: by number, by conditions, or with --all")),
        (false, false) => Err(format!("name the flows to {to} by number or by conditions, not by both")),
        (true, _) => Ok(vec![(None, Some(which.clone()))]),
        (false, _) => Ok(ids.chunks(AT_ONCE).map(|some| (Some(some.to_vec()), None)).collect()),
    }
}

/// `longsplice kill`.
pub fn kill(control: Option<&Path>, FlowsArgs { ids, all, which }: &FlowsArgs) -> Outcome {
    let asked = named("end", ids, which, *all)?;
    let mut client = Client::connect(control)?;
    let (mut killed, mut left) = (0, Vec::new());
    for (ids, which) in asked {
        let answer = client.ask(Ask::Kill { ids, which })?;
        killed += answer.get("killed").and_then(Value::as_u64).unwrap_or(0);
        let rest = answer.get("left").and_then(Value::as_array).into_iter().flatten();
        left.extend(rest.map(Value::to_string));
    }
    println!("killed {killed}");
    match left.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Err(format!("there is no flow of this process with these numbers: {}", left.join(", ")).into()),
    }
}

/// `longsplice release`.
pub fn release(control: Option<&Path>, FlowsArgs { ids, all, which }: &FlowsArgs) -> Outcome {
    let asked = named("release", ids, which, *all)?;
    let mut client = Client::connect(control)?;
    let mut out = io::stdout().lock();
    let (mut released, mut left) = (0, Vec::new());
    for (ids, which) in asked {
        let mut answer = client.ask(Ask::Release { ids, which })?;
        released += answer["released"].as_u64().unwrap_or_default();
        left.extend(Vec::<Kept>::deserialize(answer["left"].take())?);
    }
    writeln!(out, "released {released}")?;
    for Kept { id, count, why } in &left {
        match (id, count) {
            (Some(id), _) => writeln!(out, "not {id}: {why}")?,
            (None, count) => writeln!(out, "not released: {count}: {why}")?,
        }
    }
    // whoever has given conditions has asked for those that can be
    Ok(if left.iter().any(|kept| kept.id.is_some()) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// `longsplice pause` and `longsplice resume`.
pub fn pause(control: Option<&Path>, ListenerArgs { listeners }: &ListenerArgs, is_paused: bool) -> Outcome {
    let listeners = listeners.clone();
    let ask = if is_paused { Ask::Pause { listeners } } else { Ask::Resume { listeners } };
    let answer = Client::connect(control)?.ask(ask)?;
    let (done, was) = if is_paused { ("paused", "was paused already") } else { ("resumed", "was not paused") };
    let names = |key: &str| answer[key].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut out = io::stdout().lock();
    names(done).try_for_each(|name| writeln!(out, "{done} {name}"))?;
    names("already").try_for_each(|name| writeln!(out, "{name} {was}"))?;
    Ok(ExitCode::SUCCESS)
}

/// A flow that was not released, or how many of those that were chosen by conditions.
#[derive(Deserialize)]
struct Kept {
    #[serde(default)]
    id: Option<u64>,
    #[serde(default)]
    count: u64,
    why: String,
}

/// Flow statistics of one listener.
#[derive(Deserialize)]
struct Listener {
    name: String,
    listen: String,
    protocol: String,
    spliced: u64,
    refused: BTreeMap<String, u64>,
    #[serde(default)]
    paused: bool,
    live: u32,
    ended: BTreeMap<String, u64>,
}

/// `longsplice counters`.
pub fn counters(control: Option<&Path>, json: bool) -> Outcome {
    let answer = Client::connect(control)?.ask(Ask::Counters)?;
    let mut out = io::stdout().lock();
    if json {
        writeln!(out, "{answer}")?;
        return Ok(ExitCode::SUCCESS);
    }
    for listener in answer.get("listeners").and_then(Value::as_array).into_iter().flatten() {
        let Listener { name, listen, protocol, spliced, refused, paused, live, ended } =
            Listener::deserialize(listener)?;
        let paused = if paused { ", paused" } else { "" };
        writeln!(out, "{name}: {protocol} on {listen}{paused}\n  {:<20} {spliced:>15}", "spliced")?;
        for (why, n) in refused.iter().filter(|(_, n)| **n > 0) {
            writeln!(out, "  {:<20} {n:>15}", format!("not: {why}"))?;
        }
        writeln!(out, "  {:<20} {live:>15}", "live")?;
        for (how, n) in ended {
            writeln!(out, "  {:<20} {n:>15}", format!("ended: {how}"))?;
        }
    }
    let sections = [("proxy", "proxy"), ("data path, packets", "verdicts"), ("translucent proxying, packets", "tpot")];
    for (title, key) in sections {
        let Some(counters) = answer.get(key).and_then(Value::as_object).filter(|c| !c.is_empty()) else { continue };
        writeln!(out, "{title}")?;
        for (name, n) in counters {
            writeln!(out, "  {name:<20} {n:>15}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `longsplice stop`.
pub fn stop(control: Option<&Path>, args: &StopArgs) -> Outcome {
    /// Time allowed after the drain: for writing the last lines of the log and detaching.
    const AFTER: Duration = Duration::from_secs(20);
    match Client::connect(control) {
        Ok(mut client) => {
            let answer = client.ask(Ask::Stop { drain: args.drain, flush: args.flush })?;
            let within = answer.get("within").and_then(Value::as_u64).unwrap_or(0);
            client.wait_end(Duration::from_secs(within).saturating_add(AFTER))?;
        }
        // No process runs, but one that was killed may have left pins behind.
        Err(AskError::NotRunning(_)) if args.flush => {}
        Err(e) => return Err(e.into()),
    }
    if args.flush {
        let pin = paths::own_pin_folder()?;
        if let Some(resets) = longsplice_datapath::flush(&pin)? {
            println!("removed {}; {resets}", pin.display());
        }
    }
    if args.all {
        for path in longsplice_datapath::remove_dead()?.into_iter().chain(paths::remove_leftovers()?) {
            println!("removed {}", path.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
