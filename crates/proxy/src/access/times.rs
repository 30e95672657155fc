//! Times at which a rule holds: hours of the day and days of the week, both of UTC.

use std::{
    cell::OnceCell,
    fmt,
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

/// Minutes of a day.
const DAY: u16 = 24 * 60;
/// Names of the days, from that of the first of January 1970 on.
const NAMES: [&str; 7] = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];

/// Hours of a day; those that end before they begin end on the next day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hours {
    /// Minute of the day at which they begin.
    from: u16,
    /// The first minute that is none of theirs; [`DAY`] at most.
    to: u16,
}

/// A day of the week, or several in a row: places in [`NAMES`], both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Days {
    from: usize,
    to: usize,
}

/// When a rule holds. An empty list means always.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times {
    /// Hours of the day.
    pub hours: Vec<Hours>,
    /// Days on which they begin.
    pub days: Vec<Days>,
}

/// The time of a decision: the clock is read once, and only if a rule asks for it.
#[derive(Debug, Default)]
pub(super) struct Now(OnceCell<SystemTime>);

impl Now {
    fn read(&self) -> SystemTime {
        *self.0.get_or_init(|| {
            #[cfg(test)]
            tests::READINGS.set(tests::READINGS.get() + 1);
            SystemTime::now()
        })
    }
}

impl Times {
    /// Whether there is no time at which it does not hold.
    pub fn is_always(&self) -> bool {
        self.hours.is_empty() && self.days.is_empty()
    }

    /// Whether it holds now.
    pub(super) fn hold(&self, now: &Now) -> bool {
        self.is_always() || self.holds_at(now.read())
    }

    fn holds_at(&self, now: SystemTime) -> bool {
        let minutes = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / 60;
        let (day, minute) = ((minutes / u64::from(DAY) % 7) as usize, (minutes % u64::from(DAY)) as u16);
        let is_on = |day: usize| self.days.is_empty() || self.days.iter().any(|days| days.contain(day));
        let within = |hours: &Hours| match hours.from < hours.to {
            true => (hours.from..hours.to).contains(&minute) && is_on(day),
            // the part after midnight belongs to the day before
            false => minute >= hours.from && is_on(day) || minute < hours.to && is_on((day + 6) % 7),
        };
        if self.hours.is_empty() { is_on(day) } else { self.hours.iter().any(within) }
    }
}

impl Days {
    fn contain(self, day: usize) -> bool {
        (day + 7 - self.from) % 7 <= (self.to + 7 - self.from) % 7
    }
}

impl FromStr for Hours {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str, most: u16| {
            let digits = text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
            digits.then(|| text.parse::<u16>().ok()).flatten().filter(|n| *n <= most)
        };
        let minute = |text: &str| {
            let (hours, minutes) = text.trim().split_once(':')?;
            Some(number(hours, 24)? * 60 + number(minutes, 59)?).filter(|minute| *minute <= DAY)
        };
        let of = |text: &str| {
            let (from, to) = text.split_once('-')?;
            Some(Hours { from: minute(from)?, to: minute(to)? })
        };
        of(text)
            .filter(|hours| hours.from < DAY && hours.from != hours.to)
            .ok_or("bad hours: write when they begin and end in UTC, such as \"08:00-18:00\" or \"22:00-06:00\"")
    }
}

impl FromStr for Days {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let day = |text: &str| NAMES.iter().position(|name| *name == text.trim());
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        let days = day(from).zip(day(to)).map(|(from, to)| Days { from, to });
        days.ok_or("bad day: write one of mon, tue, wed, thu, fri, sat and sun, or several such as \"mon-fri\"")
    }
}

impl fmt::Display for Hours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hours { from, to } = self;
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, to / 60, to % 60)
    }
}

impl fmt::Display for Days {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Days { from, to } if from == to => f.write_str(NAMES[*from]),
            Days { from, to } => write!(f, "{}-{}", NAMES[*from], NAMES[*to]),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::{cell::Cell, time::Duration};

    thread_local! {
        /// How often this thread has read the clock.
        pub static READINGS: Cell<usize> = const { Cell::new(0) };
    }

    fn times(hours: &[&str], days: &[&str]) -> Times {
        Times {
            hours: hours.iter().map(|text| text.parse().unwrap()).collect(),
            days: days.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    /// A moment in the week of 2026-11-30, a Monday.
    fn at(day: &str, time: &str) -> SystemTime {
        let place = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"].iter().position(|name| *name == day).unwrap();
        let Hours { from, .. } = format!("{time}-24:00").parse().unwrap();
        UNIX_EPOCH + Duration::from_secs(20_787 * 86_400 + place as u64 * 86_400 + u64::from(from) * 60 + 30)
    }

    #[test]
    fn hours_of_days() {
        for (hours, days, holds, does_not) in [
            (&["08:00-18:00"][..], &[][..], &["mon 08:00", "sun 17:59"][..], &["mon 07:59", "mon 18:00"][..]),
            (&["08:00-24:00"], &["mon-fri"], &["mon 23:59", "fri 08:00"], &["sat 12:00", "sun 12:00", "tue 00:00"]),
            (&["22:00-06:00"], &["fri"], &["fri 22:00", "sat 05:59"], &["fri 05:00", "sat 06:00", "sat 23:00"]),
            (
                &[],
                &["sat-mon", "wed"],
                &["sat 00:00", "sun 12:00", "mon 23:59", "wed 01:00"],
                &["tue 12:00", "fri 12:00"],
            ),
            (&["01:00-02:00", "03:00-04:00"], &[], &["thu 01:30", "thu 03:30"], &["thu 02:30", "thu 00:59"]),
            (&[], &["mon-sun"], &["mon 00:00", "thu 12:00", "sun 23:59"], &[]),
            (&[], &[], &["mon 00:00"], &[]),
        ] {
            let times = times(hours, days);
            for (moments, want) in [(holds, true), (does_not, false)] {
                for moment in moments {
                    let (day, time) = moment.split_once(' ').unwrap();
                    assert_eq!(times.holds_at(at(day, time)), want, "{hours:?} {days:?} {moment}");
                }
            }
        }
        assert!(times(&[], &[]).is_always() && !times(&[], &["mon-sun"]).is_always());
        assert!(!times(&["08:00-18:00"], &[]).holds_at(UNIX_EPOCH - Duration::from_secs(1)), "it is midnight then");
    }

    #[test]
    fn as_they_are_written() {
        for hours in ["08:00-18:00", "22:00-06:00", "00:00-24:00", "22:00-00:00", "23:59-00:01"] {
            assert_eq!(hours.parse::<Hours>().unwrap().to_string(), hours);
        }
        assert_eq!("08:00 - 18:00".parse::<Hours>().unwrap().to_string(), "08:00-18:00");
        for hours in
            ["", "8:00-18:00", "08:00", "08:00-08:00", "24:00-08:00", "08:00-24:01", "08:60-09:00", "+8:00-09:00"]
        {
            assert!(hours.parse::<Hours>().is_err(), "{hours}");
        }
        for days in ["mon", "mon-fri", "sat-sun", "fri-mon"] {
            assert_eq!(days.parse::<Days>().unwrap().to_string(), days);
        }
        assert_eq!("mon-mon".parse::<Days>().unwrap().to_string(), "mon");
        for days in ["", "Mon", "monday", "mon-", "mon-fry", "mon,tue"] {
            assert!(days.parse::<Days>().is_err(), "{days}");
        }
    }
}
