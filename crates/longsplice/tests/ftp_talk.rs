//! The control connection of an FTP client in a test, word by word.

use nix::sys::socket::{MsgFlags, send};
use std::{
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    time::Duration,
};

/// Time limit for every reply.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Talk {
    stream: BufReader<TcpStream>,
}

impl Talk {
    pub fn to(address: SocketAddr) -> Talk {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Talk { stream: BufReader::new(stream) }
    }

    /// A server's end.
    pub fn of(stream: TcpStream) -> Talk {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Talk { stream: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    /// Sends bytes to a host that may have left.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Sends bytes of which the last is urgent.
    pub fn send_urgent(&mut self, bytes: &[u8]) {
        let sent = send(self.stream.get_ref().as_raw_fd(), bytes, MsgFlags::MSG_OOB);
        assert_eq!(sent, Ok(bytes.len()));
    }

    /// Reads a line. `None`: the stream has ended.
    pub fn line(&mut self) -> Option<String> {
        let mut line = Vec::new();
        match self.stream.read_until(b'\n', &mut line) {
            Ok(0) => None,
            Ok(_) => Some(String::from_utf8_lossy(&line).into_owned()),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => None,
            Err(e) => panic!("{e}"),
        }
    }

    /// Reads a reply. Returns its code, and all of its lines.
    pub fn reply(&mut self) -> (u16, String) {
        let mut all = self.line().expect("a reply");
        let code = all[..3].to_owned();
        let mut last = all.clone();
        while last.as_bytes()[3] == b'-' || !last.starts_with(&code) {
            loop {
                last = self.line().expect("the rest of a reply");
                all.push_str(&last);
                if last.starts_with(&format!("{code} ")) {
                    break;
                }
            }
        }
        (code.parse().unwrap(), all)
    }

    /// Sends a command, and reads one reply.
    pub fn ask(&mut self, command: &str) -> (u16, String) {
        self.send(format!("{command}\r\n").as_bytes());
        self.reply()
    }

    /// Reads the greeting, and logs in as anonymous.
    pub fn log_in(&mut self) {
        assert_eq!(self.reply().0, 220);
        let (code, _) = self.ask("USER anonymous");
        if code == 331 {
            assert_eq!(self.ask("PASS me@here").0, 230);
        } else {
            assert_eq!(code, 230);
        }
        assert_eq!(self.ask("TYPE I").0, 200);
    }

    /// Asks for a passive data connection. Returns where it goes.
    pub fn passive(&mut self, command: &str) -> SocketAddr {
        self.send(format!("{command}\r\n").as_bytes());
        self.passive_reply()
    }

    /// Reads the answer to PASV or EPSV. Returns where the data connection goes.
    pub fn passive_reply(&mut self) -> SocketAddr {
        let (code, text) = self.reply();
        let mut at = self.stream.get_ref().peer_addr().unwrap();
        let (_, rest) = text.split_once('(').unwrap_or_else(|| panic!("{text}"));
        let (inner, _) = rest.split_once(')').unwrap();
        if code == 229 {
            at.set_port(inner.trim_matches('|').parse().unwrap());
        } else {
            let parts: Vec<u8> = inner.split(',').map(|n| n.parse().unwrap()).collect();
            let [a, b, c, d, high, low] = parts[..] else { panic!("{text}") };
            at = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
        }
        at
    }

    /// Asks for a file. Returns the data connection. Runs in the network namespace of the client.
    pub fn retrieve(&mut self, way: &str, name: &str) -> TcpStream {
        let own = self.stream.get_ref().local_addr().unwrap();
        let (stream, door) = if way == "PASV" || way == "EPSV" {
            (Some(TcpStream::connect_timeout(&self.passive(way), PATIENCE).unwrap()), None)
        } else {
            let door = TcpListener::bind((own.ip(), 0)).unwrap();
            let port = door.local_addr().unwrap().port();
            let [high, low] = port.to_be_bytes();
            let address = match way {
                "PORT" => format!("{},{high},{low}", own.ip().to_string().replace('.', ",")),
                _ => format!("|{}|{}|{port}|", if own.is_ipv4() { 1 } else { 2 }, own.ip()),
            };
            assert_eq!(self.ask(&format!("{way} {address}")).0, 200);
            (None, Some(door))
        };
        let (code, text) = self.ask(&format!("RETR {name}"));
        assert!([125, 150].contains(&code), "{text}");
        let stream = stream.unwrap_or_else(|| door.unwrap().accept().unwrap().0);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// The client's own address.
    pub fn local(&self) -> SocketAddr {
        self.stream.get_ref().local_addr().unwrap()
    }

    /// Whether the connection ends before another line comes.
    pub fn is_over(&mut self) -> bool {
        self.line().is_none()
    }
}
