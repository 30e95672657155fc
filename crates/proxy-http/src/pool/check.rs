//! Active checks: periodic requests to each server.

use super::{Member, Upkeep};
use crate::stream::Stream;
use longsplice_http::{Kind, Response, Scan};
use longsplice_proxy::config::pool::Check;
use std::sync::Weak;
use tokio::time::{sleep, timeout};

/// Checks a server until the proxy stops, or nobody uses it any more.
pub(super) async fn watch(member: Weak<Member>, check: Check, upkeep: Upkeep) {
    let mut stop = upkeep.stop.clone();
    let checks = async {
        while let Some(member) = member.upgrade() {
            let late = || Err(format!("the check took longer than {:?}", check.timeout));
            let result = timeout(check.timeout, ask(&member, &check, &upkeep)).await.unwrap_or_else(|_| late());
            member.checked(&upkeep.counters, result);
            drop(member);
            sleep(check.interval).await;
        }
    };
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {}
        () = checks => {}
    }
}

/// Runs one check over a new connection, which is opened like those for requests.
async fn ask(member: &Member, check: &Check, upkeep: &Upkeep) -> Result<(), String> {
    let addresses = upkeep.resolver.resolve(&member.target, check.timeout).await.map_err(|e| e.to_string())?;
    let mut failed = String::new();
    for address in addresses {
        match upkeep.splicer.connect_alone(address).await {
            Ok(leg) => {
                let mut stream = Stream::new(leg);
                let status = status(&mut stream, member, check).await;
                stream.close(&upkeep.splicer);
                return match status? {
                    good if check.status.contains(&good) => Ok(()),
                    bad => Err(format!("status {bad}")),
                };
            }
            Err(e) => failed = e.to_string(),
        }
    }
    Err(failed)
}

async fn status(stream: &mut Stream, member: &Member, check: &Check) -> Result<u16, String> {
    let host = check.host.clone().unwrap_or_else(|| member.target.to_string());
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: longsplice\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        check.path
    );
    stream.write_all(request.as_bytes()).await.map_err(|e| e.to_string())?;
    let mut scan = Scan::lenient(Kind::Response);
    loop {
        if let Some(end) = scan.feed(stream.in_hand()).map_err(|e| e.to_string())? {
            let reply = Response::lenient(&stream.in_hand()[..end], "GET").map_err(|e| e.to_string())?;
            if !reply.is_interim() {
                return Ok(reply.status);
            }
            stream.consume(end);
            scan = Scan::lenient(Kind::Response);
        } else if stream.fill().await.map_err(|e| e.to_string())? == 0 {
            return Err("it closed before it had replied".into());
        }
    }
}
