//! Flows that an earlier process has spliced: those that it has left records of go on as flows of the listeners of the same names.

use super::door::Door;
use crate::{
    context::{Front, Fronts, Live, ServerContext},
    log::access_log::Record,
    onward::of_flow::{Line, OfFlow},
};
use longsplice_engine::{EarlierFlow, Ended, FlowStatus, TakenUp};
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
            let front = known.and_then(|flow| front_of(&of_all, flow.status.name.as_deref(), &flow.status.protocol));
            let record = record(front.as_deref(), &ended, known);
            front.into_iter().for_each(|front| front.summed.add(&record));
            shared.write(record);
        }
    });
    let of_earlier = Arc::downgrade(shared);
    shared.splicer.take_up(move |flow| taken_up(&of_earlier, &fronts, flow));
}

/// Returns the listener of this name, if it has this protocol.
pub(super) fn front_of(fronts: &HashMap<String, Fronts>, name: Option<&str>, protocol: &str) -> Option<Arc<Front>> {
    let front = fronts.get(name?)?.now();
    (front.listener.protocol.name() == protocol).then_some(front)
}

/// Returns how a flow goes on. `None`: there is no listener of that name and protocol any more.
fn taken_up(shared: &Weak<ServerContext>, fronts: &HashMap<String, Fronts>, flow: &EarlierFlow) -> Option<TakenUp> {
    let EarlierFlow { status, description } = flow;
    let (shared, front) = (shared.upgrade()?, front_of(fronts, status.name.as_deref(), &status.protocol)?);
    let live = Live::taken_up(&shared, &front, Some(status.client.ip()));
    let line = Line::of(description.as_deref()).unwrap_or_else(|| Line::since(started(status)));
    let lease = line.member.as_ref().and_then(|member| shared.lease_again(member));
    let member = lease.as_ref().map(|lease| lease.0.label.clone());
    let done = OfFlow::going_on((status.id, line), live, &front, lease, status.processes);
    let (id, triggers, front_of_triggers) = (status.id, shared.triggers.clone(), front.clone());
    let begun = move || triggers.begin(id, &front_of_triggers.listener.triggers, &front_of_triggers.taps, None);
    Some(TakenUp {
        policy: front.policy.clone(),
        member,
        begun: Box::new(begun),
        done: Box::new(done),
        runtime: shared.loads.runtime(status.id as usize).clone(),
    })
}

fn started(flow: &FlowStatus) -> Instant {
    let age = Duration::from_millis(flow.age_ms);
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}

fn record(front: Option<&Front>, ended: &Ended, known: Option<&EarlierFlow>) -> Record {
    let listener = front.map_or("recovered", |front| front.listener.protocol.name());
    let status = known.map(|flow| &flow.status);
    let mut record = Record::new(listener, status.and_then(|flow| flow.listen), ended.client);
    record.ended(ended);
    record.server = Some(ended.server);
    record.target = Some(status.map_or_else(|| ended.server.to_string(), |flow| flow.target.clone()));
    record.duration_ms = ended.duration_ms;
    if let Some(flow) = status {
        record.name = flow.name.as_deref().map(Arc::from);
        record.user.clone_from(&flow.user);
        record.processes = Some(flow.processes);
    }
    if let Some(line) = Line::of(known.and_then(|flow| flow.description.as_deref())) {
        record.duration_ms = line.started.age().as_millis() as u64;
        line.note(&mut record);
    }
    record
}
