//! A flow of an earlier process, as the last look found it. What happens to it is decided by [`Watch`].

use crate::{
    core::{
        Time,
        orphan::{self, Action, Event, Found, Watch},
    },
    engine::{
        events::Announcer,
        flow::{Flow, FlowOwner, ForwardedFlow, stages},
        record::{FlowRecord, Left},
        recovered::{Begun, EarlierFlow, TakenUp},
    },
    types::{EndReason, Ended, FlowInfo, FlowState, FlowStatus, Trigger},
};
use longsplice_datapath::{CommitOptions, Connection, Datapath, Pair, PathFlags, SwitchError, Tuple, monotonic};
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// A flow of an earlier process, as the last look found it.
pub(crate) struct Orphan {
    pub id: u64,
    pub legs: Pair<Tuple>,
    /// Tell the connections from others with the same addresses, since the first look.
    generations: Option<Pair<u32>>,
    since: Instant,
    bytes: Pair<u64>,
    /// Bytes and positions at the first look. The latter count if there are no records.
    first: Option<Pair<u64>>,
    positions: Option<Pair<u64>>,
    watch: Watch,
    /// What the earlier process has written of it.
    pub left: Option<Box<Left>>,
}

/// Returns whether nothing has arrived for so long that no last segment needs the leg's entries any more.
pub(crate) fn is_silent(d: &Datapath, leg: &Tuple) -> bool {
    orphan::is_silent(monotonic(), d.leg(leg).map(|l| Time::from_nanos(l.seen)))
}

impl Orphan {
    /// Guesses which of the two legs is the client's.
    pub fn new(id: u64, [t, other]: [Tuple; 2]) -> Orphan {
        // our side of a client's connection is a port that we listened on: most likely the lower one
        let order = |leg: &Tuple| (leg.local.port(), leg.remote);
        let legs = if order(&t) <= order(&other) { Pair::new(t, other) } else { Pair::new(other, t) };
        let (bytes, watch) = (Pair::default(), Watch::new(monotonic()));
        let since = Instant::now();
        Orphan { id, legs, since, bytes, first: None, positions: None, generations: None, watch, left: None }
    }

    /// One that the earlier process has written of.
    pub fn of(left: Left) -> Orphan {
        let FlowRecord { id, legs, generations, began, .. } = left.record;
        let since = Instant::now();
        let since = since.checked_sub(monotonic().saturating_sub(began)).unwrap_or(since);
        let (generations, left) = (Some(generations), Some(Box::new(left)));
        Orphan { legs, since, generations, left, ..Orphan::new(id, [legs.client, legs.server]) }
    }

    /// Returns what the earlier process has written of it, and its status now.
    pub fn known(&self) -> Option<EarlierFlow> {
        let description = self.left.as_ref()?.record.description.clone();
        Some(EarlierFlow { status: self.status(), description })
    }

    /// Returns the record of its end.
    pub fn ended(&self, how: EndReason) -> Ended {
        if let Some(left) = &self.left {
            let FlowRecord { copied, spliced, splices, .. } = left.record;
            let bytes =
                self.bytes.zip(copied.zip(spliced).map(|(copied, spliced)| copied + spliced)).map(|(a, b)| a.max(b));
            return Ended {
                bytes_up: bytes.client,
                bytes_down: bytes.server,
                spliced_up: bytes.client - copied.client,
                spliced_down: bytes.server - copied.server,
                splices,
                duration_ms: self.since.elapsed().as_millis() as u64,
                ..Ended::new(self.id, left.record.source(), self.legs.server.remote, how)
            };
        }
        let spliced = self.bytes.zip(self.first.unwrap_or_default()).map(|(now, first)| now.saturating_sub(first));
        Ended {
            bytes_up: self.bytes.client,
            bytes_down: self.bytes.server,
            spliced_up: spliced.client,
            spliced_down: spliced.server,
            splices: 1,
            duration_ms: self.since.elapsed().as_millis() as u64,
            ..Ended::new(self.id, self.legs.client.remote, self.legs.server.remote, how)
        }
    }

    /// Counts its bytes. Without records, only what was forwarded since the first look is known.
    pub fn count(&mut self, d: &Datapath) {
        let legs = self.connections();
        let Some(paths) = d.paths_of(legs) else { return };
        let fins = paths.each_ref().map(|p| p.flags & PathFlags::FIN != 0);
        if let Some(record) = self.left.as_ref().map(|left| &left.record) {
            let ends = match &record.released {
                Some(released) => Some(released.each_ref().zip(paths.each_ref()).map(|(leg, path)| leg.end(path))),
                None => d.look(legs).ok().map(|at| at.end),
            };
            let mut progress = record.progress();
            ends.into_iter().for_each(|ends| progress.ends_forwarded(ends, fins));
            self.bytes = progress.copied.zip(progress.spliced).map(|(copied, spliced)| copied + spliced);
            return;
        }
        let data = |end: Pair<u64>| end.zip(fins.map(u64::from));
        if let Ok(at) = d.look(legs) {
            self.first.get_or_insert(at.end);
            self.bytes = data(at.end).map(|(end, fin)| end.saturating_sub(fin));
        } else if self.first.is_none()
            && let Pair { client: Some(client), server: Some(server) } = paths.each_ref().map(|p| p.position(0))
        {
            let now = Pair::new(client, server);
            let first = *self.positions.get_or_insert(now);
            self.bytes = data(now).zip(first).map(|((end, fin), first)| end.saturating_sub(first + fin));
        }
    }

    /// Returns the connections of the legs.
    pub fn connections(&self) -> Pair<Connection> {
        let generations = self.generations.unwrap_or(Pair::both(Connection::NONE));
        self.legs.zip(generations).map(|(leg, generation)| Connection { leg, generation })
    }

    pub fn state(&self) -> FlowState {
        self.watch.state()
    }

    pub fn status(&self) -> FlowStatus {
        let record = self.left.as_ref().map(|left| &left.record);
        let info = record.map(|record| record.info.clone());
        let before = record.map_or(self.first.unwrap_or_default(), |record| record.copied);
        let spliced = self.bytes.zip(before).map(|(now, before)| now.saturating_sub(before));
        let info = info.unwrap_or_else(|| FlowInfo::new("recovered", self.legs.server.remote.to_string()));
        FlowStatus {
            id: self.id,
            protocol: info.protocol.clone().into_owned(),
            listen: info.listen,
            name: info.name.as_deref().map(String::from),
            client: record.map_or(self.legs.client.remote, FlowRecord::source),
            server: self.legs.server.remote,
            member: info.member().map(String::from),
            user: info.user().map(String::from),
            target: info.target.into_string(),
            state: self.state(),
            stages: stages(self.state(), info.protocol),
            bytes_up: self.bytes.client,
            bytes_down: self.bytes.server,
            spliced_up: spliced.client,
            spliced_down: spliced.server,
            splices: record.map_or(1, |record| record.splices),
            age_ms: self.since.elapsed().as_millis() as u64,
            // without a record, at least one before this one
            processes: 1 + record.map_or(1, |record| record.processes),
            refusal: None,
            path: None,
        }
    }

    /// Whether it can become a flow of this process: both streams are forwarded, and it has been written of.
    pub fn may_be_taken_up(&self) -> bool {
        let is_flow = self.left.as_ref().is_some_and(|left| !left.record.is_message && !left.record.is_draining);
        is_flow && self.state() == FlowState::Released
    }

    /// Makes it a flow of this process, unless nobody wants it, or its policy needs sockets, which it does not have any more.
    pub fn take_up(
        &mut self,
        d: &Datapath,
        take_up: &dyn Fn(&EarlierFlow) -> Option<TakenUp>,
        announcer: Arc<Announcer>,
    ) -> Option<(Arc<Flow>, Begun)> {
        let record = &self.left.as_ref()?.record;
        let TakenUp { policy, member, begun, done, runtime } = take_up(&self.known()?)?;
        if matches!(policy.trigger, Some(Trigger::ClientData | Trigger::ServerData)) {
            return None;
        }
        let legs = || {
            let Pair { client, server } = record.connections().map(|connection| d.released(connection));
            Some(Pair::new(client?, server?))
        };
        let released = record.released.or_else(legs)?;
        let left = self.left.take()?;
        let mut kept = ForwardedFlow::again(&left, released, done);
        let FlowRecord { id, processes, info, legs, generations, announced, .. } = left.record.clone();
        let flow = Arc::new(Flow {
            id,
            info: info.with_member(member),
            legs,
            generations: generations.map(Into::into),
            replaced: Mutex::default(),
            announced,
            began: left.record.began.into(),
            processes: processes + 1,
            policy,
            now: Mutex::new(left.record.progress()),
            owner: Mutex::new(FlowOwner::Gone),
            runtime,
            announcer,
        });
        kept.write_record(d, &flow);
        legs.iter().for_each(|leg| d.forget_leg(leg));
        *flow.owner() = FlowOwner::Keeper(Box::new(kept));
        Some((flow, begun))
    }

    /// Looks at the orphan. After the time `idle` without a byte it is to be reset.
    pub fn look(&mut self, d: &Datapath, idle: Duration) -> Found {
        let legs = self.legs.each_ref();
        let known = || legs.map(|leg| d.generation(leg).unwrap_or(Connection::NONE));
        let generations = *self.generations.get_or_insert_with(known);
        let connections = self.connections();
        let mut event = Event::Paths(d.paths_of(connections));
        loop {
            event = match self.watch.on(monotonic(), idle, event) {
                Action::LookAtLegs => {
                    let heard = legs.map(|leg| d.leg(leg).map(|l| Time::from_nanos(l.seen)));
                    Event::Legs { at: d.look(connections).ok().map(Box::new), heard }
                }
                Action::Commit(at) => {
                    let options = CommitOptions { in_time: true, generations, ..CommitOptions::default() };
                    let committed = d.commit(legs, &at, at.most(legs, Pair::both(None)), options);
                    if let Err(error) = &committed
                        && ![SwitchError::Busy, SwitchError::Short].contains(error)
                    {
                        tracing::warn!(leg = ?legs.client, %error, "cannot commit a flow of an earlier process: it is tried again");
                    }
                    Event::Committed(committed.map(drop))
                }
                Action::Unsplice => {
                    let back = d.unsplice(connections);
                    tracing::debug!(leg = ?legs.client, ?back, "the drain of an earlier process has ended");
                    Event::Unspliced
                }
                Action::Done(found) => {
                    self.count(d);
                    return found;
                }
            };
        }
    }
}
