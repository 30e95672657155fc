//! A lab whose forwarder is a translucent proxy, and whose client's host may ask for one.

use super::{AT_ONCE, LONGSPLICE, Setting, listener, spawn};
use longsplice_lab::{ChildGuard, Lab, Namespace, Shape};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{fs, io::Write, os::unix::fs::OpenOptionsExt, path::Path, process::Command, time::Duration};

pub const PORT: u16 = 7000;
/// Where a test needs two ports.
pub const SECOND_PORT: u16 = 7001;
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

/// A proxy that intercepts connections to the port, and splices at once.
pub fn translucent() -> Setting {
    translucent_with(&listeners(PORT, AT_ONCE))
}

pub fn translucent_with(listeners: &str) -> Setting {
    translucent_at(Lab::simple(Shape::TwoDevices).unwrap(), listeners)
}

pub fn translucent_at(lab: Lab, listeners: &str) -> Setting {
    Setting::at(lab, &format!("leave_flows_on_stop = true\n{listeners}"))
}

impl Setting {
    /// Lets the client's host ask for proxies, and trust those of the lab.
    pub fn host(&self) -> ChildGuard {
        self.host_that_trusts(&["--proxy", "10.77.0.0/16", "--proxy", "fd77::/16"])
    }

    pub fn host_that_trusts(&self, proxies: &[&str]) -> ChildGuard {
        let ports = [PORT, SECOND_PORT].map(|port| port.to_string());
        let mut command = self.lab.client.command(LONGSPLICE);
        command.args(["tpot", "host", "--port", &ports[0], "--port", &ports[1]]).args(proxies);
        let mut host = spawn(&mut command);
        host.wait_output("asking for proxies", PATIENCE).unwrap();
        host
    }

    /// Writes a file of keys for the host or the proxy, beside the configuration. Returns its path.
    pub fn keys(&self, name: &str, lines: &[&str]) -> String {
        let file = self.dir.path().join(name);
        let mut options = fs::OpenOptions::new();
        let opened = options.write(true).create(true).truncate(true).mode(0o600).open(&file);
        opened.unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
        file.to_str().unwrap().into()
    }

    /// The connections in tunnels of the client's host.
    pub fn tunnels(&self) -> Vec<Value> {
        Setting::tunnels_at(&self.lab.client)
    }

    /// The connections in tunnels of the proxy.
    pub fn tunnels_of_proxy(&self) -> Vec<Value> {
        Setting::tunnels_at(&self.lab.forwarder)
    }

    fn tunnels_at(host: &Namespace) -> Vec<Value> {
        let out = host.command(LONGSPLICE).args(["tpot", "ls", "--json"]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }
}

/// A listener for each family. `more`: further keys of both.
pub fn listeners(port: u16, more: &str) -> String {
    ["0.0.0.0", "[::]"].map(|any| listener("tpot", &format!("{any}:{port}"), more)).concat()
}

/// A listener for each family that takes the connections of all hosts. `more`: further keys of both.
pub fn transparent(protocol: &str, port: u16, more: &str) -> String {
    let more = format!("transparent = true\n{more}");
    ["0.0.0.0", "[::]"].map(|any| listener(protocol, &format!("{any}:{port}"), &more)).concat()
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
    let mut started = spawn(command.args(arguments));
    started.wait_output(says, PATIENCE).unwrap();
    assert!(stop(started).contains("stopped"));
}
