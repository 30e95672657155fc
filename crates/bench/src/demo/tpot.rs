//! `longsplice-bench demo tpot`: a download whose host asks for proxies, through a chain of two. The route changes half way, and
//! one of the proxies goes.

use super::{
    Story,
    stage::{Download, Result, make_file, start_nginx},
};
use crate::bench::{
    network::START,
    variant::Variant,
    venue::{Venue, longsplice, output},
};
use longsplice_lab::{Family, Lab, Options, Shape, topology};
use nix::sys::signal::Signal;
use std::{path::Path, time::Duration};

/// File size, and the bytes per second that nginx sends: the download takes eight seconds.
const SIZE: u64 = 256 << 20;
const RATE: u64 = 32 << 20;
const LOOK: Duration = Duration::from_millis(50);

/// The configuration of both proxies.
const CONFIG: &str = "leave_flows_on_stop = true\n\n[[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n\
                      policy = { splice = \"at-once\", path = \"any\" }\n\n\
                      [tpot]\nproxies = \"10.77.0.0/16\"\nports = 80\n";

/// Runs the demo.
pub fn tell(story: &Story, _: &Path) -> Result<()> {
    println!("client ──── first proxy ──── second proxy ──── server   (four network namespaces)");
    println!("   └───────────────── another path ───────────────┘\n");
    println!("making a file of {} and its SHA-256 ...", ::longsplice::bytes(SIZE));
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() })?;
    let mut venue = Venue::new(Variant::TpotTwoSpliced, lab)?;
    let digest = make_file(&venue.path("file"), SIZE)?;
    let (client, server) = (venue.lab.client.clone(), venue.lab.server.clone());
    let (first, second) = (venue.lab.forwarder.clone(), venue.lab.second.clone().ok_or("no second forwarder")?);
    let (own, to) = (topology::CLIENT.v4, topology::SERVER.v4);
    client.ip(&format!("link add c1 netns {} type veth peer name s1 netns {}\n", client.name(), server.name()))?;
    client.ip("addr add 10.77.9.1/24 dev c1\nlink set c1 up\n")?;
    server.ip("addr add 10.77.9.2/24 dev s1\nlink set s1 up\n")?;
    start_nginx(&mut venue, RATE)?;
    venue.longsplice(&first, "first", CONFIG, &[])?;
    venue.longsplice(&second, "second", CONFIG, &[])?;
    let ask = ["--port", "80", "--proxy", "10.77.0.0/16"];
    venue.host(&ask)?;
    story.say("first and second proxy: longsplice run, with a listener of protocol = \"tpot\" and a table [tpot]");
    story.say(&format!("client: longsplice tpot host {}", ask.join(" ")));

    let at = topology::SERVER.port(Family::V4, 80);
    let url = format!("http://{at}/file");
    let mut download = Download::start(&venue.lab, &[&url])?;
    story.say(&format!("client: curl {url} | sha256sum"));
    for (name, at) in [("first", &first), ("second", &second)] {
        story.wait("a splice", LOOK, || Ok(venue.ask(at, name, &["ls"])?.contains("spliced").then_some(())))?;
        story.say(&format!("{name} proxy: intercepted and spliced; segments pass without it"));
    }
    for (name, at) in [("client", &client), ("first", &first), ("second", &second)] {
        for line in output(longsplice(at, None)?.args(["tpot", "ls"]))?.lines() {
            story.say(&format!("{name}: {line}"));
        }
    }
    story.pause(Duration::from_secs(1))?;

    server.ip(&format!("route add {own} via 10.77.9.1\n"))?;
    client.ip(&format!("route add {to} via 10.77.9.2 src {own}\n"))?;
    let half = download.received();
    story.say(&format!("the route to the server changes: the other path. {} have arrived", ::longsplice::bytes(half)));
    let seen = |venue: &Venue| -> Result<u64> {
        let counters: serde_json::Value =
            serde_json::from_str(&venue.ask(&first, "first", &["counters", "--json"])?)?;
        Ok(counters["tpot"]["intercepted"].as_u64().unwrap_or(0))
    };
    let before = seen(&venue)?;
    output(client.command("curl").args(["-sS", "-r", "0-99", "-o", "/dev/null", &url]))?;
    if seen(&venue)? != before {
        return Err("the new connection has met the first proxy, on a path that does not lead there".into());
    }
    story.say("a new connection takes the other path and meets nobody; the download stays with its proxies");
    client.ip(&format!("route del {to}\n"))?;
    server.ip(&format!("route del {own}\n"))?;

    venue.ask(&second, "second", &["stop"])?;
    venue.program()?.wait(START).ok_or("the second proxy does not stop")?;
    output(client.command("curl").args(["-sS", "-r", "0-99", "-o", "/dev/null", &url]))?;
    if seen(&venue)? != before + 1 {
        return Err("the new connection has not met the first proxy".into());
    }
    story.say("the second proxy is stopped: a new connection meets the first one only; the download goes on");

    story.wait("the end of the download", LOOK, || Ok(download.ended().then_some(())))?;
    let got = download.digest()?;
    if got != digest {
        return Err(format!("the file has SHA-256 {got}, and was served with {digest}").into());
    }
    story.say(&format!("complete: {}, SHA-256 {} as served", ::longsplice::bytes(SIZE), super::short(&digest)));
    let host = venue.asking()?;
    host.signal(Signal::SIGTERM)?;
    host.wait(START).ok_or("longsplice tpot host does not stop")?;
    venue.ask(&first, "first", &["stop", "--flush"]).map(drop)
}
