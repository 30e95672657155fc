//! A TOML file that is being read: the places of mistakes in it, and the paths that it names.

use super::ConfigError;
use std::{
    fmt::Display,
    ops::Range,
    path::{Path, PathBuf},
};

/// A file that is being read: where errors and relative paths start from.
pub(super) struct SourceFile<'a> {
    pub text: &'a str,
    pub file: &'a Path,
}

impl SourceFile<'_> {
    /// The error for a mistake at `span`.
    pub fn wrong(&self, span: Range<usize>, message: &(impl Display + ?Sized)) -> ConfigError {
        // A span may lie at the very end, and, from an error in the middle of a character, inside one.
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        let line_start = before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = String::from_utf8_lossy(&before[line_start..]).chars().count() + 1;
        ConfigError::Wrong { file: self.file.into(), line, column, message: with_cure(&message.to_string()) }
    }

    /// A path as the file means it: relative paths start at the file's directory.
    pub fn path(&self, path: &Path) -> PathBuf {
        self.file.parent().map_or_else(|| path.into(), |dir| dir.join(path))
    }
}

/// The messages of serde name what is expected, except one.
fn with_cure(message: &str) -> String {
    match message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        Some(field) => format!("{message}: add {field} = ... here"),
        None => message.into(),
    }
}
