//! All integration tests of this crate, a module for each subject.

mod impairment;
mod network;
mod traffic;
