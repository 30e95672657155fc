//! From options to an open data path, by taking over what is pinned, and its removal.

pub(crate) mod flush;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod takeover;
