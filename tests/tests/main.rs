//! All integration tests of this crate, a module for each subject.

mod adoption;
mod ahead;
mod cache;
mod conntrack;
mod detached;
mod distance;
mod ecn;
mod endings;
mod first;
mod flow_records;
mod fragments;
mod handles;
mod interface;
mod lifecycle;
mod memory;
mod messages;
mod mtu;
mod object;
mod offloads;
mod offpath;
mod options;
mod packets;
mod paths;
mod peer;
mod plugged;
mod processors;
mod records;
mod scenarios;
mod simulator;
mod storm;
mod takeover;
mod tap;
mod tpot;
mod transparent;
mod turnover;

/// The processes that tests start ([`longsplice_tests::process`]).
#[test]
fn process() {
    longsplice_tests::process::serve();
}
