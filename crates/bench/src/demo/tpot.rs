//! `longsplice-bench demo tpot`: a download whose host asks for proxies, through a chain of two. The route changes half way, and
//! one of the proxies goes.

use super::{
    Story,
    stage::{Download, Result, make_file, start_nginx},
};
use crate::bench::network::Pins;
use longsplice_lab::{ChildGuard, Family, Lab, Namespace, Options, Shape, topology};
use nix::sys::signal::Signal;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// File size, and the bytes per second that nginx sends: the download takes eight seconds.
const SIZE: u64 = 256 << 20;
const RATE: u64 = 32 << 20;
/// Time limit for starting and stopping programs.
const START: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(50);

/// A proxy on the way, and what it leaves in bpffs if the demo fails.
struct Proxy {
    at: Namespace,
    control: PathBuf,
    child: ChildGuard,
    _pins: Pins,
}

fn program(at: &Namespace) -> Result<Command> {
    let mut command = at.command(crate::program()?.to_str().ok_or("the path of this program is no text")?);
    command.env_remove("RUST_LOG").env_remove("LONGSPLICE_CONTROL");
    Ok(command)
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}

impl Proxy {
    fn start(at: &Namespace, name: &str, dir: &Path) -> Result<Proxy> {
        let (file, control) = (dir.join(format!("{name}.toml")), dir.join(format!("{name}.sock")));
        let text = "leave_flows_on_stop = true\nlog = { file = \"off\" }\n\n\
                    [[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n\
                    policy = { splice = \"at-once\", path = \"any\" }\n\n\
                    [tpot]\nproxies = \"10.77.0.0/16\"\nports = 80\n";
        fs::write(&file, text)?;
        let pins = Pins::at(at)?;
        let mut child =
            ChildGuard::spawn(program(at)?.arg("--control").arg(&control).args(["run", "--config"]).arg(&file))?;
        child.wait_output("control socket", START).map_err(|e| format!("{e}; it said:\n{}", child.output()))?;
        Ok(Proxy { at: at.clone(), control, child, _pins: pins })
    }

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        run(program(&self.at)?.arg("--control").arg(&self.control).args(arguments))
    }
}

/// Runs the demo.
pub fn tell(story: &Story) -> Result<()> {
    println!("client ──── first proxy ──── second proxy ──── server   (four network namespaces)");
    println!("   └───────────────── another path ───────────────┘\n");
    let dir = tempfile::Builder::new().prefix("longsplice-demo-").tempdir()?;
    println!("making a file of {} and its SHA-256 ...", longsplice::bytes(SIZE));
    let digest = make_file(&dir.path().join("file"), SIZE)?;
    let lab = Lab::new(Shape::TwoForwarders, Options { forwarding: true, ..Options::default() })?;
    let (client, server) = (&lab.client, &lab.server);
    let (own, to) = (topology::CLIENT.v4, topology::SERVER.v4);
    client.ip(&format!("link add c1 netns {} type veth peer name s1 netns {}\n", client.name(), server.name()))?;
    client.ip("addr add 10.77.9.1/24 dev c1\nlink set c1 up\n")?;
    server.ip("addr add 10.77.9.2/24 dev s1\nlink set s1 up\n")?;
    let _nginx = start_nginx(server, dir.path(), RATE)?;
    let first = Proxy::start(&lab.forwarder, "first", dir.path())?;
    let mut second = Proxy::start(lab.second.as_ref().ok_or("no second forwarder")?, "second", dir.path())?;
    let _pins = Pins::at(client)?;
    let ask = ["tpot", "host", "--port", "80", "--proxy", "10.77.0.0/16"];
    let mut host = ChildGuard::spawn(program(client)?.args(ask))?;
    host.wait_output("asking for proxies", START)?;
    story.say("first and second proxy: longsplice run, with a listener of protocol = \"tpot\" and a table [tpot]");
    story.say(&format!("client: longsplice {}", ask.join(" ")));

    let at = topology::SERVER.port(Family::V4, 80);
    let url = format!("http://{at}/file");
    let mut download = Download::start(&lab, &[&url])?;
    story.say(&format!("client: curl {url} | sha256sum"));
    for (name, proxy) in [("first", &first), ("second", &second)] {
        story.wait("a splice", LOOK, || Ok(proxy.ask(&["ls"])?.contains("spliced").then_some(())))?;
        story.say(&format!("{name} proxy: intercepted and spliced; segments pass without it"));
    }
    for (name, at) in [("client", client), ("first", &first.at), ("second", &second.at)] {
        for line in run(program(at)?.args(["tpot", "ls"]))?.lines() {
            story.say(&format!("{name}: {line}"));
        }
    }
    story.pause(Duration::from_secs(1))?;

    server.ip(&format!("route add {own} via 10.77.9.1\n"))?;
    client.ip(&format!("route add {to} via 10.77.9.2 src {own}\n"))?;
    let half = download.received();
    story.say(&format!("the route to the server changes: the other path. {} have arrived", longsplice::bytes(half)));
    let seen = || -> Result<u64> {
        let counters: serde_json::Value = serde_json::from_str(&first.ask(&["counters", "--json"])?)?;
        Ok(counters["tpot"]["intercepted"].as_u64().unwrap_or(0))
    };
    let before = seen()?;
    run(client.command("curl").args(["-sS", "-r", "0-99", "-o", "/dev/null", &url]))?;
    if seen()? != before {
        return Err("the new connection has met the first proxy, on a path that does not lead there".into());
    }
    story.say("a new connection takes the other path and meets nobody; the download stays with its proxies");
    client.ip(&format!("route del {to}\n"))?;
    server.ip(&format!("route del {own}\n"))?;

    second.ask(&["stop"])?;
    second.child.wait(START).ok_or("the second proxy does not stop")?;
    run(client.command("curl").args(["-sS", "-r", "0-99", "-o", "/dev/null", &url]))?;
    if seen()? != before + 1 {
        return Err("the new connection has not met the first proxy".into());
    }
    story.say("the second proxy is stopped: a new connection meets the first one only; the download goes on");

    story.wait("the end of the download", LOOK, || Ok(download.ended().then_some(())))?;
    let got = download.digest()?;
    if got != digest {
        return Err(format!("the file has SHA-256 {got}, and was served with {digest}").into());
    }
    story.say(&format!("complete: {}, SHA-256 {} as served", longsplice::bytes(SIZE), super::short(&digest)));
    host.signal(Signal::SIGTERM)?;
    host.wait(START).ok_or("longsplice tpot host does not stop")?;
    first.ask(&["stop", "--flush"]).map(drop)
}
