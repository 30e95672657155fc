//! Connects to a server of a pool: to the next one if a connection fails. Nothing of what the client has sent is lost by that: no
//! server gets a byte of it before it is connected.

use super::{connect_server, connect_under};
use crate::{
    access::{Rules, Subject},
    config::ListenerConfig,
    context::ServerContext,
    counters::Counters,
    fault::Fault,
    log::access_log::{Record, ms_since},
    pool::{Key, Lease, Pool},
};
use longsplice_engine::Leg;
use std::time::Instant;

/// Connects to a server of the pool of this name that these rules allow. `None`: that was decided before.
pub(crate) async fn connect(
    shared: &ServerContext,
    (rules, listener): (Option<&Rules>, &ListenerConfig),
    client: &Leg,
    subject: &Subject<'_>,
    name: &str,
    record: &mut Record,
) -> Result<(Leg, Lease), Fault> {
    // a reload may have removed the pool with the listener, whose last clients are still served
    let pool = shared.opened().pools.get(name).cloned().ok_or_else(|| Fault::NoServer(name.into()))?;
    record.pool = Some(name.into());
    let began = Instant::now();
    let found = first_that_accepts(shared, (rules, listener), client, subject, &pool, record).await;
    record.connect_ms = Some(ms_since(began)); // with the time for a place, and for those before
    found
}

async fn first_that_accepts(
    shared: &ServerContext,
    (rules, listener): (Option<&Rules>, &ListenerConfig),
    client: &Leg,
    subject: &Subject<'_>,
    pool: &Pool,
    record: &mut Record,
) -> Result<(Leg, Lease), Fault> {
    let (key, mut failed, mut why) = (Key::of(subject.client), Vec::new(), None);
    while failed.len() < pool.config.tries as usize {
        let lease = match pool.enter(key, &failed).await {
            Ok(lease) => lease,
            Err(fault) => return Err(why.unwrap_or(fault)),
        };
        if !failed.is_empty() {
            Counters::add(&shared.counters.retries);
        }
        lease.note(record);
        let to = &lease.0.target;
        let connected = match rules {
            Some(rules) => {
                // boxed: it may lead here
                let connecting = connect_under(rules, shared, listener, client, subject, (to, None), record);
                Box::pin(connecting).await.map(|reached| reached.leg)
            }
            None => connect_server(shared, listener, client, to).await,
        };
        match connected {
            Ok(server) => {
                lease.0.succeeded(&shared.counters, &"it has accepted a connection");
                record.server = Some(server.remote());
                return Ok((server, lease));
            }
            Err(fault @ Fault::Denied(_)) => return Err(fault),
            Err(fault) => {
                lease.0.failed(&shared.counters, &fault);
                failed.push(lease.0.index);
                why = Some(fault);
            }
        }
    }
    Err(why.unwrap_or_else(|| Fault::NoServer(pool.config.name.clone())))
}
