//! Whether there is a place for files, without making any.

use nix::{
    errno::Errno,
    unistd::{AccessFlags, access},
};
use std::{io, path::Path};

/// Checks whether files can be made in a directory, or the directory itself.
pub(crate) fn can_have(dir: &Path) -> io::Result<()> {
    let there = dir.ancestors().find(|d| d.exists()).unwrap_or(Path::new("."));
    if !there.is_dir() {
        // as mkdir(2) would say
        return Err(if there == dir { Errno::EEXIST } else { Errno::ENOTDIR }.into());
    }
    Ok(access(there, AccessFlags::W_OK | AccessFlags::X_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn directories_that_can_be_had() {
        let dir = tempfile::tempdir().unwrap();
        assert!(can_have(dir.path()).is_ok() && can_have(&dir.path().join("a/b")).is_ok());
        assert!(!dir.path().join("a").exists(), "nothing is created");
        fs::write(dir.path().join("file"), "").unwrap();
        for file in ["file", "file/below"] {
            let file = dir.path().join(file);
            let made = fs::DirBuilder::new().recursive(true).create(&file).unwrap_err();
            assert_eq!(can_have(&file).unwrap_err().to_string(), made.to_string(), "{}", file.display());
        }
    }
}
