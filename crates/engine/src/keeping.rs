//! The threads that have all flows: the keeper, take-over from an earlier process, and what these watch.

pub(crate) mod adoption;
mod agenda;
mod deserted;
mod guard;
pub(crate) mod keeper;
pub(crate) mod paths;
mod shortage;
mod sweeper;
