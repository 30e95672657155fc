//! Each example of a configuration in README.md and docs starts, and stops again. Needs root and eBPF.

use crate::running::{LONGSPLICE, Pins, eventually};
use longsplice_lab::{Lab, Shape};
use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

/// Devices and addresses that the examples name.
const PLACE: &str = "link add eth0 type veth peer name eth1\n\
                     link add veth0 type veth peer name veth1\n\
                     addr add 192.0.2.1/24 dev eth0\n\
                     addr add 192.0.2.2/24 dev eth0\n\
                     addr add 2001:db8::1/64 dev eth0 nodad\n\
                     link set eth0 up\nlink set eth1 up\nlink set veth0 up\n";

/// Directories of absolute paths in the examples, in a mount namespace of the program.
const DIRECTORIES: &str = "for at in /var/log /var/cache /run; do mount -t tmpfs none $at; done; \
                           mkdir /var/log/longsplice /run/longsplice; chmod 700 /run/longsplice; exec \"$0\" \"$@\"";

/// What the examples leave out because it was said before.
const LISTENER: &str = "[[listener]]\nprotocol = \"socks5\"\nlisten = \"192.0.2.1:1080\"\n";

fn blocks(text: &str) -> impl Iterator<Item = &str> {
    text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap())
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "root"]
fn every_example_starts() {
    let lab = Lab::simple(Shape::TwoDevices).unwrap();
    lab.forwarder.ip(PLACE).unwrap();
    lab.forwarder.ip(&format!("link set veth1 netns {}\n", lab.client.name())).unwrap();
    lab.client.ip("link set veth1 up\n").unwrap();
    let _pins = (Pins::of(&lab.forwarder), Pins::of_tpot(&lab.forwarder));
    let dir = tempfile::tempdir().unwrap();
    let secret = |name: &str, text: &str| {
        let file = dir.path().join(name);
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    };
    secret("users", "carl:pw\n");
    ["404.html", "error.html"].iter().for_each(|page| secret(page, "<p>It fails</p>"));
    secret("tpot.keys", "000102030405060708090a0b0c0d0e0f\n");
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<_> = fs::read_dir(top.join("docs")).unwrap().map(|page| page.unwrap().path()).collect();
    pages.push(top.join("README.md"));
    let pages: Vec<String> = pages.iter().map(|page| fs::read_to_string(page).unwrap()).collect();
    let all: Vec<&str> = pages.iter().flat_map(|page| blocks(page)).collect();
    assert!(all.len() > 40, "{}", all.len());
    for example in all {
        let listens = example.contains("[[listener]]");
        let example = example.replace("/etc/longsplice/users", "users");
        let text = if listens { example } else { format!("{example}\n{LISTENER}") };
        secret("longsplice.toml", &text);
        start_and_stop(&lab, dir.path(), &text);
    }
}

fn start_and_stop(lab: &Lab, dir: &Path, text: &str) {
    let messages = dir.join("messages");
    let said = || fs::read_to_string(&messages).unwrap();
    let mut command: Command = lab.forwarder.command("unshare");
    command.args(["--mount", "sh", "-c", DIRECTORIES, LONGSPLICE, "run", "--config"]).arg(dir.join("longsplice.toml"));
    // Loading the programs takes most of the time, and these alone need them.
    let needs_them = ["devices", "xdp", "peer", "tpot", "transparent", "end-to-end", "at-once", "hold"];
    if !needs_them.iter().any(|word| text.contains(word)) {
        command.arg("--copy-only");
    }
    // the usual path may be that of another test
    if !text.lines().any(|line| line.starts_with("control = ")) {
        command.arg("--control").arg(dir.join("control.sock"));
    }
    command.env_remove("RUST_LOG").env_remove("LONGSPLICE_CONTROL").stdin(Stdio::null()).stdout(Stdio::null());
    let mut proxy = Ended(command.stderr(File::create(&messages).unwrap()).spawn().unwrap());
    eventually("the start", || {
        let ended = proxy.0.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}\n{}\n{text}", said());
        said().contains("control socket").then_some(())
    });
    let pid = nix::unistd::Pid::from_raw(proxy.0.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let status = eventually("the end", || proxy.0.try_wait().unwrap());
    assert!(status.success(), "{}\n{text}", said());
    // an example has nothing to be warned of, but for what is told of its place
    let doubtful = |line: &&str| line.contains("longsplice.toml:");
    let alone = text.ends_with(LISTENER); // nothing leads to its pool
    assert!(alone || said().lines().find(doubtful).is_none(), "{}\n{text}", said());
}
