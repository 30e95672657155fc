//! What tshark shows of the option, with dist/longsplice-tpot.lua.

use super::packets::{SYN_ACK, USUAL, option, packet, wrap, wrap_in};
use longsplice_lab::{
    Family,
    topology::{CLIENT, FORWARDER_TO_CLIENT, SERVER},
};
use longsplice_tests::packet::{Packet, flag};
use std::{fs, path::Path, process::Command};

/// A capture (pcap) of frames on an Ethernet.
fn capture(frames: &[Vec<u8>]) -> Vec<u8> {
    let header = [0xa1b2_c3d4u32, 2 << 16 | 4, 0, 0, 65535, 1].map(u32::to_be_bytes).concat();
    let record = |frame: &Vec<u8>| {
        let length = frame.len() as u32;
        [[0, 0, length, length].map(u32::to_be_bytes).concat(), frame.clone()].concat()
    };
    [header, frames.iter().flat_map(record).collect()].concat()
}

/// Fields of each frame: message, length, version, hops, capabilities, MAC, and whether the option counts as none.
fn shown(file: &Path, more: &[&str]) -> Vec<String> {
    let script = format!("lua_script:{}/../dist/longsplice-tpot.lua", env!("CARGO_MANIFEST_DIR"));
    let fields =
        ["message", "length", "version", "hops", "capabilities", "mac", "ignored"].map(|f| format!("tpot.{f}"));
    let mut tshark = Command::new("tshark");
    tshark.args(["-n", "-X", &script, "-T", "fields", "-E", "separator=,"]).args(more).arg("-r").arg(file);
    let out = tshark.args(fields.iter().flat_map(|f| ["-e", f])).output().expect("tshark: dist/install-deps check");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[test]
fn tshark_shows_the_option() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("capture");
    for family in Family::BOTH {
        let (client, server, proxy) =
            (CLIENT.port(family, 4000), SERVER.port(family, 80), FORWARDER_TO_CLIENT.ip(family));
        let with = |option: &[u8]| [&USUAL, option].concat();
        let syn = |option: &[u8]| Packet { flags: flag::SYN, options: with(option), ..packet(client, server) }.frame();
        let signed = [&[253, 16], &option(7)[2..], &[0x30, 0xdb, 0x72, 0xd4, 0xb7, 0xd9, 0x46, 0x9e]].concat();
        let answer = Packet { flags: SYN_ACK, options: with(&signed), ..packet(server, client) };
        let frames = [
            syn(&option(8)),
            wrap(&answer.frame(), proxy, client.ip(), 0),
            syn(&signed),
            syn(&[254, 8, 0x12, 0x34, 1, 3, 0, 5]),
            syn(&[253, 8, 0x12, 0x34, 1, 3, 0, 5]),
            syn(&[253, 8, 0x12, 0x34, 2, 3, 0, 5]),
            Packet { options: option(8), ..packet(client, server) }.frame(),
            syn(&[]),
            wrap_in(true, &answer.frame(), proxy, client.ip(), 0),
        ];
        fs::write(&file, capture(&frames)).expect("written");
        let nothing = ",,,,,,";
        let want = [
            "0,8,1,8,0x0000,,",
            "1,16,1,7,0x0000,30db72d4b7d9469e,",
            "0,16,,,,,1",
            nothing,
            nothing,
            nothing,
            nothing,
            nothing,
            "1,16,1,7,0x0000,30db72d4b7d9469e,",
        ];
        assert_eq!(shown(&file, &[]), want);
        let want =
            [nothing, nothing, nothing, "0,8,1,,,,1", "0,8,1,3,0x0005,,", "0,8,2,,,,1", nothing, nothing, nothing];
        assert_eq!(shown(&file, &["-o", "tpot.exid:4660"]), want);
    }
}
