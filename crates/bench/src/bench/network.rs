//! The network of the bench: a lab, its addresses, its packet sizes, and the pins in it.

use super::Result;
use longsplice::{netns_inode, pin_folder};
use longsplice_lab::{Family, InOrder, Lab, Namespace, Options, Shape, topology};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    fs, io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// Port of server and proxies.
pub const PORT: u16 = 7000;
/// Time limit for opening and ending connections.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for starting and stopping programs: long, since all share a processor with other work, and tables for a million
/// flows are zeroed first.
pub const START: Duration = Duration::from_secs(60);

/// Packet sizes: whether segments of up to 64 KB pass as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packets {
    /// With segmentation offload.
    Large,
    /// Without: every packet is as on a wire, with a complete checksum.
    Mtu,
    /// The same on every link, but the forwarder's devices coalesce consecutive segments.
    Coalesced,
}

impl Packets {
    /// Title in tables.
    pub fn title(self) -> &'static str {
        match self {
            Packets::Large => "up to 64 KB",
            Packets::Mtu => "1500 bytes",
            Packets::Coalesced => "1500 bytes, coalesced",
        }
    }
}

/// Opens a non-blocking listening socket.
pub fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The next connection of a non-blocking listener; `None` if none arrives within the limit.
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

/// Serves connections until it is dropped.
pub struct Acceptor {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Acceptor {
    /// `many`: with a thread for each connection; otherwise one connection after another. Errors are noticed by the clients.
    pub fn start(
        listener: TcpListener,
        many: bool,
        serve: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static,
    ) -> Acceptor {
        const LOOK: Duration = Duration::from_millis(20);
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            while !told.load(Relaxed) {
                let Ok(Some(stream)) = accept(&listener, LOOK) else { continue };
                let serve = serve.clone();
                if many {
                    thread::spawn(move || serve(stream));
                } else {
                    let _ = serve(stream);
                }
            }
        });
        Acceptor { stop, thread: Some(thread) }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Creates the network of a variant; also for measurements inside this process.
pub fn lab(packets: Packets, forwarding: bool) -> Result<Lab> {
    let large_packets = packets == Packets::Large;
    let options = Options { large_packets, forwarding, in_order: InOrder::Nobody, ..Options::default() };
    let lab = Lab::new(Shape::TwoDevices, options)?;
    if packets == Packets::Coalesced {
        for device in [lab.client_device(), lab.server_device()] {
            coalesce(&lab.forwarder, device)?;
        }
    }
    Ok(lab)
}

/// Makes a device coalesce consecutive segments. A veth delivers packets one by one, a network card several per interrupt:
/// therefore packets are held for as long as a card delays its interrupt.
pub fn coalesce(host: &Namespace, device: &str) -> Result<()> {
    const NANOSECONDS: u32 = 20_000;
    host.execute("ethtool", &["-K", device, "gro", "on"])?;
    let wait = format!("echo {NANOSECONDS} > /sys/class/net/{device}/gro_flush_timeout");
    // A namespace's devices are visible only in a /sys of its own.
    host.execute("ip", &["netns", "exec", host.name(), "sh", "-c", &wait])?;
    Ok(())
}

/// Address of the server.
pub fn server() -> SocketAddr {
    topology::SERVER.port(Family::V4, PORT)
}

/// Address of the proxy.
pub fn proxy() -> SocketAddr {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT)
}

/// The pins in bpffs that a killed longsplice leaves: of the data path, and of translucent proxying.
pub struct Pins([PathBuf; 2]);

impl Pins {
    /// The pins in a namespace just created. Pins that already exist
    /// under its number belong to a deleted namespace, and are removed.
    pub fn at(namespace: &Namespace) -> Result<Pins> {
        let own = pin_folder(netns_inode(&namespace.path())?);
        let name = own.file_name().unwrap_or_default().to_string_lossy().replace("net-", "tpot-");
        let tpot = own.with_file_name(name);
        let pins = Pins([own, tpot]);
        pins.remove();
        Ok(pins)
    }

    /// The data path's folder.
    pub fn folder(&self) -> &std::path::Path {
        &self.0[0]
    }

    fn remove(&self) {
        // Most variants leave nothing.
        self.0.iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.remove();
    }
}
