//! The socket that speaks as HAProxy's: what people have for HAProxy sees connections through a pool of two servers, takes
//! servers out, and ends connections. Debian packages: hatop, prometheus-haproxy-exporter, socat, netcat-openbsd; the tests
//! with these need root.

use crate::running::{
    AT_ONCE, LONGSPLICE, Running, Setting, connect, eventually, listener, longsplice, loopback_echo, round_trip,
};
use longsplice_lab::{
    Family,
    process::ChildGuard,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};
use tempfile::TempDir;

/// Time limit for every answer and every program.
const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 7030;
/// Ports of the servers.
const SERVERS: [u16; 2] = [7031, 7032];

fn client_of(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends a line and returns what comes until the end.
fn ask(socket: &Path, line: &str) -> String {
    let mut stream = client_of(socket);
    // at once: after a whole line, the program may close before the rest has come
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

/// A client that may be silent for as long as a busy machine needs.
fn talking(socket: &Path) -> UnixStream {
    let mut stream = client_of(socket);
    stream.write_all(b"prompt; set timeout cli 10m\n").unwrap();
    stream.read_exact(&mut [0; 6]).unwrap();
    stream
}

/// The rows of `show stat` by name of proxy and service, each with the columns that have something.
fn figures(socket: &Path) -> BTreeMap<String, BTreeMap<String, String>> {
    let said = ask(socket, "show stat");
    let mut lines = said.lines();
    let columns: Vec<&str> = lines.next().unwrap().strip_prefix("# ").unwrap().split(',').collect();
    let row = |line: &str| {
        let values: Vec<&str> = line.split(',').collect();
        assert_eq!(values.len(), columns.len(), "{line}");
        let filled = columns.iter().zip(values).filter(|(_, value)| !value.is_empty());
        let row: BTreeMap<_, _> = filled.map(|(name, value)| (String::from(*name), value.to_owned())).collect();
        (format!("{}/{}", row["pxname"], row["svname"]), row)
    };
    lines.filter(|line| !line.is_empty()).map(row).collect()
}

/// A value of `show info`.
fn info(socket: &Path, name: &str) -> String {
    let said = ask(socket, "show info");
    let value = said.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(String::from));
    value.unwrap_or_else(|| panic!("no {name}: {said}"))
}

/// A proxy on the loopback device with a pool of two servers that echo, which copies.
struct Local {
    dir: TempDir,
    servers: [String; 2],
}

impl Local {
    fn new() -> Local {
        let local = Local { dir: tempfile::tempdir().unwrap(), servers: [(); 2].map(|()| loopback_echo()) };
        local.configure(&local.control("haproxy.sock"));
        local
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("haproxy.sock")
    }

    fn file(&self) -> PathBuf {
        self.path("longsplice.toml")
    }

    fn control(&self, name: &str) -> String {
        format!("[control]\nhaproxy = \"{}\"\n", self.path(name).display())
    }

    fn configure(&self, control: &str) {
        let front = listener("plug", "127.0.0.1:0", "name = \"front\"\npool = \"db\"");
        fs::write(self.file(), format!("{control}{front}[pool.db]\nservers = {:?}\n", self.servers)).unwrap();
    }

    fn start(&self) -> Running {
        let file = self.file();
        let arguments = ["--copy-only", "--config", file.to_str().unwrap()];
        Running::start(Command::new(LONGSPLICE), None, &arguments, &[])
    }

    /// Starts one that must not.
    fn refused(&self) -> String {
        let out = longsplice(&["run", "--copy-only", "--config", self.file().to_str().unwrap()]);
        assert!(!out.status.success(), "{out:?}");
        String::from_utf8(out.stderr).unwrap()
    }

    /// The server, as the socket names it.
    fn name(&self, number: usize) -> String {
        format!("db/{}", self.servers[number])
    }
}

/// A client whose connection is relayed.
fn served(at: SocketAddr) -> TcpStream {
    let mut client = connect(at);
    round_trip(&mut client, b"hello");
    client
}

#[test]
fn answers_end_with_an_empty_line() {
    let local = Local::new();
    let proxy = local.start();
    let socket = local.socket();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600, "as the control socket");
    assert_eq!(ask(&socket, "show backend"), "# name\ndb\n\n");
    assert_eq!(ask(&socket, "show backend; show cli level ;"), "# name\ndb\n\nadmin\n\n");
    assert_eq!(ask(&socket, "show cli level; quit; show cli level"), "admin\n\n");
    assert!(ask(&socket, "show version").starts_with("2.6.0-longsplice-"));
    assert!(ask(&socket, "help").starts_with("The following commands are valid at this level:\n  disable server"));
    for line in ["", "show nothing", "@1 show info"] {
        let said = ask(&socket, line);
        assert!(said.starts_with("Unknown command.") && said.ends_with("disconnect\n\n"), "{said}");
    }
    assert!(ask(&socket, "set maxconn frontend front 9").contains("cannot be set at run time"));
    assert!(ask(&socket, "show pools").ends_with("Total: 0 pools, 0 bytes allocated, 0 used.\n\n"));
    assert_eq!(ask(&socket, "show stat nobody -1 -1"), "No such proxy.\n\n");
    let stat: Value = serde_json::from_str(&ask(&socket, "show stat json")).unwrap();
    assert_eq!(stat.as_array().unwrap().len(), 4, "listener, two servers, pool");
    let all: Value = serde_json::from_str(&ask(&socket, "show info json")).unwrap();
    assert!(all.as_array().unwrap().iter().any(|field| field["value"]["value"] == proxy.id()));
    let typed = ask(&socket, "show stat typed");
    assert!(typed.starts_with("F.2.0.0.pxname.1:KNS:str:front\n") && typed.ends_with("\n\n"), "{typed}");
    assert_eq!(info(&socket, "Pid"), proxy.id().to_string());
}

/// The prompt, and several lines on one connection.
#[test]
fn operators_talk() {
    let local = Local::new();
    let _proxy = local.start();
    let mut stream = client_of(&local.socket());
    let mut expect = |send: &str, want: &str| {
        stream.write_all(send.as_bytes()).unwrap();
        let mut said = vec![0; want.len()];
        stream.read_exact(&mut said).unwrap();
        assert_eq!(String::from_utf8_lossy(&said), want);
    };
    expect("prompt\n", "\n> ");
    expect("set timeout cli 60\n", "\n> ");
    expect("show backend; show cli level\n", "# name\ndb\n\n> admin\n\n> ");
    expect("\n", "\n> ");
    expect(&format!("get weight {}\n", local.name(0)), "1 (initial 1)\n\n> ");
    expect("quit\n", "");
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    // two lines that come together are both answered, without a prompt too
    assert_eq!(ask(&local.socket(), "show cli level\nshow backend"), "admin\n\n# name\ndb\n\n");
}

/// Traffic goes to the other server, and what a server has goes on.
#[test]
fn servers_are_taken_out_and_back() {
    let local = Local::new();
    let proxy = local.start();
    let (at, socket) = (proxy.address(), local.socket());
    let names = [0, 1].map(|number| local.name(number));
    let has = |scur: [&str; 2], status: [&str; 2]| {
        let all = figures(&socket);
        for number in [0, 1] {
            let row = &all[&names[number]];
            assert_eq!([&row["scur"], &row["status"]], [scur[number], status[number]], "{all:?}");
        }
    };
    let mut clients = vec![served(at), served(at)];
    has(["1", "1"], ["UP", "UP"]);
    for (number, (line, status)) in [
        ("set server NAME state drain", "DRAIN"),
        ("set server NAME state maint", "MAINT"),
        ("disable server NAME", "MAINT"),
        ("set weight NAME 0", "DRAIN"),
        ("set server NAME weight 0%", "DRAIN"),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(ask(&socket, &line.replace("NAME", &names[0])), "\n", "{line}");
        clients.extend([served(at), served(at)]);
        has(["1", &(3 + 2 * number).to_string()], [status, "UP"]);
        let undo = "enable server NAME; set weight NAME 100%".replace("NAME", &names[0]);
        assert_eq!(ask(&socket, &undo), "\n\n");
        has(["1", &(3 + 2 * number).to_string()], ["UP", "UP"]);
    }
    clients.iter_mut().for_each(|client| round_trip(client, b"still there"));
    let row = &figures(&socket)["db/BACKEND"];
    assert_eq!([&row["status"], &row["act"], &row["stot"], &row["weight"]], ["UP", "2", "12", "2"]);
    let row = &figures(&socket)["front/FRONTEND"];
    assert_eq!([&row["status"], &row["scur"], &row["stot"], &row["mode"]], ["OPEN", "12", "12", "tcp"]);

    // a part of the weight, names by number, and what is said of others
    assert_eq!(ask(&socket, &format!("set weight {} 200%", names[1])), "\n");
    assert_eq!(ask(&socket, "get weight #3/#2; get weight #3/#1"), "2 (initial 1)\n\n1 (initial 1)\n\n");
    let pools: Value = serde_json::from_str(&proxy.client(&["pools", "--json"])).unwrap();
    assert_eq!(pools[0]["members"][1]["weight"], 2, "as `longsplice weight` would have told it");
    for (line, want) in [
        ("get weight db/192.0.2.1:1", "No such server.\n\n"),
        ("get weight nobody/192.0.2.1:1", "No such backend.\n\n"),
        ("get weight #3/#3", "No such server.\n\n"),
        ("get weight front/a", "No such backend.\n\n"),
        ("disable server db", "Require 'backend/server'.\n\n"),
        ("show servers state nobody", "Can't find backend.\n\n"),
    ] {
        assert_eq!(ask(&socket, line), want, "{line}");
    }
    let state = ask(&socket, "show servers state db");
    let lines: Vec<Vec<&str>> = state.lines().skip(2).map(|line| line.split(' ').collect()).collect();
    assert_eq!(lines[0][..9], ["3", "db", "1", &local.servers[0], "127.0.0.1", "2", "0", "1", "1"]);
    assert!(ask(&socket, "show servers conn").contains(&format!("{} 3/2 127.0.0.1 ", names[1])));
}

/// A server in maintenance is not checked: whatever it does, it stays so, and has its share again when that is over.
#[test]
fn a_server_in_maintenance_is_not_checked() {
    let local = Local::new();
    let servers = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let names = servers.each_ref().map(|server| server.local_addr().unwrap().to_string());
    let front = listener("plug", "127.0.0.1:0", "name = \"front\"\npool = \"db\"");
    let pool = format!("[pool.db]\nservers = {names:?}\ncheck = {{ interval = 0.05, fall = 1, rise = 1 }}\n");
    fs::write(local.file(), format!("{}{front}{pool}", local.control("haproxy.sock"))).unwrap();
    let proxy = local.start();
    let status = || figures(&local.socket())[&format!("db/{}", names[0])]["status"].clone();
    let tell = |state: &str| ask(&local.socket(), &format!("set server db/{} state {state}", names[0]));
    let [server, other] = servers;
    let is_checked = |server: &TcpListener, times: usize| {
        server.set_nonblocking(true).unwrap();
        (0..times).for_each(|_| drop(eventually("a check", || server.accept().ok())));
    };
    is_checked(&server, 1);
    tell("maint");
    drop(server);
    is_checked(&other, 10); // in this time, it would have been as well
    assert!(!proxy.messages().contains("is down"), "{}", proxy.messages());
    assert_eq!(status(), "MAINT");
    tell("ready");
    eventually("checks go on", || (status() == "DOWN").then_some(()));
}

#[test]
fn connections_are_ended_one_by_one_and_by_server() {
    let local = Local::new();
    let proxy = local.start();
    let (at, socket) = (proxy.address(), local.socket());
    let mut clients: Vec<TcpStream> = (0..6).map(|_| served(at)).collect();
    let sessions = || -> Vec<BTreeMap<String, String>> {
        let said = ask(&socket, "show sess");
        let of = |line: &str| {
            let (id, rest) = line.split_once(": ").unwrap();
            let pairs = rest.split(' ').map(|pair| pair.split_once('=').unwrap());
            pairs.chain([("id", id)]).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
        };
        said.lines().filter(|line| !line.is_empty()).map(of).collect()
    };
    let all = eventually("their bytes", || {
        let all = sessions();
        all.iter().all(|one| one["in"] == "5" && one["out"] == "5").then_some(all)
    });
    assert_eq!(all.len(), 6);
    let one = &all[2];
    assert_eq!([&one["fe"], &one["be"], &one["proto"], &one["state"]], ["front", "db", "tcpv4", "copying"]);
    assert_eq!(ask(&socket, &format!("show sess {}", one["id"])).lines().count(), 2);
    let ended = |of: &str, clients: &mut Vec<TcpStream>| {
        let place = clients.iter().position(|client| client.local_addr().unwrap().to_string() == of).unwrap();
        let mut client = clients.remove(place);
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    };
    assert_eq!(ask(&socket, &format!("shutdown session {}", one["id"])), "\n");
    ended(&one["src"], &mut clients);
    eventually("one is gone", || (sessions().len() == 5).then_some(()));
    clients.iter_mut().for_each(|client| round_trip(client, b"the others"));
    assert_eq!(ask(&socket, &format!("shutdown session {}", one["id"])), "No such session (use 'show sess').\n\n");
    assert_eq!(ask(&socket, "show sess 0xffffff"), "Session not found.\n\n");

    let (theirs, others): (Vec<_>, Vec<_>) = sessions().into_iter().partition(|s| s["srv"] == local.servers[0]);
    assert!([2, 3].contains(&theirs.len()), "{theirs:?}");
    assert_eq!(ask(&socket, &format!("shutdown sessions server {}", local.name(0))), "\n");
    theirs.iter().for_each(|session| ended(&session["src"], &mut clients));
    eventually("theirs are gone", || (sessions().len() == others.len()).then_some(()));
    clients.iter_mut().for_each(|client| round_trip(client, b"the other server's"));
    assert_eq!(clients.len(), others.len());
    // the same in the program's own words
    let member = local.name(1);
    assert_eq!(proxy.client(&["ls", "--member", &member, "--json"]).matches("\"member\"").count(), others.len());
    proxy.client(&["kill", "--member", &member]);
    proxy.flows_end();
}

#[test]
fn a_reload_opens_moves_and_closes_it() {
    let local = Local::new();
    local.configure("");
    let proxy = local.start();
    assert!(!local.socket().exists());
    local.configure(&local.control("haproxy.sock"));
    proxy.client(&["reload"]);
    let mut stays = talking(&local.socket());
    // nothing changes, and who is connected stays
    proxy.client(&["reload"]);
    stays.write_all(b"show cli level\n").unwrap();
    stays.read_exact(&mut [0; 9]).unwrap();

    local.configure(&local.control("other.sock"));
    proxy.client(&["reload"]);
    assert_eq!(stays.read(&mut [0]).unwrap(), 0, "the end of the one that was");
    assert!(!local.socket().exists());
    assert_eq!(ask(&local.path("other.sock"), "show cli level"), "admin\n\n");

    // what cannot be leaves all as it was, whatever else the file says
    let _other = UnixListener::bind(local.path("taken.sock")).unwrap();
    local.configure(&format!("connections = 9\n{}", local.control("taken.sock")));
    let why = proxy.client_error(&["reload"]);
    assert!(why.contains("longsplice.toml:3:11: socket ") && why.contains("another process listens there"), "{why}");
    assert_ne!(info(&local.path("other.sock"), "Maxconn"), "9");
    assert!(local.path("taken.sock").exists());
    // nor is it bound if something else is wrong
    local.configure(&local.control("haproxy.sock").replace("[control]", "source_ports = \"1024-2047\"\n[control]"));
    assert!(proxy.client_error(&["reload"]).contains("source_ports"));
    assert!(!local.socket().exists() && local.path("other.sock").exists());

    local.configure("");
    proxy.client(&["reload"]);
    assert!(!local.path("other.sock").exists());
    local.configure(&local.control("other.sock"));
    proxy.client(&["reload"]);
    assert_eq!(ask(&local.path("other.sock"), "show cli level"), "admin\n\n");
}

/// A socket of a killed process is replaced. Two processes do not take it from each other.
#[test]
fn it_belongs_to_one_process() {
    let local = Local::new();
    let mut proxy = local.start();
    let why = local.refused();
    assert!(why.contains("longsplice.toml:2:11: socket ") && why.contains("another process listens there"), "{why}");
    assert_eq!(info(&local.socket(), "Pid"), proxy.id().to_string());
    proxy.kill();
    assert!(local.socket().exists(), "it is left over");
    let mut next = local.start();
    assert_eq!(info(&local.socket(), "Pid"), next.id().to_string());
    next.shut_down();
    assert!(!local.socket().exists(), "a clean stop leaves nothing");

    fs::write(local.socket(), "something else").unwrap();
    let why = local.refused();
    assert!(why.contains("there is a file that is no socket"), "{why}");
    assert_eq!(fs::read_to_string(local.socket()).unwrap(), "something else");
}

#[test]
fn the_configuration_is_judged() {
    let local = Local::new();
    let check = |control: &str| -> Output {
        local.configure(control);
        longsplice(&["check", "--copy-only", "--config", local.file().to_str().unwrap()])
    };
    let wrong = |control: &str, want: &str| {
        let out = check(control);
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && said.contains(want), "{control}: {said}");
    };
    let good = check(&local.control("haproxy.sock"));
    assert!(good.status.success(), "{good:?}");
    assert!(!local.socket().exists(), "a check touches nothing");
    let place = "longsplice.toml:2:11: ";
    wrong(&local.control("missing/haproxy.sock"), &format!("{place}socket "));
    wrong(&local.control("missing/haproxy.sock"), "create this directory first");
    wrong(
        &local.control(&"x".repeat(96)),
        &format!("{place}too long for the path of a socket: write one of at most 95"),
    );
    wrong("[control]\nhaproxy = \"/\"\n", &format!("{place}no name of a file"));
    wrong("[control]\nhaproxy = 7\n", place);
    wrong("control = 7\n", "a table with the keys path, haproxy, group and mode");
    wrong(
        "[control]\nhaprocsy = \"x\"\n",
        "longsplice.toml:2:1: unknown field `haprocsy`, expected one of `path`, `haproxy`, `group`, `mode`",
    );
    let both = format!("{}path = \"{}\"\n", local.control("c.sock"), local.path("c.sock").display());
    wrong(&both, &format!("{place}the control socket has this path"));
    fs::write(local.path("file"), "").unwrap();
    wrong(&local.control("file"), "there is a file that is no socket");
}

/// Another process takes over, and whoever asks hears it.
#[test]
fn an_upgrade_hands_it_over() {
    let local = Local::new();
    let mut first = local.start();
    let mut stays = served(first.address());
    let mut talks = talking(&local.socket());
    first.client(&["upgrade"]);
    assert_eq!(talks.read(&mut [0]).unwrap(), 0, "the old process has hung up");
    let next: i32 = info(&local.socket(), "Pid").parse().unwrap();
    assert_ne!(next, first.id() as i32);
    let _next = Ended(next);
    round_trip(&mut stays, b"what the old process has goes on");
    assert_eq!(figures(&local.socket())["front/FRONTEND"]["stot"], "0", "the next one counts from the beginning");
    let _new = served(first.address());
    assert_eq!(figures(&local.socket())["front/FRONTEND"]["stot"], "1");
    drop(stays);
    assert!(first.wait().success(), "{}", first.messages());
    assert_eq!(info(&local.socket(), "Pid"), next.to_string(), "its end leaves the file where it is");

    // one that has it elsewhere leaves nothing behind, and one that has none does not either
    for (control, is) in [(local.control("other.sock"), true), (String::new(), false)] {
        local.configure(&control);
        first.client(&["upgrade"]);
        assert!(!local.socket().exists());
        assert_eq!(local.path("other.sock").exists(), is);
    }
    local.configure(&local.control("haproxy.sock"));
    first.client(&["upgrade"]);
    let last: i32 = info(&local.socket(), "Pid").parse().unwrap();
    let _last = Ended(last);
    first.client(&["stop"]);
    eventually("its end", || (!local.socket().exists()).then_some(()));
}

/// A process that is killed at the end of a test.
struct Ended(i32);

impl Drop for Ended {
    fn drop(&mut self) {
        if fs::read_link(format!("/proc/{}/exe", self.0)).is_ok_and(|exe| exe == Path::new(LONGSPLICE)) {
            let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
        }
    }
}

/// Whoever misbehaves is told so or hung up on; the control socket, connections and other tools go on.
#[test]
fn hostile_clients_hurt_nobody() {
    let local = Local::new();
    let proxy = local.start();
    let socket = local.socket();
    let mut user = served(proxy.address());
    let mut is_fine = || {
        round_trip(&mut user, b"fine");
        assert_eq!(proxy.flows().len(), 1);
    };
    let send = |bytes: &[u8]| {
        let mut stream = client_of(&socket);
        // it may have hung up before all is sent
        let _ = stream.write_all(bytes);
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    };
    let long = "A line is too long: write at most 16383 bytes, and 512 commands.\n\n";
    let garbage: Vec<u8> = (0..10_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (bytes, want) in [
        (vec![b'x'; 1_000_000], long),
        (vec![b';'; 1_000_000], long),
        ("show stat;".repeat(1500).into_bytes(), long), // not even a whole line
        ([vec![b';'; 16_000], vec![b'\n']].concat(), "Unknown command."),
        ("help;".repeat(513).into_bytes(), ""), // no line, and its end is that of the stream
        ([garbage, b"\n".to_vec()].concat(), ""),
        (vec![0; 100], ""),
    ] {
        let stream = client_of(&socket);
        let said = if want.is_empty() {
            let mut stream = stream;
            let _ = stream.write_all(&bytes);
            stream.shutdown(Shutdown::Write).unwrap();
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said);
            String::new()
        } else if want == long && bytes.len() < 16384 {
            send(&[&bytes[..], b"\n"].concat())
        } else {
            send(&bytes)
        };
        assert!(said.starts_with(want), "{want}: {said}");
        is_fine();
    }
    // all that a line may have is done
    assert_eq!(ask(&socket, &"show cli level;".repeat(512)).matches("admin\n\n").count(), 512);

    // they ask for much and read nothing, or say nothing: whoever comes later waits for the places of those that are hung up on
    let greedy: Vec<UnixStream> = (0..8)
        .map(|_| {
            let mut stream = client_of(&socket);
            stream.write_all(format!("{}\n", "help;".repeat(512)).as_bytes()).unwrap();
            stream
        })
        .collect();
    let silent: Vec<UnixStream> = (0..40).map(|_| client_of(&socket)).collect();
    is_fine();
    assert_eq!(ask(&socket, "show cli level"), "admin\n\n");
    is_fine();
    for mut stream in silent {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it was hung up on");
    }
    drop(greedy);
    let before = proxy.descriptors();
    (0..100).for_each(|_| drop(client_of(&socket)));
    assert_eq!(ask(&socket, "show cli level"), "admin\n\n");
    eventually("no descriptor is left", || (proxy.descriptors() <= before).then_some(()));
}

/// A pool of two servers behind a plug that splices, in a lab.
fn lab() -> (Setting, PathBuf) {
    let name = |port: u16| SERVER.port(Family::V4, port).to_string();
    let at = FORWARDER_TO_CLIENT.port(Family::V4, PORT).to_string();
    let plug = listener("plug", &at, &format!("name = \"front\"\npool = \"db\"\n{AT_ONCE}"));
    let servers = SERVERS.map(name);
    let setting = Setting::new("");
    let socket = setting.dir.path().join("haproxy.sock");
    let control = format!("[control]\nhaproxy = \"{}\"\n", socket.display());
    setting.configure(&format!("{control}{plug}[pool.db]\nservers = {servers:?}\n"));
    SERVERS.iter().for_each(|port| setting.echo(SERVER.port(Family::V4, *port)));
    (setting, socket)
}

/// Clients whose connections are spliced.
fn spliced(setting: &Setting, proxy: &Running, count: usize) -> Vec<TcpStream> {
    let before = proxy.flows().len();
    let connect = |_| {
        let mut client = setting.connect(FORWARDER_TO_CLIENT.port(Family::V4, PORT));
        round_trip(&mut client, &[7; 100_000]);
        client
    };
    let clients = (0..count).map(connect).collect();
    eventually("they are spliced", || (proxy.flows_in("spliced") == before + count).then_some(()));
    clients
}

/// Runs hatop in a terminal, and works with it: `see TEXT` waits for a text on what it draws, `press KEYS` presses keys.
const HATOP: &str = r#"
import fcntl, os, pty, select, struct, sys, termios, time
pid, fd = pty.fork()
if pid == 0:
    os.environ['TERM'] = 'xterm'
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('4H', 40, 130, 0, 0))
    os.execv('/usr/bin/python3', ['python3', '-W', 'ignore', '/usr/bin/hatop', '-i', '1', '-s', sys.argv[1]])
keys = {'DOWN': b'\x1bOB', 'SPACE': b' ', 'F9': b'\x1b[20~', 'F10': b'\x1b[21~'}
drawn = b''
for step in sys.argv[2:]:
    what, arg = step.split(' ', 1)
    if what == 'press':
        for key in arg.split():
            os.write(fd, keys.get(key, key.encode()))
            time.sleep(0.1) # it looks for one key at a time
        continue
    end = time.monotonic() + 60
    while arg.encode() not in drawn:
        ready = select.select([fd], [], [], max(0, end - time.monotonic()))[0]
        try:
            more = os.read(fd, 65536) if ready else b''
        except OSError:
            more = b''
        if not more:
            sys.exit(f'{step}: {drawn!r}')
        drawn += more
    drawn = drawn[drawn.index(arg.encode()) + len(arg):]
    print(step)
os.write(fd, b'\x1bq') # also on its command line
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"#;

#[test]
#[ignore = "root"]
fn hatop_shows_servers_and_takes_them_out() {
    let (setting, socket) = lab();
    let mut proxy = setting.start();
    let mut clients = spliced(&setting, &proxy, 4);
    let hatop = |steps: &[&str]| {
        let mut python = setting.lab.forwarder.command("/usr/bin/python3");
        let out = python.args(["-c", HATOP]).arg(&socket).args(steps).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let [first, second] = SERVERS.map(|port| SERVER.port(Family::V4, port).to_string());
    // the cursor goes past the listener to the first server
    let to_first = "press DOWN DOWN DOWN DOWN";
    let shows = ["see longsplice Version: 2.6.0-longsplice", "see >>> front", "see OPEN", "see >>> db", "see UP"];
    hatop(&[&shows[..], &[to_first, "press F10", "see MAINT"]].concat());
    assert_eq!(figures(&socket)[&format!("db/{first}")]["status"], "MAINT");
    clients.extend(spliced(&setting, &proxy, 2));
    let scur = |server: &str| figures(&socket)[&format!("db/{server}")]["scur"].clone();
    assert_eq!([scur(&first), scur(&second)], ["2", "4"], "traffic goes to the other one");
    hatop(&["see MAINT", to_first, "press F9", "see UP"]);
    assert_eq!(figures(&socket)[&format!("db/{first}")]["status"], "UP");
    // its command line, with the server that the cursor is at
    hatop(&["see >>> db", to_first, "press SPACE", "see haproxy command line", &format!("see db/{first}")]);
    clients.iter_mut().for_each(|client| round_trip(client, &[8; 100_000]));
    drop(clients);
    proxy.stop(&setting.pins[0]);
}

#[test]
#[ignore = "root"]
fn the_exporter_counts_as_we_do() {
    let (setting, socket) = lab();
    let mut proxy = setting.start();
    let clients = spliced(&setting, &proxy, 4);
    let at: SocketAddr = "127.0.0.1:9101".parse().unwrap();
    let mut exporter = setting.lab.forwarder.command("prometheus-haproxy-exporter");
    exporter.arg(format!("--haproxy.scrape-uri=unix:{}", socket.display())).arg(format!("--web.listen-address={at}"));
    let _exporter = ChildGuard::spawn(&mut exporter).unwrap();
    setting.lab.forwarder.wait_listening(at.port(), PATIENCE).unwrap();
    let scrape = || {
        let mut stream = setting.lab.forwarder.run(|| connect(at));
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut got = String::new();
        stream.read_to_string(&mut got).unwrap();
        got
    };
    let [first, second] = SERVERS.map(|port| SERVER.port(Family::V4, port));
    let has = |got: &str, lines: &[String]| {
        lines.iter().for_each(|line| assert!(got.contains(&format!("\n{line}\n")), "{line}: {got}"))
    };
    let of = |what: &str, server: SocketAddr, n: u32| {
        format!("haproxy_server_{what}{{backend=\"db\",server=\"{server}\"}} {n}")
    };
    let got = scrape();
    has(
        &got,
        &[
            "haproxy_up 1".into(),
            "haproxy_exporter_csv_parse_failures_total 0".into(),
            "haproxy_backend_up{backend=\"db\"} 1".into(),
            "haproxy_backend_current_server{backend=\"db\"} 2".into(),
            "haproxy_frontend_current_sessions{frontend=\"front\"} 4".into(),
            "haproxy_frontend_sessions_total{frontend=\"front\"} 4".into(),
            of("current_sessions", first, 2),
            of("sessions_total", second, 2),
            of("up", first, 1),
            of("weight", second, 1),
        ],
    );
    assert!(got.contains("haproxy_version_info{"), "{got}");
    assert!(!got.contains("haproxy_server_bytes_in_total"), "what is not counted is not there: {got}");
    drop(clients);
    proxy.flows_end();
    ask(&socket, &format!("set server db/{first} state maint"));
    let got = scrape();
    has(
        &got,
        &[
            "haproxy_frontend_bytes_in_total{frontend=\"front\"} 400000".into(),
            "haproxy_frontend_bytes_out_total{frontend=\"front\"} 400000".into(),
            "haproxy_frontend_current_sessions{frontend=\"front\"} 0".into(),
            "haproxy_backend_current_server{backend=\"db\"} 1".into(),
            of("up", first, 0),
            of("up", second, 1),
            of("current_sessions", first, 0),
        ],
    );
    proxy.stop(&setting.pins[0]);
}

/// A spliced connection is ended by its number, and no other; those of a server likewise.
#[test]
#[ignore = "root"]
fn spliced_connections_are_ended() {
    let (setting, socket) = lab();
    let mut proxy = setting.start();
    let mut clients = spliced(&setting, &proxy, 4);
    let [first, second] = SERVERS.map(|port| SERVER.port(Family::V4, port).to_string());
    let client = clients[1].local_addr().unwrap().to_string();
    let said = ask(&socket, "show sess");
    let line = said.lines().find(|line| line.contains(&format!(" src={client} "))).unwrap();
    assert!(line.contains(" fe=front be=db srv=") && line.contains(" state=spliced "), "{said}");
    ask(&socket, &format!("shutdown session {}", line.split(':').next().unwrap()));
    let is_reset = |client: &mut TcpStream| {
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    };
    is_reset(&mut clients.remove(1));
    eventually("one is gone", || (proxy.flows().len() == 3).then_some(()));
    clients.iter_mut().for_each(|client| round_trip(client, &[9; 100_000]));
    // round robin: the first and the third are the first server's
    ask(&socket, &format!("disable server db/{first}; shutdown sessions server db/{first}"));
    is_reset(&mut clients.remove(1));
    is_reset(&mut clients.remove(0));
    eventually("two are gone", || (proxy.flows().len() == 1).then_some(()));
    round_trip(&mut clients[0], &[9; 100_000]);
    clients.extend(spliced(&setting, &proxy, 2));
    assert_eq!(figures(&socket)[&format!("db/{second}")]["scur"], "3");
    drop(clients);
    proxy.stop(&setting.pins[0]);
}

/// The page's examples, with the programs that it names.
#[test]
#[ignore = "root"]
fn the_pages_examples_do_what_it_says() {
    const PAGE: &str = include_str!("../../../docs/haproxy-socket.md");
    let local = Local::new();
    let proxy = local.start();
    let _clients = [served(proxy.address()), served(proxy.address())];
    let blocks: Vec<&str> = PAGE.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let commands = blocks.iter().flat_map(|block| block.split("# ").skip(1));
    let mut run = 0;
    for command in commands {
        let (command, want) = command.split_once('\n').unwrap();
        if command.starts_with("hatop") || command.starts_with("prometheus") {
            continue; // these have tests of their own
        }
        let written = |text: &str| {
            // a busy machine may need more than the half second that socat waits for
            text.replace("socat - ", "socat -t 60 - ")
                .replace("/run/longsplice/haproxy.sock", local.socket().to_str().unwrap())
                .replace("10.0.0.3:5432", &local.servers[0])
                .replace("10.0.0.4:5432", &local.servers[1])
        };
        let id = ask(&local.socket(), "show sess").split(':').next().unwrap().to_owned();
        let mut shell = Command::new("sh");
        let out = shell.arg("-c").arg(written(command).replace("0x7", &id)).stdin(Stdio::null()).output().unwrap();
        assert!(out.status.success(), "{command}: {out:?}");
        let said = String::from_utf8(out.stdout).unwrap();
        let want = written(want).replace("0x7", &id);
        assert_eq!(said.trim_end().lines().count(), want.trim_end().lines().count(), "{command}: {said}");
        for (said, want) in said.lines().zip(want.lines()) {
            // `...` stands for what differs from time to time
            let parts: Vec<&str> = want.split("...").collect();
            assert!(
                said.starts_with(parts[0]) && said.ends_with(parts[parts.len() - 1]),
                "{command}: {said}, not {want}"
            );
        }
        run += 1;
    }
    assert!(run >= 8, "{run}");
}
