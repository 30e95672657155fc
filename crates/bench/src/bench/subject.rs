//! The subjects of measurement: their units, and their base variants.

use super::{network::Packets, variant::Variant};
use crate::cell::Cell;
use serde::{Deserialize, Serialize};

/// A row of a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Subject {
    /// Cost of a segment with so many bytes of payload, by round trips on one CPU.
    Segment { bytes: u64 },
    /// Throughput on one CPU with a receiver that acknowledges so many segments at once.
    Ratio { segments: u64 },
    /// Throughput.
    Bulk { packets: Packets, connections: u64 },
    /// Time from connecting to the end of an object.
    Response { bytes: u64, clients: u64 },
    /// Consecutive connections of several clients, with so many bytes to the client.
    Rate { bytes: u64 },
    /// Consecutive connections of one client on one CPU, to find the size from which splicing pays.
    Short { bytes: u64 },
    /// Requests through reverse proxies over persistent connections, with replies of so many bytes.
    Http { bytes: u64 },
    /// Requests of one client on one CPU, to find the size from which splicing a body pays.
    Body { bytes: u64 },
    /// Cost of a small packet, on one CPU. Flows are chosen at random for each packet.
    Flood { flows: u32 },
    /// Datagrams of so many bytes through SOCKS, with so many on the way, on one CPU.
    Datagrams { bytes: u64, window: u64 },
    /// Times of splices and of the ways back, in microseconds.
    Switch { connection: Connection },
    /// Memory of idle connections, in bytes per connection.
    Memory,
    /// A preallocated table of the data path.
    Table { map: Map },
    /// Simultaneous connections, spliced and released.
    Million { connections: u64 },
    /// A transfer over a path.
    Path(Cell),
    /// Memory of the forwarder's sockets while clients read slowly.
    Readers,
    /// A transfer that is unspliced half-way, and one that is not.
    Unsplice(Cell),
}

/// The state of a connection that is switched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Connection {
    /// No data flows; an unsplice returns to the parked sockets.
    Idle,
    /// The server sends at full speed.
    Busy,
    /// No data flows; the sockets are closed and recreated.
    Released,
}

/// A table of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Map {
    Paths4,
    Paths6,
    Legs,
}

/// A subject without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Segment,
    Ratio,
    Bulk,
    Response,
    Rate,
    Short,
    Http,
    Body,
    Flood,
    Datagrams,
    Switch,
    Memory,
    Table,
    Million,
    Path,
    Readers,
    Unsplice,
}

impl Kind {
    /// Title of its tables before the label of a row, head of their first column, the unit of values, and their digits.
    fn about(self) -> (&'static str, &'static str, &'static str, usize) {
        match self {
            Kind::Segment => ("segments of", "variant", "us", 1),
            Kind::Ratio => ("data to acknowledgements", "ratio", "MB/s", 0),
            Kind::Bulk => ("bulk, packets of", "packets", "Gbit/s", 1),
            Kind::Response => ("response,", "object", "ms", 2),
            Kind::Rate => ("connections of", "bytes", "per second", 0),
            Kind::Short => ("short transfers of", "bytes", "us", 0),
            Kind::Http => ("HTTP,", "reply", "per second", 0),
            Kind::Body => ("bodies of", "reply", "us", 0),
            Kind::Flood => ("flood over", "random among", "ns", 0),
            Kind::Datagrams => ("datagrams of", "variant", "us", 2),
            Kind::Switch => ("switching,", "connection", "us", 1),
            Kind::Memory => ("memory", "variant", "bytes", 0),
            Kind::Table => ("table", "table", "bytes", 0),
            Kind::Million => ("million,", "what", "", 0),
            Kind::Path => ("path", "path and object", "s", 3),
            Kind::Readers => ("slow readers", "variant", "bytes", 0),
            Kind::Unsplice => ("unsplice", "path and object", "s", 2),
        }
    }

    /// Head of the first column of its tables.
    pub fn first_column(self) -> &'static str {
        self.about().1
    }

    /// Whether its network has delays.
    fn is_far(self) -> bool {
        matches!(self, Kind::Path | Kind::Readers | Kind::Unsplice)
    }

    /// Its variants in the order of tables.
    pub fn variants(self) -> impl Iterator<Item = Variant> + Clone {
        // Those of both far networks begin with routing.
        let far: Vec<Variant> = Variant::WAN.into_iter().chain(Variant::TPOT.into_iter().skip(1)).collect();
        let all = if self.is_far() { far } else { Variant::all().collect() };
        all.into_iter()
    }

    /// Title of a variant in its tables.
    pub fn title(self, variant: Variant) -> &'static str {
        match variant {
            Variant::IpForward if self.is_far() => "routed",
            Variant::Copy if self.is_far() => "copied",
            Variant::Spliced if self.is_far() => "spliced at once",
            other => other.title(),
        }
    }
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
            Subject::Datagrams { .. } => Kind::Datagrams,
            Subject::Switch { .. } => Kind::Switch,
            Subject::Memory => Kind::Memory,
            Subject::Table { .. } => Kind::Table,
            Subject::Million { .. } => Kind::Million,
            Subject::Path(_) => Kind::Path,
            Subject::Readers => Kind::Readers,
            Subject::Unsplice(_) => Kind::Unsplice,
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
            Subject::Datagrams { bytes, window } => format!("{}, {window} on the way", plural(bytes, "byte")),
            Subject::Switch { connection: Connection::Idle } => "idle".to_owned(),
            Subject::Switch { connection: Connection::Busy } => "busy".to_owned(),
            Subject::Switch { connection: Connection::Released } => "idle, released".to_owned(),
            Subject::Table { map } => format!("{map:?}").to_lowercase(),
            Subject::Million { connections } => plural(connections, "connection"),
            Subject::Path(cell) | Subject::Unsplice(cell) => cell.label(),
            Subject::Memory | Subject::Readers => String::new(),
        }
    }

    /// Title of its table, with the head of its row.
    pub fn title(self) -> String {
        format!("{} {}", self.kind().about().0, self.label()).trim_end().to_owned()
    }

    /// Unit of its values.
    pub fn unit(self) -> &'static str {
        self.kind().about().2
    }

    /// Formats a value with its significant digits.
    pub fn number(self, value: f64) -> String {
        let digits = if self.kind() == Kind::Http && value < 100.0 { 1 } else { self.kind().about().3 };
        format!("{value:.digits$}")
    }

    /// The variant that others are compared with, in the same round.
    pub fn base(self) -> Variant {
        match self.kind() {
            Kind::Short | Kind::Body => Variant::Copy,
            Kind::Datagrams => Variant::Dante,
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
