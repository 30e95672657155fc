//! What subscribers hear of a running proxy: `longsplice events`.

use crate::running::{
    AT_ONCE, Control, LONGSPLICE, Running, Setting, connect, eventually, is_reset, listener, longsplice, loopback_echo,
    round_trip,
};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::{Shutdown, SocketAddr, TcpListener},
    process::{Child, ChildStdout, Command, Stdio},
};
use tempfile::TempDir;
use test_case::test_case;

const FRONT: u16 = 7000;
const BACK: u16 = 7001;
/// Most subscribers.
const MOST: usize = 16;

/// A subscriber at the control socket.
struct Heard(Control);

impl Heard {
    fn of(proxy: &Running, wanted: &Value) -> Heard {
        let mut control = Control::of(proxy);
        let mut request = json!({ "version": 1, "ask": "events" });
        request.as_object_mut().unwrap().extend(wanted.as_object().unwrap().clone());
        let begun = control.ask(&request).unwrap();
        assert_eq!((&begun["event"], &begun["process"]), (&"subscribed".into(), &proxy.id().into()), "{begun}");
        Heard(control)
    }

    fn all(proxy: &Running) -> Heard {
        Heard::of(proxy, &json!({}))
    }

    fn next(&mut self) -> Value {
        self.0.answer()
    }

    /// The next event of this kind. Others are passed over.
    fn next_of(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next();
            if event["event"] == kind {
                return event;
            }
        }
    }
}

/// The command, which is killed on drop.
struct Listening {
    command: Child,
    out: Option<BufReader<ChildStdout>>,
}

impl Listening {
    /// Waits until it has subscribed.
    fn to(proxy: &Running, options: &[&str]) -> Listening {
        let mut command = Command::new(LONGSPLICE);
        command.arg("events").args(options).arg("--control").arg(proxy.control());
        let mut command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = command.stdout.take().map(BufReader::new);
        let mut listening = Listening { command, out };
        assert_eq!(listening.next()["event"], "subscribed");
        listening
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.out.as_mut().unwrap().read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"))
    }

    /// Waits for the end. Returns whether it succeeded, and what it said.
    fn end(mut self) -> (bool, String) {
        let status = self.command.wait().unwrap();
        let mut said = String::new();
        self.command.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.success(), said)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.command.kill();
        let _ = self.command.wait();
    }
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event"].as_str().unwrap()).collect()
}

/// A plug.
fn plug(name: &str, family: Family, port: u16, more: &str) -> String {
    let (at, to) = (FORWARDER_TO_CLIENT.port(family, port), SERVER.port(family, port));
    listener("plug", &at.to_string(), &format!("name = \"{name}\"\ntarget = \"{to}\"\n{more}"))
}

#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_whole_life_is_told_in_order(family: Family) {
    let at_hand = "[listener.policy]\nsplice = 1000000000\nrelease_after = 1";
    let setting = Setting::new(&plug("front", family, FRONT, at_hand));
    let (at, server) = (FORWARDER_TO_CLIENT.port(family, FRONT), SERVER.port(family, FRONT));
    setting.echo(server);
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    let mut heard = Listening::to(&proxy, &[]);
    let mut client = setting.connect(at);
    round_trip(&mut client, &[7; 1000]);
    let number = proxy.wait_flow("copying")["id"].as_u64().unwrap();
    let id = number.to_string();
    eventually("the release", || {
        proxy.client(&["splice", &id]);
        (proxy.flow()["state"] == "released").then_some(())
    });
    round_trip(&mut client, &[7; 1000]);
    proxy.client(&["unsplice", &id]);
    proxy.wait_flow("copying");
    round_trip(&mut client, &[7; 1000]);
    client.shutdown(Shutdown::Both).unwrap();
    let mut life = Vec::new();
    while life.last().is_none_or(|event: &Value| event["event"] != "ended") {
        life.push(heard.next());
    }
    assert_eq!(names(&life), ["began", "spliced", "released", "taken-back", "ended"]);
    assert!(life.iter().all(|event| event["id"].as_u64() == Some(number) && event["name"] == "front"), "{life:?}");
    let times: Vec<&str> = life.iter().map(|event| event["time"].as_str().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    let began = &life[0];
    for (key, want) in [
        ("listener", "plug".to_owned()),
        ("listen", at.to_string()),
        ("client", client.local_addr().unwrap().to_string()),
        ("server", server.to_string()),
        ("target", server.to_string()),
    ] {
        assert_eq!(began[key], want, "{began}");
    }
    // the same as in the access log, whose time is that of the line
    let mut ended = life.pop().unwrap();
    let mut record = proxy.wait_record(&["closed"]);
    for of in [&mut ended, &mut record] {
        ["time", "event"].iter().for_each(|key| drop(of.as_object_mut().unwrap().remove(*key)));
    }
    assert_eq!(ended, record);
    assert_eq!((&ended["bytes_up"], &ended["splices"]), (&3000.into(), &1.into()), "{ended}");
    proxy.stop(&setting.pins[0]);
}

#[test]
#[ignore = "root"]
fn one_listener_is_heard_alone() {
    let deny = format!("{AT_ONCE}\nrules = [{{ action = \"deny\", ports = [{FRONT}] }}]");
    let closed = listener(
        "plug",
        &FORWARDER_TO_CLIENT.port(Family::V4, 7002).to_string(),
        &format!("name = \"closed\"\ntarget = \"{}\"\n{deny}", SERVER.port(Family::V4, FRONT),),
    );
    let setting =
        Setting::new(&(plug("front", Family::V4, FRONT, AT_ONCE) + &plug("back", Family::V6, BACK, AT_ONCE) + &closed));
    setting.echo(SERVER.port(Family::V4, FRONT));
    setting.echo(SERVER.port(Family::V6, BACK));
    let mut proxy = setting.start();
    let mut back = Heard::of(&proxy, &json!({ "listener": "back" }));
    let mut closed = Heard::of(&proxy, &json!({ "listener": "closed" }));
    let mut ends = Listening::to(&proxy, &["--kind", "ended,refused", "--listener", "front"]);
    let clients = [(Family::V4, FRONT), (Family::V6, BACK)].map(|(family, port)| {
        let mut client = setting.connect(FORWARDER_TO_CLIENT.port(family, port));
        round_trip(&mut client, &[7; 100]);
        client
    });
    let refused = FORWARDER_TO_CLIENT.port(Family::V4, 7002);
    assert!(setting.lab.client.run(|| is_reset(refused)));
    let of_back = ["began", "spliced"].map(|_| back.next());
    assert_eq!((names(&of_back), &of_back[0]["listener"]), (vec!["began", "spliced"], &"plug".into()));
    drop(clients);
    let ended = back.next_of("ended");
    assert_eq!((&ended["name"], &ended["how"]), (&"back".into(), &"closed".into()));
    let why = closed.next();
    assert_eq!(
        (&why["event"], &why["how"], &why["refusal"]),
        (&"refused".into(), &"denied".into(), &"rule 1".into()),
        "{why}"
    );
    let of_front = ends.next();
    assert_eq!((&of_front["event"], &of_front["name"]), (&"ended".into(), &"front".into()));
    proxy.stop(&setting.pins[0]);
    assert!(!ends.end().0, "it has ended with the proxy");
}

/// Connections that begin, exchange a byte, and end.
fn visit(at: SocketAddr, times: usize) {
    (0..times).for_each(|_| round_trip(&mut connect(at), b"x"));
}

#[test]
fn a_slow_reader_hears_what_it_has_missed_and_nobody_waits() {
    // each connection begins, is not spliced, and ends in both queues: more than these and the sockets hold
    const VISITS: usize = 4000;
    let proxy = Running::copying(&loopback_echo(), &[]);
    let (mut slow, mut never) = (Heard::all(&proxy), Heard::all(&proxy));
    visit(proxy.address(), VISITS);
    eventually("the end of all", || (proxy.log().lines().count() == VISITS && proxy.flows().is_empty()).then_some(()));
    let mut stopped = Heard::of(&proxy, &json!({ "kinds": ["member-up"] }));
    proxy.client_error(&["reload"]);
    let (mut told, mut missed) = (0, 0);
    loop {
        let event = slow.next();
        match event["event"].as_str().unwrap() {
            "reload-failed" => break,
            "missed" => missed += event["count"].as_u64().unwrap(),
            _ => told += 1,
        }
    }
    let visits = VISITS as u64;
    assert!(missed > 0 && (visits * 3..=visits * 4).contains(&(told + missed)), "{told} told, {missed} missed");
    // it is up to date again
    visit(proxy.address(), 1);
    assert_eq!(["began", "not-spliced", "ended"], *names(&[slow.next(), slow.next(), slow.next()]));
    // another one, who has not read yet, has no more of them than the queues and its socket hold
    let first = never.next_of("missed");
    assert!(first["count"].as_u64().unwrap() > 0, "{first}");
    // what was not wanted counts as heard
    proxy.client_error(&["reload"]);
    stopped.0.send("\n");
    assert!(stopped.next()["error"].is_string(), "a request ends the subscription");
}

#[test]
fn places_are_limited() {
    let proxy = Running::copying(&loopback_echo(), &[]);
    let mut all: Vec<Heard> = (1..MOST).map(|_| Heard::all(&proxy)).collect();
    let mut killed = Listening::to(&proxy, &[]);
    let said = proxy.client_error(&["events"]);
    assert!(said.contains("16 others listen to events already"), "{said}");
    // whoever is gone leaves a place, though nothing happens of which it could be told
    killed.command.kill().unwrap();
    let mut another = None;
    eventually("the place of the one that was killed", || {
        let mut control = Control::of(&proxy);
        let begun = control.ask(&json!({ "version": 1, "ask": "events" })).unwrap();
        another = begun["error"].is_null().then_some(Heard(control));
        another.as_ref().map(drop)
    });
    all.extend(another);
    visit(proxy.address(), 1);
    for heard in &mut all {
        assert_eq!(["began", "not-spliced", "ended"], *names(&[heard.next(), heard.next(), heard.next()]));
    }
}

/// A proxy that copies, with a configuration that can change.
struct Configured {
    proxy: Running,
    dir: TempDir,
}

impl Configured {
    fn start(configuration: &str) -> Configured {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        fs::write(&file, configuration).unwrap();
        let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
        Configured { proxy: Running::start(Command::new(LONGSPLICE), None, &arguments, &[]), dir }
    }

    fn configure(&self, configuration: &str) {
        fs::write(self.dir.path().join("longsplice.toml"), configuration).unwrap();
    }
}

#[test]
fn servers_of_pools_go_and_come() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = socket.local_addr().unwrap();
    let check = "check = { interval = 0.1, fall = 1, rise = 1 }";
    let pool = format!("pool = \"db\"\n[pool.db]\nservers = [\"{server}\"]\n{check}");
    let proxy = Configured::start(&listener("plug", "127.0.0.1:0", &pool)).proxy;
    let mut heard = Heard::all(&proxy);
    drop(socket);
    let down = heard.next();
    assert_eq!(
        (&down["event"], &down["pool"], &down["member"]),
        (&"member-down".into(), &"db".into(), &server.to_string().into())
    );
    assert!(down["why"].as_str().unwrap().contains("refused"), "{down}");
    let _socket = TcpListener::bind(server).unwrap();
    assert_eq!(heard.next()["event"], "member-up");
    let member = format!("db/{server}");
    proxy.client(&["drain", &member]);
    proxy.client(&["undrain", &member]);
    let told = [heard.next(), heard.next()];
    assert_eq!(names(&told), ["member-drained", "member-undrained"]);
    assert_eq!(told[0]["member"], server.to_string());
}

#[test]
fn reloads_are_told() {
    let of = |names: &[&str]| -> String {
        names
            .iter()
            .map(|name| listener("plug", "127.0.0.1:0", &format!("name = \"{name}\"\ntarget = \"127.0.0.1:9\"")))
            .collect()
    };
    let configured = Configured::start(&of(&["front"]));
    let proxy = &configured.proxy;
    let mut heard = Heard::of(proxy, &json!({ "listener": "front", "kinds": ["reloaded", "reload-failed"] }));
    configured.configure(&of(&["front", "back"]));
    proxy.client(&["reload"]);
    let reloaded = heard.next();
    assert_eq!((&reloaded["event"], &reloaded["added"]), (&"reloaded".into(), &json!(["back"])));
    configured.configure("listener = 7");
    proxy.client_error(&["reload"]);
    let failed = heard.next();
    assert!(
        failed["event"] == "reload-failed" && failed["why"].as_str().unwrap().contains("expected a list"),
        "{failed}"
    );
}

#[test]
fn the_command_ends_with_the_proxy_or_its_reader() {
    let mut proxy = Running::copying(&loopback_echo(), &[]);
    let (mut gone, mut stays) = (Listening::to(&proxy, &[]), Listening::to(&proxy, &[]));
    gone.out = None;
    let mut client = connect(proxy.address());
    round_trip(&mut client, b"x");
    assert_eq!(gone.end(), (true, String::new()), "as in `longsplice events | head`");
    proxy.shut_down();
    let told = [stays.next(), stays.next(), stays.next()];
    assert_eq!(names(&told), ["began", "not-spliced", "ended"]);
    assert_eq!(told[2]["how"], "stopped");
    let (ended_well, said) = stays.end();
    assert!(!ended_well && said.contains("the proxy has ended"), "{said}");
}

#[test]
fn kinds_are_names() {
    let out = longsplice(&["events", "--kind", "began,dance"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success() && said.contains("dance") && said.contains("`taken-back`"), "{said}");
}
