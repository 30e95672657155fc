//! Connections that are copied, or wait, and go on in another process, which opens the data path after this one
//! ([`Splicer::let_go`](crate::Splicer::let_go)): sockets, what is in hand, and what is known.
//!
//! Each has one owner at any time. From [`Splicer::hand_on`] on, nobody reads or writes its socket, until one of the two processes
//! calls [`Splicer::go_on`].

use crate::{
    copying::relay::Relay,
    core::{Action, Progress},
    engine::{
        flow::{Flow, FlowOwner, Order, is_loopback},
        handed::{Basket, FlowAbout, HandOn, HandedFlow},
    },
    leg::{
        Leg, LegOfProxy,
        handed::{HandedLeg, LegAbout},
    },
    refusal::Refusal,
    splicer::{PAGE, Splicer, ticker},
    types::{Done, FlowInfo, FlowState, Policy},
};
use bytes::Bytes;
use longsplice_datapath::{Pair, Tuple};
use std::{
    any::Any,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{runtime::Handle, sync::mpsc, time::timeout};
use tracing::Instrument as _;

impl Splicer {
    /// Takes flows out of this process that are copied, and that `is_wanted`; `most` of them at most, and only those that can leave
    /// within the time limit. The others go on. `records`: the other process takes over the records of the data path. Call it after [`Splicer::prepare_to_let_go`], and before [`Splicer::let_go`].
    #[doc(hidden)]
    pub async fn hand_on(
        &self,
        (most, records): (usize, bool),
        within: Duration,
        is_wanted: impl Fn(&FlowInfo) -> bool,
    ) -> Vec<HandedFlow> {
        let (engine, basket) = (self.engine(), Basket::new(most));
        let (heard, mut all_heard) = mpsc::channel(1);
        let mut last = 0;
        while let Some(page) = engine.page(last, PAGE) {
            last = page[page.len() - 1].id;
            for flow in page.iter().filter(|flow| flow.now().state == FlowState::Copying && is_wanted(&flow.info)) {
                if let FlowOwner::Task { orders, .. } = &*flow.owner() {
                    let order = HandOn { basket: basket.clone(), records, _heard: heard.clone() };
                    let _ = orders.send(Order::HandOn(order)); // it may end at this moment
                }
            }
        }
        drop(heard);
        let _ = timeout(within, all_heard.recv()).await; // nothing is ever sent
        basket.close()
    }

    /// Takes a leg out of this process that is in no flow, unless something of it is here. [`Splicer::hand_on`] says the rest.
    #[doc(hidden)]
    pub fn hand_on_leg(&self, leg: &mut Leg, records: bool) -> Option<HandedLeg> {
        let d = self.engine().datapath();
        leg.connection(d);
        leg.may_go(records).then(|| leg.hand_on(d))
    }

    /// Makes sure that flows which begin from now on have other numbers.
    #[doc(hidden)]
    pub fn number_after(&self, id: u64) {
        self.engine().number_after(id);
    }

    /// Goes on with a leg of another process, in this runtime.
    #[doc(hidden)]
    pub fn go_on_with(&self, leg: HandedLeg) -> io::Result<Leg> {
        let mut leg = self.leg_of(leg);
        leg.attend()?;
        Ok(leg)
    }

    fn leg_of(&self, leg: HandedLeg) -> Leg {
        let LegAbout { remote, local, .. } = leg.about;
        let is_here = self.datapath().is_some() && is_loopback(&Tuple { remote, local });
        Leg::handed(leg, is_here.then_some(Refusal::Loopback))
    }

    /// Resets a leg of another process, with which nobody goes on.
    #[doc(hidden)]
    pub fn reset_handed(&self, leg: HandedLeg) {
        let leg = self.leg_of(leg);
        leg.abort();
        self.discard(leg);
    }

    /// Goes on with a flow of another process, in this runtime. `only_copy`: its listener never splices. `seat`: dropped when the
    /// flow is spliced, or ends.
    #[doc(hidden)]
    pub fn go_on(
        &self,
        (about, sockets, in_hand): (FlowAbout, Pair<OwnedFd>, Pair<Bytes>),
        (policy, only_copy): (Arc<Policy>, bool),
        seat: impl Any + Send + Sync,
        done: Done,
    ) {
        let engine = self.engine();
        let mut legs = about.legs.clone().zip(sockets).map(|(about, socket)| self.leg_of(HandedLeg { about, socket }));
        legs.client.until_parked(seat);
        legs.iter().filter(|leg| only_copy && leg.lacks_record()).for_each(|leg| leg.refuse(Refusal::Policy));
        let (owner, inbox) = engine.inbox();
        let (spliced, splices) = about.spliced();
        let now = Progress { copied: about.so_far().copied, spliced, splices, ..Progress::new(engine.refusal()) };
        engine.number_after(about.id);
        let flow = Arc::new(Flow {
            id: about.id,
            info: about.info(),
            legs: legs.each_ref().map(Leg::tuple),
            generations: legs.each_ref().map(|leg| leg.connection(engine.datapath()).generation.into()),
            replaced: Mutex::default(),
            announced: legs.client.announced(),
            began: about.began().into(),
            processes: about.processes,
            policy,
            now: Mutex::new(now),
            owner: Mutex::new(owner),
            runtime: Handle::current(),
            announcer: engine.announcer.clone(),
        });
        let listed = engine.list(flow);
        ticker::stir();
        let span = listed.flow.span();
        let relay = Relay::going_on(engine, listed, legs, (in_hand, about.so_far()), done);
        tokio::spawn(relay.run(inbox, Action::Attend).instrument(span));
    }
}
