//! Times in lines of the access log. All are in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A moment by the calendar.
struct Date {
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    ms: u64,
}

impl Date {
    /// Follows Howard Hinnant's `civil_from_days`: years of the era begin in March, so that the leap day comes last.
    fn of(t: SystemTime) -> Date {
        let t = since_1970(t);
        let (days, s) = (t.as_secs() / 86400, t.as_secs() % 86400);
        let z = days + 719_468;
        let (era, doe) = (z / 146_097, z % 146_097);
        let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let day = doy - (153 * mp + 2) / 5 + 1;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + u64::from(month <= 2);
        let (hour, minute, second, ms) = (s / 3600, s / 60 % 60, s % 60, u64::from(t.subsec_millis()));
        Date { year, month, day, hour, minute, second, ms }
    }
}

fn since_1970(t: SystemTime) -> Duration {
    t.duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn digits(text: &mut String, width: u32, n: u64) {
    text.extend((0..width).rev().map(|at| char::from(b'0' + (n / 10_u64.pow(at) % 10) as u8)));
}

/// RFC 3339 with milliseconds.
pub(crate) fn rfc3339(t: SystemTime) -> String {
    let Date { year, month, day, hour, minute, second, ms } = Date::of(t);
    let mut text = String::with_capacity(24);
    let parts = [(4, year), (2, month), (2, day), (2, hour), (2, minute), (2, second), (3, ms)];
    for ((width, n), end) in parts.into_iter().zip(['-', '-', 'T', ':', ':', '.', 'Z']) {
        digits(&mut text, width, n);
        text.push(end);
    }
    text
}

/// As in the logs of web servers: `30/Nov/2026:20:15:03 +0000`.
pub(super) fn ncsa(t: SystemTime) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let Date { year, month, day, hour, minute, second, .. } = Date::of(t);
    let mut text = String::with_capacity(26);
    digits(&mut text, 2, day);
    text.push('/');
    text.push_str(MONTHS[month as usize - 1]);
    for (start, width, n) in [('/', 4, year), (':', 2, hour), (':', 2, minute), (':', 2, second)] {
        text.push(start);
        digits(&mut text, width, n);
    }
    text.push_str(" +0000");
    text
}

/// Seconds since 1970, with milliseconds.
pub(super) fn unix(t: SystemTime) -> String {
    let t = since_1970(t);
    let mut text = t.as_secs().to_string();
    text.push('.');
    digits(&mut text, 3, t.subsec_millis().into());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calendar() {
        let at = |secs, ms| UNIX_EPOCH + Duration::from_secs(secs) + Duration::from_millis(ms);
        for (secs, ms, text, of_web) in [
            (0, 0, "1970-01-01T00:00:00.000Z", "01/Jan/1970:00:00:00 +0000"),
            (951_782_399, 999, "2000-02-28T23:59:59.999Z", "28/Feb/2000:23:59:59 +0000"),
            (951_782_400, 0, "2000-02-29T00:00:00.000Z", "29/Feb/2000:00:00:00 +0000"),
            (1_735_689_599, 0, "2024-12-31T23:59:59.000Z", "31/Dec/2024:23:59:59 +0000"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000Z", "01/Mar/2100:00:00:00 +0000"),
        ] {
            assert_eq!((rfc3339(at(secs, ms)), ncsa(at(secs, ms))), (text.into(), of_web.into()));
        }
        assert_eq!((unix(at(951_782_399, 9)), unix(at(0, 0))), ("951782399.009".into(), "0.000".into()));
    }
}
