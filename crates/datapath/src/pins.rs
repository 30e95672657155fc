//! Directories in bpffs that hold the pins of links and maps: ownership, and removal of those without an owner.
//!
//! The owner holds a lock (flock(2)) on the directory itself. So the lock belongs to the pins, even if two programs see
//! different file systems, and the kernel releases it when the process ends. No other user may open the directory (mode 0700).

use crate::{
    ABI_VERSION, Datapath, LegView, OpenError, Options, Resets, Tuple, abi,
    attach::{Hook, attached_program, attached_programs, detach},
    foreign::remove_rules,
    kernel::kernel,
    load::missing_capabilities,
    maps::{from_bytes, io_error, leg_view},
};
use libbpf_rs::{
    MapCore, MapFlags, MapHandle,
    query::{ProgInfoIter, ProgInfoQueryOptions},
};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::Uid,
};
use std::{
    ffi::CString,
    fmt, fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, MetadataExt, PermissionsExt},
        },
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

/// Converts the return value of a libbpf call.
pub(crate) fn checked(r: i32) -> io::Result<i32> {
    if r < 0 { Err(io::Error::from_raw_os_error(-r)) } else { Ok(r) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Pins a kernel object.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let at = c_path(path)?;
    // SAFETY: both outlive the call.
    checked(unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), at.as_ptr()) }).map(drop)
}

/// Opens a pinned object.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let at = c_path(path)?;
    // SAFETY: the path outlives the call.
    let fd = checked(unsafe { libbpf_sys::bpf_obj_get(at.as_ptr()) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the default directory for the pins of this network namespace.
pub fn default_pin() -> io::Result<PathBuf> {
    let ns = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(ALL).join(format!("net-{ns}")))
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

/// Removes everything that a dead process has left in a directory and in the routing rules of this network namespace, with
/// all flows. The hosts of flows are reset, for which the data path is loaded once more. Returns `None` if nothing was there.
pub fn flush(path: &Path) -> Result<Option<Resets>, OpenError> {
    let rules = remove_rules();
    if !path.exists() {
        return Ok(None);
    }
    rules.map_err(|source| OpenError::Kernel { what: "remove rules of routing", source })?;
    let source = |source| OpenError::Kernel { what: "remove pinned maps and links", source };
    let remove = |resets| Owned::take(path)?.remove().map(|()| Some(resets)).map_err(source);
    let entries = Holdings::of(path).ok().and_then(|held| held.entries);
    if entries == Some(0) {
        return remove(Resets::default());
    }
    match Datapath::open(&Options { pin: Some(path.to_owned()), ..Options::default() }.with_smallest_rings()) {
        Ok(d) => {
            let resets = d.reset_all_forwarded();
            d.remove().map(|()| Some(resets)).map_err(source)
        }
        Err(e @ OpenError::Running(_)) => Err(e),
        Err(e) => remove(Resets { failed: entries.unwrap_or(0) / 2, error: Some(io::Error::other(e)), reset: 0 }),
    }
}

/// Returns the value of the pinned map that describes the others, if it is there.
pub(crate) fn abi_value(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    let path = folder.join("abi");
    if !path.exists() {
        return Ok(None);
    }
    let map = MapHandle::from_pinned_path(path).map_err(io_error)?;
    map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)
}

/// Returns the version in that value. All versions begin alike, except
/// that the first ends before the namespace. 0: not written yet.
pub(crate) fn version_in(abi: &[u8]) -> u32 {
    abi.first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
}

/// What would be lost with the tables of a directory, whatever their version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Number of path entries of flows in forwarding mode, and of flows
    /// that have just ended. `None`: that version did not count them.
    pub entries: Option<u64>,
    /// Number of records of connections.
    pub legs: usize,
    /// Number of transparent listeners, whose connections must not pass without a decision.
    pub foreign: usize,
}

impl Default for Holdings {
    fn default() -> Holdings {
        Holdings { entries: Some(0), legs: 0, foreign: 0 }
    }
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.entries {
            Some(n) => write!(f, "{n} path entries")?,
            None => f.write_str("an unknown number of path entries")?,
        }
        write!(f, ", {} records of connections and {} transparent listeners", self.legs, self.foreign)
    }
}

impl Holdings {
    /// Counts the contents of the tables pinned in a directory, whichever process uses them. Errors are those of the maps.
    pub fn of(folder: &Path) -> io::Result<Holdings> {
        const LISTENS_FOREIGN: u8 = abi::listens::LISTENS_FOREIGN.0 as u8;
        let map = |name| match folder.join(name) {
            path if path.exists() => MapHandle::from_pinned_path(path).map(Some).map_err(io_error),
            _ => Ok(None),
        };
        let counted =
            map("entries")?.map(|m| m.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)).transpose()?;
        let is_foreign = |map: &MapHandle, key: &[u8]| {
            map.lookup(key, MapFlags::ANY).is_ok_and(|value| value.is_some_and(|v| v.contains(&LISTENS_FOREIGN)))
        };
        Ok(Holdings {
            entries: counted.flatten().and_then(|value| Some(u64::from_ne_bytes(value.try_into().ok()?))),
            legs: map("legs")?.map_or(0, |legs| legs.keys().count()),
            foreign: map("listeners")?.map_or(0, |all| all.keys().filter(|key| is_foreign(&all, key)).count()),
        })
    }
}

/// Reads the connection records from the tables pinned in a directory, whichever process uses them, for diagnosis.
pub fn records(folder: &Path) -> io::Result<Vec<(Tuple, LegView)>> {
    let legs = MapHandle::from_pinned_path(folder.join("legs")).map_err(io_error)?;
    let value = |key: &[u8]| legs.lookup(key, MapFlags::ANY).ok().flatten();
    let record = |key: Vec<u8>| Some((Tuple::from_abi(&from_bytes(&key)), leg_view(from_bytes(&value(&key)?))));
    Ok(legs.keys().filter_map(record).collect())
}

/// Removes directories that are certainly dead: no process owns them, and all their links are detached because
/// the devices are gone, for example with their network namespace, so no packet reaches what is pinned there.
/// Also removes empty directories of another version, in any namespace. Returns what was removed.
pub fn remove_dead() -> io::Result<Vec<PathBuf>> {
    let folders = match fs::read_dir(ALL) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        folders => folders?,
    };
    let mut removed = Vec::new();
    for folder in folders {
        let path = folder?.path();
        if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("net-")) {
            continue;
        }
        match is_dead(&path).and_then(|dead| dead.map(|owned| owned.remove()).transpose()) {
            Ok(Some(())) => removed.push(path),
            Ok(None) => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "what is left of an earlier process stays"),
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
    let version = abi_value(path)?.map_or(0, |value| version_in(&value));
    Ok(![0, ABI_VERSION].contains(&version) && Holdings::of(path)? == Holdings::default())
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

/// Fails if one of these devices has another data path whose pins are not in our directory: nobody would look after its flows.
pub(crate) fn refuse_others(devices: &[u32], pin: &Path) -> Result<(), OpenError> {
    let map_id = |map: MapHandle| map.info().map(|map| map.info.id);
    let ours = match pin.join("legs") {
        path if path.exists() => MapHandle::from_pinned_path(path).and_then(map_id).ok(),
        _ => None,
    };
    let mut attached = Vec::new();
    for device in devices {
        attached.extend(attached_programs(*device)?.into_iter().map(|program| (program, *device)));
    }
    if attached.is_empty() {
        return Ok(());
    }
    for program in ProgInfoIter::with_query_opts(ProgInfoQueryOptions::default().include_map_ids(true)) {
        let Some((_, device)) = attached.iter().find(|(id, _)| *id == program.id) else { continue };
        for id in &program.map_ids {
            let map = MapHandle::from_map_id(*id).map_err(kernel("maps of an attached program"))?;
            if map.name() == "legs"
                && ["ingress", "egress"].iter().any(|name| program.name == *name)
                && ours != Some(*id)
            {
                return Err(OpenError::Attached(*device));
            }
        }
    }
    Ok(())
}
