//! How a client reaches its server: a way for each kind of listener.

use super::{ftp, streams, traffic::Traffic};
use longsplice_lab::{
    Family, Namespace,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, Script},
};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

/// The server's port for checked streams, and the proxy's port for a plug to it.
pub const STREAMS: u16 = 7000;
/// The proxy's port for a plug to the other address family.
pub const CROSSING: u16 = 7001;
/// The proxy's port for a plug that judges first bytes.
pub const JUDGED: u16 = 7003;
/// The proxy's port for a plug with triggers.
pub const TRIGGERED: u16 = 7004;
pub const SOCKS: u16 = 1080;
pub const PROXY: u16 = 3128;
/// The server's port for TLS, and the proxy's, which forwards to it by name.
pub const NAMES: u16 = 8443;
/// The server's port for clients that connect without knowing of the proxy.
pub const TRANSPARENT: u16 = 7002;
/// The ports of FTP at the proxy: data connections to the server are made by the proxy or the server, as those to the client;
/// or by the server in any case. The first one is the server's port, too.
pub const FTP: u16 = 2021;
pub const FTP_ACTIVE: u16 = 2022;
/// The server's port for FTP of clients that do not know of the proxy.
pub const FTP_ROUTED: u16 = 2023;
pub const LOGIN: u16 = 2323;
/// How long a server tries to connect to a client that waits for it (BIND).
const TRIES: Duration = Duration::from_secs(20);
/// SOCKS5's command for that.
const BIND: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    Plug,
    CrossingPlug,
    JudgedPlug,
    TriggeredPlug,
    Socks,
    /// The server connects to the client.
    SocksBind,
    Connect,
    TlsByName,
    Transparent,
    Login,
    /// A data connection, which the client opens.
    FtpPassive,
    /// One that the client awaits.
    FtpActive,
    /// As those two, with a client that does not know of the proxy.
    FtpRouted,
    FtpRoutedActive,
}

impl Way {
    pub const ALL: [Way; 14] = [
        Way::Plug,
        Way::CrossingPlug,
        Way::JudgedPlug,
        Way::TriggeredPlug,
        Way::Socks,
        Way::SocksBind,
        Way::Connect,
        Way::TlsByName,
        Way::Transparent,
        Way::Login,
        Way::FtpPassive,
        Way::FtpActive,
        Way::FtpRouted,
        Way::FtpRoutedActive,
    ];

    /// The client's address that the proxy sees, if the client can choose it: it does not for connections that it awaits.
    pub fn family_of_client(self, family: Family, to: Family) -> Option<Family> {
        match self {
            Way::Transparent | Way::FtpRouted => Some(to),
            Way::FtpActive | Way::FtpRoutedActive => None,
            _ => Some(family),
        }
    }

    /// Connects from this address family to the server's address of that one. The control connection of FTP is returned as well.
    pub fn open(
        self,
        traffic: &Arc<Traffic>,
        server: &Namespace,
        [family, to]: [Family; 2],
        script: &Script,
    ) -> io::Result<(TcpStream, Option<ftp::Talk>)> {
        let (proxy, target) = (|port| FORWARDER_TO_CLIENT.port(family, port), SERVER.port(to, STREAMS));
        let stream = match self {
            Way::Plug => traffic::connect(proxy(STREAMS), script),
            Way::CrossingPlug => traffic::connect(proxy(CROSSING), script),
            Way::JudgedPlug => traffic::connect(proxy(JUDGED), script),
            Way::TriggeredPlug => traffic::connect(proxy(TRIGGERED), script),
            Way::Socks => traffic::socks5_connect(proxy(SOCKS), target, script),
            Way::SocksBind => await_server(traffic, server, proxy(SOCKS), SERVER.port(to, STREAMS), script),
            Way::Connect => tunnel(proxy(PROXY), target, script),
            Way::TlsByName => by_name(proxy(NAMES), name(to), script),
            Way::Transparent => traffic::connect(SERVER.port(to, TRANSPARENT), script),
            Way::Login => log_in(proxy(LOGIN), name(to), script),
            Way::FtpPassive | Way::FtpActive => {
                // any mixture of the four ways to make a pair
                let port = if script.nodelay { FTP } else { FTP_ACTIVE };
                let user = format!("ann@{}", SERVER.port(to, FTP));
                let opened = ftp::open(proxy(port), &user, self == Way::FtpActive, script);
                return opened.map(|(stream, talk)| (stream, Some(talk)));
            }
            Way::FtpRouted | Way::FtpRoutedActive => {
                let opened = ftp::open(SERVER.port(to, FTP_ROUTED), "ann", self == Way::FtpRoutedActive, script);
                return opened.map(|(stream, talk)| (stream, Some(talk)));
            }
        };
        stream.map(|stream| (stream, None))
    }
}

pub fn other(family: Family) -> Family {
    if family == Family::V4 { Family::V6 } else { Family::V4 }
}

/// The name that resolves to the server's address of this family.
pub fn name(family: Family) -> &'static str {
    if family == Family::V4 { "four.test" } else { "six.test" }
}

/// Waits for a connection of the server at the proxy, and lets the server make it.
fn await_server(
    traffic: &Arc<Traffic>,
    server: &Namespace,
    proxy: SocketAddr,
    peer: SocketAddr,
    script: &Script,
) -> io::Result<TcpStream> {
    let (mut stream, bound) = traffic::socks5_ask(proxy, BIND, peer, script)?;
    let (traffic, from) = (traffic.clone(), SocketAddr::new(peer.ip(), 0));
    server.spawn(move || {
        // the proxy waits for one that cannot connect no longer than this
        let script = Script { local: Some(from), deadline: TRIES, ..Script::answerer() };
        if let Ok(stream) = traffic::connect(bound, &script) {
            streams::answer(&traffic, stream, false);
        }
    });
    let from = traffic::socks5_answer(&mut stream)?;
    if from.ip() == peer.ip() { Ok(stream) } else { Err(io::Error::other(format!("connected by {from}"))) }
}

/// Logs in, and reads up to the server's first byte. All answers are typed ahead.
fn log_in(proxy: SocketAddr, name: &str, script: &Script) -> io::Result<TcpStream> {
    let mut stream = traffic::connect(proxy, script)?;
    stream.set_read_timeout(Some(script.deadline))?;
    write!(stream, "ann\r\nsecret\r\n{name}\r\n")?;
    let (mut said, end) = (Vec::new(), format!("connected to {name}\r\n").into_bytes());
    while !said.ends_with(&end) {
        let mut byte = [0];
        if stream.read(&mut byte)? == 0 {
            return Err(io::Error::other(String::from_utf8_lossy(&said).into_owned()));
        }
        said.push(byte[0]);
    }
    Ok(stream)
}

/// Connects through the proxy with CONNECT.
fn tunnel(proxy: SocketAddr, target: SocketAddr, script: &Script) -> io::Result<TcpStream> {
    let mut stream = traffic::connect(proxy, script)?;
    stream.set_read_timeout(Some(script.deadline))?;
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    match head.starts_with(b"HTTP/1.1 200") {
        true => Ok(stream),
        false => Err(io::Error::other(String::from_utf8_lossy(&head).into_owned())),
    }
}

/// The header of a TLS handshake record without content (RFC 8446, 5.1).
pub const ANSWER: [u8; 5] = [22, 3, 3, 0, 0];

/// Starts TLS: the proxy reads the ClientHello, and answers with an alert if the server cannot be reached.
fn by_name(proxy: SocketAddr, name: &str, script: &Script) -> io::Result<TcpStream> {
    let mut stream = traffic::connect(proxy, script)?;
    stream.set_read_timeout(Some(script.deadline))?;
    stream.write_all(&hello(name))?;
    let mut answer = [0; ANSWER.len()];
    stream.read_exact(&mut answer)?;
    if answer == ANSWER { Ok(stream) } else { Err(io::Error::other(format!("{answer:?}"))) }
}

/// A ClientHello with nothing but a server name (RFC 8446, 4.1.2; RFC 6066, 3).
fn hello(name: &str) -> Vec<u8> {
    let sized = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
    let names = sized(&[&[0], &sized(name.as_bytes())[..]].concat());
    let extensions = sized(&[&[0, 0], &sized(&names)[..]].concat());
    // version, random number, no session, one cipher, no compression
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0], &extensions].concat();
    let handshake = [&[1, 0][..], &sized(&body)].concat();
    [&[22, 3, 1][..], &sized(&handshake)].concat()
}
