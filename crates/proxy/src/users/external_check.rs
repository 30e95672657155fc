//! Asks a program, or another process behind a Unix socket, whether a user may log in: one-time passwords, directories and so on.
//!
//! Both get two lines, the name and the password. A program also has the client's address in its environment (`CLIENT`), and
//! answers by its exit status: 0 is right, 1 is wrong. A process behind a socket gets the address as a third line, and answers
//! with the line `yes` or `no`. Anything else is an error, and refuses the user.

use crate::{
    program::Running,
    users::cleared::{Cleared, clear},
};
use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::Semaphore,
    time::timeout,
};

/// Checks at the same time: more would let clients start as many processes as they like.
const AT_ONCE: usize = 8;
/// Default time limit: a second factor may be asked elsewhere.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of an answer in bytes.
const ANSWER: u64 = 16;

/// Whom to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// This program.
    Program(PathBuf),
    /// Who listens on this socket.
    Socket(PathBuf),
}

/// A check by others.
#[derive(Debug, Clone)]
pub struct Check {
    /// Whom to ask.
    pub asked: Asked,
    /// Time limit of a check.
    pub limit: Duration,
    running: Arc<Semaphore>,
}

impl PartialEq for Check {
    fn eq(&self, other: &Check) -> bool {
        (&self.asked, self.limit) == (&other.asked, other.limit)
    }
}

impl Eq for Check {}

impl Check {
    /// Returns a check with this time limit.
    pub fn new(asked: Asked, limit: Duration) -> Check {
        Check { asked, limit, running: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Whether the user may log in. An error refuses, and is logged, without name and password.
    pub(crate) async fn allows(&self, name: &[u8], password: &[u8], client: IpAddr) -> bool {
        let of = |path: &Path| path.display().to_string();
        let (asked, what) = match &self.asked {
            Asked::Program(path) => (timeout(self.limit, self.run(path, name, password, client)).await, of(path)),
            Asked::Socket(path) => (timeout(self.limit, self.ask(path, name, password, client)).await, of(path)),
        };
        let error = match asked {
            Ok(Ok(allowed)) => return allowed,
            Ok(Err(error)) => error,
            Err(_) => io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {:?}", self.limit)),
        };
        tracing::error!("cannot check a login with {what}: its user is refused: {error}");
        false
    }

    async fn run(&self, path: &Path, name: &[u8], password: &[u8], client: IpAddr) -> io::Result<bool> {
        let _permit = self.running.acquire().await.map_err(io::Error::other)?;
        let mut command = Running::command(path);
        command.env("CLIENT", client.to_canonical().to_string()).stdin(Stdio::piped());
        let mut running = Running::start(&mut command)?;
        if let Some(mut input) = running.0.stdin.take() {
            // It need not read to say no.
            match input.write_all(&lines(&[name, password])).await {
                Err(e) if e.kind() != io::ErrorKind::BrokenPipe => return Err(e),
                _ => drop(input),
            }
        }
        let status = running.0.wait().await?;
        match status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(io::Error::other(status.to_string())),
        }
    }

    async fn ask(&self, path: &Path, name: &[u8], password: &[u8], client: IpAddr) -> io::Result<bool> {
        let _permit = self.running.acquire().await.map_err(io::Error::other)?;
        let mut stream = UnixStream::connect(path).await?;
        stream.write_all(&lines(&[name, password, client.to_canonical().to_string().as_bytes()])).await?;
        let mut answer = Vec::new();
        let mut limited = (&mut stream).take(ANSWER);
        while !answer.ends_with(b"\n") && limited.read_buf(&mut answer).await? > 0 {}
        match answer.trim_ascii_end() {
            b"yes" => Ok(true),
            b"no" => Ok(false),
            other => Err(io::Error::other(format!("the answer is neither yes nor no: {}", other.escape_ascii()))),
        }
    }
}

/// Returns the lines, in memory that is cleared. No line contains the end of one: the editor has taken it away.
fn lines(parts: &[&[u8]]) -> Cleared {
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.len() + 1).sum());
    for part in parts {
        all.extend_from_slice(part);
        all.push(b'\n');
    }
    if all.iter().filter(|b| **b == b'\n').count() != parts.len() {
        clear(&mut all);
        all.clear();
    }
    Cleared::from_vec(all)
}

#[cfg(test)]
#[path = "external_check_tests.rs"]
mod tests;
