//! Everyday programs through a translucent proxy, none of which knows of it: git over SSH and over its own protocol, iperf3,
//! and a browser. Needs root and eBPF; Debian packages: chromium-headless-shell, git, iperf3, openssh.

use crate::running::{
    AT_ONCE, Running, Setting, eventually,
    translucent::{FILE_SERVER, PATIENCE, PORT, SECOND_PORT, listeners, translucent_with},
};
use longsplice_lab::{ChildGuard, Family, pattern, topology::SERVER};
use serde_json::Value;
use std::{
    fs::{self, Permissions},
    net::IpAddr,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
};

/// Runs a program of the client's host with a time limit. Returns its output.
fn run(here: &Setting, program: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = here.lab.client.command("timeout");
    let out =
        command.arg(PATIENCE.as_secs().to_string()).args(program).envs(variables.iter().copied()).output().unwrap();
    assert!(out.status.success(), "{program:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// How often each connection was spliced, once there are as many lines of the access log.
fn splices(proxy: &Running, connections: usize) -> Vec<u64> {
    let log = eventually("all lines of the access log", || {
        let log = proxy.log();
        (log.lines().count() == connections).then_some(log)
    });
    let of = |line: &str| line.split_once(" splices=")?.1.split(' ').next()?.parse().ok();
    log.lines().map(|line| of(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

fn key(path: &str) {
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", path]).status();
    assert!(made.unwrap().success());
}

fn in_url(ip: IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}

/// SSH changes the service class of its connections when they are open.
#[test]
#[ignore = "root"]
fn git_over_ssh_and_its_own_protocol() {
    let here = translucent_with(&(listeners(PORT, AT_ONCE) + &listeners(SECOND_PORT, AT_ONCE)));
    let (proxy, _host) = (here.start(), here.host());
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let [host_key, user_key, source] = ["host", "user", "source"].map(path);
    key(&host_key);
    key(&user_key);
    fs::create_dir_all("/run/sshd").unwrap(); // sshd needs it, and Debian creates it when the service starts
    fs::set_permissions("/run/sshd", Permissions::from_mode(0o755)).unwrap();
    let config = format!(
        "HostKey {host_key}\nAuthorizedKeysFile {user_key}.pub\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n\
         PasswordAuthentication no\nSetEnv GIT_CONFIG_GLOBAL=/dev/null\n"
    );
    fs::write(path("sshd"), config).unwrap();
    let mut sshd = here.lab.server.command("/usr/sbin/sshd");
    let _sshd = ChildGuard::spawn(sshd.args(["-D", "-e", "-f", &path("sshd"), "-p", &PORT.to_string()])).unwrap();
    let mut daemon = here.lab.server.command("git");
    daemon.args(["daemon", "--export-all", &format!("--port={SECOND_PORT}"), &format!("--base-path={}", path(""))]);
    let _daemon = ChildGuard::spawn(&mut daemon).unwrap().ended_gently();
    for port in [PORT, SECOND_PORT] {
        here.lab.server.wait_listening(port, PATIENCE).unwrap();
    }

    let ssh = format!(
        "ssh -F none -i {user_key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes"
    );
    let git = |arguments: &[&str]| {
        let name = ["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"];
        let own = [("GIT_SSH_COMMAND", &*ssh), ("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")];
        run(&here, &[&["git"], arguments].concat(), &[&own[..], &name.map(|name| (name, "nobody"))].concat())
    };
    let commit = |tree: &str, seed: u64| {
        let mut bytes = vec![0; 5_000_000];
        pattern::fill(seed, 0, &mut bytes);
        fs::write(Path::new(tree).join("file"), &bytes).unwrap();
        git(&["-C", tree, "add", "file"]);
        git(&["-C", tree, "commit", "-q", "-m", "File"]);
    };
    let head = |tree: &str, branch: &str| git(&["-C", tree, "rev-parse", branch]);
    git(&["init", "-q", &source]);
    commit(&source, 1);
    for family in Family::BOTH {
        let ip = in_url(SERVER.ip(family));
        let [by_ssh, by_git] = ["ssh", "git"].map(|name| path(&format!("{name}-{family:?}")));
        git(&["clone", "-q", &format!("ssh://root@{ip}:{PORT}{source}"), &by_ssh]);
        git(&["clone", "-q", &format!("git://{ip}:{SECOND_PORT}/source"), &by_git]);
        assert!([by_ssh.clone(), by_git].iter().all(|clone| head(clone, "HEAD") == head(&source, "HEAD")));
        let branch = format!("{family:?}");
        commit(&by_ssh, 2);
        git(&["-C", &by_ssh, "push", "-q", "origin", &format!("HEAD:refs/heads/{branch}")]);
        assert_eq!(head(&by_ssh, "HEAD"), head(&source, &branch));
    }
    git(&["-C", &source, "fsck", "--full", "--strict"]);
    assert_eq!(splices(&proxy, 6), [1; 6]);
    assert_eq!(proxy.count("tpot", "opened"), 6);
}

/// Several connections at once, and one on which the others are agreed upon.
#[test]
#[ignore = "root"]
fn iperf3_in_both_directions() {
    let here = translucent_with(&listeners(PORT, "policy = { splice = 1_000_000 }"));
    let (proxy, _host) = (here.start(), here.host());
    let port = PORT.to_string();
    for family in Family::BOTH {
        let ip = SERVER.ip(family).to_string();
        for direction in [&[][..], &["-R"]] {
            let mut server = here.lab.server.command("iperf3");
            let mut server = ChildGuard::spawn(server.args(["-s", "-1", "-p", &port])).unwrap();
            here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
            // at the end, iperf3 discards what is in buffers: they are kept small
            let client = ["iperf3", "-c", &ip, "-p", &port, "-P", "4", "-n", "40M", "-w", "256K", "--json"];
            let report: Value = serde_json::from_str(&run(&here, &[&client, direction].concat(), &[])).unwrap();
            let received = &report["end"]["sum_received"]["bytes"];
            assert!(received.as_u64() >= Some(20_000_000), "{direction:?}: {received}");
            assert!(server.wait(PATIENCE).is_some_and(|status| status.success()), "{}", server.output());
        }
    }
    let spliced = splices(&proxy, 20).iter().filter(|n| **n == 1).count();
    assert!(spliced >= 4, "at least one of each run: {spliced}");
    assert_eq!(["opened", "failed"].map(|name| proxy.count("tpot", name)), [20, 0]);
}

/// A page whose script fetches a file several times at once, and shows a sum of each.
const PAGE: &str = "<p>nothing yet</p><script>
const sum = bytes => new Uint8Array(bytes).reduce((sum, byte) => (sum * 31 + byte) >>> 0, 0);
const get = n => fetch('file?' + n).then(reply => reply.arrayBuffer()).then(sum);
Promise.all([1, 2, 3, 4, 5, 6, 7, 8].map(get)).then(all => document.querySelector('p').textContent = all);
</script>";

/// Requests are read on several connections, and most bodies are spliced, one after the other.
#[test]
#[ignore = "root"]
fn a_browser_is_served_through_the_tunnel() {
    let here = translucent_with(&listeners(PORT, &format!("inside = \"http\"\n{AT_ONCE}")));
    let (proxy, _host) = (here.start(), here.host());
    let site = tempfile::tempdir().unwrap();
    let mut bytes = vec![0; 3_000_000];
    pattern::fill(3, 0, &mut bytes);
    fs::write(site.path().join("index.html"), PAGE).unwrap();
    fs::write(site.path().join("file"), &bytes).unwrap();
    let sum = bytes.iter().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()));
    for family in Family::BOTH {
        let at = SERVER.port(family, PORT);
        let mut server = here.lab.server.command("python3");
        server.args(["-c", FILE_SERVER, &at.ip().to_string(), &PORT.to_string()]).current_dir(site.path());
        let _server = ChildGuard::spawn(&mut server).unwrap();
        here.lab.server.wait_listening(PORT, PATIENCE).unwrap();
        let profile = tempfile::tempdir().unwrap();
        let profile = format!("--user-data-dir={}", profile.path().display());
        let url = format!("http://{at}/");
        // its sandbox does not work for root; the time stands still while it waits for replies
        let how = ["--no-sandbox", "--disable-gpu", &profile, "--virtual-time-budget=1000", "--dump-dom", &url];
        let page = run(&here, &[&["chromium-headless-shell"], &how[..]].concat(), &[]);
        assert!(page.contains(&format!("<p>{}</p>", [sum; 8].map(|sum| sum.to_string()).join(","))), "{sum}: {page}");
    }
    assert!(proxy.count("tpot", "opened") >= 4);
    assert!(proxy.count("proxy", "replies_spliced") >= 8);
}
