//! The address at which metrics are served, by HTTP/1.1. It is off by default, and only answers clients that the configuration
//! names. Nothing can be changed there.

use crate::metrics;
use longsplice_engine::Splicer;
use longsplice_proxy::{AdminConfig, Server};
use std::{
    io,
    net::TcpListener as StdListener,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};

/// Longest head of a request in bytes. Those of Prometheus have some 300.
const HEAD: usize = 8192;
/// Most fields of a head.
const FIELDS: usize = 64;
/// Most clients at a time. Others wait to be accepted.
const CLIENTS: usize = 16;
/// Between two requests of a client: longer than the usual interval of Prometheus.
const SILENCE: Duration = Duration::from_secs(120);
/// Longest time for a request to arrive, and for its reply to be read.
const SLOWNESS: Duration = Duration::from_secs(10);

/// Serves metrics.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    config: AdminConfig,
}

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics {
        head_only: bool,
    },
    /// Status and reason.
    Wrong(&'static str),
}

/// A whole head of a request.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    asked: Asked,
    /// Bytes of the head.
    length: usize,
    keeps_open: bool,
}

impl Admin {
    /// Listens.
    pub async fn bind(config: &AdminConfig) -> io::Result<Admin> {
        Ok(Admin { listener: TcpListener::bind(config.listen).await?, config: config.clone() })
    }

    /// Listens at a socket of an earlier process.
    pub fn at(config: &AdminConfig, socket: StdListener) -> io::Result<Admin> {
        Ok(Admin { listener: TcpListener::from_std(socket)?, config: config.clone() })
    }

    /// Returns another descriptor of the socket.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Answers requests until dropped.
    pub async fn serve(&self, splicer: &Splicer, server: &Arc<Server>) {
        let slots = Arc::new(Semaphore::new(CLIENTS));
        let mut clients = JoinSet::new();
        loop {
            let slot = slots.clone().acquire_owned().await.expect("it is never closed");
            while clients.try_join_next().is_some() {}
            let (stream, client) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a client that asks for metrics");
                    sleep(Duration::from_secs(1)).await; // out of descriptors: it waits
                    continue;
                }
            };
            // A stranger gets no answer: one who says nothing must not take a place for a while.
            if !self.config.allows(client.ip()) {
                tracing::debug!(%client, "a client that `allow` in [admin] does not name is disconnected");
                continue;
            }
            let (splicer, server) = (splicer.clone(), server.clone());
            clients.spawn(async move {
                // Errors are ignored: the client has gone, or was disconnected.
                let _ = attend(stream, &splicer, &server).await;
                drop(slot);
            });
        }
    }
}

async fn attend(mut stream: TcpStream, splicer: &Splicer, server: &Arc<Server>) -> io::Result<()> {
    let mut read = Vec::new();
    while let Some(request) = next(&mut stream, &mut read).await? {
        read.drain(..request.length);
        let (status, text, head_only) = match request.asked {
            Asked::Wrong(status) => (status, "see /metrics\n".to_owned(), false),
            Asked::Metrics { head_only } => {
                let (splicer, server) = (splicer.clone(), server.clone());
                match spawn_blocking(move || metrics::of(&splicer, &server)).await? {
                    Ok(text) => ("200 OK", text, head_only),
                    Err(error) => ("500 Internal Server Error", format!("{error}\n"), head_only),
                }
            }
        };
        let media = if status == "200 OK" { metrics::MEDIA_TYPE } else { "text/plain; charset=utf-8" };
        let more = if request.keeps_open { "" } else { "Connection: close\r\n" };
        let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        let length = text.len();
        let mut reply =
            format!("HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {length}\r\n{allow}{more}\r\n");
        if !head_only {
            reply.push_str(&text);
        }
        timeout(SLOWNESS, stream.write_all(reply.as_bytes())).await??;
        if !request.keeps_open {
            break;
        }
    }
    Ok(())
}

/// Returns the next request, or `None` if the client sends none.
async fn next(stream: &mut TcpStream, read: &mut Vec<u8>) -> io::Result<Option<Request>> {
    let mut limit = SILENCE;
    loop {
        if let Some(request) = parse(read) {
            return Ok(Some(request));
        }
        if timeout(limit, stream.read_buf(read)).await?? == 0 {
            return Ok(None);
        }
        limit = SLOWNESS;
    }
}

/// Reads a request. `None`: it has not arrived whole.
fn parse(read: &[u8]) -> Option<Request> {
    let wrong = |status| Some(Request { asked: Asked::Wrong(status), length: read.len(), keeps_open: false });
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let length = match head.parse(read) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if read.len() <= HEAD => return None,
        Ok(httparse::Status::Partial) => return wrong("431 Request Header Fields Too Large"),
        Err(_) => return wrong("400 Bad Request"),
    };
    let has = |name: &str, of: fn(&str) -> bool| {
        let mut values = head.headers.iter().filter(|f| f.name.eq_ignore_ascii_case(name));
        values.any(|f| str::from_utf8(f.value).is_ok_and(of))
    };
    // What follows would not be a request.
    if has("Transfer-Encoding", |_| true) || has("Content-Length", |n| n != "0") {
        return wrong("413 Content Too Large");
    }
    let keeps_open = head.version == Some(1) && !has("Connection", |value| value.eq_ignore_ascii_case("close"));
    let path = head.path.unwrap_or_default().split('?').next().unwrap_or_default();
    let asked = match (head.method.unwrap_or_default(), path) {
        (method @ ("GET" | "HEAD"), "/metrics") => Asked::Metrics { head_only: method == "HEAD" },
        ("GET" | "HEAD", _) => Asked::Wrong("404 Not Found"),
        _ => Asked::Wrong("405 Method Not Allowed"),
    };
    Some(Request { asked, length, keeps_open })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Option<(Asked, bool)> {
        parse(text.as_bytes()).map(|request| (request.asked, request.keeps_open))
    }

    #[test]
    fn requests() {
        let metrics = |head_only| Asked::Metrics { head_only };
        assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost: x\r\n"), None);
        assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Some((metrics(false), true)));
        assert_eq!(asked("GET /metrics?x=1 HTTP/1.1\r\nConnection: Close\r\n\r\n"), Some((metrics(false), false)));
        assert_eq!(asked("HEAD /metrics HTTP/1.0\r\n\r\n"), Some((metrics(true), false)));
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\n\r\nGET ").map(|r| r.length), Some(25));
    }

    #[test]
    fn what_is_not_served() {
        for (text, want) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "405"),
            ("GET /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\n", "413"),
            ("GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "413"),
            ("\u{1}\r\n\r\n", "400"),
            (&format!("GET /{} HTTP/1.1\r\n", "x".repeat(HEAD)), "431"),
            (&format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(FIELDS + 1)), "400"),
        ] {
            let Some((Asked::Wrong(status), _)) = asked(text) else { panic!("{text:?}") };
            assert!(status.starts_with(want), "{text:?}: {status}");
        }
    }
}
