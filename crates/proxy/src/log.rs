//! What is told: the access log, and warnings that are not repeated at once.

pub mod access_log;
pub(crate) mod complaints;
