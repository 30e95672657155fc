//! A server that says exactly what a test wants.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// A server that reads a request up to this, then writes that, on each connection one after the other; then it closes.
pub type Turn = (&'static str, &'static str);

pub struct Origin {
    pub addr: SocketAddr,
    /// What each connection has received.
    seen: Arc<Mutex<Vec<String>>>,
}

impl Origin {
    /// One list of turns for each connection, in their order.
    pub async fn start(connections: Vec<Vec<Turn>>) -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let theirs = seen.clone();
        tokio::spawn(async move {
            for (i, turns) in connections.into_iter().enumerate() {
                let (mut stream, _) = listener.accept().await.unwrap();
                theirs.lock().unwrap().push(String::new());
                let seen = theirs.clone();
                tokio::spawn(async move {
                    for (until, reply) in turns {
                        let mut got = Vec::new();
                        while !String::from_utf8_lossy(&got).ends_with(until) {
                            match stream.read_u8().await {
                                Ok(b) => got.push(b),
                                Err(_) => return,
                            }
                        }
                        seen.lock().unwrap()[i] += &String::from_utf8(got).unwrap();
                        stream.write_all(reply.as_bytes()).await.unwrap();
                    }
                });
            }
        });
        Origin { addr, seen }
    }

    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }
}

/// Without what we add to replies that have no `Date`.
pub fn undated(replies: &str) -> String {
    replies.split_inclusive("\r\n").filter(|line| !line.starts_with("Date: ")).collect()
}
