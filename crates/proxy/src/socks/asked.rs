//! What a client asks for, in either version of SOCKS.

use super::{socks4, socks5};
use crate::commands::Command;

/// A command that may be served, from either version of SOCKS. The last field of a look-up says whether a name is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Connect,
    Bind,
    UdpAssociate,
    Resolve { name: bool },
}

impl Asked {
    pub fn command(self) -> Command {
        match self {
            Asked::Connect => Command::Connect,
            Asked::Bind => Command::Bind,
            Asked::UdpAssociate => Command::UdpAssociate,
            Asked::Resolve { .. } => Command::Resolve,
        }
    }

    /// Of version 5. Tor's extensions have numbers of their own (socks-extensions.txt, 2 and 3).
    pub fn v5(command: socks5::Command) -> Option<Asked> {
        match command {
            socks5::Command::Connect => Some(Asked::Connect),
            socks5::Command::Bind => Some(Asked::Bind),
            socks5::Command::UdpAssociate => Some(Asked::UdpAssociate),
            socks5::Command::Other(0xf0) => Some(Asked::Resolve { name: false }),
            socks5::Command::Other(0xf1) => Some(Asked::Resolve { name: true }),
            socks5::Command::Other(_) => None,
        }
    }

    /// Of version 4, which can say no names.
    pub fn v4(command: socks4::Command) -> Option<Asked> {
        match command {
            socks4::Command::Connect => Some(Asked::Connect),
            socks4::Command::Bind => Some(Asked::Bind),
            socks4::Command::Other(0xf0) => Some(Asked::Resolve { name: false }),
            socks4::Command::Other(_) => None,
        }
    }
}
