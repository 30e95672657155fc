//! Several processors in the same instant: whatever they do between each other's steps, nothing is forgotten.

use longsplice_datapath::{
    Half, Limit, Pair, PathFlags, Side, Tuple,
    abi::{event_kind, switch_op},
    model::{Fate, Job, Model, Seg, Start, Switch},
};

const ACK: u8 = 0x10;
const FIN: u8 = 1;
/// The event of a flow that is over.
const CLOSED: u8 = 1 << event_kind::EVENT_CLOSED.0;
const WINDOW: u16 = 60_000;
/// Enough that the rarest of the orders below occurs a few times.
const ORDERS: u64 = 40_000;

/// A segment of a host: the flags beside ACK, the bytes of data, and how many of the other host's bytes are acknowledged, which
/// include its FIN.
type Sent = (Side, u8, u32, u32);

/// Ends of connections: each segment answers the one before.
const ENDS: [&[Sent]; 4] = {
    use Side::{Client as C, Server as S};
    [
        &[(C, FIN, 0, 0), (S, FIN, 0, 1), (C, 0, 0, 1)],
        &[(C, FIN, 0, 0), (S, 0, 0, 1), (S, FIN, 0, 1), (C, 0, 0, 1)],
        &[(S, FIN, 0, 0), (C, FIN, 0, 1), (S, 0, 0, 1)],
        &[(C, 0, 100, 0), (S, FIN, 1, 100), (C, FIN, 0, 2), (S, 0, 0, 101)],
    ]
};

/// Returns a flow that is about to be committed, and the commit.
fn drained() -> (Model, Switch) {
    let window = u32::from(WINDOW);
    let start = |[irs, iss]: [u32; 2]| Start {
        irs,
        iss,
        edge_in: iss.wrapping_add(window),
        edge_out: irs.wrapping_add(window),
        ..Start::default()
    };
    let mut m = Model::new(starts().map(start));
    let mut freeze = call(switch_op::OP_FREEZE);
    m.switch(&mut freeze);
    freeze.frozen(Pair::both(0)).expect("idle");
    (m, call(switch_op::OP_COMMIT))
}

/// Returns a call about a flow that has carried nothing.
fn call(op: switch_op) -> Switch {
    let half = |port| Half {
        leg: Tuple { remote: ([0; 4], 0).into(), local: ([0; 4], port).into() },
        consumed: 0,
        produced: 0,
        leftover: 0,
        limit: Limit::None,
    };
    Switch::new(op, Pair::new(&half(1), &half(2)), 1)
}

/// Returns the initial numbers of the legs: the host's and ours.
fn starts() -> Pair<[u32; 2]> {
    Pair::new([1000, 2000], [5000, 0u32.wrapping_sub(2)])
}

/// Returns the jobs of the processor where these segments arrive.
fn arriving<'a>(sent: &[Sent]) -> Vec<Job<'a>> {
    let mut passed = Pair::both(0);
    let segment = |&(from, flags, len, acked): &Sent| {
        let [irs, iss] = starts()[from];
        let (seq, ack) = (irs.wrapping_add(1 + passed[from]), iss.wrapping_add(1 + acked));
        passed[from] += len + u32::from(flags);
        Job::segment(from, Seg { seq, ack, len, win: WINDOW, flags: ACK | flags, ..Seg::default() })
    };
    sent.iter().map(segment).collect()
}

/// Returns whether the other host gets all that a segment says.
fn has_arrived((from, flags, len, acked): &Sent, fate: &Fate) -> bool {
    let ack = starts()[from.other()][0].wrapping_add(1 + acked);
    matches!(fate, Fate::Sent { forwarded: Some(f), .. } if (f.ack, f.keep, f.flags & FIN) == (ack, *len, *flags))
}

/// Races `switch` against the ends of connections, each in many orders. `is_known` is asked about those of which every segment
/// reached the other host, so that no host has a reason to repeat one.
fn against_ends(begin: impl Fn() -> (Model, Switch), is_known: impl Fn(&Model) -> bool) {
    let mut whole = 0;
    for (sent, seed) in ENDS.iter().flat_map(|sent| (0..ORDERS).map(move |seed| (sent, seed))) {
        let (mut m, mut switch) = begin();
        let (mut arriving, mut switching) = (arriving(sent), [Job::switch(&mut switch)]);
        m.race(&mut [&mut switching, &mut arriving], seed);
        let fates: Vec<_> = arriving.iter().map_while(Job::fate).collect();
        if fates.len() < sent.len() || !sent.iter().zip(&fates).all(|(sent, (fate, _))| has_arrived(sent, fate)) {
            continue;
        }
        whole += 1;
        let paths = Side::BOTH.map(|from| m.path(from));
        assert!(m.is_over() && is_known(&m), "{sent:?}, order {seed}: {paths:?} {m:?}");
        let is_told = fates.iter().any(|(_, events)| events & CLOSED != 0) || switching[0].was_over();
        assert!(is_told, "{sent:?}, order {seed}: nobody was told");
    }
    println!("{whole} of {} were not disturbed", ENDS.len() as u64 * ORDERS);
    assert!(whole > ORDERS / 4, "only {whole} were not disturbed");
}

/// A host acknowledges a FIN while the commit puts the entries into force: nobody would acknowledge it again.
#[test]
fn a_flow_that_ends_during_its_commit_is_known_to_be_over() {
    against_ends(drained, |m| Side::BOTH.iter().all(|from| m.path(*from).flags & PathFlags::FIN_ACKED != 0));
}

#[test]
fn a_flow_that_ends_during_its_unsplice_is_known_to_be_over() {
    let spliced = || {
        let (mut m, mut commit) = drained();
        m.switch(&mut commit);
        commit.switched().expect("committed");
        (m, call(switch_op::OP_UNSPLICE))
    };
    against_ends(spliced, |_| true);
}
