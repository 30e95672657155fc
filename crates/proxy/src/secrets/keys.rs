//! Files of keys: what proxies share with the hosts whose connections they may intercept.

use crate::secrets::{self, Secret, SecretError};
use longsplice_engine::{TPOT_KEYS, TpotKey};
use std::path::{Path, PathBuf};

/// Length of a key in hexadecimal digits: 128 bits.
const DIGITS: usize = 32;

/// Reason why a file of keys is refused. None of them tells a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file cannot be read, or is not for its owner alone.
    #[error(transparent)]
    File(#[from] SecretError),
    /// A line is no key.
    #[error("{}:{line}:{column}: {mistake}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Character in the line, from 1.
        column: usize,
        /// The mistake, and what to write instead.
        mistake: KeyMistake,
    },
    /// There is no key in it.
    #[error("{} has no key: write one of {DIGITS} hexadecimal digits, such as `openssl rand -hex 16` prints", file.display())]
    Empty {
        /// The file.
        file: PathBuf,
    },
}

/// What is wrong with a line of a file of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyMistake {
    /// It has another number of digits.
    #[error("{0} digits: a key has {DIGITS} hexadecimal ones, such as `openssl rand -hex 16` prints")]
    Length(usize),
    /// A character is no digit.
    #[error("no hexadecimal digit: a key has {DIGITS} of them, and nothing else is in its line")]
    Digit,
    /// An earlier line has the same key.
    #[error("this key is there twice: remove one")]
    Twice,
    /// There are more than [`TPOT_KEYS`].
    #[error("more than {TPOT_KEYS} keys: remove those that are no longer of use")]
    Many,
}

/// Reads a file of keys: one in each line, as 32 hexadecimal digits. Empty lines and lines that begin with `#` are skipped. The
/// file must be for its owner alone.
pub fn read_keys(file: &Path) -> Result<Vec<TpotKey>, KeyFileError> {
    let path = || file.to_owned();
    let Secret { text, exposed } = secrets::read(file)?;
    if exposed {
        return Err(SecretError::Mode { file: path() }.into());
    }
    let wrong = |(line, column, mistake)| KeyFileError::Line { file: path(), line, column, mistake };
    let keys = parse(&text).map_err(wrong)?;
    if keys.is_empty() { Err(KeyFileError::Empty { file: path() }) } else { Ok(keys) }
}

/// An error comes with its line and column, from 1.
fn parse(text: &str) -> Result<Vec<TpotKey>, (usize, usize, KeyMistake)> {
    let mut keys = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#')) {
        let key = key(line.trim_end()).map_err(|(column, mistake)| (i + 1, column, mistake))?;
        if keys.contains(&key) {
            return Err((i + 1, 1, KeyMistake::Twice));
        }
        if keys.len() == TPOT_KEYS {
            return Err((i + 1, 1, KeyMistake::Many));
        }
        keys.push(key);
    }
    Ok(keys)
}

fn key(line: &str) -> Result<TpotKey, (usize, KeyMistake)> {
    let digit = |(at, c): (usize, char)| c.to_digit(16).ok_or((at + 1, KeyMistake::Digit));
    let digits = line.chars().enumerate().map(digit).collect::<Result<Vec<u32>, _>>()?;
    if digits.len() != DIGITS {
        return Err((1, KeyMistake::Length(digits.len())));
    }
    Ok(TpotKey(std::array::from_fn(|i| (digits[2 * i] << 4 | digits[2 * i + 1]) as u8)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    const ONE: &str = "000102030405060708090a0b0c0d0e0f";
    const TWO: &str = "FFeeddccbbaa99887766554433221100";

    #[test]
    fn keys_and_comments() {
        let first = TpotKey(std::array::from_fn(|i| i as u8));
        assert_eq!(parse(&format!("{ONE}\n")), Ok(vec![first]));
        let keys = parse(&format!("# new\r\n{TWO} \r\n\r\n# old\n{ONE}")).unwrap();
        assert_eq!((keys.len(), keys[0].0[..3].to_vec(), keys[1]), (2, vec![0xff, 0xee, 0xdd], first));
        assert_eq!(format!("{keys:?}"), "[TpotKey, TpotKey]", "a log tells nobody");
    }

    #[test]
    fn typing_mistakes() {
        let five: String = (0..5).map(|i| format!("{i}{}\n", &ONE[1..])).collect();
        for (text, want) in [
            (format!("{ONE}\n{}", &ONE[1..]), (2, 1, KeyMistake::Length(31))),
            (format!("\n{ONE}0"), (2, 1, KeyMistake::Length(33))),
            (format!("0x{}", &ONE[2..]), (1, 2, KeyMistake::Digit)),
            (format!("{ONE} # old"), (1, 33, KeyMistake::Digit)),
            (format!(" {ONE}"), (1, 1, KeyMistake::Digit)),
            (format!("k\u{e9}y: {ONE}"), (1, 1, KeyMistake::Digit)),
            (format!("{TWO}\n#\n{ONE}\n{}", TWO.to_lowercase()), (4, 1, KeyMistake::Twice)),
            (five, (5, 1, KeyMistake::Many)),
        ] {
            let e = parse(&text).unwrap_err();
            assert_eq!(e, want, "{text}");
            assert!(!e.2.to_string().contains(&ONE[4..20]));
        }
    }

    #[test]
    fn files_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let refusal = || read_keys(&file).map(drop).map_err(|e| e.to_string());
        assert!(refusal().unwrap_err().starts_with(&format!("cannot read {}: No such file", file.display())));
        for (mode, good) in
            [(0o600, true), (0o400, true), (0o640, false), (0o620, false), (0o604, false), (0o602, false)]
        {
            fs::write(&file, ONE).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(refusal().is_ok(), good, "{mode:o}");
            assert!(good || refusal().unwrap_err().ends_with("chmod 600 it"));
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        }
        fs::write(&file, "# none yet\n").unwrap();
        assert!(refusal().unwrap_err().contains("openssl rand -hex 16"));
        fs::write(&file, "12\n").unwrap();
        assert!(refusal().unwrap_err().starts_with(&format!("{}:1:1: 2 digits: ", file.display())));
    }
}
