//! Codings of content that a client accepts, and that servers are asked for (RFC 9110, 12.5.3).

/// The codings that can be taken off and put on. `x-gzip` is gzip (RFC 9110, 8.4.1.3).
pub const KNOWN: [&str; 5] = ["gzip", "x-gzip", "deflate", "br", "zstd"];

/// The codings that servers are asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Codings {
    /// What the client accepts.
    #[default]
    Any,
    /// Those of them that are [known](KNOWN).
    Known,
    /// None, even if the client accepts one.
    None,
}

impl Codings {
    /// Returns the value of Accept-Encoding for the server; `None`: as the client has written it, if it has.
    pub fn asked<'a>(self, accepted: impl Iterator<Item = &'a [u8]>) -> Option<String> {
        match self {
            Codings::Any => None,
            Codings::None => Some("identity".into()),
            Codings::Known => {
                let mut said = accepted.peekable();
                said.peek()?;
                let is_known = |element: &&str| KNOWN.iter().any(|known| name(element).eq_ignore_ascii_case(known));
                let all: Vec<String> = said.map(|value| String::from_utf8_lossy(value).into_owned()).collect();
                let kept: Vec<&str> = all.iter().flat_map(|v| v.split(',')).map(str::trim).filter(is_known).collect();
                Some(if kept.is_empty() { "identity".into() } else { kept.join(", ") })
            }
        }
    }
}

/// Whether a client accepts a coding, in lower case, by what its requests say. One that says nothing may know of none.
pub fn accepts<'a>(said: impl Iterator<Item = &'a [u8]>, coding: &str) -> bool {
    let mut any = false;
    for value in said {
        for element in String::from_utf8_lossy(value).split(',') {
            let is_own = name(element).eq_ignore_ascii_case(coding);
            if is_own || name(element) == "*" {
                let weight =
                    element.split(';').skip(1).find_map(|p| p.trim().strip_prefix(['q', 'Q'])?.strip_prefix('='));
                let accepted = weight.is_none_or(|q| q.bytes().any(|b| matches!(b, b'1'..=b'9')));
                if is_own {
                    return accepted;
                }
                any = accepted;
            }
        }
    }
    any
}

fn name(element: &str) -> &str {
    element.split(';').next().unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_asked_for_what_can_be_read() {
        let asked = |codings: Codings, said: &[&str]| codings.asked(said.iter().map(|s| s.as_bytes()));
        for (said, want) in [
            (&["gzip, deflate, br, zstd"][..], Some("gzip, deflate, br, zstd")),
            (&["GZIP;q=0.5,dcb, br ; q=0", "*;q=0.1"], Some("GZIP;q=0.5, br ; q=0")),
            (&["compress, *"], Some("identity")),
            (&[""], Some("identity")),
            (&[], None),
        ] {
            assert_eq!(asked(Codings::Known, said).as_deref(), want, "{said:?}");
            assert_eq!(asked(Codings::None, said).as_deref(), Some("identity"));
            assert_eq!(asked(Codings::Any, said), None);
        }
    }

    #[test]
    fn what_a_client_accepts() {
        for (said, want) in [
            (&["gzip"][..], true),
            (&["br", "deflate, GZIP;q=0.001"], true),
            (&["gzip;q=0"], false),
            (&["gzip; Q=0.000, *"], false),
            (&["*"], true),
            (&["*;q=0"], false),
            (&["br"], false),
            (&["gzipx, x gzip"], false),
            (&[], false),
        ] {
            assert_eq!(accepts(said.iter().map(|s| s.as_bytes()), "gzip"), want, "{said:?}");
        }
    }
}
