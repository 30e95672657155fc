//! Handing the data path over to another process, while this one goes on with the connections that it copies.
//!
//! Spliced flows are left to the kernel, as by [`Splicer::stop`], and the other process finds them. A flow that needs this process
//! (a message, a trigger, a tap) is taken back first, and copied to its end. The records of connections that were spliced before
//! stay in the tables, because their sockets have other numbers than their hosts; the other process leaves those alone whose sockets
//! a process holds ([`adoption`](crate::keeping::adoption)).

use crate::{
    core::Progress,
    engine::{
        Leaving,
        flow::{FlowOwner, KeeperMessage, Order, Stop},
    },
    splicer::{PAGE, Splicer},
    sync::lock,
    types::{Command, FlowState},
};
use std::{
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// Interval at which flows are looked at.
const LOOK: Duration = Duration::from_millis(10);
/// Time in which drains may come to their end. Then they are taken back.
const DRAINS: Duration = Duration::from_secs(1);
/// Time in which the keeper leaves all flows to the kernel, with a second for so many of them.
const LEAVES: (Duration, u32) = (Duration::from_secs(5), 20_000);

/// What becomes of the flows when the data path is handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandedOver {
    /// Number of flows that were left to the kernel, with those of an earlier process.
    pub left: usize,
    /// Number of flows that this process copies to their end.
    pub stay: usize,
}

impl Splicer {
    /// Prepares [`Splicer::let_go`]: begins no splice and no handshake between hosts from now on, waits for those that are under way,
    /// and takes back flows that need this process, if they can be. Fails if some drain for longer than `limit`, with their number.
    /// [`Splicer::hold_on`] undoes it.
    pub async fn prepare_to_let_go(&self, limit: Duration) -> Result<(), usize> {
        self.set_leaving(Leaving::Soon);
        lock(self.handshakes()).pause(true);
        let began = Instant::now();
        loop {
            let (draining, needed) = self.in_a_switch(began.elapsed() > DRAINS);
            let is_late = began.elapsed() > limit;
            let waits = needed > 0 || !lock(self.handshakes()).are_over();
            if draining == 0 && (!waits || is_late) {
                return Ok(());
            }
            if is_late {
                self.hold_on();
                return Err(draining);
            }
            sleep(LOOK).await;
        }
    }

    /// Transparent connections to the addresses of the process before at which nobody listens now are routed on from here on.
    pub fn settle(&self) {
        self.datapath().into_iter().for_each(|d| d.settle_listeners());
    }

    /// Flows may be spliced again, and those that were taken back are.
    pub fn hold_on(&self) {
        lock(self.handshakes()).pause(false);
        self.set_leaving(Leaving::No);
        for id in self.engine().take_returning() {
            self.command(id, Command::Splice); // it may have ended
        }
    }

    /// Lets go of the data path, after [`Splicer::prepare_to_let_go`]: another process may open it from now on. Spliced flows are left
    /// to the kernel; the others go on, and are never spliced again. [`Splicer::close`] will remove nothing.
    pub async fn let_go(&self) -> HandedOver {
        let engine = self.engine();
        let all = engine.live();
        engine.stop(Stop::HandOver);
        let limit = LEAVES.0 + Duration::from_secs(1) * (all as u32 / LEAVES.1);
        let until = Instant::now() + limit;
        while self.count(|owner| matches!(owner, FlowOwner::Keeper(_))) > 0 && Instant::now() < until {
            sleep(LOOK).await;
        }
        let stay = self.count(|_| true);
        engine.begin_to_close();
        while engine.keeps.load(Ordering::Acquire) && Instant::now() < until {
            sleep(LOOK).await;
        }
        if engine.keeps.load(Ordering::Acquire) {
            tracing::warn!(
                "cannot end the keeper of spliced flows in time: the next process may miss some of their events"
            );
        }
        lock(self.handshakes()).hand_over(engine.datapath());
        self.set_leaving(Leaving::Gone);
        engine.datapath().into_iter().for_each(|d| d.let_go());
        HandedOver { left: all.saturating_sub(stay), stay }
    }

    fn set_leaving(&self, leaving: Leaving) {
        *self.engine().leaving.write().unwrap_or_else(PoisonError::into_inner) = leaving;
    }

    /// Has flows taken back that are not to be left, those that drain only if `drains`. Returns how many are in a switch, and how
    /// many are forwarded and need this process.
    fn in_a_switch(&self, drains: bool) -> (usize, usize) {
        let engine = self.engine();
        let (mut draining, mut needed, mut last) = (0, 0, 0);
        while let Some(page) = engine.page(last, PAGE) {
            last = page[page.len() - 1].id;
            for flow in page {
                let Progress { state, freezes, .. } = *flow.now();
                match &*flow.owner() {
                    FlowOwner::Task { orders, .. } => {
                        if drains && state == FlowState::Draining {
                            engine.returns(flow.id);
                            let _ = orders.send(Order::Command(Command::Unsplice)); // it may end at this moment
                        }
                        draining +=
                            usize::from(freezes || matches!(state, FlowState::Draining | FlowState::Unsplicing));
                    }
                    FlowOwner::Keeper(kept) if kept.needs_us(&flow) => {
                        engine.returns(flow.id);
                        engine.tell(KeeperMessage::Command(flow.id, Command::Unsplice));
                        needed += 1;
                    }
                    FlowOwner::Keeper(_) | FlowOwner::Gone => {}
                }
            }
        }
        (draining, needed)
    }

    /// Returns the number of flows with such an owner.
    fn count(&self, is: impl Fn(&FlowOwner) -> bool) -> usize {
        let (mut n, mut last) = (0, 0);
        while let Some(page) = self.engine().page(last, PAGE) {
            last = page[page.len() - 1].id;
            n += page.iter().filter(|flow| is(&flow.owner())).count();
        }
        n
    }
}
