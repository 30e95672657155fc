//! Segments that no host has sent, like those of an attacker who
//! knows the sequence numbers, or of a link that corrupts bytes.

use crate::packet::{ETHERNET, Packet, flag};
use longsplice_engine::Splicer;
use longsplice_lab::{Family, Lab, Namespace, process::wait_for};
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, bind, send, socket},
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{net::SocketAddr, os::fd::AsRawFd, time::Duration};

/// Payload of forged segments, in place of the server's data.
pub const EVIL: [u8; 1200] = [0xee; 1200];

fn link(name: &str) -> LinkAddr {
    let all = nix::ifaddrs::getifaddrs().expect("interfaces");
    let found = all.filter(|i| i.interface_name == name).find_map(|i| i.address?.as_link_addr().copied());
    found.unwrap_or_else(|| panic!("{name} is an interface"))
}

/// Sends a frame by a packet socket. Waits while the queue of the receiving device is full, as it may be on a busy machine.
pub fn send_frame(by: &impl AsRawFd, frame: &[u8]) {
    let sent = || match send(by.as_raw_fd(), frame, MsgFlags::empty()) {
        Err(Errno::ENOBUFS) => None,
        sent => Some(sent),
    };
    assert_eq!(wait_for(Duration::from_secs(20), sent).expect("room in the queue"), Ok(frame.len()));
}

/// Sends [`EVIL`] with the address of `server` on the only connection to it, which is in forwarding mode: `beyond` bytes
/// after the last byte sent by the server. `right`: with a valid checksum.
pub fn forge(lab: &Lab, splicer: &Splicer, server: SocketAddr, beyond: u32, right: bool) {
    let datapath = splicer.datapath().expect("kernel path");
    let leg = datapath.legs().into_iter().map(|l| l.0).find(|t| t.remote == server).expect("a leg");
    let path = datapath.path(&leg).expect("a path");
    let there = lab.forwarder.run(|| link(lab.server_device())).addr().expect("an Ethernet address");
    let packet = Packet {
        dmac: there,
        seq: path.end.wrapping_add(beyond),
        ack: path.max_ack,
        flags: flag::ACK | flag::PSH,
        payload: EVIL.to_vec(),
        ..Packet::new(leg.remote, leg.local)
    };
    let mut frame = packet.frame();
    if !right {
        *frame.last_mut().expect("a payload") ^= 1;
    }
    lab.server.run(|| {
        let s = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).expect("socket");
        bind(s.as_raw_fd(), &link("s0")).expect("bind");
        send_frame(&s, &frame);
    });
}

/// Sends packets of a host that does not exist, in the client's network, or of others.
pub struct Nobody {
    socket: Socket,
    family: Family,
}

impl Nobody {
    /// Forges packets at the client.
    pub fn new(lab: &Lab, family: Family) -> Nobody {
        Nobody::at(&lab.client, family)
    }

    /// Forges packets at another host.
    pub fn at(host: &Namespace, family: Family) -> Nobody {
        let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
        let raw = || Socket::new(domain, Type::RAW, Some(Protocol::from(nix::libc::IPPROTO_RAW)));
        Nobody { socket: host.run(raw).expect("socket"), family }
    }

    /// The forged source address.
    pub fn address(&self, port: u16) -> SocketAddr {
        let host =
            if self.family == Family::V4 { [10, 77, 1, 99].into() } else { [0xfd77, 1, 0, 0, 0, 0, 0, 99].into() };
        SocketAddr::new(host, port)
    }

    /// Sends a SYN.
    pub fn asks(&self, port: u16, to: SocketAddr) {
        self.asks_with(port, to, Vec::new());
    }

    /// Sends a SYN with TCP options.
    pub fn asks_with(&self, port: u16, to: SocketAddr, options: Vec<u8>) {
        self.sends(&Packet { flags: flag::SYN, options, ..Packet::new(self.address(port), to) });
    }

    /// Sends a packet, which may have any source.
    pub fn sends(&self, p: &Packet) {
        // for a raw socket, the port of an address is a protocol number
        self.socket.send_to(&p.frame()[ETHERNET..], &SocketAddr::new(p.to.ip(), 0).into()).expect("send");
    }
}
