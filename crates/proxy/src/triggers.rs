//! Triggers of whole connections: something is done when a host sends again, after so many bytes, so long idle, or at a time
//! of day. Bodies of HTTP messages and sessions of FTP have none: they are read anyway.

pub mod ask;

use ask::Question;
use longsplice_engine::{Pair, Side};
use std::{
    path::PathBuf,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Maximum number for each listener: every connection is looked at for each of them once a second.
pub const MOST: usize = 16;
const DAY: u64 = 24 * 3600;

/// What happens, and when.
#[derive(Debug, Clone)]
pub struct Trigger {
    /// When.
    pub when: When,
    /// What happens then.
    pub then: Then,
}

/// When a trigger is pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum When {
    /// This host sends while the connection is spliced. The data path takes the connection back before any of that has passed.
    Data(Side),
    /// So many bytes have passed, copied or spliced.
    Bytes {
        /// Number.
        count: u64,
        /// The sender; none: both together.
        of: Option<Side>,
    },
    /// No byte has passed for so long, in either direction.
    Idle(Duration),
    /// At this time of each day.
    At(TimeOfDay),
}

/// What happens to the connection.
#[derive(Debug, Clone)]
pub enum Then {
    /// It is copied from now on.
    Copy,
    /// Both hosts are reset.
    Kill,
    /// All that passes from now on is copied into a file of this directory, as by a tap.
    Tap(PathBuf),
    /// A program decides.
    Ask(Question),
}

impl Trigger {
    /// Returns the directory for taps, if it begins one.
    pub(crate) fn tap_dir(&self) -> Option<&PathBuf> {
        if let Then::Tap(dir) = &self.then { Some(dir) } else { None }
    }
}

impl When {
    /// Returns the label for programs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            When::Data(Side::Client) => "client-data",
            When::Data(Side::Server) => "server-data",
            When::Bytes { .. } => "bytes",
            When::Idle(_) => "idle",
            When::At(_) => "at",
        }
    }

    /// Returns how many of these bytes count.
    pub(crate) fn counted(&self, bytes: Pair<u64>) -> u64 {
        match self {
            When::Bytes { of: Some(side), .. } => bytes[*side],
            _ => bytes.client + bytes.server,
        }
    }
}

/// A time of day in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeOfDay {
    /// Seconds from midnight.
    seconds: u64,
}

impl FromStr for TimeOfDay {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<TimeOfDay, Self::Err> {
        let number = |part: &str, most: u64| -> Option<u64> {
            let digits = part.len() == 2 && part.bytes().all(|b| b.is_ascii_digit());
            part.parse().ok().filter(|n| digits && *n <= most)
        };
        let of = |text: &str| {
            let (hours, minutes) = text.split_once(':')?;
            Some(TimeOfDay { seconds: number(hours, 23)? * 3600 + number(minutes, 59)? * 60 })
        };
        of(text).ok_or("bad time: write hours and minutes of UTC, such as \"22:00\"")
    }
}

impl TimeOfDay {
    /// Returns whether it is after `from`, and not after `to`.
    pub(crate) fn lies_between(self, from: SystemTime, to: SystemTime) -> bool {
        // the number of its day, counted from this time of it
        let day =
            |at: SystemTime| (at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() + DAY - self.seconds) / DAY;
        day(to) > day(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day() {
        for wrong in ["", "22", "24:00", "22:60", "2:00", "22:0", "+2:00", "22:00:00", "22.00"] {
            assert!(wrong.parse::<TimeOfDay>().is_err(), "{wrong}");
        }
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(1000 * DAY + seconds);
        let time: TimeOfDay = "22:01".parse().unwrap();
        let there = 22 * 3600 + 60;
        assert!(time.lies_between(at(there - 1), at(there)));
        assert!(!time.lies_between(at(there), at(there + 1)) && !time.lies_between(at(there - 2), at(there - 1)));
        // over midnight, over several days, and back
        assert!(time.lies_between(at(there - 1), at(DAY + 5)) && !time.lies_between(at(there), at(DAY + 5)));
        assert!(time.lies_between(at(there), at(3 * DAY)) && !time.lies_between(at(there), at(there - 1)));
        let midnight: TimeOfDay = "00:00".parse().unwrap();
        assert!(midnight.lies_between(at(DAY - 1), at(DAY)) && !midnight.lies_between(at(DAY), at(DAY + 1)));
    }
}
