//! The subjects of measurement: their units, and their base variants.

use super::{network::Packets, variant::Variant};
use serde::{Deserialize, Serialize};

/// A row of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Subject {
    /// Cost of a segment, by round trips on one CPU.
    Segment {
        /// Payload in bytes.
        bytes: u64,
    },
    /// Throughput on one CPU with a receiver that acknowledges several segments at once.
    Ratio {
        /// Intended number of segments per acknowledgement.
        segments: u64,
    },
    /// Throughput.
    Bulk {
        /// Packet size.
        packets: Packets,
        /// Number of simultaneous connections.
        connections: u64,
    },
    /// Time from connecting to the end of an object.
    Response {
        /// Size in bytes.
        bytes: u64,
        /// Number of simultaneous clients.
        clients: u64,
    },
    /// Consecutive connections of several clients.
    Rate {
        /// Bytes to the client per connection.
        bytes: u64,
    },
    /// Consecutive connections of one client on one CPU, to find the size from which splicing pays.
    Short {
        /// Bytes to the client per connection.
        bytes: u64,
    },
    /// Requests through reverse proxies over persistent connections.
    Http {
        /// Bytes per reply.
        bytes: u64,
    },
    /// Requests of one client on one CPU, to find the size from which splicing a body pays.
    Body {
        /// Bytes per reply.
        bytes: u64,
    },
    /// Cost of a small packet, on one CPU.
    Flood {
        /// Number of flows, which are chosen at random for each packet.
        flows: u32,
    },
}

/// A subject without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Subject::Segment`].
    Segment,
    /// [`Subject::Ratio`].
    Ratio,
    /// [`Subject::Bulk`].
    Bulk,
    /// [`Subject::Response`].
    Response,
    /// [`Subject::Rate`].
    Rate,
    /// [`Subject::Short`].
    Short,
    /// [`Subject::Http`].
    Http,
    /// [`Subject::Body`].
    Body,
    /// [`Subject::Flood`].
    Flood,
}

impl Subject {
    /// The subject without its parameters.
    pub fn kind(self) -> Kind {
        match self {
            Subject::Segment { .. } => Kind::Segment,
            Subject::Ratio { .. } => Kind::Ratio,
            Subject::Bulk { .. } => Kind::Bulk,
            Subject::Response { .. } => Kind::Response,
            Subject::Rate { .. } => Kind::Rate,
            Subject::Short { .. } => Kind::Short,
            Subject::Http { .. } => Kind::Http,
            Subject::Body { .. } => Kind::Body,
            Subject::Flood { .. } => Kind::Flood,
        }
    }

    /// Head of its row.
    pub fn label(self) -> String {
        match self {
            Subject::Segment { bytes } => plural(bytes, "byte"),
            Subject::Ratio { segments } => format!("{segments}:1"),
            Subject::Bulk { packets, connections } => {
                format!("{}, {}", packets.title(), plural(connections, "connection"))
            }
            Subject::Response { bytes, clients } => format!("{}, {}", size(bytes), plural(clients, "client")),
            Subject::Rate { bytes } | Subject::Short { bytes } | Subject::Http { bytes } | Subject::Body { bytes } => {
                size(bytes)
            }
            Subject::Flood { flows } => plural(flows.into(), "flow"),
        }
    }

    /// Title of its table, with the head of its row.
    pub fn title(self) -> String {
        let kind = match self.kind() {
            Kind::Segment => "segments of",
            Kind::Ratio => "data to acknowledgements",
            Kind::Bulk => "bulk, packets of",
            Kind::Response => "response,",
            Kind::Rate => "connections of",
            Kind::Short => "short transfers of",
            Kind::Http => "HTTP,",
            Kind::Body => "bodies of",
            Kind::Flood => "flood over",
        };
        format!("{kind} {}", self.label())
    }

    /// Unit of `Run::value`.
    pub fn unit(self) -> &'static str {
        match self.kind() {
            Kind::Segment | Kind::Short | Kind::Body => "us",
            Kind::Ratio => "MB/s",
            Kind::Bulk => "Gbit/s",
            Kind::Response => "ms",
            Kind::Rate | Kind::Http => "per second",
            Kind::Flood => "ns",
        }
    }

    /// Formats a value with its significant digits.
    pub fn number(self, value: f64) -> String {
        match self.kind() {
            Kind::Segment | Kind::Bulk => format!("{value:.1}"),
            Kind::Response => format!("{value:.2}"),
            Kind::Http if value < 100.0 => format!("{value:.1}"),
            Kind::Ratio | Kind::Rate | Kind::Short | Kind::Http | Kind::Body | Kind::Flood => format!("{value:.0}"),
        }
    }

    /// The variant that others are compared with, in the same round.
    pub fn base(self) -> Variant {
        match self.kind() {
            Kind::Short | Kind::Body => Variant::Copy,
            Kind::Http => Variant::Haproxy,
            _ => Variant::IpForward,
        }
    }
}

/// `1 byte`, `2 bytes`.
pub fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("{n} {what}") } else { format!("{n} {what}s") }
}

/// Formats a size, with units for powers of two.
fn size(bytes: u64) -> String {
    match bytes {
        n if n >= 1 << 20 && n % (1 << 20) == 0 => format!("{} MB", n >> 20),
        n if n >= 1 << 10 && n % (1 << 10) == 0 => format!("{} KB", n >> 10),
        n => plural(n, "byte"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named() {
        let bulk = Subject::Bulk { packets: Packets::Mtu, connections: 8 };
        assert_eq!(bulk.title(), "bulk, packets of 1500 bytes, 8 connections");
        let response = Subject::Response { bytes: 100 << 20, clients: 1 };
        assert_eq!(response.title(), "response, 100 MB, 1 client");
        assert_eq!(Subject::Flood { flows: 1000 }.title(), "flood over 1000 flows");
        assert_eq!([size(1), size(1448), size(16 << 10)], ["1 byte", "1448 bytes", "16 KB"]);
    }
}
