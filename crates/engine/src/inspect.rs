//! All that is known of one flow, for `longsplice inspect`.

use crate::{
    FlowStatus, Splicer,
    splicer::{Place, lock},
};
use longsplice_datapath::{Datapath, LegDetail, untracked};
use serde::Serialize;

/// One live flow in every detail. It goes on while it is looked at: see [`LegDetail`].
#[derive(Clone, Debug, Serialize)]
pub struct FlowDetail {
    /// As lists show it.
    #[serde(flatten)]
    pub status: FlowStatus,
    /// How often it was spliced; `None`: it is of an earlier process.
    pub splices: Option<u32>,
    /// Who looks after it.
    pub place: &'static str,
    /// The leg of the client.
    pub client_leg: LegDetail,
    /// The leg of the server.
    pub server_leg: LegDetail,
}

impl Splicer {
    /// A live flow, or one of an earlier process; `None`: there is no such flow.
    pub fn inspect(&self, id: u64) -> Option<FlowDetail> {
        let datapath = self.datapath();
        let Some(flow) = self.flow(id) else {
            let (status, legs) = lock(&self.inner.orphans).get(&id).map(|o| (o.status(), o.legs().map(|leg| *leg)))?;
            let [client_leg, server_leg] = datapath?.inspect([&legs[0], &legs[1]], None);
            return Some(FlowDetail { status, splices: None, place: "the data path alone", client_leg, server_leg });
        };
        let status = flow.status(datapath);
        let (place, released) = match &*flow.place() {
            Place::Task { .. } => ("a task, which copies or drains", None),
            Place::Kept(kept) => ("the keeper, while the data path forwards", kept.released),
            Place::Gone => return None,
        };
        let legs = [&flow.client, &flow.server];
        let inspect = |d: &Datapath| d.inspect(legs, released.as_ref());
        let [client_leg, server_leg] = datapath.map_or_else(|| legs.map(untracked), inspect);
        let splices = Some(flow.now().splices);
        Some(FlowDetail { status, splices, place, client_leg, server_leg })
    }
}
