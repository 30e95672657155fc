//! Programs that are asked something. Each has a process group of its own: if there is no answer in time, all that it has started
//! ends with it.

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use std::{io, path::Path, process::Stdio};
use tokio::process::{Child, Command};

/// A program that runs. With this, it is killed together with all that it has started, unless it was waited for.
#[derive(Debug)]
pub(crate) struct Running(pub Child);

impl Running {
    /// Returns the command that runs this program without our environment, and without input and output.
    pub fn command(program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/bin:/bin").process_group(0).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Starts it.
    pub fn start(command: &mut Command) -> io::Result<Running> {
        command.spawn().map(Running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // None once it was waited for: its number may soon be another's
        if let Some(group) = self.0.id().and_then(|id| i32::try_from(id).ok()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL); // they may just have ended
        }
    }
}
