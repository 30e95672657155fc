//! What the server has done so far, counted by name.

use crate::{access::Denied, cache::CacheValues, fault::Fault};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters, live.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct CounterValues {
            $($(#[$doc])* pub $name: u64,)*
            /// Connections now.
            pub live: u64,
            /// Connections of others that were given up half open: there were too many, or no answer came.
            pub given_up: u64,
            /// Connections of others that were passed on as by a router: there were too many half open.
            pub untracked: u64,
            /// Records of the data path that were removed, since the kernel had no socket of their connections.
            pub swept: u64,
            /// Next hops of spliced connections that were written anew, since something has changed in the network.
            pub path_hops: u64,
            /// Directions of spliced connections that were moved to another next hop one by one.
            pub path_flows: u64,
            /// Directions of spliced connections without a way, when it was looked last.
            pub path_stranded: u64,
            /// Entries of conntrack that were renewed or made, since connections have come back to sockets.
            pub conntrack_renewed: u64,
            /// Those that the kernel has refused to.
            pub conntrack_failed: u64,
            /// Lines of the access log that were lost.
            pub log_lines_dropped: u64,
            /// Bytes that taps have given to their files.
            pub tap_bytes: u64,
            /// Bytes that passed taps and are known to be missing.
            pub tap_gap_bytes: u64,
            /// Bytes of taps that came again and were not the same, or could not be compared.
            pub tap_doubt_bytes: u64,
            /// Times that the disk has refused bytes of taps, which are missing then, too.
            pub tap_errors: u64,
            /// Caches of HTTP, all together.
            #[serde(flatten)]
            pub cache: CacheValues,
        }

        impl Counters {
            /// Those that are counted here.
            pub(crate) fn values(&self) -> CounterValues {
                CounterValues { $($name: self.$name.load(Relaxed),)* ..CounterValues::default() }
            }
        }
    };
}

counters! {
    /// Connections accepted.
    accepted,
    /// Of these, handed to the relay.
    relayed,
    /// Closed at once, because there were too many.
    over_limit,
    /// Forbidden by the rules.
    denied,
    /// No request, or none that can be served.
    bad_requests,
    /// Wrong password, or none.
    auth_failed,
    /// No connection to the target.
    unreachable,
    /// HTTP: a server's reply that cannot be passed on.
    bad_replies,
    /// HTTP: requests, CONNECT included.
    requests,
    /// HTTP: replies that were passed on to their end, by copying.
    replies_copied,
    /// HTTP: the same, of which bytes were spliced.
    replies_spliced,
    /// HTTP: replies that the filter has denied, with 403 or, in the middle, by a reset.
    replies_denied,
    /// HTTP: replies that would have been spliced, and were copied to their end for the filter to read.
    replies_filtered,
    /// HTTP: requests that an open connection to the server was used for again.
    reused,
    /// No route of the listener for what was asked for: requests of HTTP, connections of TLS.
    no_route,
    /// HTTP: requests for which no server of the pool was left.
    no_server,
    /// HTTP: requests that went to another server, because one had failed.
    retries,
    /// HTTP: servers of pools that were taken out for failed requests, or that checks have found down.
    servers_down,
    /// HTTP: servers of pools that came back.
    servers_up,
    /// A time limit passed.
    timeouts,
    /// accept(2) failed for want of descriptors or memory.
    accept_errors,
}

/// What became of the flows of one listener: connections, counted when it is decided, and requests of HTTP, at their end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListenerValues {
    /// Its address.
    pub listen: SocketAddr,
    /// What it speaks.
    pub protocol: &'static str,
    /// Flows that were spliced, each once.
    pub spliced: u64,
    /// How often one was not, by the label of the refusal.
    pub refused: BTreeMap<&'static str, u64>,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    pub(crate) fn fault(&self, fault: &Fault) {
        Counters::add(match fault {
            Fault::BadRequest(_) => &self.bad_requests,
            Fault::AuthFailed { .. } => &self.auth_failed,
            Fault::Denied(Denied::Reply(_)) => &self.replies_denied,
            Fault::Denied(_) => &self.denied,
            Fault::NoRoute(_) => &self.no_route,
            Fault::NoAddress(_) | Fault::Unreachable(_) => &self.unreachable,
            Fault::BadReply(_) => &self.bad_replies,
            Fault::NoServer(_) => &self.no_server,
            Fault::Timeout(_) => &self.timeouts,
        });
    }
}
