//! The first bytes of a connection on which there are conditions: copied in both directions until these are decided.

use super::Ready;
use crate::{
    access::{Denied, Unfit},
    fault::{Fault, Step},
    first_bytes::{Conditions, FirstBytes, Judge},
};
use longsplice_engine::{Leftovers, Leg};
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, timeout_at},
};

/// Bytes per read.
const READ: usize = 8 * 1024;

/// One direction.
struct Way<'a> {
    judge: Judge<'a>,
    /// Bytes that were read; those from `at` on are not passed on yet.
    bytes: Vec<u8>,
    at: usize,
    ended: bool,
    shut: bool,
    passed: u64,
}

/// Why a direction came to its end.
enum Broken {
    From(io::Error),
    To(io::Error),
    Unfit(Unfit),
}

impl<'a> Way<'a> {
    fn new(conditions: Option<&'a Conditions>, read: &[u8]) -> Result<Way<'a>, Unfit> {
        let mut judge = Judge::new(conditions);
        if !read.is_empty() {
            judge.read(Some(read))?;
        }
        Ok(Way { judge, bytes: read.to_vec(), at: 0, ended: false, shut: false, passed: 0 })
    }

    /// Copies until the stream has ended. Counts progress in `moved`.
    fn poll<S: AsyncRead + Unpin, D: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut S, &mut D),
        (other_is_done, moved): (bool, &mut Instant),
    ) -> Poll<Result<(), Broken>> {
        loop {
            if other_is_done && self.judge.is_done() && !self.ended {
                return Poll::Pending; // the relay has the rest
            }
            while !self.judge.holds() && self.at < self.bytes.len() {
                let n = ready!(Pin::new(&mut *to).poll_write(cx, &self.bytes[self.at..])).map_err(Broken::To)?;
                self.at += n;
                self.passed += n as u64;
                *moved = Instant::now();
            }
            if !self.judge.holds() {
                (self.at, self.bytes) = (0, Vec::new());
            }
            if self.ended {
                if !self.shut {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx)).map_err(Broken::To)?;
                    self.shut = true;
                }
                return Poll::Ready(Ok(()));
            }
            let room = if self.judge.holds() { self.judge.room().min(READ) } else { READ };
            let mut space = [0; READ];
            let mut read = ReadBuf::new(&mut space[..room]);
            ready!(Pin::new(&mut *from).poll_read(cx, &mut read)).map_err(Broken::From)?;
            let read = read.filled();
            *moved = Instant::now();
            self.ended = read.is_empty();
            self.judge.read((!self.ended).then_some(read)).map_err(Broken::Unfit)?;
            self.bytes.extend_from_slice(read);
        }
    }
}

/// Copies until the conditions are decided. An error breaks the connection off: both legs are to be reset. Returns what is left to
/// relay, and the bytes of client and server that were passed on already.
pub(crate) async fn check(
    of: &FirstBytes,
    client: &mut Leg,
    Ready { server, left, .. }: &mut Ready,
    idle: Duration,
) -> (Result<(), Fault>, [u64; 2]) {
    let (mut from_client, mut from_server) = match ways(of, left) {
        Ok(ways) => ways,
        Err(fault) => return (Err(fault), [0; 2]),
    };
    let began = Instant::now();
    let mut moved = began;
    let result = loop {
        let wait = [&from_client, &from_server].into_iter().filter_map(|way| way.judge.wait()).min();
        let limit = wait.map_or(moved + idle, |wait| began + wait);
        let step = poll_fn(|cx| {
            let up = from_client.poll(cx, (&mut *client, &mut *server), (from_server.judge.is_done(), &mut moved));
            if let Poll::Ready(Err(why)) = up {
                return Poll::Ready(Err((true, why)));
            }
            let down = from_server.poll(cx, (&mut *server, &mut *client), (from_client.judge.is_done(), &mut moved));
            if let Poll::Ready(Err(why)) = down {
                return Poll::Ready(Err((false, why)));
            }
            let done = from_client.judge.is_done() && from_server.judge.is_done();
            if done || up.is_ready() && down.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
        });
        match timeout_at(limit, step).await {
            Ok(Ok(())) => break Ok(()),
            Ok(Err((of_client, Broken::Unfit(why)))) => break Err(unfit(of_client, why)),
            Ok(Err((true, Broken::From(e)) | (false, Broken::To(e)))) => break Err(Fault::BadRequest(e.to_string())),
            Ok(Err((_, Broken::From(e) | Broken::To(e)))) => break Err(Fault::Unreachable(e)),
            Err(_) if wait.is_some() => {
                let late = |way: &Way<'_>| way.judge.wait().is_some_and(|wait| began.elapsed() >= wait);
                match [late(&from_client), late(&from_server)] {
                    [false, false] => {} // it was decided meanwhile
                    [of_client, _] => break Err(unfit(of_client, Unfit::Late)),
                }
            }
            Err(_) if moved.elapsed() < idle => {}
            Err(_) => break Err(Fault::Timeout(Step::FirstBytes)),
        }
    };
    let passed = [from_client.passed, from_server.passed];
    let rest = |way: Way<'_>| way.bytes[way.at..].to_vec();
    *left = Leftovers::new(rest(from_client), rest(from_server));
    (result, passed)
}

fn ways<'a>(of: &'a FirstBytes, left: &Leftovers) -> Result<(Way<'a>, Way<'a>), Fault> {
    let client = Way::new(of.client.as_ref(), &left.to_server).map_err(|why| unfit(true, why))?;
    let server = Way::new(of.server.as_ref(), &left.to_client).map_err(|why| unfit(false, why))?;
    Ok((client, server))
}

fn unfit(of_client: bool, why: Unfit) -> Fault {
    Fault::Denied(Denied::FirstBytes(if of_client { "client" } else { "server" }, why))
}
