//! A live flow as lists and commands see it ([`Flow`]), its present owner
//! ([`FlowOwner`]), and its state while it is forwarded ([`ForwardedFlow`]).

#[cfg(feature = "taps")]
use crate::taps::Tap;
use crate::{
    core::{Action, Context, Core, Event, Position, Progress, Seen, Time, Why},
    engine::{
        events::Announcer,
        handed::HandOn,
        purpose::Purpose,
        record::{FlowRecord, Left, Recorded},
    },
    leg::parked::{Parked, Strays},
    sync::lock,
    types::{Command, Done, FlowInfo, FlowState, FlowStatus, Policy},
};
use longsplice_datapath::{
    Connection, Datapath, EventKind, LastRecord, LegFlags, Pair, PathFlags, PathView, Recreated, Released, Side,
    SwitchError, Tuple, monotonic,
};
use std::{
    borrow::Cow,
    mem,
    net::SocketAddr,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, watch},
};
use tracing::span::{EnteredSpan, Span};

/// Interval at which the keeper wakes up by itself. Also the precision with which lingering entries are removed.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Name of the span of a flow's log lines.
const SPAN: &str = "flow";
/// Limits of the interval between two looks at a flow, which is an eighth of its patience.
const EVERY: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(30);

/// A stop request to live flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Go,
    /// End now.
    Reset,
    /// End now, but leave spliced flows to the kernel.
    Leave,
    /// Leave spliced flows to the kernel. The others go on.
    HandOver,
}

impl Stop {
    /// Whether flows end that are not spliced.
    pub fn ends_tasks(self) -> bool {
        matches!(self, Stop::Reset | Stop::Leave)
    }
}

/// A leg when a new connection took its place.
#[derive(Clone, Copy)]
pub(crate) struct Replaced {
    /// The path entry.
    pub path: PathView,
    /// What the record said, if there was one.
    pub record: Option<LastRecord>,
}

/// A [`Time`] in eight bytes: there may be a million flows. Resolution: a nanosecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment(u64);

impl Moment {
    pub fn now() -> Moment {
        monotonic().into()
    }

    /// Returns the time since then.
    pub fn age(self) -> Duration {
        monotonic().saturating_sub(self.into())
    }
}

impl From<Time> for Moment {
    fn from(time: Time) -> Moment {
        Moment(time.as_nanos() as u64)
    }
}

impl From<Moment> for Time {
    fn from(Moment(nanos): Moment) -> Time {
        Time::from_nanos(nanos)
    }
}

/// A live flow as lists and commands see it.
pub(crate) struct Flow {
    pub id: u64,
    pub info: FlowInfo,
    pub legs: Pair<Tuple>,
    /// Tell the legs' connections from others with the same addresses.
    pub generations: Pair<AtomicU32>,
    /// How the legs were when new connections replaced the flow's.
    pub replaced: Mutex<Pair<Option<Box<Replaced>>>>,
    /// Source and destination that a proxy in front announced for the client's leg.
    pub announced: Option<Box<(SocketAddr, SocketAddr)>>,
    pub began: Moment,
    /// Number of processes that it has lived through, with this one.
    pub processes: u32,
    pub policy: Arc<Policy>,
    pub now: Mutex<Progress>,
    pub owner: Mutex<FlowOwner>,
    /// The runtime in which the flow is copied, also after it is taken back.
    pub runtime: Handle,
    pub announcer: Arc<Announcer>,
}

/// The present owner of a flow.
pub(crate) enum FlowOwner {
    /// A task, which copies or drains, and the channels to it.
    Task { orders: mpsc::UnboundedSender<Order>, events: Arc<TaskEvents> },
    /// The keeper.
    Keeper(Box<ForwardedFlow>),
    /// It has ended.
    Gone,
}

/// What a task is told.
pub(crate) enum Order {
    Command(Command),
    /// Look at limits that have changed.
    Limits,
    /// Have the data path adopt the legs that it does not know.
    Adopt,
    /// Go to another process.
    HandOn(HandOn),
    /// Copy all bytes from now on to the tap that this makes, unless another one has them, and say so. If the flow is not copied any
    /// more, or ends, both are dropped.
    #[cfg(feature = "taps")]
    Tap(Box<dyn FnOnce() -> Tap + Send>, tokio::sync::oneshot::Sender<()>),
}

/// The channels that a task listens to.
pub(crate) struct TaskInbox {
    pub orders: mpsc::UnboundedReceiver<Order>,
    pub events: Arc<TaskEvents>,
    pub stop: watch::Receiver<Stop>,
}

/// Wakes a task when the data path reports an event of its flow.
#[derive(Default)]
pub(crate) struct TaskEvents {
    wake: Notify,
    /// Set by any event except [`EventKind::Forwarding`]: the keeper must then look at the flow after the commit.
    others: AtomicBool,
}

impl TaskEvents {
    pub fn notify(&self, kind: EventKind) {
        if kind != EventKind::Forwarding {
            self.others.store(true, Ordering::Relaxed);
        }
        self.wake.notify_one();
    }

    pub async fn notified(&self) {
        self.wake.notified().await;
    }

    /// Returns whether there was an event that the keeper has to look into.
    pub fn are_for_keeper(&self) -> bool {
        self.others.load(Ordering::Relaxed)
    }
}

/// The span of the work for a flow. Where no debug lines are written, it is disabled, and costs nothing.
fn span(id: u64) -> Span {
    tracing::debug_span!(SPAN, id)
}

/// Enters a span for a warning about a flow, which is also written where the span of its work is disabled.
fn named(id: u64) -> EnteredSpan {
    let is_named = Span::current().metadata().is_some_and(|span| span.name() == SPAN);
    if is_named { Span::none().entered() } else { tracing::error_span!(SPAN, id).entered() }
}

/// Returns the positions of all data from both hosts. `None` if the data path does not know the flow.
pub(crate) fn ends(datapath: &Datapath, flow: &Flow, released: Option<&Pair<Released>>) -> Option<Pair<u64>> {
    let Some(released) = released else {
        let at = datapath.look(flow.connections()).ok().map(|at| at.end);
        return at.or_else(|| Some(flow.last_records()?.map(|last| last.end)));
    };
    let paths = flow.paths(datapath)?;
    Some(Pair::from_fn(|side| released[side].end(&paths[side])))
}

impl Flow {
    /// Returns the client's address: `Leg::source`.
    pub fn source(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.legs.client.remote, |a| a.0)
    }

    /// Returns the legs' connections.
    pub fn connections(&self) -> Pair<Connection> {
        let named = self.legs.zip(self.generations.each_ref());
        named.map(|(leg, generation)| Connection { leg, generation: generation.load(Ordering::Relaxed) })
    }

    /// Returns the path entries of the flow, if it has both. If new connections have replaced the flow's, as they were at the end.
    pub fn paths(&self, datapath: &Datapath) -> Option<Pair<PathView>> {
        datapath.paths_of(self.connections()).or_else(|| Some(self.last()?.map(|last| last.path)))
    }

    /// Returns whose FINs were forwarded.
    pub fn fins(&self, datapath: &Datapath) -> Option<Pair<bool>> {
        Some(self.paths(datapath)?.map(|path| path.flags & PathFlags::FIN != 0))
    }

    /// Returns how the legs were when new connections replaced them.
    fn last(&self) -> Option<Pair<Replaced>> {
        let Pair { client, server } = &*lock(&self.replaced);
        Some(Pair::new(**client.as_ref()?, **server.as_ref()?))
    }

    fn last_records(&self) -> Option<Pair<LastRecord>> {
        let Pair { client, server } = self.last()?;
        Some(Pair::new(client.record?, server.record?))
    }

    /// Returns whose reset had ended the flow when new connections replaced its legs.
    pub fn was_reset_by(&self) -> Option<Side> {
        let Pair { client, server } = self.last_records()?.map(|last| last.flags);
        if client & server & LegFlags::FIN_IN != 0 {
            return None; // a late segment met a host that had forgotten the connection
        }
        Side::BOTH.into_iter().zip([client, server]).find_map(|(side, f)| (f & LegFlags::RESET_IN != 0).then_some(side))
    }

    /// Keeps the last state of a leg that a new connection has replaced.
    pub fn was_replaced(&self, leg: &Tuple, last: Replaced) {
        let mut replaced = lock(&self.replaced);
        for side in Side::BOTH.into_iter().filter(|side| self.legs[*side] == *leg) {
            replaced[side] = Some(Box::new(last));
        }
    }

    /// The span of the work for this flow: each line that is logged in it has the flow's number.
    pub fn span(&self) -> Span {
        span(self.id)
    }

    /// Names the flow in a warning, until this is dropped.
    pub fn named(&self) -> EnteredSpan {
        named(self.id)
    }

    pub fn now(&self) -> MutexGuard<'_, Progress> {
        lock(&self.now)
    }

    pub fn owner(&self) -> MutexGuard<'_, FlowOwner> {
        lock(&self.owner)
    }

    /// Passes an event to the core, and counts and announces the result. `at`: positions of the sockets.
    pub fn step(&self, core: &mut Core, at: Pair<&mut Position>, event: Event) -> Action {
        let mut shown = self.now();
        let before = *shown;
        let (now, legs) = (monotonic(), self.legs);
        let action = core.on(&mut Context { now, policy: &self.policy, legs, at, shown: &mut shown }, event);
        shown.freezes = false;
        self.announcer.step((self.id, self.info.name.as_ref()), &before, &shown);
        if before.state != shown.state {
            tracing::debug!("{:?} -> {:?}", before.state, shown.state);
        }
        if let Some(why) = shown.refusal.filter(|why| before.refusal != Some(*why)) {
            match shown.path_finding() {
                Some(found) => tracing::debug!(reason = %why, %found, "not spliced"),
                None => tracing::debug!(reason = %why, "not spliced"),
            }
            self.policy.tally.refuse(why);
        }
        if (before.splices, shown.splices) == (0, 1) {
            self.policy.tally.splice();
        }
        let triggered = mem::take(&mut shown.triggered);
        drop(shown);
        self.policy.on_trigger.iter().filter(|_| triggered).for_each(|on| on.tell(self.id));
        action
    }

    pub fn status(&self, datapath: Option<&Datapath>) -> FlowStatus {
        let mut now = *self.now();
        let ends = match now.state {
            FlowState::Copying | FlowState::Unsplicing => None,
            _ => datapath.and_then(|d| {
                let ends = match &*self.owner() {
                    FlowOwner::Keeper(kept) => ends(d, self, kept.sockets.released()),
                    _ => ends(d, self, None),
                };
                // afterwards: a FIN between the two is no byte that has not been there
                ends.map(|ends| (ends, self.fins(d).unwrap_or(Pair::both(false))))
            }),
        };
        ends.into_iter().for_each(|(ends, fins)| now.ends_forwarded(ends, fins));
        let bytes = now.copied.zip(now.spliced).map(|(copied, spliced)| copied + spliced);
        FlowStatus {
            id: self.id,
            protocol: self.info.protocol.clone().into_owned(),
            listen: self.info.listen,
            name: self.info.name.as_deref().map(String::from),
            client: self.source(),
            server: self.legs.server.remote,
            target: self.info.target.to_string(),
            member: self.info.member().map(String::from),
            user: self.info.user().map(String::from),
            state: now.state,
            stages: stages(now.state, self.info.protocol.clone()),
            bytes_up: bytes.client,
            bytes_down: bytes.server,
            spliced_up: now.spliced.client,
            spliced_down: now.spliced.server,
            splices: now.splices,
            age_ms: self.began.age().as_millis() as u64,
            processes: self.processes,
            refusal: now.refusal,
            path: now.path_finding(),
        }
    }
}

/// Returns the stages that a segment passes through (connection-splicing paper, Figs. 6 and 8).
pub(crate) fn stages(state: FlowState, protocol: Cow<'static, str>) -> Vec<Cow<'static, str>> {
    let (before, behind): (&[&'static str], &[&'static str]) = match state {
        FlowState::Copying => (&["device", "ip", "tcp"], &["tcp", "ip", "device"]),
        FlowState::Draining | FlowState::Unsplicing => (&["device", "switch", "ip", "tcp"], &["tcp", "ip", "device"]),
        FlowState::Spliced | FlowState::Released => return ["device", "forward", "device"].map(Cow::from).into(),
    };
    let named = |names: &[&'static str]| names.iter().copied().map(Cow::from).collect::<Vec<_>>();
    [named(before), vec![protocol], named(behind)].concat()
}

/// A message to the keeper.
pub(crate) enum KeeperMessage {
    /// This flow is forwarded now.
    Forwarded(u64),
    Command(u64, Command),
    /// The route to one of the flow's hosts leads over a device to which nothing will be attached.
    Elsewhere(u64),
    /// Descriptors run short.
    Room,
    /// The program is stopping, or the engine is closing.
    Stop,
}

/// Whether a forwarded flow has sockets, and what its positions follow from.
pub(crate) enum Sockets {
    /// They are parked. `origin`: [`Switched::origin`](longsplice_datapath::Switched) of the commit.
    Parked { origin: Pair<u64> },
    /// There are none.
    Released(Pair<Released>),
}

impl Sockets {
    /// Returns the legs' records if there are no sockets.
    pub fn released(&self) -> Option<&Pair<Released>> {
        match self {
            Sockets::Parked { .. } => None,
            Sockets::Released(released) => Some(released),
        }
    }
}

/// The state of a flow while it is forwarded.
pub(crate) struct ForwardedFlow {
    pub parked: Pair<Parked>,
    pub core: Core,
    pub purpose: Purpose,
    pub sockets: Sockets,
    /// Time of the next look.
    pub due: Moment,
    /// Where the next process finds what it has to know of the flow.
    pub record: Recorded,
}

impl ForwardedFlow {
    pub fn new(
        parked: Pair<Parked>,
        (core, purpose): (Core, Purpose),
        origin: Pair<u64>,
        record: Recorded,
    ) -> ForwardedFlow {
        ForwardedFlow { parked, core, purpose, sockets: Sockets::Parked { origin }, due: Moment::now(), record }
    }

    /// Continues a flow that an earlier process has left.
    pub fn again(left: &Left, released: Pair<Released>, done: Done) -> ForwardedFlow {
        let FlowRecord { at, fin_past, is_forced, .. } = left.record;
        let (parked, core) = (at.map(Parked::gone), Core::released(monotonic(), fin_past, is_forced));
        let (purpose, sockets) = (Purpose::Streams(done), Sockets::Released(released));
        ForwardedFlow { parked, core, purpose, sockets, due: Moment::now(), record: left.at.into() }
    }

    /// Writes what the next process has to know of the flow.
    pub fn write_record(&mut self, d: &Datapath, flow: &Flow) {
        let record = FlowRecord::of(flow, self);
        self.record.write(d, &record);
    }

    /// Returns whether the flow needs this process: because it will take it back by itself, or reads what passes.
    pub fn needs_us(&self, flow: &Flow) -> bool {
        let is_needed = self.core.message_from().is_some() || flow.policy.trigger.is_some();
        self.sockets.released().is_none() && (is_needed || self.parked.iter().any(Parked::is_tapped))
    }

    /// Returns whether the flow must be looked at before the keeper wakes up by itself.
    pub fn wants_look_soon(&self, flow: &Flow) -> bool {
        let soon = self.core.began() + TICK;
        self.pause(flow, Duration::ZERO) < TICK || self.core.release_at(&flow.policy).is_some_and(|at| at < soon)
    }

    /// Reads from the data path what the core needs for its next step.
    pub fn see(&self, d: &Datapath, flow: &Flow, why: Why) -> Event {
        let why = match why {
            Why::Elsewhere { .. } => Why::Elsewhere { transparent: self.is_transparent(d, flow) },
            why => why,
        };
        let legs = self.core.wants_legs(why).then(|| d.look(flow.connections()).ok()).flatten();
        Event::Seen(Box::new(Seen { why, paths: flow.paths(d), legs }))
    }

    /// Returns the positions of all data from both hosts when the flow was seen, if they follow from its path entries.
    pub fn ends_seen(&self, event: &Event) -> Option<Pair<u64>> {
        let (Event::Seen(seen), Sockets::Parked { origin }) = (event, &self.sockets) else { return None };
        let ends = seen.paths.as_ref()?.each_ref().zip(*origin).map(|(path, origin)| path.position(origin));
        Some(Pair::new(ends.client?, ends.server?))
    }

    pub fn on(&mut self, flow: &Flow, event: Event) -> Action {
        flow.step(&mut self.core, self.parked.each_mut().map(|parked| &mut parked.at), event)
    }

    /// Returns whether the hosts believe they talk to each other.
    fn is_transparent(&self, d: &Datapath, flow: &Flow) -> bool {
        let released = self.sockets.released().is_some_and(|released| released.client.is_transparent());
        released || d.leg(&flow.legs.client).is_some_and(|l| l.flags & LegFlags::TRANSPARENT != 0)
    }

    /// Returns the time until the next look, at least `least`.
    pub fn pause(&self, flow: &Flow, least: Duration) -> Duration {
        let pause = (self.core.patience(&flow.policy) / 8).min(self.core.look_within().unwrap_or(Duration::MAX));
        pause.clamp(*EVERY.start(), *EVERY.end()).max(least)
    }

    /// Returns whether the flow has to end because the programs were detached for a while and its segments
    /// went to the parked sockets. Data that these hold but have not acknowledged is dropped with them.
    pub fn is_spoilt(&mut self, datapath: &Datapath, flow: &Flow) -> bool {
        let strays = |(parked, leg): (&Parked, &Tuple)| match datapath.leg(leg).and_then(|l| l.parked_at()) {
            Some(stood) => parked.strays(stood).unwrap_or(Strays::None),
            None if self.sockets.released().is_some() => Strays::None,
            None => Strays::Taken, // it was just being taken back
        };
        match self.parked.iter().zip(flow.legs.iter()).map(strays).max() {
            None | Some(Strays::None) => return false,
            Some(Strays::Held) if self.core.release_at(&flow.policy).is_some() => {
                let released = self.release(datapath, flow);
                self.on(flow, Event::Released(released));
            }
            Some(Strays::Held | Strays::Taken) => {}
        }
        self.sockets.released().is_none()
    }

    /// Closes the parked sockets; the flow goes on without them. Returns false if it cannot.
    pub fn release(&mut self, datapath: &Datapath, flow: &Flow) -> bool {
        self.parked.iter_mut().for_each(Parked::close_silently);
        let connections = flow.connections();
        let Pair { client, server } = connections.map(|connection| datapath.released(connection));
        let (Some(client), Some(server)) = (client, server) else { return false };
        self.sockets = Sockets::Released(Pair::new(client, server));
        self.write_record(datapath, flow);
        flow.legs.iter().for_each(|leg| datapath.forget_leg(leg));
        true
    }

    pub fn recreate(&self, d: &Datapath, flow: &Flow, force: bool) -> Result<Recreated, SwitchError> {
        let released = self.sockets.released().ok_or(SwitchError::Untracked)?;
        let new = d.recreate(flow.connections(), released, force);
        match &new {
            Ok(_) | Err(SwitchError::Fragments) => {}
            Err(error @ (SwitchError::Busy | SwitchError::Closing)) => {
                tracing::debug!(%error, "no sockets yet for a released flow");
            }
            Err(error) => {
                let _named = flow.named();
                tracing::warn!(%error, "cannot create the sockets of a released flow: it stays forwarded")
            }
        }
        new
    }
}

/// Returns whether both ends are on this host. Connections of this host to one of
/// its own addresses have that address as their source, unless configured otherwise.
pub(crate) fn is_loopback(leg: &Tuple) -> bool {
    leg.local.ip().is_loopback() || leg.local.ip() == leg.remote.ip()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use tracing::{Level, Metadata, Subscriber, span::Attributes, span::Id, span::Record, subscriber::with_default};

    /// Counts spans, where lines up to a level are written.
    struct Spans(Level, Arc<AtomicU64>);

    impl Subscriber for Spans {
        fn enabled(&self, of: &Metadata<'_>) -> bool {
            *of.level() <= self.0
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1 + self.1.fetch_add(1, Ordering::Relaxed))
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &tracing::Event<'_>) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// A span that is made takes memory, for each connection.
    #[test]
    fn without_debug_lines_only_warnings_make_spans() {
        for (level, of_work) in [(Level::WARN, 0), (Level::INFO, 0), (Level::DEBUG, 1)] {
            let made = Arc::new(AtomicU64::new(0));
            with_default(Spans(level, made.clone()), || {
                drop(span(7).entered());
                assert_eq!(made.load(Ordering::Relaxed), of_work, "{level}");
                drop(named(7));
                assert_eq!(made.load(Ordering::Relaxed), of_work + 1, "{level}");
            });
        }
    }

    /// A million records must fit into the memory of a small machine.
    #[test]
    fn records_are_small() {
        assert!(
            size_of::<ForwardedFlow>() + size_of::<Flow>() <= 808,
            "{} {}",
            size_of::<ForwardedFlow>(),
            size_of::<Flow>()
        );
    }
}
