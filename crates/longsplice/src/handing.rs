//! Handing everything over to another process, which the running one starts: what `longsplice upgrade` does.
//!
//! # Protocol
//! One JSON object per message over a pair of Unix sockets that keep messages apart (SOCK_SEQPACKET); the new process has its end as
//! standard input. No message is longer than [`LONGEST`]. A descriptor comes with each `socket`.
//! ```text
//! running process                                   new process
//! {"say":"offer","version":1,...}        ->
//! {"say":"socket","of":"listener",...}   ->         as many as the offer says
//!                                        <-         {"say":"prepared",...} once configuration and machine are checked, and all
//!                                                   is opened that can fail; or {"say":"refused","why":"..."}
//! lets go of the data path, and of all that it offered
//! {"say":"commit"}                       ->
//!                                        <-         {"say":"serving"}
//! ```
//! Until `commit`, the running process accepts clients, and goes on as before if anything fails: if the other one refuses, dies,
//! says something else, or says nothing in time. Whoever finds the pair closed before `commit` gives up, unless it is prepared and the
//! other process has died: then it serves, because nobody else does.

pub mod heir;
pub mod successor;

use rustix::{
    cmsg_space,
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Version of the protocol. It is raised when a message changes its meaning, not when a field is added.
const VERSION: u32 = 1;
/// Longest message in bytes. Names of listeners and paths have some hundred; reasons are cut.
const LONGEST: usize = 16384;
/// Longest reason in bytes, which JSON may make six times as long.
const LONGEST_REASON: usize = 2048;
/// Most sockets that are offered. The data path knows 1024 listeners.
const MOST_SOCKETS: usize = 4096;

/// What the two processes say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
enum Message {
    Offer(Offer),
    Socket(Of),
    Prepared { program: String },
    Refused { why: String },
    Commit,
    Serving,
}

/// The first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    version: u32,
    /// Version of the program.
    program: String,
    /// Number of the process.
    #[serde(default)]
    process: Option<u32>,
    /// What its tables in the kernel are like, if it has any.
    tables: Option<String>,
    /// Path of its control socket.
    control: PathBuf,
    /// Number of sockets that follow.
    sockets: usize,
    /// Seconds that each side waits for the other.
    within: u64,
}

/// What a socket is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "of", rename_all = "kebab-case")]
pub enum Of {
    /// The control socket.
    Control,
    /// Metrics.
    Admin,
    /// The socket for tools of HAProxy.
    Haproxy {
        /// Its path.
        path: PathBuf,
    },
    /// The listener with this name.
    Listener {
        /// Its name.
        name: String,
    },
    /// Whoever started the program keeps it, too.
    Supervisor,
}

/// One end of the pair.
#[derive(Debug)]
struct Pair(OwnedFd);

impl Pair {
    fn new() -> io::Result<(Pair, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Pair(ours), theirs))
    }

    /// Sends a message, within `limit`.
    fn say(&self, message: &Message, socket: Option<BorrowedFd<'_>>, limit: Duration) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        if text.len() > LONGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a name is too long"));
        }
        set_socket_timeout(&self.0, Timeout::Send, Some(limit.max(LEAST)))?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let sockets: Vec<_> = socket.into_iter().collect();
        if !sockets.is_empty() {
            with.push(SendAncillaryMessage::ScmRights(&sockets));
        }
        sendmsg(&self.0, &[IoSlice::new(&text)], &mut with, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits for a message until `until`. `None`: the other process has closed its end, or is gone.
    fn hear(&self, until: Instant) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
        let left = until.saturating_duration_since(Instant::now());
        set_socket_timeout(&self.0, Timeout::Recv, Some(left.max(LEAST)))?;
        let mut text = vec![0; LONGEST];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut text)];
        let got = loop {
            match recvmsg(&self.0, into, &mut with, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(Errno::CONNRESET) => return Ok(None),
                got => break got?,
            }
        };
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        let sockets = with.drain().filter_map(|with| match with {
            RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
            _ => None,
        });
        let socket = sockets.flatten().next();
        Ok(Some((serde_json::from_slice(&text[..got.bytes])?, socket)))
    }
}

impl AsFd for Pair {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Zero would stand for no limit.
const LEAST: Duration = Duration::from_millis(1);

/// Returns the reason, cut to what fits into a message.
fn reason(why: &str) -> String {
    let end = (0..=LONGEST_REASON.min(why.len())).rev().find(|n| why.is_char_boundary(*n));
    why[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SOON: Duration = Duration::from_secs(10);

    fn pair() -> (Pair, Pair) {
        let (ours, theirs) = Pair::new().unwrap();
        (ours, Pair(theirs))
    }

    #[test]
    fn messages_come_with_their_sockets() {
        let (ours, theirs) = pair();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let message = Message::Socket(Of::Listener { name: "plug-127.0.0.1:0".into() });
        ours.say(&message, Some(listener.as_fd()), SOON).unwrap();
        ours.say(&Message::Commit, None, SOON).unwrap();
        let until = Instant::now() + SOON;
        let (heard, socket) = theirs.hear(until).unwrap().unwrap();
        assert_eq!(heard, message);
        let socket = TcpListener::from(socket.unwrap());
        assert_eq!(socket.local_addr().unwrap(), listener.local_addr().unwrap());
        assert!(matches!(theirs.hear(until), Ok(Some((Message::Commit, None)))));
        drop(ours);
        assert!(matches!(theirs.hear(until), Ok(None)), "it is closed");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (ours, theirs) = pair();
        let until = Instant::now() + SOON;
        for text in [&b"GET / HTTP/1.1\r\n"[..], b"{}", b"{\"say\":\"dance\"}", &[b'['; LONGEST + 1]] {
            rustix::net::send(&ours, text, SendFlags::NOSIGNAL).unwrap();
            assert!(theirs.hear(until).is_err());
        }
        assert_eq!(theirs.hear(Instant::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_long_reason_is_cut() {
        assert_eq!(reason("why"), "why");
        assert_eq!(reason(&"ä".repeat(LONGEST)).len(), LONGEST_REASON);
        let refused = Message::Refused { why: reason(&"\u{1}".repeat(LONGEST)) };
        assert!(serde_json::to_vec(&refused).unwrap().len() <= LONGEST);
    }
}
