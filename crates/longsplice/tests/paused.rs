//! Listeners that accept nobody for a while: `longsplice pause` and `longsplice resume`.

use crate::{
    running::{
        AT_ONCE, Control, LONGSPLICE, Running, Setting, connect, eventually, listener, longsplice, loopback_echo,
        round_trip,
    },
    upgrade::Dynasty,
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
};
use tempfile::TempDir;
use test_case::test_case;

/// A program that copies, with a configuration that changes.
struct Site {
    proxy: Running,
    dir: TempDir,
    target: String,
}

impl Site {
    /// Two plugs to an echo server, `front` and `back`.
    fn new() -> Site {
        Site::by(Command::new(LONGSPLICE))
    }

    fn by(command: Command) -> Site {
        let (dir, target) = (tempfile::tempdir().unwrap(), loopback_echo());
        let file = dir.path().join("longsplice.toml");
        fs::write(&file, plug("front", "127.0.0.1:0", &target) + &plug("back", "127.0.0.1:0", &target)).unwrap();
        let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
        Site { proxy: Running::start(command, None, &arguments, &[]), dir, target }
    }

    /// Reloads with plugs of these names and addresses.
    fn reload(&self, plugs: &[(&str, &str)]) -> String {
        let text: String = plugs.iter().map(|(name, at)| plug(name, at, &self.target)).collect();
        fs::write(self.dir.path().join("longsplice.toml"), text).unwrap();
        self.proxy.client(&["reload"])
    }

    fn of(&self, name: &str) -> Value {
        of(&self.proxy, name)
    }

    fn at(&self, name: &str) -> SocketAddr {
        self.of(name)["listen"].as_str().unwrap().parse().unwrap()
    }

    /// A client that has connected to a paused listener, and has sent something.
    fn waiting(&self, name: &str) -> TcpStream {
        let before = self.of(name)["begun"].clone();
        let mut client = connect(self.at(name));
        client.write_all(b"hello").unwrap();
        // what comes later is served meanwhile, by a listener that is not paused
        if name != "back" && self.of("back") != Value::Null {
            round_trip(&mut connect(self.at("back")), b"other");
        }
        assert_eq!((&self.of(name)["begun"], &self.of(name)["paused"]), (&before, &true.into()));
        client
    }
}

fn of(proxy: &Running, name: &str) -> Value {
    let all = proxy.counters();
    all["listeners"].as_array().unwrap().iter().find(|l| l["name"] == name).cloned().unwrap_or_default()
}

fn plug(name: &str, at: &str, target: &str) -> String {
    listener("plug", at, &format!("name = \"{name}\"\ntarget = \"{target}\""))
}

/// A client that has waited is served: what it has sent comes back.
#[track_caller]
fn is_served(mut client: TcpStream) {
    let mut back = [0; 5];
    client.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
    round_trip(&mut client, b"and more");
}

#[track_caller]
fn is_refused(mut client: TcpStream) {
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn clients_wait_until_it_accepts_again() {
    let site = Site::new();
    let proxy = &site.proxy;
    let mut heard = ["front", "back"].map(|name| {
        let mut control = Control::of(proxy);
        let request = json!({ "version": 1, "ask": "events", "listener": name, "kinds": ["paused", "resumed"] });
        assert_eq!(control.ask(&request).unwrap()["event"], "subscribed");
        control
    });
    let mut live = connect(site.at("front"));
    round_trip(&mut live, b"before");
    assert_eq!(proxy.client(&["pause", "front"]), "paused front\n");
    assert_eq!(proxy.client(&["pause", "front"]), "front was paused already\n");
    assert_eq!(proxy.client(&["resume", "back"]), "back was not paused\n");
    let waiting = [site.waiting("front"), site.waiting("front")];
    round_trip(&mut live, b"meanwhile");
    let shown = proxy.client(&["counters"]);
    assert!(shown.contains(&format!("front: plug on {}, paused\n", site.at("front"))), "{shown}");
    assert!(shown.contains(&format!("back: plug on {}\n", site.at("back"))), "{shown}");
    assert_eq!(proxy.client(&["resume", "front", "back"]), "resumed front\nback was not paused\n");
    waiting.into_iter().for_each(is_served);
    round_trip(&mut connect(site.at("front")), b"hello");
    round_trip(&mut live, b"after");
    assert_eq!(site.of("front")["paused"], false);
    assert_eq!(proxy.client(&["pause", "front", "back", "front"]), "paused front\npaused back\n");
    assert_eq!(proxy.client(&["resume", "back", "front"]), "resumed front\nresumed back\n");
    let [front, back] =
        heard.each_mut().map(|heard| move |n: usize| (0..n).map(|_| heard.answer()).collect::<Vec<_>>());
    for (name, told) in [("front", { front }(4)), ("back", { back }(2))] {
        assert!(told.iter().all(|event| event["name"] == name), "{told:?}");
        let kinds: Vec<_> = told.iter().map(|event| event["event"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["paused", "resumed"].repeat(told.len() / 2));
    }
    proxy.wait_message("front is paused");
    proxy.wait_message("front accepts clients again");
}

#[test]
fn if_one_of_the_names_is_wrong_nothing_happens() {
    let site = Site::new();
    let why = site.proxy.client_error(&["pause", "front", "nobody"]);
    assert!(why.contains("no listener has the name nobody: there are front, back"), "{why}");
    assert_eq!((&site.of("front")["paused"], &site.of("back")["paused"]), (&false.into(), &false.into()));
    site.proxy.client(&["pause", "front"]);
    let why = site.proxy.client_error(&["resume", "nobody", "front"]);
    assert!(why.contains("no listener has the name nobody"), "{why}");
    assert_eq!(site.of("front")["paused"], true);
    let mut control = Control::of(&site.proxy);
    for wrong in [json!({}), json!({ "listener": "back" }), json!({ "listeners": [] }), json!({ "listeners": "back" })]
    {
        let mut request = json!({ "version": 1, "ask": "pause" });
        request.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert!(control.ask(&request).unwrap()["error"].is_string(), "{request}");
    }
    assert_eq!(site.of("back")["paused"], false);
    assert!(!longsplice(&["pause"]).status.success());
}

/// A pause belongs to the name.
#[test]
fn a_reload_keeps_it_where_the_name_stays() {
    let site = Site::new();
    let [front, back] = ["front", "back"].map(|name| site.at(name).to_string());
    site.proxy.client(&["pause", "front"]);
    let waiting = site.waiting("front");
    // the address that was asked for has port 0, and that of its name
    assert_eq!(site.reload(&[("front", "127.0.0.1:0"), ("back", "127.0.0.1:0")]), "");
    let another = site.waiting("front");
    assert_eq!(site.reload(&[("front", "127.0.0.2:0"), ("back", "127.0.0.1:0")]), "moved front\n");
    [waiting, another].into_iter().for_each(is_refused);
    let waiting = site.waiting("front");
    assert_ne!(site.at("front").to_string(), front);
    site.proxy.client(&["resume", "front"]);
    is_served(waiting);

    site.proxy.client(&["pause", "front"]);
    let waiting = site.waiting("front");
    assert_eq!(site.reload(&[("back", "127.0.0.1:0")]), "removed front\n");
    is_refused(waiting);
    assert_eq!(site.reload(&[("front", "127.0.0.1:0"), ("back", "127.0.0.1:0")]), "added front\n");
    round_trip(&mut connect(site.at("front")), b"it is another one");

    // the same socket, by another name: whoever waits there is served
    let free = TcpListener::bind("127.0.0.3:0").unwrap().local_addr().unwrap().to_string();
    assert_eq!(site.reload(&[("front", &free), ("back", "127.0.0.1:0")]), "moved front\n");
    site.proxy.client(&["pause", "front"]);
    let waiting = site.waiting("front");
    site.reload(&[("other", &free), ("back", "127.0.0.1:0")]);
    is_served(waiting);
    assert_eq!((&site.of("other")["paused"], site.at("back").to_string()), (&false.into(), back));
}

#[test_case(&["stop"]; "at once")]
#[test_case(&["stop", "--drain", "20"]; "with a drain")]
fn who_waits_does_not_keep_the_program(stop: &[&str]) {
    let mut site = Site::new();
    site.proxy.client(&["pause", "front"]);
    let waiting = site.waiting("front");
    site.proxy.client(stop);
    assert!(site.proxy.wait().success(), "{}", site.proxy.messages());
    is_refused(waiting);
}

#[test]
fn an_upgrade_keeps_it() {
    let site = Site::new();
    site.proxy.client(&["pause", "front"]);
    let waiting = site.waiting("front");
    let at = site.at("front");
    let Site { proxy, dir: _dir, .. } = site;
    let mut proxies = Dynasty::of(proxy);
    proxies.upgrade(&[]);
    assert_eq!(
        (&of(&proxies.first, "front")["paused"], &of(&proxies.first, "back")["paused"]),
        (&true.into(), &false.into())
    );
    assert_eq!(of(&proxies.first, "front")["begun"], 0);
    assert_eq!(proxies.first.client(&["resume", "front"]), "resumed front\n");
    is_served(waiting);
    proxies.upgrade(&[]);
    assert_eq!(of(&proxies.first, "front")["paused"], false);
    round_trip(&mut connect(at), b"hello");
    proxies.stop();
}

/// It accepts again after a restart: a pause ends with the program.
#[test]
fn it_ends_with_the_program() {
    let mut site = Site::new();
    site.proxy.client(&["pause", "front", "back"]);
    site.proxy.client(&["stop"]);
    assert!(site.proxy.wait().success());
    let file = site.dir.path().join("longsplice.toml");
    let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
    site.proxy = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    round_trip(&mut connect(site.at("front")), b"hello");
}

/// A listener that waits for descriptors is paused like any other.
#[test]
fn a_listener_without_descriptors_is_paused() {
    let mut few = Command::new("prlimit");
    few.args(["--nofile=64", LONGSPLICE]);
    let site = Site::by(few);
    let at = site.at("front");
    let send = || {
        let mut client = connect(at);
        client.write_all(b"hello").unwrap();
        client
    };
    let mut clients = Vec::new();
    eventually("no descriptors", || {
        clients.push(send());
        (site.proxy.count("proxy", "accept_errors") > 0).then_some(())
    });
    assert_eq!(site.proxy.client(&["pause", "front"]), "paused front\n");
    let served = site.of("front")["begun"].as_u64().unwrap() as usize;
    let waiting = clients.split_off(served);
    assert!(!waiting.is_empty(), "{served} are served");
    drop(clients);
    eventually("the end of those that were served", || (site.of("front")["live"] == 0).then_some(()));
    round_trip(&mut connect(site.at("back")), b"other");
    assert_eq!(site.of("front")["begun"], served);
    site.proxy.client(&["resume", "front"]);
    for mut client in waiting {
        let mut back = [0; 5];
        client.read_exact(&mut back).unwrap();
    }
}

/// Spliced connections go on, and clients that have waited are spliced; listeners that cannot let clients wait say so.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn spliced_connections_go_on(family: Family) {
    let [front_port, plain_port, direct_port, routed_port, any_port] = [7000, 7001, 7002, 7003, 7004];
    let target = SERVER.port(family, front_port);
    let any = |port: u16| if family == Family::V4 { format!("0.0.0.0:{port}") } else { format!("[::]:{port}") };
    let at = |port: u16| FORWARDER_TO_CLIENT.port(family, port).to_string();
    let plug =
        |name: &str, at: &str, more: &str| listener("plug", at, &format!("name = \"{name}\"\n{AT_ONCE}\n{more}"));
    let to = format!("target = \"{target}\"");
    let setting = Setting::new(
        &(plug("front", &at(front_port), &to)
            + &plug("plain", &at(plain_port), &to)
            + &plug("direct", &at(direct_port), &format!("{to}\nhandshake = \"end-to-end\""))
            + &plug("routed", &any(routed_port), "transparent = true")
            + &listener("transparent", &any(any_port), "name = \"any\"")),
    );
    setting.echo(target);
    let mut proxy = setting.start();
    let mut live = setting.connect(FORWARDER_TO_CLIENT.port(family, front_port));
    round_trip(&mut live, &[7; 1000]);
    proxy.wait_flow("spliced");
    for (name, why) in
        [("direct", "shake hands with the target"), ("routed", "routed through"), ("any", "routed through")]
    {
        let said = proxy.client_error(&["pause", "front", name]);
        assert!(said.contains(&format!("{name} cannot be paused")) && said.contains(why), "{said}");
        assert_eq!(proxy.client(&["resume", name]), format!("{name} was not paused\n"));
    }
    assert_eq!(of(&proxy, "front")["paused"], false, "nothing has happened");
    proxy.client(&["pause", "front"]);
    let mut waiting = setting.connect(FORWARDER_TO_CLIENT.port(family, front_port));
    waiting.write_all(b"hello").unwrap();
    let mut plain = setting.connect(FORWARDER_TO_CLIENT.port(family, plain_port));
    [&mut live, &mut plain].into_iter().for_each(|client| round_trip(client, &[8; 100_000]));
    assert_eq!(of(&proxy, "front")["begun"], 1);
    proxy.client(&["resume", "front"]);
    let mut back = [0; 5];
    waiting.read_exact(&mut back).unwrap();
    eventually("all three are spliced", || (proxy.flows_in("spliced") == 3).then_some(()));
    round_trip(&mut waiting, &[9; 100_000]);
    drop((live, plain, waiting));
    proxy.stop(&setting.pins[0]);
}
