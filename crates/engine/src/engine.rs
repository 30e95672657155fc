//! [`Engine`]: the state that the handles of callers, the engine's threads and its flows share, and the table of live flows.

pub(crate) mod descriptors;
pub(crate) mod events;
pub(crate) mod flow;
pub(crate) mod handed;
pub(crate) mod holder;
pub(crate) mod orphan;
pub(crate) mod ports;
pub(crate) mod purpose;
pub(crate) mod record;
pub(crate) mod recovered;
pub(crate) mod slow;

#[cfg(feature = "taps")]
use crate::taps::Tap;
use crate::{
    engine::{
        descriptors::Descriptors,
        events::Announcer,
        flow::{Flow, FlowOwner, KeeperMessage, Order, Stop, TaskEvents, TaskInbox, is_loopback},
        holder::Holder,
        orphan::Orphan,
        ports::Ports,
        recovered::Recovered,
        slow::SlowServers,
    },
    grace::Grace,
    leg::Leg,
    lingering::Lingering,
    refusal::Refusal,
    sync::lock,
    taps::TapRing,
    types::{Command, FlowState, NotReleased},
};
use longsplice_datapath::{Connection, Datapath, Pair, Tpot, Tuple};
use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::RandomState},
    hash::BuildHasher,
    io,
    ops::Bound,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::Sender,
    },
};
#[cfg(feature = "taps")]
use tokio::sync::oneshot;
use tokio::sync::{mpsc, watch};

/// The shared state. It lives until the last thread and the last flow have ended.
pub(crate) struct Engine {
    datapath: Option<Datapath>,
    /// Reason why there is no data path.
    refusal: Refusal,
    pub ports: Ports,
    next_id: AtomicU64,
    /// Listening sockets for connections of other hosts.
    pub intercepting: Mutex<Vec<Weak<OwnedFd>>>,
    /// Live flows, by number.
    flows: Mutex<BTreeMap<u64, Arc<Flow>>>,
    /// Spliced flows of an earlier process, by number.
    pub orphans: Mutex<BTreeMap<u64, Orphan>>,
    pub recovered: Recovered,
    /// The tunnels of connections that were intercepted, once there is a listener for such.
    pub tunnels: Mutex<Weak<Tpot>>,
    /// The flow of each leg, for events. Keyed by a hash of the leg's connection, which takes an eighth of its
    /// space. If two have the same hash, one flow misses its events and notices by polling.
    routes: Mutex<HashMap<u64, u64>>,
    hasher: RandomState,
    pub lingering: Lingering,
    pub slow: SlowServers,
    pub grace: Arc<Grace>,
    pub descriptors: Descriptors,
    /// Number of records removed because no socket claimed them.
    swept: AtomicU64,
    /// Number of intercepted connections that were reset because there was no room for their records.
    pub unheard: AtomicU64,
    keeper: Sender<KeeperMessage>,
    pub tap_ring: TapRing,
    pub holder: Mutex<Holder>,
    pub announcer: Arc<Announcer>,
    stopping: AtomicBool,
    stop: watch::Sender<Stop>,
    /// How far the data path is handed over. A switch that begins holds it for reading.
    pub leaving: RwLock<Leaving>,
    /// Flows that were taken back because the data path is to be handed over, and for no other reason.
    returning: Mutex<HashSet<u64>>,
    /// The keeper's thread has not ended.
    pub keeps: AtomicBool,
}

/// How far the data path is handed over to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    No,
    /// No splice begins.
    Soon,
    /// It is the other's. Of its tables, this process only touches what belongs to its own connections.
    Gone,
}

impl Engine {
    /// `refusal`: why there is no data path. `keeper`: the channel to the keeper's thread.
    pub fn new(datapath: Option<Datapath>, refusal: Refusal, ports: Ports, keeper: Sender<KeeperMessage>) -> Engine {
        let lingering = Lingering::new(datapath.as_ref().map_or(0, Datapath::max_flows) as usize);
        Engine {
            datapath,
            refusal,
            ports,
            next_id: AtomicU64::new(1),
            slow: SlowServers::default(),
            intercepting: Mutex::default(),
            flows: Mutex::default(),
            orphans: Mutex::default(),
            recovered: Recovered::default(),
            tunnels: Mutex::default(),
            routes: Mutex::default(),
            hasher: RandomState::new(),
            lingering,
            grace: Arc::default(),
            descriptors: Descriptors::default(),
            swept: AtomicU64::new(0),
            unheard: AtomicU64::new(0),
            keeper,
            tap_ring: TapRing::default(),
            holder: Mutex::default(),
            announcer: Arc::default(),
            stopping: AtomicBool::new(false),
            stop: watch::Sender::new(Stop::Go),
            leaving: RwLock::new(Leaving::No),
            returning: Mutex::default(),
            keeps: AtomicBool::new(false),
        }
    }

    /// Returns how far the data path is handed over.
    pub fn leaving(&self) -> Leaving {
        *self.leaving.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a flow is taken back because the data path is to be handed over.
    pub fn returns(&self, id: u64) {
        lock(&self.returning).insert(id);
    }

    /// Returns whether a flow was taken back for that.
    pub fn is_returning(&self, id: u64) -> bool {
        lock(&self.returning).contains(&id)
    }

    /// Takes the numbers of all flows that were taken back for that.
    pub fn take_returning(&self) -> HashSet<u64> {
        std::mem::take(&mut *lock(&self.returning))
    }

    pub fn datapath(&self) -> Option<&Datapath> {
        self.datapath.as_ref()
    }

    /// Returns why no flow can be spliced, or `None` if there is a data path.
    pub fn refusal(&self) -> Option<Refusal> {
        match self.leaving() {
            _ if self.datapath.is_none() => Some(self.refusal),
            leaving => (leaving == Leaving::Gone).then_some(Refusal::HandedOver),
        }
    }

    /// Returns why a flow of these legs can never be spliced, as far as this is known before an attempt.
    pub fn obstacle(&self, client: &Leg, server: &Leg) -> Option<Refusal> {
        let legs = Pair::new(client.tuple(), server.tuple());
        let loopback = || legs.iter().any(is_loopback).then_some(Refusal::Loopback);
        self.refusal().or_else(loopback).or(client.refusal()).or(server.refusal()).or_else(|| {
            client.opened.hops?; // it is in no tunnel
            lock(&self.tunnels).upgrade()?.differ(&legs).then_some(Refusal::Tunnels)
        })
    }

    /// Numbers that earlier processes have given are not given again.
    pub fn number_after(&self, id: u64) {
        self.next_id.fetch_max(id.saturating_add(1), Ordering::Relaxed);
    }

    /// Returns the number for a new flow.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a flow that a task has to the table of live flows.
    pub fn list(self: &Arc<Self>, flow: Arc<Flow>) -> Listed {
        lock(&self.flows).insert(flow.id, flow.clone());
        Listed::again(self, flow)
    }

    /// Adds a flow that the keeper has to the table, with the routes of its events.
    pub fn list_kept(&self, flow: Arc<Flow>) {
        self.route_events(&flow);
        let id = flow.id;
        lock(&self.flows).insert(id, flow);
        self.tell_some_time(KeeperMessage::Forwarded(id));
    }

    pub fn flow(&self, id: u64) -> Option<Arc<Flow>> {
        lock(&self.flows).get(&id).cloned()
    }

    /// Returns the flow that a connection belongs to.
    pub fn flow_of(&self, connection: &Connection) -> Option<Arc<Flow>> {
        let id = lock(&self.routes).get(&self.hash(connection)).copied();
        id.and_then(|id| self.flow(id))
    }

    /// Returns at most `most` flows with numbers above `after`, or `None` if there are no more.
    pub fn page(&self, after: u64, most: usize) -> Option<Vec<Arc<Flow>>> {
        let flows = lock(&self.flows);
        let page: Vec<_> =
            flows.range((Bound::Excluded(after), Bound::Unbounded)).take(most).map(|(_, f)| f.clone()).collect();
        (!page.is_empty()).then_some(page)
    }

    /// Returns whether a flow is live, or one of an earlier process.
    pub fn lists(&self, id: u64) -> bool {
        lock(&self.flows).contains_key(&id) || lock(&self.orphans).contains_key(&id)
    }

    /// Returns the highest number of such a flow.
    pub fn last(&self) -> Option<u64> {
        let flow = lock(&self.flows).last_key_value().map(|(id, _)| *id);
        flow.max(lock(&self.orphans).last_key_value().map(|(id, _)| *id))
    }

    /// Returns whether no flow of this process is live.
    pub fn is_idle(&self) -> bool {
        lock(&self.flows).is_empty()
    }

    /// Returns the number of flows that may need room in the tables, including those of an earlier process.
    pub fn live(&self) -> usize {
        lock(&self.flows).len() + lock(&self.orphans).len()
    }

    fn hash(&self, connection: &Connection) -> u64 {
        self.hasher.hash_one(connection)
    }

    /// Returns the connection that has this leg's entry at present, if any.
    pub fn present(&self, leg: &Tuple) -> Option<Connection> {
        let generation = self.datapath.as_ref()?.generation(leg)?;
        Some(Connection { leg: *leg, generation })
    }

    /// Returns whether the connection that has this leg's entry belongs to a flow that this process has spliced.
    pub fn is_routed(&self, leg: &Tuple) -> bool {
        self.present(leg).is_some_and(|connection| lock(&self.routes).contains_key(&self.hash(&connection)))
    }

    /// Routes events of both legs to the flow from now on.
    pub fn route_events(&self, flow: &Flow) {
        let legs = flow.connections().map(|connection| self.hash(&connection));
        lock(&self.routes).extend(legs.map(|h| (h, flow.id)));
    }

    /// Sends a message to the keeper and wakes it. When the keeper has ended, flows have ended too.
    pub fn tell(&self, message: KeeperMessage) {
        self.tell_some_time(message);
        if let Some(d) = &self.datapath {
            d.wake();
        }
    }

    /// Sends a message that the keeper may read at its next round. This saves a wake-up for each flow.
    pub fn tell_some_time(&self, message: KeeperMessage) {
        let _ = self.keeper.send(message);
    }

    /// Lets the keeper read its messages within a millisecond or two.
    pub fn wake_keeper_soon(&self) {
        self.datapath.iter().for_each(Datapath::wake_soon);
    }

    /// Sends a command to a live flow. Returns false if there is no such flow.
    pub fn command(&self, id: u64, command: Command) -> bool {
        let Some(flow) = self.flow(id) else { return command == Command::Reset && self.end_orphan(id) };
        match &*flow.owner() {
            FlowOwner::Task { orders, .. } => return orders.send(Order::Command(command)).is_ok(),
            FlowOwner::Keeper(_) => self.tell(KeeperMessage::Command(id, command)),
            FlowOwner::Gone => return false,
        }
        true
    }

    /// Has the keeper close the parked sockets of a flow, unless they have to stay.
    pub fn release(&self, id: u64) -> Result<(), NotReleased> {
        let Some(flow) = self.flow(id) else {
            let is_orphan = lock(&self.orphans).contains_key(&id);
            return Err(if is_orphan { NotReleased::Released } else { NotReleased::NoFlow });
        };
        match &*flow.owner() {
            // one that has just been spliced is about to go to the keeper
            FlowOwner::Task { .. } if flow.now().state == FlowState::Copying => Err(NotReleased::Copying),
            FlowOwner::Task { .. } => Err(NotReleased::Switching),
            FlowOwner::Keeper(kept) if kept.sockets.released().is_some() => Err(NotReleased::Released),
            FlowOwner::Keeper(kept) => kept.core.keeps_sockets(&flow.policy).map_or(Ok(()), Err),
            FlowOwner::Gone => Err(NotReleased::NoFlow),
        }?;
        self.tell(KeeperMessage::Command(id, Command::Release));
        Ok(())
    }

    /// Has the tasks of flows look at their limits.
    pub fn limits_changed(&self) {
        let mut last = 0;
        while let Some(flows) = self.page(last, 1000) {
            last = flows[flows.len() - 1].id;
            for flow in &flows {
                if let FlowOwner::Task { orders, .. } = &*flow.owner() {
                    let _ = orders.send(Order::Limits); // it may end at this moment
                }
            }
        }
    }

    /// Has the data path adopt the legs of a flow that is copied, without a splice.
    pub fn adopt(&self, id: u64) {
        let flow = self.flow(id);
        if let Some(FlowOwner::Task { orders, .. }) = flow.as_ref().map(|flow| flow.owner()).as_deref() {
            let _ = orders.send(Order::Adopt); // it may end at this moment
        }
    }

    /// Taps a flow that is copied. Returns false if it is not, or is gone.
    #[cfg(feature = "taps")]
    pub async fn tap(&self, id: u64, make: impl FnOnce() -> Tap + Send + 'static) -> bool {
        let (begun, answer) = oneshot::channel();
        {
            let flow = self.flow(id).filter(|flow| flow.now().state == FlowState::Copying);
            let owner = flow.as_ref().map(|flow| flow.owner());
            let Some(FlowOwner::Task { orders, .. }) = owner.as_deref() else { return false };
            if orders.send(Order::Tap(Box::new(make), begun)).is_err() {
                return false;
            }
        }
        answer.await.is_ok()
    }

    /// Returns the channels of a new task: the sending ends, and the ends that it listens to.
    pub fn inbox(&self) -> (FlowOwner, TaskInbox) {
        let (tx, orders) = mpsc::unbounded_channel();
        let events = Arc::new(TaskEvents::default());
        (FlowOwner::Task { orders: tx, events: events.clone() }, TaskInbox { orders, events, stop: self.stop_signal() })
    }

    /// Resets both connections of a flow that has no sockets. Returns whether its entries are there, and answer its hosts until
    /// they are forgotten.
    pub fn reset_forwarded(&self, legs: [Connection; 2]) -> bool {
        let is_reset = self.datapath().map(|d| d.reset_forwarded(legs));
        if let Some(Err(error)) = &is_reset {
            tracing::warn!(?legs, %error, "cannot reset a host: it is told when it sends something");
        }
        is_reset.is_some_and(|is| is.unwrap_or(true))
    }

    /// Resets a host that does not know that its connection is over, and that no socket tells.
    pub fn reset_again(&self, connection: &Connection) {
        if let Some(Err(error)) = self.datapath().map(|d| d.reset_deserted(*connection)) {
            tracing::warn!(?connection, %error, "cannot reset a host: it does not know that its connection is over");
        }
    }

    /// Removes the entries of a flow that has ended: at once, or, with
    /// `linger`, some time later, so that its last segments are still answered.
    pub fn forget(&self, flow: &Flow, linger: bool) {
        let Some(d) = self.datapath() else { return };
        if linger {
            let Pair { client, server } = flow.connections();
            self.lingering.add(client, Some(server));
        } else {
            d.forget_flow(flow.connections().into());
        }
    }

    /// Returns the number of records removed because no socket claimed them.
    pub fn swept(&self) -> u64 {
        self.swept.load(Ordering::Relaxed)
    }

    /// Counts removed records.
    pub fn count_swept(&self, n: usize) {
        self.swept.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub fn stop_signal(&self) -> watch::Receiver<Stop> {
        self.stop.subscribe()
    }

    /// Tells all flows to end.
    pub fn stop(&self, stop: Stop) {
        self.stop.send_replace(stop);
        self.tell(KeeperMessage::Stop);
        self.end_recovered(stop);
    }

    /// Tells all flows to end now, unless they were told how to end before.
    pub fn stop_unless_stopped(&self) {
        self.stop.send_if_modified(|stop| {
            let goes = !stop.ends_tasks();
            if goes {
                *stop = Stop::Reset;
            }
            goes
        });
        self.end_recovered(*self.stop.borrow());
    }

    /// Returns whether the engine closes: its threads end.
    pub fn is_closing(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Tells the threads to end.
    pub fn begin_to_close(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.tell(KeeperMessage::Stop);
    }

    /// Resets what is still forwarded and removes the data path, unless flows were left to the kernel.
    pub fn remove(&self) -> io::Result<()> {
        match &self.datapath {
            Some(d) if *self.stop.borrow() != Stop::Leave && self.leaving() != Leaving::Gone => {
                let resets = d.reset_all_forwarded();
                if resets.reset + resets.failed > 0 {
                    tracing::info!("{resets}");
                }
                d.remove()
            }
            _ => Ok(()),
        }
    }
}

/// A flow in the tables. It is removed when this is dropped, unless the keeper has taken it.
pub(crate) struct Listed {
    engine: Arc<Engine>,
    pub flow: Arc<Flow>,
    kept: bool,
}

impl Listed {
    /// Wraps a flow that a task has and that is in the tables.
    pub fn again(engine: &Arc<Engine>, flow: Arc<Flow>) -> Listed {
        Listed { engine: engine.clone(), flow, kept: false }
    }

    /// Releases the flow without removing it from the tables.
    pub fn keep(mut self) -> Arc<Flow> {
        self.kept = true;
        self.flow.clone()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let Listed { engine, flow, .. } = self;
        let legs = flow.connections().map(|connection| engine.hash(&connection));
        lock(&engine.flows).remove(&flow.id);
        let mut routes = lock(&engine.routes);
        for leg in legs {
            if routes.get(&leg) == Some(&flow.id) {
                routes.remove(&leg);
            }
        }
    }
}
