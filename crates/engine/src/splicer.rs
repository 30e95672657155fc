//! The handle through which proxies connect, relay and splice, and the table of live flows.

use crate::{
    BoundSocket, Command, Ended, FlowEventKind, FlowInfo, FlowState, FlowStatus, Leftovers, Leg, Listener, Message,
    Policy, Refusal, RelayedMessage,
    core::{Action, Progress},
    descriptors::Descriptors,
    events::Announcer,
    flow::{Flow, KeeperMessage, Place, Stop, TaskInbox, is_loopback},
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
use longsplice_datapath::{Datapath, OpenError, Options, Tuple, register};
use std::{
    collections::{BTreeMap, HashMap, hash_map::RandomState},
    hash::BuildHasher,
    io, iter,
    net::{IpAddr, SocketAddr},
    ops::{Bound, RangeInclusive},
    path::PathBuf,
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

/// Flows that are taken from the table at a time.
const PAGE: usize = 1000;
/// bind(2) and listen(2) are tried so often while the address is in use, with a pause between: sockets that last for microseconds may hold it.
const LISTEN_TRIES: u32 = 40;
const LISTEN_PAUSE: Duration = Duration::from_millis(5);

/// What [`Splicer::open`] is to do. Minor releases add fields: write `..OpenOptions::default()` behind those you set.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Devices to attach to; empty means all Ethernet devices of this network namespace.
    pub devices: Vec<String>,
    /// Those of them on which XDP forwards what it can, before tcx.
    pub xdp: Vec<String>,
    /// Those of them, veth or netkit, that packets leave straight to the other end of, in another network namespace.
    pub peer: Vec<String>,
    /// Source ports of connections to servers. Outside of `net.ipv4.ip_local_port_range`, or other programs meet them.
    pub source_ports: RangeInclusive<u16>,
    /// Own addresses to connect to servers from, for more connections to one server than there are ports; those of the
    /// server's family in turn. Empty: the one that the kernel chooses.
    pub sources: Vec<IpAddr>,
    /// How many flows at most.
    pub max_flows: u32,
    /// Bytes of the ring for copies of what is forwarded, for taps; 64 KB to 1 GB, and 16 MB unless told, which is what comes at
    /// 10 Gbit/s while their reader does not run for 13 ms.
    pub tap_ring: u32,
    /// Bytes of the ring for what the hold policy holds, on its way to who holds it; likewise, 4 MB unless told.
    pub hold_ring: u32,
    /// What [`Policy::idle_limit`] is for flows of an earlier process, whose policies are not known any more.
    pub recovered_idle_limit: Duration,
    /// Where to pin maps and links; `None`: below /sys/fs/bpf/longsplice, by network namespace.
    pub pin: Option<PathBuf>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            devices: Vec::new(),
            xdp: Vec::new(),
            peer: Vec::new(),
            source_ports: 10240..=28671,
            sources: Vec::new(),
            max_flows: 65536,
            tap_ring: 16 << 20,
            hold_ring: 4 << 20,
            recovered_idle_limit: Policy::default().idle_limit,
            pin: None,
        }
    }
}

/// The engine. Cheap to clone; one per process. When the last handle is dropped without [`Splicer::close`], those of [`Listener`]s
/// among them, flows are reset and the data path is removed, as by [`Splicer::stop`] and [`Splicer::close`].
#[derive(Clone)]
pub struct Splicer {
    pub(crate) inner: Arc<Inner>,
    /// The engine's own threads and flows have none, or it would live for ever.
    _owner: Option<Arc<Owner>>,
}

/// What all handles of callers share.
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
    /// Why there is no data path.
    refusal: Refusal,
    pub ports: Ports,
    pub next_id: AtomicU64,
    /// Live flows, by number.
    flows: Mutex<BTreeMap<u64, Arc<Flow>>>,
    /// Spliced flows of an earlier process, by number.
    pub orphans: Mutex<BTreeMap<u64, Orphan>>,
    /// Which flow a leg belongs to, for events; by hash, which takes an eighth of the tuple's room. Should two legs have
    /// the same, one flow notices by looking.
    routes: Mutex<HashMap<u64, u64>>,
    hasher: RandomState,
    pub lingering: Lingering,
    pub descriptors: Descriptors,
    /// Records that nobody claimed, and are gone.
    pub swept: AtomicU64,
    keeper: Sender<KeeperMessage>,
    /// Splices of legs that are tapped, and whether somebody reads what is forwarded there.
    pub stretches: Mutex<Stretches>,
    tap_reader: Once,
    pub holder: Mutex<Holder>,
    /// Connections of others that are being opened.
    pub transparent: Mutex<TransparentFlows>,
    pub announcer: Arc<Announcer>,
    pub stopping: AtomicBool,
    stop: watch::Sender<Stop>,
}

impl Inner {
    /// Is it a leg of a flow that this process has spliced?
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
    /// Loads the data path. On error, [`Splicer::copying`] still serves.
    pub fn open(options: &OpenOptions) -> Result<Splicer, OpenError> {
        let datapath = Datapath::open(&Options {
            devices: options.devices.clone(),
            xdp: options.xdp.clone(),
            peer: options.peer.clone(),
            pin: options.pin.clone(),
            max_flows: options.max_flows,
            tap_ring: options.tap_ring,
            hold_ring: options.hold_ring,
        })?;
        let (keeper, messages) = channel();
        let s = Splicer::with(
            Some(datapath),
            Refusal::Unprivileged,
            Ports::new(options.source_ports.clone(), options.sources.clone()),
            keeper,
        );
        orphans::adopt(&s.inner, options.recovered_idle_limit)?;
        s.datapath().map_or(Ok(()), |d| paths::follow(&s.inner, d))?;
        // this thread holds the engine until told to stop
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

    /// From the first splice of a leg that is tapped on.
    pub(crate) fn hear_taps(&self) {
        self.inner.tap_reader.call_once(|| {
            let engine = self.internal();
            let thread = std::thread::Builder::new().name("taps".into()).spawn(move || stretches::hear(&engine));
            if let Err(error) = thread {
                tracing::error!(%error, "taps will miss what is forwarded");
            }
        });
    }

    /// The flow that a leg belongs to.
    pub(crate) fn flow_of(&self, leg: &Tuple) -> Option<Arc<Flow>> {
        let id = lock(&self.inner.routes).get(&self.hash(leg)).copied();
        id.and_then(|id| self.flow(id))
    }

    fn hash(&self, leg: &Tuple) -> u64 {
        self.inner.hasher.hash_one(leg)
    }

    /// Events of both legs reach the flow from now on.
    pub(crate) fn route_events(&self, flow: &Flow) {
        let legs = [self.hash(&flow.client), self.hash(&flow.server)];
        lock(&self.inner.routes).extend(legs.map(|h| (h, flow.id)));
    }

    /// The keeper; once it is gone, flows are as well.
    pub(crate) fn tell(&self, message: KeeperMessage) {
        self.inner.tell(message);
    }

    /// The same, when it looks around by itself: it need not be woken for each flow.
    pub(crate) fn tell_some_time(&self, message: KeeperMessage) {
        let _ = self.inner.keeper.send(message);
    }

    /// For a new task: how it is reached, and what it listens to.
    pub(crate) fn inbox(&self) -> (Place, TaskInbox) {
        let (tx, orders) = mpsc::unbounded_channel();
        let events = Arc::new(Notify::new());
        (Place::Task { orders: tx, events: events.clone() }, TaskInbox { orders, events, stop: self.stop_signal() })
    }

    /// An engine that only copies; every flow shows `reason`.
    pub fn copying(reason: Refusal) -> Splicer {
        Splicer::copying_from(Vec::new(), reason)
    }

    /// The same, with [`OpenOptions::sources`].
    pub fn copying_from(sources: Vec<IpAddr>, reason: Refusal) -> Splicer {
        Splicer::with(None, reason, Ports::new(OpenOptions::default().source_ports, sources), channel().0).owned()
    }

    /// For a caller.
    fn owned(self) -> Splicer {
        Splicer { _owner: Some(Arc::new(Owner(self.inner.clone()))), inner: self.inner }
    }

    /// For the engine's own threads and flows.
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

    /// The data path, for the engine and the tests of this workspace.
    #[doc(hidden)]
    pub fn datapath(&self) -> Option<&Datapath> {
        self.inner.datapath.as_ref()
    }

    /// Why no flow can be spliced at all, if so.
    pub fn refusal(&self) -> Option<Refusal> {
        self.inner.datapath.is_none().then_some(self.inner.refusal)
    }

    /// Listens on `addr`, as [`BoundSocket::bind`] takes it.
    pub async fn listen(&self, addr: SocketAddr) -> io::Result<Listener> {
        self.listen_on(patiently(|| BoundSocket::bind(addr)).await?).await
    }

    /// The same where the address was taken before, by [`BoundSocket::bind`], or by whoever made a listener
    /// ([`BoundSocket::from_listener`]).
    pub async fn listen_on(&self, socket: BoundSocket) -> io::Result<Listener> {
        if let Some(d) = &self.inner.datapath {
            d.listen(ip(&socket.socket.local_addr()?))?; // before listen(2): the first SYN counts
        }
        self.listen_to_copy(socket).await.map(|listener| Listener { to_copy: false, ..listener })
    }

    /// The same for connections that are never spliced, nor those that are made for them: the data path has no work with any.
    pub async fn listen_to_copy(&self, bound: BoundSocket) -> io::Result<Listener> {
        let BoundSocket { socket, has_listened } = bound;
        patiently(|| socket.listen(4096)).await?;
        let listener = register(socket.into(), Interest::READABLE)?;
        Ok(Listener { splicer: self.clone(), to_copy: true, has_listened, listener })
    }

    /// Relays until both directions have ended: copies, splices when `policy` says so, and copies again if it must.
    /// `left` is delivered first. Half-closes and resets are passed on. Dropping the future does not end the flow.
    pub async fn relay(&self, client: Leg, server: Leg, left: Leftovers, policy: Arc<Policy>, info: FlowInfo) -> Ended {
        let (tell, told) = oneshot::channel();
        let done = move |ended, _: &FlowInfo| drop(tell.send(ended));
        self.hand_over(client, server, left, policy, info, done);
        told.await.expect("a flow ends before its runtime does")
    }

    /// The same for whoever has nothing to do in the meantime: no task of the caller's has to live as long as the flow,
    /// and none of the engine's does while it is forwarded. `done` is called once, with the record of the flow, by a
    /// thread that must not wait. Within a runtime. Returns the number of the flow, for [`Splicer::command`] and [`Splicer::subscribe`].
    pub fn hand_over(
        &self,
        client: Leg,
        server: Leg,
        left: Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        done: impl FnOnce(Ended, &FlowInfo) + Send + 'static,
    ) -> u64 {
        self.begin([client, server], &left, policy, info, None, Purpose::Streams(Box::new(done)))
    }

    /// Relays one message, and gives the legs back: splices if `policy` says so, by the bytes that are left of it. Nothing is read
    /// from its receiver; what that sends takes a splice back, within the data path, as does what its sender sends beyond the
    /// message. `left`: what was read of the message already, delivered first, and not counted in its bytes; nothing for its
    /// sender. [`Policy::idle_limit`] is for copying, too. Meanwhile, and after the end of the connections, the legs are as good as
    /// closed; dropping the future lets the flow go on, and closes them then.
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
        let legs = [client.take(), server.take()];
        self.begin(legs, &left, policy, info, Some(message), Purpose::Message(tell));
        let (passed, legs) = told.await.expect("a flow ends before its runtime does");
        if let Some(legs) = legs {
            (*client, *server) = legs;
        }
        passed
    }

    /// Whether a flow of these two could be spliced, as far as one can know before trying; why not.
    pub fn may_splice(&self, client: &Leg, server: &Leg) -> Result<(), Refusal> {
        match self.refusal() {
            Some(refusal) => Err(refusal),
            None if [client, server].into_iter().any(|leg| is_loopback(&leg.tuple())) => Err(Refusal::Loopback),
            None => client.refusal().or(server.refusal()).map_or(Ok(()), Err),
        }
    }

    fn begin(
        &self,
        legs: [Leg; 2],
        left: &Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        message: Option<Message>,
        purpose: Purpose,
    ) -> u64 {
        let [client, server] = &legs;
        let (place, inbox) = self.inbox();
        self.refusal().inspect(|why| policy.tally.refuse(*why));
        let flow = Arc::new(Flow {
            id: self.inner.next_id.fetch_add(1, Ordering::Relaxed),
            info,
            client: client.tuple(),
            announced: client.announced.clone(),
            server: server.tuple(),
            began: Instant::now(),
            policy,
            now: Mutex::new(Progress::new(self.refusal())),
            place: Mutex::new(place),
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

    /// Flows that may need room in the tables, those of an earlier process among them.
    pub(crate) fn live(&self) -> usize {
        lock(&self.inner.flows).len() + lock(&self.inner.orphans).len()
    }

    pub(crate) fn flow(&self, id: u64) -> Option<Arc<Flow>> {
        lock(&self.inner.flows).get(&id).cloned()
    }

    /// At most so many flows with numbers above `after`; none: there are no more.
    pub(crate) fn page(&self, after: u64, most: usize) -> Option<Vec<Arc<Flow>>> {
        let flows = lock(&self.inner.flows);
        let page: Vec<_> =
            flows.range((Bound::Excluded(after), Bound::Unbounded)).take(most).map(|(_, f)| f.clone()).collect();
        (!page.is_empty()).then_some(page)
    }

    /// All live flows, and those that an earlier process left in forwarding mode.
    pub fn flows(&self) -> Vec<FlowStatus> {
        self.flows_after(0, usize::MAX, None)
    }

    /// At most so many of them, in the order of their numbers, from the first above `after` on, and only those in `state`
    /// if there is one. No lock is held for more than a page, and the data path is asked about what is listed alone.
    pub fn flows_after(&self, after: u64, most: usize, state: Option<FlowState>) -> Vec<FlowStatus> {
        let fits = |now: FlowState| state.is_none_or(|s| s == now);
        let orphans: Vec<FlowStatus> = {
            let orphans = lock(&self.inner.orphans);
            let later = orphans.range((Bound::Excluded(after), Bound::Unbounded));
            later.map(|(_, o)| o.status()).filter(|o| fits(o.state)).take(most).collect()
        };
        // those that are taken over late have later numbers
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

    /// Asks something of a live flow. False: there is no such flow.
    pub fn command(&self, id: u64, command: Command) -> bool {
        let Some(flow) = self.flow(id) else { return false };
        match &*flow.place() {
            Place::Task { orders, .. } => return orders.send(command).is_ok(),
            Place::Kept(_) => self.tell(KeeperMessage::Command(id, command)),
            Place::Gone => return false,
        }
        true
    }

    /// Closes a leg that is to join no flow, as it is closed when dropped, and forgets what the data path knows of it. One that a
    /// flow has, or had at its end, is that flow's to forget.
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

    /// Until all flows were told to end ([`Splicer::stop`]): what a caller does with legs of no flow has to end, too.
    pub async fn stopped(&self) {
        // The sender is in `self`.
        let _ = self.stop_signal().wait_for(|s| *s != Stop::Go).await;
    }

    /// Until all flows of this process have ended, and their sockets are closed. Who waited for one of them may be gone before.
    pub async fn ended(&self) {
        const LOOK: Duration = Duration::from_millis(5);
        while !lock(&self.inner.flows).is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends all flows now; `leave`: spliced ones go on in the kernel, without this process.
    pub fn stop(&self, leave: bool) {
        self.inner.stop.send_replace(if leave { Stop::Leave } else { Stop::Reset });
        self.tell(KeeperMessage::Stop);
    }

    /// After all relays have returned: removes everything that was attached and pinned, unless flows were left to the
    /// kernel by [`Splicer::stop`]. What is forwarded still, as flows of an earlier process, is reset before.
    pub fn close(self) -> io::Result<()> {
        self.inner.close()
    }

    /// The end of a flow without sockets.
    pub(crate) fn reset_forwarded(&self, legs: [&Tuple; 2]) {
        if let Some(Err(error)) = self.datapath().map(|d| d.reset_forwarded(legs)) {
            tracing::warn!(legs = ?legs, %error, "a host was not told that its connection is over");
        }
    }

    /// Entries of a flow that has ended: at once, or when its last segments have been answered.
    pub(crate) fn forget(&self, flow: &Flow, linger: bool) {
        let Some(d) = self.datapath() else { return };
        if linger {
            self.inner.lingering.add(flow.client, Some(flow.server));
        } else {
            d.forget_flow([&flow.client, &flow.server]);
        }
    }

    /// Records of connections that had no socket, and have been removed: the kernel had dropped the end of a handshake, say.
    pub fn swept(&self) -> u64 {
        self.inner.swept.load(Ordering::Relaxed)
    }

    pub(crate) fn stop_signal(&self) -> watch::Receiver<Stop> {
        self.inner.stop.subscribe()
    }
}

/// A flow in the tables: until this is dropped, unless the keeper takes it.
pub(crate) struct Listed {
    splicer: Splicer,
    pub flow: Arc<Flow>,
    kept: bool,
}

impl Listed {
    /// In a task.
    pub fn again(splicer: &Splicer, flow: Arc<Flow>) -> Listed {
        Listed { splicer: splicer.clone(), flow, kept: false }
    }

    /// It stays listed.
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
        let legs = [&self.flow.client, &self.flow.server].map(|leg| self.splicer.hash(leg));
        lock(&inner.flows).remove(&self.flow.id);
        let mut routes = lock(&inner.routes);
        for leg in legs {
            if routes.get(&leg) == Some(&self.flow.id) {
                routes.remove(&leg);
            }
        }
    }
}

/// A socket that tells a host of its dead connection cannot share the port before it has left repair mode.
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
