use super::*;
use crate::config::pool::{Check, Key as HashKey};

const KEY: Key = Key { hash: 0, named: None };

fn config(servers: &[u16]) -> PoolConfig {
    let server = |n: &u16| ServerConfig { target: format!("192.0.2.1:{n}").parse().unwrap(), weight: 1 };
    PoolConfig::new("p".into(), servers.iter().map(server).collect())
}

fn pool(balance: Balance) -> Pool {
    Pool::new(PoolConfig { balance, ..config(&[1, 2, 3]) }, None)
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
    let pool = Pool::new(PoolConfig { check, ..config(&[1, 2, 3]) }, None);
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
    let server = |n: u16| ServerConfig { target: format!("192.0.2.1:{n}").parse().unwrap(), weight: 2 };
    let slow_start = Duration::from_secs(10);
    let config = PoolConfig { slow_start, ..PoolConfig::new("p".into(), vec![server(1), server(2)]) };
    let pool = Pool::new(config, None);
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
    let before = open(&[config(&[1, 2, 3])], &Pools::default());
    let old = &before["p"];
    let leases = [0; 3].map(|_| old.pick(KEY, &[]).unwrap());
    fail(old, 0);
    // the first one is gone, and there is a new one
    let other = PoolConfig { balance: Balance::LeastConnections, ..config(&[4, 3, 1]) };
    let after = open(std::slice::from_ref(&other), &before);
    let new = &after["p"];
    assert!(!Arc::ptr_eq(old, new));
    let active = |pool: &Pool| pool.members.iter().map(|m| m.state.active.load(Relaxed)).collect::<Vec<_>>();
    assert_eq!(active(new), [0, 1, 1]);
    assert_eq!([0; 3].map(|_| picked(new, &[])), [Some(0); 3]);
    assert_eq!(picked(new, &[0, 1]), Some(2), "only if there is no other");
    assert_eq!(picked(new, &[0]), Some(1));
    drop(leases);
    assert_eq!(active(new), [0, 0, 0], "connections from before end");
    assert!(Arc::ptr_eq(new, &open(&[other], &after)["p"]), "the same one goes on");
}

#[test]
fn without_checks_none_keeps_a_server_down() {
    let check = Some(Check::default());
    let before = open(&[PoolConfig { check, ..config(&[1]) }], &Pools::default());
    fail_checks(&before["p"], 0);
    assert_eq!(picked(&before["p"], &[]), None);
    let after = open(&[config(&[1])], &before);
    assert_eq!(picked(&after["p"], &[]), Some(0));
}
