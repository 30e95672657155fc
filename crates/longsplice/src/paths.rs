//! Places that belong to one network namespace, so that several longsplices do not meet.

use longsplice_datapath::OpenError;
use std::{
    env,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Where the data path pins its links and maps.
const PINS: &str = "/sys/fs/bpf/longsplice";
/// Sockets and locks.
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

/// The lock beside a pin folder; held by the process that runs the data path.
pub fn pin_lock(pin: &Path) -> PathBuf {
    let name = pin.to_string_lossy().replace('/', "-");
    Path::new(RUN).join(format!("{}.lock", name.trim_start_matches('-')))
}

/// Detaches from all devices and removes the tables that a process which is gone has left. False: there was nothing.
pub fn flush(pin: &Path) -> Result<bool, OpenError> {
    let kernel = |what| move |source| OpenError::Kernel { what, source };
    if !fs::exists(pin).map_err(kernel("look at pinned links"))? {
        return Ok(false);
    }
    let lock = pin_lock(pin);
    let file = File::options().create(true).truncate(false).write(true).open(&lock);
    let _lock =
        nix::fcntl::Flock::lock(file.map_err(kernel("lock file"))?, nix::fcntl::FlockArg::LockExclusiveNonblock)
            .map_err(|_| OpenError::Running(lock))?;
    fs::remove_dir_all(pin).map_err(kernel("remove pinned links"))?;
    Ok(true)
}
