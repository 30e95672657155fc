//! Open destinations of the access log, and how files are written.

use super::{batch::Batch, sockets::Connection};
use nix::{
    errno::Errno,
    fcntl, libc,
    sys::stat::{SFlag, fstat},
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

/// An open destination.
pub(super) enum Out {
    Stdout,
    File(PathBuf, File),
    Socket(Connection),
}

impl Out {
    /// Opens the file. Does not wait for somebody to read a FIFO: the program could not be stopped meanwhile.
    pub fn file(path: &Path, create: bool) -> io::Result<File> {
        // Other users of the machine must not read which client connected where.
        let mut options = OpenOptions::new();
        options.append(true).create(create).mode(0o640).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(|e| match e.raw_os_error() {
            Some(libc::ENXIO) => io::Error::other("it is a FIFO that nobody reads; start its reader first"),
            _ => e,
        })?;
        // The writer may wait.
        let flags = fcntl::fcntl(file.as_fd(), fcntl::FcntlArg::F_GETFL)?;
        let flags = fcntl::OFlag::from_bits_retain(flags) - fcntl::OFlag::O_NONBLOCK;
        fcntl::fcntl(file.as_fd(), fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(file)
    }

    /// Opens the file or connection anew.
    pub fn reopen(&mut self) {
        let (path, file) = match self {
            Out::Stdout => return,
            Out::File(path, file) => (path, file),
            Out::Socket(connection) => return connection.close(),
        };
        match Out::file(path, true) {
            Ok(new) => *file = new,
            Err(e) => {
                tracing::error!("cannot reopen the access log {}: {e}; still writing to the old file", path.display());
            }
        }
    }

    /// Writes lines into a file. `written` is told how many have been written as it goes on.
    pub fn write_all(&mut self, batch: &mut Batch, written: impl Fn(u64)) -> io::Result<()> {
        let most = self.piece();
        while batch.left() > 0 {
            match self.write(batch.piece(most)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => written(batch.wrote(n)),
                Err(e) if e.raw_os_error() == Some(Errno::EINTR as i32) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns how many bytes to write at a time. A pipe takes a call that is not longer as a whole or not at all (POSIX, `PIPE_BUF`),
    /// so it is known what has been written when it is full.
    fn piece(&self) -> usize {
        let of = match self {
            Out::Stdout => fstat(io::stdout()),
            Out::File(_, file) => fstat(file),
            Out::Socket(_) => return usize::MAX,
        };
        let is_file = of.is_ok_and(|of| SFlag::from_bits_truncate(of.st_mode).contains(SFlag::S_IFREG));
        if is_file { usize::MAX } else { libc::PIPE_BUF }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Out::Stdout => {
                let mut out = io::stdout().lock();
                let n = out.write(bytes)?;
                out.flush()?;
                Ok(n)
            }
            Out::File(_, file) => file.write(bytes),
            Out::Socket(_) => Err(io::ErrorKind::Unsupported.into()), // messages go one by one
        }
    }
}
