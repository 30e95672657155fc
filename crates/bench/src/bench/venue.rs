//! The path between client and server: one variant in a lab of
//! its own, so that its programs cost the other variants nothing.

use super::{
    Result,
    network::{PATIENCE, PORT, Packets, Pins, accept, lab, proxy, server},
    programs,
    variant::Variant,
};
use longsplice::Client;
use longsplice_lab::{ChildGuard, Lab, Namespace, process::wait_for, topology};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
};

/// A lab with one variant in the middle. Fields are dropped in order: programs before their namespaces.
pub struct Venue {
    /// The variant in the middle.
    pub variant: Variant,
    proxy: Option<ChildGuard>,
    /// What makes the client's host ask for a translucent proxy.
    _host: Option<ChildGuard>,
    _pins: [Pins; 2],
    listener: TcpListener,
    /// The network.
    pub lab: Lab,
    control: PathBuf,
    /// State that connections must reach before they are used.
    becomes: Option<&'static str>,
    _dir: tempfile::TempDir,
}

/// Both ends of a connection.
pub struct Pair {
    /// The client's end.
    pub client: TcpStream,
    /// The server's end.
    pub server: TcpStream,
}

impl Venue {
    /// Sets up a venue. Programs run on the CPUs of the calling thread.
    pub fn set(variant: Variant, packets: Packets) -> Result<Venue> {
        Venue::releasing(variant, packets, None)
    }

    /// The same; longsplice closes the sockets of spliced flows after this many seconds.
    pub fn releasing(variant: Variant, packets: Packets, release_after: Option<f64>) -> Result<Venue> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-").tempdir()?;
        let lab = lab(packets, variant.routed())?;
        // There are thousands of connections from one address, none of which should meet the remains of an earlier one.
        lab.client.sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
        let (host, address) = match variant {
            Variant::Direct => (&lab.forwarder, proxy()),
            _ => (&lab.server, server()),
        };
        let listener = host.run(|| listen(address))?;
        let pins = [Pins::of(&lab)?, Pins::at(&lab.client)?];
        let control = programs::control_socket(dir.path());
        let proxy = programs::start(variant, &lab, dir.path(), release_after)?;
        let host = variant.udp().map(|udp| programs::ask_for_proxies(&lab, udp)).transpose()?;
        let spliced = if release_after.is_some() { "released" } else { "spliced" };
        let becomes = variant.is_spliced().then_some(spliced);
        Ok(Venue { variant, proxy, _host: host, _pins: pins, listener, lab, control, becomes, _dir: dir })
    }

    /// A dialler for the client's threads.
    pub fn dialler(&self) -> Dialler {
        let target = if self.variant.to_server() { server() } else { proxy() };
        Dialler { client: self.lab.client.clone(), target, socks: self.variant.socks() }
    }

    /// Process ID of the proxy.
    pub fn pid(&self) -> Option<u32> {
        self.proxy.as_ref().map(ChildGuard::pid)
    }

    /// Opens connections one after another, passes a byte through
    /// each, and waits until they are spliced, if the variant splices.
    pub fn connect(&self, count: usize) -> Result<Vec<Pair>> {
        let dialler = self.dialler();
        let open = || (0..count).map(|_| self.open(&dialler).map_err(|e| e.to_string())).collect();
        let pairs: std::result::Result<Vec<Pair>, String> = self.lab.client.run(open);
        let pairs = pairs.map_err(|e| format!("{}: {e}{}", self.variant, self.last_words()))?;
        if let Some(state) = self.becomes {
            self.wait_state(&pairs, state)?;
        }
        Ok(pairs)
    }

    /// Opens one connection, and waits only for a byte each way. Must be called inside the client's namespace.
    fn open(&self, dialler: &Dialler) -> Result<Pair> {
        let mut client = dialler.ask()?;
        let mut server = self.accept()?;
        dialler.answered(&mut client)?;
        for end in [&client, &server] {
            end.set_nodelay(true)?;
            end.set_read_timeout(Some(PATIENCE))?;
            end.set_write_timeout(Some(PATIENCE))?;
        }
        client.write_all(b"?")?;
        server.read_exact(&mut [0])?;
        server.write_all(b"!")?;
        client.read_exact(&mut [0])?;
        Ok(Pair { client, server })
    }

    fn accept(&self) -> Result<TcpStream> {
        accept(&self.listener, PATIENCE)?.ok_or_else(|| "no connection arrives at the server".into())
    }

    /// Duplicates the server's listening socket, for a thread that accepts by itself ([`accept`]).
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.listener.try_clone()
    }

    /// Connects to the control socket of the running longsplice.
    pub fn control(&self) -> Result<Client> {
        Ok(Client::connect(Some(&self.control))?)
    }

    fn wait_state(&self, pairs: &[Pair], state: &str) -> Result<()> {
        let clients: std::collections::HashSet<String> =
            pairs.iter().map(|p| Ok(p.client.local_addr()?.to_string())).collect::<Result<_>>()?;
        let mut control = self.control()?;
        let done = wait_for(PATIENCE, || match longsplice::flows(&mut control) {
            Err(e) => Some(Err(e)),
            Ok(rows) => {
                let ours: Vec<_> = rows.iter().filter(|row| clients.contains(&row.client)).collect();
                if let Some(why) = ours.iter().find_map(|row| row.refusal.as_ref()) {
                    return Some(Err(format!("a flow was not spliced: {why}").into()));
                }
                (ours.iter().filter(|row| row.state == state).count() == clients.len()).then_some(Ok(()))
            }
        });
        done.unwrap_or_else(|| Err(format!("the connections were not {state} in time").into()))
    }

    fn last_words(&self) -> String {
        let output = self.proxy.as_ref().map(ChildGuard::output).unwrap_or_default();
        let lines: Vec<&str> = output.lines().rev().take(5).collect();
        lines.iter().rev().map(|line| format!("\n  {line}")).collect()
    }
}

/// How the client reaches the server.
#[derive(Clone)]
pub struct Dialler {
    /// The namespace in which dialling threads run.
    pub client: Namespace,
    target: SocketAddr,
    socks: bool,
}

impl Dialler {
    /// Opens a connection that carries bytes to the server and back.
    pub fn dial(&self) -> io::Result<TcpStream> {
        let mut stream = self.ask()?;
        self.answered(&mut stream)?;
        Ok(stream)
    }

    /// Connects, and sends the destination if the proxy needs it: the server can accept now.
    fn ask(&self) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&self.target, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        if self.socks {
            // RFC 1928: version 5, one method (none); CONNECT to an IPv4 address.
            stream.write_all(&[5, 1, 0])?;
            stream.read_exact(&mut [0; 2])?;
            let to = topology::SERVER.v4.octets();
            let port = PORT.to_be_bytes();
            stream.write_all(&[&[5, 1, 0, 1], &to[..], &port[..]].concat())?;
        }
        Ok(stream)
    }

    /// Waits until the proxy has connected to the server.
    fn answered(&self, stream: &mut TcpStream) -> io::Result<()> {
        if self.socks {
            let mut answer = [0; 10];
            stream.read_exact(&mut answer)?;
            if answer[1] != 0 {
                return Err(io::Error::other(format!("SOCKS answers {}", answer[1])));
            }
        }
        Ok(())
    }
}

/// Opens a non-blocking listening socket.
fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
