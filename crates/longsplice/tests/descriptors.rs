//! Nothing that comes and goes leaves a descriptor open: connections, commands, devices, processes that were killed. What all
//! connections of a listener need is open before the first of them. Every test needs root and eBPF, and fails without.

use crate::running::{AT_ONCE, Control, Running, Setting, eventually, listener, more_open, round_trip};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs, net::TcpStream};

/// Ports of listeners that splice at once, of which the second one lets the hosts shake hands with each other; then those of
/// one that waits for a command, and one that copies.
const PORTS: [u16; 4] = [7000, 7001, 7002, 7003];
/// The port of transparent connections.
const TRANSPARENT: u16 = 7010;
/// Port of the echo server.
const ECHO: u16 = 7020;
/// More bytes than the program copies before it opens pipes.
const MANY: usize = 600_000;

struct Scene {
    proxy: Running,
    /// What was open before the first client.
    before: BTreeSet<String>,
    setting: Setting,
}

impl Scene {
    fn new() -> Scene {
        let setting = Setting::new(&configuration());
        let proxy = setting.start();
        proxy.comes_to_rest();
        let before = proxy.open_files();
        for at in Family::BOTH.into_iter().flat_map(|f| [SERVER.port(f, ECHO), SERVER.port(f, TRANSPARENT)]) {
            setting.echo(at);
        }
        Scene { proxy, before, setting }
    }

    /// Opens a connection of each kind, in both families, and sends enough for each to be spliced or to get pipes.
    fn visit(&self) -> Vec<TcpStream> {
        self.visit_some(&PORTS)
    }

    /// Opens a transparent connection and one to each of these ports, in both families.
    fn visit_some(&self, ports: &[u16]) -> Vec<TcpStream> {
        let plugs = |f: Family| ports.iter().map(move |port| FORWARDER_TO_CLIENT.port(f, *port));
        let all = Family::BOTH.into_iter().flat_map(|f| plugs(f).chain([SERVER.port(f, TRANSPARENT)]));
        let mut streams: Vec<_> = all.map(|at| self.setting.connect(at)).collect();
        streams.iter_mut().for_each(|stream| round_trip(stream, &vec![7; MANY]));
        streams
    }

    /// Checks that no more is open than before the first client, once all flows have ended.
    fn as_before(&self) {
        self.proxy.flows_end();
        self.proxy.comes_to_rest();
        assert_eq!(more_open(&self.before, &self.proxy.open_files()), None);
    }

    /// Whether the proxy watches flows of an earlier process.
    fn watches_others(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.proxy.id())).unwrap();
        let mut names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
        names.any(|name| name.trim() == "orphans")
    }
}

fn configuration() -> String {
    let mut text = String::new();
    for family in Family::BOTH {
        let target = format!("target = \"{}\"", SERVER.port(family, ECHO));
        let ways = [
            "policy = { splice = \"at-once\", release_after = 0.1 }",
            "policy = { splice = \"at-once\" }\nhandshake = \"end-to-end\"",
            "policy = { splice = 1000000000000 }",
            "policy = { splice = \"never\" }",
        ];
        for (port, policy) in PORTS.into_iter().zip(ways) {
            let at = FORWARDER_TO_CLIENT.port(family, port);
            text += &listener("plug", &at.to_string(), &format!("{policy}\n{target}"));
        }
        let any = if family == Family::V4 { "0.0.0.0" } else { "[::]" };
        text += &listener("transparent", &format!("{any}:{TRANSPARENT}"), AT_ONCE);
    }
    text
}

/// Otherwise the first connection of a kind would fail if descriptors have run out.
#[test]
#[ignore = "root"]
fn all_are_open_before_the_first_client() {
    let scene = Scene::new();
    for _ in 0..5 {
        drop(scene.visit());
        scene.as_before();
    }
}

#[test]
#[ignore = "root"]
fn commands_leave_none() {
    const ROUNDS: usize = 20;
    let scene = Scene::new();
    let mut streams = scene.visit();
    let mut control = Control::of(&scene.proxy);
    for ask in ["splice", "unsplice"].into_iter().cycle().take(2 * ROUNDS) {
        for flow in scene.proxy.flows() {
            control.ask(&json!({ "version": 1, "ask": ask, "id": flow["id"] })).unwrap();
        }
        streams.iter_mut().for_each(|stream| round_trip(stream, b"still there"));
    }
    drop((streams, control));
    scene.as_before();
}

#[test]
#[ignore = "root"]
fn devices_that_come_and_go_leave_none() {
    const ROUNDS: usize = 20;
    let scene = Scene::new();
    for round in 1..=ROUNDS {
        let streams = scene.visit();
        scene.setting.lab.cut_server_wire().unwrap();
        scene.setting.lab.lay_server_wire().unwrap();
        eventually("the programs are attached again", || {
            (scene.proxy.messages().matches("splicing on f1, too").count() == round).then_some(())
        });
        drop(streams);
    }
    drop(scene.visit());
    scene.as_before();
}

#[test]
#[ignore = "root"]
fn processes_that_were_killed_leave_none() {
    const ROUNDS: usize = 5;
    let mut scene = Scene::new();
    for _ in 0..ROUNDS {
        let streams = scene.visit_some(&PORTS[..2]);
        eventually("all are forwarded", || {
            let is_forwarded = |flow: &Value| flow["state"] == "spliced" || flow["state"] == "released";
            scene.proxy.flows().iter().all(is_forwarded).then_some(())
        });
        scene.proxy.kill();
        scene.proxy = scene.setting.start();
        assert_eq!(scene.proxy.flows().len(), streams.len(), "taken over");
        drop(streams);
        eventually("the end of the thread that watches them", || (!scene.watches_others()).then_some(()));
        scene.as_before();
    }
}
