//! Pins kernel objects in a bpffs, and opens pinned ones.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

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
