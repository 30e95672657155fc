//! Flows whose process has died, or has left them: the next one takes them up. Needs root and eBPF, and fails without.

use crate::running::{AT_ONCE, Running, Setting, eventually, listener, round_trip};
use longsplice_lab::{
    Family,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::{
    libc,
    sys::{
        signal::Signal,
        socket::{
            setsockopt,
            sockopt::{Linger, RcvBuf},
        },
    },
};
use serde_json::Value;
use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
};
use test_case::test_case;

const PORT: u16 = 7001;

/// A plug to an echo server, with this policy, and further keys.
fn plug(family: Family, policy: &str, more: &str) -> String {
    let at_once = AT_ONCE.replace(" }", policy) + " }";
    let target = format!("target = \"{}\"\nname = \"echo\"\n{at_once}\n{more}", SERVER.port(family, PORT));
    format!("[log]\nformat = \"json\"\n\n{}", listener("plug", &front(family), &target))
}

fn front(family: Family) -> String {
    FORWARDER_TO_CLIENT.port(family, PORT).to_string()
}

fn setting(family: Family, policy: &str, more: &str) -> Setting {
    let setting = Setting::new(&plug(family, policy, more));
    setting.echo(SERVER.port(family, PORT));
    setting
}

/// A spliced connection that has carried so many bytes each way.
fn spliced(setting: &Setting, proxy: &Running, family: Family, bytes: usize) -> TcpStream {
    let before = proxy.flows().len();
    let mut stream = setting.connect(FORWARDER_TO_CLIENT.port(family, PORT));
    round_trip(&mut stream, &[1]);
    eventually("it is spliced", || {
        let flows = proxy.flows();
        (flows.len() > before && flows.iter().all(|f| f["state"] != "copying")).then_some(())
    });
    round_trip(&mut stream, &vec![2; bytes - 1]);
    stream
}

/// The line of a client, once there is one.
fn line(proxy: &Running, client: &str) -> Value {
    eventually("a line", || proxy.records().into_iter().find(|line| line["client"] == client))
}

/// The line has all that is known of the connection, and all bytes, of which one was copied at most.
fn assert_line(line: &Value, family: Family, how: &str, (bytes, processes): (u64, u64)) {
    let server = SERVER.port(family, PORT).to_string();
    let texts = ["listener", "name", "listen", "how", "server", "target"].map(|key| line[key].as_str().unwrap());
    assert_eq!(texts, ["plug", "echo", &front(family), how, &server, &server], "{line}");
    let numbers = ["bytes_up", "bytes_down"].map(|key| line[key].as_u64().unwrap());
    assert_eq!(numbers, [bytes; 2], "{line}");
    let spliced = ["spliced_up", "spliced_down"].map(|key| bytes - line[key].as_u64().unwrap());
    assert!(spliced.iter().all(|copied| *copied <= 1), "{line}");
    assert_eq!(line["processes"].as_u64().unwrap_or(1), processes, "{line}");
}

#[test_case(Family::V4, ""; "parked v4")]
#[test_case(Family::V6, ", release_after = 0.1"; "released v6")]
#[ignore = "root"]
fn the_next_process_takes_up_what_outlived_the_last(family: Family, policy: &str) {
    let setting = setting(family, policy, "");
    let mut first = setting.start();
    let [mut ends, mut stays] = [0, 1].map(|_| spliced(&setting, &first, family, 100_000));
    let clients = [&ends, &stays].map(|stream| stream.local_addr().unwrap().to_string());
    let numbers = |proxy: &Running| proxy.flows().iter().map(|flow| flow["id"].as_u64()).collect::<Vec<_>>();
    let state = if policy.is_empty() { "spliced" } else { "released" };
    eventually(state, || (first.flows_in(state) == 2).then_some(()));
    let before = numbers(&first);
    first.kill();
    let mut second = setting.start();
    assert_eq!(numbers(&second), before, "their numbers");
    for flow in second.flows() {
        assert_eq!((&flow["protocol"], &flow["name"], &flow["processes"]), (&"plug".into(), &"echo".into(), &2.into()));
        assert_eq!([&flow["bytes_up"], &flow["bytes_down"]], [&Value::from(100_000); 2], "{flow}");
    }
    round_trip(&mut ends, &[3; 50_000]);
    drop(ends);
    assert_line(&line(&second, &clients[0]), family, "closed", (150_000, 2));
    let id = second.flow()["id"].to_string();
    second.client(&["inspect", &id]);
    // it is as any other: taken back, copied, spliced
    for (command, state) in [("unsplice", "copying"), ("splice", "spliced")] {
        round_trip(&mut stays, &[3; 30_000]);
        second.client(&[command, &id]);
        second.wait_flow(state);
        round_trip(&mut stays, &[3; 5_000]);
    }
    second.shut_down();
    let last = line(&second, &clients[1]);
    assert_eq!(
        (&last["how"], &last["bytes_up"], &last["bytes_down"]),
        (&"stopped".into(), &170_000.into(), &170_000.into())
    );
    assert_eq!((&last["splices"], &last["processes"]), (&2.into(), &2.into()), "{last}");
    assert_eq!(second.records().len(), 2, "each once");
    assert!(!setting.pins[0].exist());
}

/// A flow that is left by two processes has three lines, of which the last has all bytes.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_flow_that_is_left_is_recorded_by_each(family: Family) {
    let setting = setting(family, "", "");
    let mut first = setting.start_with(&["--leave-flows"]);
    let mut stream = spliced(&setting, &first, family, 100_000);
    let client = stream.local_addr().unwrap().to_string();
    let mut leave = |proxy: &mut Running| {
        proxy.signal(Signal::SIGTERM);
        assert!(proxy.wait().success(), "{}", proxy.messages());
        round_trip(&mut stream, &[4; 10_000]);
    };
    leave(&mut first);
    assert_line(&line(&first, &client), family, "left", (100_000, 1));
    let mut second = setting.start_with(&["--leave-flows"]);
    leave(&mut second);
    assert_line(&line(&second, &client), family, "left", (110_000, 2));
    let mut third = setting.start();
    round_trip(&mut stream, &[5; 20_000]);
    drop(stream);
    assert_line(&line(&third, &client), family, "closed", (140_000, 3));
    third.stop(&setting.pins[0]);
    assert_eq!(third.records().len(), 1);
}

/// Its end is recorded by the next process, with all bytes.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_ends_while_no_process_runs_has_a_line(family: Family) {
    let setting = setting(family, "", "");
    let mut first = setting.start();
    let [mut ends, mut is_reset] = [0, 1].map(|_| spliced(&setting, &first, family, 100_000));
    let clients = [&ends, &is_reset].map(|stream| stream.local_addr().unwrap().to_string());
    first.kill();
    round_trip(&mut ends, &[3; 50_000]);
    ends.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ends.read(&mut [0]).unwrap(), 0, "the server has closed, too");
    round_trip(&mut is_reset, &[3; 20_000]);
    setsockopt(&is_reset, Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
    drop(is_reset);
    eventually("the reset has arrived", || {
        let open = setting.lab.server.execute("ss", &["-tnH", "state", "established"]).unwrap();
        open.is_empty().then_some(())
    });
    let mut second = setting.start();
    assert_line(&line(&second, &clients[0]), family, "closed", (150_000, 2));
    assert_line(&line(&second, &clients[1]), family, "client-reset", (120_000, 2));
    second.stop(&setting.pins[0]);
    assert_eq!(second.records().len(), 2);
}

/// The pool of its server counts it, and its line says what it was for, as if one process had had it all the time.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn what_a_connection_was_charged_with_is_known(family: Family) {
    const WEB: u16 = 7002;
    let (server, web) = (SERVER.port(family, PORT), FORWARDER_TO_CLIENT.port(family, WEB));
    let to_pool = plug(family, "", "").replace(&format!("target = \"{server}\""), "pool = \"servers\"");
    let rules = format!("rules = [{{ action = \"allow\", target = \"{}\" }}]\n{AT_ONCE}", server.ip());
    let pool = format!("[pool.servers]\nservers = [\"{server}\"]\n");
    let setting = Setting::new(&(to_pool + &listener("http", &web.to_string(), &rules) + &pool));
    setting.echo(server);
    let mut first = setting.start();
    let mut of_pool = spliced(&setting, &first, family, 1000);
    let mut asked = setting.connect(web);
    asked.write_all(format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n\r\n").as_bytes()).unwrap();
    let mut head = [0; 39];
    asked.read_exact(&mut head).unwrap();
    assert!(head.starts_with(b"HTTP/1.1 200") && head.ends_with(b"\r\n\r\n"), "{}", String::from_utf8_lossy(&head));
    round_trip(&mut asked, &[1; 1000]);
    eventually("both are spliced", || (first.flows_in("copying") == 0).then_some(()));
    let clients = [&of_pool, &asked].map(|stream| stream.local_addr().unwrap().to_string());
    first.kill();
    let mut second = setting.start();
    [&mut of_pool, &mut asked].into_iter().for_each(|stream| round_trip(stream, &[3; 1000]));
    let active = |proxy: &Running| -> Value {
        let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
        pools[0]["members"][0]["connections"].clone()
    };
    assert_eq!(active(&second), 1, "{}", second.client(&["pools", "--json"]));
    second.client(&["kill", "--member", &format!("servers/{server}")]);
    assert_eq!(of_pool.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    drop(asked);
    let [of_pool, asked] = clients.map(|client| line(&second, &client));
    assert_eq!((&of_pool["pool"], &of_pool["member"]), (&"servers".into(), &server.to_string().into()), "{of_pool}");
    assert_eq!((&asked["method"], &asked["status"]), (&"CONNECT".into(), &200.into()), "{asked}");
    for line in [&of_pool, &asked] {
        assert!(line["connect_ms"].is_u64() && line["processes"] == 2, "{line}");
    }
    eventually("its server is free", || (active(&second) == 0).then_some(()));
    second.stop(&setting.pins[0]);
}

/// The process dies in the drain before the splice. What its sockets hold, the kernel sends; then the flow is forwarded. If that
/// cannot be, because what the process had read is lost, its hosts are reset. It has one line in any case, whoever starts when.
#[test_case(Family::V4, 8000; "sent v4")]
#[test_case(Family::V6, 8000; "sent v6")]
#[test_case(Family::V4, 20_000_000; "lost v4")]
#[test_case(Family::V6, 20_000_000; "lost v6")]
#[ignore = "root"]
fn a_drain_that_outlives_its_process_has_one_line(family: Family, size: usize) {
    let setting =
        Setting::new(&plug(family, "", "").replace(AT_ONCE, "policy = { splice = 100000000, path = \"any\" }"));
    let servers = setting.listen(SERVER.port(family, PORT));
    setsockopt(&servers, RcvBuf, &2000).unwrap();
    let mut first = setting.start();
    let mut client = setting.connect(FORWARDER_TO_CLIENT.port(family, PORT));
    let (mut server, address) = (servers.accept().unwrap().0, client.local_addr().unwrap().to_string());
    // more than it has room for
    let mut sent = 0;
    client.set_nonblocking(true).unwrap();
    eventually("it is sent, or nobody has room", || {
        let before = sent;
        while let Ok(n) = client.write(&[7; 4000][..4000.min(size - sent)]) {
            sent += n;
            if n == 0 {
                return Some(());
            }
        }
        (before == sent).then_some(())
    });
    client.set_nonblocking(false).unwrap();
    let is_lost = size > 1_000_000;
    eventually("it is copied", || (is_lost || first.flow()["bytes_up"] == size).then_some(()));
    let id = first.flow()["id"].to_string();
    first.client(&["splice", &id]);
    first.wait_flow("draining");
    first.kill();
    let mut second = setting.start();
    if is_lost {
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    } else {
        let flow = second.flow();
        assert_eq!((&flow["protocol"], &flow["name"], &flow["processes"]), (&"plug".into(), &"echo".into(), &2.into()));
        let mut all = vec![0; size];
        server.read_exact(&mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 7));
        round_trip_with(&mut client, &mut server);
        drop((client, server));
    }
    let end = line(&second, &address);
    let has = ["listener", "name", "how"].map(|key| end[key].as_str().unwrap().to_owned());
    assert_eq!(has, ["plug", "echo", if is_lost { "lost" } else { "closed" }], "{end}");
    let bytes = if is_lost { end["bytes_up"].as_u64().unwrap() } else { size as u64 + 1000 };
    assert_eq!((&end["bytes_up"], &end["processes"]), (&bytes.into(), &2.into()), "{end}");
    // the entries are still there
    second.kill();
    let mut third = setting.start();
    eventually("it has looked", || third.flows().is_empty().then_some(()));
    third.stop(&setting.pins[0]);
    assert!(third.records().is_empty(), "{:#?}", third.records());
}

/// A kilobyte from the one to the other, and back.
fn round_trip_with(client: &mut TcpStream, server: &mut TcpStream) {
    let mut got = [0; 1000];
    client.write_all(&[5; 1000]).unwrap();
    server.read_exact(&mut got).unwrap();
    server.write_all(&[6; 1000]).unwrap();
    client.read_exact(&mut got).unwrap();
    assert_eq!(got, [6; 1000]);
}

/// The limits of the listener apply, and commands reach it by what is known of it.
#[test]
#[ignore = "root"]
fn policy_and_commands_reach_it() {
    let family = Family::V6;
    let setting = setting(family, ", idle_limit = 2", "");
    let mut first = setting.start();
    let mut idle = spliced(&setting, &first, family, 1000);
    let client = idle.local_addr().unwrap().to_string();
    first.kill();
    let mut second = setting.start();
    assert_eq!(idle.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_line(&line(&second, &client), family, "idle", (1000, 2));
    second.stop(&setting.pins[0]);

    setting.configure(&plug(family, "", ""));
    let mut first = setting.start();
    let mut killed = spliced(&setting, &first, family, 1000);
    first.kill();
    let mut second = setting.start();
    second.client(&["kill", "--listener", "echo"]);
    assert_eq!(killed.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    second.flows_end();
    second.stop(&setting.pins[0]);
}

/// Its listener is gone, or waits for data, for which it needs the sockets that died: it is listed as what it is, can be reset, and
/// takes no other command.
#[test_case(Family::V4, ""; "v4")]
#[test_case(Family::V6, "trigger = [{ data = \"client\", then = \"copy\" }]"; "v6")]
#[ignore = "root"]
fn what_nobody_takes_up_goes_on(family: Family, more: &str) {
    let setting = setting(family, "", more);
    let mut first = setting.start();
    let mut stream = setting.connect(FORWARDER_TO_CLIENT.port(family, PORT));
    first.wait_flow("spliced"); // before its data, which may come before or after the splice
    let client = stream.local_addr().unwrap().to_string();
    first.kill();
    if more.is_empty() {
        setting.configure(&plug(family, "", "").replace("\"echo\"", "\"other\""));
    }
    let mut second = setting.start();
    let flow = second.flow();
    assert_eq!((&flow["protocol"], &flow["name"], &flow["processes"]), (&"plug".into(), &"echo".into(), &2.into()));
    let id = flow["id"].to_string();
    for command in ["splice", "unsplice"] {
        let why = second.client_error(&[command, &id]);
        assert!(why.contains(&format!("flow {id} is of an earlier process")), "{why}");
    }
    second.client(&["kill", &id]);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let line = line(&second, &client);
    let texts = ["listener", "name", "how"].map(|key| line[key].as_str().unwrap());
    assert_eq!(texts, [if more.is_empty() { "recovered" } else { "plug" }, "echo", "stopped"], "{line}");
    second.flows_end();
    second.stop(&setting.pins[0]);
}
