//! Records of flows for the next process, in memory of the kernel.

use longsplice_datapath::{Datapath, FlowRecords, Options};
use longsplice_lab::{Lab, Shape};
use std::fs;

/// More than one array holds.
const MANY: usize = 5000;

#[test]
#[ignore = "root"]
fn they_outlive_the_process_and_go_with_the_tables() {
    let lab = Lab::simple(Shape::TwoDevices).expect("lab");
    let open = || lab.forwarder.run(|| Datapath::open(&Options::default())).expect("open");
    let d = open();
    let pins = |d: &Datapath| {
        let names = fs::read_dir(d.pin()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("flow-records-")).count()
    };
    assert_eq!(pins(&d), 1, "before the first splice, which needs no descriptor");
    let contents = |n: usize| format!("{n} {}", "x".repeat(n % FlowRecords::MOST / 2)).into_bytes();
    let ids: Vec<_> = (0..MANY).map(|n| d.flow_records().put(&contents(n)).unwrap()).collect();
    assert_eq!(pins(&d), 2);
    d.flow_records().remove(ids[0]);
    drop(d);

    let d = open();
    let mut left: Vec<_> = d.flow_records().left().into_iter().map(|(_, contents)| contents).collect();
    left.sort();
    let mut all: Vec<_> = (1..MANY).map(contents).collect();
    all.sort();
    assert_eq!(left.len(), all.len());
    assert!(left == all, "the same bytes");
    let pin = d.pin().to_owned();
    d.remove().unwrap();
    assert!(!pin.exists());
}
