//! Addresses that a client must not reach through a proxy unless a rule allows it: those with a different
//! meaning for the proxy's host than for the client's, and those where clouds serve credentials.
//!
//! Some IPv6 addresses embed an IPv4 address, which a translator or a tunnel may extract on the
//! way. All [`faces`] of an address are therefore checked.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A guarded range and its name in the log.
struct Range<N> {
    net: N,
    name: &'static str,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, len: u8, name: &'static str) -> Range<Ipv4Net> {
    Range { net: Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), len), name }
}

const fn v6(s: [u16; 8], len: u8, name: &'static str) -> Range<Ipv6Net> {
    let ip = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    Range { net: Ipv6Net::new_assert(ip, len), name }
}

// Private addresses (RFC 1918, RFC 4193) are left out on purpose: proxies exist to reach them.
const GUARDED_V4: &[Range<Ipv4Net>] = &[
    // Linux treats 0.0.0.0 as the host itself; the rest of 0/8 is "this network" (RFC 1122, 3.2.1.3).
    v4(0, 0, 0, 0, 8, "unspecified"),
    v4(127, 0, 0, 0, 8, "loopback"),
    // Contains 169.254.169.254, the metadata address of most clouds.
    v4(169, 254, 0, 0, 16, "link-local"),
    v4(224, 0, 0, 0, 4, "multicast"),
    v4(255, 255, 255, 255, 32, "broadcast"),
    v4(100, 100, 100, 200, 32, "cloud metadata"),
    v4(168, 63, 129, 16, 32, "cloud metadata"),
];

const GUARDED_V6: &[Range<Ipv6Net>] = &[
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, "unspecified"),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128, "loopback"),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "link-local"),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "multicast"),
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128, "cloud metadata"),
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128, "cloud metadata"),
];

/// How an IPv6 address embeds an IPv4 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The address itself.
    Plain,
    /// `::a.b.c.d`, deprecated (RFC 4291, 2.5.5.1).
    Compatible,
    /// `::ffff:0:a.b.c.d` (RFC 2765, 2.1).
    Translated,
    /// `2002:AABB:CCDD::` (RFC 3056).
    SixToFour,
    /// `64:ff9b::a.b.c.d` (RFC 6052, 2.1).
    Nat64,
    /// `64:ff9b:1::/48` with any of the prefix lengths of RFC 6052, 2.2 (RFC 8215).
    LocalNat64(u8),
    /// The server in `2001:0:AABB:CCDD::` (RFC 4380, 4).
    TeredoServer,
    /// The client at the end of a Teredo address, each bit inverted (RFC 4380, 4).
    TeredoClient,
    /// `...:0:5efe:a.b.c.d` (RFC 5214, 6.1).
    Isatap,
}

/// Reason why an address is guarded. Two addresses in the same range and the same form give equal values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guarded {
    /// Name of the range.
    pub name: &'static str,
    range: IpNet,
    form: Form,
}

/// Returns the range that guards `ip`, if any.
pub fn guarded(ip: IpAddr) -> Option<Guarded> {
    let (first, rest) = forms(ip);
    std::iter::once(first).chain(rest.into_iter().flatten()).find_map(|(form, ip)| {
        // Three of the four readings of such an address are wrong. Most of these are 0.x.y.z, which is no host.
        if matches!((form, ip), (Form::LocalNat64(_), IpAddr::V4(ip)) if ip.octets()[0] == 0) {
            return None;
        }
        let (name, range) = match ip {
            IpAddr::V4(ip) => GUARDED_V4.iter().find(|r| r.net.contains(&ip)).map(|r| (r.name, r.net.into()))?,
            IpAddr::V6(ip) => GUARDED_V6.iter().find(|r| r.net.contains(&ip)).map(|r| (r.name, r.net.into()))?,
        };
        Some(Guarded { name, range, form })
    })
}

/// Whether all of `net` lies in one guarded range. Ranges are contiguous, so its first and last address decide.
pub fn wholly_guarded(net: &IpNet) -> bool {
    guarded(net.network()).is_some_and(|g| guarded(net.broadcast()) == Some(g))
}

/// Returns `ip` and every IPv4 address embedded in it.
pub fn faces(ip: IpAddr) -> impl Iterator<Item = IpAddr> {
    let (first, rest) = forms(ip);
    std::iter::once(first).chain(rest.into_iter().flatten()).map(|(_, ip)| ip)
}

type Face = (Form, IpAddr);

/// Returns the address itself, and up to five addresses embedded in it.
fn forms(ip: IpAddr) -> (Face, [Option<Face>; 5]) {
    let ip = ip.to_canonical();
    let IpAddr::V6(v6) = ip else { return ((Form::Plain, ip), [None; 5]) };
    let o = v6.octets();
    let carried = |form, at: [usize; 4]| Some((form, IpAddr::from(at.map(|i| o[i]))));
    let last = [12, 13, 14, 15];
    let mut rest = match v6.segments() {
        // :: and ::1 embed nothing.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => [None; 5],
        [0, 0, 0, 0, 0, 0, ..] => [carried(Form::Compatible, last), None, None, None, None],
        [0, 0, 0, 0, 0xffff, 0, ..] => [carried(Form::Translated, last), None, None, None, None],
        [0x2002, ..] => [carried(Form::SixToFour, [2, 3, 4, 5]), None, None, None, None],
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => [carried(Form::Nat64, last), None, None, None, None],
        // The address does not tell which prefix length is in use. Octet 8 stays zero and is skipped.
        [0x64, 0xff9b, 1, ..] => [
            carried(Form::LocalNat64(48), [6, 7, 9, 10]),
            carried(Form::LocalNat64(56), [7, 9, 10, 11]),
            carried(Form::LocalNat64(64), [9, 10, 11, 12]),
            carried(Form::LocalNat64(96), last),
            None,
        ],
        [0x2001, 0, ..] => {
            let client = last.map(|i| !o[i]);
            let server = carried(Form::TeredoServer, [4, 5, 6, 7]);
            [server, Some((Form::TeredoClient, client.into())), None, None, None]
        }
        _ => [None; 5],
    };
    // The universal/local bit may have either value.
    if matches!(v6.segments(), [_, _, _, _, 0 | 0x200, 0x5efe, ..]) {
        rest[4] = carried(Form::Isatap, last);
    }
    ((Form::Plain, ip), rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(ip: &str) -> Option<&'static str> {
        guarded(ip.parse().unwrap()).map(|g| g.name)
    }

    #[test]
    fn guarded_addresses() {
        for (ip, want) in [
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("127.0.0.1", "loopback"),
            ("127.255.255.255", "loopback"),
            ("169.254.169.254", "link-local"),
            ("224.0.0.1", "multicast"),
            ("239.255.255.255", "multicast"),
            ("255.255.255.255", "broadcast"),
            ("100.100.100.200", "cloud metadata"),
            ("::", "unspecified"),
            ("::1", "loopback"),
            ("fe80::1", "link-local"),
            ("febf::1", "link-local"),
            ("ff02::1", "multicast"),
            ("fd00:ec2::254", "cloud metadata"),
        ] {
            assert_eq!(name(ip), Some(want), "{ip}");
        }
    }

    #[test]
    fn wrapping_does_not_help() {
        for ip in [
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "::ffff:0:127.0.0.1",
            "2002:7f00:1::1",
            "64:ff9b::127.0.0.1",
            "64:ff9b:1::127.0.0.1",
            "64:ff9b:1:7f00:0:100::",
            "64:ff9b:1:7f:0:1::",
            "64:ff9b:1:0:7f:0:100:0",
            "2001:0:7f00:1::",
            "2001:0:102:304::80ff:fffe",
            "2001:db8::5efe:127.0.0.1",
            "2001:db8::200:5efe:127.0.0.1",
        ] {
            assert_eq!(name(ip), Some("loopback"), "{ip}");
        }
        assert_eq!(name("64:ff9b::a9fe:a9fe"), Some("link-local"));
        assert_eq!(name("2002:6464:64c8::"), Some("cloud metadata"));
    }

    #[test]
    fn ordinary_addresses_are_free() {
        for ip in [
            "192.0.2.1",
            "10.0.0.1",
            "100.100.100.201",
            "126.255.255.255",
            "128.0.0.1",
            "240.0.0.1",
            "2001:db8::1",
            "fd00::1",
            "::ffff:192.0.2.1",
            "64:ff9b::192.0.2.1",
            "2002:c000:201::1",
            "fec0::1",
            "fd00:ec2::253",
            "64:ff9b:1::192.0.2.1",
            "64:ff9b:1:c000:2:100::",
        ] {
            assert_eq!(name(ip), None, "{ip}");
        }
    }

    #[test]
    fn only_prefixes_within_one_range_are_wholly_guarded() {
        for (net, want) in [
            ("127.0.0.0/8", true),
            ("127.0.0.1/32", true),
            ("169.254.0.0/16", true),
            ("fe80::/64", true),
            ("64:ff9b::7f00:0/104", true),
            ("2002:7f00::/24", true),
            ("0.0.0.0/0", false),
            ("126.0.0.0/7", false),
            ("100.100.100.0/24", false),
            ("::/0", false),
            ("64:ff9b::/96", false),
            ("10.0.0.0/8", false),
        ] {
            assert_eq!(wholly_guarded(&net.parse().unwrap()), want, "{net}");
        }
    }

    #[test]
    fn faces_of_a_wrapped_address() {
        let of = |ip: &str| faces(ip.parse().unwrap()).map(|f| f.to_string()).collect::<Vec<_>>();
        assert_eq!(of("10.0.0.1"), ["10.0.0.1"]);
        assert_eq!(of("::ffff:10.0.0.1"), ["10.0.0.1"]);
        assert_eq!(of("64:ff9b::10.0.0.1"), ["64:ff9b::a00:1", "10.0.0.1"]);
    }
}
