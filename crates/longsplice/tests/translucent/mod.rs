//! A lab whose forwarder is a translucent proxy, and whose client's host may ask for one.

use crate::running::{self, LONGSPLICE, Pins, Running};
use longsplice_lab::{ChildGuard, Lab, Namespace, Shape};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

pub const PORT: u16 = 7000;
/// Where a test needs two ports.
pub const SECOND_PORT: u16 = 7001;
pub const AT_ONCE: &str = "policy = { splice = \"at-once\" }";
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Serves the files of its directory at an address; by HTTPS if there are further arguments: a certificate and its key.
pub const FILE_SERVER: &str = "
import http.server, socket, socketserver, ssl, sys
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
    server_bind = socketserver.TCPServer.server_bind # the other one looks up its own name, without a name server
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
server = Server((sys.argv[1], int(sys.argv[2])), Handler)
if sys.argv[3:]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[3:])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
";

/// The lab, and the proxy's configuration.
pub struct Translucent {
    pub lab: Lab,
    pub file: PathBuf,
    pub pins: [Pins; 3],
    pub dir: tempfile::TempDir,
}

impl Translucent {
    /// Intercepts connections to the port, and splices at once.
    pub fn new() -> Translucent {
        Translucent::with(&listeners(PORT, AT_ONCE))
    }

    pub fn with(listeners: &str) -> Translucent {
        Translucent::at(Lab::simple(Shape::TwoDevices).unwrap(), listeners)
    }

    pub fn at(lab: Lab, listeners: &str) -> Translucent {
        let pins = [Pins::of(&lab.forwarder), Pins::of_tpot(&lab.forwarder), Pins::of_tpot(&lab.client)];
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("longsplice.toml");
        fs::write(&file, format!("leave_flows_on_stop = true\n{listeners}")).unwrap();
        Translucent { lab, file, pins, dir }
    }

    pub fn proxy(&self) -> Running {
        Running::start(self.lab.forwarder.command(LONGSPLICE), None, &["--config", self.file.to_str().unwrap()], &[])
    }

    pub fn host(&self) -> ChildGuard {
        self.host_that_trusts(&["--proxy", "10.77.0.0/16", "--proxy", "fd77::/16"])
    }

    pub fn host_that_trusts(&self, proxies: &[&str]) -> ChildGuard {
        host(&self.lab, proxies)
    }

    /// Writes a file of keys for the host or the proxy, beside the configuration. Returns its path.
    pub fn keys(&self, name: &str, lines: &[&str]) -> String {
        let file = self.dir.path().join(name);
        let mut options = fs::OpenOptions::new();
        let opened = options.write(true).create(true).truncate(true).mode(0o600).open(&file);
        opened.unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
        file.to_str().unwrap().into()
    }

    pub fn serve(&self, at: SocketAddr) -> TcpListener {
        self.lab.server.run(|| TcpListener::bind(at)).unwrap()
    }

    /// Connects from the client's host.
    pub fn connect(&self, at: SocketAddr) -> TcpStream {
        self.lab.client.run(|| running::connect(at))
    }

    /// The connections in tunnels of the client's host.
    pub fn tunnels(&self) -> Vec<Value> {
        tunnels(&self.lab)
    }
}

/// Lets the client's host ask for proxies.
pub fn host(lab: &Lab, proxies: &[&str]) -> ChildGuard {
    let mut command = lab.client.command(LONGSPLICE);
    command.args(["tpot", "host", "--port", &PORT.to_string(), "--port", &SECOND_PORT.to_string()]).args(proxies);
    let mut host = running::spawn(&mut command);
    host.wait_output("asking for proxies", PATIENCE).unwrap();
    host
}

/// The connections in tunnels of the client's host.
pub fn tunnels(lab: &Lab) -> Vec<Value> {
    let out = lab.client.command(LONGSPLICE).args(["tpot", "ls", "--json"]).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

pub fn listener(any: &str, port: u16) -> String {
    format!("[[listener]]\nprotocol = \"tpot\"\nlisten = \"{any}:{port}\"\n")
}

/// A listener for each family. `more`: further keys of both.
pub fn listeners(port: u16, more: &str) -> String {
    ["0.0.0.0", "[::]"].map(|any| listener(any, port) + more + "\n").concat()
}

/// Returns one of the proxy's counters, of "proxy" or of "tpot".
pub fn counter(proxy: &Running, of: &str, name: &str) -> u64 {
    let counters: Value = serde_json::from_str(&proxy.client(&["counters", "--json"])).unwrap();
    counters[of][name].as_u64().unwrap_or_else(|| panic!("{of}.{name}: {counters}"))
}

pub fn stop(mut host: ChildGuard) -> String {
    host.signal(Signal::SIGTERM).unwrap();
    assert!(host.wait(PATIENCE).unwrap().success(), "{}", host.output());
    host.output()
}

/// The unit of systemd for `longsplice tpot WHAT` is valid, and its program starts with the options of its comment, changed for a
/// lab, and with the capabilities that it has there.
pub fn service(what: &str, at: &Namespace, changes: &[(&str, &str)], says: &str) {
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist");
    let name = format!("longsplice-tpot-{what}.service");
    let unit = fs::read_to_string(dist.join(&name)).unwrap();
    let value = |key: &str| {
        let line =
            unit.lines().find_map(|line| line.trim_start_matches(['#', '\t']).strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_else(|| panic!("no {key} in the unit"))
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(&name);
    fs::write(&file, unit.replace("/usr/local/bin/longsplice", LONGSPLICE)).unwrap();
    let verified = Command::new("systemd-analyze").arg("verify").arg(&file).output().unwrap();
    assert!(verified.status.success() && verified.stderr.is_empty(), "{verified:?}");

    let allowed: String = value("CapabilityBoundingSet").to_lowercase().replace("cap_", ",+").replace(' ', "");
    let options = changes.iter().fold(value("OPTIONS").to_owned(), |options, (from, to)| options.replace(from, to));
    let program = value("ExecStart").replace("$OPTIONS", &options);
    let mut arguments = program.split_whitespace();
    assert_eq!(arguments.next(), Some("/usr/local/bin/longsplice"));
    let mut command = at.command("setpriv");
    command.args([&format!("--bounding-set=-all{allowed}"), "--inh-caps=-all", "--no-new-privs", LONGSPLICE]);
    let mut started = running::spawn(command.args(arguments));
    started.wait_output(says, PATIENCE).unwrap();
    assert!(stop(started).contains("stopped"));
}
