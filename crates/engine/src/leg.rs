//! A leg: our end of one connection, as a byte stream that counts what passes.

use longsplice_datapath::{Repair, Tuple};
use socket2::SockRef;
use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};

/// Our end of one connection. Reads and writes are counted, because the boundary of a splice is computed from the
/// counts: hand out no duplicate of the socket.
#[derive(Debug)]
pub struct Leg {
    /// `None` while the flow is released.
    stream: Option<TcpStream>,
    pub(crate) remote: SocketAddr,
    pub(crate) local: SocketAddr,
    /// Positions consumed from the host, a FIN that was read as end of stream counting one.
    pub(crate) consumed: u64,
    /// Positions produced towards the host, our FIN counting one.
    pub(crate) produced: u64,
    pub(crate) eof: bool,
    pub(crate) shut: bool,
}

impl Leg {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Leg> {
        stream.set_nodelay(true)?;
        let (remote, local) = (stream.peer_addr()?, stream.local_addr()?);
        Ok(Leg { stream: Some(stream), remote, local, consumed: 0, produced: 0, eof: false, shut: false })
    }

    /// Address of the host at the other end.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Our own address on this connection.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Bytes read so far, end of stream not counted.
    pub fn bytes_in(&self) -> u64 {
        self.consumed - u64::from(self.eof)
    }

    /// Bytes written so far, our FIN not counted.
    pub fn bytes_out(&self) -> u64 {
        self.produced - u64::from(self.shut)
    }

    /// Closes with a reset instead of a FIN (RFC 9293, 3.10.5: ABORT).
    pub fn reset(self) {
        self.abort();
    }

    /// The same at the next drop.
    pub(crate) fn abort(&self) {
        if let Some(s) = &self.stream {
            // A socket that is gone already cannot be reset any more: nothing is lost by ignoring that.
            let _ = Repair::Off.set(s);
            let _ = SockRef::from(s).set_linger(Some(std::time::Duration::ZERO));
        }
    }

    /// The socket, for `splice(2)`; what passes is told to [`Leg::took`] and [`Leg::gave`].
    pub(crate) fn socket(&self) -> io::Result<&TcpStream> {
        self.stream.as_ref().ok_or_else(released)
    }

    /// So many bytes were read; 0: end of stream.
    pub(crate) fn took(&mut self, n: usize) {
        self.consumed += n as u64;
        if n == 0 && !self.eof {
            self.eof = true;
            self.consumed += 1;
        }
    }

    /// So many bytes were written.
    pub(crate) fn gave(&mut self, n: usize) {
        self.produced += n as u64;
    }

    /// Closes the socket without a word to the host: its flow goes on in the kernel.
    pub fn close_silently(&mut self) {
        if let Some(s) = self.stream.take()
            && let Err(error) = Repair::On.set(&s)
        {
            // its FIN is muted by the data path anyway
            tracing::warn!(leg = ?self.tuple(), %error, "a parked socket could not be closed silently");
        }
    }

    /// A parked socket is in repair mode: if the process dies, the kernel closes it without a FIN, and nothing of it is left
    /// that would answer for the connection when the data path is gone.
    pub(crate) fn park(&self, on: bool) {
        let Some(s) = &self.stream else { return };
        if let Err(error) = if on { Repair::On } else { Repair::Off }.set(s) {
            tracing::warn!(leg = ?self.tuple(), %error, "repair mode of a parked socket");
        }
    }

    /// A new socket in place of the one that was closed.
    pub(crate) fn reopen(&mut self, socket: OwnedFd) -> io::Result<()> {
        let s = TcpStream::from_std(std::net::TcpStream::from(socket))?;
        s.set_nodelay(true)?;
        self.stream = Some(s);
        Ok(())
    }

    /// The connection as the data path knows it.
    pub(crate) fn tuple(&self) -> Tuple {
        Tuple { remote: self.remote, local: self.local }
    }
}

fn open(stream: &mut Option<TcpStream>) -> io::Result<&mut TcpStream> {
    stream.as_mut().ok_or_else(released)
}

fn released() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the flow is released")
}

impl AsyncRead for Leg {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let r = Pin::new(open(&mut self.stream)?).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = r {
            let n = buf.filled().len() - before;
            if n > 0 || room {
                self.took(n);
            }
        }
        r
    }
}

impl AsyncWrite for Leg {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let r = Pin::new(open(&mut self.stream)?).poll_write(cx, buf);
        if let Poll::Ready(Ok(n)) = r {
            self.gave(n);
        }
        r
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(open(&mut self.stream)?).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let r = Pin::new(open(&mut self.stream)?).poll_shutdown(cx);
        if let Poll::Ready(Ok(())) = r
            && !self.shut
        {
            self.shut = true;
            self.produced += 1;
        }
        r
    }
}

/// A listening socket whose connections are tracked from their SYN on.
#[derive(Debug)]
pub struct Listener {
    pub(crate) listener: TcpListener,
}

impl Listener {
    /// The next connection. Errors are those of accept(2); the caller waits a little on `EMFILE` and goes on.
    pub async fn accept(&self) -> io::Result<Leg> {
        Leg::new(self.listener.accept().await?.0)
    }

    /// The address listened on, with the port the kernel chose if 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
