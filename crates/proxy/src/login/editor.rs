//! Lines that a client types: ended by CR LF, CR NUL or LF, with the usual keys to correct them.

use crate::users::cleared::Cleared;

/// Maximum length of a line in bytes: as of a name or password (RFC 1929), and one more.
pub const LINE_MAX: usize = 256;

const BACKSPACE: u8 = 8;
const DELETE: u8 = 127;
/// Ctrl-C and Ctrl-D.
const INTERRUPT: u8 = 3;
const END: u8 = 4;
/// Ctrl-U.
const KILL: u8 = 21;

/// What a byte has done.
#[derive(Debug, PartialEq, Eq)]
pub enum Edit {
    /// The line goes on.
    Open,
    /// The line is complete.
    Line(Cleared),
    /// The line is complete, and the byte belongs to the next one.
    LineBefore(Cleared),
    /// The line is too long.
    TooLong,
    /// The client does not want to go on.
    Break,
}

/// The line that is being typed. Its memory is cleared, since it may be a password.
#[derive(Debug, Default)]
pub struct Editor {
    line: Cleared,
    /// The last byte was CR.
    returned: bool,
}

impl Editor {
    /// Takes a byte of data. Control characters are no part of a line.
    pub fn feed(&mut self, byte: u8) -> Edit {
        match (std::mem::take(&mut self.returned), byte) {
            (true, b'\n' | 0) | (false, b'\n') => return Edit::Line(std::mem::take(&mut self.line)),
            (true, _) => return Edit::LineBefore(std::mem::take(&mut self.line)),
            (false, b'\r') => self.returned = true,
            (false, BACKSPACE | DELETE) => self.erase(),
            (false, KILL) => self.kill(),
            (false, INTERRUPT) => return Edit::Break,
            (false, END) if self.line.is_empty() => return Edit::Break,
            (false, b) if b.is_ascii_control() => {}
            (false, _) if self.line.len() == LINE_MAX => return Edit::TooLong,
            (false, b) => self.line.push(b),
        }
        Edit::Open
    }

    /// Erases the last character, which may have several bytes (UTF-8).
    pub fn erase(&mut self) {
        while self.line.pop().is_some_and(|b| b & 0xc0 == 0x80) {}
    }

    /// Erases the line.
    pub fn kill(&mut self) {
        self.line = Cleared::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8]) -> Vec<String> {
        let mut editor = Editor::default();
        let mut lines = Vec::new();
        for byte in input {
            match editor.feed(*byte) {
                Edit::Open => {}
                Edit::Line(line) => lines.push(String::from_utf8(line.to_vec()).unwrap()),
                Edit::LineBefore(line) => {
                    lines.push(String::from_utf8(line.to_vec()).unwrap());
                    assert_eq!(editor.feed(*byte), Edit::Open);
                }
                other => lines.push(format!("{other:?}")),
            }
        }
        lines
    }

    #[test]
    fn every_end_of_a_line() {
        assert_eq!(lines(b"a\r\nb\r\0c\nd\re\n\r\n\n"), ["a", "b", "c", "d", "e", "", ""]);
        assert_eq!(lines(b"a\r"), [""; 0], "what follows the CR decides");
    }

    #[test]
    fn corrections() {
        assert_eq!(lines("ab\u{8}c\u{7f}\u{7f}\u{7f}x\u{15}yé\u{8}\n".as_bytes()), ["y"]);
        assert_eq!(lines(b"a\x1b[A\x07\tb\0\n"), ["a[Ab"]);
        assert_eq!(lines(b"x\x04\n\x04\x03"), ["x", "Break", "Break"]);
    }

    #[test]
    fn lines_have_a_limit() {
        let longest = [&[b'x'; LINE_MAX][..], b"\n"].concat();
        assert_eq!(lines(&longest)[0].len(), LINE_MAX);
        assert_eq!(lines(&[b'x'; LINE_MAX + 1]), ["TooLong"]);
    }
}
