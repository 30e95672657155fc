//! The table of path entries: no entry is lost when it is full, or while others come and go.

use super::bench;
use longsplice_datapath::{
    AbiId, Datapath, ExpectError, MAX_LISTENERS, OpenError, Options, Tuple, abi, model, testing,
};
use longsplice_lab::{Lab, Shape};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::{
    collections::{HashMap, HashSet},
    fs,
    io::IoSlice,
    mem::replace,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{fd::AsRawFd, unix::net::UnixDatagram},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// The tuple of connection `n`: consecutive ports, few addresses.
fn tuple(v6: bool, n: u32) -> Tuple {
    let ip = |side: u8, host: u32| match v6 {
        false => IpAddr::V4(Ipv4Addr::new(10, 77, side, host as u8)),
        true => IpAddr::V6(Ipv6Addr::new(0xfd77, side.into(), 0, 0, 0, 0, 0, host as u16)),
    };
    let (host, port) = (1 + n / 20_000, 10_000 + (n % 20_000) as u16);
    Tuple { remote: SocketAddr::new(ip(1, host), port), local: SocketAddr::new(ip(2, 1), 1080) }
}

#[test]
#[ignore = "root"]
fn every_entry_of_a_full_table_is_found() {
    const FLOWS: u32 = 16384;
    bench(FLOWS, |b| {
        for v6 in [false, true] {
            let all: Vec<Tuple> = (0..2 * FLOWS).map(|n| tuple(v6, n)).collect();
            for t in &all {
                b.datapath.expect(t, None).unwrap_or_else(|e| panic!("{t:?}: {e}"));
            }
            assert!(all.iter().all(|t| b.datapath.path(t).is_some()));
            assert!(matches!(b.datapath.expect(&all[7], None), Err(ExpectError::Taken)));
            assert!(b.datapath.path(&tuple(v6, 2 * FLOWS)).is_none());
            let listed: HashSet<Tuple> = b.datapath.paths().into_iter().map(|(t, _)| t).collect();
            assert_eq!(listed, all.iter().copied().collect());
            for (i, t) in all.iter().enumerate() {
                if i % 2 == 0 {
                    b.datapath.forget(t);
                }
            }
            for (i, t) in all.iter().enumerate() {
                assert_eq!(b.datapath.path(t).is_some(), i % 2 == 1, "{t:?}");
            }
            for t in &all {
                b.datapath.forget(t);
            }
            assert!(b.datapath.paths().is_empty());
        }
    });
}

/// A walk goes on with what the last step has told, which is of another connection.
#[test]
#[ignore = "root"]
fn walks_show_each_entry_as_it_is() {
    const FLOWS: u32 = 16;
    bench(FLOWS, |b| {
        let all: Vec<Tuple> = (0..FLOWS).flat_map(|n| [false, true].map(|v6| tuple(v6, n))).collect();
        for (n, t) in all.iter().enumerate() {
            b.datapath.expect(t, None).unwrap_or_else(|e| panic!("{t:?}: {e}"));
            let p = abi::path { max_ack: 1 + n as u32, ..Default::default() };
            testing::put_path(&b.datapath, t, &p, [0; 4]).expect("path");
        }
        for walk in [Datapath::paths, Datapath::stopped_paths] {
            let seen: HashMap<Tuple, u32> = walk(&b.datapath).into_iter().map(|(t, p)| (t, p.max_ack)).collect();
            assert_eq!(seen, all.iter().copied().zip(1..).collect());
        }
    });
}

/// A table as full as allowed, for any seed. Hosts use consecutive ports, and a proxy's connections have few addresses.
#[test]
fn every_key_finds_a_place() {
    const FLOWS: u32 = 200_000;
    /// At least as many slots and pages as either table has: arrays are much faster here than sets.
    const SLOTS: usize = 503;
    const PAGES: usize = 3000;
    let to_two_servers = |v6, n: u32| {
        let Tuple { remote, local } = tuple(v6, n / 2);
        Tuple { remote: SocketAddr::new(local.ip(), 80 + (n % 2) as u16), local: remote }
    };
    let keys: [fn(bool, u32) -> Tuple; 2] = [tuple, to_two_servers];
    for (v6, key) in [false, true].into_iter().flat_map(|v6| keys.map(|key| (v6, key))) {
        for seed in (0..16u64).map(|n| n.wrapping_mul(0xd1b5_4a32_d192_ed03)) {
            let (mut taken, mut homes) = (vec![[false; SLOTS]; PAGES], [0u32; PAGES]);
            for key in (0..2 * FLOWS).map(|n| key(v6, n)) {
                let place = |way| model::place(&key, seed, FLOWS, way);
                let found =
                    (0..model::WAYS).map(place).any(|(p, slot)| !replace(&mut taken[p as usize][slot as usize], true));
                assert!(found, "{key:?} has no place, seed {seed:#x}");
                homes[place(0).0 as usize] += 1;
            }
            let homes: Vec<f64> = homes.into_iter().filter(|n| *n > 0).map(f64::from).collect();
            let mean = f64::from(2 * FLOWS) / homes.len() as f64;
            let dispersion = homes.iter().map(|n| (n - mean).powi(2) / mean).sum::<f64>() / homes.len() as f64;
            assert!((0.8..1.2).contains(&dispersion), "pages are filled as by chance: {dispersion}, seed {seed:#x}");
        }
    }
}

/// Runs of adjacent slots fill up at the same time.
#[test]
fn the_places_of_a_home_lie_apart() {
    for key in (0..20_000).flat_map(|n| [false, true].map(|v6| tuple(v6, n))) {
        let slots: HashSet<u32> = (0..model::WAYS).map(|way| model::place(&key, 7, 1, way).1).collect();
        let adjacent = slots.iter().filter(|at| slots.contains(&(**at + 1))).count();
        assert!(slots.len() >= 50 && adjacent <= 40, "{} places, {adjacent} of them neighbours: {key:?}", slots.len());
    }
}

/// The inode number of a deleted namespace is reused, and the folder is named after it.
/// What another version would have pinned.
const OTHER: AbiId = AbiId { version: 1000, ..AbiId::OURS };

#[test]
#[ignore = "root"]
fn another_namespace_does_not_take_over() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-{}", std::process::id()));
    let open =
        || Datapath::open(&Options { max_flows: 64, pin: Some(pin.clone()), ..Options::default() }).expect("open");
    let labs = [0, 1].map(|_| Lab::simple(Shape::TwoDevices).expect("lab"));
    labs[0].forwarder.run(|| open().expect(&tuple(false, 1), None).expect("room"));
    labs[0].forwarder.run(|| assert_eq!(open().paths().len(), 1, "the next process takes over"));
    testing::put_abi(&pin, OTHER).expect("pinned");
    let options = Options { max_flows: 64, pin: Some(pin.clone()), ..Options::default() };
    let refused = labs[0].forwarder.run(|| Datapath::open(&options).err());
    assert!(matches!(refused, Some(OpenError::Abi { found: OTHER, .. })), "{refused:?}");
    labs[1].forwarder.run(|| {
        let d = open();
        assert!(d.paths().is_empty() && d.legs().is_empty(), "of whatever version the other was");
        d.remove().expect("what was pinned is removed");
    });
}

#[test]
#[ignore = "root"]
fn a_version_that_does_not_say_whose_it_is_is_refused() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-first-{}", std::process::id()));
    let open = || Datapath::open(&Options { max_flows: 64, pin: Some(pin.clone()), ..Options::default() });
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        open().expect("open").expect(&tuple(false, 1), None).expect("room");
        testing::put_first_version(&pin).expect("pinned");
        assert!(
            matches!(open(), Err(OpenError::Abi { found: AbiId { version: 1, layout: 0 }, .. })),
            "its flows are not removed"
        );
        longsplice_datapath::flush(&pin).expect("what was pinned is removed");
    });
}

/// Somebody has changed what is pinned, and forgotten the version.
#[test]
#[ignore = "root"]
fn another_layout_of_the_same_version_is_refused() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-layout-{}", std::process::id()));
    let open = || Datapath::open(&Options { max_flows: 64, pin: Some(pin.clone()), ..Options::default() });
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        open().expect("open").expect(&tuple(false, 1), None).expect("room");
        let other = AbiId { layout: !AbiId::OURS.layout, ..AbiId::OURS };
        testing::put_abi(&pin, other).expect("pinned");
        let refused = open().err().expect("its flows are not removed").to_string();
        assert!(refused.contains(&format!("has ABI version {other}, and this program {}", AbiId::OURS)), "{refused}");
        testing::put_abi(&pin, AbiId::OURS).expect("pinned");
        open().expect("the same").remove().expect("what was pinned is removed");
    });
}

#[test]
#[ignore = "root"]
fn another_version_that_holds_nothing_is_removed() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-empty-{}", std::process::id()));
    let open = |max_flows| Datapath::open(&Options { max_flows, pin: Some(pin.clone()), ..Options::default() });
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        let d = open(64).expect("open");
        d.expect(&tuple(false, 1), None).expect("room");
        testing::put_abi(&pin, OTHER).expect("pinned");
        drop(d);
        let refused = open(64).err().expect("something would be lost").to_string();
        assert!(refused.contains("1 path entries, 1 records of connections and 0 transparent listeners"), "{refused}");
        testing::put_abi(&pin, AbiId::OURS).expect("pinned");
        let d = open(64).expect("open");
        d.forget(&tuple(false, 1));
        testing::put_abi(&pin, OTHER).expect("pinned");
        drop(d);
        let d = open(256).expect("nothing is lost");
        assert_eq!(d.max_flows(), 256, "new tables");
        d.remove().expect("what was pinned is removed");
    });
}

#[test]
#[ignore = "root"]
fn another_version_that_holds_nothing_is_removed_from_any_namespace() {
    let open = || Datapath::open(&Options { max_flows: 64, ..Options::default() }).expect("open");
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let leave = |holds: bool| {
        lab.forwarder.run(|| {
            let d = open();
            if holds {
                d.expect(&tuple(false, 1), None).expect("room");
            } else {
                d.forget(&tuple(false, 1));
            }
            testing::put_abi(d.pin(), OTHER).expect("pinned");
            d.pin().to_owned()
        })
    };
    let path = leave(true);
    assert!(!longsplice_datapath::remove_dead().expect("looked").contains(&path) && path.exists());
    testing::put_abi(&path, AbiId::OURS).expect("pinned");
    assert_eq!(leave(false), path);
    longsplice_datapath::remove_dead().expect("looked");
    assert!(!path.exists(), "removed, by us or by another process that has looked meanwhile");
}

#[test]
#[ignore = "root"]
fn tables_keep_their_size_as_long_as_they_hold_something() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-size-{}", std::process::id()));
    let open =
        |max_flows| Datapath::open(&Options { max_flows, pin: Some(pin.clone()), ..Options::default() }).expect("open");
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        let d = open(64);
        d.expect(&tuple(false, 1), None).expect("room");
        drop(d);
        let d = open(256);
        assert_eq!((d.max_flows(), d.paths().len()), (64, 1), "what was there is there");
        d.forget(&tuple(false, 1));
        drop(d);
        let d = open(256);
        assert_eq!(d.max_flows(), 256, "nothing is lost");
        let mut entries = (0..256).map(|n| d.expect(&tuple(false, n), None));
        assert!(entries.all(|e| e.is_ok()), "room for as many as were asked for");
        d.remove().expect("what was pinned is removed");
    });
}

/// The process had created tables of another size, and not recorded their layout yet.
#[test]
#[ignore = "root"]
fn a_process_that_died_while_it_opened_is_no_obstacle() {
    let pin = PathBuf::from(format!("/sys/fs/bpf/longsplice-test-died-{}", std::process::id()));
    let open =
        |max_flows| Datapath::open(&Options { max_flows, pin: Some(pin.clone()), ..Options::default() }).expect("open");
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        open(64).expect(&tuple(false, 1), None).expect("room");
        fs::remove_file(pin.join("abi")).expect("it was pinned");
        let d = open(256);
        assert!(d.paths().is_empty());
        let mut entries = (0..256).map(|n| d.expect(&tuple(false, n), None));
        assert!(entries.all(|e| e.is_ok()), "room for as many as were asked for");
        d.remove().expect("what was pinned is removed");
    });
}

/// A process just forked shares the descriptor of the lock until it executes its own program.
#[test]
#[ignore = "root"]
fn a_process_that_shares_the_lock_does_not_keep_it() {
    let name = format!("longsplice-test-shared-{}", std::process::id());
    let pin = PathBuf::from("/sys/fs/bpf").join(&name);
    let open = || Datapath::open(&Options { max_flows: 64, pin: Some(pin.clone()), ..Options::default() });
    Lab::simple(Shape::TwoDevices).expect("lab").forwarder.run(|| {
        let first = open().expect("open");
        assert!(matches!(open(), Err(OpenError::Running(_))), "held");
        let is_lock = |at: &Path| fs::read_link(at).is_ok_and(|to| to.to_string_lossy().contains(&name));
        let mut descriptors = fs::read_dir("/proc/self/fd").expect("proc").flatten();
        let lock = descriptors.find(|e| is_lock(&e.path())).expect("open").file_name();
        let lock = lock.to_string_lossy().parse().expect("a number");
        let (sender, _receiver) = UnixDatagram::pair().expect("pair");
        let shared = [ControlMessage::ScmRights(&[lock])];
        sendmsg::<()>(sender.as_raw_fd(), &[IoSlice::new(b"lock")], &shared, MsgFlags::empty(), None).expect("shared");
        drop(first);
        open().expect("given back").remove().expect("what was pinned is removed");
    });
}

#[test]
#[ignore = "root"]
fn as_many_listeners_as_are_promised() {
    bench(16, |b| {
        let listen = |n: usize| b.datapath.listen(([192, 0, 2, (n >> 8) as u8], 1 + (n & 255) as u16).into());
        (0..MAX_LISTENERS as usize).for_each(|n| listen(n).expect("room"));
        let said = listen(MAX_LISTENERS as usize).expect_err("no more").to_string();
        assert_eq!(said, format!("the data path has room for {MAX_LISTENERS} listeners"));
    });
}

#[test]
#[ignore = "root"]
fn slots_that_nobody_holds_need_no_rest() {
    const FLOWS: u32 = 64;
    bench(FLOWS, |b| {
        let mut refused = 0;
        for n in 0..8 * 2 * FLOWS {
            let t = tuple(false, n);
            if b.datapath.expect(&t, None).is_err() {
                refused += 1;
                thread::sleep(Duration::from_millis(20)); // clocks have a resolution of milliseconds only
                b.datapath.reuse_slots_now().expect("the kernel tells");
                b.datapath.expect(&t, None).expect("a slot that nobody holds");
            }
            b.datapath.forget(&t);
        }
        assert!(refused <= 4, "{refused} times for a few hundred slots each");
    });
}

#[test]
#[ignore = "root"]
fn slots_are_used_again_after_a_rest() {
    const FLOWS: u32 = 64;
    bench(FLOWS, |b| {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut refused = 0;
        for n in 0..8 * 2 * FLOWS {
            let t = tuple(false, n);
            // Slots freed a moment ago are not reused yet, because readers may still hold them.
            while let Err(e) = b.datapath.expect(&t, None) {
                assert!(matches!(e, ExpectError::Full { .. }) && Instant::now() < deadline, "{t:?}: {e}");
                refused += 1;
                thread::sleep(Duration::from_millis(20));
            }
            b.datapath.forget(&t);
        }
        assert!(refused > 0, "a page of 503 slots took more than that at once");
    });
}

#[test]
#[ignore = "root"]
fn others_come_and_go() {
    bench(16384, |b| {
        let stay: Vec<Tuple> = (0..8192).map(|n| tuple(false, n)).collect();
        for t in &stay {
            b.datapath.expect(t, None).expect("room");
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let looking = scope.spawn(|| {
                while !over.load(Relaxed) {
                    for t in &stay {
                        assert!(b.datapath.path(t).is_some(), "{t:?}");
                    }
                }
            });
            let coming: Vec<_> = (1..=2)
                .map(|part| {
                    scope.spawn(move || {
                        for n in 0..8000 {
                            let t = tuple(false, part * 50_000 + n);
                            b.datapath.expect(&t, None).expect("room");
                            assert!(b.datapath.path(&t).is_some(), "{t:?}");
                            b.datapath.forget(&t);
                            assert!(b.datapath.path(&t).is_none(), "{t:?}");
                        }
                    })
                })
                .collect();
            let came: Vec<_> = coming.into_iter().map(|c| c.join()).collect();
            over.store(true, Relaxed);
            looking.join().expect("no entry is missed while others come and go");
            came.into_iter().for_each(|c| c.expect("each is found while it is there"));
        });
        assert_eq!(b.datapath.paths().len(), stay.len());
        assert_eq!(b.datapath.entries().expect("pinned"), stay.len() as u64, "counted as they come and go");
    });
}
