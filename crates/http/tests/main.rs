//! All integration tests of this crate, a module for each subject.

mod feed;
mod forwarding;
mod requests;
mod responses;
mod smuggling;
