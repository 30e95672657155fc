//! What is known of the connection of a leg, even after its socket is gone.

use crate::refusal::Refusal;
use longsplice_datapath::{Connection, Tuple};
use std::{net::SocketAddr, sync::OnceLock};

/// What is known of the connection of a leg.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub remote: SocketAddr,
    pub local: SocketAddr,
    /// Source and destination announced by a proxy in front. Boxed, because most legs have none.
    pub announced: Option<Box<(SocketAddr, SocketAddr)>>,
    /// Tells the connection from others with the same addresses.
    pub generation: OnceLock<u32>,
    /// Why the leg can never be spliced: the data path does not track it.
    pub refusal: OnceLock<Refusal>,
    /// The data path does not know the connection until it adopts it.
    pub lacks_record: bool,
    /// The engine has not made its socket, and the kernel may give its port to another one once it is closed.
    pub adopted: bool,
}

impl Known {
    pub fn new(remote: SocketAddr, local: SocketAddr, refusal: Option<Refusal>) -> Known {
        let refusal = refusal.map(OnceLock::from).unwrap_or_default();
        Known {
            remote,
            local,
            announced: None,
            generation: OnceLock::new(),
            refusal,
            lacks_record: false,
            adopted: false,
        }
    }

    /// That of a connection which the data path has named.
    pub fn of(Connection { leg, generation }: Connection) -> Known {
        Known { generation: generation.into(), ..Known::new(leg.remote, leg.local, None) }
    }

    /// The connection as the data path knows it.
    pub fn tuple(&self) -> Tuple {
        Tuple { remote: self.remote, local: self.local }
    }
}
