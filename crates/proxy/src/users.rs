//! The users of a SOCKS or HTTP listener, and the check of a password that takes the same time for every answer.
//!
//! RFC 1929 and RFC 7617 send passwords in the clear, and they stand in the configuration in the clear: they keep strangers out
//! of a proxy on a trusted network and are worth nothing on any other.

use crate::socks5::Credentials;
use std::{collections::BTreeMap, fmt, hint::black_box};

/// RFC 1929, section 2: the length is one byte.
const LEN_MAX: usize = 255;

/// Names and passwords. Empty means that nobody has to authenticate.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Users(BTreeMap<String, String>);

/// Why a user cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The name was given before.
    #[error("user {0:?} is there twice: remove one")]
    Twice(String),
    /// The length does not fit the protocol.
    #[error("user {0:?}: name and password have to be 1 to 255 bytes long (RFC 1929)")]
    Length(String),
    /// A line of a users file has no colon.
    #[error("no colon: write NAME:PASSWORD")]
    NoColon,
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Users {
    /// Whether nobody has to authenticate.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Adds a user.
    pub fn add(&mut self, name: &str, password: &str) -> Result<(), UserError> {
        let fits = |s: &str| (1..=LEN_MAX).contains(&s.len());
        if !fits(name) || !fits(password) {
            return Err(UserError::Length(name.into()));
        }
        if self.0.contains_key(name) {
            return Err(UserError::Twice(name.into()));
        }
        self.0.insert(name.into(), password.into());
        Ok(())
    }

    /// Adds the users of a file with lines `NAME:PASSWORD`; empty lines and lines that begin with `#` are skipped.
    /// The error comes with the number of its line.
    pub fn add_lines(&mut self, text: &str) -> Result<(), (usize, UserError)> {
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#')) {
            let added = line.split_once(':').ok_or(UserError::NoColon).and_then(|(n, p)| self.add(n, p));
            added.map_err(|e| (i + 1, e))?;
        }
        Ok(())
    }

    /// The name, if the password is right. An unknown name costs as much time as a wrong password.
    pub fn check(&self, given: &Credentials) -> Option<&str> {
        let known = std::str::from_utf8(&given.name).ok().and_then(|name| self.0.get_key_value(name));
        let right = known.map_or("", |(_, password)| password);
        let same = equal(right.as_bytes(), &given.password);
        known.filter(|_| same).map(|(name, _)| name.as_str())
    }
}

/// Compares without stopping at the first difference, over a length that does not depend on either.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let at = |s: &[u8], i: usize| s.get(i).copied().unwrap_or(0);
    let differences = (0..LEN_MAX).fold(a.len() ^ b.len(), |d, i| black_box(d | usize::from(at(a, i) ^ at(b, i))));
    differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(users: &Users, name: &[u8], password: &[u8]) -> Option<String> {
        users.check(&Credentials { name: name.into(), password: password.into() }).map(Into::into)
    }

    #[test]
    fn right_and_wrong_passwords() {
        let mut users = Users::default();
        users.add_lines("# staff\n\nann:secret\nbob:a:b\n").unwrap();
        assert_eq!(check(&users, b"ann", b"secret").as_deref(), Some("ann"));
        assert_eq!(check(&users, b"bob", b"a:b").as_deref(), Some("bob"));
        for (name, password) in [
            (&b"ann"[..], &b"secreT"[..]),
            (b"ann", b"secret2"),
            (b"ann", b""),
            (b"eve", b""),
            (b"\xff", b"x"),
            (b"Ann", b"secret"),
        ] {
            assert_eq!(check(&users, name, password), None);
        }
    }

    #[test]
    fn bad_lines_are_named() {
        let add = |text| Users::default().add_lines(text);
        assert_eq!(add("ann:x\nbob"), Err((2, UserError::NoColon)));
        assert_eq!(add("ann:x\nann:y"), Err((2, UserError::Twice("ann".into()))));
        assert_eq!(add(":x"), Err((1, UserError::Length("".into()))));
        assert_eq!(add("ann:"), Err((1, UserError::Length("ann".into()))));
        assert_eq!(Users::default().add("ann", &"x".repeat(256)), Err(UserError::Length("ann".into())));
    }

    #[test]
    fn passwords_are_not_shown() {
        let mut users = Users::default();
        users.add("ann", "secret").unwrap();
        assert_eq!(format!("{users:?}"), r#"{"ann"}"#);
    }
}
