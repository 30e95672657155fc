//! How the connection of a leg was opened.

use super::Leg;
use std::{fmt::Debug, io, pin::Pin, sync::Mutex, time::Duration};

/// How the connection of a leg was opened. The default is an ordinary handshake.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    /// How many more proxies may intercept the connection to the server, if the client has asked for that (TPOT).
    pub hops: Option<u8>,
    /// Servers are shown the client's address instead of ours.
    pub is_shown: bool,
    /// Of a connection to a server: the round-trip time of the client on whose behalf it was opened. `None`: not measured.
    pub client_rtt: Option<Duration>,
    /// The connection to the client's destination, if it was opened on the client's SYN.
    pub early: Mutex<Option<Box<dyn EarlyConnection>>>,
    /// Holds back the first data of both hosts; see [`EndToEndListener::hold_first_data`](crate::EndToEndListener).
    pub first: Option<Box<dyn HeldData>>,
}

/// A connection to a server that was opened on the client's SYN.
pub(crate) trait EarlyConnection: Debug + Send {
    /// Waits until the server has answered. Registers the socket with the current runtime.
    fn connected(self: Box<Self>) -> Pin<Box<dyn Future<Output = io::Result<Leg>> + Send>>;
}

/// First data that the data path holds back, until this is dropped.
pub(crate) trait HeldData: Debug + Send + Sync {
    /// Lets it go. Calls after the first one do nothing.
    fn release(&self);
}
