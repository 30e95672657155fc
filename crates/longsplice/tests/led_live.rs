//! Connections that rules lead, while they live: what a reload says of them that judges them again, and what another process knows
//! that takes them over. Needs root and eBPF, and fails without.

use crate::{
    led::{SERVERS, WAY, ask, at, led, of, ours, servers, there},
    running::{AT_ONCE, Running, Setting, eventually, longsplice, round_trip},
    upstream::{PORT, SECRET, UPSTREAM, knowing},
};
use longsplice_lab::{
    Family,
    topology::{SERVER, SERVER_SECOND},
};
use serde_json::Value;
use std::io::{ErrorKind, Read};
use test_case::test_case;

const COPIED: &str = "policy = { splice = \"never\" }";

/// Rules by address find a target that is led by its address; a reload that judges live connections again knows that address, and
/// not that of the proxy.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_reload_judges_what_is_led(family: Family) {
    let ip = SERVER.ip(family);
    let by = |first: &str| {
        format!(
            "{first}{{ action = \"allow\", target = \"db.internal\", pool = \"db\" }},
             {{ action = \"allow\", target = \"{ip}\", ports = {PORT}, upstream = \"up\" }},
             {{ action = \"deny\" }},"
        )
    };
    let configured = |first: &str| led("socks5", family, &by(first), "");
    let setting = Setting::new(&configured(""));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let mut proxy = setting.start();
    servers(&setting, family);
    setting.echo(SERVER.port(family, PORT));
    let mut streams = ["db.internal:1", &at(family, PORT)].map(|target| ask(&setting, "socks5", family, target).0);
    streams.iter_mut().for_each(|stream| round_trip(stream, &[1; 10_000]));
    eventually("both are spliced", || (proxy.flows_in("spliced") == 2).then_some(()));
    assert_eq!(proxy.client(&["reload", "--enforce"]), "reset 0\n");
    streams.iter_mut().for_each(|stream| round_trip(stream, &[2; 10_000]));
    // the address of the proxy and of servers is no target of theirs
    setting.configure(&configured(&format!("{{ action = \"deny\", target = \"{}\" }},", SERVER_SECOND.ip(family))));
    assert_eq!(proxy.client(&["reload", "--enforce"]), "reset 0\n");
    // mistakes change nothing
    for (was, is, place) in
        [("pool = \"db\"", "pool = \"bd\"", "there is no pool \"bd\""), ("[pool.db]", "[pool.bd]", "")]
    {
        setting.configure(&configured("").replace(was, is));
        let error = proxy.client_error(&["reload"]);
        let place = if place.is_empty() { "there is no pool \"db\"" } else { place };
        assert!(error.contains("longsplice.toml:") && error.contains(place), "{error}");
    }
    streams.iter_mut().for_each(|stream| round_trip(stream, &[3; 10_000]));
    // where rules lead elsewhere now, connections stay
    let elsewhere =
        configured("").replace("pool = \"db\" }", "upstream = \"up\" }").replace("[pool.db]", "[pool.other]");
    setting.configure(&elsewhere);
    assert_eq!(proxy.client(&["reload", "--enforce"]), "reset 0\n");
    streams.iter_mut().for_each(|stream| round_trip(stream, &[4; 10_000]));
    setting.configure(&configured("{ action = \"deny\", target = \"db.internal\" },"));
    assert_eq!(proxy.client(&["reload", "--enforce"]), "reset 1\n");
    assert_eq!(streams[0].read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    round_trip(&mut streams[1], &[5; 10_000]);
    setting.configure(&configured(&format!("{{ action = \"deny\", target = \"{ip}\", ports = {PORT} }},")));
    assert_eq!(proxy.client(&["reload", "--enforce"]), "reset 1\n");
    assert_eq!(streams[1].read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    upstream.stop(&pins);
    proxy.stop(&setting.pins[0]);
}

/// What another process takes over goes on with its place at the server, and with its line.
#[test_case(Family::V4, AT_ONCE; "v4 spliced")]
#[test_case(Family::V6, COPIED; "v6 copied")]
#[ignore = "root"]
fn an_upgrade_keeps_what_is_led(family: Family, policy: &str) {
    let ip = SERVER.ip(family);
    let rules = format!(
        "{{ action = \"allow\", target = \"db.internal\", pool = \"db\" }},
         {{ action = \"allow\", target = \"{ip}\", ports = {PORT}, upstream = \"up\" }}, {{ action = \"deny\" }}"
    );
    let setting = Setting::new(&led("socks5", family, &rules, "").replace(AT_ONCE, policy));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let proxy = setting.start();
    servers(&setting, family);
    setting.echo(SERVER.port(family, PORT));
    let mut streams = ["db.internal:1", &at(family, PORT)].map(|target| ask(&setting, "socks5", family, target).0);
    streams.iter_mut().for_each(|stream| round_trip(stream, &[1; 10_000]));
    upgrade(&proxy, policy, 2);
    streams.iter_mut().for_each(|stream| round_trip(stream, &[2; 300_000]));
    let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
    let connections = |n: usize| pools[0]["members"][n]["connections"].as_u64().unwrap();
    assert_eq!([connections(0), connections(1), connections(2)], [0, 1, 0], "{pools}");
    drop(streams);
    let records = eventually("both lines", || {
        let records = proxy.records();
        Some(records).filter(|all| all.iter().filter(|record| record["how"] == "closed").count() == 2)
    });
    let first = there(family, SERVERS[1]);
    for record in records.iter().filter(|record| record["how"] == "closed") {
        let want = match record["pool"].as_str() {
            Some(_) => ["db.internal:1", &first, "-", "db", &first],
            None => [&*at(family, PORT), &there(family, UPSTREAM), "up", "-", "-"],
        };
        assert_eq!(of(record, WAY), want, "{record}");
        assert_eq!(record["processes"], 2, "{record}");
    }
    upstream.stop(&pins);
    let stop = longsplice(&["stop", "--flush", "--control", proxy.control().to_str().unwrap()]);
    assert!(stop.status.success(), "{stop:?}");
}

/// Hands all flows over to another process, of which there are so many, with this policy.
fn upgrade(proxy: &Running, policy: &str, flows: usize) {
    let (state, want) = match policy {
        COPIED => ("copying", format!("not spliced, and handed over: {flows}\n")),
        _ => ("spliced", format!("spliced, and handed over: {flows}\n")),
    };
    eventually(state, || (proxy.flows_in(state) == flows).then_some(()));
    let said = proxy.client(&["upgrade"]);
    assert!(said.contains(&want), "{said}");
}

/// Whichever way a connection goes, rules by address judge its target, and never the proxy or the server of a pool; another process
/// that goes on with it knows as much.
#[test_case(Family::V4, AT_ONCE, false; "v4 spliced")]
#[test_case(Family::V6, COPIED, false; "v6 copied")]
#[test_case(Family::V6, AT_ONCE, true; "v6 spliced, by another process")]
#[test_case(Family::V4, COPIED, true; "v4 copied, by another process")]
#[ignore = "root"]
fn live_connections_are_judged_as_they_were_led(family: Family, policy: &str, by_another: bool) {
    let ip = SERVER.ip(family);
    // of these names, two are known to the forwarder, and one to the proxy
    let [in_pool, straight, near, by_address, far] = [
        "db.internal:1",
        &format!("straight.here:{PORT}"),
        &format!("near.here:{PORT}"),
        &at(family, PORT),
        &format!("only.there:{PORT}"),
    ]
    .map(str::to_owned);
    let configured = |first: &str| {
        let rules = format!(
            "{first}{{ action = \"allow\", target = \"db.internal\", pool = \"db\" }},
             {{ action = \"allow\", target = \"straight.here\", upstream = false }},
             {{ action = \"allow\", target = \"near.here\", upstream = \"near\" }},
             {{ action = \"allow\", target = \"{ip}\" }},
             {{ action = \"allow\", target = \"only.there\" }},
             {{ action = \"deny\" }},"
        );
        let near = format!(
            "[upstream.near]\nprotocol = \"socks5\"\nservers = \"{}\"\n{SECRET}\nresolve = true\n",
            there(family, UPSTREAM)
        );
        let own = led("socks5", family, &rules, "upstream = \"up\"\ncommands = \"connect\"");
        own.replace(AT_ONCE, policy) + &near
    };
    let setting = Setting::new(&configured(""));
    let (pins, mut upstream) = ours(&setting, "socks5");
    let command = knowing(&setting, &setting.lab.forwarder, &[ip], "straight.here near.here");
    let proxy = setting.start_by(command, &[]);
    servers(&setting, family);
    setting.echo(SERVER.port(family, PORT));
    let all = [&in_pool, &straight, &near, &by_address, &far];
    let mut streams = all.map(|target| {
        let (mut stream, code) = ask(&setting, "socks5", family, target);
        assert_eq!(code, 0, "{target}");
        round_trip(&mut stream, &[1; 10_000]);
        Some(stream)
    });
    let found: Vec<_> = proxy.flows().iter().map(|flow| flow["server"].as_str().unwrap().to_owned()).collect();
    let [first, up] = [SERVERS[1], UPSTREAM].map(|port| there(family, port));
    assert_eq!(
        found.iter().collect::<Vec<_>>(),
        [&first, &by_address, &up, &up, &up],
        "of those, only one is its target"
    );
    if by_another {
        upgrade(&proxy, policy, all.len());
    }
    let mut judged = |first: &str, are_there: [bool; 5]| {
        setting.configure(&configured(first));
        let said = proxy.client(&["reload", "--enforce"]);
        for ((is, target), is_there) in streams.iter_mut().zip(all).zip(are_there) {
            match (&mut *is, is_there) {
                (Some(stream), true) => round_trip(stream, &[2; 10_000]),
                (Some(stream), false) => {
                    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset, "{target}");
                    *is = None;
                }
                (None, is_there) => assert!(!is_there),
            }
        }
        said
    };
    let second = SERVER_SECOND.ip(family);
    assert_eq!(judged("", [true; 5]), "reset 0\n");
    assert_eq!(judged(&format!("{{ action = \"deny\", target = \"{second}\" }},"), [true; 5]), "reset 0\n");
    let by_target = format!("{{ action = \"deny\", target = \"{ip}\", ports = {PORT} }},");
    assert_eq!(judged(&by_target, [true, false, false, false, true]), "reset 3\n");
    let by_name = "{ action = \"deny\", target = [\"db.internal\", \"only.there\"] },";
    assert_eq!(judged(by_name, [false; 5]), "reset 2\n");
    let forbidden = || proxy.records().iter().filter(|record| record["how"] == "forbidden").count();
    eventually("all lines", || (forbidden() == all.len()).then_some(()));
    upstream.stop(&pins);
    let stop = longsplice(&["stop", "--flush", "--control", proxy.control().to_str().unwrap()]);
    assert!(stop.status.success(), "{stop:?}");
}
