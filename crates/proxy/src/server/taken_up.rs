//! Flows that an earlier process has spliced: those that it has left records of go on as flows of the listeners of the same names.

use super::door::Door;
use crate::{
    context::{Front, Fronts, Live, ServerContext},
    log::access_log::Record,
    onward::{
        Relayed,
        of_flow::{Earlier, OfFlow},
    },
};
use longsplice_engine::{Ended, FlowStatus, TakenUp};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// Takes up what an earlier process has left. The ends of the others are logged.
pub(super) fn take_up(shared: &Arc<ServerContext>, doors: &[Door]) {
    let of_earlier = Arc::downgrade(shared);
    let fronts = doors.iter().map(|door| (door.fronts.now().listener.name.to_string(), door.fronts.clone()));
    let fronts: Arc<HashMap<_, _>> = Arc::new(fronts.collect());
    let of_all = fronts.clone();
    shared.splicer.on_recovered_end(move |ended, known| {
        if let Some(shared) = of_earlier.upgrade() {
            let front = known.and_then(|flow| front_of(&of_all, flow));
            let mut record = record(front.as_deref(), &ended, known);
            record.duration_ms = ended.duration_ms;
            front.into_iter().for_each(|front| front.summed.add(&record));
            shared.write(record);
        }
    });
    let of_earlier = Arc::downgrade(shared);
    shared.splicer.take_up(move |flow| taken_up(&of_earlier, &fronts, flow));
}

/// Returns the listener of a flow, if it is still there.
fn front_of(fronts: &HashMap<String, Fronts>, flow: &FlowStatus) -> Option<Arc<Front>> {
    let front = fronts.get(flow.name.as_ref()?)?.now();
    (front.listener.protocol.name() == flow.protocol).then_some(front)
}

/// Returns how a flow goes on. `None`: there is no listener of that name and protocol any more.
fn taken_up(shared: &Weak<ServerContext>, fronts: &HashMap<String, Fronts>, flow: &FlowStatus) -> Option<TakenUp> {
    let (shared, front) = (shared.upgrade()?, front_of(fronts, flow)?);
    let live = Live::taken_up(&shared, &front, Some(flow.client.ip()));
    let age = Duration::from_millis(flow.age_ms);
    let started = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
    let done = OfFlow {
        relayed: Relayed { live, started, passed: None },
        listener: front.listener.protocol.name(),
        lease: None,
        route: None,
        command: None,
        connect_ms: None,
        http: None,
        earlier: Some(Box::new(Earlier { processes: flow.processes, member: None })),
    };
    let (id, triggers, front_of_triggers) = (flow.id, shared.triggers.clone(), front.clone());
    let begun = move || triggers.begin(id, &front_of_triggers.listener.triggers, &front_of_triggers.taps, None);
    Some(TakenUp {
        policy: front.policy.clone(),
        begun: Box::new(begun),
        done: Box::new(done),
        runtime: shared.loads.runtime(flow.id as usize).clone(),
    })
}

fn record(front: Option<&Front>, ended: &Ended, known: Option<&FlowStatus>) -> Record {
    let listener = front.map_or("recovered", |front| front.listener.protocol.name());
    let mut record = Record::new(listener, known.and_then(|flow| flow.listen), ended.client);
    record.ended(ended);
    record.server = Some(ended.server);
    record.target = Some(known.map_or_else(|| ended.server.to_string(), |flow| flow.target.clone()));
    if let Some(flow) = known {
        record.name = flow.name.as_deref().map(Arc::from);
        record.user.clone_from(&flow.user);
        record.processes = Some(flow.processes);
    }
    record
}
