//! A leg: our end of one connection, as a byte stream that counts what passes.

use longsplice_datapath::Tuple;
use socket2::SockRef;
use std::{
    io,
    net::SocketAddr,
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
    pub(crate) stream: TcpStream,
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
        Ok(Leg { stream, remote, local, consumed: 0, produced: 0, eof: false, shut: false })
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
        // A socket that is gone already cannot be reset any more: nothing is lost by ignoring that.
        let _ = SockRef::from(&self.stream).set_linger(Some(std::time::Duration::ZERO));
    }

    /// The connection as the data path knows it.
    pub(crate) fn tuple(&self) -> Tuple {
        Tuple { remote: self.remote, local: self.local }
    }
}

impl AsyncRead for Leg {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let room = buf.remaining() > 0;
        let r = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = r {
            let n = (buf.filled().len() - before) as u64;
            self.consumed += n;
            if n == 0 && room && !self.eof {
                self.eof = true;
                self.consumed += 1;
            }
        }
        r
    }
}

impl AsyncWrite for Leg {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let r = Pin::new(&mut self.stream).poll_write(cx, buf);
        if let Poll::Ready(Ok(n)) = r {
            self.produced += n as u64;
        }
        r
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let r = Pin::new(&mut self.stream).poll_shutdown(cx);
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
