//! The ways through the program, and the servers behind it.

use super::{
    ends::{HANGS, connect, converse, keep_alive, read_first, read_until, within},
    ledger::Ledger,
    web,
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpSocket, TcpStream},
};

/// Ports of the servers: streams, streams behind a ClientHello, and HTTP.
pub const STREAMS: u16 = 7000;
pub const NAMES: u16 = 7001;
pub const WEB: u16 = 8081;
/// More than connect at once, so that no SYN has to be sent again.
const BACKLOG: u32 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    AtOnce,
    /// To a server of the other address family.
    Crossing,
    Copied,
    Later,
    /// It is taken back after some bytes.
    Triggered,
    Held,
    Socks,
    Tls,
    Connect,
    /// HTTP that becomes something else: at a site, and with the whole URL.
    Upgrade,
    UpgradeForward,
    /// Routed through the program's machine, and spliced at once.
    Routed,
    /// The same, copied, and its server sees the client's address.
    Shown,
    /// A listener that comes and goes.
    Extra,
}

impl Way {
    /// Those that are always there.
    pub const ALL: [Way; 13] = [
        Way::AtOnce,
        Way::Crossing,
        Way::Copied,
        Way::Later,
        Way::Triggered,
        Way::Held,
        Way::Socks,
        Way::Tls,
        Way::Connect,
        Way::Upgrade,
        Way::UpgradeForward,
        Way::Routed,
        Way::Shown,
    ];

    pub fn port(self) -> u16 {
        match self {
            Way::AtOnce => 7100,
            Way::Crossing => 7101,
            Way::Copied => 7102,
            Way::Later => 7103,
            Way::Triggered => 7104,
            Way::Held => 7105,
            Way::Extra => 7106,
            Way::Routed => 7107,
            Way::Shown => 7108,
            Way::Socks => 1080,
            Way::Tls => 7443,
            Way::Connect | Way::UpgradeForward => PROXY,
            Way::Upgrade => SITE,
        }
    }

    /// Whether its clients connect to the server, and know of no proxy.
    pub fn is_routed(self) -> bool {
        matches!(self, Way::Routed | Way::Shown)
    }

    /// The address to which a client connects.
    pub fn at(self, family: Family) -> SocketAddr {
        let host = if self.is_routed() { SERVER } else { FORWARDER_TO_CLIENT };
        host.port(family, self.port())
    }

    /// The families of a connection's client and server.
    pub fn families(self, any: [Family; 2]) -> [Family; 2] {
        if self.is_routed() { [any[0]; 2] } else { any }
    }

    /// Whether the program may take it back by itself.
    pub fn is_taken_back(self) -> bool {
        self == Way::Triggered
    }
}

/// Ports of HTTP: a forward proxy, and a site.
pub const PROXY: u16 = 3128;
pub const SITE: u16 = 8080;

/// The client's addresses and ports. Each is used once, so that the lines of the access log can be told apart.
pub struct Sources {
    hosts: Range<u8>,
    next: AtomicU64,
}

impl Sources {
    const HOSTS: Range<u8> = 100..200;
    const PORTS: Range<u16> = 20_000..60_000;

    /// Those with these last bytes.
    pub fn of(hosts: Range<u8>) -> Sources {
        Sources { hosts, next: AtomicU64::new(0) }
    }

    fn ip(family: Family, host: u8) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::new(10, 77, 1, host).into(),
            Family::V6 => Ipv6Addr::new(0xfd77, 1, 0, 0, 0, 0, 0, host.into()).into(),
        }
    }

    /// Commands of ip(8) for the client.
    pub fn addresses() -> String {
        let all = Self::HOSTS.flat_map(|host| [(Family::V4, host, "/24"), (Family::V6, host, "/64 nodad")]);
        all.map(|(family, host, more)| {
            format!("addr add {}{} dev c0{}\n", Self::ip(family, host), &more[..3], &more[3..])
        })
        .collect()
    }

    pub fn next(&self, family: Family) -> SocketAddr {
        let (n, ports) = (self.next.fetch_add(1, Relaxed), Self::PORTS.len() as u64);
        let host = self.hosts.start + (n / ports) as u8;
        assert!(self.hosts.contains(&host), "no more addresses");
        SocketAddr::new(Self::ip(family, host), Self::PORTS.start + (n % ports) as u16)
    }
}

pub fn other(family: Family) -> Family {
    if family == Family::V4 { Family::V6 } else { Family::V4 }
}

/// The name that the program takes for the server's address of this family.
pub fn name(family: Family) -> &'static str {
    if family == Family::V4 { "four.test" } else { "six.test" }
}

fn refused(why: String) -> io::Error {
    io::Error::new(ErrorKind::ConnectionRefused, why)
}

/// Opens a connection to a server. Returns what has come of its stream, too.
pub async fn open(way: Way, family: Family, to: Family, from: SocketAddr) -> io::Result<(TcpStream, Vec<u8>)> {
    let mut stream = connect(from, way.at(family)).await?;
    let rest = within(HANGS, shake(way, &mut stream, to)).await?;
    Ok((stream, rest))
}

async fn shake(way: Way, stream: &mut TcpStream, to: Family) -> io::Result<Vec<u8>> {
    match way {
        Way::Socks => {
            let at = longsplice_lab::traffic::socks5_address(SERVER.port(to, STREAMS));
            // what is asked comes at once: the program may read it in any pieces
            stream.write_all(&[&[5, 1, 0, 5, 1, 0][..], &at].concat()).await?;
            let (answer, rest) = read_first(stream, Vec::new(), 2 + 4).await?;
            if answer[..5] != [5, 0, 5, 0, 0] {
                return Err(refused(format!("SOCKS says {answer:?}")));
            }
            let address = if answer[5] == 1 { 4 + 2 } else { 16 + 2 };
            Ok(read_first(stream, rest, address).await?.1)
        }
        Way::Tls => {
            stream.write_all(&hello(name(to))).await?;
            let (answer, rest) = read_first(stream, Vec::new(), ANSWER.len()).await?;
            if answer == ANSWER { Ok(rest) } else { Err(refused(format!("TLS says {answer:?}"))) }
        }
        Way::Connect => {
            let at = SERVER.port(to, STREAMS);
            ask(stream, &format!("CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n"), " 200 ").await
        }
        Way::Upgrade | Way::UpgradeForward => {
            let at = SERVER.port(to, WEB);
            let target = if way == Way::Upgrade { "/other".to_owned() } else { format!("http://{at}/other") };
            let more = "Connection: upgrade\r\nUpgrade: grind\r\n\r\n";
            ask(stream, &format!("GET {target} HTTP/1.1\r\nHost: {at}\r\n{more}"), " 101 ").await
        }
        _ => Ok(Vec::new()),
    }
}

async fn ask(stream: &mut TcpStream, request: &str, wants: &str) -> io::Result<Vec<u8>> {
    stream.write_all(request.as_bytes()).await?;
    let (head, rest) = read_until(stream, Vec::new(), b"\r\n\r\n").await?;
    let head = String::from_utf8_lossy(&head);
    let line = head.lines().next().unwrap_or_default();
    if line.contains(wants) { Ok(rest) } else { Err(refused(format!("HTTP says {line:?}"))) }
}

/// The header of a TLS handshake record without content (RFC 8446, 5.1).
const ANSWER: [u8; 5] = [22, 3, 3, 0, 0];

/// A ClientHello with nothing but a server name (RFC 8446, 4.1.2; RFC 6066, 3).
pub fn hello(name: &str) -> Vec<u8> {
    let sized = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
    let names = sized(&[&[0], &sized(name.as_bytes())[..]].concat());
    let extensions = sized(&[&[0, 0], &sized(&names)[..]].concat());
    // version, random number, no session, one cipher, no compression
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0], &extensions].concat();
    let handshake = [&[1, 0][..], &sized(&body)].concat();
    [&[22, 3, 1][..], &sized(&handshake)].concat()
}

/// Bytes that a way adds to what the client and the server send of their streams.
pub fn added(way: Way, to: Family) -> [u64; 2] {
    if way == Way::Tls { [hello(name(to)).len() as u64, ANSWER.len() as u64] } else { [0, 0] }
}

/// Starts all servers. Runs on the thread of the server's host.
pub fn serve(ledger: &Arc<Ledger>) -> io::Result<()> {
    for family in Family::BOTH {
        for port in [STREAMS, NAMES, WEB, Way::Routed.port(), Way::Shown.port()] {
            let at = SERVER.port(family, port);
            let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket.set_reuseaddr(true)?;
            socket.bind(at)?;
            tokio::spawn(accept(ledger.clone(), socket.listen(BACKLOG)?, port));
        }
    }
    Ok(())
}

async fn accept(ledger: Arc<Ledger>, listener: TcpListener, port: u16) {
    loop {
        let Ok((mut stream, _)) = listener.accept().await else { continue };
        let ledger = ledger.clone();
        tokio::spawn(async move {
            let _open = ledger.count();
            if keep_alive(&stream).is_err() {
                return; // it is over
            }
            match port {
                WEB => web::serve(&ledger, stream).await,
                NAMES => match within(HANGS, greet(&mut stream)).await {
                    Ok(rest) => answer(&ledger, stream, rest).await,
                    Err(error) => ledger.unheard(&error),
                },
                _ => answer(&ledger, stream, Vec::new()).await,
            }
        });
    }
}

/// Reads a ClientHello, and answers.
async fn greet(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let (head, rest) = read_first(stream, Vec::new(), 5).await?;
    let rest = read_first(stream, rest, u16::from_be_bytes([head[3], head[4]]).into()).await?.1;
    stream.write_all(&ANSWER).await?;
    Ok(rest)
}

/// Serves a stream, of which this has come.
pub async fn answer(ledger: &Ledger, mut stream: TcpStream, got: Vec<u8>) {
    let (seed, rest) = match within(HANGS, read_first(&mut stream, got, 8)).await {
        Ok(first) => first,
        Err(error) => return ledger.unheard(&error),
    };
    let seed_of = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).expect("eight bytes");
    let number = seed_of(&seed);
    if ledger.arrived(number) {
        let seen = converse(stream, number, 1, [seed, rest].concat()).await;
        ledger.server_done(number, seen);
    }
}
