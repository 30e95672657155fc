//! [`Parked`], what is kept of a leg while its flow is forwarded.

use super::{Leg, known::Known, shaping::Shaping, socket::Socket};
use crate::{core::Position, taps::Tap};
use longsplice_datapath::{Connection, received};
use std::os::fd::OwnedFd;

/// Segments that arrived at a parked socket instead of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strays {
    None,
    /// Segments that are not acknowledged: the host will send them again.
    Held,
    /// Segments that are acknowledged: the host will not send them again.
    Taken,
}

/// A leg while its flow is forwarded: what cannot be found elsewhere. Addresses, including announced ones, are stored in the flow.
#[derive(Debug)]
pub(crate) struct Parked {
    socket: Option<OwnedFd>,
    pub at: Position,
    delays: bool,
    tap: Option<Tap>,
}

impl Parked {
    /// Reduces a parked leg.
    pub fn new(leg: Leg) -> Parked {
        let Leg { socket, at, shaping, tap, .. } = leg;
        let socket = if let Socket::Parked(s) = socket { Some(s) } else { None };
        Parked { socket, at, delays: shaping.delays(), tap }
    }

    /// A leg that an earlier process had, whose socket is gone.
    pub fn gone(at: Position) -> Parked {
        Parked { socket: None, at, delays: false, tap: None }
    }

    /// Makes a leg again, without announced addresses.
    pub fn leg(self, connection: Connection) -> Leg {
        let Parked { socket, at, delays, tap } = self;
        let socket = socket.map_or(Socket::Gone, Socket::Parked);
        Leg { at, shaping: Shaping::new(delays), tap, ..Leg::with(socket, Known::of(connection)) }
    }

    /// Returns what has arrived at the parked socket, whose receive position was `stood`. `None` if it was released.
    pub fn strays(&self, stood: u32) -> Option<Strays> {
        let found = received(self.socket.as_ref()?);
        Some(match found {
            Ok((at, false)) if at == stood => Strays::None,
            Ok((at, true)) if at == stood => Strays::Held,
            _ => Strays::Taken,
        })
    }

    pub fn is_tapped(&self) -> bool {
        self.tap.is_some()
    }

    /// Closes the socket without sending anything to the host: a parked socket is in repair mode.
    pub fn close_silently(&mut self) {
        self.socket = None;
    }
}
