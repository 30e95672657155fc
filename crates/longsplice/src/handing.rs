//! Handing everything over to another process, which the running one starts: what `longsplice upgrade` does.
//!
//! # Protocol
//! One JSON object per message over a pair of Unix sockets that keep messages apart (SOCK_SEQPACKET); the new process has its end as
//! standard input. No message is longer than [`LONGEST`]. A descriptor comes with each `socket`.
//! ```text
//! running process                                   new process
//! {"say":"offer","version":1,...}        ->
//! {"say":"socket","of":"listener",...}   ->         as many as the offer says
//!                                        <-         {"say":"listens",...} for each listener, if the offer has connections
//!                                        <-         {"say":"prepared",...} once configuration and machine are checked, and all
//!                                                   is opened that can fail; or {"say":"refused","why":"..."}
//! lets go of the data path, and of all that it offered
//! {"say":"servers",...}                  ->         any number, if the new process has said that it takes them
//! {"say":"paused",...}                   ->         for each listener that is paused, likewise
//! {"say":"connection",...}               ->         any number, each followed by its bytes in hand
//! {"say":"commit"}                       ->
//!                                        <-         {"say":"serving"}
//! {"say":"yours"}                        ->         if there was a connection
//! closes all of its sockets, and the pair           takes commands
//! ```
//! The sockets of a connection come with it, and its bytes in hand follow in messages of their own. Nobody uses these sockets until
//! `yours` is said: the new process from then on, or the old one if it has to go on itself. If the old one is dead, they are the
//! new one's.
//!
//! Until `commit`, the running process accepts clients, and goes on as before if anything fails: if the other one refuses, dies,
//! says something else, or says nothing in time. Whoever finds the pair closed before `commit` gives up, unless it is prepared and the
//! other process has died: then it serves, because nobody else does.

pub mod heir;
pub mod successor;

use longsplice_proxy::inherited::OfListener;
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
use serde_json::Value;
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
/// Version of what is said of connections. If the two processes have different ones, none is handed over.
const CONNECTIONS: u32 = 2;
/// Sockets that come with one message: both of a connection that is copied.
const AT_ONCE: usize = 2;
/// Most bytes in hand of one direction: what the engine has in memory and in a pipe.
const MOST_IN_HAND: usize = 512 * 1024;
/// Most bytes in hand of all connections together: both processes have them for a moment.
const MOST_IN_HAND_OF_ALL: usize = 256 * 1024 * 1024;

/// Most servers of pools of which something is said.
const MOST_SERVERS: usize = 65536;
/// Most of them in one message: their names have at most some 300 bytes each.
const SERVERS_AT_ONCE: usize = 16;

/// What the two processes say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
enum Message {
    Offer(Offer),
    Socket(Of),
    Listens {
        name: String,
        protocol: String,
    },
    Prepared {
        program: String,
        #[serde(default)]
        takes: Option<Takes>,
        /// It wants to know what is known of servers.
        #[serde(default)]
        servers: bool,
        /// It wants to know which listeners are paused.
        #[serde(default)]
        paused: bool,
    },
    Refused {
        why: String,
    },
    Servers {
        known: Vec<Value>,
    },
    Paused {
        name: String,
    },
    Connection {
        about: Box<Value>,
        /// Number of bytes in hand, from client and server.
        in_hand: [usize; 2],
    },
    Commit,
    Serving,
    Yours,
}

/// Which connections a new process takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Takes {
    /// See [`CONNECTIONS`].
    version: u32,
    /// Number of sockets that it has room for.
    sockets: usize,
    /// It splices, and takes over the tables.
    splices: bool,
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
    /// Version of what it says of connections; 0: nothing.
    #[serde(default)]
    connections: u32,
    /// Directories of caches that are free after `commit`.
    #[serde(default)]
    caches: Vec<PathBuf>,
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
    /// A listener.
    Listener(OfListener),
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
    fn say(&self, message: &Message, sockets: &[BorrowedFd<'_>], limit: Duration) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        if text.len() > LONGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a name is too long"));
        }
        self.send(&text, sockets, limit)
    }

    fn send(&self, bytes: &[u8], sockets: &[BorrowedFd<'_>], limit: Duration) -> io::Result<()> {
        set_socket_timeout(&self.0, Timeout::Send, Some(limit.max(LEAST)))?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(AT_ONCE))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        if !sockets.is_empty() && !with.push(SendAncillaryMessage::ScmRights(sockets)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many sockets"));
        }
        sendmsg(&self.0, &[IoSlice::new(bytes)], &mut with, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends bytes in messages of their own, until `until`.
    fn send_all(&self, bytes: &[u8], until: Instant) -> io::Result<()> {
        bytes.chunks(LONGEST).try_for_each(|some| self.send(some, &[], until.saturating_duration_since(Instant::now())))
    }

    /// Waits for so many bytes. `None`: the other process has closed its end, or is gone.
    fn receive_all(&self, length: usize, until: Instant) -> io::Result<Option<Vec<u8>>> {
        if length > MOST_IN_HAND {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many bytes in hand"));
        }
        let mut all = Vec::with_capacity(length);
        while all.len() < length {
            let Some((some, _)) = self.receive(until)? else { return Ok(None) };
            if all.len() + some.len() > length {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "more bytes than were said"));
            }
            all.extend(some);
        }
        Ok(Some(all))
    }

    /// Waits for a message until `until`. `None`: the other process has closed its end, or is gone.
    fn hear(&self, until: Instant) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let Some((text, sockets)) = self.receive(until)? else { return Ok(None) };
        Ok(Some((serde_json::from_slice(&text)?, sockets)))
    }

    /// Waits for a message of any kind.
    fn receive(&self, until: Instant) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let left = until.saturating_duration_since(Instant::now());
        set_socket_timeout(&self.0, Timeout::Recv, Some(left.max(LEAST)))?;
        let mut text = vec![0; LONGEST];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(AT_ONCE))];
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
        let sockets = sockets.flatten().collect();
        text.truncate(got.bytes);
        Ok(Some((text, sockets)))
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
        let message = Message::Socket(Of::Listener(OfListener { name: "plug-127.0.0.1:0".into(), intercepts: None }));
        ours.say(&message, &[listener.as_fd()], SOON).unwrap();
        ours.say(&Message::Commit, &[], SOON).unwrap();
        let until = Instant::now() + SOON;
        let (heard, mut sockets) = theirs.hear(until).unwrap().unwrap();
        assert_eq!(heard, message);
        let socket = TcpListener::from(sockets.pop().unwrap());
        assert_eq!(socket.local_addr().unwrap(), listener.local_addr().unwrap());
        assert!(matches!(theirs.hear(until), Ok(Some((Message::Commit, none))) if none.is_empty()));
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
    fn bytes_in_hand_come_in_parts() {
        let (ours, theirs) = pair();
        let until = Instant::now() + SOON;
        let bytes: Vec<u8> = (0..3 * LONGEST + 7).map(|n| (n / 7) as u8).collect();
        ours.send_all(&bytes, until).unwrap();
        ours.send_all(&[], until).unwrap();
        assert_eq!(theirs.receive_all(bytes.len(), until).unwrap().unwrap(), bytes);
        assert_eq!(theirs.receive_all(0, until).unwrap().unwrap(), b"");
        assert!(theirs.receive_all(MOST_IN_HAND + 1, until).is_err());
        ours.send(&[1, 2, 3], &[], SOON).unwrap();
        assert!(theirs.receive_all(2, until).is_err(), "more than was said");
        ours.send(&[1, 2, 3], &[], SOON).unwrap();
        drop(ours);
        assert!(theirs.receive_all(4, until).unwrap().is_none(), "less");
    }

    #[test]
    fn an_older_program_says_nothing_of_connections() {
        let offer = "{\"say\":\"offer\",\"version\":1,\"program\":\"0\",\"tables\":null,\"control\":\"/c\",\"sockets\":0,\"within\":5}";
        assert!(matches!(serde_json::from_str(offer).unwrap(), Message::Offer(Offer { connections: 0, .. })));
        let prepared = "{\"say\":\"prepared\",\"program\":\"0\"}";
        assert!(matches!(
            serde_json::from_str(prepared).unwrap(),
            Message::Prepared { takes: None, servers: false, paused: false, .. }
        ));
    }

    #[test]
    fn a_long_reason_is_cut() {
        assert_eq!(reason("why"), "why");
        assert_eq!(reason(&"ä".repeat(LONGEST)).len(), LONGEST_REASON);
        let refused = Message::Refused { why: reason(&"\u{1}".repeat(LONGEST)) };
        assert!(serde_json::to_vec(&refused).unwrap().len() <= LONGEST);
    }
}
