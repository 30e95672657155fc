//! Connection tracking (netfilter). Forwarded segments bypass it, so its entries expire, or date from before the
//! splice, and firewalls drop segments that they consider invalid. So when a connection comes back to sockets,
//! its entries are renewed, or created if they are missing (ctnetlink, <linux/netfilter/nfnetlink_conntrack.h>).
//!
//! | sockets | entry | action |
//! | --- | --- | --- |
//! | parked | exists | its numbers are right, because shims keep them: the timeout is set |
//! | new | exists | its numbers predate the splice: window checks are turned off (be_liberal), timeout and state are set |
//! | either | missing, may have expired | one is created, as conntrack does in mid-connection, with the right direction |
//! | either | missing, cannot have expired | none: the connection is not tracked (notrack) |
//!
//! Entries are changed in place, with their marks, labels and NAT, in both directions, regardless
//! of which host opened the connection. Entries outside of the default zone are not found.

use crate::{
    Pair, Side, Tuple,
    network::netlink::{Netlink, attributes, find, octets, request, row},
};
use nix::libc;
use std::{
    fs, io,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// File with the number of tracked connections in this network namespace. It is missing if conntrack is not loaded.
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";
const TIMEOUT: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
/// Timeouts in seconds, as the kernel's defaults: of an established connection; of a half-closed
/// one, the smallest (nf_conntrack_tcp_timeout_close_wait); of unacknowledged data; after a reset.
const DEFAULT_TIMEOUT: u32 = 5 * 24 * 3600;
const HALF_CLOSED: u32 = 60;
const UNACKNOWLEDGED: u32 = 300;
const CLOSED: u32 = 10;

/// NFNL_SUBSYS_CTNETLINK with IPCTNL_MSG_CT_NEW and IPCTNL_MSG_CT_GET.
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
/// Size of `struct nfgenmsg` in bytes.
const HEAD: usize = 4;
const NESTED: u16 = libc::NLA_F_NESTED as u16;

/// `enum ctattr_type`.
mod cta {
    pub const TUPLE_ORIG: u16 = 1;
    pub const TUPLE_REPLY: u16 = 2;
    pub const STATUS: u16 = 3;
    pub const PROTOINFO: u16 = 4;
    pub const TIMEOUT: u16 = 7;
}

/// `enum ip_conntrack_status`.
mod status {
    pub const EXPECTED: u32 = 1;
    pub const SEEN_REPLY: u32 = 1 << 1;
    pub const ASSURED: u32 = 1 << 2;
    pub const CONFIRMED: u32 = 1 << 3;
    pub const SRC_NAT: u32 = 1 << 4;
    pub const DST_NAT: u32 = 1 << 5;
    pub const DYING: u32 = 1 << 9;
    pub const FIXED_TIMEOUT: u32 = 1 << 10;
}

/// IP_CT_TCP_FLAG_* of one direction.
mod flag {
    pub const WINDOW_SCALE: u8 = 0x01;
    pub const SACK_PERM: u8 = 0x02;
    pub const BE_LIBERAL: u8 = 0x08;
    /// Shortens the timeout, and is cleared only by an acknowledgement within the window.
    pub const DATA_UNACKNOWLEDGED: u8 = 0x10;
    /// A RST below the highest acknowledgement is invalid, even with be_liberal. Clearing this flag forgets that acknowledgement.
    pub const MAXACK_SET: u8 = 0x20;
}

/// Counters of changes to conntrack entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConntrackCounts {
    /// Number of entries that were renewed or created.
    pub renewed: u64,
    /// Number of entries that the kernel refused to renew or create.
    pub failed: u64,
}

/// A connection as the firewall of this machine sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Connection {
    /// The host that opened it, and its destination.
    ends: [SocketAddr; 2],
    /// Their window scales as shifts, if known.
    scales: Option<[u8; 2]>,
    /// Whether conntrack has missed sequence numbers.
    moved: bool,
    /// Maximum time since conntrack has seen a segment. `None`: the connection is only to be reset.
    away: Option<Duration>,
}

impl Connection {
    /// `side`: that of the leg's host. A client opens the connection; to a server, the proxy opens it.
    fn new(leg: &Tuple, side: Side, scales: Option<(u8, u8)>, moved: bool, away: Option<Duration>) -> Connection {
        let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        let [remote, local] = [canonical(leg.remote), canonical(leg.local)];
        let (ends, scales) = match side {
            Side::Client => ([remote, local], scales.map(|(host, ours)| [host, ours])),
            Side::Server => ([local, remote], scales.map(|(host, ours)| [ours, host])),
        };
        Connection { ends, scales, moved, away }
    }
}

/// Returns the connections of a flow.
fn connections(legs: Pair<&Tuple>, scales: Pair<(u8, u8)>, away: Pair<Duration>, moved: bool) -> [Connection; 2] {
    Side::BOTH.map(|side| {
        let scales = Some(scales[side]).filter(|s| *s != (0, 0));
        Connection::new(legs[side], side, scales, moved, Some(away[side]))
    })
}

/// Renews entries. Asks the kernel nothing before a connection has been tracked in this network namespace.
#[derive(Debug, Default)]
pub(crate) struct Conntrack {
    in_use: AtomicBool,
    netlink: Mutex<Option<Netlink>>,
    renewed: AtomicU64,
    failed: AtomicU64,
}

impl Conntrack {
    /// Returns whether conntrack has been in use. It is checked at intervals,
    /// because conntrack may have forgotten all connections when it matters.
    pub fn is_used(&self) -> bool {
        if !self.in_use.load(Relaxed) && tracked().is_some_and(|n| n > 0) {
            self.in_use.store(true, Relaxed);
        }
        self.in_use.load(Relaxed)
    }

    /// Returns the counters so far.
    pub fn counts(&self) -> ConntrackCounts {
        ConntrackCounts { renewed: self.renewed.load(Relaxed), failed: self.failed.load(Relaxed) }
    }

    /// Renews entries before hosts are reset, so that their answers pass even though conntrack has missed segments.
    pub fn renew_for_reset(&self, legs: &[&Tuple]) {
        let connection = |leg: &&Tuple| Connection::new(leg, Side::Client, None, true, None);
        self.renew(&legs.iter().map(connection).collect::<Vec<_>>());
    }

    /// Makes the entries of both legs established, for hosts that have shaken hands with each other through our addresses:
    /// conntrack has seen neither the client's SYN nor the server's answer. Does nothing if the server's leg is not tracked.
    pub fn open_flow(&self, legs: Pair<&Tuple>, scales: Pair<(u8, u8)>) {
        let [client, server] = connections(legs, scales, Pair::both(Duration::MAX), true);
        if self.is_used() && self.has(server.ends) {
            self.renew(&[client, server]);
        }
    }

    /// Returns whether conntrack has an entry for a connection.
    fn has(&self, ends: [SocketAddr; 2]) -> bool {
        Netlink::netfilter().and_then(|mut netlink| find_entry(&mut netlink, ends)).is_ok_and(|found| found.is_some())
    }

    /// Returns whether NAT changes the addresses or ports of a connection of this host. Its segments leave with the
    /// entry's original tuple, if this host has opened it, or else with the tuple of replies; either finds the entry.
    pub fn is_translated(&self, leg: &Tuple) -> bool {
        if !self.is_used() {
            return false;
        }
        let ends = Connection::new(leg, Side::Server, None, false, None).ends;
        let found = Netlink::netfilter().and_then(|mut netlink| find_entry(&mut netlink, ends));
        matches!(found, Ok(Some((status, _))) if status & (status::SRC_NAT | status::DST_NAT) != 0)
    }

    /// Renews the entries of both legs. `scales`: for each leg the host's and ours. `away`: maximum
    /// time since conntrack has seen a segment. `moved`: whether it has missed sequence numbers.
    pub fn renew_flow(&self, legs: Pair<&Tuple>, scales: Pair<(u8, u8)>, away: Pair<Duration>, moved: bool) {
        let both = connections(legs, scales, away, moved);
        // for the firewall this is one connection if both legs have the hosts' addresses
        self.renew(if both[0].ends == both[1].ends { &both[..1] } else { &both });
    }

    fn renew(&self, connections: &[Connection]) {
        if !self.is_used() {
            return;
        }
        let mut netlink = self.netlink.lock().expect("no panic under this lock");
        for c in connections {
            let renewed = match &mut *netlink {
                Some(open) => renew(open, c),
                none => Netlink::netfilter().and_then(|fresh| renew(none.insert(fresh), c)),
            };
            let Err(error) = renewed else {
                self.renewed.fetch_add(1, Relaxed);
                continue;
            };
            *netlink = None; // an answer may still be in it
            if self.failed.fetch_add(1, Relaxed) == 0 {
                tracing::warn!(
                    "conntrack cannot be told of a connection that was spliced and comes back ({error}): a firewall may drop its \
                     segments as invalid. {}",
                    cure(&error)
                );
            }
        }
    }
}

/// Returns what to do about an error.
fn cure(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::ENOSPC) => "Its table is full: raise net.netfilter.nf_conntrack_max",
        Some(libc::EPERM) => "That needs CAP_NET_ADMIN in the user namespace that owns this network namespace",
        _ => {
            "Load nf_conntrack_netlink (CONFIG_NF_CT_NETLINK), or accept segments of the proxy's ports whatever their state"
        }
    }
}

/// Returns the number of tracked connections in this network namespace. `None`: conntrack is not loaded, or /proc is not mounted.
fn tracked() -> Option<u64> {
    fs::read_to_string(COUNT).ok()?.trim().parse().ok()
}

/// Returns the number of tracked connections if this network namespace tracks any. An error means that entries cannot be renewed.
pub fn conntrack() -> io::Result<Option<u64>> {
    let Some(tracked) = tracked().filter(|n| *n > 0) else { return Ok(None) };
    let nobody = SocketAddr::from(([127, 0, 0, 1], 0));
    find_entry(&mut Netlink::netfilter()?, [nobody; 2]).map(|_| Some(tracked))
}

/// Returns `struct nfgenmsg`: the family, NFNETLINK_V0, no resource number.
fn head(ends: [SocketAddr; 2]) -> [u8; HEAD] {
    [octets(ends[0].ip()).1, 0, 0, 0]
}

/// `enum ctattr_tuple`.
fn tuple([from, to]: [SocketAddr; 2]) -> Vec<u8> {
    const IP: u16 = 1;
    const PROTO: u16 = 2;
    let first = if from.is_ipv4() { 1 } else { 3 }; // CTA_IP_V4_SRC, CTA_IP_V6_SRC; that of the other end is the next
    let (src, dst) = (octets(from.ip()).0, octets(to.ip()).0);
    let ports = [from, to].map(|end| end.port().to_be_bytes());
    let ip = row(&[(first, &src), (first + 1, &dst)]);
    let proto = row(&[(1, &[libc::IPPROTO_TCP as u8]), (2, &ports[0]), (3, &ports[1])]);
    row(&[(IP | NESTED, &ip), (PROTO | NESTED, &proto)])
}

/// Returns `enum ctattr_protoinfo_tcp`. Flags come with a mask of those to change.
fn protoinfo(scales: Option<[u8; 2]>, flags: u8, mask: u8) -> Vec<u8> {
    const ESTABLISHED: u8 = 3; // TCP_CONNTRACK_ESTABLISHED
    let (state, flags) = ([ESTABLISHED], [flags, mask]);
    let scales = scales.map(|s| s.map(|scale| [scale]));
    let mut all: Vec<(u16, &[u8])> = vec![(1, &state)];
    if let Some([opener, other]) = &scales {
        all.extend([(2, &opener[..]), (3, &other[..])]);
    }
    all.extend([(4, &flags[..]), (5, &flags[..])]);
    row(&[(1 | NESTED, &row(&all))])
}

/// Returns the status of an entry, and the seconds until it expires.
fn find_entry(netlink: &mut Netlink, ends: [SocketAddr; 2]) -> io::Result<Option<(u32, u32)>> {
    let ask = request(GET, 0, &head(ends), &[(cta::TUPLE_ORIG | NESTED, &tuple(ends))]);
    let body = match netlink.ask(&ask) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        answer => answer?,
    };
    let all = attributes(body.get(HEAD..).unwrap_or_default());
    let number = |kind| find(&all, kind).and_then(|v| v.first_chunk()).map_or(0, |b| u32::from_be_bytes(*b));
    Ok(Some((number(cta::STATUS), number(cta::TIMEOUT))))
}

fn renew(netlink: &mut Netlink, c: &Connection) -> io::Result<()> {
    let timeout = fs::read_to_string(TIMEOUT).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(DEFAULT_TIMEOUT);
    if let Some((status, left)) = find_entry(netlink, c.ends)? {
        match change(netlink, c, status, timeout.max(left)) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {} // expired just now
            changed => return changed,
        }
        return make(netlink, c, timeout);
    }
    match lacking(c.away, timeout) {
        Some(timeout) => make(netlink, c, timeout),
        None => Ok(()),
    }
}

/// Returns the timeout of an entry to be created where there is none, in seconds. `None`: it
/// cannot have expired. Entries of untracked connections would stay until they expire, and could
/// fill the table; the next segment of a tracked connection gives its entry the usual timeout.
fn lacking(away: Option<Duration>, established: u32) -> Option<u32> {
    let Some(away) = away.map(|a| a.as_secs()) else { return Some(CLOSED) };
    match u64::from(established) {
        e if away >= e => Some(established),
        _ if away >= u64::from(HALF_CLOSED) => Some(established.min(UNACKNOWLEDGED)),
        _ => None,
    }
}

fn change(netlink: &mut Netlink, c: &Connection, found: u32, timeout: u32) -> io::Result<()> {
    // no bit may be cleared, and EXPECTED, CONFIRMED and DYING must not be set here
    let status = found & (status::EXPECTED | status::CONFIRMED | status::DYING) | status::SEEN_REPLY | status::ASSURED;
    let (status, timeout, tuple) = (status.to_be_bytes(), timeout.to_be_bytes(), tuple(c.ends));
    let forgotten = flag::DATA_UNACKNOWLEDGED | flag::MAXACK_SET;
    let info = protoinfo(None, flag::BE_LIBERAL, flag::BE_LIBERAL | forgotten);
    let mut all: Vec<(u16, &[u8])> = vec![(cta::TUPLE_ORIG | NESTED, &tuple), (cta::STATUS, &status)];
    if found & status::FIXED_TIMEOUT == 0 {
        all.push((cta::TIMEOUT, &timeout));
    }
    if c.moved {
        all.push((cta::PROTOINFO | NESTED, &info));
    }
    netlink.ask(&request(NEW, libc::NLM_F_ACK, &head(c.ends), &all)).map(drop)
}

/// Creates an entry. It takes windows from the next segments; scales
/// make them right, and be_liberal tolerates segments in flight.
fn make(netlink: &mut Netlink, c: &Connection, timeout: u32) -> io::Result<()> {
    let [opener, other] = c.ends;
    let status = status::CONFIRMED | status::SEEN_REPLY | status::ASSURED;
    let scaled = if c.scales.is_some() { flag::WINDOW_SCALE } else { 0 };
    let flags = flag::SACK_PERM | flag::BE_LIBERAL | scaled;
    let all: [(u16, &[u8]); 5] = [
        (cta::TUPLE_ORIG | NESTED, &tuple([opener, other])),
        (cta::TUPLE_REPLY | NESTED, &tuple([other, opener])),
        (cta::STATUS, &status.to_be_bytes()),
        (cta::TIMEOUT, &timeout.to_be_bytes()),
        (cta::PROTOINFO | NESTED, &protoinfo(c.scales, flags, flags)),
    ];
    netlink.ask(&request(NEW, libc::NLM_F_CREATE | libc::NLM_F_ACK, &head(c.ends), &all)).map(drop)
}

#[test]
fn a_transparent_connection_is_one() {
    let end = |n: u8, port| SocketAddr::from(([10, 0, 0, n], port));
    let [client, own, ours, server] = [end(1, 40000), end(2, 80), end(2, 10240), end(3, 80)];
    let leg = |remote, local| Tuple { remote, local };
    let scales = Some((7, 9));
    let ends = |t, side| {
        let c = Connection::new(&t, side, scales, true, None);
        (c.ends, c.scales)
    };
    assert_eq!(ends(leg(client, own), Side::Client), ([client, own], Some([7, 9])));
    assert_eq!(ends(leg(server, ours), Side::Server), ([ours, server], Some([9, 7])));
    assert_eq!(ends(leg(client, server), Side::Client).0, ends(leg(server, client), Side::Server).0);
}

#[test]
fn what_is_not_tracked_gets_no_entry() {
    let away = |seconds| Some(Duration::from_secs(seconds));
    let day = 24 * 3600;
    for (seconds, established, made) in [
        (59, 5 * day, None),
        (61, 5 * day, Some(UNACKNOWLEDGED)),
        (6 * u64::from(day), 5 * day, Some(5 * day)),
        (3, 2, Some(2)),
        (1, 2, None),
        (61, 100, Some(100)),
    ] {
        assert_eq!(lacking(away(seconds), established), made, "{seconds} s of {established}");
    }
    assert_eq!(lacking(None, 5 * day), Some(CLOSED), "the segment is a reset");
}
