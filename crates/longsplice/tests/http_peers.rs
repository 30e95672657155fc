//! HTTP between independent programs: wrk, h2load, ab and curl on one side; nginx, Apache httpd and Node on the other;
//! through forward and reverse proxy, with every body spliced if possible. Needs root and eBPF, and fails without; Debian
//! packages: wrk, nghttp2-client, apache2-utils, curl, nginx-light, apache2-bin, nodejs.

use crate::running::{LONGSPLICE, Pins, Running};
use longsplice_lab::{
    ChildGuard, Family, Lab, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    time::Duration,
};
use tempfile::TempDir;

const PROXY: u16 = 3128;
/// Name of each server, its port, and the port of the site in front of it.
const SERVERS: [(&str, u16, u16); 3] = [("nginx", 8081, 8001), ("apache", 8082, 8002), ("node", 8083, 8003)];
/// Time limit for every program.
const PATIENCE: Duration = Duration::from_secs(60);
const LARGE: usize = 100 << 20;

struct Scene {
    proxy: Running,
    pins: Pins,
    lab: Lab,
    dir: TempDir,
    // dropped before the namespaces they run in
    servers: Vec<ChildGuard>,
}

impl Scene {
    fn new() -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap(); // Apache's workers run as another user
        let file = dir.path().join("longsplice.toml");
        let mut config = format!("[[listener]]\nprotocol = \"http\"\nlisten = \"{}\"\n", at(PROXY));
        for (name, port, site) in SERVERS {
            let (listen, server) = (at(site), SERVER.port(Family::V4, port));
            config += &format!(
                "[[listener]]\nprotocol = \"http\"\nlisten = \"{listen}\"\nroute = [{{ pool = \"{name}\" }}]\n"
            );
            config += &format!("[pool.{name}]\nservers = [\"{server}\"]\n");
        }
        fs::write(&file, config).unwrap();
        let arguments = ["--config", file.to_str().unwrap(), "--splice", "at-once", "--log-format", "json"];
        let proxy = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        let mut scene = Scene { proxy, pins: Pins::of(&lab.forwarder), lab, dir, servers: Vec::new() };
        fs::create_dir(scene.path("root")).unwrap();
        for (name, length) in [("small", 1000), ("large", 1_000_000), ("huge", LARGE)] {
            fs::write(scene.path("root").join(name), body(length)).unwrap();
        }
        scene.serve();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn serve(&mut self) {
        let (dir, host) = (self.dir.path().display(), SERVER.v4);
        let nginx = format!(
            "daemon off; master_process off; user root; pid {dir}/nginx.pid; error_log stderr; events {{}}\n\
             http {{ access_log off; sendfile on; keepalive_requests 1000000; server {{ listen {host}:8081; root {dir}/root; }} }}\n"
        );
        let modules = "/usr/lib/apache2/modules";
        let apache = format!(
            "ServerRoot {dir}\nPidFile {dir}/apache.pid\nMutex file:{dir}\nErrorLog {dir}/apache.log\nServerName test\n\
             LoadModule mpm_event_module {modules}/mod_mpm_event.so\nLoadModule authz_core_module {modules}/mod_authz_core.so\n\
             User www-data\nGroup www-data\nListen {host}:8082\nDocumentRoot {dir}/root\nMaxKeepAliveRequests 0\n\
             KeepAliveTimeout 60\n<Directory {dir}/root>\nRequire all granted\n</Directory>\n"
        );
        let node = format!(
            "const fs = require('fs');\nconst server = require('http').createServer((request, reply) => {{\n\
             const file = '{dir}/root' + request.url;\nreply.writeHead(200, {{ 'Content-Length': fs.statSync(file).size }});\n\
             fs.createReadStream(file).pipe(reply);\n}});\nserver.keepAliveTimeout = 60000;\nserver.listen(8083, '{host}');\n"
        );
        for (name, text) in [("nginx.conf", nginx), ("apache.conf", apache), ("server.js", node)] {
            fs::write(self.path(name), text).unwrap();
        }
        let [nginx_conf, apache_conf, script] = ["nginx.conf", "apache.conf", "server.js"].map(|name| self.path(name));
        let mut nginx = self.lab.server.command("nginx");
        nginx.args(["-e", "stderr", "-p"]).arg(self.dir.path()).arg("-c").arg(nginx_conf);
        let mut apache = self.lab.server.command("/usr/sbin/apache2");
        apache.args(["-D", "FOREGROUND", "-f"]).arg(apache_conf);
        let mut node = self.lab.server.command("node");
        node.arg(script);
        for (mut command, (name, port, _)) in [nginx, apache, node].into_iter().zip(SERVERS) {
            let server = ChildGuard::spawn(&mut command).unwrap().ended_gently();
            let ready = self.lab.server.wait_listening(port, Duration::from_secs(20));
            assert!(ready.is_ok(), "{name}: {ready:?}: {}", server.output());
            self.servers.push(server);
        }
    }

    /// Runs a program at the client. Returns its output once it has succeeded.
    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let mut command: Command = self.lab.client.command(program);
        let mut child = ChildGuard::spawn(command.args(arguments)).unwrap();
        let status = child.wait(PATIENCE);
        let odd = || {
            let log = self.proxy.log();
            log.lines().filter(|line| !line.contains("\"how\":\"closed\"")).collect::<Vec<_>>().join("\n")
        };
        assert!(
            status.is_some_and(|s| s.success()),
            "{program} {arguments:?}: {status:?}: {}\n{}\n{}",
            child.output(),
            odd(),
            self.proxy.messages()
        );
        child.output()
    }

    /// Requests `url` with wrk and ab; there must be no errors.
    fn load(&self, wrk: &[&str], ab: &[&str], url: &str) {
        let said = self.run("wrk", &[&["-t", "1", "-c", "8", "-d", "1"], wrk].concat());
        let failed = said.contains("Socket errors") || said.contains("Non-2xx") || said.contains(" 0 requests in");
        assert!(!failed && said.contains("requests in"), "wrk {wrk:?} {url}: {said}");
        let said = self.run("ab", &[&["-q", "-k", "-n", "200", "-c", "8"], ab, &[url]].concat());
        let whole = said.contains("Complete requests:      200") && said.contains("Failed requests:        0");
        assert!(whole && !said.contains("Non-2xx"), "ab {ab:?} {url}: {said}");
    }

    fn same(&self, url: &str, more: &[&str], want: &[u8]) {
        let file = self.path("download");
        let out = ["--disable", "--silent", "--show-error", "--fail", "--max-time", "50", "--output"];
        self.run("curl", &[&out[..], &[file.to_str().unwrap()], more, &[url]].concat());
        assert_eq!(Sha256::digest(fs::read(file).unwrap()).as_slice(), want, "{url}");
    }
}

fn at(port: u16) -> SocketAddr {
    FORWARDER_TO_CLIENT.port(Family::V4, port)
}

fn body(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    pattern::fill(length as u64, 0, &mut bytes);
    bytes
}

#[test]
#[ignore = "root"]
fn programs_of_others_on_both_sides() {
    let mut scene = Scene::new();
    let digest = Sha256::digest(body(LARGE));
    let proxy = at(PROXY).to_string();
    for (name, port, site) in SERVERS {
        for file in ["small", "large"] {
            let reverse = format!("http://{}/{file}", at(site));
            scene.load(&[&reverse], &[], &reverse);
            let said = scene.run("h2load", &["--h1", "-n", "300", "-c", "8", &reverse]);
            assert!(said.contains("300 succeeded, 0 failed, 0 errored, 0 timeout"), "h2load {reverse}: {said}");
            // wrk connects to the host of its URL and sends requests from a script; h2load does not support proxies
            let target = format!("http://{}/{file}", SERVER.port(Family::V4, port));
            let script = scene.path("absolute.lua");
            fs::write(&script, format!("request = function() return wrk.format(\"GET\", \"{target}\") end\n")).unwrap();
            let wrk = ["-s", script.to_str().unwrap(), &format!("http://{proxy}/")];
            scene.load(&wrk, &["-X", &proxy], &target);
        }
        scene.same(&format!("http://{}/huge", at(site)), &["--noproxy", "*"], &digest);
        let huge = format!("http://{}/huge", SERVER.port(Family::V4, port));
        scene.same(&huge, &["--noproxy", "", "--proxy", &format!("http://{proxy}")], &digest);
        eprintln!("{name}: done");
    }
    let records = scene.proxy.end(&scene.pins);
    for (name, port, _) in SERVERS {
        let server = SERVER.port(Family::V4, port).to_string();
        for reverse in [false, true] {
            let of: Vec<_> =
                records.iter().filter(|r| r["server"] == *server && r["route"].is_string() == reverse).collect();
            let sum = |key: &str| of.iter().map(|r| r[key].as_u64().unwrap()).sum::<u64>();
            let (splices, spliced) = (sum("splices"), sum("spliced_down"));
            eprintln!("{name}, reverse {reverse}: {} requests, {splices} splices, {spliced} bytes spliced", of.len());
            assert!(
                splices > 0 && spliced >= LARGE as u64 / 2,
                "{name}, reverse {reverse}: {splices} splices, {spliced} bytes"
            );
            // wrk breaks off its pending requests when its time is over; nothing else may end early
            let bad: Vec<_> = of.iter().filter(|r| r["how"] != "closed" && r["how"] != "client-reset").collect();
            assert!(bad.is_empty(), "{bad:#?}");
        }
    }
}
