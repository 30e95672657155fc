//! How often connections of a client may begin: a number at once, and then one after each part of a time (the "generic cell rate
//! algorithm", which keeps one moment for each client).

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    str::FromStr,
    time::{Duration, Instant},
};

/// Highest number of a [`Rate`]: more than one processor accepts in a second.
const MOST: u32 = 1_000_000;
/// Number of clients that are remembered, about 4 MB. Whoever has more addresses than this is not held up by counting what each of
/// them begins; the other limits still hold.
const CLIENTS: usize = 65536;
/// Time between two looks for clients that can be forgotten. Each takes a millisecond in which nobody is accepted.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A number for each period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    number: u32,
    period: Duration,
}

impl Rate {
    /// Time after which another one may begin, once the number is used up.
    fn step(self) -> Duration {
        self.period / self.number
    }
}

/// `10`, `10/second`, `30/minute` or `600/hour`.
impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Rate, RateError> {
        let (number, per) = text.split_once('/').unwrap_or((text, "second"));
        let seconds = match per.trim() {
            "second" => 1,
            "minute" => 60,
            "hour" => 3600,
            _ => return Err(RateError),
        };
        let number = number.trim().parse().ok().filter(|n| (1..=MOST).contains(n)).ok_or(RateError)?;
        Ok(Rate { number, period: Duration::from_secs(seconds) })
    }
}

/// It is no rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateError;

impl fmt::Display for RateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no rate: write a number from 1 to {MOST} per second, or as \"30/minute\" or \"600/hour\"")
    }
}

/// What clients have begun of late.
#[derive(Debug, Default)]
pub(super) struct Begun {
    rate: Option<Rate>,
    /// The moment up to which what each client has begun is paid for; a client whose moment has passed has the whole number again.
    until: HashMap<IpAddr, Instant>,
    looked: Option<Instant>,
}

impl Begun {
    /// Changes the rate. What was begun before is counted by the new one.
    pub fn limit(&mut self, rate: Option<Rate>) {
        self.rate = rate;
        if rate.is_none() {
            self.until = HashMap::new();
        }
    }

    /// Counts what the client begins, unless it may not. What is refused is not counted: who never gives up gets as much as others.
    pub fn may_begin(&mut self, client: IpAddr, now: Instant) -> bool {
        let Some(rate) = self.rate else { return true };
        if self.until.len() >= CLIENTS && !self.until.contains_key(&client) {
            if self.looked.is_none_or(|at| now >= at + LOOK_EVERY) {
                self.until.retain(|_, until| *until > now);
                self.looked = Some(now);
            }
            if self.until.len() >= CLIENTS {
                return true;
            }
        }
        let until = self.until.get(&client).copied().unwrap_or(now).max(now) + rate.step();
        let may = until <= now + rate.period;
        if may {
            self.until.insert(client, until);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn ip(n: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(n).into()
    }

    fn begun(rate: &str) -> Begun {
        Begun { rate: Some(rate.parse().unwrap()), ..Begun::default() }
    }

    #[test]
    fn rates_are_read() {
        let read = |text: &str| text.parse::<Rate>().map(|r| (r.number, r.period.as_secs()));
        assert_eq!(read("10"), Ok((10, 1)));
        assert_eq!(read("10/second"), Ok((10, 1)));
        assert_eq!(read("30 / minute"), Ok((30, 60)));
        assert_eq!(read("1000000/hour"), Ok((1_000_000, 3600)));
        for wrong in ["", "0", "-1", "1.5", "1000001", "10/day", "10/", "/second", "ten", "10/second/second"] {
            assert_eq!(read(wrong), Err(RateError), "{wrong}");
        }
    }

    #[test]
    fn a_number_at_once_and_then_one_by_one() {
        let (mut begun, start) = (begun("10/second"), Instant::now());
        let mut at = |ms: u32, tries: u32| (0..tries).filter(|_| begun.may_begin(ip(1), start + MS * ms)).count();
        assert_eq!([at(0, 20), at(99, 5), at(100, 5), at(150, 5), at(400, 5)], [10, 0, 1, 0, 3]);
        assert_eq!(at(5000, 20), 10, "after a pause");
        assert!(begun.may_begin(ip(2), start), "somebody else");
    }

    /// One try each millisecond for ten seconds, so nearly all are refused.
    #[test]
    fn who_never_gives_up_gets_the_rate() {
        let (mut begun, start) = (begun("60/minute"), Instant::now());
        let served = (0..120_000).filter(|ms| begun.may_begin(ip(1), start + MS * *ms)).count();
        assert_eq!(served, 60 + 119);
    }

    #[test]
    fn memory_is_bounded() {
        let (mut begun, start) = (begun("1/hour"), Instant::now());
        let most = CLIENTS as u32;
        assert!((0..most + 10).all(|n| begun.may_begin(ip(n), start)));
        assert_eq!((begun.until.len(), begun.looked), (CLIENTS, Some(start)));
        assert!(begun.may_begin(ip(most), start + 999 * MS) && begun.looked == Some(start), "not for each client");
        assert!(!begun.may_begin(ip(0), start) && begun.may_begin(ip(most), start), "those that are remembered");
        assert!(begun.may_begin(ip(most), start + 3600 * 1000 * MS));
        assert_eq!(begun.until.len(), 1, "what has passed is forgotten");
        begun.limit(None);
        assert!((0..5).all(|_| begun.may_begin(ip(most), start)) && begun.until.is_empty());
    }
}
