//! Typed access to the maps: path entries, records, and what belongs to them.

pub(crate) mod bpffs;
pub(crate) mod flow_records;
pub(crate) mod idle;
pub(crate) mod maps;
pub(crate) mod pages;
pub(crate) mod pinned;
pub(crate) mod pinned_names;
pub(crate) mod remotes;
pub(crate) mod rest;
