//! A TOML file during parsing: positions of mistakes, and paths relative to the file.

use super::ConfigError;
use std::{
    cell::{Cell, RefCell},
    fmt::Display,
    ops::Range,
    path::{Path, PathBuf},
};

/// A file during parsing, the base of error positions and relative paths.
pub(super) struct SourceFile<'a> {
    pub text: &'a str,
    pub file: &'a Path,
    /// What works but is hardly meant, with its place.
    pub warnings: RefCell<Vec<String>>,
    /// There are passwords in it that are not hashes.
    pub has_passwords: Cell<bool>,
}

impl SourceFile<'_> {
    /// Returns the error for a mistake at `span`.
    pub fn wrong(&self, span: Range<usize>, message: &(impl Display + ?Sized)) -> ConfigError {
        // A span may lie at the very end of the text, or inside a character if the error is there.
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        let line_start = before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = String::from_utf8_lossy(&before[line_start..]).chars().count() + 1;
        ConfigError::Wrong { file: self.file.into(), line, column, message: with_cure(&message.to_string()) }
    }

    /// Returns the place of `span`: `FILE:LINE:COLUMN`.
    pub fn place(&self, span: Range<usize>) -> String {
        let wrong = self.wrong(span, "").to_string();
        wrong.trim_end_matches(": ").to_owned()
    }

    /// Warns of what is at `span`: it works, but is hardly meant.
    pub fn warn(&self, span: Range<usize>, message: &(impl Display + ?Sized)) {
        self.warnings.borrow_mut().push(format!("{}: {message}", self.place(span)));
    }

    /// Resolves a path in the file: relative paths start at the directory of the file.
    pub fn path(&self, path: &Path) -> PathBuf {
        self.file.parent().map_or_else(|| path.into(), |dir| dir.join(path))
    }
}

/// Adds advice to a message of serde. Its messages name what is expected, except for missing fields.
fn with_cure(message: &str) -> String {
    match message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        Some(field) => format!("{message}: add {field} = ... here"),
        None => message.into(),
    }
}
