//! The rows of `longsplice-bench wan` and `tpot`: what is transferred over which path. A row is written as it is named in
//! tables: `c100, 1 MB, bbr, HTTP, 0.1 % lost, up, IPv6`.

use longsplice_lab::Family;
use std::str::FromStr;

/// The longest round-trip time that can be chosen, in milliseconds.
const MAX_MS: u32 = 1000;
/// The largest object that can be chosen.
const MAX_BYTES: u64 = 1_000_000_000;
/// The congestion controls that can be chosen.
const CONGESTION: [&str; 3] = ["reno", "bbr", "cubic"];

/// The rows of `wan`, in a quarter of an hour: each dimension by itself, and pairs where splicing has been slow before.
/// Bodies of 1200 KB are those that the default policy splices.
pub const WAN: [&str; 35] = [
    "c1, 1 MB, bbr",
    "c10, 1 MB, bbr",
    "c50, 1 MB, bbr",
    "c100, 1 MB, bbr",
    "c300, 1 MB, bbr",
    "s10, 1 MB, bbr",
    "s100, 1 MB, bbr",
    "b50, 1 MB, bbr",
    "b100, 1 MB, bbr",
    "c10, 1 MB, reno",
    "c100, 1 MB, reno",
    "c300, 1 MB, reno",
    "s100, 1 MB, reno",
    "c100, 1 MB, cubic",
    "c100, 1 KB, bbr",
    "c100, 10 KB, bbr",
    "c100, 100 KB, bbr",
    "c100, 10 MB, reno",
    "s100, 10 MB, bbr",
    "c50, 1 MB, reno, 0.1 % lost",
    "c50, 1 MB, reno, 1 % lost",
    "b50, 1 MB, reno, 1 % lost",
    "b20, 1 MB, reno, 2 % lost",
    "c100, 1 MB, bbr, 1 % lost",
    "c10, 1200 KB, bbr, HTTP",
    "c20, 1200 KB, bbr, HTTP",
    "c100, 1200 KB, reno, HTTP",
    "c100, 1200 KB, cubic, HTTP",
    "s100, 1200 KB, bbr, HTTP",
    "c100, 1 MB, bbr, SOCKS",
    "c100, 1 MB, bbr, up",
    "s100, 1 MB, bbr, SOCKS",
    "s100, 1 MB, bbr, up",
    "c100, 1200 KB, bbr, HTTP, up",
    "c100, 1 MB, bbr, IPv6",
];

/// The rows of `tpot`: one byte from near and far, a large object over growing distances, and a smaller one with losses.
pub const TPOT: [&str; 13] = [
    "b1, 1 B, reno",
    "b100, 1 B, reno",
    "b1, 5 MB, reno",
    "b10, 5 MB, reno",
    "b50, 5 MB, reno",
    "b100, 5 MB, reno",
    "b300, 5 MB, reno",
    "b50, 2 MB, reno, 0.1 % lost",
    "b50, 2 MB, reno, 1 % lost",
    "t100, 1 B, reno",
    "t100, 5 MB, reno",
    "t300, 5 MB, reno",
    "t60, 2 MB, reno, 1 % lost",
];

/// What the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A connection to one fixed target for each object.
    Plug,
    /// A SOCKS 5 connection for each object.
    Socks,
    /// HTTP requests over one connection that is warm.
    Http,
}

/// A transfer over a path.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The row, as it was written.
    pub label: String,
    /// Where the round-trip time is: `c`, at the client's link; `s`, at the server's; `b`, half at both; `t`, a third at each,
    /// and at the link between two forwarders.
    pub place: char,
    /// The round-trip time in milliseconds.
    pub ms: u32,
    /// Bytes of the object.
    pub bytes: u64,
    /// The congestion control of client and server.
    pub congestion: &'static str,
    /// Percentage of packets lost, in both directions, at the links with the round-trip time.
    pub loss: f64,
    /// The protocol.
    pub protocol: Protocol,
    /// Whether the client sends the object.
    pub up: bool,
    /// The IP version.
    pub family: Family,
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Cell, String> {
        let wrong = || format!("not as in `c100, 1 MB, bbr`: {text}");
        let mut parts = text.split(", ");
        let (path, size, congestion) = (parts.next(), parts.next(), parts.next());
        let (path, (number, unit)) = path.zip(size.and_then(|size| size.split_once(' '))).ok_or_else(wrong)?;
        let place = path.chars().next().filter(|place| "csbt".contains(*place)).ok_or_else(wrong)?;
        let unit = match unit {
            "B" => 1,
            "KB" => 1000,
            "MB" => 1_000_000,
            _ => return Err(wrong()),
        };
        let bytes = number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
        let mut cell = Cell {
            label: text.to_owned(),
            place,
            ms: path[1..].parse().ok().filter(|ms| *ms <= MAX_MS).ok_or_else(wrong)?,
            bytes: bytes.filter(|n| (1..=MAX_BYTES).contains(n)).ok_or_else(wrong)?,
            congestion: CONGESTION.into_iter().find(|name| congestion == Some(name)).ok_or_else(wrong)?,
            loss: 0.0,
            protocol: Protocol::Plug,
            up: false,
            family: Family::V4,
        };
        for part in parts {
            match part {
                "SOCKS" => cell.protocol = Protocol::Socks,
                "HTTP" => cell.protocol = Protocol::Http,
                "up" => cell.up = true,
                "IPv6" => cell.family = Family::V6,
                loss => {
                    let loss = loss.strip_suffix(" % lost").and_then(|percent| percent.parse().ok());
                    cell.loss = loss.filter(|percent| (0.0..=50.0).contains(percent)).ok_or_else(wrong)?;
                }
            }
        }
        Ok(cell)
    }
}

impl Cell {
    /// The shares of the client's link, of the server's, and of that between two forwarders in the round-trip time.
    pub fn shares(&self) -> [f64; 3] {
        match self.place {
            'c' => [1.0, 0.0, 0.0],
            's' => [0.0, 1.0, 0.0],
            'b' => [0.5, 0.5, 0.0],
            _ => [1.0 / 3.0; 3],
        }
    }

    /// The congestion control of the forwarder's sockets. It is set for the whole namespace, which the kernel does not allow
    /// for CUBIC.
    pub fn congestion_of_forwarder(&self) -> &'static str {
        if self.congestion == "cubic" { "reno" } else { self.congestion }
    }

    /// Whether the receiver is the near host, or both are near. A splice then does no harm.
    pub fn is_towards_near_host(&self) -> bool {
        self.place == if self.up { 'c' } else { 's' } || self.ms <= 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_they_are_named() {
        for row in WAN.into_iter().chain(TPOT) {
            assert_eq!(row.parse::<Cell>().unwrap().label, row);
        }
        let cell: Cell = "s50, 10 KB, cubic, HTTP, 0.1 % lost, up, IPv6".parse().unwrap();
        assert_eq!((cell.place, cell.ms, cell.bytes, cell.congestion, cell.loss), ('s', 50, 10_000, "cubic", 0.1));
        assert_eq!((cell.protocol, cell.up, cell.family), (Protocol::Http, true, Family::V6));
        assert_eq!((cell.congestion_of_forwarder(), cell.is_towards_near_host()), ("reno", false));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (part, wrong) in [("c100", "x1"), ("c100", "é1"), ("c100", "c1001"), ("1 MB", "0 B"), ("1 MB", "2000 MB")]
        {
            assert!("c100, 1 MB, bbr".replace(part, wrong).parse::<Cell>().is_err(), "{wrong}");
        }
        for text in ["", "c100", "c100, 1 MB", "c100, 1 MB, vegas", "c1, 1 B, bbr, 51 % lost", "c1, 1 B, bbr, IPv5"] {
            assert!(text.parse::<Cell>().is_err(), "{text}");
        }
    }
}
