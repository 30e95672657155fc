//! Values that several formats have: networks, times, names; and how they are written.

use std::{fmt, net::IpAddr, str::FromStr};

/// Longest time in milliseconds that the configuration takes: ten years.
const MILLISECONDS_MAX: u64 = 10 * 366 * 86_400_000;

/// A network: an address without bits beyond the length, and the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Net {
    ip: IpAddr,
    length: u8,
}

impl Net {
    /// Bits beyond the length are removed.
    pub fn new(ip: IpAddr, length: u8) -> Option<Net> {
        let ip = ip.to_canonical();
        let ip = match ip {
            IpAddr::V4(v4) => {
                let host = 32_u32.checked_sub(length.into())?;
                IpAddr::V4((v4.to_bits() & u32::MAX.checked_shl(host).unwrap_or(0)).into())
            }
            IpAddr::V6(v6) => {
                let host = 128_u32.checked_sub(length.into())?;
                IpAddr::V6((v6.to_bits() & u128::MAX.checked_shl(host).unwrap_or(0)).into())
            }
        };
        Some(Net { ip, length })
    }

    pub fn is_ipv4(self) -> bool {
        self.ip.is_ipv4()
    }

    pub fn is_all(self) -> bool {
        self.length == 0
    }

    pub fn contains(self, ip: IpAddr) -> bool {
        Net::new(ip, self.length).is_some_and(|net| net == self)
    }

    /// The smaller one, if one lies in the other.
    pub fn and(self, other: Net) -> Option<Net> {
        let (small, large) = if self.length >= other.length { (self, other) } else { (other, self) };
        large.contains(small.ip).then_some(small)
    }

    /// The networks that together hold the addresses from `first` to `last`.
    pub fn range(first: IpAddr, last: IpAddr) -> Option<Vec<Net>> {
        let (mut at, end, bits) = match (first, last) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32_u32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
            _ => return None,
        };
        let mut nets = Vec::new();
        while at <= end {
            // the largest network that begins here and ends in time
            let mut host = at.trailing_zeros().min(bits);
            let last_of = |host: u32| at | 1_u128.checked_shl(host).map_or(u128::MAX, |size| size - 1);
            while last_of(host) > end {
                host -= 1;
            }
            let ip = if bits == 32 { IpAddr::V4((at as u32).into()) } else { IpAddr::V6(at.into()) };
            nets.push(Net::new(ip, (bits - host) as u8)?);
            let Some(next) = last_of(host).checked_add(1) else { break };
            at = next;
        }
        (!nets.is_empty()).then_some(nets)
    }
}

/// `ADDRESS`, `ADDRESS/LENGTH` or `ADDRESS/MASK`.
impl FromStr for Net {
    type Err = ();

    fn from_str(text: &str) -> Result<Net, ()> {
        let (ip, length) = text.split_once('/').map_or((text, None), |(ip, length)| (ip, Some(length)));
        let ip: IpAddr = ip.parse().map_err(|_| ())?;
        let length = match length {
            None if ip.is_ipv4() => 32,
            None => 128,
            Some(mask) if mask.contains('.') && ip.is_ipv4() => {
                let mask = mask.parse::<std::net::Ipv4Addr>().map_err(|_| ())?.to_bits();
                let length = mask.leading_ones();
                if mask.count_ones() != length {
                    return Err(());
                }
                length as u8
            }
            Some(length) => length.parse().map_err(|_| ())?,
        };
        Net::new(ip, length).ok_or(())
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = if self.ip.is_ipv4() { 32 } else { 128 };
        if self.length == full { self.ip.fmt(f) } else { write!(f, "{}/{}", self.ip, self.length) }
    }
}

/// Seconds as TOML has them. None for no time, and for more than the configuration takes.
pub fn seconds(milliseconds: u64) -> Option<String> {
    let whole = milliseconds / 1000;
    match milliseconds % 1000 {
        _ if milliseconds == 0 || milliseconds > MILLISECONDS_MAX => None,
        0 => Some(whole.to_string()),
        rest => Some(format!("{whole}.{rest:03}").trim_end_matches('0').to_owned()),
    }
}

/// A string of TOML.
pub fn quote(text: &str) -> String {
    // Expressions are easier to read without escapes.
    let is_plain = |c: char| !c.is_control() && c != '\'';
    if text.contains('\\') && text.chars().all(is_plain) {
        return format!("'{text}'");
    }
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A list of strings of TOML; a single one without brackets.
pub fn quote_all<T: fmt::Display>(all: &[T]) -> String {
    let quoted: Vec<String> = all.iter().map(|one| quote(&one.to_string())).collect();
    if let [one] = &quoted[..] { one.clone() } else { format!("[{}]", quoted.join(", ")) }
}

/// Text that an expression matches literally.
pub fn escape(text: &str) -> String {
    let special = |c: char| r"\.+*?()|[]{}^$#&-~".contains(c) || c.is_whitespace();
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Whether users can have this password. `hashed`: it is a hash, of a kind that is known.
pub fn is_password(password: &str, hashed: bool) -> bool {
    let is_taken_for_hash = password.starts_with('$');
    is_taken_for_hash == hashed && super::is_valid(&format!("users = {{ u = {} }}", quote(password)), "")
}

/// Whether an access rule or route can have this name: `Some` with it in lower case.
pub fn host_name(text: &str) -> Option<String> {
    match longsplice_proxy::target::Host::from_name(text.as_bytes()) {
        Ok(longsplice_proxy::target::Host::Name(name)) => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Net {
        text.parse().unwrap_or_else(|()| panic!("{text}"))
    }

    #[test]
    fn networks() {
        for (text, want) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3/255.255.0.0", "10.1.0.0/16"),
            ("10.1.2.3", "10.1.2.3"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("1.2.3.4/0", "0.0.0.0/0"),
        ] {
            assert_eq!(net(text).to_string(), want);
        }
        for text in ["", "a", "10.0.0.0/33", "::/129", "10.0.0.0/255.0.255.0", "10.0.0.0/-1", "::/255.0.0.0"] {
            assert!(text.parse::<Net>().is_err(), "{text}");
        }
        assert_eq!(net("10.0.0.0/8").and(net("10.9.0.0/16")), Some(net("10.9.0.0/16")));
        assert_eq!(net("10.0.0.0/8").and(net("11.0.0.0/16")), None);
        assert_eq!(net("0.0.0.0/0").and(net("::/0")), None);
    }

    #[test]
    fn ranges_become_networks() {
        let range = |a: &str, b: &str| {
            let nets = Net::range(a.parse().unwrap(), b.parse().unwrap())?;
            Some(nets.iter().map(Net::to_string).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(range("10.0.0.1", "10.0.0.4").unwrap(), "10.0.0.1 10.0.0.2/31 10.0.0.4");
        assert_eq!(range("0.0.0.0", "255.255.255.255").unwrap(), "0.0.0.0/0");
        assert_eq!(range("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff").unwrap(), "::/0");
        assert_eq!(range("10.0.0.2", "10.0.0.1"), None);
        assert_eq!(range("10.0.0.2", "::1"), None);
    }

    #[test]
    fn strings_and_times() {
        assert_eq!(quote("a\"b\n"), "\"a\\\"b\\u000A\"");
        assert_eq!(quote(r"^\.png$"), r"'^\.png$'");
        assert_eq!(escape("/a.b"), r"/a\.b");
        assert_eq!([0, 1500, 60_000, u64::MAX].map(seconds), [None, Some("1.5".into()), Some("60".into()), None]);
    }
}
