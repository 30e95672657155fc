//! [`Splicer`], the handle through which proxies connect, relay and splice.

mod adopt;
mod connect;
mod counters;
pub(crate) mod early;
pub(crate) mod end_to_end;
mod handing;
pub(crate) mod inspect;
pub(crate) mod leaving;
pub(crate) mod listener;
mod ticker;

#[cfg(feature = "taps")]
use crate::taps::Tap;
use crate::{
    copying::relay::Relay,
    core::{Action, Progress},
    engine::{
        Engine, Leaving,
        events::{FlowEventKind, FlowEvents, Switches},
        flow::{Flow, Moment, Stop},
        ports::Ports,
        purpose::Purpose,
        recovered::{EarlierFlow, TakenUp},
    },
    keeping::{adoption, keeper, paths},
    leg::Leg,
    passing::handshakes::Handshakes,
    refusal::Refusal,
    sync::lock,
    types::{
        Command, Done, Ended, FlowInfo, FlowState, FlowStatus, Leftovers, Message, NotReleased, Policy, RelayedMessage,
    },
};
use longsplice_datapath::{Datapath, OpenError, Options as DatapathOptions, Pair, Tuple};
use std::{
    io, iter,
    net::{IpAddr, SocketAddr},
    ops::{Bound, RangeInclusive},
    sync::{Arc, Mutex, atomic::Ordering, mpsc::channel},
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot};
use tracing::Instrument as _;

/// Number of flows taken from the table at a time.
const PAGE: usize = 1000;

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
    /// Legs that another process hands to this one ([`Splicer::go_on`]).
    #[doc(hidden)]
    pub handed: Vec<Tuple>,
    /// The highest number of a flow that another process hands to this one.
    #[doc(hidden)]
    pub handed_number: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            datapath: DatapathOptions::default(),
            source_ports: 10240..=28671,
            sources: Vec::new(),
            recovered_idle_limit: Policy::default().idle_limit.get(),
            handed: Vec::new(),
            handed_number: 0,
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
/// reset and the data path is removed, as [`Splicer::stop`] and [`Splicer::close`] do. Each
/// [`Listener`](crate::Listener) holds a handle.
#[derive(Clone)]
pub struct Splicer {
    owner: Arc<Owner>,
}

/// State shared by the handles of callers, and dropped with the last of them. The
/// engine's own threads and flows hold only [`Engine`]; otherwise it would live for ever.
struct Owner {
    engine: Arc<Engine>,
    /// Handshakes between hosts.
    handshakes: Arc<Mutex<Handshakes>>,
}

impl Owner {
    fn close(&self) -> io::Result<()> {
        self.engine.begin_to_close();
        lock(&self.handshakes).leave(self.engine.datapath());
        self.engine.remove()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.engine.is_closing() {
            return;
        }
        self.engine.stop_unless_stopped();
        if let Err(error) = self.close() {
            tracing::warn!(%error, "cannot detach the data path: it stays");
        }
    }
}

/// Tells when the keeper's thread has ended.
struct KeeperEnds<'a>(&'a Engine);

impl Drop for KeeperEnds<'_> {
    fn drop(&mut self) {
        self.0.keeps.store(false, Ordering::Release);
    }
}

impl Splicer {
    /// Loads the data path and starts the engine's threads. On error, use [`Splicer::copying`].
    pub fn open(options: &OpenOptions) -> Result<Splicer, OpenError> {
        let datapath = Datapath::open(&options.datapath)?;
        let (keeper, messages) = channel();
        let ports = Ports::new(options.source_ports.clone(), options.sources.clone());
        let engine = Arc::new(Engine::new(Some(datapath), Refusal::Unprivileged, ports, keeper));
        engine.number_after(options.handed_number);
        adoption::adopt(&engine, options.recovered_idle_limit, &options.handed)?;
        engine.datapath().map_or(Ok(()), |d| paths::follow(&engine, d))?;
        // the thread holds the engine until it is told to stop
        let (of_keeper, (tell, told)) = (engine.clone(), channel());
        engine.keeps.store(true, Ordering::Relaxed);
        let keep = move || {
            let _ended = KeeperEnds(&of_keeper);
            let listening = of_keeper.datapath().map(|d| d.events().map_err(|e| tell.send(e)));
            drop(tell);
            if let Some(Ok(mut events)) = listening {
                keeper::keep(of_keeper.clone(), &messages, &mut events);
            }
        };
        let failed = |source| OpenError::Kernel { what: "thread", source };
        std::thread::Builder::new().name("keeper".into()).spawn(keep).map_err(failed)?;
        let of_slots = engine.clone();
        let reuse = move || {
            if let Some(Err(error)) = of_slots.datapath().map(|d| d.reuse_slots(|| of_slots.is_closing())) {
                tracing::debug!(%error, "slots rest for a second before they are used again");
            }
        };
        std::thread::Builder::new().name("slots".into()).spawn(reuse).map_err(failed)?;
        match told.recv() {
            Ok(source) => Err(OpenError::Kernel { what: "ring of events", source }),
            Err(_) => Ok(Splicer::of(engine)),
        }
    }

    /// Creates an engine that only copies. Every flow shows `reason`.
    pub fn copying(reason: Refusal) -> Splicer {
        Splicer::copying_from(Vec::new(), reason)
    }

    /// Creates an engine that only copies, with [`OpenOptions::sources`].
    pub fn copying_from(sources: Vec<IpAddr>, reason: Refusal) -> Splicer {
        let ports = Ports::new(OpenOptions::default().source_ports, sources);
        Splicer::of(Arc::new(Engine::new(None, reason, ports, channel().0)))
    }

    /// Makes the first handle. When the last one is dropped, the engine ends.
    fn of(engine: Arc<Engine>) -> Splicer {
        Splicer { owner: Arc::new(Owner { engine, handshakes: Arc::default() }) }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.owner.engine
    }

    /// Returns the handshakes between hosts.
    pub(crate) fn handshakes(&self) -> &Arc<Mutex<Handshakes>> {
        &self.owner.handshakes
    }

    /// Returns the data path, unless it was handed over. For the engine and the tests of this workspace.
    #[doc(hidden)]
    pub fn datapath(&self) -> Option<&Datapath> {
        self.engine().datapath().filter(|_| self.engine().leaving() != Leaving::Gone)
    }

    /// Returns why no flow can be spliced, or `None` if there is a data path.
    pub fn refusal(&self) -> Option<Refusal> {
        self.engine().refusal()
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
        self.hand_over_to(client, server, left, policy, info, Box::new(done))
    }

    /// Relays like [`Splicer::hand_over`], for a caller that can describe the flow to another process.
    #[doc(hidden)]
    pub fn hand_over_to(
        &self,
        client: Leg,
        server: Leg,
        left: Leftovers,
        policy: Arc<Policy>,
        info: FlowInfo,
        done: Done,
    ) -> u64 {
        let number = self.number();
        self.hand_over_as((number, info), client, server, left, policy, done);
        number
    }

    /// The same for a flow that has a number already: [`Splicer::number`].
    pub fn hand_over_as(
        &self,
        (number, info): (u64, FlowInfo),
        client: Leg,
        server: Leg,
        left: Leftovers,
        policy: Arc<Policy>,
        done: Done,
    ) {
        self.begin(Pair::new(client, server), &left, policy, (number, info), None, Purpose::Streams(done));
    }

    /// Returns the number for a flow to come. Flows that are there have lower ones.
    pub fn number(&self) -> u64 {
        self.engine().next_id()
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
        self.begin(legs, &left, policy, (self.number(), info), Some(message), Purpose::Message(tell));
        let (passed, legs) = told.await.expect("a flow ends before its runtime does");
        if let Some(legs) = legs {
            (*client, *server) = (legs.client, legs.server);
        }
        passed
    }

    /// Checks whether a flow of these legs could be spliced, as far as
    /// this is known before an attempt. Otherwise returns the reason.
    pub fn may_splice(&self, client: &Leg, server: &Leg) -> Result<(), Refusal> {
        self.engine().obstacle(client, server).map_or(Ok(()), Err)
    }

    fn begin(
        &self,
        legs: Pair<Leg>,
        left: &Leftovers,
        policy: Arc<Policy>,
        (id, info): (u64, FlowInfo),
        message: Option<Message>,
        purpose: Purpose,
    ) {
        let engine = self.engine();
        let (owner, inbox) = engine.inbox();
        let policy = if legs.iter().any(Leg::is_adopted) && !policy.keeps_sockets {
            Arc::new(Policy { keeps_sockets: true, ..(*policy).clone() })
        } else {
            policy
        };
        engine.refusal().inspect(|why| policy.tally.refuse(*why));
        let flow = Arc::new(Flow {
            id,
            info,
            legs: legs.each_ref().map(Leg::tuple),
            generations: legs.each_ref().map(|leg| leg.connection(engine.datapath()).generation.into()),
            replaced: Mutex::default(),
            announced: legs.client.announced(),
            began: Moment::now(),
            processes: 1,
            policy,
            now: Mutex::new(Progress::new(engine.refusal())),
            owner: Mutex::new(owner),
            runtime: Handle::current(),
            announcer: engine.announcer.clone(),
        });
        if let Purpose::Streams(done) = &purpose {
            done.begun(id, Pair::new(flow.source(), flow.legs.server.remote), &flow.info);
        }
        engine.announcer.begin(&flow);
        if let Some(why) = engine.refusal() {
            engine.announcer.tell((id, flow.info.name.as_ref()), FlowEventKind::Refused(why));
        }
        let listed = engine.list(flow);
        ticker::stir();
        if let Some(d) = engine.datapath().filter(|_| engine.lingering.is_crowd(engine.live())) {
            d.wake();
        }
        let span = listed.flow.span();
        let relay = Relay::new(engine, listed, legs, left, message, purpose);
        tokio::spawn(relay.run(inbox, Action::Attend).instrument(span));
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
            let orphans = lock(&self.engine().orphans);
            let later = orphans.range((Bound::Excluded(after), Bound::Unbounded));
            later.map(|(_, o)| o.status()).filter(|o| fits(o.state)).take(most).collect()
        };
        // orphans adopted late have later numbers
        let (mut all, mut earlier, mut last) = (Vec::new(), orphans.into_iter().peekable(), after);
        let pages = |left: usize| if state.is_none() { PAGE.min(left) } else { PAGE };
        while all.len() < most
            && let Some(page) = self.engine().page(last, pages(most - all.len()))
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

    /// Returns the number of flows that are listed now, and the highest number of one.
    pub fn extent(&self) -> (usize, u64) {
        (self.engine().live(), self.engine().last().unwrap_or_default())
    }

    /// Returns whether a flow is still listed.
    pub fn lists(&self, id: u64) -> bool {
        self.engine().lists(id)
    }

    /// Has all flows look at limits that have changed ([`IdleLimit`](crate::IdleLimit)): copied ones at once, the others within 30 s.
    pub fn limits_changed(&self) {
        self.engine().limits_changed();
    }

    /// Sends a command to a live flow. Returns false if there is no such flow.
    pub fn command(&self, id: u64, command: Command) -> bool {
        self.engine().command(id, command)
    }

    /// Has the parked sockets of a spliced flow closed now, whatever its policy says of when: the flow goes on without them. Returns
    /// why not if they have to stay, or if it has none. A command that has come before is carried out first: it may take the flow back.
    pub fn release(&self, id: u64) -> Result<(), NotReleased> {
        self.engine().release(id)
    }

    /// Returns a live flow, as [`Splicer::flows`] lists it. Flows of an earlier process are not found.
    pub fn status(&self, id: u64) -> Option<FlowStatus> {
        self.engine().flow(id).map(|flow| flow.status(self.datapath()))
    }

    /// Copies all bytes of a live flow that pass from now on to the tap that `make` makes, as [`Leg::tap`] of its client does. Returns
    /// false, and makes none, if the flow is not copied now, or ends before. A flow that has a tap keeps that one.
    #[cfg(feature = "taps")]
    pub async fn tap(&self, id: u64, make: impl FnOnce() -> Tap + Send + 'static) -> bool {
        self.engine().tap(id, make).await
    }

    /// Returns the configured source address for traffic to `server` that is no connection of the engine, if there is one.
    #[doc(hidden)]
    pub fn named_source(&self, server: SocketAddr) -> io::Result<Option<IpAddr>> {
        self.engine().ports.named(server)
    }

    /// Returns the local address for traffic to or from `server`: a configured one, or the kernel's choice.
    #[doc(hidden)]
    pub fn source_for(&self, server: SocketAddr) -> io::Result<IpAddr> {
        let ports = &self.engine().ports;
        Ok(ports.named(server)?.unwrap_or(ports.usual_for(server)?.0.source))
    }

    /// Closes a leg that will not join a flow, as dropping it does, and makes the data path forget it.
    /// Does nothing to a leg that a flow has taken, because the flow makes the data path forget it.
    pub fn discard(&self, leg: Leg) {
        if leg.is_gone() {
            return;
        }
        let (shimmed, known) = (leg.at.shimmed, leg.is_tracked());
        let d = self.engine().datapath();
        let connection = leg.connection(d);
        drop(leg);
        let Some(d) = d.filter(|_| known) else { return };
        if shimmed {
            self.engine().lingering.add(connection, None);
        } else {
            d.forget(connection);
        }
    }

    /// Waits until all flows were told to end ([`Splicer::stop`]). Work with legs outside of flows has to end then, too.
    pub async fn stopped(&self) {
        // it cannot fail: the sender is in `self`
        let _ = self.engine().stop_signal().wait_for(|s| s.ends_tasks()).await;
    }

    /// Waits until all flows of this process have ended and their sockets
    /// are closed. Futures of [`Splicer::relay`] may return earlier.
    pub async fn ended(&self) {
        const LOOK: Duration = Duration::from_millis(5);
        while !self.engine().is_idle() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends all flows now. With `leave`, spliced flows go on in the kernel without this process.
    pub fn stop(&self, leave: bool) {
        self.engine().stop(if leave { Stop::Leave } else { Stop::Reset });
    }

    /// Removes everything that was attached and pinned, unless [`Splicer::stop`] left flows to the kernel. Connections that
    /// are still forwarded, such as flows of an earlier process, are reset first. Call it after all relays have returned.
    pub fn close(self) -> io::Result<()> {
        self.owner.close()
    }

    /// Returns the number of records removed because their connection
    /// had no socket, for example after the kernel dropped a handshake.
    pub fn swept(&self) -> u64 {
        self.engine().swept()
    }

    /// Subscribes to the events of this process's flows from now on. Flows of an earlier process have none. Events of
    /// one flow arrive in order, its end last. The engine never waits for a subscriber: see [`FlowEvents::dropped`].
    pub fn subscribe(&self) -> FlowEvents {
        self.engine().announcer.subscribe()
    }

    /// Returns how often flows of this process have changed hands.
    pub fn switches(&self) -> Switches {
        self.engine().announcer.switches()
    }

    /// Calls `f` with the record of each flow of an earlier process that ends, or has ended before, unless it was taken up
    /// ([`Splicer::take_up`]), and with what is known of it, if the earlier process has written of it. If not, it is not known exactly how
    /// long the flow has existed, and what it carried before: `duration_ms` counts from when this process found it, and
    /// `spliced_up` and `spliced_down` do, too. `bytes_up` and `bytes_down` count all bytes of both connections, with those of
    /// their handshakes, unless the flow had been released. A thread of the engine calls `f`; it must not block.
    pub fn on_recovered_end(&self, f: impl Fn(Ended, Option<&EarlierFlow>) + Send + Sync + 'static) {
        self.engine().recovered.set(Arc::new(f));
    }

    /// Makes flows of this process of those that an earlier one has left in forwarding mode: they keep their numbers, take commands,
    /// follow a policy, and end with a call, like others. `f` says how each goes on, or that nobody wants it. Others remain as
    /// they were found: those of which nothing was written, that relay a message, or that are to be taken back by the data of a host
    /// ([`Trigger`](crate::Trigger)). A thread of the engine calls `f`, too; it must not block.
    pub fn take_up(&self, f: impl Fn(&EarlierFlow) -> Option<TakenUp> + Send + Sync + 'static) {
        self.engine().recovered.set_take_up(Arc::new(f));
        self.engine().take_up();
    }

    /// Returns whether this is a live flow of an earlier process that was not taken up. It can be reset, and takes no other command.
    pub fn is_recovered(&self, id: u64) -> bool {
        lock(&self.engine().orphans).contains_key(&id)
    }

    /// Returns what the earlier process has said of such a flow: [`Finish::description`]. `None`: nothing, or it is no such flow.
    pub fn described(&self, id: u64) -> Option<String> {
        lock(&self.engine().orphans).get(&id)?.known()?.description
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_told_to_end_when_the_last_handle_is_dropped() {
        let splicer = Splicer::copying(Refusal::Policy);
        let (told, engine, other) = (splicer.engine().stop_signal(), splicer.engine().clone(), splicer.clone());
        drop(splicer);
        assert_eq!(*told.borrow(), Stop::Go);
        drop(other);
        assert_eq!(*told.borrow(), Stop::Reset);
        assert!(engine.is_closing());
    }

    #[test]
    fn what_was_left_to_the_kernel_stays_when_the_last_handle_is_dropped() {
        let splicer = Splicer::copying(Refusal::Policy);
        let told = splicer.engine().stop_signal();
        splicer.stop(true);
        drop(splicer);
        assert_eq!(*told.borrow(), Stop::Leave);
    }
}
