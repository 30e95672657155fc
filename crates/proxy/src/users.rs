//! The users of a SOCKS or HTTP listener, and a password check that takes the same time for every result.
//!
//! RFC 1929 and RFC 7617 send passwords in the clear: they keep strangers out of a proxy on a trusted network, and are
//! useless on any other. The configuration has them in the clear, or as slow hashes: bcrypt, SHA-crypt or Argon2id.

pub mod cleared;
pub(crate) mod external_check;
pub(crate) mod failures;
pub mod hashes;
mod verify;

use crate::{
    later::Later,
    users::{
        cleared::clear,
        failures::{Failures, WRONG},
        hashes::{Hash, HashError},
        verify::Verifier,
    },
};
use std::{collections::BTreeMap, fmt, hint::black_box, net::IpAddr, sync::Arc};

/// Maximum length of a name or password in bytes, because the length field is one byte (RFC 1929, section 2).
const LEN_MAX: usize = 255;

/// User name and password (RFC 1929, section 2): any bytes, not empty.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub name: Vec<u8>,
    /// Password.
    pub password: Vec<u8>,
}

impl Drop for Credentials {
    fn drop(&mut self) {
        clear(&mut self.password);
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials {{ name: {:?}, .. }}", String::from_utf8_lossy(&self.name))
    }
}

/// User names and passwords. Empty: no authentication.
#[derive(Clone)]
pub struct Users {
    secrets: Later<BTreeMap<String, Secret>>,
    verifier: Arc<Verifier>,
    failures: Arc<Failures>,
}

impl Default for Users {
    fn default() -> Users {
        Users { secrets: Later::default(), verifier: Arc::default(), failures: Arc::new(Failures::new(WRONG)) }
    }
}

/// Why a request has no user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoUser {
    /// Name or password is wrong.
    Wrong,
    /// The client has had too many wrong ones: this one was not looked at.
    TooMany,
}

impl NoUser {
    /// Returns the words for the log.
    pub fn why(self) -> &'static str {
        match self {
            NoUser::Wrong => "wrong name or password",
            NoUser::TooMany => "too many wrong passwords from this address",
        }
    }
}

#[derive(Clone, PartialEq, Eq)]
enum Secret {
    Clear(String),
    /// Hash of the form `$SCHEME$...`.
    Hashed(Hash),
}

/// Reason why a user cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The name exists already.
    #[error("user {0:?} is there twice: remove one")]
    Twice(String),
    /// The length of name or password does not fit the protocol.
    #[error("user {0:?}: name and password have to be 1 to 255 bytes long (RFC 1929)")]
    Length(String),
    /// The password looks like a hash, and cannot be verified as one.
    #[error("user {0:?}: {1}")]
    Hash(String, HashError),
    /// A line of a users file has no colon.
    #[error("no colon: write NAME:PASSWORD")]
    NoColon,
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.secrets.own.keys()).finish()
    }
}

impl PartialEq for Users {
    fn eq(&self, other: &Users) -> bool {
        self.secrets == other.secrets
    }
}

impl Eq for Users {}

impl Secret {
    /// A hash begins with its scheme between dollar signs, as in crypt(5).
    fn read(text: &str) -> Result<Secret, HashError> {
        let scheme = text.strip_prefix('$').and_then(|rest| rest.split_once('$')).map(|(scheme, _)| scheme);
        let is_scheme = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !scheme.is_some_and(is_scheme) {
            return Ok(Secret::Clear(text.into()));
        }
        Hash::read(text).map(Secret::Hashed)
    }
}

impl Users {
    /// Whether authentication is not required.
    pub fn is_empty(&self) -> bool {
        self.secrets.now().is_empty()
    }

    /// Whether there are passwords that are not hashes.
    pub(crate) fn has_plain(&self) -> bool {
        self.secrets.own.values().any(|secret| matches!(secret, Secret::Clear(_)))
    }

    /// Returns all user names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.secrets.own.keys().map(String::as_str)
    }

    /// Takes their place behind those that the listener has had before, if it was there. Failed logins count on: a reload must not
    /// allow more guesses.
    pub(crate) fn follow(&mut self, before: Option<&Users>) {
        self.secrets.follow(before.map(|users| &users.secrets));
        before.into_iter().for_each(|before| self.failures = before.failures.clone());
    }

    /// From now on, only these count for connections that began with earlier ones.
    pub(crate) fn replace_earlier(&self) {
        self.secrets.replace_earlier();
    }

    /// Returns whether there is such a user.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.secrets.own.contains_key(name)
    }

    /// Adds a user. A password of the form `$SCHEME$...` is taken as a hash.
    pub fn add(&mut self, name: &str, password: &str) -> Result<(), UserError> {
        let fits = |s: &str| (1..=LEN_MAX).contains(&s.len());
        if !fits(name) || !fits(password) {
            return Err(UserError::Length(name.into()));
        }
        let secret = Secret::read(password).map_err(|e| UserError::Hash(name.into(), e))?;
        let secrets = Arc::make_mut(&mut self.secrets.own);
        if secrets.contains_key(name) {
            return Err(UserError::Twice(name.into()));
        }
        secrets.insert(name.into(), secret);
        Ok(())
    }

    /// Adds the users of a file with lines `NAME:PASSWORD`; empty lines and lines that begin
    /// with `#` are skipped. An error comes with the line number, from 1.
    pub fn add_lines(&mut self, text: &str) -> Result<(), (usize, UserError)> {
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#')) {
            let added = line.split_once(':').ok_or(UserError::NoColon).and_then(|(n, p)| self.add(n, p));
            added.map_err(|e| (i + 1, e))?;
        }
        Ok(())
    }

    /// Returns the name if the password is right, unless this client has guessed too often. Needs a runtime.
    pub async fn check_of(&self, client: IpAddr, given: &Credentials) -> Result<String, NoUser> {
        let check = async { self.check(given).await.ok_or(()) };
        self.failures.check(client, check).await.map_err(|(why, _)| why)
    }

    /// The same without a limit of guesses. An unknown name takes as long as a wrong
    /// password. Hashes are computed by other threads, only a few at a time.
    pub(crate) async fn check(&self, given: &Credentials) -> Option<String> {
        let secrets = self.secrets.now();
        let known = std::str::from_utf8(&given.name).ok().and_then(|name| secrets.get_key_value(name));
        let any_hash = || secrets.values().find(|s| matches!(s, Secret::Hashed(_)));
        let same = match known.map(|(_, secret)| secret).or_else(any_hash) {
            Some(Secret::Hashed(hash)) => self.verifier.verify(hash, &given.password).await,
            Some(Secret::Clear(password)) => equal(password.as_bytes(), &given.password),
            None => equal(b"", &given.password),
        };
        known.filter(|_| same).map(|(name, _)| name.clone())
    }
}

/// Compares in constant time: all bytes, over a fixed length.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let at = |s: &[u8], i: usize| s.get(i).copied().unwrap_or(0);
    let differences = (0..LEN_MAX).fold(a.len() ^ b.len(), |d, i| black_box(d | usize::from(at(a, i) ^ at(b, i))));
    differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// crypt(3) of `secret`.
    const HASHED: &str = "$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW";

    /// `secret` hashed by `openssl passwd -6` and `argon2 -id -e`.
    const SHA: &str =
        "$6$saltstring$AIsRs/Ee56G/tC8MEHhvReZTfx8u3rXXMl6eYrjCG9ibix19DxoMBLogdTET5Ukw9Sf7eZTITsuk0Ry5qulYz.";
    const ARGON: &str = "$argon2id$v=19$m=1024,t=3,p=4$c29tZXNhbHQxMjM$glqbMvsRZLXtVSu2QUiDfp8m3+qbyA/XV/CRg73n6wc";

    async fn check(users: &Users, name: &[u8], password: &[u8]) -> Option<String> {
        users.check(&Credentials { name: name.into(), password: password.into() }).await
    }

    #[tokio::test]
    async fn right_and_wrong_passwords() {
        let mut users = Users::default();
        users.add_lines("# staff\n\nann:secret\nbob:a:b\n").unwrap();
        assert_eq!(check(&users, b"ann", b"secret").await.as_deref(), Some("ann"));
        assert_eq!(check(&users, b"bob", b"a:b").await.as_deref(), Some("bob"));
        for (name, password) in [
            (&b"ann"[..], &b"secreT"[..]),
            (b"ann", b"secret2"),
            (b"ann", b""),
            (b"eve", b""),
            (b"\xff", b"x"),
            (b"Ann", b"secret"),
        ] {
            assert_eq!(check(&users, name, password).await, None);
        }
    }

    #[tokio::test]
    async fn hashed_passwords() {
        let mut users = Users::default();
        users.add_lines(&format!("ann:{HASHED}\nsha:{SHA}\nargon:{ARGON}\nbob:in the clear\neve:$1\n")).unwrap();
        for _ in 0..2 {
            // the second time from memory
            for name in ["ann", "sha", "argon"] {
                assert_eq!(check(&users, name.as_bytes(), b"secret").await.as_deref(), Some(name));
                assert_eq!(check(&users, name.as_bytes(), b"Secret").await, None);
            }
        }
        assert_eq!(check(&users, b"nobody", b"secret").await, None, "right for another");
        assert_eq!(check(&users, b"ann", HASHED.as_bytes()).await, None);
        assert_eq!(check(&users, b"bob", b"in the clear").await.as_deref(), Some("bob"));
        assert_eq!(check(&users, b"eve", b"$1").await.as_deref(), Some("eve"));
        for (hash, why) in [("$6$salt$hash", HashError::Form), (&HASHED.replace("$04", "$15"), HashError::Cost(15))] {
            assert_eq!(Users::default().add("ann", hash), Err(UserError::Hash("ann".into(), why)), "{hash}");
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
