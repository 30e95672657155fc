//! The proxy in its network, with enough addresses for a million connections.

use super::{
    super::{
        Result,
        network::{Packets, lab},
        variant::Variant,
        venue::{OURS, Venue as Common},
    },
    FEW,
};
use longsplice::Ask;
use longsplice_datapath::map_size;
use longsplice_engine::FlowState;
use longsplice_lab::{Family, process::wait_for, topology};
use std::{
    fmt::Write,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

/// Ports used per client address.
pub const PER_CLIENT: usize = 50_000;
/// Connections to one port of the server, from all source addresses: fewer than these have ports.
pub const PER_SERVER: usize = 200_000;
const SOURCES: u8 = 4;
/// First port of listeners and servers.
const PORT: u16 = 7000;
/// Time limit for waits that involve a list of a million flows.
const LONG: Duration = Duration::from_secs(120);

/// An otherwise unused client address in the lab's network.
pub fn client_address(i: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 1, 100 + i as u8).into()
}

fn source_address(i: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 2, 100 + i).into()
}

/// Address of listener and server number `i`.
pub fn front(i: usize) -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT + i as u16)
}

pub fn server(i: usize) -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT + i as u16)
}

/// The proxy in its network. Its ends are the number of flows that fit in its tables.
pub type Venue = Common<usize>;

impl Venue {
    pub fn for_connections(connections: usize) -> Result<Venue> {
        let mut common = Common::new(Variant::Released, lab(Packets::Large, false)?)?;
        let forwarder = common.lab.forwarder.clone();
        for i in 0..connections.div_ceil(PER_CLIENT) {
            common.lab.client.execute("ip", &["addr", "add", &format!("{}/24", client_address(i)), "dev", "c0"])?;
        }
        for i in 0..SOURCES {
            let address = format!("{}/24", source_address(i));
            forwarder.execute("ip", &["addr", "add", &address, "dev", common.lab.server_device()])?;
        }
        let room = connections + connections / 20 + FEW;
        let arguments = ["--splice", "at-once", "--max-flows", &room.to_string()];
        common.longsplice(&forwarder, OURS, &configuration(connections), &arguments)?;
        Ok(common.with(room))
    }

    /// Waits until all flows are released.
    pub fn wait_released(&self) -> Result<()> {
        let mut control = self.control(OURS)?;
        let mut one = |state| -> Result<Option<String>> {
            let answer = control.ask(Ask::Ls { after: 0, limit: Some(1), state: Some(state) })?;
            Ok(answer.get("flows").and_then(|f| f.get(0)).map(ToString::to_string))
        };
        let mut last = None;
        let released = wait_for(LONG, || {
            for state in [FlowState::Copying, FlowState::Draining, FlowState::Spliced] {
                match one(state) {
                    Ok(None) => {}
                    Ok(flow) => {
                        last = flow;
                        return None;
                    }
                    Err(e) => return Some(Err(e)),
                }
            }
            Some(Ok(()))
        });
        released.unwrap_or_else(|| Err(format!("a flow was not released: {}", last.unwrap_or_default()).into()))
    }

    /// Bytes of all pinned maps, as accounted for by the kernel.
    pub fn tables(&self) -> Result<u64> {
        // pins that are not maps are links, which take next to nothing
        fs::read_dir(self.pinned())?.map(|entry| Ok(map_size(&entry?.path()).map_or(0, |size| size.bytes))).sum()
    }
}

fn configuration(connections: usize) -> String {
    let sources: Vec<String> = (0..SOURCES).map(|i| format!("\"{}\"", source_address(i))).collect();
    let mut text = format!("source_ports = \"1024-65535\"\nsource = [{}]\n", sources.join(", "));
    for i in 0..connections.div_ceil(PER_SERVER) {
        let _ = write!(
            text,
            "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\npolicy = {{ release_after = 0.001 }}\n\
             limits = {{ connections_per_client = {connections} }}\n",
            front(i),
            server(i)
        );
    }
    text
}
