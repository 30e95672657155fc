//! Active checks: periodic connections to each server, which may be asked something.

use super::{Member, Pool, Upkeep, hello};
use crate::{
    config::pool::{Ask, Check, Get},
    pattern::{Known, Pattern},
};
use longsplice_engine::Leg;
use longsplice_http::{Kind, Response, Scan};
use std::{
    hash::{BuildHasher, RandomState},
    sync::Weak,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{sleep, timeout},
};

/// Most bytes of an answer in which something is looked for.
const ANSWER: usize = 64 * 1024;

/// Checks a server until the proxy stops, or nobody uses its pool any more.
pub(super) async fn watch(pool: Weak<Pool>, index: usize, check: Check, upkeep: Upkeep) {
    let mut stop = upkeep.stop.clone();
    let checks = async {
        while let Some(pool) = pool.upgrade() {
            let member = pool.members[index].clone();
            drop(pool);
            if member.is_maintained() {
                sleep(pause(check.interval)).await;
                continue;
            }
            let late = || Err(format!("the check took longer than {:?}", check.timeout));
            let result = timeout(check.timeout, ask(&member, &check, &upkeep)).await.unwrap_or_else(|_| late());
            // the one that ran when its maintenance began tells nothing
            if !member.is_maintained() {
                member.checked(&upkeep.counters, result);
            }
            sleep(pause(check.interval)).await;
        }
    };
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {}
        () = checks => {}
    }
}

/// Returns an interval that is up to a tenth longer or shorter: servers are not all asked at the same moment, by each proxy.
fn pause(interval: Duration) -> Duration {
    let part = RandomState::new().hash_one(()) % 201; // its keys are random
    interval.mul_f64(0.9 + part as f64 / 1000.0)
}

/// Runs one check over a new connection, which is opened like those for clients.
async fn ask(member: &Member, check: &Check, upkeep: &Upkeep) -> Result<(), String> {
    let addresses = upkeep.resolver.resolve(&member.target, check.timeout).await.map_err(|e| e.to_string())?;
    let mut failed = String::new();
    for mut address in addresses {
        check.port.into_iter().for_each(|port| address.set_port(port.get()));
        match upkeep.splicer.connect_alone(address).await {
            Ok(mut leg) => {
                let answered = match &check.ask {
                    None => Ok(()),
                    Some(Ask::Http(get)) => request(&mut leg, get.host.as_deref().unwrap_or(&member.name), get).await,
                    Some(Ask::Tls(name)) => greet(&mut leg, name.as_deref()).await,
                    Some(Ask::Bytes(send, expect)) => talk(&mut leg, send, expect).await,
                };
                upkeep.splicer.discard(leg);
                return answered;
            }
            Err(e) => failed = e.to_string(),
        }
    }
    Err(failed)
}

/// Returns the error of a server that closes too early.
fn closed<T>() -> Result<T, String> {
    Err("it closed before it had replied".into())
}

/// Waits for what a server says that has to be found there.
async fn talk(leg: &mut Leg, send: &[u8], expect: &Pattern) -> Result<(), String> {
    leg.write_all(send).await.map_err(|e| e.to_string())?;
    let (mut known, mut left) = (expect.start(), ANSWER);
    loop {
        let mut read = [0; 1024];
        let n = leg.read(&mut read).await.map_err(|e| e.to_string())?;
        known = if n == 0 { expect.end(known) } else { expect.next(known, &read[..n]) };
        left = left.saturating_sub(n);
        match known {
            Known::Yes => return Ok(()),
            Known::Open(_) if n > 0 && left > 0 => {}
            Known::Open(_) | Known::No => return Err("its answer is not what is expected".into()),
        }
    }
}

/// Asks for a ServerHello.
async fn greet(leg: &mut Leg, name: Option<&str>) -> Result<(), String> {
    leg.write_all(&hello::client_hello(name)).await.map_err(|e| e.to_string())?;
    let mut read = Vec::with_capacity(1024);
    loop {
        if leg.read_buf(&mut read).await.map_err(|e| e.to_string())? == 0 {
            return closed();
        }
        if let Some(answered) = hello::answered(&read) {
            return answered;
        }
    }
}

/// Asks with HTTP.
async fn request(leg: &mut Leg, host: &str, Get { path, status: good, .. }: &Get) -> Result<(), String> {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: longsplice\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    leg.write_all(request.as_bytes()).await.map_err(|e| e.to_string())?;
    let (mut scan, mut read) = (Scan::lenient(Kind::Response), Vec::with_capacity(4096));
    loop {
        if let Some(end) = scan.feed(&read).map_err(|e| e.to_string())? {
            let reply = Response::lenient(&read[..end], "GET").map_err(|e| e.to_string())?;
            match reply.status {
                _ if reply.is_interim() => {
                    read.drain(..end);
                    scan = Scan::lenient(Kind::Response);
                }
                status if good.contains(&status) => return Ok(()),
                bad => return Err(format!("status {bad}")),
            }
        } else if leg.read_buf(&mut read).await.map_err(|e| e.to_string())? == 0 {
            return closed();
        }
    }
}
