//! Unix sockets with a name in the file system: those that operators' tools connect to.

use crate::paths;
use longsplice_proxy::SocketAccess;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use std::{
    fs, io,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown},
            net::UnixListener as StdListener,
        },
    },
    path::{Path, PathBuf},
};

/// Most clients that wait to be accepted: more than are served at a time would not help.
const WAITING: i32 = 32;

/// The file of a socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile(pub PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // If the file or its directory is already gone, that is just as well.
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens on `path`, for those who have access. An existing file is replaced only if it is a socket without a listener.
pub fn listen_at(path: &Path, access: SocketAccess) -> io::Result<(StdListener, SocketFile)> {
    make_directory(path, access)?;
    match paths::connect(path) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            check_file(path)?;
            fs::remove_file(path)?;
        }
        Err(e) => return Err(e),
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // Use a temporary name until the socket listens and has the right
    // mode: a socket that refuses connections counts as left over.
    let new = path.with_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_file(&new); // left by an earlier process with our number
    bind(fd.as_raw_fd(), &UnixAddr::new(&new)?)?;
    let new = SocketFile(new);
    give(&new.0, access)?;
    listen(&fd, Backlog::new(WAITING)?)?;
    // A second name, and not another one, or the file of a process that has begun to listen meanwhile would be lost.
    fs::hard_link(&new.0, path)?;
    Ok((StdListener::from(fd), SocketFile(path.to_owned())))
}

/// Lets those open it who have access.
pub fn give(socket: &Path, SocketAccess { group, mode }: SocketAccess) -> io::Result<()> {
    // nobody has more rights than are meant in between
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    if let Some(group) = group {
        chown(socket, None, Some(group))
            .map_err(|e| io::Error::new(e.kind(), format!("cannot give it to group {group}: {e}")))?;
    }
    fs::set_permissions(socket, fs::Permissions::from_mode(mode))
}

/// Fails if there is a file that is no socket.
pub fn check_file(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(of) if !of.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "there is a file that is no socket: remove it, or write another path",
        )),
        _ => Ok(()),
    }
}

/// Creates the usual directory of the socket if it is missing, for our user only unless others have access; another one has to be
/// there. The owner is checked, because any user can create files in /tmp.
fn make_directory(socket: &Path, access: SocketAccess) -> io::Result<()> {
    if let Some(dir) = directory(socket)
        && is_usual(socket)
        && let Err(e) =
            fs::DirBuilder::new().mode(if access == SocketAccess::default() { 0o700 } else { 0o711 }).create(dir)
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(e);
    }
    check_directory(socket)?;
    // an earlier process may have made it for our user only
    if let Some(dir) = directory(socket).filter(|_| is_usual(socket) && access != SocketAccess::default()) {
        let mode = fs::metadata(dir)?.mode();
        if mode & 0o011 != 0o011 {
            fs::set_permissions(dir, fs::Permissions::from_mode(mode & 0o777 | 0o011))?;
        }
    }
    Ok(())
}

fn directory(socket: &Path) -> Option<&Path> {
    socket.parent().filter(|d| !d.as_os_str().is_empty())
}

/// Whether it is in the directory of the default control socket.
fn is_usual(socket: &Path) -> bool {
    paths::control_socket().is_ok_and(|usual| usual.parent() == socket.parent())
}

/// Checks whether the directory of the socket is there, unless it would be created, and whose it is.
pub fn check_directory(socket: &Path) -> io::Result<()> {
    let Some(dir) = directory(socket).filter(|dir| dir.exists() || !is_usual(socket)) else { return Ok(()) };
    let missing =
        |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}; create this directory first", dir.display()));
    let owner = fs::metadata(dir).map_err(missing)?.uid();
    if owner != 0 && owner != nix::unistd::Uid::effective().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} belongs to another user", dir.display()),
        ));
    }
    Ok(())
}
