//! Arguments of the commands that change or end the running process: reload, upgrade and stop.

use std::path::PathBuf;

/// Arguments of `longsplice reload`.
#[derive(Debug, clap::Args)]
pub struct ReloadArgs {
    /// Judge live connections by the new rules and users, and reset those that are forbidden now, or whose user is gone.
    ///
    /// Their lines in the access log say how=forbidden, and why. The number of those that were reset is printed. `enforce = true` in
    /// the configuration file does this for every reload.
    #[arg(long)]
    pub enforce: bool,
}

/// Arguments of `longsplice upgrade`.
#[derive(Debug, clap::Args)]
pub struct UpgradeArgs {
    /// Start this program [default: the file from which the running process was started].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,

    /// Give up if a step takes longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub limit: u32,
}

/// Arguments of `longsplice stop`.
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// First stop accepting connections, and wait this long for the live ones to end [without a number: 30].
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "30")]
    pub drain: Option<u64>,

    /// Leave nothing in the kernel: reset flows that would otherwise stay, and remove the
    /// remains of a dead process in this network namespace, which ends its spliced flows.
    #[arg(long)]
    pub flush: bool,

    /// With --flush, also remove the remains of network namespaces that no longer exist: tables without a
    /// process and a device, and sockets without a listener. `longsplice run` does the same at its start.
    #[arg(long, requires = "flush")]
    pub all: bool,
}
