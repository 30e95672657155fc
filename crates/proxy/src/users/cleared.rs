//! Bytes whose memory is overwritten when they are dropped: passwords.

use std::{fmt, hint::black_box, ops::Deref};

/// Room that is taken at once: growing would leave copies behind.
const ROOM: usize = 512;

/// Bytes that leave no copy in memory. They are not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Cleared(Vec<u8>);

impl Cleared {
    /// Adds a byte.
    ///
    /// # Panics
    /// If there are more than 512.
    pub fn push(&mut self, byte: u8) {
        if self.0.capacity() == 0 {
            self.0.reserve_exact(ROOM);
        }
        assert!(self.0.len() < ROOM, "a limit is missing");
        self.0.push(byte);
    }

    /// Takes the last byte away.
    pub fn pop(&mut self) -> Option<u8> {
        let last = self.0.last_mut()?;
        let byte = std::mem::take(last);
        self.0.pop();
        Some(byte)
    }

    /// Takes the bytes over.
    pub fn from_vec(bytes: Vec<u8>) -> Cleared {
        Cleared(bytes)
    }
}

impl Deref for Cleared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Cleared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(not shown)")
    }
}

impl Drop for Cleared {
    fn drop(&mut self) {
        clear(&mut self.0);
    }
}

/// Overwrites bytes that nobody reads any more.
pub(crate) fn clear(bytes: &mut [u8]) {
    bytes.fill(0);
    black_box(bytes); // or the compiler would leave it out
}
