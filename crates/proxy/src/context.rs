//! The context of a connection: the state shared by all, that shared by a listener, and the slot that the connection takes.
//! Also what a protocol is that another crate serves ([`Service`]).

pub(crate) mod handing;
pub(crate) mod led;
pub(crate) mod relays;
pub(crate) mod roll;
pub(crate) mod tap_dir;
pub(crate) mod watcher;
pub(crate) mod workers;

use crate::{
    access::{Denied, Subject, Way, own::Listening},
    commands::{ASSOCIATIONS, BINDS},
    config::{Config, ListenerConfig, Protocol},
    context::{
        handing::{Continued, Handing},
        led::AllLed,
        relays::Relays,
        roll::{Enrolled, Roll},
        tap_dir::TapDir,
        watcher::Triggers,
        workers::{Loads, Seat},
    },
    counters::{CounterValues, Counters},
    events::Events,
    limits::{Counted, Full, Slot},
    log::{
        access_log::{AccessLog, Event, Record, Wants},
        complaints::Complaints,
        turned_away::TurnedAway,
    },
    pool::Pools,
    resolve::Resolver,
    start_error::StartError,
    tables::Tables,
    target::Target,
    totals::Summed,
};
use bytes::Bytes;
use longsplice_engine::{EndReason, Leg, Policy, Splicer, Tpot};
use std::{
    collections::HashMap,
    future::pending,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, RwLock, Weak, atomic::AtomicBool},
    time::Duration,
};
use tokio::{sync::watch, task::JoinHandle};

/// Which stored replies are removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Purge {
    /// `http://SITE/PATH`.
    pub url: String,
    /// Those of all URLs that begin so.
    pub below: bool,
    /// Only behind this one.
    pub after: Option<(usize, u64)>,
}

/// How far it has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Number of replies that were removed.
    pub removed: u64,
    /// There may be more behind this one.
    pub after: Option<(usize, u64)>,
}

/// A protocol that a crate above this one serves, and all its listeners together. The program gives a table of such protocols
/// to [`Prepared::new`](crate::Prepared::new), which opens what they need before the data path is touched.
pub trait Service: Send + Sync {
    /// Returns whether it serves this protocol.
    fn serves(&self, protocol: &Protocol) -> bool;

    /// Returns what serves the clients of such a listener.
    fn handler(&self, listener: &ListenerConfig) -> Arc<dyn Handler>;

    /// Starts what goes on beside connections, if anything does that was not started before, in the current runtime. The tasks are
    /// aborted with the server.
    fn tend(&self, _shared: &ServerContext) -> Vec<JoinHandle<()>> {
        Vec::new()
    }

    /// Opens what another configuration needs beside what is open already, for what is to take the place of this. What serves
    /// connections now goes on as it is.
    fn reopen(&self, config: &Config, pools: &Pools) -> Result<Arc<dyn Service>, StartError>;

    /// Takes what another process had when this was opened, and leaves. Blocks until then, for some seconds at most. What cannot be
    /// had now, connections are served without.
    fn begin(&self) {}

    /// Leaves to another process what only one can have. Connections are served without it. Blocks.
    fn leave(&self) {}

    /// Puts settings of this configuration in force that concern what was open before, too.
    fn take_effect(&self, _config: &Config) {}

    /// Fills in what it counts itself.
    fn count(&self, _values: &mut CounterValues) {}

    /// Removes stored replies. Blocks, for as long as some thousand files take to be read. Returns from where to go on.
    fn purge(&self, _what: &Purge) -> Purged {
        Purged::default()
    }

    /// Blocks until it has written what it has to keep, for `limit` at most.
    fn flush(&self, _limit: Duration) {}
}

/// Serves the clients of one listener.
pub trait Handler: Send + Sync {
    /// Serves an accepted connection to its end, with its lines in the access log. `read`: what was read from it so far.
    fn serve<'a>(
        &'a self,
        live: Live,
        front: &'a Front,
        client: Leg,
        read: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

/// State shared by all connections.
pub struct ServerContext {
    /// The engine.
    pub splicer: Splicer,
    /// Addresses of names.
    pub resolver: Resolver,
    /// Translucent proxying, if the configuration needs it.
    pub(crate) tpot: Weak<Tpot>,
    /// What the configuration has opened that is in force.
    pub(crate) opened: RwLock<Arc<Opened>>,
    pub(crate) log: AccessLog,
    pub(crate) turned_away: TurnedAway,
    /// Tells who wants to hear what happens.
    pub(crate) events: Arc<Events>,
    /// What happened so far.
    pub counters: Arc<Counters>,
    pub(crate) loads: Loads,
    /// Whom to tell of connections with triggers.
    pub(crate) triggers: Triggers,
    /// Relays for datagrams of SOCKS.
    pub(crate) relays: Relays,
    /// Connections that a task serves.
    pub(crate) roll: Roll,
    /// Flows that were reset because they are forbidden now, until they have ended, and why.
    pub(crate) forbidden: Mutex<HashMap<u64, Arc<str>>>,
    /// Flows that do not go straight to their targets.
    pub(crate) led: AllLed,
    /// Count of the connections of all listeners.
    pub(crate) all: Arc<Counted>,
    /// Count of the connections to servers whose clients are not accepted yet.
    pub(crate) early: Arc<Counted>,
    /// Tells of servers that may have sent their answers another way.
    pub(crate) silent: Complaints,
    /// Whether the tables of the data path are nearly full.
    pub(crate) tables: Tables,
    /// Number of live connections, which the end of the program waits for.
    pub(crate) live: watch::Sender<u64>,
    /// Whether no new work may begin.
    pub stop: watch::Receiver<bool>,
    /// Whether another process serves now, so that nothing is to be hurried. If so, `stop` holds as well.
    pub handed_over: AtomicBool,
    /// Clients who go to another process.
    pub(crate) handing: Handing,
}

/// What a configuration has opened. A reload makes another one, with what it keeps of the last.
#[derive(Default)]
pub(crate) struct Opened {
    /// Listening sockets.
    pub listening: Listening,
    /// Pools of servers, for all protocols.
    pub pools: Pools,
    /// Protocols that other crates serve.
    pub services: Vec<Arc<dyn Service>>,
    /// Tap directories by path.
    pub taps: TapDirs,
}

/// Tap directories by path.
pub(crate) type TapDirs = Arc<HashMap<PathBuf, Arc<TapDir>>>;

impl ServerContext {
    /// Enters that the rules have allowed a client a server at this address. Fails if they have changed meanwhile, and deny it.
    pub fn note(
        &self,
        client: &Leg,
        listener: &ListenerConfig,
        subject: &Subject<'_>,
        (target, server): (&Target, SocketAddr),
    ) -> Result<(), Denied> {
        self.roll.decided(client, &listener.rules, subject, (target, Some(server))).map(drop)
    }

    /// Whether a connection to the target may serve another request: the rules allow this one as well, and lead it the same way.
    /// Enters that. `known`: the address of the target; none if the rules know the name alone.
    pub fn may_serve(
        &self,
        client: &Leg,
        listener: &ListenerConfig,
        subject: &Subject<'_>,
        target: &Target,
        (way, known): (&Way, Option<SocketAddr>),
    ) -> bool {
        let wanted = listener.wanted(client);
        let by_name = match wanted {
            Some(_) => Ok(None), // it has an address, whatever its name is
            None => listener.by_name(&listener.rules, subject, target),
        };
        let Ok(by_name) = by_name else { return false };
        if by_name.is_some() != known.is_none() {
            return false;
        }
        let allowed = self.roll.decided(client, &listener.rules, subject, (target, known));
        allowed.is_ok_and(|allowed| listener.way(allowed.way, target, wanted) == *way)
    }

    /// Writes a line of the access log, and tells who wants to hear of it.
    pub(crate) fn write(&self, record: Record) {
        self.events.line(&record);
        self.log.write(record);
    }

    /// Counts a connection that a limit has turned away, and tells of it. It has a line, too, unless there were many lately.
    pub(crate) fn turned_away(&self, listener: &ListenerConfig, client: SocketAddr, why: Full) {
        Counters::add(&self.counters.over_limit);
        let record = |more: &str| {
            let mut record = listener.record(client);
            (record.how, record.refusal) = ("limit", Some(format!("{why}{more}")));
            record
        };
        self.events.turned_away(|| record(""));
        match self.turned_away.next() {
            None => {}
            Some(0) => self.log.write(record("")),
            Some(n) => self.log.write(record(&format!("; {n} before had no line"))),
        }
    }

    /// Writes the line of a connection that begins to be relayed, if the log has such lines.
    pub(crate) fn begins(&self, id: u64, record: impl FnOnce() -> Record) {
        if self.log.tells_begins() {
            let (id, event) = (Some(id), Some(Event::Begin));
            self.log.write(Record { id, event, how: "", ..record() });
        }
    }

    /// Returns which parts of requests the access log wants besides.
    pub fn wanted_of_requests(&self) -> Wants {
        self.log.wanted()
    }

    /// Returns what is open now.
    pub(crate) fn opened(&self) -> Arc<Opened> {
        self.opened.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_opened(&self, opened: Opened) {
        *self.opened.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(opened);
    }
}

/// The front that a listener has now. A connection takes it when it begins, and keeps it to its end, whatever a reload brings.
#[derive(Clone)]
pub(crate) struct Fronts(Arc<RwLock<Arc<Front>>>);

impl Fronts {
    pub fn new(front: Front) -> Fronts {
        Fronts(Arc::new(RwLock::new(Arc::new(front))))
    }

    pub fn now(&self) -> Arc<Front> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, front: Arc<Front>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = front;
    }
}

/// A listener as a configuration has it, and the count of its connections, which goes on when the configuration changes.
pub struct Front {
    /// The configuration.
    pub listener: ListenerConfig,
    /// Policy of the listener, shared by all its flows.
    pub policy: Arc<Policy>,
    /// Policy for bodies of HTTP messages, whose lengths are known, and for data connections of FTP.
    pub bodies: Arc<Policy>,
    pub(crate) tap: Option<Arc<TapDir>>,
    /// For its triggers.
    pub(crate) taps: TapDirs,
    /// What serves its clients, if another crate has its protocol.
    pub(crate) handler: Option<Arc<dyn Handler>>,
    /// Counts of what SOCKS opens beside connections: associations, and sockets of BIND.
    pub(crate) associations: Arc<Counted>,
    pub(crate) binds: Arc<Counted>,
    counted: Arc<Counted>,
    /// The idle limit of the configuration. Connections of earlier ones share that of the policy.
    idle_limit: Duration,
    pub(crate) summed: Arc<Summed>,
}

impl Front {
    /// `before`: the listener of the same name in the configuration before, whose counts go on.
    pub(crate) fn new(
        mut listener: ListenerConfig,
        shared: &ServerContext,
        opened: &Opened,
        before: Option<&Front>,
    ) -> Front {
        listener.rules.follow(before.map(|before| &before.listener.rules));
        listener.protocol.follow(before.map(|before| &before.listener.protocol));
        // in force once it takes effect, for live connections as well
        let idle_limit = listener.policy.idle_limit.get();
        listener.policy.idle_limit = idle_limit.into();
        if let Some(before) = before {
            listener.policy.tally = before.listener.policy.tally.clone();
            listener.policy.idle_limit = before.listener.policy.idle_limit.clone();
        }
        let on_trigger = listener.policy.trigger.map(|_| shared.triggers.on_data(&listener.triggers, &opened.taps));
        let policy = Arc::new(Policy { on_trigger, ..listener.policy.clone() });
        let bodies = Arc::new(listener.policy_of_bodies());
        let tap = listener.tap.as_ref().and_then(|dir| opened.taps.get(dir)).cloned();
        let service = opened.services.iter().find(|service| service.serves(&listener.protocol));
        let handler = service.map(|service| service.handler(&listener));
        let counts =
            |of: fn(&Front) -> &Arc<Counted>| before.map_or_else(Counted::unlimited, |before| of(before).clone());
        Front {
            policy,
            bodies,
            tap,
            taps: opened.taps.clone(),
            handler,
            associations: counts(|front| &front.associations),
            binds: counts(|front| &front.binds),
            counted: counts(|front| &front.counted),
            summed: before.map_or_else(Arc::default, |before| before.summed.clone()),
            idle_limit,
            listener,
        }
    }

    /// Puts its limits of connections in force, and its idle limit.
    pub(crate) fn take_effect(&self) {
        self.policy.idle_limit.set(self.idle_limit);
        let limits = &self.listener.limits;
        self.counted.limit(limits.connections.unwrap_or(u32::MAX), limits.connections_per_client);
        self.counted.limit_new(limits.new_per_client);
        if let Some(commands) = self.listener.socks() {
            self.associations.limit(ASSOCIATIONS, commands.udp.per_client);
            self.binds.limit(BINDS, commands.bind.per_client);
        }
    }

    /// Returns how many connections it has.
    pub(crate) fn live(&self) -> u32 {
        self.counted.total()
    }

    /// Tells whether the listener's limit of connections is reached, from now on.
    pub(crate) fn full(&self) -> watch::Receiver<bool> {
        self.counted.full()
    }

    /// Counts a connection to a server for a client that is not accepted yet, if it could be.
    pub(crate) fn begin_early(&self, shared: &ServerContext, client: IpAddr) -> Option<Slot> {
        let room = [&shared.all, &self.counted].into_iter().all(|of| of.has_room_beside(&shared.early, client));
        shared.early.enter(Some(client)).ok().filter(|_| room)
    }
}

/// Counts a connection as live as long as it exists, even if its task is cancelled or it has none.
pub struct Live {
    /// The state shared by all connections.
    pub shared: Arc<ServerContext>,
    /// What has become of connections of this listener.
    pub(crate) summed: Arc<Summed>,
    slots: [Slot; 2],
    /// As long as a task serves it.
    pub(crate) enrolled: Option<Enrolled>,
    /// The relay has it, as long as the flow is not spliced.
    pub(crate) seat: Option<Seat>,
    /// Another process has accepted the client.
    pub(crate) continued: Option<Box<Continued>>,
}

impl Live {
    pub(crate) fn enter(shared: &Arc<ServerContext>, front: &Front, leg: &Leg, awake: usize) -> Result<Live, Full> {
        // Behind a proxy in front of us, the client is not known yet.
        let client = Some(leg.remote().ip()).filter(|ip| !front.listener.proxy_protocol.expects(*ip));
        let slots = [shared.all.enter(client)?, front.counted.enter(client)?];
        shared.live.send_modify(|n| *n += 1);
        let enrolled = Some(shared.roll.enter(leg, &front.listener.name));
        let summed = front.summed.clone();
        summed.begin();
        let (seat, continued) = (Some(shared.loads.seat(awake)), None);
        Ok(Live { shared: shared.clone(), summed, slots, enrolled, seat, continued })
    }

    /// Counts a connection of an earlier process, whatever the limits are now. `client`: if it is known.
    pub(crate) fn taken_up(shared: &Arc<ServerContext>, front: &Front, client: Option<IpAddr>) -> Live {
        let slots = [&shared.all, &front.counted].map(|of| of.count(client));
        shared.live.send_modify(|n| *n += 1);
        let (summed, enrolled, seat, continued) = (front.summed.clone(), None, None, None);
        Live { shared: shared.clone(), summed, slots, enrolled, seat, continued }
    }

    /// Waits until the connection has to end: because all have to, or because it is forbidden now.
    pub fn end(&self) -> impl Future<Output = ()> + Send + use<> {
        let (splicer, told) = (self.shared.splicer.clone(), self.enrolled.as_ref().map(Enrolled::told));
        async move {
            let forbidden = async {
                match told {
                    Some(told) => told.await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = splicer.stopped() => {}
                () = forbidden => {}
            }
        }
    }

    /// Whether the connection is forbidden now.
    pub fn is_forbidden(&self) -> bool {
        self.enrolled.as_ref().is_some_and(|enrolled| enrolled.forbidden().is_some())
    }

    /// Writes into the record why the connection had to end.
    pub fn ended(&self, record: &mut Record) {
        match self.enrolled.as_ref().and_then(Enrolled::forbidden) {
            Some(why) => record.forbidden(&why),
            None => record.how = EndReason::Stopped.as_str(),
        }
    }

    /// Counts the connection for its client, once that is known.
    pub(crate) fn is_from(&mut self, client: SocketAddr) -> Result<(), Full> {
        self.slots.iter_mut().try_for_each(|slot| slot.is_from(client.ip()))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.live.send_modify(|n| *n -= 1);
    }
}
