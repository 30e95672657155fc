//! Programs that the bench starts in the forwarder: longsplice and
//! other proxies, each configured as its documentation advises.

use super::{
    Result,
    network::{PATIENCE, PORT, proxy, server},
    peers::{Peer, STREAM_MODULE},
    variant::Variant,
};
use longsplice_lab::{ChildGuard, Family, Lab, LabError, Namespace, topology};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Why a variant is not available here; `None` if it is.
pub fn lacks(variant: Variant) -> Option<String> {
    let peer = variant.peer()?;
    if !peer.installed() {
        return Some(format!("{variant}, which is not installed (apt-get install {})", peer.packages()));
    }
    let rules = ruleset(variant)?;
    let tried = nft(Command::new("unshare").args(["--net", peer.program()]), &rules);
    tried.err().map(|e| format!("{variant}, which this kernel does not have: {e}"))
}

/// The nft ruleset of a variant: ten rules that do not match, and one for each direction of the client's network.
pub fn ruleset(variant: Variant) -> Option<String> {
    let (client, server) = (format!("{}/24", topology::CLIENT.v4), topology::SERVER.v4);
    match variant {
        Variant::Filter => {
            let mut rules = "table ip bench {\nchain forward { type filter hook forward priority filter; policy drop;\n".to_owned();
            for n in 1..=10 {
                rules += &format!("ip saddr 192.0.2.{n} ip daddr {server} tcp dport {n} drop\n");
            }
            rules += &format!("ip saddr {client} ip daddr {server} tcp dport {PORT} accept\n");
            rules += &format!("ip saddr {server} ip daddr {client} tcp sport {PORT} accept\n}}\n}}\n");
            Some(rules)
        }
        Variant::Nat => Some(
            "table ip bench {\nchain postrouting { type nat hook postrouting priority srcnat;\noifname \"f1\" masquerade\n}\n}\n"
                .to_owned(),
        ),
        _ => None,
    }
}

/// Loads these rules in the forwarder.
pub fn load_rules(lab: &Lab, rules: &str) -> Result<()> {
    nft(&mut lab.forwarder.command(Peer::Nft.program()), rules)
}

fn nft(command: &mut Command, rules: &str) -> Result<()> {
    let command = command.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut nft = command.spawn()?;
    if let Some(mut stdin) = nft.stdin.take() {
        stdin.write_all(rules.as_bytes())?;
    }
    let done = nft.wait_with_output()?;
    if done.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or("nft failed").to_owned().into())
}

/// Starts the program of a variant; `None` if the kernel does everything.
pub fn start(variant: Variant, lab: &Lab, dir: &Path, release_after: Option<f64>) -> Result<Option<ChildGuard>> {
    let Some(peer) = variant.peer() else {
        let ours = variant.tpot() || (!variant.routed() && variant != Variant::Direct);
        return ours.then(|| start_longsplice(variant, lab, dir, release_after)).transpose();
    };
    if let Some(rules) = ruleset(variant) {
        return load_rules(lab, &rules).map(|()| None);
    }
    let config = peer.config().unwrap_or_default();
    let file = dir.join("peer.conf");
    let mut run = lab.forwarder.command(peer.program());
    match peer {
        Peer::Haproxy => run.arg("-db").arg("-f").arg(&file),
        Peer::Dante => run.arg("-f").arg(&file).arg("-p").arg(dir.join("danted.pid")),
        Peer::Socat => run.args(config.split_whitespace().skip(1)),
        _ => run.args(["-e", "stderr", "-p"]).arg(dir).arg("-c").arg(&file).arg("-g").arg(nginx_globals(dir)),
    };
    fs::write(&file, &config)?;
    let guard = ChildGuard::spawn(&mut run)?.ended_gently();
    when_ready(guard, |_| lab.forwarder.wait_listening(PORT, PATIENCE)).map(Some)
}

/// Waits until a program is ready. If it does not become ready, the error contains its output.
pub fn when_ready(
    mut guard: ChildGuard,
    ready: impl FnOnce(&mut ChildGuard) -> std::result::Result<(), LabError>,
) -> Result<ChildGuard> {
    ready(&mut guard).map_err(|e| format!("{e}; it said:\n{}", guard.output()))?;
    Ok(guard)
}

/// Settings of this machine, which are not part of the printed configuration.
fn nginx_globals(dir: &Path) -> String {
    let module =
        if Path::new(STREAM_MODULE).exists() { format!("load_module {STREAM_MODULE};") } else { String::new() };
    format!("{module} pid {};", dir.join("nginx.pid").display())
}

fn start_longsplice(variant: Variant, lab: &Lab, dir: &Path, release_after: Option<f64>) -> Result<ChildGuard> {
    let when = variant.splice();
    let mut arguments = when.as_ref().map_or(vec![], |when| vec!["--splice", when]);
    if variant == Variant::SplicedPeer {
        arguments.extend(["--peer", lab.client_device(), "--peer", lab.server_device()]);
    }
    let guard = run_longsplice(&lab.forwarder, dir, &longsplice_config(variant, release_after), &arguments, PATIENCE)?;
    let words = guard.output();
    if words.contains("are copied, not spliced") {
        return Err(format!("this machine cannot splice:\n{words}").into());
    }
    Ok(guard)
}

/// Starts longsplice in a forwarder with its files in `dir` ([`control_socket`]), and waits within the limit until it is
/// ready. Like the other proxies it has no access log, unless the arguments name one.
pub fn run_longsplice(
    at: &Namespace,
    dir: &Path,
    config: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<ChildGuard> {
    let program = crate::program()?;
    let mut run = at.command(program.to_str().ok_or("the path of this program is no text")?);
    let file = dir.join("longsplice.toml");
    fs::write(&file, format!("log = {{ file = \"off\" }}\n{config}"))?;
    run.env("LONGSPLICE_CONTROL", control_socket(dir)).env_remove("RUST_LOG").current_dir(dir);
    run.args(["run", "--config"]).arg(&file).args(arguments);
    when_ready(ChildGuard::spawn(&mut run)?, |guard| guard.wait_output("control socket", limit))
}

/// Makes the client's host ask for translucent proxies. `udp`: the value of `--udp`.
pub fn ask_for_proxies(lab: &Lab, udp: &str) -> Result<ChildGuard> {
    let program = crate::program()?;
    let mut run = lab.client.command(program.to_str().ok_or("the path of this program is no text")?);
    run.env_remove("RUST_LOG").args(["tpot", "host", "--udp", udp, "--port", &PORT.to_string()]);
    for family in Family::BOTH {
        run.args(["--proxy", &topology::FORWARDER_TO_CLIENT.ip(family).to_string()]);
    }
    when_ready(ChildGuard::spawn(&mut run)?, |guard| guard.wait_output("asking for proxies", PATIENCE))
}

/// Path of the control socket.
pub fn control_socket(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// The configuration of longsplice: one listener, with limits that fit a single client.
pub fn longsplice_config(variant: Variant, release_after: Option<f64>) -> String {
    let (own, target) = (proxy(), server());
    let serves = match variant {
        Variant::Identity => format!("protocol = \"transparent\"\nlisten = \"{target}\"\n"),
        tpot if tpot.tpot() => format!("protocol = \"tpot\"\nlisten = \"0.0.0.0:{PORT}\"\n"),
        socks if socks.socks() => format!("protocol = \"socks5\"\nlisten = \"{own}\"\n"),
        _ => format!("protocol = \"plug\"\nlisten = \"{own}\"\ntarget = \"{target}\"\n"),
    };
    let policy = release_after.map_or_else(String::new, |s| format!("policy = {{ release_after = {s} }}\n"));
    let udp = if variant.udp() == Some("always") { "[tpot]\nudp = \"always\"\n" } else { "" };
    format!("[[listener]]\n{serves}limits = {{ connections_per_client = 4096 }}\n{policy}{udp}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dozen_rules() {
        let rules = ruleset(Variant::Filter).unwrap();
        assert_eq!(rules.lines().filter(|l| l.starts_with("ip saddr")).count(), 12);
        assert!(rules.contains("ip saddr 10.77.1.2/24 ip daddr 10.77.2.2 tcp dport 7000 accept"), "{rules}");
        assert!(ruleset(Variant::IpForward).is_none());
    }
}
