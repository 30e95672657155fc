//! TLS by name and the PROXY protocol through the real program: curl and HAProxy on one side, nginx on the other. Needs root
//! and eBPF, and fails without; Debian packages: curl, haproxy, nginx-light, openssl.

use crate::running::{LONGSPLICE, Pins, Running, eventually};
use longsplice_lab::{
    ChildGuard, Family, Lab, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{fs, path::PathBuf, process::Command, time::Duration};
use tempfile::TempDir;

/// The port of nginx for TLS, and of longsplice, which forwards to it by name.
const NAMES: u16 = 8443;
/// The same with a PROXY header first.
const ANNOUNCED: u16 = 9443;
/// Time limit for every curl command.
const PATIENCE: Duration = Duration::from_secs(40);
const SIZE: usize = 30_000_000;

/// curl's network, the program, and nginx with a file served over TLS at 20 MB/s.
struct Scene {
    proxy: Running,
    pins: Pins,
    _nginx: ChildGuard,
    lab: Lab,
    dir: TempDir,
    digest: [u8; 32],
}

impl Scene {
    fn new() -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; SIZE];
        pattern::fill(5, 0, &mut bytes);
        fs::write(dir.path().join("file"), &bytes).unwrap();
        let nginx = nginx(&lab, &dir);
        fs::write(dir.path().join("longsplice.toml"), configuration()).unwrap();
        // Names are resolved with the proxy's own hosts file, in a mount namespace of its own.
        fs::write(dir.path().join("hosts"), format!("{} four.test\n{} six.test\n", SERVER.v4, SERVER.v6)).unwrap();
        let mut command = lab.forwarder.command("unshare");
        command.args(["--mount", "--", "sh", "-c", "mount --bind hosts /etc/hosts && exec \"$@\"", "sh", LONGSPLICE]);
        let names = Family::BOTH.map(|family| FORWARDER_TO_CLIENT.port(family, NAMES).to_string());
        let arguments = ["--config", "longsplice.toml", "--tls", &names[0], "--tls", &names[1], "--log-format", "json"];
        command.current_dir(dir.path());
        let proxy = Running::start(command, None, &arguments, &["--splice", "65536"]);
        Scene { proxy, pins: Pins::of(&lab.forwarder), _nginx: nginx, lab, dir, digest: Sha256::digest(&bytes).into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts curl, which connects to `at` and requests `path` from `host`.
    fn curl(&self, host: &str, port: u16, at: &str, path: &str, output: &str) -> ChildGuard {
        let mut command = self.lab.client.command("curl");
        command.args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "*", "--max-time", "35"]);
        command.args(["--cacert", "certificate", "--output", output, "--resolve", &format!("{host}:{port}:{at}")]);
        if at.starts_with("127.") {
            command.args(["--interface", "127.0.0.9"]);
        }
        ChildGuard::spawn(command.arg(format!("https://{host}:{port}{path}")).current_dir(self.dir.path())).unwrap()
    }

    /// Waits for the end of a download, and compares it with the file.
    fn same(&self, mut curl: ChildGuard, output: &str) {
        let status = curl.wait(PATIENCE);
        assert!(status.is_some_and(|s| s.success()), "{status:?}: {}", curl.output());
        assert_eq!(<[u8; 32]>::from(Sha256::digest(fs::read(self.path(output)).unwrap())), self.digest, "{output}");
    }
}

fn configuration() -> String {
    let at = FORWARDER_TO_CLIENT.port(Family::V4, ANNOUNCED);
    let server = SERVER.port(Family::V6, ANNOUNCED);
    format!(
        "[[listener]]\nprotocol = \"tls\"\nlisten = \"{at}\"\n\
         proxy_protocol = {{ from = \"10.77.1.0/24\", required = true, send = \"v2\" }}\n\
         [[listener.route]]\nname = \"*.example.test\"\nalpn = [\"h2\", \"http/1.1\"]\ntarget = \"{server}\"\n"
    )
}

fn nginx(lab: &Lab, dir: &TempDir) -> ChildGuard {
    let names = "subjectAltName=DNS:four.test,DNS:six.test,DNS:*.example.test";
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    openssl.args(["-keyout", "key", "-out", "certificate", "-subj", "/CN=test", "-addext", names]);
    let made = openssl.current_dir(dir.path()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let at = dir.path().display();
    let text = format!(
        "daemon off; master_process off; user root; pid {at}/nginx.pid; error_log stderr; events {{}}\n\
         http {{ access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/proxy;\n\
         fastcgi_temp_path {at}/fastcgi; uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;\n\
         ssl_certificate {at}/certificate; ssl_certificate_key {at}/key; root {at};\n\
         server {{ listen {NAMES} ssl; listen [::]:{NAMES} ssl; location / {{ limit_rate 20m; }} }}\n\
         server {{ listen [::]:{ANNOUNCED} ssl proxy_protocol; location / {{ limit_rate 20m; }}\n\
         location /who {{ return 200 \"$proxy_protocol_addr $proxy_protocol_server_port\"; }} }} }}\n"
    );
    fs::write(dir.path().join("nginx.conf"), text).unwrap();
    let mut command = lab.server.command("nginx");
    command.arg("-e").arg("stderr").arg("-p").arg(dir.path()).arg("-c").arg(dir.path().join("nginx.conf"));
    let nginx = ChildGuard::spawn(&mut command).unwrap();
    lab.server.wait_listening(ANNOUNCED, Duration::from_secs(10)).unwrap();
    nginx
}

/// Checks that the kernel forwarded most of the server's bytes.
fn spliced(record: &Value) {
    let [all, spliced] = ["bytes_down", "spliced_down"].map(|key| record[key].as_u64().unwrap());
    assert!(all >= SIZE as u64 && spliced >= all / 2 && record["splices"] == 1, "{record}");
}

#[test]
#[ignore = "root"]
fn names_lead_to_servers_and_the_flow_is_spliced() {
    let mut scene = Scene::new();
    let [v4, v6] = Family::BOTH.map(|family| FORWARDER_TO_CLIENT.ip(family).to_string());
    let ways = [("four.test", &v4), ("six.test", &v6), ("six.test", &v4)];
    let downloads: Vec<_> = ways
        .iter()
        .enumerate()
        .map(|(i, (name, at))| scene.curl(name, NAMES, at, "/file", &format!("download-{i}")))
        .collect();
    for (i, curl) in downloads.into_iter().enumerate() {
        scene.same(curl, &format!("download-{i}"));
    }
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), ways.len(), "{records:#?}");
    records.iter().for_each(spliced);
    assert!(records.iter().all(|r| r["listener"] == "tls"), "{records:#?}");
    let targets = |name: &str| records.iter().filter(|r| r["target"] == format!("{name}:{NAMES}")).count();
    assert_eq!((targets("four.test"), targets("six.test")), (1, 2), "{records:#?}");
}

#[test]
#[ignore = "root"]
fn haproxy_before_and_nginx_behind_agree_on_the_client() {
    let mut scene = Scene::new();
    let at = FORWARDER_TO_CLIENT.port(Family::V4, ANNOUNCED);
    let text = format!(
        "defaults\n mode tcp\n timeout connect 10s\n timeout client 40s\n timeout server 40s\n\
         listen l\n bind 127.0.0.1:{ANNOUNCED}\n server s {at} send-proxy-v2\n"
    );
    fs::write(scene.path("haproxy.cfg"), text).unwrap();
    let mut command = scene.lab.client.command("haproxy");
    let _haproxy = ChildGuard::spawn(command.arg("-db").arg("-f").arg(scene.path("haproxy.cfg"))).unwrap();
    scene.lab.client.wait_listening(ANNOUNCED, Duration::from_secs(10)).unwrap();
    let ask = |path: &str, output: &str| scene.curl("a.example.test", ANNOUNCED, "127.0.0.1", path, output);
    assert!(ask("/who", "who").wait(PATIENCE).is_some_and(|s| s.success()));
    assert_eq!(fs::read_to_string(scene.path("who")).unwrap(), format!("127.0.0.9 {ANNOUNCED}"));
    let download = ask("/file", "download");
    let client = eventually("a spliced flow", || {
        let flows = scene.proxy.flows();
        flows.iter().find(|f| f["state"] == "spliced").map(|f| f["client"].as_str().unwrap().to_owned())
    });
    assert!(client.starts_with("127.0.0.9:"), "{client}");
    scene.same(download, "download");
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), 2, "{records:#?}");
    let record = records.iter().find(|r| r["client"] == client).expect("the record of the flow");
    spliced(record);
}
