//! Medians and spreads. Never means: one disturbed run would move them.

use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// A summary of several measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The lower decile; with ten or fewer measurements, the smallest.
    pub low: f64,
    /// The upper decile; with ten or fewer measurements, the largest.
    pub high: f64,
    /// Number of measurements.
    pub n: usize,
}

impl Spread {
    /// Summarizes values; `None` if there are none. Values that are not numbers (a ratio to zero) are ignored.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (first, last) = (*sorted.first()?, *sorted.last()?);
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        let tenth = n / 10;
        let (low, high) = if tenth == 0 { (first, last) } else { (sorted[tenth], sorted[n - 1 - tenth]) };
        Some(Spread { median, low, high, n })
    }

    /// The spread of the inverse, with two or three digits: `12 (10-15)`. If part of the spread is not positive, its inverse has
    /// no upper end: `45 (over 20)`, or only `over 20`.
    pub fn inverse(&self) -> String {
        let digits = |n: f64| if n < 10.0 { format!("{n:.1}") } else { format!("{n:.0}") };
        let [median, low, high] = [self.median, self.low, self.high].map(|n| (n > 0.0).then(|| digits(1.0 / n)));
        match (median, low, high) {
            (Some(median), Some(most), Some(least)) => format!("{median} ({least}-{most})"),
            (Some(median), None, Some(least)) => format!("{median} (over {least})"),
            (_, _, Some(least)) => format!("over {least}"),
            _ => String::new(),
        }
    }

    /// `0.93 (0.91-0.96)`
    pub fn text(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.low, self.high)
    }
}

/// A sign test on differences: greater or less if their median is significantly positive or negative, with a probability of
/// at most one in forty that this is chance; otherwise equal. Fewer than six differences are never significant.
pub fn sign(differences: impl IntoIterator<Item = f64>) -> Ordering {
    let (mut more, mut less) = (0, 0);
    for difference in differences {
        more += u32::from(difference > 0.0);
        less += u32::from(difference < 0.0);
    }
    match more.cmp(&less) {
        surely if by_chance(more + less, more.max(less)) <= 1.0 / 40.0 => surely,
        _ => Ordering::Equal,
    }
}

/// Probability of at least this many heads among this many coins.
fn by_chance(coins: u32, heads: u32) -> f64 {
    let ways = |k: u32| (0..k).map(|i| f64::from(coins - i) / f64::from(i + 1)).product::<f64>();
    (heads..=coins).map(ways).sum::<f64>() / 2f64.powi(coins as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([f64::NAN, f64::INFINITY]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, low: 1.0, high: 3.0, n: 3 }));
        assert_eq!(Spread::of([4.0, 1.0]).unwrap().median, 2.5);
        let many = Spread::of((1..=100).map(f64::from)).unwrap();
        assert_eq!((many.median, many.low, many.high), (50.5, 11.0, 90.0));
        assert_eq!(Spread { median: 0.934, low: 0.9, high: 1.0, n: 3 }.text(2), "0.93 (0.90-1.00)");
    }

    #[test]
    fn inverses() {
        let of = |low, median, high| Spread { median, low, high, n: 3 }.inverse();
        assert_eq!(of(0.05, 0.1, 0.4), "10 (2.5-20)");
        assert_eq!(of(-0.1, 0.01, 0.1), "100 (over 10)");
        assert_eq!((of(-0.2, -0.1, 0.1), of(-0.2, -0.1, 0.0)), ("over 10".to_owned(), String::new()));
    }

    #[test]
    fn signs_tell_when_there_are_enough_of_them() {
        assert_eq!((by_chance(4, 0), by_chance(4, 3), by_chance(4, 4)), (1.0, 5.0 / 16.0, 1.0 / 16.0));
        assert_eq!(sign([1.0; 5]), Ordering::Equal, "chance does this one time in 32");
        assert_eq!((sign([1.0; 6]), sign([-0.1; 6])), (Ordering::Greater, Ordering::Less));
        let of = |more, less| sign((0..more).map(|_| 1.0).chain((0..less).map(|_| -9.0)));
        assert_eq!((of(12, 3), of(11, 4), of(3, 12)), (Ordering::Greater, Ordering::Equal, Ordering::Less));
        assert_eq!(
            (sign([0.0; 9]), sign([f64::NAN; 9]), sign([])),
            (Ordering::Equal, Ordering::Equal, Ordering::Equal)
        );
    }
}
