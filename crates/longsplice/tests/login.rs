//! The login gateway through the real program: Debian's telnet and PuTTY's plink, telnetd of inetutils and of BusyBox, and
//! checked streams whose connection is spliced after the conversation. Needs root and eBPF, and fails without; Debian packages:
//! inetutils-telnet, inetutils-telnetd, putty-tools, busybox-static, systemd, openssl, util-linux.

use crate::{
    running::{LONGSPLICE, Pins, Running, connect as connect_to, eventually, loopback_echo, translucent::transparent},
    urgent::exchange,
};
use longsplice_lab::{
    ChildGuard, Family, Lab, Shape,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{Marks, Script, connect, converse, intact, listen, serve},
};
use serde_json::Value;
use std::{
    fs::{self, File, Permissions},
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};
use tempfile::TempDir;
use test_case::test_case;

/// The gateway, and two servers behind it.
const GATEWAY: u16 = 2300;
const SERVERS: [u16; 2] = [2323, 2324];
const PATIENCE: Duration = Duration::from_secs(40);

/// What runs at the server: says what it knows of its client, and what it is told.
/// Servers start it before they have read how large the terminal is.
const SHELL: &str = "#!/bin/sh\nwhile [ \"$(stty size)\" = '0 0' ]; do sleep 0.1; done\n\
    echo \"term=$TERM user=$USER size=$(stty size).\"\n\
    while read -r line; do\n[ \"$line\" = end ] && exit 0\n[ \"$line\" = much ] && seq 1 60000\necho \"got $line.\"\ndone\n";

/// A program on a terminal of 100 columns and 30 rows, whose keys are typed by the test.
struct Terminal {
    child: Child,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn open(lab: &Lab, line: &str) -> Terminal {
        let mut command = lab.client.command("script");
        command.args(["-qec", &format!("stty cols 100 rows 30; exec {line}"), "/dev/null"]).env("TERM", "vt220");
        command.env("LC_ALL", "C").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let (screen, mut output) = (Arc::new(Mutex::new(Vec::new())), child.stdout.take().unwrap());
        let shared = screen.clone();
        thread::spawn(move || {
            let mut buffer = [0; 65536];
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                shared.lock().unwrap().extend(&buffer[..n]);
            }
        });
        Terminal { child, screen }
    }

    fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    /// Waits until `text` is on the screen, and types `keys`.
    fn answer(&mut self, text: &str, keys: &str) {
        eventually(text, || {
            assert!(self.child.try_wait().unwrap().is_none() || self.screen().contains(text), "{}", self.screen());
            self.screen().contains(text).then_some(())
        });
        self.child.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.screen().escape_debug());
        }
    }
}

/// A gateway in the lab's forwarder.
struct Scene {
    program: Running,
    pins: Pins,
    lab: Lab,
    dir: TempDir,
}

impl Scene {
    fn new(family: Family, more: &str) -> Scene {
        let listen = FORWARDER_TO_CLIENT.port(family, GATEWAY);
        let mut text = format!(
            "log.format = \"json\"\n[[listener]]\nprotocol = \"login\"\nlisten = \"{listen}\"\nusers.ann = \"secret\"\n{more}\n"
        );
        for port in SERVERS {
            let target = SERVER.port(family, port);
            text += &format!("[[listener.destination]]\nname = \"box{port}\"\ntarget = \"{target}\"\n");
            text += if more.contains("telnet") { "telnet = true\n" } else { "" };
        }
        Scene::with(&text)
    }

    fn with(text: &str) -> Scene {
        let lab = Lab::simple(Shape::TwoDevices).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("longsplice.toml");
        fs::write(&config, text).unwrap();
        fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
        let arguments = ["--config", config.to_str().unwrap()];
        let program = Running::start(lab.forwarder.command(LONGSPLICE), None, &arguments, &[]);
        let shell = dir.path().join("shell");
        fs::write(&shell, SHELL).unwrap();
        fs::set_permissions(&shell, Permissions::from_mode(0o755)).unwrap();
        Scene { program, pins: Pins::of(&lab.forwarder), lab, dir }
    }

    /// Both servers: that of inetutils, which a super-server starts, and that of BusyBox.
    fn serve(&self, family: Family) -> [ChildGuard; 2] {
        let shell = self.dir.path().join("shell").display().to_string();
        let mut one = self.lab.server.command("systemd-socket-activate");
        // it asks for its client's name before it says anything, and nobody answers here
        one.args(["-E", "RES_OPTIONS=timeout:1 attempts:1"]);
        one.args(["-l", &SERVER.port(family, SERVERS[0]).to_string(), "--inetd", "-a", "/usr/sbin/telnetd"]);
        one.args(["--accept-env=USER", &format!("--exec-login={shell}")]);
        let mut other = self.lab.server.command("busybox");
        other.args(["telnetd", "-F", "-p", &SERVERS[1].to_string(), "-l", &shell]);
        let servers = [&mut one, &mut other].map(|command| ChildGuard::spawn(command).unwrap());
        SERVERS.iter().for_each(|port| self.lab.server.wait_listening(*port, Duration::from_secs(10)).unwrap());
        servers
    }
}

/// Logs in at a terminal, and has the server say much. Returns the screen.
fn at_a_terminal(mut terminal: Terminal, host: &str, knows: &str) -> String {
    terminal.answer("login: ", "ann\r");
    terminal.answer("password: ", "secret\r");
    terminal.answer("host: ", &format!("{host}\r"));
    terminal.answer(&format!("connected to {host}"), "");
    terminal.answer(knows, "much\r");
    terminal.answer("got much.", "end\r");
    eventually("the end", || terminal.child.try_wait().unwrap());
    let screen = terminal.screen();
    assert!(!screen.contains("secret"), "nothing is shown of a password: {}", screen.escape_debug());
    let numbers: Vec<u32> = screen.lines().filter_map(|line| line.trim().parse().ok()).collect();
    assert!(numbers.into_iter().eq(1..=60_000), "all that the server has said");
    screen
}

fn spliced(record: &Value) {
    let [all, of_these] = ["bytes_down", "spliced_down"].map(|key| record[key].as_u64().unwrap());
    assert!(all > 300_000 && of_these > all / 2 && record["splices"].as_u64() >= Some(1), "{record}");
    assert_eq!([&record["listener"], &record["user"], &record["how"]], ["login", "ann", "closed"], "{record}");
}

/// Each client with each server: the terminal's type, its size and the user arrive, but at BusyBox, which only asks for the size.
fn clients_and_servers(family: Family) {
    let mut scene = Scene::new(family, "telnet = true\nlogin = { banner = \"Hello\\n\", user_variable = true }");
    let _servers = scene.serve(family);
    let at = FORWARDER_TO_CLIENT.ip(family);
    for (client, name) in
        [(format!("telnet {at} {GATEWAY}"), "vt220"), (format!("plink -telnet -P {GATEWAY} {at}"), "xterm")]
    {
        for (port, knows) in
            SERVERS.into_iter().zip([format!("term={name} user=ann size=30 100."), "size=30 100.".into()])
        {
            at_a_terminal(Terminal::open(&scene.lab, &client), &format!("box{port}"), &knows);
        }
    }
    let records = scene.program.end(&scene.pins);
    assert_eq!(records.len(), 4, "{records:#?}");
    records.iter().for_each(spliced);
}

#[test]
#[ignore = "root"]
fn real_clients_and_servers() {
    clients_and_servers(Family::V4);
}

#[test]
#[ignore = "root"]
fn real_clients_and_servers_v6() {
    clients_and_servers(Family::V6);
}

/// Logs in on a plain connection, up to the end of what the gateway says.
fn log_in(stream: &TcpStream) {
    let (mut reader, mut writer) = (BufReader::with_capacity(1, stream), stream);
    writer.write_all(format!("ann\r\nsecret\r\nbox{}\r\n", SERVERS[0]).as_bytes()).unwrap();
    let mut said = String::new();
    reader.read_line(&mut said).unwrap();
    assert_eq!(said, format!("login: password: host: connected to box{}\r\n", SERVERS[0]));
}

/// Clients that have connected to the server itself are asked who they are, and led there: to any server, or to those that the
/// configuration names.
#[test_case("own"; "the server sees the gateway")]
#[test_case("client"; "the server sees the client")]
#[ignore = "root"]
fn connections_that_are_routed_through_the_gateway(source: &str) {
    let users = format!("source = \"{source}\"\ntelnet = true\nusers = {{ ann = \"secret\", bob = \"secret\" }}\n");
    let named = |family| {
        format!("[[listener.destination]]\nname = \"box\"\ntarget = \"{}\"\n", SERVER.port(family, SERVERS[0]))
    };
    let named = format!("{users}{}users = [\"ann\"]\ntelnet = true\n", named(Family::V4))
        + &named(Family::V6).replace("box", "box6");
    let text = "log.format = \"json\"\n".to_owned()
        + &transparent("login", SERVERS[0], &named)
        + &transparent("login", SERVERS[1], &users);
    let mut scene = Scene::with(&text);
    let _tpot = Pins::of_tpot(&scene.lab.forwarder);
    for family in Family::BOTH {
        let _servers = scene.serve(family);
        let ip = SERVER.ip(family);
        let name = if family == Family::V4 { "box" } else { "box6" };
        for (port, name) in SERVERS.into_iter().zip([name.to_owned(), SERVER.port(family, SERVERS[1]).to_string()]) {
            let mut terminal = Terminal::open(&scene.lab, &format!("telnet {ip} {port}"));
            terminal.answer("login: ", "ann\r");
            terminal.answer("password: ", "secret\r");
            terminal.answer(&format!("connected to {name}"), "");
            terminal.answer("user=", "much\r");
            terminal.answer("got much.", "end\r");
            eventually("the end", || terminal.child.try_wait().unwrap());
        }
        // without telnet, typed ahead, and not for this user
        let told = |user: &str| {
            let mut stream = scene.lab.client.run(|| connect_to(SERVER.port(family, SERVERS[0])));
            stream.write_all(format!("{user}\nsecret\nend\n").as_bytes()).unwrap();
            let (mut told, mut reader) = (Vec::new(), BufReader::new(stream));
            let text = |told: &[u8]| String::from_utf8_lossy(told).into_owned();
            while !text(&told).contains("connected to ") && reader.read_until(b'\n', &mut told).unwrap() > 0 {}
            text(&told)
        };
        assert_eq!(told("bob").contains("not allowed"), family == Family::V4);
        assert!(told("ann").contains("connected to box"));
    }
    let records = scene.program.end(&scene.pins);
    let spliced: Vec<_> = records.iter().filter(|record| record["bytes_down"].as_u64() > Some(300_000)).collect();
    assert_eq!(spliced.len(), 4, "{records:#?}");
    assert!(spliced.iter().all(|record| record["splices"] == 1 && record["user"] == "ann"), "{records:#?}");
}

/// Streams whose digests are compared, with urgent data in both directions, spliced at once.
#[test]
#[ignore = "root"]
fn urgent_data_passes_after_the_login() {
    for family in Family::BOTH {
        let mut scene = Scene::new(family, "");
        let opener = exchange(Script::opener(3), 0, Marks::Inline).ahead(100);
        let answerer = exchange(Script::answerer_of(3), 99, Marks::Apart).ahead(0);
        let (front, server) = (FORWARDER_TO_CLIENT.port(family, GATEWAY), SERVER.port(family, SERVERS[0]));
        let serving = scene.lab.server.run(|| serve(listen(server, &answerer).unwrap(), 1, answerer.clone()));
        let client = scene.lab.client.spawn(move || {
            let stream = connect(front, &opener).unwrap();
            log_in(&stream);
            converse(stream, &opener)
        });
        let (client, server) = (client.join().unwrap(), serving.join().remove(0));
        assert!(client.urgent.len() > 50 && server.urgent.len() > 50, "{client}\n{server}");
        intact(&client, &server).unwrap();
        let record = scene.program.end(&scene.pins).remove(0);
        assert!(record["splices"] == 1 && record["user"] == "ann", "{record}");
    }
}

/// The program is killed once the connection is spliced: the hosts do not notice.
#[test]
#[ignore = "root"]
fn a_connection_outlives_the_gateway() {
    const BYTES: u64 = 40_000_000;
    let mut scene = Scene::new(Family::V4, "");
    let script = |script: Script| script.bytes(BYTES).pace(BYTES / 4).deadline(PATIENCE);
    let (opener, answerer) = (script(Script::opener(5)), script(Script::answerer_of(5)));
    let (front, server) = (FORWARDER_TO_CLIENT.port(Family::V4, GATEWAY), SERVER.port(Family::V4, SERVERS[0]));
    let serving = scene.lab.server.run(|| serve(listen(server, &answerer).unwrap(), 1, answerer.clone()));
    let client = scene.lab.client.spawn(move || {
        let stream = connect(front, &opener).unwrap();
        log_in(&stream);
        converse(stream, &opener)
    });
    eventually("a spliced flow", || {
        let flows: Vec<Value> = serde_json::from_str(&scene.program.client(&["ls", "--json"])).unwrap();
        (flows.first()?["state"] == "spliced").then_some(())
    });
    scene.program.kill();
    let (client, server) = (client.join().unwrap(), serving.join().remove(0));
    intact(&client, &server).unwrap();
}

/// Whether the program's memory contains these bytes.
fn remembers(pid: u32, text: &[u8]) -> Vec<String> {
    let mut memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let found = |line: &&str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let [from, to] = [from, to].map(|n| u64::from_str_radix(n, 16).unwrap());
        memory.seek(SeekFrom::Start(from)).ok()?;
        let mut bytes = vec![0; usize::try_from(to - from).ok()?];
        memory.read_exact(&mut bytes).ok()?; // some parts cannot be read
        bytes.windows(text.len()).any(|part| part == text).then(|| (*line).to_owned())
    };
    maps.lines().filter(|line| line.contains(" rw")).collect::<Vec<_>>().iter().filter_map(found).collect()
}

fn openssl(arguments: &[&str]) -> String {
    let output = Command::new("openssl").args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "root"]
fn a_password_does_not_stay_in_memory() {
    const PASSWORD: &str = "unlikely-7c1f-words";
    let dir = tempfile::tempdir().unwrap();
    let hash = openssl(&["passwd", "-6", "-salt", "salt", PASSWORD]);
    // Who looks for a password that is there must find it.
    for (stored, stays) in [(hash.trim(), false), (PASSWORD, true)] {
        let config = dir.path().join("longsplice.toml");
        let target = loopback_echo();
        let text = format!(
            "[[listener]]\nprotocol = \"login\"\nlisten = \"127.0.0.1:0\"\nusers.ann = '{stored}'\n\
             [[listener.destination]]\nname = \"box\"\ntarget = \"{target}\"\n"
        );
        fs::write(&config, text).unwrap();
        fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
        let arguments = ["--copy-only", "--config", config.to_str().unwrap()];
        let program = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
        let mut stream = connect_to(program.address());
        stream.write_all(format!("ann\n{PASSWORD}-not\nann\n{PASSWORD}\nbox\n").as_bytes()).unwrap();
        let mut said = BufReader::with_capacity(1, &stream);
        let mut line = String::new();
        while !line.contains("connected") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0);
        }
        // the client hears that it is connected a moment before what it has said is cleared
        eventually("memory as it has to be", || {
            (remembers(program.id(), PASSWORD.as_bytes()).is_empty() != stays).then_some(())
        });
        assert!(!program.messages().contains(PASSWORD));
    }
}

/// The page's configuration is one that works.
#[test]
#[ignore = "root"]
fn the_example_of_the_page_works() {
    let page = include_str!("../../../docs/login.md");
    let block = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let (one, other) = (loopback_echo(), loopback_echo());
    let text =
        block.replace("0.0.0.0:23", "127.0.0.1:0").replace("192.0.2.10:23", &one).replace("192.0.2.11:2323", &other);
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("longsplice.toml");
    fs::write(&config, text).unwrap();
    fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
    let arguments = ["--copy-only", "--config", config.to_str().unwrap()];
    let program = Running::start(Command::new(LONGSPLICE), None, &arguments, &[]);
    for (user, host, end) in [
        ("ann", "db", "connected to db\r\n"),
        ("ann", "web", "connected to web\r\n"),
        ("bob", "web", "no such destination: web\r\n"),
    ] {
        let mut stream = connect_to(program.address());
        stream.write_all(format!("{user}\nsecret\n{host}\n").as_bytes()).unwrap();
        let mut said = BufReader::with_capacity(1, &stream);
        let mut all = Vec::new();
        while !all.ends_with(end.as_bytes()) {
            assert!(said.read_until(b'\n', &mut all).unwrap() > 0, "{}", all.escape_ascii());
        }
    }
    assert!(Path::new(&program.access_log()).exists());
}
