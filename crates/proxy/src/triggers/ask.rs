//! Asks a program what is to become of a connection. It finds what is known in its environment, and answers with a line.

use crate::program::Running;
use longsplice_engine::FlowStatus;
use std::{io, path::PathBuf, process::Stdio, str::FromStr, sync::Arc, time::Duration};
use tokio::{io::AsyncReadExt, sync::Semaphore, time::timeout};

/// Runs at the same time: more would let clients start as many processes as they like.
const AT_ONCE: usize = 8;
/// Connections that wait for one of these.
const WAITING: usize = 1024;
/// Default time limit, waiting included.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of an answer in bytes.
const LENGTH: u64 = 64;

/// What a program answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Answer {
    /// The connection goes on as it was.
    #[default]
    GoOn,
    /// It is copied from now on.
    Copy,
    /// Both hosts are reset.
    Kill,
}

impl FromStr for Answer {
    type Err = io::Error;

    fn from_str(line: &str) -> io::Result<Answer> {
        match line {
            "go-on" => Ok(Answer::GoOn),
            "copy" => Ok(Answer::Copy),
            "kill" => Ok(Answer::Kill),
            other => {
                let other = other.escape_debug();
                Err(io::Error::other(format!("the answer is none of go-on, copy and kill: {other}")))
            }
        }
    }
}

/// A program, and how it is asked.
#[derive(Debug, Clone)]
pub struct Question {
    /// Path of the program.
    pub program: PathBuf,
    /// Time limit.
    pub limit: Duration,
    /// What happens if there is no answer.
    pub otherwise: Answer,
    running: Arc<Semaphore>,
    room: Arc<Semaphore>,
}

impl Question {
    /// Returns a question to this program.
    pub fn new(program: PathBuf, limit: Duration, otherwise: Answer) -> Question {
        let [running, room] = [AT_ONCE, AT_ONCE + WAITING].map(|most| Arc::new(Semaphore::new(most)));
        Question { program, limit, otherwise, running, room }
    }

    /// Asks about a connection. `when`: the label of the trigger.
    pub(crate) async fn ask(&self, when: &str, flow: &FlowStatus) -> io::Result<Answer> {
        let _room = self.room.try_acquire().map_err(|_| io::Error::other("too many connections wait for it"))?;
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {:?}", self.limit));
        timeout(self.limit, self.run(when, flow)).await.map_err(late)?
    }

    async fn run(&self, when: &str, flow: &FlowStatus) -> io::Result<Answer> {
        let _permit = self.running.acquire().await.map_err(io::Error::other)?;
        let listen = flow.listen.map(|at| at.to_string()).unwrap_or_default();
        let mut command = Running::command(&self.program);
        command.env("WHEN", when).env("FLOW", flow.id.to_string()).stdout(Stdio::piped());
        command.env("PROTOCOL", &flow.protocol).env("LISTEN", listen).env("TARGET", &flow.target);
        command.env("CLIENT", flow.client.to_string()).env("SERVER", flow.server.to_string());
        command.env("USER", flow.user.as_deref().unwrap_or_default());
        command.env("BYTES_UP", flow.bytes_up.to_string()).env("BYTES_DOWN", flow.bytes_down.to_string());
        let mut running = Running::start(&mut command)?;
        let mut answer = Vec::new();
        if let Some(output) = running.0.stdout.take() {
            output.take(LENGTH).read_to_end(&mut answer).await?;
        }
        let status = running.0.wait().await?;
        if !status.success() {
            return Err(io::Error::other(status.to_string()));
        }
        String::from_utf8_lossy(&answer).trim_end().parse()
    }
}
