//! Places that belong to one network namespace, so that several longsplices do not meet.

use nix::{
    fcntl::{Flock, FlockArg},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, setsockopt, socket, sockopt},
        time::{TimeVal, TimeValLike},
    },
};
use std::{
    env,
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// Where the data path pins its links and maps.
const PINS: &str = "/sys/fs/bpf/longsplice";
/// Sockets.
const RUN: &str = "/run/longsplice";

/// The inode of the network namespace at `path`: its identity, while it exists.
pub fn netns_inode(path: &Path) -> io::Result<u64> {
    Ok(fs::metadata(path)?.ino())
}

fn own_netns() -> io::Result<u64> {
    netns_inode(Path::new("/proc/thread-self/ns/net"))
}

/// The folder that the data path of a namespace pins to when it is not told otherwise (`Options::pin`).
pub fn pin_folder(netns: u64) -> PathBuf {
    Path::new(PINS).join(format!("net-{netns}"))
}

/// The same for the namespace we are in.
pub fn own_pin_folder() -> io::Result<PathBuf> {
    Ok(pin_folder(own_netns()?))
}

/// The control socket of this namespace.
pub fn control_socket() -> io::Result<PathBuf> {
    let name = format!("control-{}.sock", own_netns()?);
    // Root makes the directory; a service manager may have made it for another user (RuntimeDirectory=longsplice).
    let writable = nix::unistd::access(RUN, nix::unistd::AccessFlags::W_OK).is_ok();
    if writable || nix::unistd::Uid::effective().is_root() {
        return Ok(Path::new(RUN).join(name));
    }
    // The user's number keeps two users of one machine apart.
    Ok(match env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => Path::new(&dir).join("longsplice").join(name),
        None => env::temp_dir().join(format!("longsplice-{}", nix::unistd::Uid::effective())).join(name),
    })
}

/// How long a control socket may keep us waiting for a connection or an answer: all of it comes at once, from memory, unless the
/// process hangs.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to a control socket, or gives up ([`io::ErrorKind::WouldBlock`]): a process that hangs accepts nobody.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(PATIENCE.as_secs() as i64))?;
    nix::sys::socket::connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd.into())
}

/// Removes what processes that are gone have left in /run/longsplice: sockets that nobody listens on, and the locks of earlier
/// versions that nobody holds. What was removed.
pub fn remove_leftovers() -> io::Result<Vec<PathBuf>> {
    let files = match fs::read_dir(RUN) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files?,
    };
    let mut removed = Vec::new();
    for file in files {
        let path = file?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let dead = if name.starts_with("control-") {
            matches!(connect(&path), Err(e) if e.kind() == io::ErrorKind::ConnectionRefused)
        } else if name.ends_with(".lock") {
            File::open(&path).is_ok_and(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok())
        } else {
            false
        };
        // another process may have been quicker
        if dead && fs::remove_file(&path).is_ok() {
            removed.push(path);
        }
    }
    Ok(removed)
}
