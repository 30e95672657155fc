//! Active checks: periodic connections to each server, with a request if it speaks HTTP.

use super::{Member, Pool, Upkeep};
use crate::config::pool::{Ask, Check};
use longsplice_engine::Leg;
use longsplice_http::{Kind, Response, Scan};
use std::{ops::RangeInclusive, sync::Weak};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{sleep, timeout},
};

/// Checks a server until the proxy stops, or nobody uses its pool any more.
pub(super) async fn watch(pool: Weak<Pool>, index: usize, check: Check, upkeep: Upkeep) {
    let mut stop = upkeep.stop.clone();
    let checks = async {
        while let Some(pool) = pool.upgrade() {
            let member = pool.members[index].clone();
            drop(pool);
            let late = || Err(format!("the check took longer than {:?}", check.timeout));
            let result = timeout(check.timeout, ask(&member, &check, &upkeep)).await.unwrap_or_else(|_| late());
            member.checked(&upkeep.counters, result);
            sleep(check.interval).await;
        }
    };
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {}
        () = checks => {}
    }
}

/// Runs one check over a new connection, which is opened like those for clients.
async fn ask(member: &Member, check: &Check, upkeep: &Upkeep) -> Result<(), String> {
    let addresses = upkeep.resolver.resolve(&member.target, check.timeout).await.map_err(|e| e.to_string())?;
    let mut failed = String::new();
    for address in addresses {
        match upkeep.splicer.connect_alone(address).await {
            Ok(mut leg) => {
                let answered = match &check.ask {
                    None => Ok(()),
                    Some(Ask { path, host, status }) => {
                        let host = host.as_deref().unwrap_or(&member.name);
                        get(&mut leg, (path, host), status).await
                    }
                };
                upkeep.splicer.discard(leg);
                return answered;
            }
            Err(e) => failed = e.to_string(),
        }
    }
    Err(failed)
}

/// Asks with HTTP.
async fn get(leg: &mut Leg, (path, host): (&str, &str), good: &RangeInclusive<u16>) -> Result<(), String> {
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
            return Err("it closed before it had replied".into());
        }
    }
}
