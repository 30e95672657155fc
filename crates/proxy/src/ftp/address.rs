//! Addresses of data connections in commands and replies: PORT and PASV (RFC 959), EPRT and EPSV (RFC 2428).

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    str,
};

/// Why an EPRT or EPSV is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressError {
    /// It is none.
    Syntax,
    /// Of a family that the control connection does not have.
    Family,
}

/// What an EPSV asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epsv {
    /// A port.
    Port,
    /// No other commands of this kind from now on.
    All,
}

fn number<T: str::FromStr>(digits: &[u8], most: usize) -> Option<T> {
    let good = (1..=most).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    str::from_utf8(digits).ok().filter(|_| good)?.parse().ok()
}

/// Parses the argument of PORT: `h1,h2,h3,h4,p1,p2`.
pub fn parse_port(argument: &[u8]) -> Option<SocketAddr> {
    let mut parts = argument.split(|b| *b == b',');
    let mut next = || number::<u8>(parts.next()?, 3);
    let ip = Ipv4Addr::new(next()?, next()?, next()?, next()?);
    let port = u16::from_be_bytes([next()?, next()?]);
    parts.next().is_none().then_some(SocketAddr::new(ip.into(), port))
}

/// Parses the argument of EPRT: `|1|192.0.2.1|6446|`, with any delimiter.
pub fn parse_eprt(argument: &[u8], is_ipv4: bool) -> Result<SocketAddr, AddressError> {
    let (delimiter, rest) = argument.split_first().ok_or(AddressError::Syntax)?;
    let parts: Vec<&[u8]> = rest.split(|b| b == delimiter).collect();
    let (true, [family, ip, port, b""]) = ((33..=126).contains(delimiter), &parts[..]) else {
        return Err(AddressError::Syntax);
    };
    match (*family, is_ipv4) {
        (b"1", true) | (b"2", false) => {}
        _ if number::<u32>(family, 9).is_some() => return Err(AddressError::Family),
        _ => return Err(AddressError::Syntax),
    }
    let ip: Option<IpAddr> = str::from_utf8(ip).ok().and_then(|text| text.parse().ok());
    let ip = ip.filter(|ip| ip.is_ipv4() == is_ipv4).ok_or(AddressError::Syntax)?;
    Ok(SocketAddr::new(ip, number(port, 5).ok_or(AddressError::Syntax)?))
}

/// Parses the argument of EPSV.
pub fn parse_epsv(argument: &[u8], is_ipv4: bool) -> Result<Epsv, AddressError> {
    match (argument, is_ipv4) {
        (b"", _) | (b"1", true) | (b"2", false) => Ok(Epsv::Port),
        (all, _) if all.eq_ignore_ascii_case(b"all") => Ok(Epsv::All),
        (other, _) if number::<u32>(other, 9).is_some() => Err(AddressError::Family),
        _ => Err(AddressError::Syntax),
    }
}

/// Finds the port in a 227 reply: the last two of six numbers (RFC 1123, 4.1.2.6). Data go to the host that has the control
/// connection, whatever address the reply has: servers behind NAT do not know theirs, and no other host may be meant.
pub fn parse_227(text: &[u8]) -> Option<u16> {
    let is_part = |b: &u8| b.is_ascii_digit() || *b == b',';
    let behind_the_code = text.get(3..)?;
    let address = behind_the_code.split(|b| !is_part(b)).find_map(parse_port)?;
    Some(address.port()).filter(|port| *port != 0)
}

/// Finds the port in a 229 reply: `(|||6446|)`.
pub fn parse_229(text: &[u8]) -> Option<u16> {
    let start = text.iter().position(|b| *b == b'(')? + 1;
    let [d, e, f, rest @ ..] = text.get(start..)? else { return None };
    let end = rest.iter().position(|b| b == d).filter(|_| [d, d] == [e, f] && (33..=126).contains(d))?;
    number(&rest[..end], 5).filter(|port| *port != 0 && rest.get(end + 1) == Some(&b')'))
}

/// Writes the argument of PORT or the address of a 227 reply.
pub fn encode_port(ip: Ipv4Addr, port: u16) -> String {
    let [a, b, c, d] = ip.octets();
    format!("{a},{b},{c},{d},{},{}", port >> 8, port & 0xff)
}

/// Writes the argument of EPRT.
pub fn encode_eprt(address: SocketAddr) -> String {
    format!("|{}|{}|{}|", if address.is_ipv4() { 1 } else { 2 }, address.ip(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn port() {
        assert_eq!(parse_port(b"192,0,2,1,25,46"), Some(at("192.0.2.1:6446")));
        assert_eq!(encode_port(Ipv4Addr::new(192, 0, 2, 1), 6446), "192,0,2,1,25,46");
        for bad in [
            "",
            "1,2,3,4,5",
            "1,2,3,4,5,6,7",
            "256,2,3,4,5,6",
            "+1,2,3,4,5,6",
            "1,2,3,4,5,",
            "1,2,3,4,5, 6",
            "0001,2,3,4,5,6",
        ] {
            assert_eq!(parse_port(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn eprt() {
        assert_eq!(parse_eprt(b"|1|192.0.2.1|6446|", true), Ok(at("192.0.2.1:6446")));
        assert_eq!(parse_eprt(b"!2!2001:db8::1!6446!", false), Ok(at("[2001:db8::1]:6446")));
        assert_eq!(encode_eprt(at("[2001:db8::1]:6446")), "|2|2001:db8::1|6446|");
        assert_eq!(parse_eprt(b"|2|2001:db8::1|6446|", true), Err(AddressError::Family));
        assert_eq!(parse_eprt(b"|3|x|6446|", true), Err(AddressError::Family));
        for bad in [
            "",
            "|",
            "|1|192.0.2.1|6446",
            "|1|name|6446|",
            "|1|::1|6446|",
            "|1|192.0.2.1|65536|",
            " 1 192.0.2.1 6446 ",
            "|1|192.0.2.1|6446||",
        ] {
            assert_eq!(parse_eprt(bad.as_bytes(), true), Err(AddressError::Syntax), "{bad}");
        }
    }

    #[test]
    fn epsv() {
        for (text, ipv4, want) in [
            ("", true, Ok(Epsv::Port)),
            ("1", true, Ok(Epsv::Port)),
            ("2", false, Ok(Epsv::Port)),
            ("all", false, Ok(Epsv::All)),
            ("2", true, Err(AddressError::Family)),
            ("x", true, Err(AddressError::Syntax)),
        ] {
            assert_eq!(parse_epsv(text.as_bytes(), ipv4), want, "{text}");
        }
    }

    #[test]
    fn replies() {
        for (text, want) in [
            ("227 Entering Passive Mode (192,0,2,1,25,46).", Some(6446)),
            ("227 Entering Passive Mode 192,0,2,1,25,46", Some(6446)),
            ("227 =192,0,2,1,25,46", Some(6446)),
            ("227 1,2,3 (192,0,2,1,0,0)", None),
            ("227 (192,0,2,1,25)", None),
            ("227", None),
        ] {
            assert_eq!(parse_227(text.as_bytes()), want, "{text}");
        }
        for (text, want) in [
            ("229 Entering Extended Passive Mode (|||6446|)", Some(6446)),
            ("229 (!!!1!)", Some(1)),
            ("229 (|||0|)", None),
            ("229 (|1||6446|)", None),
            ("229 (|||6446)", None),
            ("229 |||6446|", None),
            ("229 (", None),
        ] {
            assert_eq!(parse_229(text.as_bytes()), want, "{text}");
        }
    }
}
