//! A switch on one processor and a packet on another: each side sees the other's effects, whichever comes first.

use super::{Bench, Flow, LegFlags, TestContext, V4, bench, sockets, testing};
use longsplice_datapath::{CommitOptions, Pair, PathFlags, abi};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    hint,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Enough that some collide: a few of a hundred do.
const ROUNDS: usize = 10_000;
/// Maximum random delay in spins, since calls take different times to start and to run.
const JITTER: u32 = 500;

/// Each round runs `prepare`, then `switch` on this processor and a
/// client's packet on the other, and checks the records with `wrong`.
fn race(
    b: &Bench,
    f: &Flow,
    frame: &[u8],
    prepare: impl Fn(),
    switch: impl Fn(),
    wrong: impl Fn(Pair<abi::leg>) -> bool,
) {
    // spin: a sleeping barrier would wake one of the two long after the other
    let came = AtomicUsize::new(0);
    let meet = || {
        let both = came.fetch_add(1, Ordering::AcqRel) / 2 * 2 + 2;
        let (mut spins, began) = (0, Instant::now());
        while came.load(Ordering::Acquire) < both {
            hint::spin_loop();
            spins += 1;
            if spins % 10_000 == 0 {
                thread::yield_now(); // let tests beside this one run
                assert!(began.elapsed() < Duration::from_secs(60), "the other one has panicked");
            }
        }
    };
    let start = |seed| {
        let mut jitter = SmallRng::seed_from_u64(seed);
        move || {
            meet();
            (0..jitter.random_range(0..JITTER)).for_each(|_| hint::spin_loop());
        }
    };
    let (mut here, mut there) = (start(1), start(2));
    let found = thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..ROUNDS {
                there();
                b.datapath.test_run_with(false, frame, &TestContext::default(), &mut Vec::new()).expect("test run");
                meet();
            }
        });
        let mut round = || {
            prepare();
            here();
            switch();
            meet();
            let legs = f.legs().map(|t| testing::get_leg(&b.datapath, t).expect("leg"));
            wrong(legs).then_some(legs)
        };
        (0..ROUNDS).filter_map(|_| round()).collect::<Vec<_>>()
    });
    assert!(found.is_empty(), "{} of {ROUNDS}: {:?}", found.len(), found[0]);
}

/// The host does not repeat its acknowledgement.
#[test]
#[ignore = "root"]
fn an_acknowledgement_that_is_forwarded_is_known() {
    bench(64, |b| {
        let mut f = Flow::new(V4);
        let acked = f.up.max_ack;
        let mut p = f.next(0);
        p.ack = acked;
        f.up.max_ack -= 1000;
        let prepare = || {
            sockets::spliced_legs(&f, b, 0);
            f.install(b, 0);
        };
        let unsplice = || _ = b.datapath.unsplice(f.legs()).expect("unspliced");
        race(b, &f, &p.frame(), prepare, unsplice, |legs| legs.client.ack_in != acked);
    });
}

/// An unsplice must not build a leg's record from an entry that has not been filled yet.
#[test]
#[ignore = "root"]
fn a_commit_is_whole_for_what_takes_it_back() {
    bench(64, |b| {
        let f = Flow::new(V4);
        let p = f.next(100);
        // an entry left by another flow
        let former =
            abi::path { word: abi::path_word { all: 0x6000_0000 }, max_ack: 0x6000_0000, ..Default::default() };
        let prepare = || {
            sockets::spliced_legs(&f, b, 0);
            for t in f.legs() {
                let mut leg = testing::get_leg(&b.datapath, t).expect("leg");
                leg.flags &= !LegFlags::SPLICED;
                testing::put_leg(&b.datapath, t, &leg).expect("leg");
                testing::put_path(&b.datapath, t, &former, [0; 4]).expect("path");
            }
        };
        prepare();
        let at = b.datapath.look(f.legs()).expect("legs");
        let before = f.legs().map(|t| testing::get_leg(&b.datapath, t).expect("leg"));
        let commit = || _ = b.datapath.commit(f.legs(), &at, Pair::both(u32::MAX), CommitOptions::default()); // may lose the race
        race(b, &f, &p.frame(), prepare, commit, |legs| {
            let in_force = |t| b.datapath.path(t).expect("path").flags & PathFlags::SPLICED != 0;
            let moved = legs.zip(before).iter().any(|(l, was)| (l.max_out, l.ack_out) != (was.max_out, was.ack_out));
            moved || legs.iter().any(|l| l.flags & LegFlags::SPLICED != 0) || in_force(&f.client) || in_force(&f.server)
        });
    });
}
