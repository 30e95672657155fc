//! What commands mean to us: those that move data, name paths, or ask for what we cannot keep.

use std::borrow::Cow;

/// What a command does to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Opens the way for the next data connection.
    Data(Setup),
    /// Moves data over it.
    Transfer,
    /// Breaks a transfer off, or asks how far it is. The server takes it meanwhile.
    Meanwhile,
    /// Changes the directory.
    Directory,
    /// Protects the control connection (RFC 2228).
    Protect,
    /// Data connections that we cannot make: of other numbering schemes, or between two servers.
    Refused,
    User,
    Pass,
    Account,
    Reinitialize,
    Features,
    /// Anything else. The server knows.
    Plain,
}

/// How a client asks for a data connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    Port,
    Eprt,
    Pasv,
    Epsv,
}

impl Kind {
    pub fn of(verb: &str) -> Kind {
        match verb {
            "PORT" => Kind::Data(Setup::Port),
            "EPRT" => Kind::Data(Setup::Eprt),
            "PASV" => Kind::Data(Setup::Pasv),
            "EPSV" => Kind::Data(Setup::Epsv),
            "RETR" | "STOR" | "STOU" | "APPE" | "LIST" | "NLST" | "MLSD" => Kind::Transfer,
            "ABOR" | "STAT" => Kind::Meanwhile,
            "CWD" | "XCWD" | "CDUP" | "XCUP" => Kind::Directory,
            "AUTH" | "PROT" | "PBSZ" | "CCC" | "ADAT" | "MIC" | "CONF" | "ENC" => Kind::Protect,
            "LPRT" | "LPSV" | "SPSV" | "CPSV" | "SSCN" | "SPAS" | "SPOR" => Kind::Refused,
            "USER" => Kind::User,
            "PASS" => Kind::Pass,
            "ACCT" => Kind::Account,
            "REIN" => Kind::Reinitialize,
            "FEAT" => Kind::Features,
            _ => Kind::Plain,
        }
    }
}

/// Returns whether a line of the answer to FEAT (RFC 2389) names what we refuse. `protect`: AUTH is passed on.
pub(crate) fn is_left_out(line: &[u8], protect: bool) -> bool {
    let word = line.trim_ascii_start().split(|b| !b.is_ascii_alphanumeric()).next().unwrap_or_default();
    match Kind::of(&String::from_utf8_lossy(word).to_ascii_uppercase()) {
        Kind::Protect => !protect,
        Kind::Refused => true,
        _ => false,
    }
}

/// The path that a command names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named<'a> {
    /// None at all.
    Nothing,
    /// This one.
    Path(&'a [u8]),
    /// One that only the server knows, perhaps several.
    Unknown,
}

/// Returns the path that a command names.
pub fn path<'a>(verb: &str, argument: &'a [u8]) -> Named<'a> {
    let named = match verb {
        "RETR" | "STOR" | "APPE" | "CWD" | "XCWD" | "DELE" | "RNFR" | "RNTO" | "MKD" | "XMKD" | "RMD" | "XRMD"
        | "SIZE" | "MDTM" | "SMNT" | "XMD5" | "XCRC" | "XSHA" | "XSHA1" | "XSHA256" | "XSHA512" | "MD5" | "HASH" => {
            argument
        }
        "CDUP" | "XCUP" => b"..",
        "LIST" | "NLST" | "STAT" => without_options(argument),
        "MLSD" | "MLST" | "STOU" => argument,
        // a time and a path
        "MFMT" | "MFCT" => argument.splitn(2, |b| *b == b' ').nth(1).unwrap_or_default(),
        "USER" | "PASS" | "ACCT" | "REIN" | "QUIT" | "PORT" | "EPRT" | "PASV" | "EPSV" | "TYPE" | "STRU" | "MODE"
        | "REST" | "ABOR" | "PWD" | "XPWD" | "SYST" | "HELP" | "NOOP" | "FEAT" | "OPTS" | "CLNT" | "LANG" | "HOST"
        | "ALLO" | "AUTH" | "PROT" | "PBSZ" | "CCC" => return Named::Nothing,
        _ => return Named::Unknown,
    };
    // a pattern, somebody's home, or white space that some servers take for no part of the name
    let is_odd = named.iter().any(|b| b"*?[]{}~\\".contains(b)) || named.trim_ascii() != named;
    if is_odd { Named::Unknown } else { Named::Path(named) }
}

/// Servers take what begins with `-` for options of ls(1).
fn without_options(mut argument: &[u8]) -> &[u8] {
    while argument.first() == Some(&b'-') {
        let end = argument.iter().position(|b| *b == b' ').unwrap_or(argument.len());
        argument = argument[end..].trim_ascii_start();
    }
    argument
}

/// Returns a path without `.`, `..` and `//`, seen from the directory `at`. None if that takes a directory which is not known, or
/// if it is not UTF-8 (RFC 2640): no rule can be meant then.
pub fn resolve(at: Option<&str>, path: &[u8]) -> Option<String> {
    let path = std::str::from_utf8(path).ok()?;
    let whole: Cow<'_, str> = if path.starts_with('/') { path.into() } else { format!("{}/{path}", at?).into() };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    Some(format!("/{}", parts.join("/")))
}

/// Finds the directory in a 257 reply: quoted, with quotes doubled (RFC 959, appendix II).
pub fn parse_257(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (_, quoted) = text.split_once('"')?;
    let (mut path, mut rest) = (String::new(), quoted);
    loop {
        let (part, behind) = rest.split_once('"')?;
        path.push_str(part);
        match behind.strip_prefix('"') {
            Some(more) => {
                path.push('"');
                rest = more;
            }
            None => return path.starts_with('/').then_some(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_commands() {
        for (verb, argument, want) in [
            ("RETR", "a b", Named::Path(b"a b")),
            ("LIST", "-la -x /d", Named::Path(b"/d")),
            ("LIST", "-la", Named::Path(b"")),
            ("NLST", "*.txt", Named::Unknown),
            ("CWD", "~root", Named::Unknown),
            ("RETR", " /secret/file", Named::Unknown),
            ("RETR", "/secret\t", Named::Unknown),
            ("MFMT", "20260101000000  /secret", Named::Unknown),
            ("CDUP", "", Named::Path(b"..")),
            ("MFMT", "20260101000000 a b", Named::Path(b"a b")),
            ("SITE", "CPFR /secret", Named::Unknown),
            ("XYZ", "/secret", Named::Unknown),
            ("TYPE", "I", Named::Nothing),
        ] {
            assert_eq!(path(verb, argument.as_bytes()), want, "{verb} {argument}");
        }
    }

    #[test]
    fn paths_are_resolved() {
        for (at, path, want) in [
            (Some("/"), "a", Some("/a")),
            (Some("/d"), "../../e/./f//g/", Some("/e/f/g")),
            (None, "/a/../b", Some("/b")),
            (None, "a", None),
            (Some("/d"), "", Some("/d")),
        ] {
            assert_eq!(resolve(at, path.as_bytes()).as_deref(), want, "{path}");
        }
        assert_eq!(resolve(Some("/"), b"\xff"), None);
    }

    #[test]
    fn directories_in_replies() {
        for (text, want) in [
            ("257 \"/a \"\"b\"\"\" is current", Some("/a \"b\"")),
            ("257 \"/\"", Some("/")),
            ("257 \"/a", None),
            ("257 /a", None),
            ("257 \"C:\\\" is current", None),
        ] {
            assert_eq!(parse_257(text.as_bytes()).as_deref(), want, "{text}");
        }
    }

    #[test]
    fn features_that_are_refused() {
        for (line, want) in
            [(" AUTH TLS", true), (" PBSZ", true), (" EPSV", false), (" LPSV", true), (" MLST size*;", false)]
        {
            assert_eq!(is_left_out(line.as_bytes(), false), want, "{line}");
        }
        assert!(!is_left_out(b" AUTH TLS", true));
    }
}
