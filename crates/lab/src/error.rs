//! Errors of the lab.

use std::io;
use std::process::ExitStatus;

/// Why a network could not be created or changed. None of these concerns the traffic: see `traffic::StreamEnd`.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A system program is missing or could not be started.
    #[error("cannot start {program}: {source}")]
    Missing {
        /// The program.
        program: String,
        /// The error of the start.
        source: io::Error,
    },
    /// A system program failed.
    #[error("{program} failed ({status}): {output}")]
    Refused {
        /// The program and its arguments.
        program: String,
        /// Its exit status.
        status: ExitStatus,
        /// Its output on standard error.
        output: String,
    },
    /// A system call or a file operation failed.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The error.
        source: io::Error,
    },
    /// The impairment program could not be loaded or attached.
    #[error("{what}: {source}")]
    Bpf {
        /// The attempted operation.
        what: String,
        /// The error.
        source: libbpf_rs::Error,
    },
    /// An event did not happen in time.
    #[error("{what} did not happen within {seconds} s")]
    Late {
        /// The expected event.
        what: String,
        /// The time limit in seconds.
        seconds: u64,
    },
}

impl LabError {
    /// Returns a closure for `map_err` that turns a system call's error into a `LabError` with the attempted operation.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// The same for error numbers of nix.
    pub(crate) fn errno(what: impl Into<String>) -> impl FnOnce(nix::Error) -> Self {
        let what = what.into();
        move |errno| Self::Io { what, source: errno.into() }
    }
}
