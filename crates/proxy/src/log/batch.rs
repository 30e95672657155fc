//! Lines on their way to a destination.

/// Lines that are written together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Where each line ends.
    ends: Vec<usize>,
    /// Number of bytes, and of whole lines, that are written.
    written: usize,
    lines: usize,
}

impl Batch {
    pub fn push(&mut self, line: &[u8]) {
        self.bytes.extend_from_slice(line);
        self.ends.push(self.bytes.len());
    }

    /// Returns its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of lines that are not written as a whole.
    pub fn left(&self) -> u64 {
        (self.ends.len() - self.lines) as u64
    }

    /// Returns what is not written of the first line that is left; nothing if none is.
    pub fn line(&self) -> &[u8] {
        self.ends.get(self.lines).map_or(&[], |end| &self.bytes[self.written..*end])
    }

    /// Returns what is not written of as many lines as fit into `most` bytes, and of one at least.
    pub fn piece(&self, most: usize) -> &[u8] {
        let left = &self.ends[self.lines..];
        let fit = left.partition_point(|end| end - self.written <= most).max(1);
        left.get(fit.min(left.len()).wrapping_sub(1)).map_or(&[], |end| &self.bytes[self.written..*end])
    }

    /// Notes that so many more bytes are written. Returns how many lines are complete by that.
    pub fn wrote(&mut self, bytes: usize) -> u64 {
        self.written += bytes;
        let before = self.lines;
        self.lines += self.ends[before..].partition_point(|end| *end <= self.written);
        (self.lines - before) as u64
    }

    /// Leaves out the first line that is left.
    pub fn skip_line(&mut self) {
        let rest = self.line().len();
        self.wrote(rest);
    }

    /// Begins again with the line of which only a part is written.
    pub fn repeat_line(&mut self) {
        self.written = self.lines.checked_sub(1).map_or(0, |last| self.ends[last]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_when_they_are_complete() {
        let mut batch = Batch::default();
        assert_eq!((batch.left(), batch.line(), batch.piece(9)), (0, &b""[..], &b""[..]));
        ["one\n", "three\n", "x\n"].iter().for_each(|line| batch.push(line.as_bytes()));
        assert_eq!(
            (batch.piece(9), batch.piece(10), batch.piece(1)),
            (&b"one\n"[..], &b"one\nthree\n"[..], &b"one\n"[..])
        );
        assert_eq!((batch.wrote(6), batch.left(), batch.line()), (1, 2, &b"ree\n"[..]));
        batch.repeat_line();
        assert_eq!((batch.line(), batch.piece(100)), (&b"three\n"[..], &b"three\nx\n"[..]));
        assert_eq!((batch.wrote(8), batch.left(), batch.line()), (2, 0, &b""[..]));
        batch.repeat_line();
        assert_eq!(batch.piece(1), b"");
    }
}
