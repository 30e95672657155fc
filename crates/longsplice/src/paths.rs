//! Paths that belong to one network namespace, so that several instances do not collide.

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
/// Directory of the control sockets.
const RUN: &str = "/run/longsplice";

/// The inode of the network namespace at `path`, which identifies the namespace while it exists.
pub fn netns_inode(path: &Path) -> io::Result<u64> {
    Ok(fs::metadata(path)?.ino())
}

fn own_netns() -> io::Result<u64> {
    netns_inode(Path::new("/proc/thread-self/ns/net"))
}

/// The folder where the data path of a namespace pins its objects by default (`Options::pin`).
pub fn pin_folder(netns: u64) -> PathBuf {
    Path::new(PINS).join(format!("net-{netns}"))
}

/// The pin folder of the current namespace.
pub fn own_pin_folder() -> io::Result<PathBuf> {
    Ok(pin_folder(own_netns()?))
}

/// The control socket of the current namespace.
pub fn control_socket() -> io::Result<PathBuf> {
    let name = format!("control-{}.sock", own_netns()?);
    // Root creates the directory; a service manager may have created it for another user (RuntimeDirectory=longsplice).
    let writable = nix::unistd::access(RUN, nix::unistd::AccessFlags::W_OK).is_ok();
    if writable || nix::unistd::Uid::effective().is_root() {
        return Ok(Path::new(RUN).join(name));
    }
    // The user ID in the name separates users of the same machine.
    Ok(match env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => Path::new(&dir).join("longsplice").join(name),
        None => env::temp_dir().join(format!("longsplice-{}", nix::unistd::Uid::effective())).join(name),
    })
}

/// Time limit for a connection to a control socket and for each
/// answer. Answers come from memory at once, unless the process hangs.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to a control socket. Fails with [`io::ErrorKind::WouldBlock`] if the process hangs and accepts no connection.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(PATIENCE.as_secs() as i64))?;
    nix::sys::socket::connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd.into())
}

/// Removes files that dead processes have left in /run/longsplice: sockets without
/// a listener, and unheld locks of earlier versions. Returns the removed paths.
pub fn remove_leftovers() -> io::Result<Vec<PathBuf>> {
    let files = match fs::read_dir(RUN) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io::Error::new(e.kind(), format!("{RUN}: {e}"))),
        Ok(files) => files,
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
        // another process may have removed it first
        if dead && fs::remove_file(&path).is_ok() {
            removed.push(path);
        }
    }
    Ok(removed)
}
