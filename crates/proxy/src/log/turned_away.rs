//! Lines about connections that a limit has turned away. They are few: a flood must not displace the lines of clients that are served.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Most lines in a second: enough to see whom a limit hits.
const MOST: u32 = 10;

/// How many lines there were lately.
#[derive(Debug, Default)]
pub(crate) struct TurnedAway(Mutex<Lately>);

#[derive(Debug, Default)]
struct Lately {
    /// When the present second has begun.
    began: Option<Instant>,
    lines: u32,
    /// Connections without a line since the last one.
    without: u64,
}

impl TurnedAway {
    /// Counts a connection. Returns how many before it had no line, or `None` if this one has none either.
    pub fn next(&self) -> Option<u64> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, now: Instant) -> Option<u64> {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lately.began.is_none_or(|began| now.saturating_duration_since(began) >= Duration::from_secs(1)) {
            (lately.began, lately.lines) = (Some(now), 0);
        }
        if lately.lines == MOST {
            lately.without += 1;
            return None;
        }
        lately.lines += 1;
        Some(std::mem::take(&mut lately.without))
    }
}

#[test]
fn a_flood_has_few_lines_which_tell_how_many_have_none() {
    let (turned, now) = (TurnedAway::default(), Instant::now());
    let all: Vec<_> = (0..100).map(|_| turned.next_at(now)).collect();
    assert_eq!(all.iter().filter(|line| **line == Some(0)).count(), MOST as usize);
    assert_eq!(all.iter().filter(|line| line.is_none()).count(), 100 - MOST as usize);
    let later = now + Duration::from_secs(1);
    assert_eq!([turned.next_at(later), turned.next_at(later)], [Some(90), Some(0)]);
}
