//! A door: a listener that is open, with what accepts its connections. A reload changes the front behind it, and nothing of its
//! socket: connections that wait in its queue are served by the front that it has when they are accepted.

use super::{BACK_OFF, cannot_listen, connection, plug};
use crate::{
    access::{Subject, own::is_own},
    config::{Http, ListenerConfig, Protocol, Tracking, ftp::Ftp, pool::LeadTo},
    context::{Front, Fronts, Live, Opened, ServerContext},
    counters::Counters,
    log::complaints::Complaints,
    start_error::StartError,
    tpot,
};
use longsplice_engine::{BoundSocket, EndToEndListener, Leg, LegOfProxy, Listener, Splicer, Tpot, TpotWhose};
use std::{
    io, mem,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Weak},
};
use tokio::{runtime::Handle, sync::watch, task::JoinHandle, time::sleep};

/// An open listener.
pub(super) struct Door {
    pub fronts: Fronts,
    /// The address in the configuration.
    pub asked: SocketAddr,
    /// The address, with the port that the kernel chose if 0 was asked for.
    pub addr: SocketAddr,
    /// The data path knows its connections from their SYN on: a later configuration can have them spliced in any way.
    tracks: bool,
    shared: Arc<ServerContext>,
    number: usize,
    /// What it will accept from, until it does.
    sources: Vec<Source>,
    duty: watch::Sender<Duty>,
    /// An operator wants it to accept nobody, also once it has stopped.
    is_paused: bool,
    tasks: Vec<JoinHandle<()>>,
    /// Its socket, as long as it accepts.
    listener: Weak<Listener>,
    /// Has no end of its own.
    beside: Option<JoinHandle<()>>,
}

/// What the tasks of a door do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Duty {
    /// They accept clients.
    Accept,
    /// They accept nobody until they are told to.
    Pause,
    /// They end.
    Stop,
}

impl Door {
    /// Opens a listener: clients may connect, and are accepted later. `socket`: bound to its address, if it has one. `number`:
    /// index of its worker. `before`: the listener of this name that there was.
    pub async fn open(
        (shared, tpot): (&Arc<ServerContext>, Option<&Arc<Tpot>>),
        (mut listener, socket): (ListenerConfig, Option<BoundSocket>),
        opened: &Opened,
        (number, before): (usize, Option<&Front>),
    ) -> Result<Door, StartError> {
        let (asked, runtime, splicer) = (listener.listen, shared.loads.runtime(number), &shared.splicer);
        let tracks = listener.binds() && listener.tracking() == Tracking::FromSyn;
        let (mut source, whose) = (None, listener.intercepts);
        if let (Some(whose), Some(tpot)) = (whose, tpot) {
            let intercepted = Source::intercept(&listener, (tpot, whose, socket), splicer, runtime).await;
            source = Some(intercepted.map_err(cannot_listen(asked))?);
        } else if let Some(socket) = socket {
            let listening = Source::listen(&listener, socket, splicer, runtime).await.map_err(cannot_listen(asked))?;
            source = Some(listening.0);
            listener.listen = listening.1;
        }
        let addr = listener.listen;
        let fronts = Fronts::new(Front::new(listener, shared, opened, before));
        let source = source.map_or_else(|| Source::route(&fronts, splicer).map_err(cannot_listen(asked)), Ok)?;
        let pairs = match &source {
            Source::Own(socket) => plug::end_to_end(shared, &fronts, socket),
            Source::EndToEnd(_) => None,
        };
        if let Source::Own(socket) = &source {
            let _entered = runtime.enter(); // it accepts there
            tpot::pipeline(shared, &fronts, socket).map_err(cannot_listen(asked))?;
        }
        let beside = whose.zip(tpot).map(|(whose, tpot)| {
            let of = (shared.clone(), fronts.clone());
            runtime.spawn(tpot::leave(Arc::downgrade(tpot), (whose, tpot::intercepted(addr)), of))
        });
        let listener = if let Source::Own(socket) = &source { Arc::downgrade(socket) } else { Weak::new() };
        let sources = pairs.map(Source::EndToEnd).into_iter().chain([source]).collect();
        let (duty, is_paused, tasks) = (watch::Sender::new(Duty::Accept), false, Vec::new());
        let shared = shared.clone();
        Ok(Door { fronts, asked, addr, tracks, shared, number, sources, duty, is_paused, tasks, listener, beside })
    }

    /// Returns another descriptor of its socket, if it has one.
    pub fn socket(&self) -> io::Result<Option<TcpListener>> {
        self.listener.upgrade().map(|listener| listener.try_clone_socket()).transpose()
    }

    /// Tells it to stop accepting, and returns what goes on until it does.
    pub fn leave(&mut self) -> Vec<JoinHandle<()>> {
        self.stop_accepting();
        mem::take(&mut self.tasks)
    }

    /// Lets it accept nobody, or accept again. Returns false if it was told so before.
    pub fn pause(&mut self, is_paused: bool) -> bool {
        let duty = if is_paused { Duty::Pause } else { Duty::Accept };
        self.duty.send_if_modified(|now| *now != Duty::Stop && mem::replace(now, duty) != duty);
        mem::replace(&mut self.is_paused, is_paused) != is_paused
    }

    /// Whether it was told so.
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Begins to accept, with the limits of its listener.
    pub fn accept(&mut self) {
        let front = self.fronts.now();
        announce(self.addr, &front.listener);
        if self.is_paused {
            let name = &front.listener.name;
            tracing::info!("{name} is still paused: clients wait until `longsplice resume {name}`");
        }
        if self.addr.ip().is_loopback() && self.shared.splicer.refusal().is_none() {
            tracing::info!(
                "clients of {} are on this host: their connections are copied, not spliced (loopback)",
                self.addr
            );
        }
        front.take_effect();
        let runtime = self.shared.loads.runtime(self.number);
        for source in self.sources.drain(..) {
            let (shared, fronts, duty) = (self.shared.clone(), self.fronts.clone(), self.duty.subscribe());
            self.tasks.push(match source {
                Source::Own(socket) => runtime.spawn(accept_all(shared, fronts, (socket, self.number), duty)),
                Source::EndToEnd(socket) => {
                    hold_first_data(&front.listener, &socket);
                    runtime.spawn(accept_pairs(shared, fronts, (socket, self.number), duty))
                }
            });
        }
    }

    /// Whether it does not accept yet.
    pub fn is_new(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Tells it to stop accepting. Its connections go on.
    pub fn stop_accepting(&self) {
        self.duty.send_replace(Duty::Stop);
    }

    /// Stops accepting, and waits until its socket is closed.
    pub async fn close(mut self) {
        self.stop_accepting();
        for task in self.tasks.drain(..) {
            let _ = task.await; // it has ended, or its runtime has
        }
    }

    /// Returns whether this listener would have its socket.
    pub fn is_of(&self, listener: &ListenerConfig) -> bool {
        self.asked == listener.listen && (self.asked.port() > 0 || self.fronts.now().listener.name == listener.name)
    }

    /// Returns the key that keeps this listener from having its socket, if one does.
    pub fn obstacle(&self, listener: &ListenerConfig) -> Option<&'static str> {
        let front = self.fronts.now();
        let of = |l: &ListenerConfig| {
            let is_between = l.is_between_hosts();
            [
                ("protocol", l.protocol == Protocol::Transparent),
                ("transparent", l.intercepts.is_some()),
                ("source", l.shows_clients),
                ("handshake", is_between || l.handshake != Default::default()),
                ("splice", l.holds_first_data()),
            ]
        };
        let now = &front.listener;
        let differs = of(now).into_iter().zip(of(listener)).find(|(now, next)| now != next).map(|((key, _), _)| key);
        differs
            .or((now.intercepts != listener.intercepts).then_some("protocol"))
            .or((now.handshake != listener.handshake).then_some("handshake"))
            .or((!listener.binds() && now.name != listener.name).then_some("name"))
            .or((now.binds()
                && !self.tracks
                && self.shared.splicer.refusal().is_none()
                && listener.tracking() == Tracking::FromSyn)
                .then_some(if now.protocol.name() == listener.protocol.name() { "splice" } else { "protocol" }))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.sources.clear();
        self.tasks.iter().chain(&self.beside).for_each(JoinHandle::abort);
        if let Some(Err(error)) = self.shared.splicer.datapath().filter(|_| self.tracks).map(|d| d.unlisten(self.addr))
        {
            tracing::debug!(addr = %self.addr, %error, "connections to an address that is left are still tracked");
        }
    }
}

fn announce(addr: SocketAddr, listener: &ListenerConfig) {
    let protocol = &listener.protocol;
    match protocol {
        _ if listener.intercepts == Some(TpotWhose::All) => {
            tracing::info!("{} on {addr}, transparent", protocol.name())
        }
        _ if listener.intercepts.is_some() => tracing::info!("tpot on {addr}: {}", protocol.name()),
        Protocol::Http(Http { routes, .. }) if !routes.is_empty() => {
            tracing::info!("http on {addr}, {} routes", routes.len());
        }
        Protocol::Socks5 { users, .. } | Protocol::Http(Http { users, .. })
            if users.is_empty() && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!("{} on {addr}: open to everybody who can reach it; add users or rules", protocol.name());
        }
        Protocol::Socks5 { .. } | Protocol::Http(_) => tracing::info!("{} on {addr}", protocol.name()),
        Protocol::Ftp(Ftp { target: Some(LeadTo::Target(target)), .. }) => tracing::info!("ftp on {addr} to {target}"),
        Protocol::Ftp(Ftp { target: Some(LeadTo::Pool(pool)), .. }) => tracing::info!("ftp on {addr} to pool {pool}"),
        Protocol::Ftp(Ftp { users, .. })
            if users.is_empty() && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!(
                "ftp on {addr}: leads everybody who can reach it to any server; add a target, users or rules"
            );
        }
        Protocol::Ftp(_) => tracing::info!("ftp on {addr}"),
        Protocol::Plug { target: Some(LeadTo::Target(target)), .. } => tracing::info!("plug on {addr} to {target}"),
        Protocol::Plug { target: Some(LeadTo::Pool(pool)), .. } => tracing::info!("plug on {addr} to pool {pool}"),
        Protocol::Tls(tls) if tls.forwards() && !addr.ip().is_loopback() && listener.rules.list().is_empty() => {
            tracing::warn!(
                "tls on {addr}: leads everybody who can reach it to any name; give routes targets or add rules"
            );
        }
        Protocol::Login(login)
            if !login.asks_users() && login.free && !addr.ip().is_loopback() && listener.rules.list().is_empty() =>
        {
            tracing::warn!("login on {addr}: leads everybody who can reach it to any host; add users or rules");
        }
        Protocol::Tls(_) | Protocol::Login(_) => tracing::info!("{} on {addr}", protocol.name()),
        Protocol::Transparent if !addr.ip().is_unspecified() && is_own(addr.ip()) => {
            tracing::warn!(
                "transparent on {addr}: this is an address of this machine, whose connections are not taken part in"
            );
        }
        Protocol::Plug { target: None, .. } | Protocol::Transparent | Protocol::Tpot => {
            tracing::info!("{} on {addr}", protocol.name())
        }
    }
}

/// Source of connections: clients that connect to the proxy, or hosts that shake hands with each other.
enum Source {
    Own(Arc<Listener>),
    EndToEnd(EndToEndListener),
}

impl Source {
    /// Listens on a bound socket. Each of these returns the address as well, which the kernel may have chosen.
    async fn listen(
        listener: &ListenerConfig,
        socket: BoundSocket,
        splicer: &Splicer,
        runtime: &Handle,
    ) -> io::Result<(Source, SocketAddr)> {
        let splicer = splicer.clone();
        let shows_clients = listener.shows_clients;
        let tracks = listener.tracking() == Tracking::FromSyn;
        let listen = async move {
            let listening =
                if tracks { splicer.listen_on(socket).await } else { splicer.listen_adopting(socket).await };
            let mut listening = listening?;
            let addr = listening.local_addr()?;
            if shows_clients {
                listening.show_clients()?;
            }
            Ok((Source::Own(Arc::new(listening)), addr))
        };
        runtime.spawn(listen).await.map_err(io::Error::other)?
    }

    /// Intercepts connections that are routed through this machine. `socket`: that of an earlier process.
    async fn intercept(
        listener: &ListenerConfig,
        (tpot, whose, socket): (&Arc<Tpot>, TpotWhose, Option<BoundSocket>),
        splicer: &Splicer,
        runtime: &Handle,
    ) -> io::Result<Source> {
        let (splicer, tpot, to) = (splicer.clone(), tpot.clone(), tpot::intercepted(listener.listen));
        let shows_clients = listener.shows_clients;
        let listen = async move {
            let mut listening = match socket {
                Some(socket) => splicer.intercept_on(socket, &tpot, whose, &to).await?,
                None => splicer.intercept(&tpot, whose, &to).await?,
            };
            if shows_clients {
                listening.show_clients()?;
            }
            Ok::<_, io::Error>(listening)
        };
        runtime.spawn(listen).await.map_err(io::Error::other)?.map(|listening| Source::Own(Arc::new(listening)))
    }

    /// Takes part in connections that are routed through this machine.
    fn route(fronts: &Fronts, splicer: &Splicer) -> io::Result<Source> {
        let of = fronts.clone();
        let allow = move |client: SocketAddr, server: SocketAddr| {
            of.now().listener.rules.check(&Subject::by(client.ip()), &server.into(), server).is_ok()
        };
        Ok(Source::EndToEnd(splicer.listen_transparent(fronts.now().listener.listen, allow)?))
    }
}

/// Accepts connections. `number`: index of the worker that runs this.
async fn accept_all(
    shared: Arc<ServerContext>,
    fronts: Fronts,
    (socket, number): (Arc<Listener>, usize),
    mut duty: watch::Receiver<Duty>,
) {
    let mut wait = BACK_OFF.0;
    let complaints = Complaints::default();
    loop {
        // while it is paused, the socket is not looked at
        if !duty.wait_for(|duty| *duty != Duty::Pause).await.is_ok_and(|duty| *duty == Duty::Accept) {
            return;
        }
        let accepted = tokio::select! {
            biased;
            told = duty.wait_for(|duty| *duty != Duty::Accept) => match told {
                Ok(_) => continue,
                Err(_) => return, // its door is gone
            },
            accepted = socket.accept_idle() => accepted,
        };
        match accepted {
            Ok(client) => {
                wait = BACK_OFF.0;
                let front = fronts.now();
                if front.listener.tracking() == Tracking::Never {
                    client.only_copy();
                }
                let front_of = front.clone();
                let serve = async move |live, [client]: [Leg; 1]| connection::serve(live, front_of, client).await;
                admit(&shared, &front, ([client], number), &complaints, serve);
            }
            Err(e) if concerns_one_connection(&e) => {}
            Err(e) => {
                Counters::add(&shared.counters.accept_errors);
                complaints.tell(&format!("cannot accept on {}: {e}", fronts.now().listener.listen));
                // Only the end of another connection can help. Meanwhile, clients wait in the kernel's queue.
                sleep(wait).await;
                wait = BACK_OFF.1.min(wait * 2);
            }
        }
    }
}

/// Holds the first data of connections that are spliced at once.
fn hold_first_data(listener: &ListenerConfig, socket: &EndToEndListener) {
    if listener.holds_first_data()
        && let Err(error) = socket.hold_first_data()
    {
        tracing::warn!("cannot hold the first data of connections to {}: it is copied: {error}", listener.listen);
    }
}

/// Accepts connections whose hosts have shaken hands with each other.
async fn accept_pairs(
    shared: Arc<ServerContext>,
    fronts: Fronts,
    (mut socket, number): (EndToEndListener, usize),
    mut duty: watch::Receiver<Duty>,
) {
    let complaints = Complaints::default();
    loop {
        let accepted = tokio::select! {
            biased;
            // its hosts have shaken hands, and nobody else has the sockets
            _ = duty.wait_for(|duty| *duty == Duty::Stop) => match socket.try_accept() {
                Some(accepted) => accepted,
                None => return,
            },
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((client, server)) => {
                let front = fronts.now();
                let front_of = front.clone();
                let serve = async move |live, [client, server]: [Leg; 2]| {
                    connection::serve_end_to_end(live, &front_of, client, server);
                };
                admit(&shared, &front, ([client, server], number), &complaints, serve);
            }
            Err(e) if e.kind() == io::ErrorKind::NotConnected => return,
            Err(e) => {
                Counters::add(&shared.counters.accept_errors);
                complaints.tell(&format!("a connection to {} is lost: {e}", fronts.now().listener.listen));
            }
        }
    }
}

/// Starts to serve a connection, unless a limit is reached. The first leg is that of the client.
fn admit<const N: usize, F: Future<Output = ()> + Send>(
    shared: &Arc<ServerContext>,
    front: &Front,
    (legs, awake): ([Leg; N], usize),
    complaints: &Complaints,
    serve: impl FnOnce(Live, [Leg; N]) -> F + Send + 'static,
) {
    Counters::add(&shared.counters.accepted);
    shared.tables.look(&shared.splicer, &shared.counters);
    let client = legs[0].remote();
    match Live::enter(shared, front, &legs[0], awake) {
        Ok(live) => serve_on(live, (legs, !front.listener.splices_unread()), serve),
        Err(full) => {
            shared.turned_away(&front.listener, client, full);
            complaints.tell(&format!("{client} turned away: {full}"));
            for leg in legs {
                leg.reset_at_close();
                shared.splicer.discard(leg);
            }
        }
    }
}

/// Serves a connection on the worker that it was assigned to. `is_read`: its client is waited for before a splice.
fn serve_on<const N: usize, F: Future<Output = ()> + Send>(
    live: Live,
    (mut legs, is_read): ([Leg; N], bool),
    serve: impl FnOnce(Live, [Leg; N]) -> F + Send + 'static,
) {
    let runtime = live.seat.as_ref().map_or_else(Handle::current, |seat| seat.runtime().clone());
    let here = runtime.id() == Handle::current().id();
    runtime.spawn(async move {
        let enter = |leg: &mut Leg| match leg.is_idle() {
            true if is_read => leg.attend(),
            false if !here => leg.enter(),
            _ => Ok(()),
        };
        match legs.iter_mut().try_for_each(enter) {
            Ok(()) => serve(live, legs).await,
            Err(e) => {
                Counters::add(&live.shared.counters.accept_errors);
                tracing::warn!("cannot serve {}: it is reset: {e}", legs[0].remote());
                legs.into_iter().for_each(|leg| live.shared.splicer.discard(leg));
            }
        }
    });
}

/// Whether the error concerns a connection that was gone before it was accepted; the next one may be fine (accept(2)).
fn concerns_one_connection(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected, TimedOut};
    matches!(e.kind(), ConnectionAborted | ConnectionReset | Interrupted | NotConnected | TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepting_backs_off_only_when_the_next_connection_would_fail_too() {
        let one = |errno| concerns_one_connection(&io::Error::from_raw_os_error(errno));
        // ECONNABORTED and ENOTCONN; then EMFILE, ENFILE, ENOBUFS and ENOMEM.
        assert_eq!([103, 107].map(one), [true; 2]);
        assert_eq!([24, 23, 105, 12].map(one), [false; 4]);
    }
}
