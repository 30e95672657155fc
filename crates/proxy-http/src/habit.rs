//! What the replies of a server are like.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Number of replies after a long one during which another long one is expected.
const MEMORY: u32 = 16;

/// Whether replies of a server tend to be long enough for a splice. A server with long replies gets a small window, so that little
/// is sent before the splice ([`Stream::limit`](crate::stream::Stream::limit)). Replies that are copied would be slower with it.
#[derive(Debug)]
pub(crate) struct Habit {
    /// Number of replies since the last long one.
    since: AtomicU32,
}

impl Habit {
    /// Whether the next reply is expected to be long.
    pub fn is_long(&self) -> bool {
        self.since.load(Relaxed) < MEMORY
    }

    /// Records a reply.
    pub fn note(&self, long: bool) {
        let since = self.since.load(Relaxed);
        // A race loses one reply among many.
        self.since.store(if long { 0 } else { since.saturating_add(1) }, Relaxed);
    }
}

impl Default for Habit {
    /// Nothing is known: most replies are short.
    fn default() -> Habit {
        Habit { since: AtomicU32::new(MEMORY) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_long_reply_among_some() {
        let habit = Habit::default();
        assert!(!habit.is_long());
        habit.note(true);
        (1..MEMORY).for_each(|_| habit.note(false));
        assert!(habit.is_long());
        habit.note(false);
        assert!(!habit.is_long());
    }
}
