//! Paths in the form in which rules and routes compare them.

use crate::Wrong;

/// Returns the path of a request target without the query, percent-decoded, with consecutive slashes merged (RFC 3986,
/// 6.2.2). A backslash counts as a slash, because some servers treat it as one. Invalid UTF-8 is replaced.
///
/// For comparison only: the server receives the path as it was written.
///
/// # Errors
/// [`Wrong::Path`] for paths that servers read in different ways: dot segments, which a client resolves before it sends the
/// request (RFC 3986, 5.2.4), also encoded or followed by a parameter (`..;x`); invalid escapes; control characters.
pub fn plain(target: &str) -> Result<String, Wrong> {
    let written = target.split('?').next().unwrap_or(target).as_bytes();
    let mut path = Vec::with_capacity(written.len());
    let mut rest = written.iter();
    while let Some(byte) = rest.next() {
        let byte = match byte {
            b'%' => hex(rest.next())? << 4 | hex(rest.next())?,
            other => *other,
        };
        match byte {
            0..b' ' | 0x7f => return Err(Wrong::Path),
            b'/' | b'\\' if path.last() == Some(&b'/') => {}
            b'\\' => path.push(b'/'),
            other => path.push(other),
        }
    }
    let is_dots = |segment: &[u8]| matches!(segment.split(|b| *b == b';').next(), Some(b"." | b".."));
    if path.split(|b| *b == b'/').any(is_dots) {
        return Err(Wrong::Path);
    }
    Ok(String::from_utf8_lossy(&path).into_owned())
}

fn hex(digit: Option<&u8>) -> Result<u8, Wrong> {
    let value = digit.and_then(|d| char::from(*d).to_digit(16));
    value.map(|v| v as u8).ok_or(Wrong::Path) // below 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_way_to_write_a_path() {
        for (written, read) in [
            ("/", "/"),
            ("/a/b?c=/../d", "/a/b"),
            ("/%61dmin", "/admin"),
            ("//a///b//", "/a/b/"),
            ("/a%2Fb", "/a/b"),
            ("/%2f%5cadmin", "/admin"),
            ("/a;v=1/b..c/...", "/a;v=1/b..c/..."),
            ("/%C3%A4", "/\u{e4}"),
            ("/%ff", "/\u{fffd}"),
            ("/%252e%252e/", "/%2e%2e/"),
        ] {
            assert_eq!(plain(written).as_deref(), Ok(read), "{written}");
        }
    }

    #[test]
    fn what_servers_disagree_about() {
        for written in [
            "/..",
            "/a/../b",
            "/./a",
            "/%2e%2E/a",
            "/a/..%2fb",
            "/a/..;x/b",
            "/a%5c..%5cb",
            "/%",
            "/%4",
            "/%zz",
            "/%00",
            "/%0a",
        ] {
            assert_eq!(plain(written), Err(Wrong::Path), "{written}");
        }
    }
}
