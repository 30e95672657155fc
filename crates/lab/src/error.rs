//! Why the lab could not do what it was asked.

use std::io;
use std::process::ExitStatus;

/// Why a network could not be made or changed. None of these is about the traffic: see [`crate::traffic::How`].
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program of the system is missing or could not be started.
    #[error("cannot start {program}: {source}")]
    Missing {
        /// What was to be started.
        program: String,
        /// Why it was not.
        source: io::Error,
    },
    /// A program of the system refused.
    #[error("{program} failed ({status}): {output}")]
    Refused {
        /// What was started, with its arguments.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote to standard error.
        output: String,
    },
    /// A system call or a file failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The impairment program was not loaded or attached.
    #[error("{what}: {source}")]
    Bpf {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: libbpf_rs::Error,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s")]
    Late {
        /// What was awaited.
        what: String,
        /// How long it was awaited.
        seconds: u64,
    },
}

impl LabError {
    /// For `map_err`: the failure of a system call, with what was attempted.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// For `map_err`: the same for nix's error numbers.
    pub(crate) fn errno(what: impl Into<String>) -> impl FnOnce(nix::Error) -> Self {
        let what = what.into();
        move |errno| Self::Io { what, source: errno.into() }
    }
}
