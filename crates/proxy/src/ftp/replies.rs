//! How far the replies to a command have come.

use super::line::ReplyLine;

/// Preliminary replies (1xx) to a command. One is the rule (RFC 959, 5.4). Some servers send one now and then while they compute,
/// so there is room for one each ten seconds for nearly three hours; a server that sends them without end loses its client.
pub const PRELIMINARY_MAX: u32 = 1000;

/// What has come so far.
#[derive(Debug, Default)]
pub struct Progress {
    /// The code of the reply whose lines are coming.
    within: Option<u16>,
    preliminary: u32,
}

/// There are more than [`PRELIMINARY_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {PRELIMINARY_MAX} preliminary replies")]
pub struct NoEnd;

impl Progress {
    /// Returns the code of the reply whose first line has come, and whose last one has not.
    pub fn within(&self) -> Option<u16> {
        self.within
    }

    /// Takes note of a line. Returns the code of the reply that ends with it. Those from 200 on are final.
    pub fn note(&mut self, line: &ReplyLine) -> Result<Option<u16>, NoEnd> {
        self.within = if line.is_last { None } else { Some(line.code) };
        if !line.is_last {
            return Ok(None);
        }
        if line.code < 200 {
            self.preliminary += 1;
            if self.preliminary > PRELIMINARY_MAX {
                return Err(NoEnd);
            }
        }
        Ok(Some(line.code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_counted() {
        let line = |code, is_last| ReplyLine { code, is_last, text: Vec::new(), synch: false };
        let mut progress = Progress::default();
        for _ in 0..PRELIMINARY_MAX {
            assert_eq!((progress.note(&line(150, false)), progress.within()), (Ok(None), Some(150)));
            assert_eq!((progress.note(&line(150, true)), progress.within()), (Ok(Some(150)), None));
        }
        assert_eq!((progress.note(&line(226, false)), progress.note(&line(226, true))), (Ok(None), Ok(Some(226))));
        assert_eq!(progress.note(&line(150, false)), Ok(None));
        assert_eq!(progress.note(&line(150, true)), Err(NoEnd));
    }
}
