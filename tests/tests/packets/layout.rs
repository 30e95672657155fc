//! Definitions shared by both sides: layouts, constants, memory.

use super::*;
use std::collections::BTreeSet;

macro_rules! layout {
    ($types:expr, $t:ident { $($field:ident),* }) => {{
        let found = $types.layout(stringify!($t)).unwrap_or_else(|| panic!("struct {} is in the BTF", stringify!($t)));
        assert_eq!(found.size, size_of::<abi::$t>(), "size of struct {}", stringify!($t));
        let ours = vec![$((stringify!($field).to_string(), std::mem::offset_of!(abi::$t, $field))),*];
        assert_eq!(found.members, ours, "members of struct {}", stringify!($t));
    }};
}

/// The tables of docs/lifecycle.md name all maps, and the sizes of what is in them.
#[test]
#[ignore = "root"]
fn maps_are_documented() {
    let docs = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/lifecycle.md"));
    let rows: Vec<[&str; 2]> = docs
        .lines()
        .skip_while(|line| *line != "## Maps")
        .take_while(|line| !line.starts_with("## Limits"))
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .map(|(name, rest)| [name, rest.split(" | ").next().expect("a column")])
        .collect();
    let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/datapath/bpf/maps.h"));
    let declared = source.lines().filter_map(|line| line.strip_prefix("} ")).flat_map(|line| line.split(", "));
    let declared: BTreeSet<&str> =
        declared.filter_map(|map| map.split_once(" SEC(\".maps\")")).map(|map| map.0).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<BTreeSet<_>>(), declared, "documented, and declared");
    bench(64, |b| {
        let types = testing::Types::of(&b.datapath).expect("BTF");
        let mut sizes = 0;
        for [map, holds] in &rows {
            // `name` size
            for (name, size) in holds.split('`').skip(1).step_by(2).zip(holds.split('`').skip(2).step_by(2)) {
                let size = size.trim_start().split([' ', ',']).next().and_then(|size| size.parse::<usize>().ok());
                let Some(size) = size else { continue };
                let found = types.layout(name).unwrap_or_else(|| panic!("{map}: struct {name} is in the BTF"));
                assert_eq!(found.size, size, "{map}: struct {name}");
                sizes += 1;
            }
        }
        assert!(sizes >= 5, "{sizes} sizes");
    });
}

#[test]
#[ignore = "root"]
fn layouts_are_those_of_the_object() {
    bench(64, |b| {
        let t = testing::Types::of(&b.datapath).expect("BTF");
        layout!(t, tuple { remote, local, rport, lport });
        layout!(
            t,
            leg {
                lock,
                flags,
                peer,
                phase_in,
                phase_out,
                wscale_in,
                wscale_out,
                mss_in,
                mss_out,
                iss,
                max_in,
                bound_in,
                limit_in,
                ack_in,
                edge_in,
                tsval_in,
                floor_in,
                max_out,
                local_out,
                bound_out,
                ack_out,
                win_out,
                edge_out,
                ack_local,
                win_local,
                tsval_out,
                shim_in,
                shim_out,
                shim_ts,
                seq_off,
                ts_from_peer,
                verbatim,
                held_in,
                held,
                ifindex,
                dmac,
                smac,
                mark,
                clock_in,
                in64,
                seen
            }
        );
        layout!(
            t,
            path { word, max_ack, via, scales, seen, seq_add, ack_add, tsval_add, tsecr_add, rport, lport, remote4 }
        );
        layout!(t, path6 { p, remote });
        layout!(t, via { ifindex, mtu, dmac, smac, local, flags, most, mark });
        layout!(
            t,
            embryo {
                irs,
                iss,
                tsval_in,
                tsval_out,
                mss_in,
                mss_out,
                wscale_in,
                wscale_out,
                opts_in,
                opts_out,
                edge_out,
                ifindex,
                dmac,
                smac
            }
        );
        layout!(t, train_key { remote, local, id });
        layout!(t, train { when, seq, id, rport, lport, out_rport, out_lport, doff, fin, fill, generation });
        layout!(t, event { leg, kind, generation, p, replaced });
        layout!(t, half { leg, consumed, produced, leftover, limit, pending, start, seq, fin, flags, phase_in });
        layout!(t, handshake { leg, generation, ifindex, eth, fill, ip, tcp });
        layout!(
            t,
            path_args {
                op,
                result,
                key,
                other,
                mss,
                leg_flags,
                generation,
                other_generation,
                ifindex,
                fill,
                slot,
                p,
                p_other
            }
        );
        layout!(t, tap_record { leg, kind, at, acked, len });
        layout!(
            t,
            switch_args {
                op,
                result,
                hold,
                fit,
                trigger,
                tap,
                a,
                b,
                via_a,
                via_b,
                remote_a,
                remote_b,
                end_a,
                end_b,
                origin_a,
                origin_b
            }
        );
        layout!(t, hop { ifindex, macs, mss, mark });
        layout!(t, switch_call { args, hop_a, hop_b, generation_a, generation_b });
        layout!(t, listen_key { local, port, family });
        let word = t.layout("path_word").expect("union path_word");
        assert_eq!(word.size, 8);
        let place = |n: &str| word.members.iter().find(|m| m.0 == n).map(|m| m.1);
        assert_eq!(
            [place("all"), place("end"), place("wraps"), place("flags")],
            [Some(0), Some(0), Some(4), Some(6)],
            "as PathView takes it apart"
        );
    });
}

/// A released IPv4 flow takes two entries of paths4 and nothing else.
#[test]
#[ignore = "root"]
fn memory_of_a_released_flow() {
    const FLOWS: u32 = 16384;
    bench(FLOWS, |b| {
        let bytes = testing::memory(&b.datapath, "paths4").expect("fdinfo");
        let per_flow = bytes as f64 / f64::from(FLOWS);
        eprintln!("paths4 for {FLOWS} flows: {bytes} bytes, {per_flow:.1} per flow");
        assert!(per_flow <= 256.0, "{per_flow:.1} bytes per flow");
    });
}
