//! Counters of the server.

pub mod cache;

use crate::{access::Denied, fault::Fault, totals::Totals};
use cache::CacheValues;
use nix::unistd::{SysconfVar, sysconf};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*; $($(#[doc = $more:literal])* $kind:ident $other:ident,)*) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])* pub $name: AtomicU64,)*
        }

        /// A snapshot of the counters.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct CounterValues {
            $($(#[doc = $doc])* pub $name: u64,)*
            $($(#[doc = $more])* pub $other: u64,)*
            /// HTTP caches, all together.
            #[serde(flatten)]
            pub cache: CacheValues,
        }

        impl Counters {
            /// Returns the counters of this struct; the others are zero.
            pub(crate) fn values(&self) -> CounterValues {
                CounterValues { $($name: self.$name.load(Relaxed),)* ..CounterValues::default() }
            }
        }

        impl CounterValues {
            /// Returns all counters with their names and meanings.
            pub fn metrics(&self) -> Vec<Metric> {
                let own = [$((Kind::Counter, stringify!($name), concat!($($doc),*), self.$name),)*];
                let others = [$((Kind::$kind, stringify!($other), concat!($($more),*), self.$other),)*];
                let all = own.into_iter().chain(others).chain(self.cache.metrics());
                all.map(|(kind, name, help, value)| Metric { kind, name, help: help.trim_start(), value }).collect()
            }
        }
    };
}

/// How a number changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It grows until the program ends.
    Counter,
    /// It is a state.
    Gauge,
}

/// A number that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// How it changes.
    pub kind: Kind,
    /// The name, as `longsplice counters --json` has it.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
    /// The number.
    pub value: u64,
}

counters! {
    /// Connections accepted.
    accepted,
    /// Connections handed to the relay.
    relayed,
    /// Connections closed at once because a limit was reached.
    over_limit,
    /// Requests denied by the rules.
    denied,
    /// Live connections that were reset because new rules or users forbid them.
    forbidden,
    /// Connections without a request, or with a request that cannot be served.
    bad_requests,
    /// Attempts with a wrong password, or without one.
    auth_failed,
    /// Requests without a connection to their target.
    unreachable,
    /// HTTP: replies of servers that cannot be forwarded.
    bad_replies,
    /// HTTP: requests, CONNECT included.
    requests,
    /// HTTP: replies that were copied to their end.
    replies_copied,
    /// HTTP: replies that were sent to their end, with spliced bytes.
    replies_spliced,
    /// HTTP: replies denied by the filter, with 403 or, in the middle, with a reset.
    replies_denied,
    /// HTTP: replies that would have been spliced, and were copied to their end because the filter had to read them.
    replies_filtered,
    /// Replies whose bodies were changed.
    replies_changed,
    /// Replies that were passed on although the filter had to read them, and could not.
    replies_unread,
    /// Requests whose bodies were changed.
    requests_changed,
    /// Requests that were passed on although the filter had to read their bodies, and could not.
    requests_unread,
    /// Bodies whose codings could not be taken off, because they are damaged or cut off.
    bodies_damaged,
    /// Bodies that have become too long without their codings.
    bodies_too_long,
    /// Bodies that were refused or broken off because others had all memory for codings.
    bodies_without_memory,
    /// HTTP: requests that reused an open connection to the server.
    reused,
    /// Requests of HTTP and connections of TLS that no route of the listener matched.
    no_route,
    /// Connections and requests for which the pool had no server left.
    no_server,
    /// Connections and requests that went to another server of the pool because one had failed.
    retries,
    /// Servers of pools that were taken out after failed connections or requests, or found down by checks.
    servers_down,
    /// Servers of pools that came back.
    servers_up,
    /// Time limits that passed.
    timeouts,
    /// Triggers of listeners that were pulled.
    triggered,
    /// Of these, the ones whose program did not say what to do, or whose tap could not begin.
    trigger_failures,
    /// Times that transparent listeners began to leave SYNs alone because the tables were nearly full.
    left_alone,
    /// Failures of accept(2) for lack of descriptors or memory.
    accept_errors,
    /// SOCKS: connections accepted for BIND.
    bound,
    /// SOCKS: connections to sockets of BIND that were not from the peer.
    bind_strangers,
    /// SOCKS: associations of UDP.
    associations,
    /// SOCKS: datagrams sent to destinations.
    udp_up,
    /// SOCKS: datagrams sent to clients.
    udp_down,
    /// SOCKS: datagrams to an association from others than its client.
    udp_strangers,
    /// SOCKS: datagrams to an association from where nothing was sent to.
    udp_unasked,
    /// SOCKS: datagrams of clients that were fragments.
    udp_fragments,
    /// SOCKS: datagrams of clients without a header that can be read.
    udp_malformed,
    /// SOCKS: datagrams of clients that the rules denied.
    udp_denied,
    /// SOCKS: datagrams of clients to names without an address.
    udp_unreachable,
    /// SOCKS: datagrams for which there was no room, here or in the kernel, or no route.
    udp_dropped,
    /// Reloads of the configuration.
    reloads,
    /// Reloads that were refused, and have changed nothing.
    reloads_refused,
    ;
    /// Connections that exist now.
    Gauge live,
    /// Times that a flow or a message was spliced.
    Counter flows_spliced,
    /// Times that one was taken back, or came back when it ended.
    Counter flows_taken_back,
    /// Bytes of memory that the kernel's TCP uses for queues, of all sockets of this machine. 0: unknown.
    Gauge tcp_memory,
    /// Handshakes between hosts that were given up: there were too many, or no answer arrived.
    Counter given_up,
    /// Clients of plugs with `handshake = "end-to-end"` whose SYN the proxy has answered itself.
    Counter handshakes_left,
    /// Transparent connections that were forwarded as by a router, because too many were half open.
    Counter untracked,
    /// Clients of transparent listeners that were reset because the tables had no room for their records.
    Counter unheard,
    /// Records that were removed from the data path because the kernel had no socket for their connections.
    Counter swept,
    /// Next hops of spliced connections that were updated after a change in the network.
    Counter path_hops,
    /// Directions of spliced connections that were moved to another next hop one by one.
    Counter path_flows,
    /// Directions of spliced connections without a route at the last check.
    Gauge path_stranded,
    /// Conntrack entries that were renewed or created because connections returned to sockets.
    Counter conntrack_renewed,
    /// Conntrack entries that the kernel refused to renew or create.
    Counter conntrack_failed,
    /// Connections that took the last known addresses of a name, because a look-up had failed or took too long.
    Counter names_stale,
    /// Lines of the access log that were lost.
    Counter log_lines_dropped,
    /// Bytes that taps have written to their files.
    Counter tap_bytes,
    /// Bytes that passed taps and are known to be missing in the files.
    Counter tap_gap_bytes,
    /// Bytes of taps that were retransmitted with different contents, or could not be compared.
    Counter tap_doubt_bytes,
    /// Write errors of tap files; the bytes are missing as well.
    Counter tap_errors,
}

/// Results of the flows of one listener: connections when it is decided whether they are spliced, HTTP requests at their end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListenerValues {
    /// Name of the listener.
    pub name: String,
    /// Address of the listener.
    pub listen: SocketAddr,
    /// Protocol of the listener.
    pub protocol: &'static str,
    /// Number of flows that were spliced, each counted once.
    pub spliced: u64,
    /// Number of flows that were not spliced, by the label of the refusal.
    pub refused: BTreeMap<&'static str, u64>,
    /// It accepts nobody, because an operator has said so.
    #[serde(rename = "paused")]
    pub is_paused: bool,
    /// Number of connections that exist now.
    pub live: u32,
    /// Number of connections that have begun. One that a limit has turned away has not.
    pub begun: u64,
    /// Limit of those that exist, in the configuration.
    pub max_connections: Option<u32>,
    /// What has ended.
    #[serde(flatten)]
    pub totals: Totals,
}

/// Returns the memory of all TCP sockets of this machine: what copied connections have in their queues, and more.
pub(crate) fn tcp_memory() -> Option<u64> {
    let sockstat = fs::read_to_string("/proc/net/sockstat").ok()?;
    let (_, pages) = sockstat.lines().find(|l| l.starts_with("TCP:"))?.split_once(" mem ")?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok()??;
    Some(pages.trim().parse::<u64>().ok()? * page as u64)
}

impl Counters {
    /// Counts one more.
    pub fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// Counts a connection or request that was not relayed.
    pub fn fault(&self, fault: &Fault) {
        Counters::add(match fault {
            Fault::BadRequest(_) => &self.bad_requests,
            Fault::AuthFailed { .. } => &self.auth_failed,
            Fault::Denied(Denied::Reply(_) | Denied::Unchanged(_)) => &self.replies_denied,
            Fault::Denied(_) => &self.denied,
            Fault::NoRoute(_) => &self.no_route,
            Fault::NoAddress(_) | Fault::Unreachable(_) => &self.unreachable,
            Fault::BadReply(_) => &self.bad_replies,
            Fault::NoServer(_) => &self.no_server,
            Fault::Timeout(_) => &self.timeouts,
            Fault::Limit(_) => &self.over_limit,
        });
    }
}
