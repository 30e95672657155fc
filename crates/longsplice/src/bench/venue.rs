//! What stands between client and server: one way of passing bytes on, in a lab of its own, so that the programs of one
//! variant cost the others nothing.

use super::{Result, machine::HAPROXY};
use crate::{client::Client, ls, paths};
use longsplice_lab::{ChildGuard, Family, Lab, Options, Shape, process::wait_for, topology};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs, io,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

/// Where server and proxies listen.
const PORT: u16 = 7000;
/// Programs start, connections open and end within this time, or not at all.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How bytes are passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// The client connects to the server itself, and the forwarder routes.
    IpForward,
    /// longsplice, spliced at once.
    Spliced,
    /// longsplice, never spliced.
    Copy,
    /// HAProxy with splice(2).
    Haproxy,
}

impl Variant {
    /// All of them; the first is what the others are compared with.
    pub const ALL: [Variant; 4] = [Variant::IpForward, Variant::Spliced, Variant::Copy, Variant::Haproxy];
    /// Those that are programs.
    pub const PROXIES: [Variant; 3] = [Variant::Spliced, Variant::Copy, Variant::Haproxy];

    /// For tables.
    pub fn title(self) -> &'static str {
        match self {
            Variant::IpForward => "IP forwarding",
            Variant::Spliced => "spliced",
            Variant::Copy => "copying",
            Variant::Haproxy => "HAProxy",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// Whether segments of up to 64 KB pass whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packets {
    /// Segmentation offload.
    Large,
    /// None: every packet as on a wire, with a full checksum.
    Mtu,
}

/// A lab with one variant in its middle. Fields are dropped in order: programs before the namespaces they run in.
pub struct Venue {
    /// What is in the middle.
    pub variant: Variant,
    proxy: Option<ChildGuard>,
    _pins: Pins,
    listener: TcpListener,
    /// The network.
    pub lab: Lab,
    control: PathBuf,
    _dir: tempfile::TempDir,
}

/// One connection: the client's end and the server's.
pub struct Pair {
    /// The client's end.
    pub client: TcpStream,
    /// The server's end.
    pub server: TcpStream,
}

impl Venue {
    /// Makes it. Programs get the CPUs of the calling thread.
    pub fn set(variant: Variant, packets: Packets) -> Result<Venue> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-").tempdir()?;
        let lab = lab(packets, variant == Variant::IpForward)?;
        // Thousands of connections from one address, none of which should meet what is left of another.
        lab.client.sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
        let listener = lab.server.run(|| TcpListener::bind(server()))?;
        listener.set_nonblocking(true)?;
        let pins = Pins(paths::pin_folder(paths::netns_inode(&lab.forwarder.path())?));
        let control = dir.path().join("control.sock");
        let proxy = match variant {
            Variant::IpForward => None,
            Variant::Spliced => Some(start_longsplice(&lab, dir.path(), "at-once")?),
            Variant::Copy => Some(start_longsplice(&lab, dir.path(), "never")?),
            Variant::Haproxy => Some(start_haproxy(&lab, dir.path())?),
        };
        Ok(Venue { variant, proxy, _pins: pins, listener, lab, control, _dir: dir })
    }

    /// Where the client connects to.
    pub fn target(&self) -> SocketAddr {
        if self.variant == Variant::IpForward { server() } else { proxy() }
    }

    /// Process of the proxy.
    pub fn pid(&self) -> Option<u32> {
        self.proxy.as_ref().map(ChildGuard::pid)
    }

    /// Opens one connection after the other, sees a byte go through each, and waits until they are spliced if they are
    /// to be.
    pub fn connect(&self, count: usize) -> Result<Vec<Pair>> {
        let pairs = self.lab.client.run(|| (0..count).map(|_| self.open().map_err(|e| e.to_string())).collect());
        let pairs: std::result::Result<Vec<Pair>, String> = pairs;
        let pairs = pairs.map_err(|e| format!("{}: {e}{}", self.variant, self.last_words()))?;
        if self.variant == Variant::Spliced {
            self.wait_spliced(&pairs)?;
        }
        Ok(pairs)
    }

    /// One connection, without waiting for anything but a byte both ways. From inside the client.
    pub fn open(&self) -> Result<Pair> {
        let mut client = TcpStream::connect_timeout(&self.target(), PATIENCE)?;
        let mut server = self.accept()?;
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

    /// The server's listening socket once more, for a thread that accepts by itself ([`accept`]).
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.listener.try_clone()
    }

    fn wait_spliced(&self, pairs: &[Pair]) -> Result<()> {
        let clients: std::collections::HashSet<String> =
            pairs.iter().map(|p| Ok(p.client.local_addr()?.to_string())).collect::<Result<_>>()?;
        let mut control = Client::connect(Some(&self.control))?;
        let spliced = wait_for(PATIENCE, || match ls::flows(&mut control) {
            Err(e) => Some(Err(e)),
            Ok(rows) => {
                let ours: Vec<_> = rows.iter().filter(|row| clients.contains(&row.client)).collect();
                if let Some(why) = ours.iter().find_map(|row| row.refusal.as_ref()) {
                    return Some(Err(format!("a flow was not spliced: {why}").into()));
                }
                (ours.iter().filter(|row| row.state == "spliced").count() == clients.len()).then_some(Ok(()))
            }
        });
        spliced.unwrap_or_else(|| Err("the connections were not spliced in time".into()))
    }

    fn last_words(&self) -> String {
        let output = self.proxy.as_ref().map(ChildGuard::output).unwrap_or_default();
        let lines: Vec<&str> = output.lines().rev().take(5).collect();
        lines.iter().rev().map(|line| format!("\n  {line}")).collect()
    }
}

/// The next connection of a socket that does not block; none within the limit.
pub fn accept(listener: &TcpListener, limit: Duration) -> io::Result<Option<TcpStream>> {
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    poll(&mut ready, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX))?;
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            Ok(Some(stream))
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

/// The network of a variant; also for what runs inside this process.
pub fn lab(packets: Packets, forwarding: bool) -> Result<Lab> {
    let large_packets = packets == Packets::Large;
    Ok(Lab::new(Shape::TwoDevices, Options { large_packets, forwarding, in_order: false, ..Options::default() })?)
}

/// Where the server listens.
pub fn server() -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT)
}

/// Where the proxy listens.
pub fn proxy() -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT)
}

fn start_longsplice(lab: &Lab, dir: &Path, splice: &str) -> Result<ChildGuard> {
    let program = std::env::current_exe()?;
    let mut run = lab.forwarder.command(program.to_str().ok_or("the path of this program is no text")?);
    run.env("LONGSPLICE_CONTROL", dir.join("control.sock")).env_remove("RUST_LOG");
    let config = dir.join("longsplice.toml");
    fs::write(&config, longsplice_config())?;
    run.args(["run", "--splice", splice, "--config"]).arg(&config).arg("--access-log").arg(dir.join("access.log"));
    let mut guard = ChildGuard::spawn(&mut run)?;
    guard.wait_output("control socket", PATIENCE).map_err(|e| format!("{e}; it said:\n{}", guard.output()))?;
    let words = guard.output();
    if words.contains("are copied, not spliced") {
        return Err(format!("this machine cannot splice:\n{words}").into());
    }
    Ok(guard)
}

/// What is written for longsplice: a plug, with room for the one client that there is.
pub fn longsplice_config() -> String {
    format!(
        "[[listener]]\nprotocol = \"plug\"\nlisten = \"{}\"\ntarget = \"{}\"\nlimits = {{ connections_per_client = 4096 }}\n",
        proxy(),
        server()
    )
}

/// What is written for HAProxy; threads as it chooses. The limit of connections is for the measurement of memory.
pub fn haproxy_config() -> String {
    format!(
        "global\n  maxconn 4096\ndefaults\n  mode tcp\n  option splice-auto\n  timeout connect 5s\n  timeout client 60s\n  \
         timeout server 60s\nlisten bench\n  bind {}\n  server bench {}\n",
        proxy(),
        server()
    )
}

fn start_haproxy(lab: &Lab, dir: &Path) -> Result<ChildGuard> {
    let config = dir.join("haproxy.cfg");
    fs::write(&config, haproxy_config())?;
    let mut run = lab.forwarder.command(HAPROXY);
    run.arg("-db").arg("-f").arg(&config);
    let guard = ChildGuard::spawn(&mut run)?;
    lab.forwarder.wait_listening(PORT, PATIENCE).map_err(|e| format!("haproxy: {e}; it said:\n{}", guard.output()))?;
    Ok(guard)
}

/// What a killed longsplice leaves in bpffs.
pub struct Pins(pub PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        // Most variants leave nothing.
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(paths::pin_lock(&self.0));
    }
}
