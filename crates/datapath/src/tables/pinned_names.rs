/// The maps that are pinned, so that the next process takes them over. build.rs reads this list, too.
pub(crate) const PINNED: [&str; 14] = [
    "paths4",
    "paths6",
    "entries",
    "legs",
    "embryos",
    "listeners",
    "vias",
    "remotes6",
    "fragment_trains",
    "idents",
    "verdicts",
    "aheads",
    "events",
    "abi",
];
