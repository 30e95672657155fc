//! Medians and spreads. Never means: one disturbed run would move them.

use serde::{Deserialize, Serialize};

/// What many measurements of one thing come to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The one in the middle.
    pub median: f64,
    /// A tenth of them is not above; with ten or fewer, the smallest.
    pub low: f64,
    /// A tenth of them is not below; with ten or fewer, the largest.
    pub high: f64,
    /// How many there are.
    pub n: usize,
}

impl Spread {
    /// None of nothing. What is no number (a ratio to zero) is left out.
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

    /// `0.93 (0.91-0.96)`
    pub fn text(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.low, self.high)
    }
}

/// The first number of bytes from which `with` never costs more than `without`: all are (bytes, cost), in the order of
/// bytes. Between two measured sizes the difference is taken as linear. None: it never pays.
pub fn crossing(without: &[(f64, f64)], with: &[(f64, f64)]) -> Option<f64> {
    let gain: Vec<(f64, f64)> = without.iter().zip(with).map(|(a, b)| (a.0, a.1 - b.1)).collect();
    let pays = gain.iter().rposition(|(_, gain)| *gain < 0.0).map_or(0, |last| last + 1);
    let (size, after) = *gain.get(pays)?;
    let Some((before_size, before)) = pays.checked_sub(1).map(|i| gain[i]) else {
        return Some(size);
    };
    Some(before_size + (size - before_size) * -before / (after - before))
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
    fn where_two_costs_cross() {
        let without = [(0.0, 10.0), (100.0, 20.0), (200.0, 30.0)];
        assert_eq!(crossing(&without, &[(0.0, 15.0), (100.0, 20.0), (200.0, 25.0)]), Some(100.0));
        assert_eq!(crossing(&without, &[(0.0, 20.0), (100.0, 25.0), (200.0, 25.0)]), Some(150.0));
        assert_eq!(crossing(&without, &[(0.0, 9.0), (100.0, 9.0), (200.0, 9.0)]), Some(0.0), "from the start");
        assert_eq!(crossing(&without, &[(0.0, 9.0), (100.0, 9.0), (200.0, 90.0)]), None, "not at the end");
        assert_eq!(crossing(&[], &[]), None);
    }
}
