//! Lines of the access log for connections that go on.
//!
//! They come from the list of flows, as `longsplice ls` does. So nothing is kept for a connection, and it does not matter which
//! process it began in, or whether it is copied or spliced: what has passed is read when its line is written. The list is gone
//! through once per interval, a little at a time, so that a hundred thousand connections are never told of at once.

use crate::{
    config::Protocol,
    context::ServerContext,
    log::access_log::{Event, Record},
};
use longsplice_engine::FlowStatus;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

/// Pause between two parts of the list.
const PAUSE: Duration = Duration::from_millis(100);
/// Most flows of a part: 5000 a second. Each costs some microseconds, of which most are questions to the kernel.
const MOST: usize = 500;

/// Writes the lines of all flows, at each interval. Idle while there is none.
pub(super) async fn tell(shared: Arc<ServerContext>) {
    let (mut intervals, mut number) = (shared.log.interval(), 0);
    loop {
        let every = *intervals.borrow_and_update();
        let told = async {
            match every {
                Some(every) => number = tell_all(&shared, every, number).await,
                None => std::future::pending().await,
            }
        };
        if !unless_changed(told, &mut intervals).await {
            return;
        }
    }
}

/// Waits, for less if the interval changes. Returns false if nothing will change any more.
async fn unless_changed(told: impl Future<Output = ()>, interval: &mut watch::Receiver<Option<Duration>>) -> bool {
    tokio::select! {
        () = told => true,
        changed = interval.changed() => changed.is_ok(),
    }
}

/// Goes through the list once, within the interval. `number`: how many flows there were last time. Returns how many there are.
async fn tell_all(shared: &ServerContext, every: Duration, number: usize) -> usize {
    let begun = Instant::now();
    let expected = number.max(*shared.live.borrow() as usize);
    let part = part(expected, every);
    let (mut last, mut seen) = (0, 0);
    loop {
        // lines of ends come first
        while shared.log.is_busy() {
            sleep(PAUSE).await;
        }
        let page = shared.splicer.flows_after(last, part, None);
        let Some(end) = page.last() else { break };
        (last, seen) = (end.id, seen + page.len());
        let is_old = |flow: &&FlowStatus| u128::from(flow.age_ms) >= every.as_millis();
        page.iter().filter(is_old).for_each(|flow| shared.log.write(record(flow)));
        sleep(PAUSE).await;
    }
    sleep_until(begun + every).await;
    seen
}

/// Returns how many flows to tell of at a time, if there are so many.
fn part(expected: usize, every: Duration) -> usize {
    let parts = every.as_millis() / PAUSE.as_millis();
    expected.div_ceil(usize::try_from(parts).unwrap_or(usize::MAX).max(1)).clamp(1, MOST)
}

fn record(flow: &FlowStatus) -> Record {
    let mut record = Record::new(Protocol::name_of(&flow.protocol), flow.listen, flow.client);
    (record.event, record.how) = (Some(Event::Alive), "");
    record.id = Some(flow.id);
    record.name = flow.name.as_deref().map(Arc::from);
    record.server = Some(flow.server);
    record.target = Some(flow.target.clone());
    record.user.clone_from(&flow.user);
    // an address of a server has no slash
    let member = flow.member.as_deref().and_then(|label| label.rsplit_once('/'));
    (record.pool, record.member) = member.map(|(pool, name)| (pool.into(), name.into())).unzip();
    (record.bytes_up, record.bytes_down) = (flow.bytes_up, flow.bytes_down);
    (record.spliced_up, record.spliced_down, record.splices) = (flow.spliced_up, flow.spliced_down, flow.splices);
    record.refusal = flow.refusal.map(|why| why.as_str().to_owned());
    record.path = flow.path;
    record.processes = Some(flow.processes).filter(|n| *n > 1);
    record.duration_ms = flow.age_ms;
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_keep_their_names() {
        let (users, commands) = Default::default();
        let all = [
            Protocol::Socks5 { users, commands },
            Protocol::Http(Default::default()),
            Protocol::Tls(Default::default()),
            Protocol::Ftp(Default::default()),
            Protocol::Login(Default::default()),
            Protocol::Plug { target: None, handshake: Default::default() },
            Protocol::Transparent,
            Protocol::Tpot,
        ];
        assert!(all.iter().all(|protocol| Protocol::name_of(protocol.name()) == protocol.name()));
        assert_eq!(Protocol::name_of("other"), "recovered");
    }

    #[test]
    fn many_flows_are_told_of_evenly() {
        let seconds = Duration::from_secs;
        for (expected, every, at_once) in
            [(0, 60, 1), (10, 60, 1), (601, 60, 2), (100_000, 60, 167), (100_000, 1, 500), (1_000_000, 60, 500)]
        {
            assert_eq!(part(expected, seconds(every)), at_once, "{expected} flows in {every} s");
        }
        assert_eq!(part(9, Duration::from_secs(u64::MAX)), 1);
    }
}
