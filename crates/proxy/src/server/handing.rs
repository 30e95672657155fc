//! Connections go to another process that takes the place of this one, or come from the one whose place this one has taken.

use super::{Server, connection, lock, taken_up::front_of};
use crate::{
    config::Tracking,
    context::{Front, Fronts, Live, ServerContext, handing::Continued},
    counters::Counters,
    handed::{About, ClientAbout, CopiedAbout, Counted, Handed, Wanted},
    onward::of_flow::{Line, OfFlow},
    pool::Lease,
};
use bytes::Bytes;
use longsplice_engine::{FlowAbout, FlowInfo, HandedFlow, HandedLeg, LegOfProxy, Pair};
use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{task::yield_now, time::timeout};

/// Time in which tasks and flows leave.
const LEAVES: Duration = Duration::from_secs(2);
/// Turns that the tasks of a worker get to do so: one to be woken up, and others for what they wake up.
const TURNS: usize = 4;

impl Server {
    /// Takes connections out of this process that another one wants, after [`Server::leave_doors`]: those that are copied, and
    /// clients of whom nothing is in hand. What cannot leave goes on here. Nobody uses the sockets until [`Server::go_on`].
    pub async fn hand_on(&self, wanted: Wanted) -> Vec<Handed> {
        let shared = &self.shared;
        let lets_go: HashSet<String> = {
            let fronts = lock(&self.state).doors.iter().map(|door| door.fronts.now()).collect::<Vec<_>>();
            let all = fronts.iter().filter(|front| front.listener.lets_go());
            all.map(|front| front.listener.name.to_string()).collect()
        };
        let sockets = wanted.sockets;
        shared.handing.begin(wanted.clone());
        let turns = shared.loads.runtimes().map(|runtime| {
            runtime.spawn(async {
                for _ in 0..TURNS {
                    yield_now().await;
                }
            })
        });
        for turn in turns.collect::<Vec<_>>() {
            let _ = timeout(LEAVES, turn).await; // it stays if its worker is so busy
        }
        let mut all = shared.handing.end();
        let most = sockets.saturating_sub(all.len()) / 2;
        let is_wanted = |info: &FlowInfo| {
            let is = info.name.as_deref().is_some_and(|name| lets_go.contains(name));
            is && wanted.has(info.name.as_deref(), &info.protocol)
        };
        // before they leave, after which they are forgotten
        let mut counted = shared.triggers.counted().await;
        let flows = shared.splicer.hand_on((most, wanted.splices), LEAVES, is_wanted).await;
        all.extend(flows.into_iter().map(|flow| {
            let HandedFlow { about, sockets: Pair { client, server }, in_hand, description: line } = flow;
            let triggers = counted.remove(&about.id);
            let about = About::Flow(Box::new(CopiedAbout { flow: about, line, triggers }));
            Handed { about, sockets: vec![client, server], in_hand: in_hand.into() }
        }));
        all
    }

    /// Goes on with connections of another process, or with those that this one has not handed on after all. Those whose listener is
    /// gone are reset.
    pub fn go_on(&self, all: Vec<Handed>) {
        let fronts: HashMap<String, Fronts> = {
            let state = lock(&self.state);
            state.doors.iter().map(|door| (door.fronts.now().listener.name.to_string(), door.fronts.clone())).collect()
        };
        for (number, handed) in all.into_iter().enumerate() {
            let (name, protocol) = handed.about.listener();
            let Some(front) = front_of(&fronts, name, protocol) else {
                self.reset_one(handed);
                continue;
            };
            let Handed { about, sockets, in_hand: [up, down] } = handed;
            let mut sockets = sockets.into_iter();
            match (about, sockets.next(), sockets.next()) {
                (About::Client(about), Some(socket), None) => serve(&self.shared, &front, (*about, socket), number),
                (About::Flow(about), Some(client), Some(server)) => {
                    let CopiedAbout { flow, line, triggers } = *about;
                    let line = Line::of(Some(&line)).unwrap_or_else(|| Line::since(Instant::now()));
                    let (sockets, in_hand) = (Pair::new(client, server), Pair::new(up, down));
                    let lease = line.member.as_ref().and_then(|member| self.shared.lease_again(member));
                    relay(&self.shared, &front, (flow, line, lease), (sockets, in_hand), (triggers, number));
                }
                _ => unreachable!("whoever has received it has counted its sockets"),
            }
        }
    }

    /// Resets connections of another process, with which nobody goes on.
    pub fn reset(&self, all: Vec<Handed>) {
        all.into_iter().for_each(|handed| self.reset_one(handed));
    }

    fn reset_one(&self, Handed { about, sockets, .. }: Handed) {
        for (about, socket) in about.legs().into_iter().zip(sockets) {
            self.shared.splicer.reset_handed(HandedLeg { about, socket });
        }
    }
}

/// Goes on with a client who has said nothing that was not answered. `number`: index of the worker, if it is free.
fn serve(shared: &Arc<ServerContext>, front: &Arc<Front>, (about, socket): (ClientAbout, OwnedFd), number: usize) {
    let ClientAbout { leg, began, left, is_known, requests, .. } = about;
    let expects = !is_known && front.listener.proxy_protocol.expects(leg.remote.ip());
    let mut live = Live::taken_up(shared, front, (!expects).then(|| leg.source().ip()));
    // its time limits go on now, however long it took until somebody reads from it again
    let (away, accepted) = (left.age(), Instant::from(began));
    let requests = requests.map(|(count, since)| (count, Instant::from(since) + away));
    live.continued = Some(Box::new(Continued { accepted, began: accepted + away, is_known, requests }));
    let seat = shared.loads.seat(number);
    let (runtime, front) = (seat.runtime().clone(), front.clone());
    live.seat = Some(seat);
    runtime.spawn(async move {
        match live.shared.splicer.go_on_with(HandedLeg { about: leg, socket }) {
            Ok(client) => {
                if front.listener.tracking() == Tracking::Never {
                    client.only_copy();
                }
                live.enrolled = Some(live.shared.roll.enter(&client, &front.listener.name));
                connection::serve(live, front, client).await;
            }
            Err(error) => {
                Counters::add(&live.shared.counters.accept_errors);
                tracing::warn!("cannot serve a client of the process before: {error}");
            }
        }
    });
}

/// Goes on to copy between a client and a server.
fn relay(
    shared: &Arc<ServerContext>,
    front: &Arc<Front>,
    (flow, line, lease): (FlowAbout, Line, Option<Lease>),
    (sockets, in_hand): (Pair<OwnedFd>, Pair<Bytes>),
    (counted, number): (Option<Counted>, usize),
) {
    let live = Live::taken_up(shared, front, Some(flow.legs.client.source().ip()));
    let done = OfFlow::going_on((flow.id, line), live, front, lease, flow.processes);
    let seat = shared.loads.seat(number);
    let (runtime, shared, front) = (seat.runtime().clone(), shared.clone(), front.clone());
    runtime.spawn(async move {
        let (id, only_copy) = (flow.id, front.listener.tracking() == Tracking::Never);
        shared.splicer.go_on((flow, sockets, in_hand), (front.policy.clone(), only_copy), seat, Box::new(done));
        shared.triggers.begin(id, &front.listener.triggers, &front.taps, counted);
    });
}
