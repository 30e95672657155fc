//! A flow of an earlier process, as the last look found it. What happens to it is decided by [`Watch`].

use crate::{
    core::{
        Time,
        orphan::{self, Action, Event, Found, Watch},
    },
    engine::flow::stages,
    types::{EndReason, Ended, FlowState, FlowStatus},
};
use longsplice_datapath::{CommitOptions, Connection, Datapath, Pair, PathFlags, SwitchError, Tuple, monotonic};
use std::time::{Duration, Instant};

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
        Orphan { id, legs, since: Instant::now(), bytes, first: None, positions: None, generations: None, watch }
    }

    /// Returns the record of its end.
    pub fn ended(&self, how: EndReason) -> Ended {
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
        let data = |end: Pair<u64>| end.zip(paths.each_ref().map(|p| u64::from(p.flags & PathFlags::FIN != 0)));
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
        FlowStatus {
            id: self.id,
            protocol: "recovered".into(),
            listen: None,
            name: None,
            client: self.legs.client.remote,
            server: self.legs.server.remote,
            target: self.legs.server.remote.to_string(),
            user: None,
            state: self.state(),
            stages: stages(self.state(), "recovered".into()),
            bytes_up: self.bytes.client,
            bytes_down: self.bytes.server,
            age_ms: self.since.elapsed().as_millis() as u64,
            refusal: None,
            path: None,
        }
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
