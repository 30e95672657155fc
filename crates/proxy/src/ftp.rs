//! FTP (RFC 959, 2228, 2389, 2428, 3659): the control connection is read for ever, each data connection is spliced at once.
//!
//! A [`Session`] has both control connections. It passes one command of the client on at a time, and the reply back; pipelined
//! commands wait, so that replies come in order. Only ABOR and STAT reach the server during a transfer. Commands that set up a
//! data connection are not passed on: the session answers them itself, asks the server in its own way ([`data`]), and so
//! translates between active and passive, and between IPv4 and IPv6. As lines are written anew, they may change in length.
//!
//! A command that moves data waits until both data connections are made and joined, so that the server's first byte finds them
//! spliced. The flow is the engine's from then on, and outlives the session, and the process. What a session is at is one value,
//! [`State`].
//!
//! What hosts must not do (RFC 2577): see [`data`]. Where commands are judged by rules with paths, a command whose path is not
//! known is refused ([`verb`]).

pub mod address;
mod data;
pub mod line;
mod login;
mod replies;
mod service;
mod setup;
mod transfer;
pub mod verb;

use crate::{
    access::Subject,
    config::{
        ftp::{Ftp, FtpTls},
        pool::LeadTo,
    },
    context::{Front, Live},
    counters::Counters,
    fault::{Fault, Step},
    handshake_buffer::{HandshakeBuffer, HandshakeError},
    log::access_log::{Record, cut, ms_since},
    onward::{linger, write},
    pool::Lease,
    target::Target,
};
use data::{Doors, End, Line, Plan};
use line::{Command, LINE_MAX, LineError, MARK, ReplyLine, SYNCH, encode_line, parse_command, parse_reply_line};
use login::Phase;
use longsplice_engine::{EndReason, Ended, Finish, FlowInfo, Leftovers, Leg, LegOfProxy, Listener, Pair};
use replies::Progress;
pub use service::open;
use std::{
    future::{pending, poll_fn},
    io,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncWriteExt,
    sync::watch,
    time::{sleep, timeout},
};
use verb::{Kind, Named};

/// Bytes of a path in the access log, as of those of HTTP.
const LOGGED: usize = 1024;

/// What a session is at, without its sockets.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    phase: Phase,
    /// The server, once it is known.
    target: Option<Target>,
    /// How long it took to connect to it, in milliseconds.
    connect_ms: Option<u64>,
    /// The pool and its server that was chosen, or tried last, for the access log.
    tried: (Option<Arc<str>>, Option<Arc<str>>),
    /// The user that the server was told.
    user: Option<String>,
    /// The user of the proxy.
    proxy_user: Option<String>,
    /// Failed logins at the proxy.
    failures: u32,
    /// The server's directory, if rules have paths and the server has told it.
    directory: Option<String>,
    /// The client wants no other command than EPSV (RFC 2428, 4).
    epsv_all: bool,
    /// How the next data connection is made.
    plan: Option<Plan>,
}

/// One of the control connections.
struct Control {
    leg: Leg,
    buffer: HandshakeBuffer,
}

impl From<Leg> for Control {
    fn from(leg: Leg) -> Control {
        Control { leg, buffer: HandshakeBuffer::default() }
    }
}

impl Control {
    /// Writes a sign whose last byte is urgent.
    async fn signal(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut left = bytes;
        while !left.is_empty() {
            let n = poll_fn(|cx| self.leg.poll_write_urgent(cx, left)).await?;
            left = &left[n..];
        }
        Ok(())
    }
}

/// A control connection of a client, and that to its server.
struct Session<'a> {
    live: Arc<Live>,
    front: &'a Front,
    ftp: &'a Ftp,
    client: Control,
    server: Option<Control>,
    state: State,
    /// The server of a pool, occupied up to the end.
    lease: Option<Lease>,
    /// Where data connections of the plan are awaited.
    doors: Doors,
    /// Transfers whose data connections may still live.
    transfers: Vec<Weak<Line>>,
    /// Completes when no new work may begin.
    stop: watch::Receiver<bool>,
}

/// How a session ends.
#[derive(Debug)]
enum Next {
    /// Close both connections.
    Close,
    /// Close both connections, and log this. The client has been told.
    Fault(Fault),
    /// Close both connections, which nobody used for too long. The client has been told.
    Idle,
    /// Client and server speak TLS now.
    Relay,
}

/// Which commands of the client are heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hear {
    All,
    /// Those that the server takes during a transfer.
    Meanwhile,
    None,
}

/// What was heard.
enum Heard {
    Command(Command),
    /// A command that has to wait.
    Waiting,
    Reply(ReplyLine),
    /// The server's data connection.
    Data(io::Result<Leg>),
    Nothing,
    Stop,
}

/// Serves one client.
pub(crate) async fn serve(live: Live, front: &Front, ftp: &Ftp, (mut leg, buffer): (Leg, HandshakeBuffer)) {
    let (started, live) = (Instant::now(), Arc::new(live));
    let shared = live.shared.clone();
    LegOfProxy::keep_alive(&mut leg, front.policy.keepalive);
    let mut session = Session {
        live,
        front,
        ftp,
        client: Control { leg, buffer },
        server: None,
        state: State::default(),
        lease: None,
        doors: Doors::default(),
        transfers: Vec::new(),
        stop: shared.stop.clone(),
    };
    let end = session.live.end();
    let next = tokio::select! {
        next = session.run() => next,
        () = end => {
            let mut record = session.record();
            session.live.ended(&mut record);
            session.client.leg.reset_at_close();
            return session.end(record, started);
        }
    };
    let mut record = session.record();
    match next {
        Next::Relay => return session.relay(record, started),
        Next::Close => {}
        Next::Idle => record.how = EndReason::Idle.as_str(),
        Next::Fault(fault) => {
            shared.counters.fault(&fault);
            record.fault(&fault);
        }
    }
    linger(&mut session.client.leg).await;
    session.end(record, started);
}

/// What is kept of a session whose control connections are relayed.
struct OfControl {
    live: Arc<Live>,
    record: Record,
    lease: Option<Lease>,
    started: Instant,
}

impl Finish for OfControl {
    fn begun(&self, id: u64, _: Pair<SocketAddr>, _: &FlowInfo) {
        let duration_ms = ms_since(self.started);
        self.live.shared.begins(id, || Record { duration_ms, ..self.record.clone() });
    }

    fn finish(self: Box<Self>, ended: Ended, _: &FlowInfo) {
        let OfControl { live, mut record, lease, started } = *self;
        record.ended(&ended);
        drop(lease);
        write(&live, record, started);
    }
}

impl Session<'_> {
    async fn run(&mut self) -> Next {
        if let Err(next) = self.greet().await {
            return next;
        }
        loop {
            let step = async {
                let command = self.next_command().await?;
                self.serve_command(command).await
            };
            if let Err(next) = step.await {
                return next;
            }
        }
    }

    /// Returns the record of the session.
    fn record(&self) -> Record {
        let mut record = self.front.listener.record(self.client.leg.source());
        record.server = self.server.as_ref().map(|server| server.leg.remote());
        record.target = self.state.target.as_ref().map(Target::to_string);
        record.user = self.state.proxy_user.clone().or(self.state.user.clone());
        record.connect_ms = self.state.connect_ms;
        (record.pool, record.member) = self.state.tried.clone();
        record
    }

    fn info(&self) -> FlowInfo {
        let record = self.record();
        FlowInfo::new("ftp", record.target.unwrap_or_default())
            .with_user(record.user)
            .with_listen(record.listen)
            .with_name(record.name)
    }

    /// Closes both connections, and writes the line.
    fn end(self, mut record: Record, started: Instant) {
        (record.bytes_up, record.bytes_down) = (self.client.leg.bytes_in(), self.client.leg.bytes_out());
        let shared = self.live.shared.clone();
        shared.splicer.discard(self.client.leg);
        self.server.into_iter().for_each(|server| shared.splicer.discard(server.leg));
        write(&self.live, record, started);
    }

    /// Hands both control connections over, as those of a plug.
    fn relay(self, record: Record, started: Instant) {
        let (info, splicer) = (self.info(), self.live.shared.splicer.clone());
        let Session { live, client, server: Some(server), front, lease, .. } = self else { return };
        Counters::add(&live.shared.counters.relayed);
        let left = Leftovers::new(client.buffer.rest(), server.buffer.rest());
        let done = Box::new(OfControl { live, record, lease, started });
        splicer.hand_over_to(client.leg, server.leg, left, front.policy.clone(), info, done);
    }

    fn server(&self) -> io::Result<&Leg> {
        self.server.as_ref().map(|server| &server.leg).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Our ends of data connections: intercepted clients take us for the server, and a server may take us for the client.
    fn client_end(&self) -> End {
        let leg = &self.client.leg;
        End { at: leg.local(), is_ours: self.front.listener.intercepts.is_none(), host: leg.remote().ip() }
    }

    fn server_end(&self) -> io::Result<End> {
        let leg = self.server()?;
        Ok(End { at: leg.local(), is_ours: !self.front.listener.shows_clients, host: leg.remote().ip() })
    }

    /// Returns the server or the pool of all clients, or the server that the client wants. None: it has to name one.
    fn given_target(&self) -> Option<LeadTo> {
        let wanted = || self.front.listener.wanted(&self.client.leg).map(|at| LeadTo::Target(at.into()));
        self.ftp.target.clone().or_else(wanted)
    }

    /// Returns whether the proxy reads logins.
    fn is_gated(&self) -> bool {
        self.given_target().is_none() || !self.ftp.users.is_empty()
    }

    /// Returns whether a data connection lives.
    fn is_moving(&self) -> bool {
        self.transfers.iter().any(|line| line.strong_count() > 0)
    }

    /// Waits for the next command, the next line of a reply, or the server's data connection, for so long at most.
    async fn hear(
        &mut self,
        commands: Hear,
        within: Option<u16>,
        limit: Duration,
        door: Option<&Listener>,
    ) -> Result<Heard, Next> {
        let may_stop = commands == Hear::All && !self.is_moving();
        let shared = self.live.shared.clone();
        let Session { client, server, stop, .. } = self;
        let host = server.as_ref().map(|server| server.leg.remote().ip());
        let data = async {
            match door.zip(host) {
                Some((door, host)) => data::accept_from(&shared, door, host).await,
                None => pending().await,
            }
        };
        let Control { leg, buffer } = client;
        let from_client = async {
            match commands {
                Hear::All => buffer.message_within(LINE_MAX, leg, parse_command).await.map(Heard::Command),
                Hear::Meanwhile => {
                    let parse = |input: &[u8]| {
                        Ok(parse_command(input)?.map(|(command, used)| match Kind::of(&command.verb) {
                            Kind::Meanwhile => (Heard::Command(command), used),
                            _ => (Heard::Waiting, 0),
                        }))
                    };
                    buffer.message_within(LINE_MAX, leg, parse).await
                }
                Hear::None => pending().await,
            }
        };
        let from_server = async {
            match server {
                Some(Control { leg, buffer }) => {
                    buffer.message_within(LINE_MAX, leg, |input| parse_reply_line(input, within)).await
                }
                None => pending().await,
            }
        };
        let stopped = async {
            match may_stop {
                true => drop(stop.wait_for(|stop| *stop).await),
                false => pending().await,
            }
        };
        tokio::select! {
            biased;
            leg = data => Ok(Heard::Data(leg)),
            line = from_server => match line {
                Ok(line) => Ok(Heard::Reply(line)),
                Err(error) => Err(self.server_failed(error).await),
            },
            command = from_client => match command {
                Ok(heard) => Ok(heard),
                Err(error) => Err(self.client_failed(error).await),
            },
            () = stopped => Ok(Heard::Stop),
            () = sleep(limit) => Ok(Heard::Nothing),
        }
    }

    async fn server_failed(&mut self, error: HandshakeError<LineError>) -> Next {
        let why = match error {
            HandshakeError::Closed => "the server closed its control connection".to_owned(),
            error => format!("from the server: {error}"),
        };
        match self.tell(421, &format!("Closing: {why}")).await {
            Ok(()) => Next::Fault(Fault::BadReply(why)),
            Err(next) => next,
        }
    }

    async fn client_failed(&mut self, error: HandshakeError<LineError>) -> Next {
        match error {
            HandshakeError::Closed if self.client.buffer.seen().is_empty() => Next::Close,
            HandshakeError::Closed | HandshakeError::Io(_) => Next::Fault(Fault::BadRequest(error.to_string())),
            HandshakeError::TooLong(_) | HandshakeError::Parse(_) => {
                match self.tell(500, &format!("Closing: {error}")).await {
                    Ok(()) => Next::Fault(Fault::BadRequest(error.to_string())),
                    Err(next) => next,
                }
            }
        }
    }

    /// Waits for the next command. Until then the server may only say that it leaves.
    async fn next_command(&mut self) -> Result<Command, Next> {
        // Once the program stops, the end of the last transfer is waited for.
        const LOOK: Duration = Duration::from_secs(1);
        loop {
            let limit = match self.state.phase {
                _ if *self.stop.borrow() => LOOK,
                Phase::Server => self.front.policy.idle_limit.get(),
                Phase::Name | Phase::Password { .. } => self.front.listener.limits.keep_alive,
            };
            match self.hear(Hear::All, None, limit, None).await? {
                Heard::Command(command) => return Ok(command),
                Heard::Reply(line) if line.code == 421 => {
                    self.tell_line(&line.text).await?;
                    return Err(Next::Close);
                }
                Heard::Reply(line) => {
                    let why = format!("the server replies {} to nothing", line.code);
                    self.tell(421, &format!("Closing: {why}")).await?;
                    return Err(Next::Fault(Fault::BadReply(why)));
                }
                Heard::Nothing if self.is_moving() || *self.stop.borrow() => {}
                Heard::Nothing => {
                    self.tell(421, "Closing: no command for too long").await?;
                    return Err(match self.state.phase {
                        Phase::Server => Next::Idle,
                        Phase::Name | Phase::Password { .. } => Next::Fault(Fault::Timeout(Step::Handshake)),
                    });
                }
                Heard::Stop => {
                    self.tell(421, "Closing: the proxy stops").await?;
                    return Err(Next::Close);
                }
                Heard::Waiting | Heard::Data(_) => {}
            }
        }
    }

    async fn serve_command(&mut self, command: Command) -> Result<(), Next> {
        if !command.answers.is_empty() {
            self.tell_raw(&command.answers).await?;
        }
        if self.state.phase != Phase::Server {
            return self.log_in(command).await;
        }
        if command.verb.is_empty() {
            return self.tell_wrong(500, "This is no command").await;
        }
        if let Err(fault) = self.judge(&command) {
            self.log_refused(&command, &fault);
            return self.tell(550, &fault.to_string()).await;
        }
        let gated = self.is_gated();
        match Kind::of(&command.verb) {
            Kind::Data(setup) => self.prepare(setup, &command).await,
            Kind::Transfer => self.transfer(&command).await,
            Kind::Protect => self.protect(&command).await,
            Kind::Refused => self.tell(502, "Not through this proxy").await,
            Kind::User | Kind::Reinitialize if gated => {
                self.tell(503, "You are logged in: close, and connect again").await
            }
            Kind::Reinitialize => {
                let State { target, connect_ms, tried, .. } = std::mem::take(&mut self.state);
                self.state = State { phase: Phase::Server, target, connect_ms, tried, ..State::default() };
                self.doors = Doors::default();
                self.pass_on(&command).await.map(drop)
            }
            Kind::User => {
                self.state.user = Some(String::from_utf8_lossy(&command.argument).into_owned());
                self.pass_on(&command).await.map(drop)
            }
            Kind::Features => self.features(&command).await,
            Kind::Directory | Kind::Pass | Kind::Account | Kind::Meanwhile | Kind::Plain => {
                self.pass_on(&command).await.map(drop)
            }
        }
    }

    /// Checks a command against the rules.
    fn judge(&self, command: &Command) -> Result<(), Fault> {
        let rules = &self.front.listener.rules;
        let (Some(target), Ok(server)) = (&self.state.target, self.server()) else { return Ok(()) };
        let path = match verb::path(&command.verb, &command.argument) {
            _ if !rules.know_paths() => None,
            Named::Nothing => None,
            Named::Path(path) => Some(verb::resolve(self.state.directory.as_deref(), path)),
            Named::Unknown => Some(None),
        };
        let unknown = || Fault::BadRequest("rules have paths, and that of this command is not known".into());
        let path = path.map(|known| known.ok_or_else(unknown)).transpose()?;
        let client = self.client.leg.source().ip();
        let user = self.state.proxy_user.as_deref();
        let subject = Subject { client, method: Some(&command.verb), path: path.as_deref(), user };
        rules.check(&subject, target, server.remote()).map_err(Fault::Denied)
    }

    /// Writes a line for a command that was refused.
    fn log_refused(&self, command: &Command, fault: &Fault) {
        self.live.shared.counters.fault(fault);
        let mut record = self.record_of(command);
        record.fault(fault);
        write(&self.live, record, Instant::now());
    }

    /// Returns the record of a command.
    fn record_of(&self, command: &Command) -> Record {
        let mut record = self.record();
        let path = match verb::path(&command.verb, &command.argument) {
            Named::Path(path) => verb::resolve(self.state.directory.as_deref(), path),
            Named::Nothing | Named::Unknown => None,
        };
        record.connect_ms = None; // that is the session's
        record.method = Some(command.verb.clone());
        if matches!(Kind::of(&command.verb), Kind::Pass | Kind::Account | Kind::Protect) {
            return record; // passwords, and what stands for them
        }
        let uri = path.unwrap_or_else(|| String::from_utf8_lossy(&command.argument).into_owned());
        record.uri = Some(cut(&uri, LOGGED));
        record
    }

    async fn write_to_client(&mut self, bytes: &[u8]) -> Result<(), Next> {
        let limit = self.front.listener.limits.reply;
        match timeout(limit, self.client.leg.write_all(bytes)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(Next::Fault(Fault::BadRequest(format!("the client does not listen: {e}")))),
            Err(_) => Err(Next::Fault(Fault::Timeout(Step::Reply))),
        }
    }

    /// Sends bytes of ours to the client.
    async fn tell_raw(&mut self, bytes: &[u8]) -> Result<(), Next> {
        self.write_to_client(bytes).await
    }

    /// Sends a line of the server to the client.
    async fn tell_line(&mut self, text: &[u8]) -> Result<(), Next> {
        self.write_to_client(&encode_line(text)).await
    }

    /// Sends a reply of ours.
    async fn tell(&mut self, code: u16, text: &str) -> Result<(), Next> {
        self.write_to_client(&encode_line(format!("{code} {text}").as_bytes())).await
    }

    /// Refuses what nobody could serve.
    async fn tell_wrong(&mut self, code: u16, text: &str) -> Result<(), Next> {
        self.live.shared.counters.fault(&Fault::BadRequest(String::new()));
        self.tell(code, text).await
    }

    /// Sends a command to the server.
    async fn send(&mut self, command: &Command) -> Result<(), Next> {
        let limit = self.front.listener.limits.reply;
        let Some(server) = &mut self.server else { return Err(Next::Close) };
        let sending = async {
            if command.synch {
                server.signal(&SYNCH).await?;
            }
            server.leg.write_all(&command.encode()).await
        };
        match timeout(limit, sending).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(self.server_failed(HandshakeError::Io(e)).await),
            Err(_) => Err(self.late().await),
        }
    }

    /// Waits for the next line of a reply. Returns the code of the reply that ends with it, too.
    async fn hear_line(&mut self, progress: &mut Progress) -> Result<(ReplyLine, Option<u16>), Next> {
        let limit = self.front.listener.limits.reply;
        match self.hear(Hear::None, progress.within(), limit, None).await? {
            Heard::Reply(line) => {
                let code = self.note(progress, &line).await?;
                Ok((line, code))
            }
            _ => Err(self.late().await),
        }
    }

    /// Takes note of a line of a reply. Returns the code of the reply that ends with it.
    async fn note(&mut self, progress: &mut Progress, line: &ReplyLine) -> Result<Option<u16>, Next> {
        match progress.note(line) {
            Ok(code) => Ok(code),
            Err(no_end) => {
                let why = format!("from the server: {no_end}");
                self.tell(421, &format!("Closing: {why}")).await?;
                Err(Next::Fault(Fault::BadReply(why)))
            }
        }
    }

    /// The server takes too long.
    async fn late(&mut self) -> Next {
        let fault = Fault::Timeout(Step::Reply);
        match self.tell(421, &format!("Closing: {fault}")).await {
            Ok(()) => Next::Fault(fault),
            Err(next) => next,
        }
    }

    /// Hears a reply to its end, for ourselves. Returns its code and its last line. Nobody else sees its lines, so the last one
    /// is not waited for once the time for one is over.
    async fn hear_reply(&mut self) -> Result<(u16, Vec<u8>), Next> {
        let until = Instant::now() + self.front.listener.limits.reply;
        let mut progress = Progress::default();
        while Instant::now() < until {
            match self.hear_line(&mut progress).await? {
                (line, Some(421)) => {
                    self.tell_line(&line.text).await?;
                    return Err(Next::Close);
                }
                (line, Some(code @ 200..)) => return Ok((code, line.text)),
                _ => {}
            }
        }
        Err(self.late().await)
    }

    /// Passes a line of the server on.
    async fn pass_line(&mut self, line: &ReplyLine) -> Result<(), Next> {
        if line.synch {
            let limit = self.front.listener.limits.reply;
            match timeout(limit, self.client.signal(&MARK)).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => return Err(Next::Fault(Fault::BadRequest(format!("the client does not listen: {e}")))),
                Err(_) => return Err(Next::Fault(Fault::Timeout(Step::Reply))),
            }
        }
        self.tell_line(&line.text).await?;
        if line.is_last && line.code == 421 { Err(Next::Close) } else { Ok(()) }
    }

    /// Passes a reply on, however long it is. Returns its code.
    async fn relay_reply(&mut self) -> Result<u16, Next> {
        let mut progress = Progress::default();
        loop {
            let (line, code) = self.hear_line(&mut progress).await?;
            self.pass_line(&line).await?;
            if let Some(code @ 200..) = code {
                return Ok(code);
            }
        }
    }

    /// Passes a command on, and its reply back.
    async fn pass_on(&mut self, command: &Command) -> Result<u16, Next> {
        self.send(command).await?;
        let code = self.relay_reply().await?;
        match (Kind::of(&command.verb), code) {
            _ if command.verb == "QUIT" => return Err(Next::Close),
            (Kind::User | Kind::Pass | Kind::Account, 230) | (Kind::Directory, 200..=299) => self.look_where().await?,
            _ => {}
        }
        Ok(code)
    }

    /// Asks for the server's directory, if rules have to know.
    async fn look_where(&mut self) -> Result<(), Next> {
        if self.front.listener.rules.know_paths() {
            self.send(&Command::new("PWD", "")).await?;
            let (code, text) = self.hear_reply().await?;
            self.state.directory = if code == 257 { verb::parse_257(&text) } else { None };
        }
        Ok(())
    }

    /// Passes FEAT on. Of the answer, what we refuse is left out.
    async fn features(&mut self, command: &Command) -> Result<(), Next> {
        self.send(command).await?;
        let protect = self.ftp.options.tls == FtpTls::Relay;
        let (mut progress, mut missing) = (Progress::default(), vec!["EPRT", "EPSV"]);
        loop {
            let is_first = progress.within().is_none();
            let (line, code) = self.hear_line(&mut progress).await?;
            let is_middle = !is_first && !line.is_last;
            missing.retain(|name| !line.text.trim_ascii().eq_ignore_ascii_case(name.as_bytes()));
            if !is_first && code == Some(211) {
                for name in std::mem::take(&mut missing) {
                    self.tell_raw(format!(" {name}\r\n").as_bytes()).await?;
                }
            }
            if !(is_middle && verb::is_left_out(&line.text, protect)) {
                self.pass_line(&line).await?;
            }
            if let Some(200..) = code {
                return Ok(());
            }
        }
    }

    async fn refuse_protection(&mut self) -> Result<(), Next> {
        self.tell(502, "This proxy reads commands: TLS is not offered").await
    }

    /// Refuses to protect the control connection, or leaves it to client and server from then on.
    async fn protect(&mut self, command: &Command) -> Result<(), Next> {
        if self.ftp.options.tls == FtpTls::Refuse {
            return self.refuse_protection().await;
        }
        let is_tls =
            ["TLS", "TLS-C", "TLS-P", "SSL"].iter().any(|name| command.argument.eq_ignore_ascii_case(name.as_bytes()));
        if command.verb == "AUTH" && !is_tls {
            return self.tell(504, "Only TLS").await;
        }
        let code = self.pass_on(command).await?;
        match (command.verb.as_str(), code) {
            ("AUTH", 234) => Err(Next::Relay),
            _ => Ok(()),
        }
    }
}
