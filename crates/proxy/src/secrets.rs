//! Files that hold secrets: passwords and keys. One rule for all: they belong to root or to the user who runs the program, and
//! nobody else may write them; otherwise they are refused. Who may read them is up to the caller.

pub mod keys;

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Contents of such a file.
pub(crate) struct Secret {
    pub text: String,
    /// Whether others than its owner may read it.
    pub exposed: bool,
}

/// Reason why such a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// It belongs to a user who is neither root nor the one who runs the program.
    #[error("{} holds secrets, and belongs to another user (number {owner}): chown it to root, or to the user of this program", file.display())]
    Owner {
        /// The file.
        file: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Others than its owner may write it, or read it where that matters.
    #[error("{} holds secrets, and others may read or write it: chmod 600 it", file.display())]
    Mode {
        /// The file.
        file: PathBuf,
    },
}

/// Reads a file that holds secrets.
pub(crate) fn read(path: &Path) -> Result<Secret, SecretError> {
    let file = || path.to_owned();
    let failed = |source| SecretError::Read { file: path.to_owned(), source };
    let mut open = File::open(path).map_err(failed)?;
    let of = open.metadata().map_err(failed)?;
    if !is_trusted(of.uid()) {
        return Err(SecretError::Owner { file: file(), owner: of.uid() });
    }
    if of.mode() & 0o022 != 0 {
        return Err(SecretError::Mode { file: file() });
    }
    let text = io::read_to_string(&mut open).map_err(failed)?;
    Ok(Secret { text, exposed: of.mode() & 0o055 != 0 })
}

/// Whether a file of this user may decide what the program does.
pub(crate) fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == nix::unistd::Uid::effective().as_raw()
}
