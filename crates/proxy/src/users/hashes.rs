//! Slow password hashes, in the formats of password files.
//!
//! | form | written by | limit |
//! | --- | --- | --- |
//! | `$2a$`, `$2b$`, `$2y$` | `htpasswd -B` | a cost of [`BCRYPT_COST_MAX`] |
//! | `$5$`, `$6$` (SHA-crypt) | `openssl passwd -6`, `mkpasswd`, /etc/shadow | [`SHA_ROUNDS_MAX`] rounds |
//! | `$argon2id$` (RFC 9106) | `argon2 -id -e` | [`ARGON2_MEMORY_MAX`], and [`ARGON2_WORK_MAX`] |
//!
//! At its limit, each takes about a second of CPU time, so that no guess costs us more.

use argon2::{Argon2, PasswordHash, PasswordVerifier, password_hash};
use bcrypt::HashParts;
use sha_crypt::ShaCrypt;

/// Maximum cost of bcrypt; each step doubles the time.
pub const BCRYPT_COST_MAX: u32 = 14;
/// Maximum number of rounds of SHA-crypt; the default of the format is 5000.
pub const SHA_ROUNDS_MAX: u32 = 1_000_000;
/// Maximum memory of Argon2 in KiB; a listener may verify two passwords at the same time.
pub const ARGON2_MEMORY_MAX: u32 = 256 * 1024;
/// Maximum work of Argon2 in KiB written: memory times passes.
pub const ARGON2_WORK_MAX: u64 = 1024 * 1024;

/// A valid hash within the limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hash {
    kind: Kind,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bcrypt,
    Sha,
    Argon2,
}

/// Reason why a hash cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    /// Unknown scheme, or not a hash of its scheme.
    #[error(
        "not a hash of bcrypt ($2y$), SHA-crypt ($5$, $6$) or Argon2id: make one with `htpasswd -nB NAME`, \
         `openssl passwd -6` or `argon2 SALT -id -e`"
    )]
    Form,
    /// The cost of bcrypt is too high.
    #[error(
        "a cost of {0}: not above {BCRYPT_COST_MAX}, since each more takes twice the time: use `htpasswd -nB -C 10`"
    )]
    Cost(u32),
    /// The number of rounds of SHA-crypt is out of range; as in crypt(5), the minimum is 1000.
    #[error("rounds={0}: write a number from 1000 to {SHA_ROUNDS_MAX}, which take about a second, or none")]
    Rounds(String),
    /// The memory of Argon2 is too large.
    #[error("m={0}: not above {ARGON2_MEMORY_MAX} KiB, since two may be verified at the same time")]
    Memory(u32),
    /// The work of Argon2 is too large.
    #[error(
        "m={0},t={1}: m times t must not be above {ARGON2_WORK_MAX}, which takes about a second: RFC 9106 has m=65536,t=3"
    )]
    Work(u32, u32),
}

impl Hash {
    /// Parses a hash, and checks that it can be verified within the limits.
    pub fn read(text: &str) -> Result<Hash, HashError> {
        let scheme = text.split('$').nth(1).unwrap_or_default();
        let kind = match scheme {
            "5" | "6" => sha(text).map(|()| Kind::Sha)?,
            "argon2id" => argon2id(text).map(|()| Kind::Argon2)?,
            _ => {
                let cost = text.parse::<HashParts>().map_err(|_| HashError::Form)?.get_cost();
                if cost > BCRYPT_COST_MAX {
                    return Err(HashError::Cost(cost));
                }
                Kind::Bcrypt
            }
        };
        Ok(Hash { kind, text: text.into() })
    }

    /// Whether the hash matches the password; slow. An error says why that cannot be decided.
    pub fn verify(&self, password: &[u8]) -> Result<bool, String> {
        let found = match self.kind {
            Kind::Bcrypt => return bcrypt::verify(password, &self.text).map_err(|e| e.to_string()),
            Kind::Sha => ShaCrypt::SHA512.verify_password(password, self.text.as_str()),
            Kind::Argon2 => Argon2::default().verify_password(password, self.text.as_str()),
        };
        match found {
            Ok(()) => Ok(true),
            Err(password_hash::Error::PasswordInvalid) => Ok(false),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Checks `$6$[rounds=N$]SALT$HASH` according to crypt(5). Longer salts are refused, because
/// some programs would truncate them.
fn sha(text: &str) -> Result<(), HashError> {
    let fields: Vec<&str> = text.split('$').skip(1).collect();
    let (scheme, rounds, salt, hash) = match fields[..] {
        [scheme, salt, hash] => (scheme, None, salt, hash),
        [scheme, rounds, salt, hash] => (scheme, Some(rounds), salt, hash),
        _ => return Err(HashError::Form),
    };
    if let Some(rounds) = rounds {
        let rounds = rounds.strip_prefix("rounds=").ok_or(HashError::Form)?;
        let number = rounds.parse().ok().filter(|n| !rounds.starts_with('+') && (1000..=SHA_ROUNDS_MAX).contains(n));
        number.ok_or_else(|| HashError::Rounds(rounds.into()))?;
    }
    let length = if scheme == "5" { 43 } else { 86 };
    let plain = |s: &str| s.bytes().all(|b| b.is_ascii_alphanumeric() || b"./".contains(&b));
    let good = (1..=16).contains(&salt.len()) && hash.len() == length && plain(salt) && plain(hash);
    if good { Ok(()) } else { Err(HashError::Form) }
}

/// Checks the format of the Password Hashing Competition: `$argon2id$v=19$m=65536,t=3,p=4$SALT$HASH`.
fn argon2id(text: &str) -> Result<(), HashError> {
    let hash = PasswordHash::new(text).map_err(|_| HashError::Form)?;
    let params = argon2::Params::try_from(&hash).map_err(|_| HashError::Form)?;
    let plain = params.keyid().is_empty() && params.data().is_empty();
    if hash.version != Some(0x13) || hash.salt.is_none() || hash.hash.is_none() || !plain {
        return Err(HashError::Form);
    }
    let (memory, passes) = (params.m_cost(), params.t_cost());
    if memory > ARGON2_MEMORY_MAX {
        return Err(HashError::Memory(memory));
    }
    if u64::from(memory) * u64::from(passes) > ARGON2_WORK_MAX {
        return Err(HashError::Work(memory, passes));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From crypt(3), `openssl passwd`, and the reference implementation of Argon2.
    const KNOWN: &[(&str, &str)] = &[
        ("secret", "$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"),
        ("secret", "$5$saltstring$C3o4O1TC6aRHF4FI.QSZMXtHbaj2gSXr4sUc/3NcUi."),
        ("Hello world!", "$5$saltstring$5B8vYYiY.CVt1RlTTf8KbXBH3hsxY/GNooZaBBGWEc5"),
        ("Hello world!", "$5$rounds=10000$saltstringsaltst$3xv.VbSHBb41AL9AvLeujZkZRBAwqFMz2.opqey6IcA"),
        (
            "secret",
            "$6$saltstring$AIsRs/Ee56G/tC8MEHhvReZTfx8u3rXXMl6eYrjCG9ibix19DxoMBLogdTET5Ukw9Sf7eZTITsuk0Ry5qulYz.",
        ),
        (
            "Hello world!",
            "$6$saltstring$svn8UoSVapNtMuq1ukKS4tPQd8iKwSMHWjl/O817G3uBnIFNjnQJuesI68u4OTLiBFdcbYEdFCoEOfaS35inz1",
        ),
        ("password", "$argon2id$v=19$m=256,t=2,p=1$c29tZXNhbHQ$nf65EOgLrQMR/uIPnA4rEsF5h7TKyQwu9U1bMCHGi/4"),
        ("password", "$argon2id$v=19$m=256,t=2,p=2$c29tZXNhbHQ$bQk8UB/VmZZF4Oo79iDXuL5/0ttZwg2f/5U52iv1cDc"),
        ("password", "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"),
    ];

    #[test]
    fn known_hashes() {
        for (password, text) in KNOWN {
            let hash = Hash::read(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(hash.verify(password.as_bytes()), Ok(true), "{text}");
            for other in ["", "passwore", "Secret", "Hello world"] {
                assert_eq!(hash.verify(other.as_bytes()), Ok(false), "{other} {text}");
            }
        }
    }

    #[test]
    fn what_costs_too_much_or_is_no_hash() {
        let sha = |n: usize| "x".repeat(n);
        for (text, error) in [
            (KNOWN[0].1.replace("$04", "$15"), HashError::Cost(15)),
            ("$2y$04$short".into(), HashError::Form),
            ("$1$salt$hash".into(), HashError::Form),
            ("$apr1$salt$hash".into(), HashError::Form),
            ("$y$j9T$salt$hash".into(), HashError::Form),
            (format!("$6$salt${}", sha(85)), HashError::Form),
            (format!("$5$salt${}", sha(86)), HashError::Form),
            (format!("$6$${}", sha(86)), HashError::Form),
            (format!("$6$a b${}", sha(86)), HashError::Form),
            (format!("$6${}${}", sha(17), sha(86)), HashError::Form),
            (format!("$6$salt${}$", sha(86)), HashError::Form),
            (format!("$6$5000$salt${}", sha(86)), HashError::Form),
            (format!("$6$rounds=999$salt${}", sha(86)), HashError::Rounds("999".into())),
            (format!("$6$rounds=1000001$salt${}", sha(86)), HashError::Rounds("1000001".into())),
            (format!("$6$rounds=+5000$salt${}", sha(86)), HashError::Rounds("+5000".into())),
            (format!("$6$rounds=$salt${}", sha(86)), HashError::Rounds(String::new())),
            ("$argon2id$v=19$x".into(), HashError::Form),
            (KNOWN[6].1.replace("2id", "2i"), HashError::Form),
            (KNOWN[6].1.replace("v=19$", ""), HashError::Form),
            (KNOWN[6].1.replace("v=19", "v=16"), HashError::Form),
            (KNOWN[6].1.replace("t=2", "t=0"), HashError::Form),
            (KNOWN[6].1.replace("m=256", "m=7"), HashError::Form),
            (KNOWN[6].1.replace("p=1", "p=1,keyid=AAAA"), HashError::Form),
            ("$argon2id$v=19$m=256,t=2,p=1$c29tZXNhbHQ".into(), HashError::Form),
            (KNOWN[6].1.replace("m=256", "m=262145"), HashError::Memory(262_145)),
            (KNOWN[6].1.replace("m=256,t=2", "m=262144,t=5"), HashError::Work(262_144, 5)),
            (KNOWN[6].1.replace("t=2", "t=4294967295"), HashError::Work(256, u32::MAX)),
        ] {
            assert_eq!(Hash::read(&text), Err(error), "{text}");
        }
        for good in ["m=262144,t=4", "m=65536,t=3"] {
            assert!(Hash::read(&KNOWN[6].1.replace("m=256,t=2", good)).is_ok(), "{good}");
        }
        assert!(Hash::read(&format!("$6$rounds=1000000$salt${}", sha(86))).is_ok());
    }
}
