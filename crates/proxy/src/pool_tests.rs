use super::*;
use crate::{
    config::pool::{Check, Key as HashKey},
    fault::{Fault, Step},
};
use commanded::Tell;
use tokio::task::yield_now;

const KEY: Key = Key { hash: 0, named: None };

fn config(servers: &[u16]) -> PoolConfig {
    let server = |n: &u16| ServerConfig::new(format!("192.0.2.1:{n}").parse().unwrap());
    PoolConfig::new("p".into(), servers.iter().map(server).collect())
}

fn pool(balance: Balance) -> Pool {
    Pool::new(PoolConfig { balance, ..config(&[1, 2, 3]) }, None, &Arc::default())
}

fn picked(pool: &Pool, tried: &[usize]) -> Option<usize> {
    pool.pick(KEY, tried).map(|lease| lease.0.index)
}

fn fail(pool: &Pool, index: usize) {
    (0..3).for_each(|_| pool.members[index].failed(&Counters::default(), &"test"));
}

fn fail_checks(pool: &Pool, index: usize) {
    (0..3).for_each(|_| pool.members[index].checked(&Counters::default(), Err("test".into())));
}

fn succeed(pool: &Pool, index: usize) {
    pool.members[index].succeeded(&Counters::default(), &"test");
}

#[test]
fn those_that_are_up_come_first_and_those_that_checks_take_down_never() {
    let check = Some(Check::default());
    let pool = Pool::new(PoolConfig { check, ..config(&[1, 2, 3]) }, None, &Arc::default());
    fail(&pool, 0);
    assert_eq!([0; 4].map(|_| picked(&pool, &[])), [Some(1), Some(2), Some(1), Some(2)]);
    assert_eq!(picked(&pool, &[1, 2]), Some(0), "better than none");
    fail_checks(&pool, 0);
    assert_eq!((picked(&pool, &[1, 2]), picked(&pool, &[0, 1, 2])), (None, None));
    fail(&pool, 1);
    assert_eq!([0; 2].map(|_| picked(&pool, &[])), [Some(2); 2]);
}

#[test]
fn leases_count_until_they_are_dropped() {
    let pool = pool(Balance::LeastConnections);
    let first = [0; 3].map(|_| pool.pick(KEY, &[]).unwrap());
    assert_eq!(first.each_ref().map(|l| l.0.index), [0, 1, 2]);
    let [_a, b, _c] = first;
    drop(b);
    assert_eq!(picked(&pool, &[]), Some(1));
}

#[test]
fn a_server_that_is_back_starts_slowly() {
    let server = |n: u16| ServerConfig { weight: 2, ..ServerConfig::new(format!("192.0.2.1:{n}").parse().unwrap()) };
    let slow_start = Duration::from_secs(10);
    let config = PoolConfig { slow_start, ..PoolConfig::new("p".into(), vec![server(1), server(2)]) };
    let pool = Pool::new(config, None, &Arc::default());
    let [first, _] = &pool.members[..] else { panic!() };
    let now = Instant::now();
    assert_eq!(first.weight_at(now), 200, "it was never away");
    fail(&pool, 0);
    assert_eq!(first.weight_at(now), 1, "on trial");
    succeed(&pool, 0);
    let back = lock(&first.state.back).unwrap();
    let weights = [0, 1, 5, 10, 99].map(|s| first.weight_at(back + Duration::from_secs(s)));
    assert_eq!(weights, [1, 20, 100, 200, 200]);
    assert_eq!((0..10).filter(|_| picked(&pool, &[]) == Some(0)).count(), 0, "nearly nothing yet");
}

#[test]
fn a_key_moves_only_while_its_server_is_down() {
    let pool = pool(Balance::ConsistentHash(HashKey::Client));
    let home = picked(&pool, &[]).unwrap();
    assert_eq!([0; 3].map(|_| picked(&pool, &[])), [Some(home); 3]);
    fail(&pool, home);
    let away = picked(&pool, &[]).unwrap();
    assert_ne!(away, home);
    succeed(&pool, home);
    assert_eq!(picked(&pool, &[]), Some(home));
}

#[test]
fn what_is_known_of_a_server_outlives_a_reload() {
    let before = open(&[config(&[1, 2, 3])], &Pools::default(), &Arc::default());
    let old = &before["p"];
    let leases = [0; 3].map(|_| old.pick(KEY, &[]).unwrap());
    fail(old, 0);
    // the first one is gone, and there is a new one
    let other = PoolConfig { balance: Balance::LeastConnections, ..config(&[4, 3, 1]) };
    let after = open(std::slice::from_ref(&other), &before, &Arc::default());
    let new = &after["p"];
    assert!(!Arc::ptr_eq(old, new));
    let active = |pool: &Pool| pool.members.iter().map(|m| m.state.active.load(Relaxed)).collect::<Vec<_>>();
    assert_eq!(active(new), [0, 1, 1]);
    assert_eq!([0; 3].map(|_| picked(new, &[])), [Some(0); 3]);
    assert_eq!(picked(new, &[0, 1]), Some(2), "only if there is no other");
    assert_eq!(picked(new, &[0]), Some(1));
    drop(leases);
    assert_eq!(active(new), [0, 0, 0], "connections from before end");
    assert!(Arc::ptr_eq(new, &open(&[other], &after, &Arc::default())["p"]), "the same one goes on");
}

#[test]
fn without_checks_none_keeps_a_server_down() {
    let check = Some(Check::default());
    let before = open(&[PoolConfig { check, ..config(&[1]) }], &Pools::default(), &Arc::default());
    fail_checks(&before["p"], 0);
    assert_eq!(picked(&before["p"], &[]), None);
    let after = open(&[config(&[1])], &before, &Arc::default());
    assert_eq!(picked(&after["p"], &[]), Some(0));
}

#[test]
fn backups_stand_in_while_no_other_is_up() {
    let mut config = config(&[1, 2, 3]);
    config.servers[0].backup = true;
    let pool = Pool::new(config, None, &Arc::default());
    assert_eq!([0; 3].map(|_| picked(&pool, &[])), [Some(1), Some(2), Some(1)]);
    assert_eq!(picked(&pool, &[1, 2]), Some(0), "the others do not accept");
    fail(&pool, 1);
    assert_eq!([0; 2].map(|_| picked(&pool, &[])), [Some(2); 2]);
    fail(&pool, 2);
    assert_eq!([0; 2].map(|_| picked(&pool, &[])), [Some(0); 2]);
    assert!(picked(&pool, &[0]).is_some(), "better than none");
    succeed(&pool, 1);
    assert_eq!(picked(&pool, &[]), Some(1));
}

fn limited(servers: &[u16], queue: u32) -> PoolConfig {
    let mut config = PoolConfig { queue, ..config(servers) };
    config.servers.iter_mut().for_each(|server| server.max_connections = Some(1));
    config
}

async fn waiting(pool: &Pool, n: u32) {
    while pool.queue.waiting() != n {
        yield_now().await;
    }
}

#[tokio::test]
async fn who_has_waited_longest_is_next() {
    let pool = Arc::new(Pool::new(limited(&[1, 2], 2), None, &Arc::default()));
    let enter = || {
        let pool = pool.clone();
        tokio::spawn(async move { pool.enter(KEY, &[]).await.map(|lease| (lease.0.index, lease)) })
    };
    let [one, two] = [(); 2].map(|()| pool.pick(KEY, &[]).unwrap());
    assert_eq!((one.0.index, two.0.index), (0, 1));
    assert_eq!(picked(&pool, &[]), None, "both are full");
    let first = enter();
    waiting(&pool, 1).await;
    let second = enter();
    waiting(&pool, 2).await;
    assert!(matches!(enter().await.unwrap(), Err(Fault::Limit(_))), "there is room for two");
    drop(two);
    let (index, lease) = first.await.unwrap().unwrap();
    assert_eq!((index, pool.queue.waiting()), (1, 1));
    drop(one);
    // one who comes now does not overtake the other
    let third = enter();
    assert_eq!(second.await.unwrap().unwrap().0, 0);
    drop(lease);
    assert!(third.await.unwrap().is_ok());
    assert_eq!(pool.queue.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_ever_and_who_gives_up_leaves() {
    let pool = Pool::new(limited(&[1], 1), None, &Arc::default());
    let lease = pool.enter(KEY, &[]).await.unwrap();
    assert!(matches!(pool.enter(KEY, &[]).await, Err(Fault::Timeout(Step::Queue))));
    drop(tokio::time::timeout(Duration::from_millis(1), pool.enter(KEY, &[])).await);
    assert_eq!(pool.queue.waiting(), 0);
    fail(&pool, 0);
    assert!(matches!(pool.enter(KEY, &[0]).await, Err(Fault::NoServer(_))), "there is nothing to wait for");
    drop(lease);
    assert!(pool.enter(KEY, &[]).await.is_ok());
}

#[tokio::test]
async fn a_connection_from_before_a_reload_gives_its_place_to_one_that_waits() {
    let before = open(&[limited(&[1], 1)], &Pools::default(), &Arc::default());
    let lease = before["p"].pick(KEY, &[]).unwrap();
    let after = open(&[limited(&[1], 2)], &before, &Arc::default());
    let pool = after["p"].clone();
    let waiter = tokio::spawn(async move { pool.enter(KEY, &[]).await.is_ok() });
    waiting(&after["p"], 1).await;
    drop(lease);
    assert!(waiter.await.unwrap());
}

#[test]
fn operators_tell_servers_what_to_take() {
    let pools = open(&[config(&[1, 2, 3])], &Pools::default(), &Arc::default());
    let tell = |pools: &Pools, member: &str, what| commanded::tell(pools, member, what);
    let state = |pools: &Pools, index: usize| {
        let member = &commanded::values(pools)[0].members[index];
        (member.state, member.weight, member.connections, member.chosen)
    };
    let lease = pools["p"].pick(KEY, &[]).unwrap();
    assert_eq!(tell(&pools, "p/192.0.2.1:1", Tell::Drain), Some(1));
    assert_eq!([0; 4].map(|_| picked(&pools["p"], &[])), [Some(1), Some(2), Some(1), Some(2)]);
    assert_eq!(picked(&pools["p"], &[1, 2]), None, "not even if there is no other");
    let named = Key { named: Some(0), ..KEY };
    assert_ne!(pools["p"].pick(named, &[]).unwrap().0.index, 0, "and for nobody who has been there");
    assert_eq!(state(&pools, 0), ("drained", 1, 1, 1), "what it has goes on");
    assert_eq!(tell(&pools, "192.0.2.1:2", Tell::Weigh(Some(3))), Some(1));
    for unknown in ["q/192.0.2.1:1", "p/192.0.2.1:9", "192.0.2.1", "p", ""] {
        assert_eq!(tell(&pools, unknown, Tell::Drain), None, "{unknown}");
    }
    // a reload changes nothing of it, but a new weight in the configuration counts
    let after = open(&[PoolConfig { tries: 1, ..config(&[1, 2, 3]) }], &pools, &Arc::default());
    assert_eq!((state(&after, 0).0, state(&after, 1).1), ("drained", 3));
    let three: Vec<_> = (0..8).map(|_| picked(&after["p"], &[]).unwrap()).collect();
    assert_eq!(three.iter().filter(|index| **index == 1).count(), 6);
    let mut other = config(&[1, 2, 3]);
    other.servers[1].weight = 2;
    assert_eq!(state(&open(&[other], &after, &Arc::default()), 1).1, 2);
    tell(&after, "p/192.0.2.1:2", Tell::Weigh(None));
    tell(&after, "p/192.0.2.1:1", Tell::Undrain);
    drop(lease);
    assert_eq!((state(&after, 0), state(&after, 1).1), (("up", 1, 0, 1), 1));
    assert!([0; 3].map(|_| picked(&after["p"], &[])).contains(&Some(0)));
}
