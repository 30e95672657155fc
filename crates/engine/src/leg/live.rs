//! A connected socket in the runtime that tracks the position of urgent data (RFC 9293, 3.8.5).
//!
//! Our sockets have SO_OOBINLINE: the urgent byte stays in the stream, so that the bytes read agree with the
//! sequence numbers. Its position, the mark, has to be passed on as well. A read never goes beyond a mark,
//! but a read that begins at a mark does not say so, so the reader must know before. If an event without
//! EPOLLPRI reports readable data, the first byte of it cannot become urgent any more, and one read may
//! follow. After that read, and where another thread receives the events, poll(2) has to be called first.

use longsplice_datapath::{is_urgent, receive, register};
use nix::{
    errno::Errno,
    libc::{MSG_NOSIGNAL, MSG_OOB},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{SockRef, Socket};
use std::{
    future::poll_fn,
    io::{self, IoSlice},
    mem::{self, MaybeUninit},
    net::{Shutdown, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{Interest, ReadBuf, unix::AsyncFd},
    runtime::{Handle, RuntimeFlavor},
};

#[derive(Debug)]
pub(crate) struct Live {
    /// Shared with futures that wait for a failure while others read and write.
    socket: Arc<AsyncFd<OwnedFd>>,
    /// Another thread receives the events, so they may be older than the last read.
    shared: bool,
    /// The last event says nothing about the next byte.
    look: bool,
}

impl Live {
    /// Registers the socket with the current runtime. Errors if the runtime accepts no more.
    pub fn new(socket: OwnedFd) -> io::Result<Live> {
        let shared = Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread;
        let interest = Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY;
        Ok(Live { socket: register(socket, interest)?.into(), shared, look: shared })
    }

    /// Connects a non-blocking socket. If the future is dropped, and the server has accepted the connection, the server is reset.
    pub async fn connect(socket: Socket, to: SocketAddr) -> io::Result<Live> {
        match socket.connect(&to.into()) {
            Err(e) if e.raw_os_error() == Some(Errno::EINPROGRESS as i32) => {}
            r => r?,
        }
        let live = Live::new(socket.into())?;
        let opening = Opening(&live);
        let heard = |cx: &mut Context<'_>| live.socket.poll_write_ready(cx).map_ok(|heard| heard.ready());
        // epoll reports that both directions are closed after each error: EPOLLHUP
        let failed = poll_fn(heard).await?.is_write_closed();
        let error = if failed { live.sock().take_error()? } else { None };
        error.map_or(Ok(()), Err)?;
        mem::forget(opening);
        Ok(live)
    }

    pub fn get(&self) -> &OwnedFd {
        self.socket.get_ref()
    }

    fn sock(&self) -> SockRef<'_> {
        SockRef::from(self.get())
    }

    /// Takes the socket out of the runtime. No future may wait for its failure any more.
    pub fn leave(self) -> OwnedFd {
        Arc::into_inner(self.socket).expect("one owner").into_inner()
    }

    /// Waits until the connection has failed, for example by a reset, whether or not anybody reads or writes.
    pub fn failed(&self) -> impl Future<Output = ()> + use<> {
        let socket = self.socket.clone();
        async move {
            // on an error the runtime is ending, and the connection with it
            let _ = socket.ready(Interest::ERROR).await;
        }
    }

    /// Waits until there is something to read, or the stream ends, as far as the runtime knows.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_read_ready(cx).map_ok(drop)
    }

    /// Waits until something can be read, or an error has occurred. Consumes nothing.
    pub fn poll_heard(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_with_readable(cx, |s| SockRef::from(s).peek(&mut [MaybeUninit::uninit()])).map(drop)
    }

    /// Performs a read that may find nothing, as soon as the socket is readable.
    pub fn poll_with_readable<R>(
        &self,
        cx: &mut Context<'_>,
        mut reading: impl FnMut(&OwnedFd) -> io::Result<R>,
    ) -> Poll<io::Result<R>> {
        loop {
            if let Ok(r) = ready!(self.socket.poll_read_ready(cx))?.try_io(|s| reading(s.get_ref())) {
                return Poll::Ready(r);
            }
        }
    }

    /// Performs a write of `all` bytes. If it writes fewer, there is no room for more.
    pub fn poll_with_writable(
        &self,
        cx: &mut Context<'_>,
        all: usize,
        mut writing: impl FnMut(&OwnedFd) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut heard = ready!(self.socket.poll_write_ready(cx))?;
            if let Ok(wrote) = heard.try_io(|s| writing(s.get_ref())) {
                if wrote.as_ref().is_ok_and(|n| *n < all) {
                    heard.clear_ready(); // an event reports when there is room again
                }
                return Poll::Ready(wrote);
            }
        }
    }

    /// Reads up to a mark at most. Returns `true` if the read is one byte, and urgent.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<bool>> {
        let Live { socket, shared, look } = self;
        while buf.remaining() > 0 {
            let mut heard = ready!(socket.poll_read_ready(cx))?;
            let announced = match *look {
                true => {
                    let there = there_is(socket.get_ref())?;
                    if there.is_empty() {
                        heard.clear_ready();
                        *look = *shared;
                        continue;
                    }
                    there.contains(PollFlags::POLLPRI)
                }
                // the runtime takes the end of a stream for urgent data as well, until one looks at its flags
                false if heard.ready().is_read_closed() && !is_priority(socket, cx) => false,
                // forgotten once the byte has been read
                false => socket.try_io(Interest::PRIORITY, still_urgent).is_ok(),
            };
            let urgent = announced && is_urgent(socket.get_ref())?;
            let room = if urgent { 1 } else { buf.remaining() };
            match heard.try_io(|s| receive(s, buf, room)) {
                Ok(read) => {
                    let read = read?;
                    // Either nothing is left, or the rest is urgent; then an event has arrived or is about to.
                    if (1..room).contains(&read) && !announced {
                        heard.clear_ready();
                    }
                    *look = *shared || announced || read == room;
                    return Poll::Ready(Ok(urgent && read == 1));
                }
                Err(_nothing) => *look = *shared,
            }
        }
        Poll::Ready(Ok(false))
    }

    /// Writes. With `urgent`, the mark is at the last of these bytes.
    pub fn poll_write(&self, cx: &mut Context<'_>, buf: &[u8], urgent: bool) -> Poll<io::Result<usize>> {
        self.poll_with_writable(cx, buf.len(), |s| write_now(s, buf, urgent))
    }

    pub fn poll_write_vectored(&self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let all = bufs.iter().map(|b| b.len()).sum();
        self.poll_with_writable(cx, all, |s| SockRef::from(s).send_vectored_with_flags(bufs, MSG_NOSIGNAL))
    }

    /// Sends a FIN.
    pub fn shut(&self) -> io::Result<()> {
        match self.sock().shutdown(Shutdown::Write) {
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(()), // reset meanwhile: a read reports it
            r => r,
        }
    }
}

/// A connection that is being opened. Dropping it makes the socket send a reset when it is closed: nobody has the connection, and
/// a FIN would tell the server that all is well.
struct Opening<'a>(&'a Live);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let _ = self.0.sock().set_linger(Some(Duration::ZERO)); // a connection that has failed needs no reset
    }
}

/// Returns whether an event has announced urgent data. For a socket whose stream ends, as far as the runtime knows.
fn is_priority(socket: &AsyncFd<OwnedFd>, cx: &mut Context<'_>) -> bool {
    let heard = pin!(socket.ready(Interest::PRIORITY)).poll(cx);
    matches!(heard, Poll::Ready(Ok(heard)) if heard.ready().is_priority())
}

/// Reads what is there, like [`Live::poll_read`], from a socket that is not registered.
pub(crate) fn read_now(socket: &OwnedFd, buf: &mut ReadBuf<'_>) -> io::Result<bool> {
    let there = there_is(socket)?;
    if there.is_empty() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let urgent = there.contains(PollFlags::POLLPRI) && is_urgent(socket)?;
    let room = if urgent { 1 } else { buf.remaining() };
    Ok(receive(socket, buf, room)? == 1 && urgent)
}

/// Writes what there is room for. With `urgent`, the mark is at the last of these bytes.
pub(crate) fn write_now(socket: &OwnedFd, buf: &[u8], urgent: bool) -> io::Result<usize> {
    SockRef::from(socket).send_with_flags(buf, MSG_NOSIGNAL | if urgent { MSG_OOB } else { 0 })
}

fn there_is(socket: &OwnedFd) -> io::Result<PollFlags> {
    let mut fd = [PollFd::new(socket.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI)];
    poll(&mut fd, PollTimeout::ZERO)?;
    Ok(fd[0].revents().unwrap_or(PollFlags::empty()))
}

fn still_urgent(socket: &OwnedFd) -> io::Result<()> {
    if there_is(socket)?.contains(PollFlags::POLLPRI) { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};
    use std::{
        io::Read,
        net::{Ipv4Addr, TcpListener},
        task::Waker,
    };

    /// The server has accepted the connection, and whoever asked for it has not heard of it.
    #[tokio::test]
    async fn a_connection_that_nobody_takes_is_reset() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen");
        let server = listener.local_addr().expect("an address");
        let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).expect("a socket");
        let mut connecting = Box::pin(Live::connect(socket, server));
        assert!(connecting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let (mut accepted, _) = listener.accept().expect("accept");
        drop(connecting);
        accepted.set_read_timeout(Some(Duration::from_secs(10))).expect("an option");
        assert_eq!(accepted.read(&mut [0]).expect_err("no end").kind(), io::ErrorKind::ConnectionReset);
    }
}
