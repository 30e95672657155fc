//! A data path for single packets, by itself or for one case after the other.

use super::Bench;
use longsplice_datapath::{Datapath, Options};
use longsplice_lab::{Lab, Shape};
use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    rc::Rc,
};

thread_local! {
    /// The data path of the cases that run together.
    static SHARED: RefCell<Option<Rc<Bench>>> = const { RefCell::new(None) };
}

fn open(max_flows: u32) -> Bench {
    let options = Options { max_flows, ..Options::default() }.with_smallest_rings();
    Bench { datapath: Datapath::open(&options).expect("the data path opens: root, kernel 6.6, bpffs") }
}

/// Runs `work` with a data path that has no entries: that of the cases that run together, or one in a namespace of its own.
pub(super) fn bench(max_flows: u32, work: impl FnOnce(&Bench) + Send) {
    if let Some(b) = SHARED.with_borrow(Clone::clone) {
        b.datapath.legs().iter().for_each(|(t, _)| b.datapath.forget(t));
        b.datapath.paths().iter().for_each(|(t, _)| b.datapath.forget(t));
        return work(&b);
    }
    let lab = Lab::simple(Shape::TwoDevices).expect("lab: root and iproute2");
    lab.forwarder.run(|| {
        let b = open(max_flows);
        let result = catch_unwind(AssertUnwindSafe(|| work(&b)));
        b.datapath.remove().expect("what was pinned is removed");
        if let Err(panic) = result {
            resume_unwind(panic);
        }
    });
}

/// Runs cases one after the other on one data path, whose load takes longer than most of them. `PACKETS_CASE=name` chooses one.
pub(super) fn run(cases: &[(&'static str, fn())]) {
    let chosen = std::env::var("PACKETS_CASE").ok();
    let lab = Lab::simple(Shape::TwoDevices).expect("lab: root and iproute2");
    let failed = lab.forwarder.run(|| {
        let b = Rc::new(open(64));
        SHARED.set(Some(b.clone()));
        let mut failed = Vec::new();
        for (name, case) in cases.iter().filter(|(name, _)| chosen.as_ref().is_none_or(|chosen| chosen == name)) {
            eprintln!("case {name}");
            if catch_unwind(case).is_err() {
                failed.push(*name);
            }
        }
        SHARED.set(None);
        b.datapath.remove().expect("what was pinned is removed");
        failed
    });
    assert!(failed.is_empty(), "these cases failed: {failed:?}");
}

/// A test of these functions, which run together.
macro_rules! together {
    ($($case:ident),* $(,)?) => {
        #[test]
        #[ignore = "root"]
        fn all() {
            crate::packets::bench::run(&[$((stringify!($case), $case)),*]);
        }
    };
}
pub(super) use together;
