//! The login gateway: asks a client on its own connection who it is and where it wants to go, connects it, and says so. From
//! there on it is a connection like any other.
//!
//! [`session`] is the conversation, [`telnet`] the protocol, [`editor`] the lines, [`handover`] what is settled with a telnet
//! client and its server before the splice. This file reads and writes, and decides: [`Login`] is its configuration.

pub mod editor;
pub mod handover;
pub mod session;
pub mod telnet;

use crate::{
    access::{Denied, Subject},
    config::ListenerConfig,
    config::login::{Destination, Login},
    context::ServerContext,
    counters::Counters,
    fault::{Fault, Step},
    handshake_buffer::HandshakeBuffer,
    log::access_log::Record,
    onward::{Ready, connect, connect_under},
    socks::Stream,
    target::{Host, Target},
    users::{Credentials, NoUser, cleared::Cleared},
};
use handover::Handover;
use longsplice_engine::{Leftovers, Leg};
use session::{Event, Manner, Session};
use std::{
    borrow::Cow,
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{sleep, timeout},
};

/// Time before the answer to a wrong password: three guesses take as many seconds, and a connection more.
const DELAY: Duration = Duration::from_secs(1);
/// Time for a client and a server to answer what is settled before the splice: some round trips. Both ends agree without it,
/// only later.
const SETTLE: Duration = Duration::from_secs(5);
/// Bytes per read. What is typed ahead beyond that waits in the kernel.
const READ: usize = 512;
/// Port of a host that is named without one.
const PORT: u16 = 23;

/// Asks the client, and connects it.
pub(crate) async fn handshake(
    shared: &ServerContext,
    listener: &ListenerConfig,
    login: &Login,
    (client, buffer): (&mut Leg, HandshakeBuffer),
    record: &mut Record,
) -> Result<Ready, Fault> {
    let wanted = listener.wanted(client);
    let lead = |user: Option<&str>| Some(login.lead(user, wanted?, |target| shared.resolver.known(target)));
    let mut talk = Talk::new(login, client, buffer);
    let asked = timeout(login.time, talk.ask((shared, &lead), login, record)).await;
    let chosen = match asked {
        Ok(Ok(chosen)) => chosen,
        Ok(Err(fault)) => {
            talk.part(&fault).await;
            return Err(fault);
        }
        Err(_) => {
            let fault = Fault::Timeout(Step::Handshake);
            talk.part(&fault).await;
            return Err(fault);
        }
    };
    record.target = Some(chosen.target.to_string());
    let Talk { session, input, at, .. } = talk;
    let user = record.user.clone();
    let subject = Subject::by(client.source().ip()).of(user.as_deref());
    let connected = match chosen.configured {
        // A configured target is like that of a plug.
        true => {
            let rules = if listener.rules.guarded {
                Cow::Owned(listener.rules.unguarded())
            } else {
                Cow::Borrowed(&listener.rules)
            };
            connect_under(&rules, shared, listener, client, &subject, (&chosen.target, wanted), record).await
        }
        false => connect(shared, listener, client, &subject, &chosen.target, record).await,
    };
    let mut out = Vec::new();
    let mut reached = match connected {
        Ok(reached) => reached,
        Err(fault) => {
            session.say(&format!("cannot connect to {}: {}\n", chosen.name, reason(&fault)), &mut out);
            // The refusal is logged either way; the client may be gone.
            let _ = timeout(login.prompt, client.write_all(&out)).await;
            return Err(fault);
        }
    };
    let server = &mut reached.leg;
    record.server = Some(server.remote());
    session.say(&format!("connected to {}\n", chosen.name), &mut out);
    let handed = async {
        write(client, &mut out, login.prompt).await?;
        hand_over(session, (client, server), &input[at..], (chosen.telnet, user.filter(|_| login.user_variable))).await
    };
    match handed.await {
        Ok(left) => Ok(Ready::reached(reached, left)),
        Err(fault) => {
            shared.splicer.discard(reached.leg);
            Err(fault)
        }
    }
}

/// Settles what the client has agreed on with the gateway. Returns what is typed ahead.
async fn hand_over(
    session: Session,
    (client, server): (&mut Leg, &mut Leg),
    rest: &[u8],
    tell: (bool, Option<String>),
) -> Result<Leftovers, Fault> {
    let held = session.held();
    if !session.speaks_telnet() {
        return Ok(Leftovers::for_server(held.into_iter().chain(rest.iter().copied()).collect::<Vec<u8>>()));
    }
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let mut handover = Handover::new(session.into_parts(), tell, &mut to_client, &mut to_server);
    held.into_iter().for_each(|byte| telnet::write(telnet::Item::Data(byte), &mut to_server));
    handover.from_client(rest, &mut to_server, &mut to_client);
    let (mut up, mut down) = ([0; READ], [0; READ]);
    let settle = async {
        loop {
            write_all(client, &mut to_client).await?;
            write_out(server, &mut to_server).await.map_err(Fault::Unreachable)?;
            if handover.is_settled() {
                return Ok(());
            }
            let (n, of_client) = tokio::select! {
                n = client.read(&mut up) => (n.map_err(|e| Fault::BadRequest(e.to_string()))?, true),
                n = server.read(&mut down) => (n.map_err(Fault::Unreachable)?, false),
            };
            match (n, of_client) {
                // The relay sees the end as well, and passes it on.
                (0, _) => return Ok(()),
                (n, true) => handover.from_client(&up[..n], &mut to_server, &mut to_client),
                (n, false) => handover.from_server(&down[..n], &mut to_client, &mut to_server),
            }
        }
    };
    match timeout(SETTLE, settle).await {
        Ok(settled) => settled?,
        // Both agree later, but for a message that is only half there.
        Err(_) if handover.is_within() => return Err(Fault::Timeout(Step::Handshake)),
        Err(_) => {}
    }
    let (for_server, for_client) = handover.pending();
    to_server.extend(for_server);
    to_client.extend(for_client);
    Ok(Leftovers::new(to_server, to_client))
}

/// A destination that was chosen.
struct Chosen {
    /// As the client knows it.
    name: String,
    target: Target,
    /// It stands in the configuration.
    configured: bool,
    /// The server speaks telnet.
    telnet: bool,
}

impl From<&Destination> for Chosen {
    fn from(of: &Destination) -> Chosen {
        Chosen { name: of.name.clone(), target: of.target.clone(), configured: true, telnet: of.telnet }
    }
}

/// A conversation over a connection.
struct Talk<'a, S> {
    client: &'a mut S,
    session: Session,
    prompt: Duration,
    /// Bytes that were read, and how many of them are used; cleared, as there are passwords among them.
    input: Cleared,
    at: usize,
    out: Vec<u8>,
    from: IpAddr,
}

impl<'a> Talk<'a, Leg> {
    fn new(login: &Login, client: &'a mut Leg, buffer: HandshakeBuffer) -> Talk<'a, Leg> {
        let from = client.source().ip();
        Talk::with(login, client, Cleared::from_vec(buffer.rest().into()), from)
    }
}

impl<'a, S: Stream> Talk<'a, S> {
    fn with(login: &Login, client: &'a mut S, input: Cleared, from: IpAddr) -> Talk<'a, S> {
        let manner = Manner { telnet: login.telnet, users: login.asks_users(), environment: login.user_variable };
        let mut out = Vec::new();
        let session = Session::start(manner, login.banner.as_deref(), &mut out);
        Talk { client, session, prompt: login.prompt, input, at: 0, out, from }
    }

    /// Asks until it is known where the client may go. `lead`: where it goes without being asked, once it has logged in.
    async fn ask(
        &mut self,
        (shared, lead): (&impl Counts, &impl Fn(Option<&str>) -> Option<Result<Chosen, Fault>>),
        login: &Login,
        record: &mut Record,
    ) -> Result<Chosen, Fault> {
        loop {
            match self.event().await? {
                Event::Check { name, password } => {
                    if self.log_in(shared, login, record, (name, password)).await? {
                        match lead(record.user.as_deref()) {
                            Some(led) => return led,
                            None => self.session.ask_host(&mut self.out),
                        }
                    }
                }
                Event::Host(line) => {
                    let line = String::from_utf8_lossy(&line).trim().to_owned();
                    if let Some(chosen) = self.choose(login, record, &line)? {
                        return Ok(chosen);
                    }
                }
                Event::HangUp(why) => return Err(Fault::BadRequest(why.into())),
            }
        }
    }

    /// Reads and answers until something has to be done.
    async fn event(&mut self) -> Result<Event, Fault> {
        loop {
            let (used, event) = self.session.feed(&self.input[self.at..], &mut self.out);
            self.at += used;
            write(self.client, &mut self.out, self.prompt).await?;
            if let Some(event) = event {
                return Ok(event);
            }
            self.input = Cleared::default();
            let mut read = vec![0; READ];
            let n = timeout(self.prompt, self.client.read(&mut read)).await;
            let n = match n.map_err(|_| Fault::Timeout(Step::Handshake)) {
                Ok(Ok(0)) => Err(Fault::BadRequest("the client closed before its request was complete".into())),
                Ok(Ok(n)) => Ok(n),
                Ok(Err(e)) => Err(Fault::BadRequest(e.to_string())),
                Err(late) => Err(late),
            };
            read.truncate(*n.as_ref().unwrap_or(&0));
            (self.input, self.at) = (Cleared::from_vec(read), 0);
            n?;
        }
    }

    /// Returns whether the client has logged in; otherwise it is asked again.
    async fn log_in(
        &mut self,
        shared: &impl Counts,
        login: &Login,
        record: &mut Record,
        (name, password): (Vec<u8>, Cleared),
    ) -> Result<bool, Fault> {
        let refused = |user, why| Err(Fault::AuthFailed { user, why });
        match login.failures.check(self.from, login.check(name, password, self.from)).await {
            Ok(user) => {
                record.user = Some(user);
                Ok(true)
            }
            Err((no @ NoUser::TooMany, _)) => refused(None, no.why()),
            Err((no @ NoUser::Wrong, known)) => {
                sleep(DELAY).await;
                if self.session.again(&mut self.out) {
                    shared.auth_failed();
                    return Ok(false);
                }
                refused(known.flatten(), no.why())
            }
        }
    }

    /// Returns the destination of this line; none if the client is asked again.
    fn choose(&mut self, login: &Login, record: &Record, line: &str) -> Result<Option<Chosen>, Fault> {
        let user = record.user.as_deref();
        if let Some(found) = login.destination(line, user) {
            return Ok(Some(Chosen::from(found)));
        }
        if let Some(target) = login.free.then(|| free(line)).flatten() {
            let telnet = target.port == PORT;
            return Ok(Some(Chosen { name: target.to_string(), target, configured: false, telnet }));
        }
        let menu = login.menu(user);
        if !self.session.may_ask_host() {
            return Err(Fault::BadRequest("no destination".into()));
        }
        if !line.is_empty() {
            self.session.say(&format!("no such destination: {line}\n"), &mut self.out);
        }
        self.session.say(&menu, &mut self.out);
        self.session.ask_host(&mut self.out);
        Ok(None)
    }

    /// Tells the client why it is not connected.
    async fn part(&mut self, fault: &Fault) {
        self.session.say(&format!("\n{}\n", reason(fault)), &mut self.out);
        // The client may be gone.
        let _ = timeout(self.prompt, self.client.write_all(&self.out)).await;
    }
}

/// What counts the tries that are followed by another one.
trait Counts {
    fn auth_failed(&self);
}

impl Counts for ServerContext {
    fn auth_failed(&self) {
        Counters::add(&self.counters.auth_failed);
    }
}

impl Login {
    /// Returns the user; otherwise the name, if it is that of a user: people type passwords where a name is asked for.
    async fn check(&self, name: Vec<u8>, password: Cleared, client: IpAddr) -> Result<String, Option<String>> {
        if let Some(check) = &self.check {
            let user = String::from_utf8(name).map_err(|_| None)?;
            return if check.allows(user.as_bytes(), &password, client).await { Ok(user) } else { Err(None) };
        }
        let given = Credentials { name, password: password.to_vec() };
        match self.users.check(&given).await {
            Some(user) => Ok(user),
            None => {
                let known = self.users.names().find(|known| known.as_bytes() == given.name);
                Err(known.map(String::from))
            }
        }
    }

    /// Returns the destination of a user that wants this server: the one with this address, or any, if users may name any.
    fn lead(
        &self,
        user: Option<&str>,
        wanted: SocketAddr,
        known: impl Fn(&Target) -> Vec<SocketAddr>,
    ) -> Result<Chosen, Fault> {
        match self.destinations.iter().find(|d| d.is_for(user) && known(&d.target).contains(&wanted)) {
            Some(found) => Ok(Chosen::from(found)),
            None if self.free => {
                let telnet = self.telnet && wanted.port() == PORT;
                Ok(Chosen { name: wanted.to_string(), target: wanted.into(), configured: false, telnet })
            }
            None => Err(Fault::Denied(Denied::NoDestination)),
        }
    }

    /// Returns the text that shows where a user may go.
    fn menu(&self, user: Option<&str>) -> String {
        let names: Vec<&str> = self.destinations.iter().filter(|d| d.is_for(user)).map(|d| &*d.name).collect();
        match (names.is_empty(), self.free) {
            (false, false) => format!("destinations: {}\n", names.join(" ")),
            (false, true) => format!("destinations: {}; or HOST or HOST:PORT\n", names.join(" ")),
            (true, true) => "type HOST or HOST:PORT\n".into(),
            (true, false) => "no destination is open to you\n".into(),
        }
    }
}

/// Parses a host that a client names: `HOST`, `HOST PORT`, `HOST:PORT` or an address.
fn free(line: &str) -> Option<Target> {
    if let Some((host, port)) = line.split_once(char::is_whitespace) {
        let host = Host::from_name(host.as_bytes()).ok()?;
        return format!("x:{}", port.trim()).parse::<Target>().ok().map(|of| Target { host, port: of.port });
    }
    let host = || Host::from_name(line.as_bytes()).ok().map(|host| Target { host, port: PORT });
    line.parse().ok().or_else(host)
}

/// Returns what a client is told: not which rule, nor what else the proxy knows.
fn reason(fault: &Fault) -> Cow<'static, str> {
    match fault {
        Fault::Denied(Denied::Loop) => "it leads back here".into(),
        Fault::Denied(_) => "not allowed".into(),
        Fault::NoAddress(_) => "unknown host".into(),
        Fault::Unreachable(e) if e.kind() == io::ErrorKind::ConnectionRefused => "connection refused".into(),
        Fault::Unreachable(_) => "unreachable".into(),
        Fault::Timeout(_) => "timed out".into(),
        Fault::BadRequest(why) => why.clone().into(),
        Fault::AuthFailed { why, .. } => (*why).into(),
        Fault::BadReply(_) | Fault::NoRoute(_) | Fault::NoServer(_) | Fault::Limit(_) => "no connection".into(),
    }
}

async fn write(client: &mut impl Stream, out: &mut Vec<u8>, limit: Duration) -> Result<(), Fault> {
    timeout(limit, write_all(client, out)).await.map_err(|_| Fault::Timeout(Step::Handshake))?
}

async fn write_all(client: &mut impl Stream, out: &mut Vec<u8>) -> Result<(), Fault> {
    write_out(client, out).await.map_err(|e| Fault::BadRequest(format!("the client does not listen: {e}")))
}

/// Writes all of it. If that is broken off, what is left was not written.
async fn write_out(to: &mut impl Stream, out: &mut Vec<u8>) -> io::Result<()> {
    while !out.is_empty() {
        let n = to.write(out).await?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        out.drain(..n);
    }
    Ok(())
}

#[cfg(test)]
#[path = "login/login_tests.rs"]
mod tests;
