//! Transparent connections (bpf/handshake.h): routing of segments for
//! addresses that are not ours to local sockets.

use crate::{
    Datapath, abi,
    handshakes::handshake::listens,
    names::MARK_TRANSPARENT,
    network::netlink::{Netlink, request},
};
use nix::libc;
use std::{
    io,
    net::{IpAddr, SocketAddr},
};

/// Routing table that leads marked packets to local sockets. Its number is unlikely to be in use.
const TABLE: u32 = 0x6c73;

/// The routing rules of one address family. While it lives, marked packets are routed to local sockets.
#[derive(Debug)]
pub struct TransparentRoutes {
    family: libc::c_int,
}

impl TransparentRoutes {
    /// Installs the routing rules. Those of an earlier process stay: connections would break without them. Needs CAP_NET_ADMIN.
    pub fn new(v6: bool) -> io::Result<TransparentRoutes> {
        let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        let transparent = TransparentRoutes { family }; // from here on, failures remove the rules
        enter(family)?;
        Ok(transparent)
    }

    /// Leaves them to another process.
    pub fn let_go(self) {
        std::mem::forget(self);
    }
}

impl Drop for TransparentRoutes {
    fn drop(&mut self) {
        if let Err(error) = leave(self.family) {
            tracing::warn!(%error, "cannot remove the routing rules for table {TABLE}: they stay");
        }
    }
}

/// Removes the routing rules that a dead process has left.
pub(crate) fn remove_rules() -> io::Result<()> {
    [libc::AF_INET, libc::AF_INET6].into_iter().try_for_each(leave)
}

/// Priority of the first of our three rules: before nearly all others, and unlikely to be in use.
const PRIORITY: u32 = 108;
const FRA_PRIORITY: u16 = 6;

/// Action and attributes of a rule (<linux/fib_rules.h>).
type Rule = (u8, Vec<(u16, Vec<u8>)>);

/// Returns the rules. Marked packets are looked up in our own table, in which everything is local.
/// Not so when the kernel looks up the route back to their source, or to that of local sockets,
/// which it does as if from the loopback device: with src_valid_mark, that route would be ours
/// too, and the packet would be dropped as forged. In this case the first rule skips the second.
fn rules() -> [Rule; 3] {
    const FRA_IIFNAME: u16 = 3;
    const FRA_GOTO: u16 = 4;
    const FRA_FWMARK: u16 = 10;
    const FRA_TABLE: u16 = 15;
    const FR_ACT_TO_TBL: u8 = 1;
    const FR_ACT_GOTO: u8 = 2;
    const FR_ACT_NOP: u8 = 3;
    let number = |kind: u16, value: u32| (kind, value.to_ne_bytes().to_vec());
    let (skip, target) = (number(FRA_GOTO, PRIORITY + 2), number(FRA_PRIORITY, PRIORITY + 2));
    let mark = || number(FRA_FWMARK, MARK_TRANSPARENT);
    [
        (FR_ACT_GOTO, vec![number(FRA_PRIORITY, PRIORITY), mark(), (FRA_IIFNAME, b"lo\0".to_vec()), skip]),
        (FR_ACT_TO_TBL, vec![number(FRA_PRIORITY, PRIORITY + 1), mark(), number(FRA_TABLE, TABLE)]),
        (FR_ACT_NOP, vec![target, mark()]),
    ]
}

fn rule(family: libc::c_int, action: u8) -> [u8; 12] {
    [family as u8, 0, 0, 0, 0, 0, 0, action, 0, 0, 0, 0]
}

/// Returns `struct rtmsg` and the attributes of the one route in our table.
fn local_route(family: libc::c_int) -> ([u8; 12], [(u16, Vec<u8>); 2]) {
    const LOOPBACK: u32 = 1; // in every network namespace
    let body = [family as u8, 0, 0, 0, 0, libc::RTPROT_STATIC, libc::RT_SCOPE_HOST, libc::RTN_LOCAL, 0, 0, 0, 0];
    (body, [(libc::RTA_OIF, LOOPBACK.to_ne_bytes().to_vec()), (libc::RTA_TABLE, TABLE.to_ne_bytes().to_vec())])
}

/// Adds the route first, and the rule that uses it last, unless they are there.
fn enter(family: libc::c_int) -> io::Result<()> {
    const NEW: libc::c_int = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let add = |kind, body: &[u8; 12], attributes: &[(u16, Vec<u8>)]| match ask(kind, NEW, body, attributes) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    };
    let (route, attributes) = local_route(family);
    add(libc::RTM_NEWROUTE, &route, &attributes)?;
    let [skip, look, target] = rules();
    [target, skip, look]
        .iter()
        .try_for_each(|(action, attributes)| add(libc::RTM_NEWRULE, &rule(family, *action), attributes))
}

/// Removes all rules, however many: an earlier version gave them no priority, and left one more with each start after a kill.
fn leave(family: libc::c_int) -> io::Result<()> {
    let until_none = |kind, body: &[u8; 12], attributes: &[(u16, Vec<u8>)]| {
        loop {
            match ask(kind, 0, body, attributes).map_err(|e| (e.raw_os_error(), e)) {
                Ok(_) => {}
                // none left, or no such address family
                Err((Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT | libc::EOPNOTSUPP), _)) => return Ok(()),
                Err((_, e)) => return Err(e),
            }
        }
    };
    let [skip, (look, mut by), target] = rules();
    by.retain(|(kind, _)| *kind != FRA_PRIORITY);
    for (action, attributes) in [skip, (look, by), target] {
        until_none(libc::RTM_DELRULE, &rule(family, action), &attributes)?;
    }
    let (route, attributes) = local_route(family);
    until_none(libc::RTM_DELROUTE, &route, &attributes)
}

/// Returns whether an address belongs to this machine, so that its own stack would answer. The kernel is asked each time, as
/// addresses come and go.
pub fn is_local(ip: IpAddr) -> io::Result<bool> {
    const TYPE: usize = 7; // rtm_type
    let (family, address) = match ip {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let body = [family as u8, 8 * address.len() as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    match ask(libc::RTM_GETROUTE, 0, &body, &[(libc::RTA_DST, address)]) {
        Ok(answer) => Ok(answer.get(TYPE) == Some(&libc::RTN_LOCAL)),
        // no route at all, or one of type unreachable, prohibit or blackhole
        Err(e) => match e.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL) => Ok(false),
            _ => Err(e),
        },
    }
}

/// Sends a request to rtnetlink. Returns the body of the answer.
fn ask(kind: u16, flags: libc::c_int, body: &[u8; 12], attributes: &[(u16, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let ack = if kind == libc::RTM_GETROUTE { 0 } else { libc::NLM_F_ACK };
    let attributes: Vec<_> = attributes.iter().map(|(kind, value)| (*kind, &value[..])).collect();
    Netlink::open(&[])?.ask(&request(kind, ack | flags, body, &attributes))
}

impl Datapath {
    /// Passes SYNs of transparent connections to this address (any address if it is unspecified)
    /// to [`Datapath::poll_handshakes`] instead of the stack, until [`Datapath::unlisten`]. `waits`:
    /// as for [`Datapath::listen_end_to_end`].
    pub fn listen_transparent(&self, addr: SocketAddr, waits: bool) -> io::Result<()> {
        self.maps.listen(addr, Some(listens(abi::listens::LISTENS_TRANSPARENT, waits)))
    }
}
