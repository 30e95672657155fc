//! A leg that goes to another process, or has come from one.

use super::{Leg, known::Known, opened::Opened, shaping::Shaping, socket::Socket};
use crate::{core::Position, refusal::Refusal, sync::lock};
use longsplice_datapath::{Connection, Datapath, Tuple};
use std::{net::SocketAddr, os::fd::OwnedFd};

/// What is known of a leg.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LegAbout {
    /// Address of its host.
    pub remote: SocketAddr,
    /// Our address.
    pub local: SocketAddr,
    /// Names its record in the data path, if there is one.
    pub generation: Option<u32>,
    /// Positions of its socket.
    pub at: Position,
    /// Source and destination that a proxy in front has announced.
    pub announced: Option<(SocketAddr, SocketAddr)>,
    /// How many more proxies may intercept its connection, if it was intercepted.
    pub hops: Option<u8>,
    /// Servers see the client's address.
    pub is_shown: bool,
}

impl LegAbout {
    /// Returns the client's address: [`Leg::source`].
    pub fn source(&self) -> SocketAddr {
        self.announced.map_or(self.remote, |announced| announced.0)
    }

    /// Returns the addresses if the data path has a record of the leg.
    pub fn recorded(&self) -> Option<Tuple> {
        self.generation.map(|_| Tuple { remote: self.remote, local: self.local })
    }
}

/// A leg that goes to another process. Only one of the two may use its socket.
#[derive(Debug)]
pub struct HandedLeg {
    /// What is known of it.
    pub about: LegAbout,
    /// Its socket.
    pub socket: OwnedFd,
}

impl Leg {
    /// Returns whether another process can go on with this leg: nothing here belongs to it but its socket, and perhaps a record in
    /// the data path. `records`: those may go, too.
    pub(crate) fn may_go(&self, records: bool) -> bool {
        let has_record = self.known.generation.get().is_some_and(|generation| *generation != Connection::NONE);
        let is_whole = !self.is_gone() && !self.was_reset && self.tap.is_none();
        let fits = if has_record && self.is_tracked() { records } else { !self.at.shimmed };
        is_whole && fits && self.opened.first.is_none() && lock(&self.opened.early).is_none()
    }

    /// Takes the leg out of this process, and leaves a closed one in its place. Panics unless it [may go](Leg::may_go).
    pub(crate) fn hand_on(&mut self, d: Option<&Datapath>) -> HandedLeg {
        self.unclamp();
        self.relax();
        self.keep_alive(None);
        let generation = Some(self.connection(d).generation).filter(|n| *n != Connection::NONE && self.is_tracked());
        let Opened { hops, is_shown, .. } = self.opened;
        let Leg { socket, at, known, .. } = self.take();
        let socket = match socket {
            Socket::Live(socket) => socket.leave(),
            Socket::Idle(socket) | Socket::Parked(socket) => socket,
            Socket::Gone => panic!("it has a socket"),
        };
        let announced = known.announced.map(|announced| *announced);
        let (remote, local) = (known.remote, known.local);
        HandedLeg { about: LegAbout { remote, local, generation, at, announced, hops, is_shown }, socket }
    }

    /// Goes on with a leg of another process. `refusal`: why it can never be spliced.
    pub(crate) fn handed(HandedLeg { about, socket }: HandedLeg, refusal: Option<Refusal>) -> Leg {
        let LegAbout { remote, local, generation, at, announced, hops, is_shown } = about;
        let known = match generation {
            Some(generation) => Known::of(Connection { leg: Tuple { remote, local }, generation }),
            None => Known { lacks_record: true, ..Known::new(remote, local, refusal) },
        };
        let known = Known { announced: announced.map(Box::new), ..known };
        let opened = Opened { hops, is_shown, ..Opened::default() };
        Leg { at, opened, shaping: Shaping::new(true), ..Leg::with(Socket::Parked(socket), known) }
    }
}
