//! A server of a pool: answers every request with its name, and can be made to fail.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

pub struct Member {
    pub addr: SocketAddr,
    now: Arc<Now>,
}

struct Now {
    name: String,
    sick: AtomicBool,
    connections: AtomicUsize,
    /// Heads of requests, without those for /health.
    seen: Mutex<Vec<String>>,
    /// Requests for /held wait for it.
    go: Notify,
}

impl Member {
    pub async fn start(name: &str) -> Member {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let now = Arc::new(Now {
            name: name.into(),
            sick: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            seen: Mutex::default(),
            go: Notify::new(),
        });
        let theirs = now.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                theirs.connections.fetch_add(1, SeqCst);
                tokio::spawn(serve(stream, theirs.clone()));
            }
        });
        Member { addr, now }
    }

    /// What checks are told.
    pub fn set_sick(&self, sick: bool) {
        self.now.sick.store(sick, SeqCst);
    }

    pub fn connections(&self) -> usize {
        self.now.connections.load(SeqCst)
    }

    pub fn seen(&self) -> Vec<String> {
        self.now.seen.lock().unwrap().clone()
    }

    /// Lets one request for /held be answered.
    pub fn release(&self) {
        self.now.go.notify_one();
    }
}

async fn serve(mut stream: TcpStream, now: Arc<Now>) {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        let head = String::from_utf8(head).unwrap();
        let length = head.split("Content-Length: ").nth(1).and_then(|l| l.split("\r\n").next()?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut body).await.unwrap();
        let sick = now.sick.load(SeqCst);
        if !head.starts_with("GET /health ") {
            now.seen.lock().unwrap().push(head.clone());
        }
        if head.starts_with("GET /held ") {
            now.go.notified().await;
        }
        let status = if head.starts_with("GET /health ") && sick { "503 Sick" } else { "200 OK" };
        let reply = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{}", now.name.len(), now.name);
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}
