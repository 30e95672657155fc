//! The access log to programs that listen on sockets: syslog (RFC 5424, and what local ones take) and the journal of systemd.
//!
//! They may be away for a while. Their lines wait in the queue then, and nobody waits for them.

use super::{batch::Batch, calendar::rfc3339, fields::FIELDS, record::Record};
use crate::target::{Host, Target};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, recv},
};
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    fmt, fs, io,
    net::{SocketAddr, ToSocketAddrs},
    os::{fd::AsRawFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
    process,
    str::FromStr,
    time::{Duration, SystemTime},
};

/// Where systemd listens for entries of its journal.
pub const JOURNAL: &str = "/run/systemd/journal/socket";
/// Longest path of a Unix socket in bytes (unix(7): 108, with the zero at its end).
const PATH_MAX: usize = 107;
/// Longest name of a program in bytes (RFC 5424, 6).
const APP_MAX: usize = 48;
/// Longest name of a host in bytes (RFC 5424, 6).
const HOST_MAX: usize = 255;
/// How the names of our fields begin in the journal.
const OURS: &str = "LONGSPLICE_";
/// Severity of all lines: informational (RFC 5424, 6.2.1).
const SEVERITY: u8 = 6;
/// Time for a connection by TCP.
const CONNECTS_WITHIN: Duration = Duration::from_secs(5);
/// Time after which a host that acknowledges nothing is taken for dead: otherwise the kernel tries for a quarter of an hour.
const ACKNOWLEDGES_WITHIN: Duration = Duration::from_secs(30);
/// Time after which a call that writes looks whether it is still wanted.
const WRITES_FOR: Duration = Duration::from_millis(500);

/// A program that gets lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receiver {
    /// What it speaks.
    pub kind: Kind,
    /// Name by which it knows this program.
    pub app: App,
    /// For which of its logs they are meant.
    pub facility: Facility,
}

/// What a receiver speaks, and where it listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Messages of RFC 5424.
    Syslog(Address),
    /// The native protocol of systemd's journal, on this socket.
    Journal(PathBuf),
}

/// Where a receiver listens for messages of syslog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Datagrams on a Unix socket, as syslog(3) sends them. Those of local programs take nothing else: of a message of RFC 5424,
    /// rsyslog and the journal take its version for the name of the program.
    Unix(PathBuf),
    /// Datagrams of RFC 5424 on a Unix socket.
    UnixRfc5424(PathBuf),
    /// Datagrams (RFC 5426).
    Udp(Target),
    /// A stream, in which each message begins with its length (RFC 6587, 3.4.1).
    Tcp(Target),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let target = |rest: &str| rest.parse::<Target>().map_err(|e| e.to_string());
        match text.split_once(':') {
            Some(("unix" | "unix-5424", "")) => Err("no path: write one, such as \"unix:/dev/log\"".into()),
            Some(("unix", path)) => Ok(Address::Unix(path.into())),
            Some(("unix-5424", path)) => Ok(Address::UnixRfc5424(path.into())),
            Some(("udp", rest)) => target(rest).map(Address::Udp),
            Some(("tcp", rest)) => target(rest).map(Address::Tcp),
            _ => Err(
                "no such transport: write \"unix:PATH\", \"unix-5424:PATH\", \"udp:HOST:PORT\" or \"tcp:HOST:PORT\""
                    .into(),
            ),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Syslog(Address::Unix(path)) => write!(f, "unix:{}", path.display()),
            Kind::Syslog(Address::UnixRfc5424(path)) => write!(f, "unix-5424:{}", path.display()),
            Kind::Syslog(Address::Udp(to)) => write!(f, "udp:{to}"),
            Kind::Syslog(Address::Tcp(to)) => write!(f, "tcp:{to}"),
            Kind::Journal(path) => write!(f, "journal:{}", path.display()),
        }
    }
}

impl Kind {
    /// Returns the path of its socket, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Kind::Syslog(Address::Unix(path) | Address::UnixRfc5424(path)) | Kind::Journal(path) => Some(path),
            Kind::Syslog(Address::Udp(_) | Address::Tcp(_)) => None,
        }
    }

    /// The same, to change it.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Kind::Syslog(Address::Unix(path) | Address::UnixRfc5424(path)) | Kind::Journal(path) => Some(path),
            Kind::Syslog(Address::Udp(_) | Address::Tcp(_)) => None,
        }
    }

    /// Checks what can be without a receiver, which may be started later.
    pub fn check(&self) -> io::Result<()> {
        let Some(path) = self.path() else { return Ok(()) };
        if path.as_os_str().len() > PATH_MAX {
            return Err(io::Error::other(format!("a path of a socket has at most {PATH_MAX} bytes")));
        }
        match fs::metadata(path) {
            Ok(of) if !of.file_type().is_socket() => Err(io::Error::other("it is no socket")),
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// Name of a program for syslog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct App(String);

impl Default for App {
    fn default() -> App {
        App("longsplice".into())
    }
}

impl FromStr for App {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<App, &'static str> {
        let good = (1..=APP_MAX).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
        if good {
            Ok(App(text.into()))
        } else {
            Err("bad name: write letters, digits, '-', '_', '.' and '/', 48 at most")
        }
    }
}

/// Facility of syslog (RFC 5424, 6.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facility(u8);

/// Their names, from 0 on, as syslog(3) and configurations of receivers have them.
const FACILITIES: [&str; 24] = [
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp", "ntp",
    "audit", "alert", "clock", "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
];

impl Default for Facility {
    fn default() -> Facility {
        Facility(3)
    }
}

impl FromStr for Facility {
    type Err = String;

    fn from_str(text: &str) -> Result<Facility, String> {
        let known = FACILITIES.iter().position(|name| *name == text).and_then(|at| u8::try_from(at).ok());
        known.map(Facility).ok_or_else(|| format!("no such facility: write one of {}", FACILITIES.join(", ")))
    }
}

/// What comes around a line.
#[derive(Debug)]
pub(super) enum Envelope {
    Syslog {
        /// Facility and severity.
        priority: u8,
        /// It goes to a receiver of this host, which knows the time and the name of the host.
        is_local: bool,
        /// What comes before the line.
        header: String,
        /// Each message begins with its length.
        counts: bool,
    },
    Journal {
        /// The fields that all entries have.
        head: String,
    },
}

impl Envelope {
    pub fn new(to: &Receiver) -> Envelope {
        let Receiver { kind, app: App(app), facility: Facility(facility) } = to;
        let process = process::id();
        match kind {
            Kind::Syslog(Address::Unix(_)) => Envelope::Syslog {
                priority: facility * 8 + SEVERITY,
                is_local: true,
                header: format!("{app}[{process}]: "),
                counts: false,
            },
            Kind::Syslog(address) => Envelope::Syslog {
                priority: facility * 8 + SEVERITY,
                is_local: false,
                header: format!("{} {app} {process} access - ", host()),
                counts: matches!(address, Address::Tcp(_)),
            },
            Kind::Journal(_) => Envelope::Journal {
                head: format!(
                    "PRIORITY={SEVERITY}\nSYSLOG_FACILITY={facility}\nSYSLOG_IDENTIFIER={app}\nSYSLOG_PID={process}\n"
                ),
            },
        }
    }

    /// Returns the message with a line.
    pub fn with(&self, record: &Record, line: &str) -> Vec<u8> {
        match self {
            Envelope::Syslog { priority, is_local: true, header, .. } => format!("<{priority}>{header}{line}").into(),
            Envelope::Syslog { priority, header, counts, .. } => {
                let time = rfc3339(record.time.unwrap_or_else(SystemTime::now));
                let message = format!("<{priority}>1 {time} {header}{line}");
                if *counts { format!("{} {message}", message.len()).into() } else { message.into() }
            }
            Envelope::Journal { head } => {
                let mut entry = Vec::with_capacity(head.len() + line.len() + 1024);
                entry.extend_from_slice(head.as_bytes());
                journal_field(&mut entry, "MESSAGE", line);
                let (mut name, mut value) = (OURS.to_owned(), String::new());
                for field in &FIELDS {
                    let Some(of) = (field.of)(record) else { continue };
                    name.truncate(OURS.len());
                    name.push_str(field.name);
                    name[OURS.len()..].make_ascii_uppercase();
                    value.clear();
                    of.write(&mut value);
                    journal_field(&mut entry, &name, &value);
                }
                entry
            }
        }
    }
}

/// Adds a field to an entry of the journal. A value with a line break comes with its length: it cannot begin another field.
fn journal_field(entry: &mut Vec<u8>, name: &str, value: &str) {
    entry.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend_from_slice(value.as_bytes());
    entry.push(b'\n');
}

/// Returns the name of this host as syslog takes it.
fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    let good = (1..=HOST_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
    if good { name.to_owned() } else { "-".to_owned() }
}

/// What came of an attempt to write.
#[derive(Debug)]
pub(super) enum Wrote {
    /// Nothing is left.
    All,
    /// As much as went at once. So many more lines are complete by that: none if the receiver stands still.
    Some(u64),
    /// The next line cannot be sent, whoever listens.
    TooLong,
    /// The receiver is away, for this reason, and so many lines that were sent before have not reached it.
    Away(io::Error, u64),
}

/// A connection to a receiver, if there is one.
#[derive(Debug)]
pub(super) struct Connection {
    to: Kind,
    socket: Option<Socket>,
}

impl Connection {
    pub fn new(to: Kind) -> Connection {
        Connection { to, socket: None }
    }

    /// Returns to whom it leads.
    pub fn to(&self) -> &Kind {
        &self.to
    }

    /// Closes it. The next write looks up names and connects again.
    pub fn close(&mut self) {
        self.socket = None;
    }

    /// Connects, and writes a line, or of a stream what it takes at once. Takes half a second at most, or some for a connection.
    pub fn write(&mut self, batch: &mut Batch) -> Wrote {
        let is_stream = matches!(self.to, Kind::Syslog(Address::Tcp(_)));
        // what is written into a connection that the other end has closed would be lost
        if is_stream && self.socket.as_ref().is_some_and(is_closed) {
            self.close();
            batch.repeat_line();
        }
        let socket = match &self.socket {
            Some(socket) => socket,
            None => match self.connect() {
                Ok(socket) => self.socket.insert(socket),
                Err(e) => return Wrote::Away(e, 0),
            },
        };
        if batch.left() == 0 {
            return Wrote::All;
        }
        let piece = if is_stream { batch.piece(usize::MAX) } else { batch.line() };
        let whole = piece.len();
        match socket.send_with_flags(piece, MsgFlags::MSG_NOSIGNAL.bits()) {
            Ok(n) => Wrote::Some(batch.wrote(if is_stream { n } else { whole })),
            Err(e) => match e.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EINTR | Errno::EAGAIN) => Wrote::Some(0),
                Some(Errno::EMSGSIZE) => Wrote::TooLong,
                of => {
                    // an ICMP error has come for the datagram before
                    let is_late = of == Some(Errno::ECONNREFUSED) && matches!(self.to, Kind::Syslog(Address::Udp(_)));
                    self.close();
                    batch.repeat_line();
                    Wrote::Away(e, is_late.into())
                }
            },
        }
    }

    fn connect(&self) -> io::Result<Socket> {
        let socket = match &self.to {
            Kind::Journal(path) | Kind::Syslog(Address::Unix(path) | Address::UnixRfc5424(path)) => {
                let socket = Socket::new(Domain::UNIX, Type::DGRAM, None)?;
                socket.connect(&SockAddr::unix(path)?)?;
                socket
            }
            Kind::Syslog(Address::Udp(to)) => first(to, |at| {
                let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
                socket.connect(&at.into())?;
                Ok(socket)
            })?,
            Kind::Syslog(Address::Tcp(to)) => first(to, |at| {
                let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
                socket.connect_timeout(&at.into(), CONNECTS_WITHIN)?;
                socket.set_tcp_user_timeout(Some(ACKNOWLEDGES_WITHIN))?;
                socket.set_keepalive(true)?;
                Ok(socket)
            })?,
        };
        socket.set_write_timeout(Some(WRITES_FOR))?;
        Ok(socket)
    }
}

/// Returns what `open` makes of the first address that works.
fn first(to: &Target, open: impl Fn(SocketAddr) -> io::Result<Socket>) -> io::Result<Socket> {
    let addresses: Vec<SocketAddr> = match &to.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, to.port)],
        Host::Name(name) => (name.as_str(), to.port).to_socket_addrs()?.collect(),
    };
    let mut why = io::Error::other("the name has no address");
    for at in addresses {
        match open(at) {
            Ok(socket) => return Ok(socket),
            Err(e) => why = e,
        }
    }
    Err(why)
}

/// Returns whether the other end has closed a connection. What it says is of no interest.
fn is_closed(socket: &Socket) -> bool {
    let mut bin = [0; 4096];
    match recv(socket.as_raw_fd(), &mut bin, MsgFlags::MSG_DONTWAIT) {
        Ok(0) => true,
        Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => false,
        Err(_) => true,
    }
}

#[cfg(test)]
#[path = "sockets_tests.rs"]
mod tests;
