//! Directories in bpffs that hold the pins of links and maps: ownership, and removal of those without an owner.
//!
//! The owner holds a lock (flock(2)) on the directory itself. So the lock belongs to the pins, even if two programs see
//! different file systems, and the kernel releases it when the process ends. No other user may open the directory (mode 0700).

use crate::{
    abi_id::{AbiId, id_in},
    attaching::attach::{Hook, attached_program, detach},
    attaching::programs::{Loaded, attached_programs, loaded_programs},
    error::{OpenError, kernel},
    network::devices::{Device, devices},
    requirements::missing_capabilities,
    tables::bpffs::open,
    tables::pinned::{Holdings, abi_value},
};
use libbpf_rs::{MapCore, MapHandle};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::Uid,
};
use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

const BPFFS: &str = "/sys/fs/bpf";
/// Parent of all directories of pins, unless another path was configured.
const ALL: &str = "/sys/fs/bpf/longsplice";
/// Directory of the lock files of earlier versions.
const OLD_LOCKS: &str = "/run/longsplice";

/// Number of attempts to take a lock. A process that looks for dead
/// directories holds one for a moment, as does a process that is being killed.
const TRIES: u32 = 10;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the default directory for the pins of this network namespace.
pub fn default_pin() -> io::Result<PathBuf> {
    let ns = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(ALL).join(format!("net-{ns}")))
}

/// Returns the directory for the pins of translucent proxying in this network namespace.
pub(crate) fn tpot_pin() -> io::Result<PathBuf> {
    let ns = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(ALL).join(format!("tpot-{ns}")))
}

/// Returns the directory for the pins of the router of a farm in this network namespace.
pub(crate) fn tpot_router_pin() -> io::Result<PathBuf> {
    let ns = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(ALL).join(format!("tpot-router-{ns}")))
}

/// Returns whether a process owns the directory. Fails if there is none.
pub(crate) fn is_owned(path: &Path) -> io::Result<bool> {
    match Flock::lock(fs::File::open(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(_) => Ok(false),
        Err((_, Errno::EWOULDBLOCK)) => Ok(true),
        Err((_, e)) => Err(e.into()),
    }
}

/// A directory of pins that this process owns while this value lives.
#[derive(Debug)]
pub(crate) struct Owned {
    pub path: PathBuf,
    lock: Flock<fs::File>,
}

impl Owned {
    /// Creates the directory if necessary, and takes its lock.
    pub fn take(path: &Path) -> Result<Owned, OpenError> {
        let io = |source| OpenError::Kernel { what: "lock of the folder of pins", source };
        let mut tries = 0;
        loop {
            make(path)?;
            let owned = match Flock::lock(fs::File::open(path).map_err(io)?, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => Owned { path: path.to_owned(), lock },
                Err((_, Errno::EWOULDBLOCK)) if tries < TRIES => {
                    tries += 1;
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err((_, Errno::EWOULDBLOCK)) => return Err(OpenError::Running(path.to_owned())),
                Err((_, e)) => return Err(io(e.into())),
            };
            // otherwise its owner has removed the directory meanwhile
            if owned.is_there() {
                return Ok(owned);
            }
        }
    }

    /// Returns whether the path still leads to this directory.
    pub fn is_there(&self) -> bool {
        let ids = |m: fs::Metadata| (m.dev(), m.ino());
        fs::metadata(&self.path).map(ids).ok() == self.lock.metadata().map(ids).ok()
    }

    /// Removes the directory with all its pins. Objects that nobody else
    /// holds are detached and freed. A new directory in its place stays.
    pub fn remove(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        detach_all(&self.path);
        fs::remove_dir_all(&self.path)
    }
}

/// Removes the directory if nothing was pinned.
impl Drop for Owned {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_dir(&self.path); // only if it is empty
        }
    }
}

/// Detaches all links at once. A link that only loses its last pin stays attached for a moment,
/// and a data path that is opened meanwhile would find it. Failures are therefore harmless.
pub(crate) fn detach_all(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let _ = detach(&entry.path());
    }
}

/// Creates a directory that only this user can access. Objects in another user's directory
/// could be removed by that user, and by default everybody may write to a bpffs.
fn make(path: &Path) -> Result<(), OpenError> {
    let not_there = |_| OpenError::NoBpffs(path.to_owned());
    let unless_lacking = |e| if missing_capabilities().is_empty() { e } else { OpenError::Privilege };
    let system = path.ancestors().find_map(|dir| statfs(dir).ok());
    if system.is_none_or(|system| system.filesystem_type() != BPF_FS_MAGIC) {
        return Err(unless_lacking(OpenError::NoBpffs(path.to_owned())));
    }
    let root = [path.parent(), Some(path)];
    for dir in root.into_iter().flatten().filter(|dir| *dir != Path::new(BPFFS)) {
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(source) if source.kind() == ErrorKind::PermissionDenied => {
                return Err(unless_lacking(OpenError::Pins { path: path.to_owned(), source }));
            }
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(not_there(e)),
            _ => {}
        }
        let is = fs::symlink_metadata(dir).map_err(not_there)?;
        if !is.is_dir() || ![0, Uid::effective().as_raw()].contains(&is.uid()) {
            return Err(OpenError::Foreign(dir.to_owned()));
        }
        if is.mode() & 0o077 != 0 && is.uid() == Uid::effective().as_raw() {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
                .map_err(|source| OpenError::Kernel { what: "mode of the folder of pins", source })?;
        }
    }
    Ok(())
}

/// Removes directories that are certainly dead: no process owns them, and all their links are detached because
/// the devices are gone, for example with their network namespace, so no packet reaches what is pinned there.
/// Also removes empty directories of another version, in any namespace. Returns what was removed.
pub fn remove_dead() -> io::Result<Vec<PathBuf>> {
    let folders = match fs::read_dir(ALL) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io::Error::new(e.kind(), format!("{ALL}: {e}"))),
        Ok(folders) => folders,
    };
    let mut removed = Vec::new();
    for folder in folders {
        let path = folder?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !["net-", "tpot-"].iter().any(|of| name.starts_with(of)) {
            continue;
        }
        match is_dead(&path).and_then(|dead| dead.map(|owned| owned.remove()).transpose()) {
            Ok(Some(())) => removed.push(path),
            Ok(None) => {}
            // Its owner, or a process of another namespace that cleans up as well, has just removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove the pins of an earlier process: they stay")
            }
        }
    }
    Ok(removed)
}

fn is_dead(path: &Path) -> io::Result<Option<Owned>> {
    let is_of_use = || Ok::<_, io::Error>(has_device(path)? && !is_outdated(path)?);
    if is_of_use()? || !is_free_of_old(path)? {
        return Ok(None);
    }
    let Ok(owned) = Owned::take(path) else { return Ok(None) };
    Ok((!is_of_use()?).then_some(owned))
}

/// Returns whether the directory is of another version, and empty.
fn is_outdated(path: &Path) -> io::Result<bool> {
    let found = abi_value(path)?.and_then(|value| id_in(&value));
    Ok(found.is_some_and(|id| id != AbiId::OURS) && Holdings::of(path)? == Holdings::default())
}

/// Returns whether any link in the directory is attached to a device.
fn has_device(path: &Path) -> io::Result<bool> {
    for pin in fs::read_dir(path)? {
        let pin = pin?.path();
        if Hook::is_of(&pin) && attached_program(open(&pin)?.as_fd())?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether no process of an earlier version owns the directory.
fn is_free_of_old(path: &Path) -> io::Result<bool> {
    let name = path.to_string_lossy().trim_start_matches('/').replace('/', "-");
    match fs::File::open(Path::new(OLD_LOCKS).join(format!("{name}.lock"))) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        file => match Flock::lock(file?, FlockArg::LockExclusiveNonblock) {
            Ok(_) => Ok(true),
            Err((_, Errno::EWOULDBLOCK)) => Ok(false),
            Err((_, e)) => Err(e.into()),
        },
    }
}

/// Returns the name of a device of this network namespace to which a data path is attached that is not pinned in the usual
/// directory, or that is not seen there. Errors if that cannot be found out.
pub fn other_datapath() -> Result<Option<String>, OpenError> {
    let pin = default_pin().map_err(|source| OpenError::Kernel { what: "network namespace", source })?;
    let all = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
    match refuse_others(&all, &pin) {
        Ok(()) => Ok(None),
        Err(OpenError::Attached(device)) => Ok(Some(device)),
        Err(e) => Err(e),
    }
}

/// Fails if any of these devices has another data path, whose pins are not in our directory. Two in a network namespace would
/// give the same ports to different connections, and nobody would look after the flows of one that has died.
pub(crate) fn refuse_others(devices: &[Device], pin: &Path) -> Result<(), OpenError> {
    let mut attached = Vec::new();
    for device in devices {
        for leave in [false, true] {
            attached.extend(attached_programs(device.index, leave)?.into_iter().map(|program| (program, device)));
        }
    }
    if attached.is_empty() {
        return Ok(());
    }
    let ours = match pin.join("legs") {
        path if path.exists() => {
            let map = MapHandle::from_pinned_path(path).and_then(|map| map.info());
            Some(map.map_err(kernel("open pinned map"))?.info.id)
        }
        _ => None,
    };
    let is_datapath = |p: &Loaded| p.legs.is_some() && p.legs != ours && ["ingress", "egress"].contains(&&*p.name);
    let all = loaded_programs()?;
    let other = all.iter().filter(|p| is_datapath(p)).find_map(|p| attached.iter().find(|(id, _)| *id == p.id));
    other.map_or(Ok(()), |(_, device)| Err(OpenError::Attached(device.name.clone())))
}
