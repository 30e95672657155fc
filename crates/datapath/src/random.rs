//! A random number, without a library for it.

/// Returns a random number, from the keys that the standard library draws for its hashes.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
