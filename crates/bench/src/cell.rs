//! The cells of `longsplice-bench wan` and `tpot`: what is transferred, over which path, and by whom.

use clap::ValueEnum;
use longsplice_lab::Family;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The longest round-trip time that can be chosen, in milliseconds.
const MAX_MS: u32 = 1000;
/// What `wan` compares, on the command line: in the order of its tables.
pub const SUBJECTS: [&str; 6] = ["routed", "copied", "once", "default", "end-to-end", "haproxy"];
/// The largest object that can be chosen.
const MAX_BYTES: u64 = 1_000_000_000;

/// Where the round-trip time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// At the client's link.
    Client,
    /// At the server's link.
    Server,
    /// Half at each.
    Both,
    /// A third at each, and at the link between two forwarders; `tpot` only.
    Thirds,
}

/// A round-trip time and its place: `c100` is 100 ms at the client's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distance {
    /// Where it is.
    pub place: Place,
    /// The round-trip time in milliseconds.
    pub ms: u32,
}

impl Distance {
    const fn new(place: Place, ms: u32) -> Distance {
        Distance { place, ms }
    }

    /// The shares of the client's link, of the server's, and of that between two forwarders.
    pub fn shares(self) -> [f64; 3] {
        match self.place {
            Place::Client => [1.0, 0.0, 0.0],
            Place::Server => [0.0, 1.0, 0.0],
            Place::Both => [0.5, 0.5, 0.0],
            Place::Thirds => [1.0 / 3.0; 3],
        }
    }
}

impl FromStr for Distance {
    type Err = String;

    fn from_str(text: &str) -> Result<Distance, String> {
        let place = match text.chars().next() {
            Some('c') => Place::Client,
            Some('s') => Place::Server,
            Some('b') => Place::Both,
            Some('t') => Place::Thirds,
            _ => return Err("begin with c (client), s (server), b (both) or t (thirds), as in c100".into()),
        };
        let ms = text[1..].parse().ok().filter(|ms| *ms <= MAX_MS);
        ms.map(|ms| Distance { place, ms }).ok_or_else(|| format!("write milliseconds up to {MAX_MS}, as in c100"))
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.place {
            Place::Client => 'c',
            Place::Server => 's',
            Place::Both => 'b',
            Place::Thirds => 't',
        };
        write!(f, "{place}{}", self.ms)
    }
}

/// A number of bytes: `100k` is 100,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'k')) => (&text[..at], 1000),
            Some((at, 'm')) => (&text[..at], 1_000_000),
            _ => (text, 1),
        };
        let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
        let bytes = bytes.filter(|n| (1..=MAX_BYTES).contains(n));
        bytes.map(Size).ok_or_else(|| "write bytes, as in 500, 10k or 1m, up to 1000m".to_owned())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n % 1_000_000 == 0 => write!(f, "{} MB", n / 1_000_000),
            n if n % 1000 == 0 => write!(f, "{} KB", n / 1000),
            n => write!(f, "{n} B"),
        }
    }
}

/// The congestion control of client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// Reno.
    Reno,
    /// BBR.
    Bbr,
    /// CUBIC.
    Cubic,
}

impl Congestion {
    /// Its name in the kernel.
    pub fn name(self) -> &'static str {
        match self {
            Congestion::Reno => "reno",
            Congestion::Bbr => "bbr",
            Congestion::Cubic => "cubic",
        }
    }

    /// The congestion control of the forwarder's sockets. It is set for the whole namespace,
    /// which the kernel does not allow for CUBIC.
    pub fn of_forwarder(self) -> &'static str {
        match self {
            Congestion::Cubic => Congestion::Reno.name(),
            other => other.name(),
        }
    }
}

/// What the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// A connection to one fixed target for each object.
    Plug,
    /// A SOCKS 5 connection for each object.
    Socks,
    /// HTTP requests over one connection that is warm.
    Http,
}

/// The direction of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The server sends it.
    Down,
    /// The client sends it.
    Up,
}

/// The IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    /// The lab's name for it.
    pub fn family(self) -> Family {
        match self {
            IpVersion::V4 => Family::V4,
            IpVersion::V6 => Family::V6,
        }
    }
}

/// One row: a transfer over a path.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The round-trip time.
    pub distance: Distance,
    /// The object.
    pub size: Size,
    /// The congestion control.
    pub congestion: Congestion,
    /// Percentage of packets lost, in both directions, at the links with the round-trip time.
    pub loss: f64,
    /// The protocol.
    pub protocol: Protocol,
    /// The direction.
    pub direction: Direction,
    /// The IP version.
    pub version: IpVersion,
}

impl Cell {
    /// The cell that others differ from: a reverse proxy's near server with BBR, and a far client.
    pub const BASE: Cell = Cell {
        distance: Distance::new(Place::Client, 100),
        size: Size(1_000_000),
        congestion: Congestion::Bbr,
        loss: 0.0,
        protocol: Protocol::Plug,
        direction: Direction::Down,
        version: IpVersion::V4,
    };

    /// Whether the receiver is the near host, or both are near. A splice then does no harm.
    pub fn is_towards_near_host(&self) -> bool {
        let sender = match self.direction {
            Direction::Down => Place::Server,
            Direction::Up => Place::Client,
        };
        self.distance.place == sender || self.distance.ms <= 2
    }

    /// Head of its row: what differs from a download by a plug over IPv4 without loss is said.
    pub fn label(&self) -> String {
        let mut text = format!("{}, {}, {}", self.distance, self.size, self.congestion.name());
        match self.protocol {
            Protocol::Plug => {}
            Protocol::Socks => text += ", SOCKS",
            Protocol::Http => text += ", HTTP",
        }
        if self.loss > 0.0 {
            text += &format!(", {} % lost", self.loss);
        }
        if self.direction == Direction::Up {
            text += ", up";
        }
        if self.version == IpVersion::V6 {
            text += ", IPv6";
        }
        text
    }

    /// The cells measured if none are chosen, in a quarter of an hour: each dimension by itself, and pairs where splicing has been slow before.
    pub fn defaults() -> Vec<Cell> {
        use Congestion::{Bbr, Cubic, Reno};
        /// A body that the default policy splices: it copies those of less than 1 MiB.
        const BODY: Size = Size(1_200_000);
        let base = Cell::BASE;
        let client = |ms| Distance::new(Place::Client, ms);
        let server = |ms| Distance::new(Place::Server, ms);
        let both = |ms| Distance::new(Place::Both, ms);
        let mut cells = Vec::new();
        let far = [client(1), client(10), client(50), client(100), client(300)];
        let near = [server(10), server(100), both(50), both(100)];
        for distance in far.into_iter().chain(near) {
            cells.push(Cell { distance, ..base });
        }
        for distance in [client(10), client(100), client(300), server(100)] {
            cells.push(Cell { distance, congestion: Reno, ..base });
        }
        cells.push(Cell { congestion: Cubic, ..base });
        for bytes in [1000, 10_000, 100_000] {
            cells.push(Cell { size: Size(bytes), ..base });
        }
        for (distance, congestion) in [(client(100), Reno), (server(100), Bbr)] {
            cells.push(Cell { distance, congestion, size: Size(10_000_000), ..base });
        }
        for (distance, loss) in [(client(50), 0.1), (client(50), 1.0), (both(50), 1.0), (both(20), 2.0)] {
            cells.push(Cell { distance, loss, congestion: Reno, ..base });
        }
        cells.push(Cell { loss: 1.0, ..base });
        for (distance, congestion) in
            [(client(10), Bbr), (client(20), Bbr), (client(100), Reno), (client(100), Cubic), (server(100), Bbr)]
        {
            cells.push(Cell { distance, congestion, protocol: Protocol::Http, size: BODY, ..base });
        }
        for distance in [client(100), server(100)] {
            cells.push(Cell { distance, protocol: Protocol::Socks, ..base });
            cells.push(Cell { distance, direction: Direction::Up, ..base });
        }
        cells.push(Cell { direction: Direction::Up, protocol: Protocol::Http, size: BODY, ..base });
        cells.push(Cell { version: IpVersion::V6, ..base });
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_and_sizes_are_read() {
        let read = |text: &str| text.parse::<Distance>();
        assert_eq!(read("c100"), Ok(Distance::new(Place::Client, 100)));
        assert_eq!(read("s1").unwrap().shares(), [0.0, 1.0, 0.0]);
        assert_eq!(read("b50").unwrap().shares(), [0.5, 0.5, 0.0]);
        for text in ["c100", "s0", "b300", "t90"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        for text in ["", "100", "c", "c-1", "c1001", "é1"] {
            assert!(read(text).is_err(), "{text}");
        }
        let read = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(["1k", "10m", "500"].map(|t| read(t).unwrap()), [1000, 10_000_000, 500]);
        for text in ["", "k", "0", "1g", "2000m", "99999999999999999999m"] {
            assert!(read(text).is_err(), "{text}");
        }
        assert_eq!(["500", "10k", "1m"].map(|t| t.parse::<Size>().unwrap().to_string()), ["500 B", "10 KB", "1 MB"]);
    }

    #[test]
    fn cells_are_named_by_what_is_special() {
        let base = Cell::BASE;
        assert_eq!(base.label(), "c100, 1 MB, bbr");
        let other =
            Cell { loss: 0.1, protocol: Protocol::Http, direction: Direction::Up, version: IpVersion::V6, ..base };
        assert_eq!(other.label(), "c100, 1 MB, bbr, HTTP, 0.1 % lost, up, IPv6");
    }

    #[test]
    fn default_cells_differ() {
        let labels: Vec<String> = Cell::defaults().iter().map(Cell::label).collect();
        let unique: std::collections::HashSet<&String> = labels.iter().collect();
        assert_eq!(unique.len(), labels.len(), "{labels:?}");
        assert!(labels.contains(&Cell::BASE.label()));
    }
}
