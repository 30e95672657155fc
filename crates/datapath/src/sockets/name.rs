//! Names of addresses, which std does not look up.

use nix::{
    libc,
    sys::socket::{SockaddrLike, SockaddrStorage},
};
use std::{
    ffi::CStr,
    io,
    net::{IpAddr, SocketAddr},
    ptr,
};

/// Longest name that getnameinfo(3) returns, with its final zero (NI_MAXHOST).
const NAME_MAX: usize = 1025;

/// Looks up the name of an address. It may take as long as the system's resolver takes. Fails if there is none.
pub fn name_of(ip: IpAddr) -> io::Result<String> {
    let address = SockaddrStorage::from(SocketAddr::new(ip, 0));
    let mut name = [0_u8; NAME_MAX];
    // SAFETY: both buffers live through the call and have the lengths that it is told; no name of a service is asked for.
    let failed = unsafe {
        libc::getnameinfo(
            address.as_ptr().cast(),
            address.len(),
            name.as_mut_ptr().cast(),
            NAME_MAX as libc::socklen_t,
            ptr::null_mut(),
            0,
            libc::NI_NAMEREQD,
        )
    };
    if failed == libc::EAI_SYSTEM {
        return Err(io::Error::last_os_error());
    }
    let text = || CStr::from_bytes_until_nul(&name).ok()?.to_str().ok().map(str::to_owned);
    match failed {
        0 => text().ok_or_else(|| io::Error::other("its name is no text")),
        libc::EAI_NONAME => Err(io::Error::other("the address has no name")),
        code => Err(io::Error::other(format!("the look-up has failed (error {code} of getnameinfo)"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_a_name_and_documentation_has_none() {
        assert!(!name_of([127, 0, 0, 1].into()).expect("a line of /etc/hosts").is_empty());
        name_of([192, 0, 2, 1].into()).expect_err("nobody's");
    }
}
