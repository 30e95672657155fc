//! One flow in detail, for `longsplice inspect` and `longsplice trace`.

use crate::{
    engine::{flow::FlowOwner, orphan::Orphan},
    refusal::Refusal,
    splicer::Splicer,
    sync::lock,
    types::FlowStatus,
};
use longsplice_datapath::{Connection, Datapath, LegDetail, Numbers, Pair, Traced, Tuple, untracked};
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// One live flow in full detail. The flow goes on while it is read: see [`LegDetail`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FlowDetail {
    /// The flow as lists show it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub status: FlowStatus,
    /// Number of splices. `None` for a flow of an earlier process.
    pub splices: Option<u32>,
    /// The part of the program that has the flow, in words.
    pub place: &'static str,
    /// The client's leg.
    pub client_leg: LegDetail,
    /// The server's leg.
    pub server_leg: LegDetail,
}

/// One segment of a traced flow.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct TracedSegment {
    /// Time in nanoseconds, CLOCK_MONOTONIC.
    pub when: u64,
    /// `client` or `server`: the leg on which the segment arrived, or whose socket has sent it.
    pub leg: &'static str,
    /// The sender: `host` or `socket`.
    pub from: &'static str,
    /// The segment's numbers as it arrived.
    pub came: Numbers,
    /// The numbers with which it left for a host: the leg's own host
    /// if the socket has sent it, otherwise the host of the other leg.
    pub to_host: Option<Numbers>,
    /// The numbers with which the leg's socket received it.
    pub to_socket: Option<Numbers>,
    /// The data path's verdicts on the segment, by name.
    pub verdicts: Vec<&'static str>,
}

impl TracedSegment {
    fn new(segment: Traced, client: &Tuple) -> TracedSegment {
        let Traced { leg, from_socket, when, verdicts, came, to_host, to_socket } = segment;
        TracedSegment {
            when: when.as_nanos() as u64,
            leg: if leg == *client { "client" } else { "server" },
            from: if from_socket { "socket" } else { "host" },
            came,
            to_host,
            to_socket,
            verdicts,
        }
    }
}

/// Reasons why a flow cannot be traced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// There is no such flow, or it has ended.
    #[error("there is no flow {0}")]
    NoFlow(u64),
    /// There is no data path.
    #[error("no flow of this process can be traced: {0}")]
    NoDatapath(Refusal),
    /// The data path has no entries for the flow.
    #[error("flow {0} is only copied: the data path does not see it")]
    OnlyCopied(u64),
    /// Another flow is being traced.
    #[error("another flow is being traced")]
    Busy,
    /// The kernel returned an error.
    #[error("the trace has failed: {0}")]
    Io(io::Error),
}

impl Splicer {
    /// Passes the segments of a flow to `f`, until it returns false or the flow has ended. Passes `None` at least ten
    /// times a second. Returns the number of segments that were lost because `f` was too slow. Blocks: call it from a
    /// thread of its own. While it is traced, the flow takes the general path through the data path, which costs more.
    pub fn trace(&self, id: u64, mut f: impl FnMut(Option<TracedSegment>) -> bool) -> Result<u64, TraceError> {
        const LOOK: Duration = Duration::from_secs(1);
        if let Some(why) = self.refusal() {
            return Err(TraceError::NoDatapath(why));
        }
        let (Some(d), Some(connections)) = (self.datapath(), self.connections_of(id)) else {
            return Err(TraceError::NoFlow(id));
        };
        let is_known = |connections: &Pair<Connection>| {
            connections.iter().any(|c| d.generation(&c.leg) == Some(c.generation)).then_some(*connections)
        };
        let Some(connections) = is_known(&connections).or_else(|| self.adopted(id, is_known)) else {
            return Err(TraceError::OnlyCopied(id));
        };
        let mut looked = Instant::now();
        let traced = d.trace(connections.into(), |segment| {
            if segment.is_none() && looked.elapsed() > LOOK {
                looked = Instant::now();
                if self.connections_of(id).is_none() {
                    return false;
                }
            }
            f(segment.map(|s| TracedSegment::new(s, &connections.client.leg)))
        });
        traced.map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => TraceError::Busy,
            _ => TraceError::Io(error),
        })
    }

    /// Has a copied flow adopted, and waits until the data path knows it. `None`: it cannot be, or not soon.
    fn adopted(
        &self,
        id: u64,
        is_known: impl Fn(&Pair<Connection>) -> Option<Pair<Connection>>,
    ) -> Option<Pair<Connection>> {
        const LOOK: Duration = Duration::from_millis(2);
        const LOOKS: u32 = 500;
        if self.engine().flow(id)?.now().refusal.is_some() {
            return None;
        }
        self.engine().adopt(id);
        (0..LOOKS).find_map(|_| {
            thread::sleep(LOOK);
            is_known(&self.connections_of(id)?)
        })
    }

    fn connections_of(&self, id: u64) -> Option<Pair<Connection>> {
        let orphan = || lock(&self.engine().orphans).get(&id).map(Orphan::connections);
        self.engine().flow(id).map(|f| f.connections()).or_else(orphan)
    }

    /// Describes a live flow of this or an earlier process. `None` if there is no such flow.
    pub fn inspect(&self, id: u64) -> Option<FlowDetail> {
        let datapath = self.datapath();
        let Some(flow) = self.engine().flow(id) else {
            let (status, legs) = lock(&self.engine().orphans).get(&id).map(|o| (o.status(), o.legs))?;
            let Pair { client: client_leg, server: server_leg } = datapath?.inspect(legs.each_ref(), None);
            return Some(FlowDetail { status, splices: None, place: "the data path alone", client_leg, server_leg });
        };
        let status = flow.status(datapath);
        let (place, released) = match &*flow.owner() {
            FlowOwner::Task { .. } => ("a task, which copies or drains", None),
            FlowOwner::Keeper(kept) => ("the keeper, while the data path forwards", kept.sockets.released().copied()),
            FlowOwner::Gone => return None,
        };
        let legs = flow.legs.each_ref();
        let inspect = |d: &Datapath| d.inspect(legs, released.as_ref());
        let details = datapath.map_or_else(|| legs.map(untracked), inspect);
        let Pair { client: client_leg, server: server_leg } = details;
        let splices = Some(flow.now().splices);
        Some(FlowDetail { status, splices, place, client_leg, server_leg })
    }
}
