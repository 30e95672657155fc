//! The clock of the data path.

use std::time::Duration;

/// Returns CLOCK_MONOTONIC, the clock of the data path's time stamps.
pub fn monotonic() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("this clock always exists").into()
}
