//! Where a variant is measured: a lab of its own, so that its programs cost the other variants nothing, and the programs in it.
//!
//! A [`Venue`] has pins, programs, and their files. A measurement adds its ends to it: [`Near`] has a client and a server in this
//! process, [`super::site`] an origin of nginx, [`super::far`] long and lossy links, [`super::flood`] a generator of packets, and
//! [`super::million`] many addresses.

use super::{
    Result,
    network::{PATIENCE, PORT, Packets, Pins, START, accept, lab, listen, proxy, server},
    peers::Peer,
    variant::Variant,
};
use longsplice::Client;
use longsplice_lab::{
    ChildGuard, Family, Lab, LabError, Namespace,
    process::wait_for,
    topology,
    traffic::{socks5_address, socks5_answer},
};
use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Seconds until sockets of [`Variant::Released`] are closed.
const RELEASE: f64 = 0.1;

/// A lab with programs in it. Fields are dropped in order: programs before their namespaces.
pub struct Venue<E = ()> {
    /// The variant in the middle.
    pub variant: Variant,
    /// The last one first: proxies before the server that they use.
    programs: Vec<ChildGuard>,
    pins: Vec<Pins>,
    /// What a measurement has at its ends.
    pub ends: E,
    /// The network.
    pub lab: Lab,
    dir: tempfile::TempDir,
}

impl Venue {
    /// A venue without programs and ends.
    pub fn new(variant: Variant, lab: Lab) -> Result<Venue> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-").tempdir()?;
        let hosts = [&lab.forwarder, &lab.client].into_iter().chain(&lab.second);
        let pins = hosts.map(Pins::at).collect::<Result<_>>()?;
        Ok(Venue { variant, programs: Vec::new(), pins, ends: (), lab, dir })
    }

    /// The same with ends.
    pub fn with<E>(self, ends: E) -> Venue<E> {
        let Venue { variant, programs, pins, lab, dir, .. } = self;
        Venue { variant, programs, pins, ends, lab, dir }
    }
}

impl<E> Venue<E> {
    /// Starts a longsplice with a directory of this name for its files, and waits until it is ready. Like the
    /// other proxies it has no access log, unless the arguments name one.
    pub fn longsplice(&mut self, at: &Namespace, name: &str, config: &str, arguments: &[&str]) -> Result<()> {
        let dir = self.path(name);
        fs::create_dir(&dir)?;
        let file = dir.join("longsplice.toml");
        fs::write(&file, format!("log = {{ file = \"off\" }}\n{config}"))?;
        let mut run = longsplice(at, Some(&dir.join(CONTROL)))?;
        run.current_dir(&dir).args(["run", "--config"]).arg(&file).args(arguments);
        let guard = when_ready(ChildGuard::spawn(&mut run)?, |guard| guard.wait_output("control socket", START))?;
        let words = guard.output();
        if words.contains("are copied, not spliced") {
            return Err(format!("this machine cannot splice:\n{words}").into());
        }
        self.programs.insert(0, guard);
        Ok(())
    }

    /// Starts a program of others with this configuration, and waits until it listens at the port.
    pub fn peer(&mut self, at: &Namespace, peer: Peer, name: &str, config: &str, port: u16) -> Result<()> {
        let (dir, file) = (self.dir.path(), self.path(&format!("{name}.conf")));
        let pid = dir.join(format!("{name}.pid"));
        fs::write(&file, config)?;
        let mut run = at.command(peer.program());
        match peer {
            Peer::Haproxy => run.arg("-db").arg("-f").arg(&file),
            Peer::Dante => run.arg("-f").arg(&file).arg("-p").arg(pid),
            Peer::Socat => run.args(config.split_whitespace().skip(1)),
            // Settings of this machine are not part of the printed configuration.
            _ => {
                run.args(["-e", "stderr", "-p"]).arg(dir).arg("-c").arg(&file).args(["-g", &Peer::nginx_globals(&pid)])
            }
        };
        self.serve(at, &mut run, port)
    }

    /// Starts any program, and waits until it listens at the port.
    pub fn serve(&mut self, at: &Namespace, run: &mut Command, port: u16) -> Result<()> {
        let mut guard = ChildGuard::spawn(run)?.ended_gently();
        wait_for(START, || (at.listening(port) || !guard.is_running()).then_some(()));
        if !at.listening(port) {
            return Err(format!("{run:?} does not listen on port {port}; it said:\n{}", guard.output()).into());
        }
        self.programs.insert(0, guard);
        Ok(())
    }

    /// Makes the client's host ask for translucent proxies. `udp`: the value of `--udp`.
    pub fn ask_for_proxies(&mut self, udp: &str) -> Result<()> {
        let [v4, v6] = Family::BOTH.map(|family| topology::FORWARDER_TO_CLIENT.ip(family).to_string());
        self.host(&["--udp", udp, "--port", &PORT.to_string(), "--proxy", &v4, "--proxy", &v6])
    }

    /// Runs `longsplice tpot host` at the client.
    pub fn host(&mut self, arguments: &[&str]) -> Result<()> {
        let mut run = longsplice(&self.lab.client, None)?;
        run.args(["tpot", "host"]).args(arguments);
        let host = when_ready(ChildGuard::spawn(&mut run)?, |guard| guard.wait_output("asking for proxies", START))?;
        self.programs.push(host);
        Ok(())
    }

    /// Runs longsplice at a host with the control socket of the one with this name, and returns its output.
    pub fn ask(&self, at: &Namespace, name: &str, arguments: &[&str]) -> Result<String> {
        output(longsplice(at, Some(&self.path(name).join(CONTROL)))?.args(arguments))
    }

    /// Path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Connects to the control socket of the longsplice with this name.
    pub fn control(&self, name: &str) -> Result<Client> {
        Ok(Client::connect(Some(&self.path(name).join(CONTROL)))?)
    }

    /// Process ID of the program that was started last.
    pub fn pid(&self) -> Option<u32> {
        self.programs.first().map(ChildGuard::pid)
    }

    /// The host that asks for proxies: it has no other child of its own after it.
    pub fn asking(&mut self) -> Result<&mut ChildGuard> {
        self.programs.last_mut().ok_or_else(|| "no program was started".into())
    }

    /// The program that was started last.
    pub fn program(&mut self) -> Result<&mut ChildGuard> {
        self.programs.first_mut().ok_or_else(|| "no program was started".into())
    }

    /// The data path's folder of pins in the forwarder.
    pub fn pinned(&self) -> &Path {
        self.pins[0].folder()
    }

    /// The last lines of the programs' output.
    pub fn last_words(&self) -> String {
        let output = self.programs.iter().map(ChildGuard::output).collect::<String>();
        let lines: Vec<&str> = output.lines().rev().take(5).collect();
        lines.iter().rev().map(|line| format!("\n  {line}")).collect()
    }
}

const CONTROL: &str = "control.sock";
/// Name of the only longsplice of most venues.
pub const OURS: &str = "longsplice";

/// A command of longsplice at a host, with this control socket.
pub fn longsplice(at: &Namespace, control: Option<&Path>) -> Result<Command> {
    let mut run = at.command(crate::program()?.to_str().ok_or("the path of this program is no text")?);
    run.env_remove("RUST_LOG").env_remove("LONGSPLICE_CONTROL").envs(control.map(|path| ("LONGSPLICE_CONTROL", path)));
    Ok(run)
}

/// Runs a command to its end. Returns its output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}

/// Waits until a program is ready. If it does not become ready, the error contains its output.
pub fn when_ready(
    mut guard: ChildGuard,
    ready: impl FnOnce(&mut ChildGuard) -> std::result::Result<(), LabError>,
) -> Result<ChildGuard> {
    ready(&mut guard).map_err(|e| format!("{e}; it said:\n{}", guard.output()))?;
    Ok(guard)
}

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
    let chain = match variant {
        Variant::Filter => {
            let no = (1..=10).map(|n| format!("ip saddr 192.0.2.{n} ip daddr {server} tcp dport {n} drop\n"));
            format!(
                "chain forward {{ type filter hook forward priority filter; policy drop;\n{}\
                 ip saddr {client} ip daddr {server} tcp dport {PORT} accept\n\
                 ip saddr {server} ip daddr {client} tcp sport {PORT} accept\n",
                no.collect::<String>()
            )
        }
        Variant::Nat => {
            "chain postrouting { type nat hook postrouting priority srcnat;\noifname \"f1\" masquerade\n".into()
        }
        _ => return None,
    };
    Some(format!("table ip bench {{\n{chain}}}\n}}\n"))
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

/// A client and a server in this process, and the variant between them.
pub type Near = Venue<Wire>;

/// How the connections of a near client arrive.
pub struct Wire {
    listener: TcpListener,
    /// State that connections must reach before they are used.
    becomes: Option<&'static str>,
}

/// Both ends of a connection.
pub struct Pair {
    /// The client's end.
    pub client: TcpStream,
    /// The server's end.
    pub server: TcpStream,
}

impl Near {
    /// Sets up a venue. Programs run on the CPUs of the calling thread.
    pub fn set(variant: Variant, packets: Packets) -> Result<Near> {
        Near::releasing(variant, packets, (variant == Variant::Released).then_some(RELEASE))
    }

    /// The same; longsplice closes the sockets of spliced flows after this many seconds.
    pub fn releasing(variant: Variant, packets: Packets, release_after: Option<f64>) -> Result<Near> {
        let lab = lab(packets, variant.routed())?;
        // There are thousands of connections from one address, none of which should meet the remains of an earlier one.
        lab.client.sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
        let (host, address) = match variant {
            Variant::Direct => (&lab.forwarder, proxy()),
            _ => (&lab.server, server()),
        };
        let listener = host.run(|| listen(address))?;
        let mut venue = Venue::new(variant, lab)?;
        venue.start(release_after)?;
        let spliced = if variant == Variant::Released { "released" } else { "spliced" };
        Ok(venue.with(Wire { listener, becomes: variant.is_spliced().then_some(spliced) }))
    }

    /// A dialler for threads in the client's namespace.
    pub fn dialler(&self) -> Dialler {
        let target = if self.variant.to_server() { server() } else { proxy() };
        Dialler { target, socks: self.variant.socks() }
    }

    /// Opens connections one after another, passes a byte through
    /// each, and waits until they are spliced, if the variant splices.
    pub fn connect(&self, count: usize) -> Result<Vec<Pair>> {
        let dialler = self.dialler();
        let open = || (0..count).map(|_| self.open(&dialler).map_err(|e| e.to_string())).collect();
        let pairs: std::result::Result<Vec<Pair>, String> = self.lab.client.run(open);
        let pairs = pairs.map_err(|e| format!("{}: {e}{}", self.variant, self.last_words()))?;
        if let Some(state) = self.ends.becomes {
            self.wait_state(&pairs, state)?;
        }
        Ok(pairs)
    }

    /// Opens one connection, and waits only for a byte each way. Must be called inside the client's namespace.
    fn open(&self, dialler: &Dialler) -> Result<Pair> {
        let mut client = dialler.ask()?;
        let mut server = accept(&self.ends.listener, PATIENCE)?.ok_or("no connection arrives at the server")?;
        dialler.answered(&mut client)?;
        limit(&server)?;
        client.write_all(b"?")?;
        server.read_exact(&mut [0])?;
        server.write_all(b"!")?;
        client.read_exact(&mut [0])?;
        Ok(Pair { client, server })
    }

    /// Duplicates the server's listening socket, for a thread that accepts by itself ([`accept`]).
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.ends.listener.try_clone()
    }

    fn wait_state(&self, pairs: &[Pair], state: &str) -> Result<()> {
        let clients: std::collections::HashSet<String> =
            pairs.iter().map(|p| Ok(p.client.local_addr()?.to_string())).collect::<Result<_>>()?;
        let mut control = self.control(OURS)?;
        let done = wait_for(PATIENCE, || match longsplice::flows(&mut control) {
            Err(e) => Some(Err(e)),
            Ok(rows) => {
                let ours: Vec<_> = rows.iter().filter(|row| clients.contains(&row.client)).collect();
                if let Some(why) = ours.iter().find_map(|row| row.refusal.as_ref()) {
                    return Some(Err(format!("a flow was not spliced: {why}").into()));
                }
                (ours.iter().filter(|row| row.state == state).count() == clients.len()).then_some(Ok(()))
            }
        });
        done.unwrap_or_else(|| Err(format!("the connections were not {state} in time").into()))
    }
}

impl Venue {
    /// Starts what a variant needs between a near client and a near server.
    fn start(&mut self, release_after: Option<f64>) -> Result<()> {
        let (variant, at) = (self.variant, self.lab.forwarder.clone());
        if let Some(rules) = ruleset(variant) {
            return load_rules(&self.lab, &rules);
        }
        if let Some(peer) = variant.peer() {
            return self.peer(&at, peer, "peer", &peer.config().unwrap_or_default(), PORT);
        }
        if variant.tpot() || variant.is_longsplice() {
            let when = variant.splice();
            let mut arguments = when.as_ref().map_or(vec![], |when| vec!["--splice", when]);
            let devices = [self.lab.client_device(), self.lab.server_device()];
            if variant == Variant::SplicedPeer {
                arguments.extend(devices.iter().flat_map(|device| ["--peer", device]));
            }
            self.longsplice(&at, OURS, &longsplice_config(variant, release_after), &arguments)?;
        }
        variant.udp().map_or(Ok(()), |udp| self.ask_for_proxies(udp))
    }
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

/// How the client reaches the server.
#[derive(Clone)]
pub struct Dialler {
    target: SocketAddr,
    socks: bool,
}

impl Dialler {
    /// Opens a connection that carries bytes to the server and back.
    pub fn dial(&self) -> io::Result<TcpStream> {
        let mut stream = self.ask()?;
        self.answered(&mut stream)?;
        Ok(stream)
    }

    /// Connects, and sends the destination if the proxy needs it: the server can accept now.
    fn ask(&self) -> io::Result<TcpStream> {
        let mut stream = connect(self.target)?;
        if self.socks {
            // RFC 1928: version 5, one method (none); CONNECT.
            stream.write_all(&[5, 1, 0])?;
            stream.read_exact(&mut [0; 2])?;
            stream.write_all(&[&[5, 1, 0], &socks5_address(server())[..]].concat())?;
        }
        Ok(stream)
    }

    /// Waits until the proxy has connected to the server.
    fn answered(&self, stream: &mut TcpStream) -> io::Result<()> {
        if self.socks {
            socks5_answer(stream)?;
        }
        Ok(())
    }
}

/// Connects with time limits for everything.
pub fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    limit(&stream)?;
    Ok(stream)
}

pub fn limit(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "root"]
    fn a_program_that_ends_is_not_waited_for() {
        let mut venue = Venue::new(Variant::Direct, lab(Packets::Large, false).unwrap()).unwrap();
        let at = venue.lab.server.clone();
        let why = venue.serve(&at, &mut at.command("false"), PORT).unwrap_err().to_string();
        assert!(why.contains("does not listen on port 7000"), "{why}");
    }

    #[test]
    fn a_dozen_rules() {
        let rules = ruleset(Variant::Filter).unwrap();
        assert_eq!(rules.lines().filter(|l| l.starts_with("ip saddr")).count(), 12);
        assert!(rules.contains("ip saddr 10.77.1.2/24 ip daddr 10.77.2.2 tcp dport 7000 accept"), "{rules}");
        assert!(ruleset(Variant::IpForward).is_none());
    }
}
