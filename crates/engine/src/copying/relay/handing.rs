//! A copied flow goes to another process, or has come from one.

use super::Relay;
use crate::{
    copying::pump::Pump,
    core::{Core, SoFar},
    engine::{
        Engine, Listed,
        handed::{FlowAbout, HandOn, HandedFlow},
        purpose::Purpose,
        record::Recorded,
    },
    leg::Leg,
    types::Done,
};
use bytes::Bytes;
use longsplice_datapath::{Pair, monotonic};
use std::sync::Arc;

impl Relay {
    /// Begins a flow that another process has copied so far.
    pub fn going_on(
        engine: &Arc<Engine>,
        listed: Listed,
        legs: Pair<Leg>,
        (in_hand, so_far): (Pair<Bytes>, &SoFar),
        done: Done,
    ) -> Relay {
        let obstacle = engine.obstacle(&legs.client, &legs.server);
        let lengths = in_hand.each_ref().map(|bytes| bytes.len() as u64);
        let core = Core::going_on(so_far, monotonic(), obstacle, lengths);
        Relay {
            core: if legs.iter().any(Leg::lacks_record) { core.without_records() } else { core },
            engine: engine.clone(),
            listed,
            legs,
            pump: Pump::new(in_hand),
            purpose: Purpose::Streams(done),
            adopting: None,
            holding: None,
            seen: None,
            released: None,
            hands_on: None,
            record: Recorded::default(),
        }
    }

    /// Ends the flow here, so that it can go on in another process, if it can. The task ends with that.
    pub(super) fn hand_on(self, order: &HandOn) -> Result<(), Box<Relay>> {
        let may_go =
            self.legs.iter().all(|leg| leg.may_go(order.records)) && !self.is_tapped() && !self.pump.is_urgent();
        let description = if let Purpose::Streams(done) = &self.purpose { done.description() } else { None };
        match self.core.so_far().filter(|_| may_go).zip(description) {
            Some(known) => order.basket.put(Box::new(self), |relay| relay.take_apart(known)),
            None => Err(Box::new(self)),
        }
    }

    fn take_apart(self, (so_far, description): (SoFar, String)) -> HandedFlow {
        let Relay { engine, listed, mut legs, pump, adopting, .. } = self;
        drop(adopting); // the records that were being made
        let stay = so_far.stay && !engine.is_returning(listed.flow.id);
        let handed = legs.each_mut().map(|leg| leg.hand_on(engine.datapath()));
        let (about, sockets) = (handed.each_ref().map(|leg| leg.about.clone()), handed.map(|leg| leg.socket));
        let about = FlowAbout::of(&listed.flow, SoFar { stay, ..so_far }, about);
        HandedFlow { about, sockets, in_hand: pump.into_bytes(), description }
    }
}
