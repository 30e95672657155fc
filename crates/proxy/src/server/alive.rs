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
    task::yield_now,
    time::{Instant, sleep, sleep_until},
};

/// Pause between two parts of the list.
const PAUSE: Duration = Duration::from_millis(100);
/// Most flows of a part: 5000 a second. Each costs some microseconds, of which most are questions to the kernel.
const MOST: usize = 500;
/// Most flows that are told of before other tasks have their turn.
const AT_ONCE: usize = 50;

/// The flows that there are, and the log of their lines.
trait Flows {
    /// Returns how many there are, and the highest number of one.
    fn extent(&self) -> (usize, u64);
    /// Returns the records of the next ones.
    fn after(&self, last: u64, most: usize) -> Vec<Record>;
    fn lists(&self, id: u64) -> bool;
    /// Whether lines that can be left out should be.
    fn is_busy(&self) -> bool;
    fn tell(&self, record: Record);
}

impl Flows for ServerContext {
    fn extent(&self) -> (usize, u64) {
        self.splicer.extent()
    }

    fn after(&self, last: u64, most: usize) -> Vec<Record> {
        let flows = self.splicer.flows_after(last, most, None);
        let upstream = |flow: &FlowStatus| self.led.of(flow.id)?.upstream.as_deref().map(Arc::from);
        flows.iter().map(|flow| Record { upstream: upstream(flow), ..record(flow) }).collect()
    }

    fn lists(&self, id: u64) -> bool {
        self.splicer.lists(id)
    }

    fn is_busy(&self) -> bool {
        self.log.is_busy()
    }

    fn tell(&self, record: Record) {
        self.log.write(record);
    }
}

/// Writes the lines of all flows, at each interval. Idle while there is none.
pub(super) async fn tell(shared: Arc<ServerContext>) {
    let mut intervals = shared.log.interval();
    loop {
        let every = *intervals.borrow_and_update();
        let told = async {
            match every {
                Some(every) => tell_all(&*shared, every).await,
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

/// Goes through the list once, within the interval. Flows that begin meanwhile are too young, and have the highest numbers: so it is
/// known from the start where the list ends, and how much of it there is at most.
async fn tell_all(flows: &impl Flows, every: Duration) {
    let end = Instant::now() + every;
    let ((mut left, newest), mut last) = (flows.extent(), 0);
    while last < newest {
        // lines of ends come first
        while flows.is_busy() {
            sleep(PAUSE).await;
        }
        let mut part = part(left, end.saturating_duration_since(Instant::now()));
        left = left.saturating_sub(part);
        while part > 0 && last < newest {
            let page = flows.after(last, part.min(AT_ONCE));
            last = page.last().and_then(|flow| flow.id).unwrap_or(newest);
            part = part.saturating_sub(page.len());
            let old = page.into_iter().filter(|flow| u128::from(flow.duration_ms) >= every.as_millis());
            // it may have ended since, and its last line is that of the end
            old.filter(|flow| flow.id.is_some_and(|id| flows.lists(id))).for_each(|flow| flows.tell(flow));
            yield_now().await;
        }
        sleep(PAUSE).await;
    }
    sleep_until(end).await;
}

/// Returns how many flows to tell of now, if there are so many, and all within this time.
fn part(flows: usize, within: Duration) -> usize {
    let parts = within.as_millis() / PAUSE.as_millis();
    flows.div_ceil(usize::try_from(parts).unwrap_or(usize::MAX).max(1)).clamp(1, MOST)
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
    use std::{
        collections::BTreeSet,
        sync::{
            Mutex,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
    };

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
        assert_eq!((part(9, Duration::from_secs(u64::MAX)), part(9, Duration::ZERO)), (1, 9));
    }

    /// A list that changes while it is gone through.
    #[derive(Default)]
    struct Changing {
        all: Mutex<BTreeSet<u64>>,
        busy: AtomicBool,
        /// Called with the list and the last number, each time that a page is asked for.
        changes: Option<Change>,
        told: Mutex<Vec<(u64, Instant)>>,
    }

    type Change = Box<dyn Fn(&mut BTreeSet<u64>, u64)>;

    impl Flows for Changing {
        fn extent(&self) -> (usize, u64) {
            let all = self.all.lock().unwrap();
            (all.len(), all.last().copied().unwrap_or_default())
        }

        fn after(&self, last: u64, most: usize) -> Vec<Record> {
            assert!(most <= AT_ONCE);
            let mut all = self.all.lock().unwrap();
            let page = all.range(last + 1..).take(most).map(|id| flow(*id)).collect();
            self.changes.iter().for_each(|change| change(&mut all, last));
            page
        }

        fn lists(&self, id: u64) -> bool {
            self.all.lock().unwrap().contains(&id)
        }

        fn is_busy(&self) -> bool {
            self.busy.load(Relaxed)
        }

        fn tell(&self, record: Record) {
            self.told.lock().unwrap().push((record.id.unwrap(), Instant::now()));
        }
    }

    /// One of a thousand is young.
    fn flow(id: u64) -> Record {
        let (id, duration_ms) = (Some(id), if id.is_multiple_of(1000) { 59_999 } else { 60_000 });
        Record { id, duration_ms, ..Record::new("plug", None, "192.0.2.1:1000".parse().unwrap()) }
    }

    fn told(flows: &Changing) -> Vec<u64> {
        flows.told.lock().unwrap().iter().map(|(id, _)| *id).collect()
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn the_list_takes_an_interval_and_each_part_of_it_its_share() {
        let flows = Changing { all: Mutex::new((1..=100_000).collect()), ..Changing::default() };
        let begun = Instant::now();
        tell_all(&flows, MINUTE).await;
        assert_eq!(begun.elapsed(), MINUTE);
        assert_eq!(told(&flows), (1..=100_000).filter(|id| id % 1000 > 0).collect::<Vec<_>>());
        let half = flows.told.lock().unwrap().iter().filter(|(_, at)| *at - begun < MINUTE / 2).count();
        assert!((49_000..51_000).contains(&half), "{half}");
    }

    /// Those that come are of the next round, however many they are.
    #[tokio::test(start_paused = true)]
    async fn flows_that_begin_make_no_round_longer() {
        let changes: Change = Box::new(|all, _| {
            let next = all.last().unwrap() + 1;
            all.extend(next..next + 1000);
        });
        let flows = Changing { all: Mutex::new((1..=50).collect()), changes: Some(changes), ..Changing::default() };
        let begun = Instant::now();
        tell_all(&flows, MINUTE).await;
        assert_eq!((begun.elapsed(), told(&flows)), (MINUTE, (1..=50).collect()));
        // and then the round is as quick as it has to be
        let flows = Changing { changes: None, ..flows };
        let (begun, number) = (Instant::now(), flows.extent().0);
        assert!(number > 20_000);
        tell_all(&flows, MINUTE).await;
        assert_eq!(begun.elapsed(), MINUTE);
        assert_eq!(told(&flows).len(), 50 + number - number / 1000);
    }

    /// The time for which lines of ends have priority is made up for.
    #[tokio::test(start_paused = true)]
    async fn a_busy_log_is_waited_for() {
        let flows = Changing { all: Mutex::new((1..=999).collect()), ..Changing::default() };
        flows.busy.store(true, Relaxed);
        let begun = Instant::now();
        let free = async {
            sleep(MINUTE / 2).await;
            assert_eq!(told(&flows), [0_u64; 0]);
            flows.busy.store(false, Relaxed);
        };
        tokio::join!(tell_all(&flows, MINUTE), free);
        assert_eq!((begun.elapsed(), told(&flows).len()), (MINUTE, 999));
    }

    /// The last line of a flow is that of its end.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_told_of_those_that_have_ended() {
        // each time that some are asked for, every second one of them ends before it can be told of
        let changes: Change = Box::new(|all, last| all.retain(|id| *id <= last || id % 2 > 0));
        let flows = Changing { all: Mutex::new((1..=900).collect()), changes: Some(changes), ..Changing::default() };
        tell_all(&flows, MINUTE).await;
        assert_eq!(told(&flows), (1..=900).filter(|id| id % 2 > 0).collect::<Vec<_>>());
        // or all do, and then there is none to go on with
        let changes: Change = Box::new(|all, _| all.clear());
        let flows = Changing { all: Mutex::new((1..=900).collect()), changes: Some(changes), ..Changing::default() };
        tell_all(&flows, MINUTE).await;
        assert_eq!(told(&flows), [0_u64; 0]);
    }
}
