//! Folders in bpffs where links and maps are pinned: who owns one, and which of them nobody does.
//!
//! The owner holds a lock (flock(2)) on the folder itself. So it goes with the pins, whatever else two programs see of each other's
//! file systems, and the kernel gives it back when the process is gone. Nobody else may open the folder (mode 0700).

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
/// Where all folders are, unless others were named.
const ALL: &str = "/sys/fs/bpf/longsplice";
/// Locks of earlier versions lay here, beside.
const OLD_LOCKS: &str = "/run/longsplice";

/// Whoever looks for what is dead holds a folder for a moment, and so may a process that is just being killed: how often the lock
/// is tried ...
const TRIES: u32 = 10;
/// ... and how long after one another.
const PAUSE: Duration = Duration::from_millis(20);

/// What libbpf answers.
pub(crate) fn checked(r: i32) -> io::Result<i32> {
    if r < 0 { Err(io::Error::from_raw_os_error(-r)) } else { Ok(r) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Gives an object of the kernel's a name.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let at = c_path(path)?;
    // SAFETY: both outlive the call.
    checked(unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), at.as_ptr()) }).map(drop)
}

/// The object of that name.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let at = c_path(path)?;
    // SAFETY: the path outlives the call.
    let fd = checked(unsafe { libbpf_sys::bpf_obj_get(at.as_ptr()) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Where maps and links of this network namespace are pinned unless told otherwise.
pub fn default_pin() -> io::Result<PathBuf> {
    let ns = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(ALL).join(format!("net-{ns}")))
}

/// A folder that is ours for as long as this lives.
#[derive(Debug)]
pub(crate) struct Owned {
    pub path: PathBuf,
    lock: Flock<fs::File>,
}

impl Owned {
    /// Makes the folder, if need be, and takes it.
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
            // or its owner has removed it in the meantime
            if owned.is_there() {
                return Ok(owned);
            }
        }
    }

    /// Is it still the folder of that name?
    pub fn is_there(&self) -> bool {
        let ids = |m: fs::Metadata| (m.dev(), m.ino());
        fs::metadata(&self.path).map(ids).ok() == self.lock.metadata().map(ids).ok()
    }

    /// Removes it with all that is pinned there: what nobody else holds is detached and freed. One that took its place stays.
    pub fn remove(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        detach_all(&self.path);
        fs::remove_dir_all(&self.path)
    }
}

/// Nothing was pinned: nothing is left.
impl Drop for Owned {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_dir(&self.path); // only if it is empty
        }
    }
}

/// At once: what only loses its last pin is attached for a moment yet, and whoever opens a data path meanwhile would meet it. So it
/// is no loss if this fails.
pub(crate) fn detach_all(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let _ = detach(&entry.path());
    }
}

/// For nobody but us. What others have made there would be theirs to take away, and anybody may write to a bpffs by default.
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

/// Removes what a process that is gone has left there and in the routing of this network namespace, with all flows. Their hosts
/// are reset, for which the data path is loaded once more. `None`: nothing was there.
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
    match Datapath::open(&Options { pin: Some(path.to_owned()), ..Options::default() }) {
        Ok(d) => {
            let resets = d.reset_all_forwarded();
            d.remove().map(|()| Some(resets)).map_err(source)
        }
        Err(e @ OpenError::Running(_)) => Err(e),
        Err(e) => remove(Resets { failed: entries.unwrap_or(0) / 2, error: Some(io::Error::other(e)), reset: 0 }),
    }
}

/// The value of the map that says what the others were made with.
pub(crate) fn abi_value(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    let path = folder.join("abi");
    if !path.exists() {
        return Ok(None);
    }
    let map = MapHandle::from_pinned_path(path).map_err(io_error)?;
    map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)
}

/// Every version begins as this one does, but for the first, which ends before the namespace; 0: not written yet.
pub(crate) fn version_in(abi: &[u8]) -> u32 {
    abi.first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
}

/// What would be lost with the tables of a folder, whatever version they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Entries of flows in forwarding mode, and of those that have ended just now. `None`: it is a version that did not count them.
    pub entries: Option<u64>,
    /// Records of connections.
    pub legs: usize,
    /// Listeners to connections of others, of which nothing is to pass unjudged.
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
    /// What the tables that are pinned in a folder hold now, whoever uses them.
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

/// The records of connections in the tables that are pinned in a folder, whoever uses them: for whoever looks for a cause.
pub fn records(folder: &Path) -> io::Result<Vec<(Tuple, LegView)>> {
    let legs = MapHandle::from_pinned_path(folder.join("legs")).map_err(io_error)?;
    let value = |key: &[u8]| legs.lookup(key, MapFlags::ANY).ok().flatten();
    let record = |key: Vec<u8>| Some((Tuple::from_abi(&from_bytes(&key)), leg_view(from_bytes(&value(&key)?))));
    Ok(legs.keys().filter_map(record).collect())
}

/// Removes what is provably dead: folders that no process owns, and whose links are all detached, for their devices are gone, as
/// with a network namespace; no packet comes to what is pinned there. And those of another version that hold nothing, in any
/// namespace. What was removed.
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

/// Is it of another version, and empty?
fn is_outdated(path: &Path) -> io::Result<bool> {
    let version = abi_value(path)?.map_or(0, |value| version_in(&value));
    Ok(![0, ABI_VERSION].contains(&version) && Holdings::of(path)? == Holdings::default())
}

/// Is anything that is pinned there attached to a device?
fn has_device(path: &Path) -> io::Result<bool> {
    for pin in fs::read_dir(path)? {
        let pin = pin?.path();
        if Hook::is_of(&pin) && attached_program(open(&pin)?.as_fd())?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Does no process of an earlier version own it?
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

/// Another data path on one of these devices, pinned where we do not look: its flows would be nobody's. `ours`: the maps that are
/// pinned here.
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
