//! [`Splicer`], the handle through which proxies connect, relay and splice, and the table of live flows.

use crate::{
    BoundSocket, Command, Ended, FlowEventKind, FlowInfo, FlowState, FlowStatus, Leftovers, Leg, Listener, Message,
    Policy, Refusal, RelayedMessage,
    core::{Action, Progress},
    descriptors::Descriptors,
    events::Announcer,
    flow::{Flow, FlowOwner, KeeperMessage, Stop, TaskInbox, is_loopback},
    foreign::TransparentFlows,
    holder::Holder,
    keeper,
    leg::ip,
    lingering::Lingering,
    orphans::{self, Orphan},
    paths,
    ports::Ports,
    purpose::Purpose,
    relay::Relay,
    stretches::{self, Stretches},
    sync::lock,
};
use longsplice_datapath::{Datapath, OpenError, Options as DatapathOptions, Pair, Tuple, register};
use std::{
    collections::{BTreeMap, HashMap, hash_map::RandomState},
    hash::BuildHasher,
    io, iter,
    net::{IpAddr, SocketAddr},
    ops::{Bound, RangeInclusive},
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::Interest,
    runtime::Handle,
    sync::{Notify, mpsc, oneshot, watch},
};

/// Number of flows taken from the table at a time.
const PAGE: usize = 1000;
/// Number of times that bind(2) and listen(2) are retried while the address is in use,
/// with a pause between. Sockets that last for microseconds may hold the address.
const LISTEN_TRIES: u32 = 40;
const LISTEN_PAUSE: Duration = Duration::from_millis(5);

/// Options of [`Splicer::open`]. Minor releases add fields: write `..OpenOptions::default()` after those you set.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Devices, tables and rings of the data path.
    pub datapath: DatapathOptions,
    /// Local ports of connections to servers. Keep them outside of
    /// `net.ipv4.ip_local_port_range`, from which other programs get theirs.
    pub source_ports: RangeInclusive<u16>,
    /// Local addresses of connections to servers, for more connections to one server than there
    /// are ports. Addresses of the server's family are used in turn. Empty: the kernel chooses.
    pub sources: Vec<IpAddr>,
    /// [`Policy::idle_limit`] for the flows of an earlier process, whose policies are lost.
    pub recovered_idle_limit: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            datapath: DatapathOptions::default(),
            source_ports: 10240..=28671,
            sources: Vec::new(),
            recovered_idle_limit: Policy::default().idle_limit,
        }
    }
}

/// These options of the data path, and defaults for the rest.
impl From<DatapathOptions> for OpenOptions {
    fn from(datapath: DatapathOptions) -> Self {
        OpenOptions { datapath, ..OpenOptions::default() }
    }
}

/// The engine. Cheap to clone; one per process. When the last handle is dropped without [`Splicer::close`], flows are
/// reset and the data path is removed, as [`Splicer::stop`] and [`Splicer::close`] do. Each [`Listener`] holds a handle.
#[derive(Clone)]
pub struct Splicer {
    pub(crate) inner: Arc<Inner>,
    /// `None` in the engine's own threads and flows; otherwise the engine would live for ever.
    _owner: Option<Arc<Owner>>,
}

/// State shared by the handles of callers. Dropped with the last of them.
struct Owner(Arc<Inner>);

impl Drop for Owner {
    fn drop(&mut self) {
        if self.0.stopping.load(Ordering::Relaxed) {
            return;
        }
        self.0.stop.send_if_modified(|stop| {
            let goes = *stop == Stop::Go;
            if goes {
                *stop = Stop::Reset;
            }
            goes
        });
        if let Err(error) = self.0.close() {
            tracing::warn!(%error, "the data path stays attached");
        }
    }
}

pub(crate) struct Inner {
    pub datapath: Option<Datapath>,
    /// Reason why there is no data path.
    refusal: Refusal,
    pub ports: Ports,
    pub next_id: AtomicU64,
    /// Live flows, by number.
    flows: Mutex<BTreeMap<u64, Arc<Flow>>>,
    /// Spliced flows of an earlier process, by number.
    pub orphans: Mutex<BTreeMap<u64, Orphan>>,
    /// The flow of each leg, for events. Keyed by a hash, which takes an eighth of the space of a
    /// tuple. If two legs have the same hash, one flow misses its events and notices by polling.
    routes: Mutex<HashMap<u64, u64>>,
    hasher: RandomState,
    pub lingering: Lingering,
    pub descriptors: Descriptors,
    /// Number of records removed because no socket claimed them.
    pub swept: AtomicU64,
    keeper: Sender<KeeperMessage>,
    /// Spliced stretches of tapped legs, and whether a thread reads the data forwarded on them.
    pub stretches: Mutex<Stretches>,
    tap_reader: Once,
    pub holder: Mutex<Holder>,
    /// Transparent connections that are being opened.
    pub transparent: Mutex<TransparentFlows>,
    pub announcer: Arc<Announcer>,
    pub stopping: AtomicBool,
    stop: watch::Sender<Stop>,
}

impl Inner {
    /// Returns whether this leg belongs to a flow that this process has spliced.
    pub fn is_routed(&self, leg: &Tuple) -> bool {
        lock(&self.routes).contains_key(&self.hasher.hash_one(leg))
    }

    fn tell(&self, message: KeeperMessage) {
        let _ = self.keeper.send(message);
        if let Some(d) = &self.datapath {
            d.wake();
        }
    }

    fn close(&self) -> io::Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        lock(&self.transparent).leave(self.datapath.as_ref());
        self.tell(KeeperMessage::Stop);
        match &self.datapath {
            Some(d) if *self.stop.borrow() != Stop::Leave => {
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

impl Splicer {
    /// Loads the data path and starts the engine's threads. On error, use [`Splicer::copying`].
    pub fn open(options: &OpenOptions) -> Result<Splicer, OpenError> {
        let datapath = Datapath::open(&options.datapath)?;
        let (keeper, messages) = channel();
        let s = Splicer::with(
            Some(datapath),
            Refusal::Unprivileged,
            Ports::new(options.source_ports.clone(), options.sources.clone()),
            keeper,
        );
        orphans::adopt(&s.inner, options.recovered_idle_limit)?;
        s.datapath().map_or(Ok(()), |d| paths::follow(&s.inner, d))?;
        // the thread holds the engine until it is told to stop
        let (engine, (tell, told)) = (s.clone(), channel());
        let keep = move || {
            let listening = engine.datapath().map(|d| d.events().map_err(|e| tell.send(e)));
            drop(tell);
            if let Some(Ok(mut events)) = listening {
                keeper::keep(engine.clone(), &messages, &mut events);
            }
        };
        let failed = |source| OpenError::Kernel { what: "thread", source };
        std::thread::Builder::new().name("keeper".into()).spawn(keep).map_err(failed)?;
        let engine = s.clone();
        let reuse = move || {
            let is_over = || engine.inner.stopping.load(Ordering::Relaxed);
            if let Some(Err(error)) = engine.datapath().map(|d| d.reuse_slots(is_over)) {
                tracing::debug!(%error, "slots rest for a second before they are used again");
            }
        };
        std::thread::Builder::new().name("slots".into()).spawn(reuse).map_err(failed)?;
        match told.recv() {
            Ok(source) => Err(OpenError::Kernel { what: "ring of events", source }),
            Err(_) => Ok(s.owned()),
        }
    }

    /// Starts the thread that reads forwarded data for taps, once. Called at the first splice of a tapped leg.
    pub(crate) fn hear_taps(&self) {
        self.inner.tap_reader.call_once(|| {
            let engine = self.internal();
            let thread = std::thread::Builder::new().name("taps".into()).spawn(move || stretches::hear(&engine));
            if let Err(error) = thread {
                tracing::error!(%error, "taps will miss what is forwarded");
            }
        });
    }

    /// Returns the flow that a leg belongs to.
    pub(crate) fn flow_of(&self, leg: &Tuple) -> Option<Arc<Flow>> {
        let id = lock(&self.inner.routes).get(&self.hash(leg)).copied();
        id.and_then(|id| self.flow(id))
    }

    fn hash(&self, leg: &Tuple) -> u64 {
        self.inner.hasher.hash_one(leg)
    }

    /// Routes events of both legs to the flow from now on.
    pub(crate) fn route_events(&self, flow: &Flow) {
        let legs = flow.legs.each_ref().map(|leg| self.hash(leg));
        lock(&self.inner.routes).extend(legs.map(|h| (h, flow.id)));
    }

    /// Sends a message to the keeper and wakes it. When the keeper has ended, flows have ended too.
    pub(crate) fn tell(&self, message: KeeperMessage) {
        self.inner.tell(message);
    }

    /// Sends a message that the keeper may read at its next round. This saves a wake-up for each flow.
    pub(crate) fn tell_some_time(&self, message: KeeperMessage) {
        let _ = self.inner.keeper.send(message);
    }

    /// Returns the channels of a new task: the sending ends, and the ends that it listens to.
    pub(crate) fn inbox(&self) -> (FlowOwner, TaskInbox) {
        let (tx, orders) = mpsc::unbounded_channel();
        let events = Arc::new(Notify::new());
        (FlowOwner::Task { orders: tx, events: events.clone() }, TaskInbox { orders, events, stop: self.stop_signal() })
    }

    /// Creates an engine that only copies. Every flow shows `reason`.
    pub fn copying(reason: Refusal) -> Splicer {
        Splicer::copying_from(Vec::new(), reason)
    }

    /// Creates an engine that only copies, with [`OpenOptions::sources`].
    pub fn copying_from(sources: Vec<IpAddr>, reason: Refusal) -> Splicer {
        Splicer::with(None, reason, Ports::new(OpenOptions::default().source_ports, sources), channel().0).owned()
    }

    /// Makes a handle for a caller.
    fn owned(self) -> Splicer {
        Splicer { _owner: Some(Arc::new(Owner(self.inner.clone()))), inner: self.inner }
    }

    /// Makes a handle for the engine's own threads and flows.
    pub(crate) fn internal(&self) -> Splicer {
        Splicer::of(self.inner.clone())
    }

    pub(crate) fn of(inner: Arc<Inner>) -> Splicer {
        Splicer { inner, _owner: None }
    }

    fn with(datapath: Option<Datapath>, refusal: Refusal, ports: Ports, keeper: Sender<KeeperMessage>) -> Splicer {
        let lingering = Lingering::new(datapath.as_ref().map_or(0, Datapath::max_flows) as usize);
        Splicer {
            _owner: None,
            inner: Arc::new(Inner {
                datapath,
                refusal,
                ports,
                next_id: AtomicU64::new(1),
                flows: Mutex::default(),
                orphans: Mutex::default(),
                routes: Mutex::default(),
                hasher: RandomState::new(),
                lingering,
                descriptors: Descriptors::default(),
                swept: AtomicU64::new(0),
                keeper,
                stretches: Mutex::default(),
                tap_reader: Once::new(),
                holder: Mutex::default(),
                transparent: Mutex::default(),
                announcer: Arc::default(),
                stopping: AtomicBool::new(false),
                stop: watch::Sender::new(Stop::Go),
            }),
        }
    }

    /// Returns the data path. For the engine and the tests of this workspace.
    #[doc(hidden)]
    pub fn datapath(&self) -> Option<&Datapath> {
        self.inner.datapath.as_ref()
    }

    /// Returns why no flow can be spliced, or `None` if there is a data path.
    pub fn refusal(&self) -> Option<Refusal> {
        self.inner.datapath.is_none().then_some(self.inner.refusal)
    }

    /// Listens on `addr`; see [`BoundSocket::bind`].
    pub async fn listen(&self, addr: SocketAddr) -> io::Result<Listener> {
        self.listen_on(patiently(|| BoundSocket::bind(addr)).await?).await
    }

    /// Listens on a socket that was bound by [`BoundSocket::bind`], or taken over by [`BoundSocket::from_listener`].
    pub async fn listen_on(&self, socket: BoundSocket) -> io::Result<Listener> {
        if let Some(d) = &self.inner.datapath {
            d.listen(ip(&socket.socket.local_addr()?))?; // before listen(2): the first SYN counts
        }
        self.listen_to_copy(socket).await.map(|listener| Listener { to_copy: false, ..listener })
    }

    /// Listens for connections that are never spliced. The connections to servers that are
    /// made for them are not spliced either, and the data path does no work for any of them.
    pub async fn listen_to_copy(&self, bound: BoundSocket) -> io::Result<Listener> {
        let BoundSocket { socket, has_listened } = bound;
        patiently(|| socket.listen(4096)).await?;
        let listener = register(socket.into(), Interest::READABLE)?;
        Ok(Listener { splicer: self.clone(), to_copy: true, has_listened, listener })
    }

    /// Relays until both directions have ended. Copies, splices when `policy` says so, and copies again when
    /// necessary. Delivers `left` first. Passes half-closes and resets on. Dropping the future does not end the flow.
    pub async fn relay(&self, client: Leg, server: Leg, left: Leftovers, policy: Arc<Policy>, info: FlowInfo) -> Ended {
        let (tell, told) = oneshot::channel();
        let done = move |ended, _: &FlowInfo| drop(tell.send(ended));
        self.hand_over(client, server, left, policy, info, done);
        told.await.expect("a flow ends before its runtime does")
    }

    /// Relays like [`Splicer::relay`], but returns at once. No task of the caller has to live as long
    /// as the flow, and no task of the engine does while the flow is forwarded. A thread of the engine
    /// calls `done` once, with the record of the flow; it must not block. Must be called within a
    /// runtime. Returns the number of the flow, for [`Splicer::command`] and [`Splicer::subscribe`].
    pub fn hand_over(
        &self,
        client: Leg,
        server: Leg,
        left: Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        done: impl FnOnce(Ended, &FlowInfo) + Send + 'static,
    ) -> u64 {
        self.begin(Pair::new(client, server), &left, policy, info, None, Purpose::Streams(Box::new(done)))
    }

    /// Relays one message and returns the legs. Splices if `policy` says so, judged by the bytes left of the
    /// message. Nothing is read from the receiver. If the receiver sends data, or the sender sends more than
    /// the message, the data path takes the splice back. `left` holds bytes of the message that were read
    /// already, and nothing for its sender. They are delivered first and do not count in its length.
    /// [`Policy::idle_limit`] applies to copying too. The legs are unusable during the call, and after the end
    /// of the connections. If the future is dropped, the flow goes on, and both legs are closed at its end.
    pub async fn relay_message(
        &self,
        client: &mut Leg,
        server: &mut Leg,
        left: Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        message: Message,
    ) -> RelayedMessage {
        let (tell, told) = oneshot::channel();
        let legs = Pair::new(client.take(), server.take());
        self.begin(legs, &left, policy, info, Some(message), Purpose::Message(tell));
        let (passed, legs) = told.await.expect("a flow ends before its runtime does");
        if let Some(legs) = legs {
            (*client, *server) = (legs.client, legs.server);
        }
        passed
    }

    /// Checks whether a flow of these legs could be spliced, as far as
    /// this is known before an attempt. Otherwise returns the reason.
    pub fn may_splice(&self, client: &Leg, server: &Leg) -> Result<(), Refusal> {
        match self.refusal() {
            Some(refusal) => Err(refusal),
            None if [client, server].into_iter().any(|leg| is_loopback(&leg.tuple())) => Err(Refusal::Loopback),
            None => client.refusal().or(server.refusal()).map_or(Ok(()), Err),
        }
    }

    fn begin(
        &self,
        legs: Pair<Leg>,
        left: &Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        message: Option<Message>,
        purpose: Purpose,
    ) -> u64 {
        let (owner, inbox) = self.inbox();
        self.refusal().inspect(|why| policy.tally.refuse(*why));
        let flow = Arc::new(Flow {
            id: self.inner.next_id.fetch_add(1, Ordering::Relaxed),
            info,
            legs: legs.each_ref().map(Leg::tuple),
            announced: legs.client.announced.clone(),
            began: Instant::now(),
            policy,
            now: Mutex::new(Progress::new(self.refusal())),
            owner: Mutex::new(owner),
            runtime: Handle::current(),
            announcer: self.inner.announcer.clone(),
        });
        if let Some(why) = self.refusal() {
            self.inner.announcer.tell(flow.id, FlowEventKind::Refused(why));
        }
        lock(&self.inner.flows).insert(flow.id, flow.clone());
        if let Some(d) = self.datapath().filter(|_| self.inner.lingering.is_crowd(self.live())) {
            d.wake();
        }
        let id = flow.id;
        let engine = self.internal();
        let listed = Listed::again(&engine, flow);
        tokio::spawn(Relay::new(&engine, listed, legs, left, message, purpose).run(inbox, Action::Attend));
        id
    }

    /// Returns the number of flows that may need room in the tables, including those of an earlier process.
    pub(crate) fn live(&self) -> usize {
        lock(&self.inner.flows).len() + lock(&self.inner.orphans).len()
    }

    pub(crate) fn flow(&self, id: u64) -> Option<Arc<Flow>> {
        lock(&self.inner.flows).get(&id).cloned()
    }

    /// Returns at most `most` flows with numbers above `after`, or `None` if there are no more.
    pub(crate) fn page(&self, after: u64, most: usize) -> Option<Vec<Arc<Flow>>> {
        let flows = lock(&self.inner.flows);
        let page: Vec<_> =
            flows.range((Bound::Excluded(after), Bound::Unbounded)).take(most).map(|(_, f)| f.clone()).collect();
        (!page.is_empty()).then_some(page)
    }

    /// Lists all live flows, including those that an earlier process left in forwarding mode.
    pub fn flows(&self) -> Vec<FlowStatus> {
        self.flows_after(0, usize::MAX, None)
    }

    /// Lists at most `most` flows with numbers above `after`, in ascending order, and only those in `state` if
    /// it is given. Holds no lock for longer than a page, and asks the data path only about the flows listed.
    pub fn flows_after(&self, after: u64, most: usize, state: Option<FlowState>) -> Vec<FlowStatus> {
        let fits = |now: FlowState| state.is_none_or(|s| s == now);
        let orphans: Vec<FlowStatus> = {
            let orphans = lock(&self.inner.orphans);
            let later = orphans.range((Bound::Excluded(after), Bound::Unbounded));
            later.map(|(_, o)| o.status()).filter(|o| fits(o.state)).take(most).collect()
        };
        // orphans adopted late have later numbers
        let (mut all, mut earlier, mut last) = (Vec::new(), orphans.into_iter().peekable(), after);
        while all.len() < most
            && let Some(page) = self.page(last, PAGE)
        {
            last = page[page.len() - 1].id;
            for f in page.iter().filter(|f| fits(f.now().state)).take(most - all.len()) {
                all.extend(iter::from_fn(|| earlier.next_if(|o| o.id < f.id)));
                all.push(f.status(self.datapath()));
            }
        }
        all.extend(earlier);
        all.truncate(most);
        all
    }

    /// Sends a command to a live flow. Returns false if there is no such flow.
    pub fn command(&self, id: u64, command: Command) -> bool {
        let Some(flow) = self.flow(id) else { return false };
        match &*flow.owner() {
            FlowOwner::Task { orders, .. } => return orders.send(command).is_ok(),
            FlowOwner::Keeper(_) => self.tell(KeeperMessage::Command(id, command)),
            FlowOwner::Gone => return false,
        }
        true
    }

    /// Closes a leg that will not join a flow, as dropping it does, and makes the data path forget it.
    /// Does nothing to a leg that a flow has taken, because the flow makes the data path forget it.
    pub fn discard(&self, leg: Leg) {
        if leg.is_gone() {
            return;
        }
        let (tuple, shimmed, known) = (leg.tuple(), leg.at.shimmed, !leg.is_only_copied());
        drop(leg);
        let Some(d) = self.datapath().filter(|_| known) else { return };
        if shimmed {
            self.inner.lingering.add(tuple, None);
        } else {
            d.forget(&tuple);
        }
    }

    /// Waits until all flows were told to end ([`Splicer::stop`]). Work with legs outside of flows has to end then, too.
    pub async fn stopped(&self) {
        // it cannot fail: the sender is in `self`
        let _ = self.stop_signal().wait_for(|s| *s != Stop::Go).await;
    }

    /// Waits until all flows of this process have ended and their sockets
    /// are closed. Futures of [`Splicer::relay`] may return earlier.
    pub async fn ended(&self) {
        const LOOK: Duration = Duration::from_millis(5);
        while !lock(&self.inner.flows).is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends all flows now. With `leave`, spliced flows go on in the kernel without this process.
    pub fn stop(&self, leave: bool) {
        self.inner.stop.send_replace(if leave { Stop::Leave } else { Stop::Reset });
        self.tell(KeeperMessage::Stop);
    }

    /// Removes everything that was attached and pinned, unless [`Splicer::stop`] left flows to the kernel. Connections that
    /// are still forwarded, such as flows of an earlier process, are reset first. Call it after all relays have returned.
    pub fn close(self) -> io::Result<()> {
        self.inner.close()
    }

    /// Resets both connections of a flow that has no sockets.
    pub(crate) fn reset_forwarded(&self, legs: [&Tuple; 2]) {
        if let Some(Err(error)) = self.datapath().map(|d| d.reset_forwarded(legs)) {
            tracing::warn!(legs = ?legs, %error, "a host was not told that its connection is over");
        }
    }

    /// Removes the entries of a flow that has ended: at once, or, with
    /// `linger`, some time later, so that its last segments are still answered.
    pub(crate) fn forget(&self, flow: &Flow, linger: bool) {
        let Some(d) = self.datapath() else { return };
        if linger {
            self.inner.lingering.add(flow.legs.client, Some(flow.legs.server));
        } else {
            d.forget_flow(flow.legs.each_ref().into());
        }
    }

    /// Returns the number of records removed because their connection
    /// had no socket, for example after the kernel dropped a handshake.
    pub fn swept(&self) -> u64 {
        self.inner.swept.load(Ordering::Relaxed)
    }

    pub(crate) fn stop_signal(&self) -> watch::Receiver<Stop> {
        self.inner.stop.subscribe()
    }
}

/// A flow in the tables. It is removed when this is dropped, unless the keeper has taken it.
pub(crate) struct Listed {
    splicer: Splicer,
    pub flow: Arc<Flow>,
    kept: bool,
}

impl Listed {
    /// Wraps a flow that a task has.
    pub fn again(splicer: &Splicer, flow: Arc<Flow>) -> Listed {
        Listed { splicer: splicer.clone(), flow, kept: false }
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
        let inner = &self.splicer.inner;
        let legs = self.flow.legs.each_ref().map(|leg| self.splicer.hash(leg));
        lock(&inner.flows).remove(&self.flow.id);
        let mut routes = lock(&inner.routes);
        for leg in legs {
            if routes.get(&leg) == Some(&self.flow.id) {
                routes.remove(&leg);
            }
        }
    }
}

/// Retries while the address is in use: a socket that resets a dead
/// connection cannot share the port before it leaves repair mode.
async fn patiently<T>(attempt: impl Fn() -> io::Result<T>) -> io::Result<T> {
    for _ in 0..LISTEN_TRIES {
        match attempt() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => tokio::time::sleep(LISTEN_PAUSE).await,
            done => return done,
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_told_to_end_when_the_last_handle_is_dropped() {
        let splicer = Splicer::copying(Refusal::Policy);
        let (told, engine, other) = (splicer.stop_signal(), splicer.internal(), splicer.clone());
        drop(splicer);
        assert_eq!(*told.borrow(), Stop::Go);
        drop(other);
        assert_eq!(*told.borrow(), Stop::Reset);
        assert!(engine.inner.stopping.load(Ordering::Relaxed));
    }

    #[test]
    fn what_was_left_to_the_kernel_stays_when_the_last_handle_is_dropped() {
        let splicer = Splicer::copying(Refusal::Policy);
        let told = splicer.stop_signal();
        splicer.stop(true);
        drop(splicer);
        assert_eq!(*told.borrow(), Stop::Leave);
    }
}
