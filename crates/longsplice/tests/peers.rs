//! Independent programs through the real program: curl, ssh, git, iperf3. Needs root and eBPF, and fails without; Debian
//! packages: curl, nginx-light, openssh, socat, netcat-openbsd, git, iperf3.

use crate::running::{LONGSPLICE, Pins, Running};
use longsplice_lab::{
    ChildGuard, Family, Lab, Namespace, Shape, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tempfile::TempDir;

const SOCKS: u16 = 1080;
/// Time limit for every peer.
const PATIENCE: Duration = Duration::from_secs(40);
/// Bytes per second that a rate-limited peer sends.
const PACE: &str = "20m";

/// A lab with the program in its forwarder: SOCKS, and a plug for both address families to one port of the server.
struct Scene {
    proxy: Running,
    pins: Pins,
    lab: Lab,
    dir: TempDir,
    port: u16,
}

impl Scene {
    fn new(port: u16, splice: &str) -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        // Names are resolved with the proxy's own hosts file, in a mount namespace of its own.
        let hosts = dir.path().join("hosts");
        fs::write(&hosts, format!("{} four.test\n{} six.test\n", SERVER.v4, SERVER.v6)).unwrap();
        let mut command = lab.forwarder.command("unshare");
        command.args(["--mount", "--", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]);
        command.arg(&hosts).arg(LONGSPLICE);
        let mut arguments = vec!["--splice".to_owned(), splice.to_owned(), "--log-format".into(), "json".into()];
        for family in Family::BOTH {
            let [socks, plug] = [SOCKS, port].map(|port| FORWARDER_TO_CLIENT.port(family, port));
            arguments.extend(["--socks5".into(), socks.to_string()]);
            arguments.extend(["--plug".into(), format!("{plug}={}", SERVER.port(family, port))]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Scene { proxy: Running::start(command, None, &arguments, &[]), pins: Pins::of(&lab.forwarder), lab, dir, port }
    }

    fn socks(family: Family) -> SocketAddr {
        FORWARDER_TO_CLIENT.port(family, SOCKS)
    }

    fn plug(&self, family: Family) -> SocketAddr {
        FORWARDER_TO_CLIENT.port(family, self.port)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a program at the server, and waits until it listens on the port.
    fn serve(&self, mut command: Command) -> ChildGuard {
        let server = ChildGuard::spawn(&mut command).unwrap();
        self.lab.server.wait_listening(self.port, Duration::from_secs(10)).unwrap();
        server
    }
}

/// Creates a file whose blocks are all different.
fn file(path: &Path, seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern::fill(seed, 0, &mut bytes);
    fs::write(path, &bytes).unwrap();
    bytes
}

fn same(path: &Path, bytes: &[u8]) {
    let found = fs::read(path).unwrap();
    assert_eq!(found.len(), bytes.len(), "{}", path.display());
    assert_eq!(Sha256::digest(&found), Sha256::digest(bytes), "{}", path.display());
}

/// Waits until a program has succeeded. Returns its output.
fn done(mut program: ChildGuard) -> String {
    let status = program.wait(PATIENCE);
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {}", program.output());
    program.output()
}

fn run(mut command: Command) -> String {
    done(ChildGuard::spawn(&mut command).unwrap())
}

/// Checks that the kernel forwarded most of the bytes in this direction of a flow, and at least `least`.
fn spliced(record: &Value, way: &str, least: u64) {
    let [all, of_these] = ["bytes", "spliced"].map(|key| record[format!("{key}_{way}")].as_u64().unwrap());
    assert!(all >= least && of_these >= all / 2 && record["splices"].as_u64() >= Some(1), "{way}: {record}");
}

/// Starts nginx at the server with the files in `root`.
fn nginx(scene: &Scene, root: &Path) -> ChildGuard {
    let dir = scene.dir.path().display();
    let (port, config) = (scene.port, scene.path("nginx.conf"));
    let text = format!(
        "daemon off; master_process off; user root; pid {dir}/nginx.pid; error_log stderr; events {{}}\n\
         http {{ access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;\n\
         fastcgi_temp_path {dir}/fastcgi; uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;\n\
         server {{ listen {port}; listen [::]:{port}; client_max_body_size 0; root {};\n\
         location / {{ limit_rate {PACE}; dav_methods PUT; }} }} }}\n",
        root.display()
    );
    fs::write(&config, text).unwrap();
    let mut command = scene.lab.server.command("nginx");
    command.arg("-e").arg("stderr").arg("-p").arg(scene.dir.path()).arg("-c").arg(&config);
    scene.serve(command)
}

fn curl(client: &Namespace, arguments: &[String]) -> ChildGuard {
    let mut command = client.command("curl");
    command.args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "", "--max-time", "35"]);
    ChildGuard::spawn(command.args(arguments)).unwrap()
}

/// The ways to reach the server with curl: options, and the authority of the URL.
fn ways(scene: &Scene) -> Vec<(Vec<String>, String)> {
    let (port, [v4, v6]) = (scene.port, Family::BOTH.map(Scene::socks));
    let socks = |kind: &str, proxy: SocketAddr, host: &str| {
        (vec![kind.to_owned(), proxy.to_string()], format!("{host}:{port}"))
    };
    vec![
        socks("--socks5-hostname", v4, "four.test"),
        socks("--socks5-hostname", v6, "six.test"),
        socks("--socks5-hostname", v4, "six.test"),
        socks("--socks5", v4, &format!("[{}]", SERVER.v6)),
        socks("--socks4a", v4, "four.test"),
        socks("--socks4", v4, &SERVER.v4.to_string()),
        (Vec::new(), scene.plug(Family::V4).to_string()),
        (Vec::new(), scene.plug(Family::V6).to_string()),
    ]
}

#[test]
#[ignore = "root"]
fn curl_downloads() {
    const SIZE: usize = 60_000_000;
    let mut scene = Scene::new(8080, "65536");
    let root = scene.path("root");
    fs::create_dir(&root).unwrap();
    let bytes = file(&root.join("file"), 1, SIZE);
    let _nginx = nginx(&scene, &root);
    let ways = ways(&scene);
    let downloads: Vec<_> = ways
        .iter()
        .enumerate()
        .map(|(i, (options, authority))| {
            let target = scene.path(&format!("download-{i}"));
            let more = ["--output".to_owned(), target.display().to_string(), format!("http://{authority}/file")];
            (curl(&scene.lab.client, &[&options[..], &more].concat()), target)
        })
        .collect();
    for (curl, target) in downloads {
        done(curl);
        same(&target, &bytes);
    }
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), ways.len(), "{records:#?}");
    for record in &records {
        assert_eq!(record["how"], "closed", "{record}");
        spliced(record, "down", SIZE as u64);
    }
}

#[test]
#[ignore = "root"]
fn curl_uploads() {
    const SIZE: usize = 50_000_000;
    let mut scene = Scene::new(8081, "65536");
    let root = scene.path("root");
    fs::create_dir(&root).unwrap();
    let bytes = file(&scene.path("file"), 2, SIZE);
    let _nginx = nginx(&scene, &root);
    let ways: Vec<_> = ways(&scene).into_iter().step_by(3).collect();
    let uploads: Vec<_> = ways
        .iter()
        .enumerate()
        .map(|(i, (options, authority))| {
            let source = scene.path("file").display().to_string();
            let more = ["--limit-rate", PACE, "--upload-file", &source, &format!("http://{authority}/upload-{i}")];
            (
                curl(&scene.lab.client, &[&options[..], &more.map(String::from)].concat()),
                root.join(format!("upload-{i}")),
            )
        })
        .collect();
    for (curl, target) in uploads {
        done(curl);
        same(&target, &bytes);
    }
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), ways.len(), "{records:#?}");
    for record in &records {
        assert_eq!(record["how"], "closed", "{record}");
        spliced(record, "up", SIZE as u64);
    }
}

/// Creates a key pair. Returns the public key.
fn key(path: &Path) -> String {
    let mut command = Command::new("ssh-keygen");
    run_quietly(command.args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"]).arg(path));
    fs::read_to_string(path.with_extension("pub")).unwrap()
}

fn run_quietly(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn sshd(scene: &Scene) -> ChildGuard {
    // sshd needs this empty directory, which Debian creates when the service starts.
    fs::create_dir_all("/run/sshd").unwrap();
    fs::set_permissions("/run/sshd", Permissions::from_mode(0o755)).unwrap();
    let host = key(&scene.path("host"));
    fs::write(scene.path("known"), format!("server {host}")).unwrap();
    fs::write(scene.path("authorized"), key(&scene.path("user"))).unwrap();
    let mut command = scene.lab.server.command("/usr/sbin/sshd");
    command.args(["-D", "-e", "-f", "/dev/null", "-p", &scene.port.to_string(), "-h"]).arg(scene.path("host"));
    for option in ["UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no", "PidFile none"] {
        command.args(["-o", option]);
    }
    command.arg("-o").arg(format!("AuthorizedKeysFile {}", scene.path("authorized").display()));
    scene.serve(command)
}

fn ssh(scene: &Scene, proxy: &str, remote: &str, input: Option<&Path>, output: &Path) -> Command {
    // The shell only redirects: a guarded program has no input, and one output.
    let mut command = scene.lab.client.command("sh");
    command.args(["-c", "input=$1 output=$2; shift 2; exec \"$@\" <\"$input\" >\"$output\"", "sh"]);
    command.arg(input.unwrap_or(Path::new("/dev/null"))).arg(output).args(["ssh", "-F", "none", "-i"]);
    command.arg(scene.path("user")).arg("-p").arg(scene.port.to_string());
    command.arg("-o").arg(format!("UserKnownHostsFile={}", scene.path("known").display()));
    for option in ["IdentitiesOnly=yes", "StrictHostKeyChecking=yes", "HostKeyAlias=server", "BatchMode=yes"] {
        command.args(["-o", option]);
    }
    command.args(["-o", proxy]).arg(format!("root@{}", FORWARDER_TO_CLIENT.v4)).arg(remote);
    command
}

#[test]
#[ignore = "root"]
fn ssh_runs_commands_and_carries_data() {
    const SIZE: usize = 20_000_000;
    let mut scene = Scene::new(2222, "65536");
    let _sshd = sshd(&scene);
    let bytes = file(&scene.path("file"), 3, SIZE);
    let socat =
        format!("ProxyCommand=socat - SOCKS4A:{}:four.test:{},socksport={SOCKS}", FORWARDER_TO_CLIENT.v4, scene.port);
    let nc = format!("ProxyCommand=nc -X 5 -x {} four.test {}", Scene::socks(Family::V4), scene.port);
    for (i, proxy) in ["ProxyCommand=none", &socat, &nc].into_iter().enumerate() {
        let [said, back] = ["said", "back"].map(|name| scene.path(&format!("{name}-{i}")));
        run(ssh(&scene, proxy, "echo $((6 * 7))", None, &said));
        assert_eq!(fs::read_to_string(said).unwrap(), "42\n");
        run(ssh(&scene, proxy, "cat", Some(&scene.path("file")), &back));
        same(&back, &bytes);
    }
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), 6, "{records:#?}");
    for record in records.iter().filter(|record| record["bytes_up"].as_u64() > Some(SIZE as u64)) {
        ["up", "down"].iter().for_each(|way| spliced(record, way, SIZE as u64));
    }
    assert_eq!(records.iter().filter(|record| record["splices"] == 1).count(), 3, "{records:#?}");
}

/// git without the settings of the user who runs the test.
fn git(mut command: Command, arguments: &[&str]) -> Command {
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_TERMINAL_PROMPT", "0");
    for who in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{who}_NAME"), "nobody").env(format!("GIT_{who}_EMAIL"), "nobody@example.org");
    }
    command.args(arguments);
    command
}

fn commit(scene: &Scene, repository: &str, seed: u64) {
    file(&scene.path(repository).join(format!("file-{seed}")), seed, 10_000_000);
    for arguments in [&["add", "."][..], &["commit", "--quiet", "--message", "bytes"]] {
        run_quietly(git(Command::new("git"), arguments).current_dir(scene.path(repository)));
    }
}

fn head(scene: &Scene, repository: &str) -> String {
    run(git(Command::new("git"), &["-C", scene.path(repository).to_str().unwrap(), "rev-parse", "HEAD"]))
}

#[test]
#[ignore = "root"]
fn git_clones_and_pushes() {
    let mut scene = Scene::new(9418, "at-once");
    run_quietly(&mut git(Command::new("git"), &["init", "--quiet", scene.path("origin").to_str().unwrap()]));
    commit(&scene, "origin", 4);
    let base = scene.dir.path().to_str().unwrap().to_owned();
    // Not started by git, which would run it as a child process and not end it when killed.
    let folder = run(git(Command::new("git"), &["--exec-path"]));
    let mut daemon = scene.lab.server.command(&format!("{}/git-daemon", folder.trim()));
    daemon.args(["--export-all", "--reuseaddr", "--enable=receive-pack", &format!("--port={}", scene.port)]);
    let _daemon = scene.serve(git(daemon, &[&format!("--base-path={base}")]));
    for (family, copy) in Family::BOTH.into_iter().zip(["copy-4", "copy-6"]) {
        let address = format!("git://{}/origin", scene.plug(family));
        run(git(scene.lab.client.command("git"), &["clone", "--quiet", &address, scene.path(copy).to_str().unwrap()]));
        assert_eq!(head(&scene, copy), head(&scene, "origin"));
        commit(&scene, copy, 5);
        let pushed = format!("HEAD:refs/heads/{copy}");
        run(git(
            scene.lab.client.command("git"),
            &["-C", scene.path(copy).to_str().unwrap(), "push", "--quiet", "origin", &pushed],
        ));
        let origin = scene.path("origin").display().to_string();
        let arrived = run(git(Command::new("git"), &["-C", &origin, "rev-parse", &format!("refs/heads/{copy}")]));
        assert_eq!(arrived, head(&scene, copy));
    }
    let origin = scene.path("origin").display().to_string();
    run(git(Command::new("git"), &["-C", &origin, "fsck", "--full", "--strict"]));
    let records = scene.proxy.end(&scene.pins);
    assert_eq!(records.len(), 4, "{records:#?}");
    for pair in records.chunks(2) {
        spliced(&pair[0], "down", 10_000_000);
        spliced(&pair[1], "up", 10_000_000);
    }
}

#[test]
#[ignore = "root"]
fn iperf3_measures_both_ways() {
    const BYTES: u64 = 200_000_000;
    // iperf3 ends a test by a message on another connection, and resets this one with data in its buffers. So the
    // buffers are kept small, and more is sent than must arrive.
    const SENT: u64 = BYTES + 20_000_000;
    let mut scene = Scene::new(5201, "at-once");
    let mut server = scene.lab.server.command("iperf3");
    server.args(["--server", "--port", &scene.port.to_string()]);
    let _server = scene.serve(server);
    for (family, more) in
        [(Family::V4, &[][..]), (Family::V6, &["--reverse"]), (Family::V4, &["--reverse", "--parallel", "4"])]
    {
        let mut client = scene.lab.client.command("iperf3");
        client.args(["--client", &FORWARDER_TO_CLIENT.ip(family).to_string(), "--port", &scene.port.to_string()]);
        client.args(["--json", "--window", "512K", "--bytes", &SENT.to_string()]).args(more);
        let result: Value = serde_json::from_str(&run(client)).unwrap();
        let [sent, received] = ["sum_sent", "sum_received"].map(|sum| result["end"][sum]["bytes"].as_u64().unwrap());
        assert!(sent >= SENT && received >= BYTES, "{more:?}: {sent} sent, {received} received");
    }
    let records = scene.proxy.end(&scene.pins);
    let large = |way: &str, least: u64| {
        let of_these = records.iter().filter(|record| record[format!("bytes_{way}")].as_u64() >= Some(least));
        of_these.inspect(|record| spliced(record, way, least)).count()
    };
    // Parallel connections share the bytes, not always evenly.
    assert!(large("up", BYTES) == 1 && large("down", BYTES) >= 1 && large("down", 1_000_000) >= 2, "{records:#?}");
}
