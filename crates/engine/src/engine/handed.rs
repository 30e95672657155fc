//! What goes to another process that goes on with connections of this one: sockets, and what is known of them.

use crate::{
    core::{SoFar, Time},
    engine::flow::Flow,
    leg::handed::LegAbout,
    types::FlowInfo,
};
use bytes::Bytes;
use longsplice_datapath::Pair;
use std::{
    fmt,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};
use tokio::sync::mpsc;

/// What is known of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FlowAbout {
    /// Its number.
    pub id: u64,
    /// Name of its listener.
    pub name: Option<String>,
    /// Protocol of its listener.
    pub protocol: String,
    target: String,
    listen: Option<SocketAddr>,
    /// The user.
    pub user: Option<String>,
    /// Its server, as a member of a pool.
    member: Option<String>,
    /// Number of processes that it has lived through.
    pub processes: u32,
    began: Time,
    so_far: SoFar,
    spliced: Pair<u64>,
    splices: u32,
    /// Its legs.
    pub legs: Pair<LegAbout>,
}

/// A copied flow that goes to another process.
pub struct HandedFlow {
    /// What is known of it.
    pub about: FlowAbout,
    /// The sockets of its legs.
    pub sockets: Pair<OwnedFd>,
    /// What was read from each host, and not passed on.
    pub in_hand: Pair<Bytes>,
    /// What its caller has said of it: [`Finish::description`](crate::Finish).
    pub description: String,
}

impl fmt::Debug for HandedFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandedFlow({:?})", self.about)
    }
}

impl FlowAbout {
    pub(crate) fn of(flow: &Flow, so_far: SoFar, legs: Pair<LegAbout>) -> FlowAbout {
        let (now, info) = (*flow.now(), &flow.info);
        FlowAbout {
            id: flow.id,
            name: info.name.as_deref().map(String::from),
            protocol: info.protocol.clone().into_owned(),
            target: info.target.to_string(),
            listen: info.listen,
            user: info.user().map(String::from),
            member: info.member().map(String::from),
            processes: flow.processes,
            began: flow.began.into(),
            so_far,
            spliced: now.spliced,
            splices: now.splices,
            legs,
        }
    }

    /// Returns the description for lists and records.
    pub fn info(&self) -> FlowInfo {
        let info = FlowInfo::new(self.protocol.clone(), self.target.as_str()).with_listen(self.listen);
        let info = info.with_name(self.name.as_deref().map(Arc::from)).with_user(self.user.clone());
        info.with_member(self.member.as_deref().map(Arc::from))
    }

    pub(crate) fn began(&self) -> Time {
        self.began
    }

    pub(crate) fn so_far(&self) -> &SoFar {
        &self.so_far
    }

    pub(crate) fn spliced(&self) -> (Pair<u64>, u32) {
        (self.spliced, self.splices)
    }
}

/// Where the flows are gathered that go to another process. `None`: too late, they stay.
#[derive(Debug)]
pub(crate) struct Basket {
    flows: Mutex<Option<Vec<HandedFlow>>>,
    most: usize,
}

impl Basket {
    pub fn new(most: usize) -> Arc<Basket> {
        Arc::new(Basket { flows: Mutex::new(Some(Vec::new())), most })
    }

    /// Puts a flow in, if there is still room. `take_apart` is called only then.
    pub fn put<T>(&self, flow: T, take_apart: impl FnOnce(T) -> HandedFlow) -> Result<(), T> {
        let mut flows = self.flows.lock().expect("nothing panics under the engine's locks");
        match flows.as_mut().filter(|flows| flows.len() < self.most) {
            Some(flows) => {
                flows.push(take_apart(flow));
                Ok(())
            }
            None => Err(flow),
        }
    }

    /// Takes all of them. From now on, flows stay.
    pub fn close(&self) -> Vec<HandedFlow> {
        self.flows.lock().expect("nothing panics under the engine's locks").take().unwrap_or_default()
    }
}

/// An order to a flow to go to another process, if it can.
pub(crate) struct HandOn {
    pub basket: Arc<Basket>,
    /// Legs with records in the data path may go, too.
    pub records: bool,
    /// Dropped once it was heard.
    pub _heard: mpsc::Sender<()>,
}
