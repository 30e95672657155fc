//! A server with one listener on the loopback device, and its access log. The tests of proxy-http use it, too.

use longsplice_engine::{Refusal, Splicer};
use longsplice_proxy::{Config, Server};
use serde_json::Value;
use std::{net::SocketAddr, time::Duration};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

pub const LIMIT: Duration = Duration::from_secs(10);
pub const OPEN: &str = "rules = [{ action = \"allow\", target = \"127.0.0.0/8\" }]\n";

pub struct Proxy {
    pub server: Server,
    pub dir: TempDir,
}

impl Proxy {
    /// A server with one listener, `more` being the rest of its table.
    pub async fn start(protocol: &str, more: &str) -> Proxy {
        Proxy::start_at("127.0.0.1", protocol, more).await
    }

    /// The same on another address.
    pub async fn start_at(address: &str, protocol: &str, more: &str) -> Proxy {
        Proxy::start_with(Splicer::copying(Refusal::Unprivileged), address, protocol, more).await
    }

    /// The same with an engine of the caller's.
    pub async fn start_with(splicer: Splicer, address: &str, protocol: &str, more: &str) -> Proxy {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "log = {{ format = \"json\", file = \"log\" }}\n\
             [[listener]]\nprotocol = \"{protocol}\"\nlisten = \"{address}:0\"\n{more}"
        );
        let config = Config::from_toml(&text, &dir.path().join("longsplice.toml")).unwrap();
        let server = Server::start(splicer, config, crate::SERVICES).await.unwrap();
        Proxy { server, dir }
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.listen_addrs()[0]).await.unwrap()
    }

    /// What a client that sends `input` and listens to the end is answered.
    pub async fn answer(&self, input: &[u8]) -> Vec<u8> {
        let mut client = self.connect().await;
        client.write_all(input).await.unwrap();
        let mut seen = Vec::new();
        timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
        seen
    }

    /// Waits until all connections have ended, and returns the only line of the log.
    pub async fn line(&self) -> Value {
        let mut lines = self.lines().await;
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }

    pub async fn lines(&self) -> Vec<Value> {
        assert_eq!(self.server.drain(LIMIT).await, 0);
        let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }
}

/// An address that refuses connections. It is held for as long as the process lives, or another test might be given it.
pub async fn closed() -> SocketAddr {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = socket.local_addr().unwrap();
    std::mem::forget(socket);
    at
}
