//! A process that works on a socket for as long as a test wants ([`Busy`]).

use crate::Tuple;
use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    fs, io,
    net::TcpStream,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    thread::{self, JoinHandle},
};

/// `struct uffdio_api` of <linux/userfaultfd.h>.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Registration {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const UFFD_API: u64 = 0xaa;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
nix::ioctl_readwrite!(uffdio_api, UFFD_API, 0x3f, Api);
nix::ioctl_readwrite!(uffdio_register, UFFD_API, 0x00, Registration);

/// Milliseconds until the kernel needs the page.
const PATIENCE: u16 = 20_000;

/// A thread that works on a socket of this process until this is dropped: it is in the middle of a call, and the kernel keeps what
/// arrives for the socket aside until the call returns. The thread sends from a page that nobody provides (userfaultfd(2)), and
/// nothing is sent in the end.
#[derive(Debug)]
pub struct Busy {
    page: Page,
    /// Closed before the thread is awaited.
    faults: Option<OwnedFd>,
    call: Option<JoinHandle<io::Result<()>>>,
}

impl Busy {
    /// Begins to work on the socket with these addresses. Needs CAP_SYS_PTRACE.
    pub fn with(leg: &Tuple) -> io::Result<Busy> {
        let socket = socket_of(leg)?;
        let page = Page::new()?;
        let faults = page.report_faults()?;
        let at = page.0;
        // SAFETY: the page stays mapped until the thread has ended, and nobody else uses it.
        let send = move || unsafe { libc::send(socket.as_raw_fd(), at as *const _, 1, libc::MSG_NOSIGNAL) };
        let call = thread::spawn(move || checked(send()).map(drop));
        let busy = Busy { page, faults: Some(faults), call: Some(call) };
        // the thread has the socket's lock when the kernel needs the page
        let mut needed = busy.faults.iter().map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN)).collect::<Vec<_>>();
        match poll(&mut needed, PollTimeout::from(PATIENCE))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(busy),
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.page.forbid();
        drop(self.faults.take()); // the thread goes on
        let sent = self.call.take().map(JoinHandle::join);
        if !thread::panicking() {
            assert!(matches!(sent, Some(Ok(Err(_)))), "nothing is sent: {sent:?}");
        }
    }
}

/// Returns a duplicate of the socket of this process that has these addresses.
fn socket_of(leg: &Tuple) -> io::Result<OwnedFd> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let number: Option<RawFd> = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        // SAFETY: no memory is passed. A number that is no descriptor by now is refused.
        let copied = number.map(|fd| checked(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) } as isize));
        let Some(Ok(fd)) = copied else { continue };
        // SAFETY: the descriptor is new, and nobody else has it.
        let s = TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
        if s.peer_addr().is_ok_and(|at| at == leg.remote) && s.local_addr().is_ok_and(|at| at == leg.local) {
            return Ok(s.into());
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

fn checked(result: isize) -> io::Result<isize> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The address of a page that was mapped, and has no memory yet.
#[derive(Debug)]
struct Page(usize);

impl Page {
    /// No page of Linux is larger.
    const BYTES: usize = 1 << 16;

    fn new() -> io::Result<Page> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: it asks for new memory, at any free address.
        let at = unsafe { libc::mmap(ptr::null_mut(), Page::BYTES, access, kind, -1, 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Page(at as usize)) }
    }

    /// Whoever needs the page waits from now on, until the descriptor is closed. It can be read then.
    fn report_faults(&self) -> io::Result<OwnedFd> {
        // SAFETY: no memory is passed.
        let fd = checked(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) } as isize)?;
        // SAFETY: the descriptor is new, and nobody else has it.
        let faults = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        let mut api = Api { api: UFFD_API, features: 0, ioctls: 0 };
        let (start, len) = (self.0 as u64, Page::BYTES as u64);
        let mut wanted = Registration { start, len, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: both structs are those that the calls read and write.
        unsafe {
            uffdio_api(faults.as_raw_fd(), &raw mut api)?;
            uffdio_register(faults.as_raw_fd(), &raw mut wanted)?;
        }
        Ok(faults)
    }

    /// A call that needs the page fails from now on.
    fn forbid(&self) {
        // SAFETY: nothing of this program refers to the page.
        let r = unsafe { libc::mprotect(self.0 as *mut _, Page::BYTES, libc::PROT_NONE) };
        assert_eq!(r, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the page.
        unsafe { libc::munmap(self.0 as *mut _, Page::BYTES) };
    }
}
