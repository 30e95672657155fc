//! Socket options and ioctls for which no safe wrapper exists.

use nix::libc;
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

fn set_int(fd: impl AsFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the option value is one int, and its address and size are passed.
    let r = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn get_int(fd: impl AsFd, request: libc::c_ulong) -> io::Result<u32> {
    let mut n: libc::c_int = 0;
    // SAFETY: SIOCOUTQ and SIOCINQ write one int.
    if unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, &mut n) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(n as u32)
}

/// Bytes written to a TCP socket and not acknowledged yet (SIOCOUTQ).
pub fn unsent(fd: impl AsFd) -> io::Result<u32> {
    get_int(fd, libc::TIOCOUTQ)
}

/// Bytes waiting to be read (SIOCINQ).
pub fn unread(fd: impl AsFd) -> io::Result<u32> {
    get_int(fd, libc::FIONREAD)
}

/// TCP_REPAIR: a socket in this mode sends nothing, not even when it is closed. Needs CAP_NET_ADMIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Enter.
    On,
    /// Leave, without a window probe (TCP_REPAIR_OFF_NO_WP).
    Off,
}

impl Repair {
    /// Applies it.
    pub fn set(self, fd: impl AsFd) -> io::Result<()> {
        const TCP_REPAIR_ON: libc::c_int = 1;
        const TCP_REPAIR_OFF_NO_WP: libc::c_int = -1;
        set_int(fd, libc::TCP_REPAIR, if self == Repair::On { TCP_REPAIR_ON } else { TCP_REPAIR_OFF_NO_WP })
    }
}

/// Closes a socket without FIN and without RST.
pub fn close_silently(fd: OwnedFd) -> io::Result<()> {
    Repair::On.set(&fd)
}
