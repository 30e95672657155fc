//! What is told: the access log, and warnings that are not repeated at once.

pub mod access_log;
mod batch;
pub(crate) mod calendar;
pub(crate) mod complaints;
mod fields;
mod out;
mod record;
pub mod sockets;
pub mod template;
pub(crate) mod turned_away;
