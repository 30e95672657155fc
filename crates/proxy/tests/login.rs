//! The login gateway over real sockets on the loopback device: conversations, refusals, programs that know the users, and the
//! line that each connection leaves in the access log.

use crate::proxying::{LIMIT, OPEN, Proxy, closed};
use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixListener},
    time::timeout,
};

/// A server that says `hello`, then sends back what it gets until the client's FIN, then `bye`.
async fn echo(at: &str) -> SocketAddr {
    let listener = TcpListener::bind(at).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                to.write_all(b"hello ").await.unwrap();
                tokio::io::copy(&mut from, &mut to).await.unwrap();
                to.write_all(b" bye").await.unwrap();
                to.shutdown().await.unwrap();
            });
        }
    });
    addr
}

async fn start(more: &str, server: SocketAddr) -> Proxy {
    let users = "users = { ann = \"secret\" }\n";
    let destination = format!("[[listener.destination]]\nname = \"db\"\ntarget = \"{server}\"\n");
    Proxy::start("login", &format!("{more}{users}{destination}")).await
}

/// Reads until this has come.
async fn until(client: &mut TcpStream, end: impl AsRef<[u8]>) -> String {
    let (mut seen, end) = (Vec::new(), end.as_ref());
    while !seen.ends_with(end) {
        let byte = timeout(LIMIT, client.read_u8()).await;
        let byte = byte.unwrap_or_else(|e| panic!("{}: {e}: {}", end.escape_ascii(), seen.escape_ascii()));
        seen.push(byte.unwrap_or_else(|e| panic!("{}: {e}: {}", end.escape_ascii(), seen.escape_ascii())));
    }
    seen.escape_ascii().to_string()
}

async fn rest(client: &mut TcpStream) -> String {
    let mut seen = Vec::new();
    timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
    seen.escape_ascii().to_string()
}

/// A conversation with a client that waits for each question, as netcat's user does.
#[tokio::test]
async fn a_plain_client_is_connected() {
    let server = echo("127.0.0.1:0").await;
    let proxy = start("", server).await;
    let mut client = proxy.connect().await;
    for (question, answer) in [("login: ", "ann\n"), ("password: ", "secret\n"), ("host: ", "DB\n")] {
        assert_eq!(until(&mut client, question).await, question);
        client.write_all(answer.as_bytes()).await.unwrap();
    }
    assert_eq!(until(&mut client, "hello ").await, r"connected to db\r\nhello ");
    client.write_all(b"\xff\0\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut client).await, r"\xff\x00\r\n bye");
    let line = proxy.line().await;
    let seen = ["listener", "user", "target", "how"].map(|key| line[key].as_str().unwrap().to_owned());
    assert_eq!(seen, ["login", "ann", &server.to_string(), "closed"]);
}

/// All at once, cut at every place, with each kind of line: nothing is lost, and nothing is added.
#[tokio::test]
async fn typed_ahead_bytes_reach_the_server_however_they_come() {
    let proxy = start("", echo("127.0.0.1:0").await).await;
    for end in ["\n", "\r\n", "\r\0"] {
        let input = ["ann", "secret", "db", "a\r\nb\0c\n"].join(end);
        for cut in 1..input.len() {
            let mut client = proxy.connect().await;
            client.set_nodelay(true).unwrap();
            client.write_all(&input.as_bytes()[..cut]).await.unwrap();
            // what was sent first is read first
            client.readable().await.unwrap();
            client.write_all(&input.as_bytes()[cut..]).await.unwrap();
            client.shutdown().await.unwrap();
            let seen = rest(&mut client).await;
            assert_eq!(seen, r"login: password: host: connected to db\r\nhello a\r\nb\x00c\n bye", "{end:?} {cut}");
        }
    }
}

#[tokio::test]
async fn one_byte_after_the_other() {
    let proxy = start("telnet = true\n", echo("127.0.0.1:0").await).await;
    let mut client = proxy.connect().await;
    client.set_nodelay(true).unwrap();
    for byte in b"ann\r\nsecret\r\ndb\r\nx" {
        client.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    client.shutdown().await.unwrap();
    // a client that does not know telnet gets its questions, and two or three bytes more
    let seen = rest(&mut client).await;
    assert_eq!(seen, r"\xff\xfd\x18\xff\xfd\x1flogin: \xff\xfb\x01password: host: connected to db\r\nhello x bye");
}

/// A server that reads and writes what a test wants.
async fn scripted(turns: Vec<(&'static [u8], &'static [u8])>) -> (SocketAddr, tokio::task::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for (expected, answer) in turns {
            let mut seen = vec![0; expected.len()];
            timeout(LIMIT, stream.read_exact(&mut seen)).await.unwrap().unwrap();
            assert_eq!(seen.escape_ascii().to_string(), expected.escape_ascii().to_string());
            stream.write_all(answer).await.unwrap();
        }
        let mut rest = Vec::new();
        timeout(LIMIT, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
        rest
    });
    (addr, served)
}

/// Logs in as a telnet client with TERMINAL-TYPE and NAWS does, up to the host.
async fn log_in(client: &mut TcpStream) {
    assert_eq!(until(client, "login: ").await, r"\xff\xfd\x18\xff\xfd\x1flogin: ");
    client.write_all(b"\xff\xfb\x18\xff\xfb\x1f\xff\xfa\x1f\0\x50\0\x18\xff\xf0").await.unwrap();
    let mut asked = [0; 6];
    client.read_exact(&mut asked).await.unwrap();
    assert_eq!(asked, [255, 250, 24, 1, 255, 240]);
    client.write_all(b"\xff\xfa\x18\0XTERM\xff\xf0ann\r\0").await.unwrap();
    assert_eq!(until(client, "password: ").await, r"\xff\xfb\x01password: ");
    client.write_all(b"\xff\xfd\x01secret\r\0").await.unwrap();
    assert_eq!(until(client, "host: ").await, r"\xff\xfc\x01\r\nhost: ");
    client.write_all(b"\xff\xfe\x01db\r\0ahead\r\0").await.unwrap();
}

/// A server that does not speak telnet gets no byte of it: all options are undone.
#[tokio::test]
async fn options_are_undone_before_a_plain_server() {
    let (server, served) = scripted(vec![(b"ahead\r\0", b"hello")]).await;
    let proxy = start("telnet = true\n", server).await;
    let mut client = proxy.connect().await;
    log_in(&mut client).await;
    let undone = r"connected to db\r\n\xff\xfe\x18\xff\xfe\x1f";
    assert_eq!(until(&mut client, b"\xff\xfe\x1f").await, undone);
    client.write_all(b"\xff\xfc\x18more\xff\xfc\x1f").await.unwrap();
    assert_eq!(until(&mut client, "hello").await, "hello");
    client.write_all(b"\xff\xfb\x18").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(served.await.unwrap(), b"more\xff\xfb\x18", "from here on, they speak with each other");
}

/// A telnet server is told the terminal, and both ends agree on it.
#[tokio::test]
async fn a_telnet_server_is_told_the_terminal() {
    let told = b"\xff\xfa\x1f\0\x50\0\x18\xff\xf0\xff\xfa\x18\0XTERM\xff\xf0";
    let (server, served) = scripted(vec![
        (b"\xff\xfb\x18\xff\xfb\x1fahead\r\0", b"\xff\xfb\x03\xff\xfd\x18\xff\xfd\x1f\xff\xfa\x18\x01\xff\xf0"),
        (told, b"hello"),
    ])
    .await;
    let users = "telnet = true\nusers = { ann = \"secret\" }\n";
    let table = format!("[[listener.destination]]\nname = \"db\"\ntarget = \"{server}\"\ntelnet = true\n");
    let proxy = Proxy::start("login", &format!("{users}{table}")).await;
    let mut client = proxy.connect().await;
    log_in(&mut client).await;
    assert_eq!(until(&mut client, "hello").await, r"connected to db\r\n\xff\xfb\x03hello");
    client.write_all(b"\xff\xfd\x03").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(served.await.unwrap(), b"\xff\xfd\x03");
}

#[tokio::test]
async fn wrong_passwords() {
    let proxy = start("", closed().await).await;
    let mut client = proxy.connect().await;
    client.write_all(b"ann\nwrong\nann\nwrong\nann\nwrong\nann\nsecret\ndb\n").await.unwrap();
    let seen = rest(&mut client).await;
    let wrong = r"login: password: Login incorrect\r\n";
    assert_eq!(seen, wrong.repeat(3) + r"\r\nwrong name or password\r\n");
    let line = proxy.line().await;
    assert_eq!([&line["how"], &line["user"]], ["auth-failed", "ann"]);
    assert!(!line.to_string().contains("secret"));
    assert_eq!(proxy.server.counters().auth_failed, 3);
}

#[tokio::test]
async fn servers_that_refuse_and_rules_that_do() {
    let target = closed().await;
    let proxy = start("", target).await;
    let seen = proxy.answer(b"ann\nsecret\ndb\n").await;
    assert!(seen.ends_with(b"host: cannot connect to db: connection refused\r\n"), "{}", seen.escape_ascii());
    assert_eq!(proxy.line().await["how"], "unreachable");
    // what clients name is guarded; what the configuration names is not, but the rules know the user
    let users = "users = { ann = \"secret\", bob = \"secret\" }\nlogin = { free = true }\n";
    let rules = "rules = [{ action = \"deny\", users = \"bob\", ports = \"1-65535\" }]\n";
    let server = echo("127.0.0.1:0").await;
    let table = format!("[[listener.destination]]\nname = \"db\"\ntarget = \"{server}\"\n");
    let proxy = Proxy::start("login", &format!("{users}{rules}{table}")).await;
    for (user, host, end) in [
        ("ann", server.to_string(), format!("cannot connect to {server}: not allowed\r\n")),
        ("bob", "db".into(), "cannot connect to db: not allowed\r\n".into()),
    ] {
        let seen = proxy.answer(format!("{user}\nsecret\n{host}\n").as_bytes()).await;
        assert!(seen.ends_with(end.as_bytes()), "{}", seen.escape_ascii());
    }
    let mut client = proxy.connect().await;
    client.write_all(b"ann\nsecret\ndb\n").await.unwrap();
    client.shutdown().await.unwrap();
    assert!(rest(&mut client).await.ends_with("hello  bye"));
    let refusals: Vec<_> = proxy.lines().await.iter().map(|l| (l["user"].clone(), l["refusal"].clone())).collect();
    assert_eq!(refusals[0], ("ann".into(), "guarded address (loopback)".into()));
    assert_eq!(refusals[1], ("bob".into(), "rule 1".into()));
}

#[tokio::test]
async fn both_families_and_hosts_that_clients_name() {
    let open = "login = { free = true }\nrules = [{ action = \"allow\", target = [\"127.0.0.0/8\", \"::1\"] }]\n";
    let proxy = Proxy::start_at("[::1]", "login", open).await;
    for at in ["127.0.0.1:0", "[::1]:0"] {
        let server = echo(at).await;
        for line in [server.to_string(), format!("{} {}", server.ip(), server.port())] {
            let mut client = proxy.connect().await;
            client.write_all(format!("{line}\r\nx").as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            assert_eq!(rest(&mut client).await, format!(r"host: connected to {server}\r\nhello x bye"));
        }
    }
}

#[tokio::test]
async fn silent_clients_are_told_and_cut_off() {
    let proxy = start("login = { prompt = 0.1 }\n", closed().await).await;
    for input in [&b""[..], b"ann\n", b"ann\nsecret\nd"] {
        let seen = proxy.answer(input).await;
        assert!(seen.ends_with(b"\r\ntimed out\r\n"), "{}", seen.escape_ascii());
    }
    assert!(proxy.lines().await.iter().all(|line| line["how"] == "timeout"));
    assert_eq!(proxy.server.counters().timeouts, 3);
}

/// A client that goes on sending what no line and no telnet is.
#[tokio::test]
async fn hostile_clients_are_cut_off() {
    let proxy = start("telnet = true\n", closed().await).await;
    for (input, end) in [
        (vec![b'x'; 100_000], r"a line of more than 256 bytes\r\n"),
        ([&b"\xff\xfa\x18\0"[..], &[b'x'; 100_000]].concat(), r"more than anybody sends to log in\r\n"),
        (b"\xff\xfb\x05".repeat(20_000), r"more than anybody sends to log in\r\n"),
    ] {
        let mut client = proxy.connect().await;
        let (mut from, mut to) = client.split();
        let mut seen = Vec::new();
        // it may be cut off before it has sent all
        let (_, read) = tokio::join!(to.write_all(&input), timeout(LIMIT, from.read_to_end(&mut seen)));
        if read.unwrap().is_ok() {
            let seen = seen.escape_ascii().to_string();
            assert!(seen.ends_with(end), "{}", &seen[seen.len().saturating_sub(200)..]);
        }
    }
    let lines = proxy.lines().await;
    assert!(lines.len() == 3 && lines.iter().all(|line| line["how"] == "bad-request"), "{lines:?}");
    assert_eq!(proxy.server.counters().bad_requests, 3);
}

fn program(proxy: &tempfile::TempDir, text: &str) -> String {
    let path = proxy.path().join("check");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path.display().to_string()
}

#[tokio::test]
async fn a_program_knows_the_users() {
    let dir = tempfile::tempdir().unwrap();
    let server = echo("127.0.0.1:0").await;
    // one-time passwords: each is removed when it was used
    let text = "read -r name; read -r password; cd \"${0%/*}\"; [ \"$CLIENT\" = 127.0.0.1 ] || exit 2\n\
                [ \"$name\" = crash ] && kill -9 $$\n\
                [ \"$name\" = ann ] && rm \"once-$password\" 2>/dev/null";
    let check = program(&dir, text);
    fs::write(dir.path().join("once-123456"), "").unwrap();
    let more = format!(
        "login.check.program = \"{check}\"\n[[listener.destination]]\nname = \"db\"\ntarget = \"{server}\"\nusers = \"ann\"\n"
    );
    let proxy = Proxy::start("login", &more).await;
    let mut client = proxy.connect().await;
    client.write_all(b"crash\n123456\nann\n123456\ndb\n").await.unwrap();
    client.shutdown().await.unwrap();
    let seen = rest(&mut client).await;
    assert_eq!(seen, r"login: password: Login incorrect\r\nlogin: password: host: connected to db\r\nhello  bye");
    // used up
    let seen = proxy.answer(&b"ann\n123456\n".repeat(3)).await;
    assert!(seen.ends_with(b"wrong name or password\r\n"), "{}", seen.escape_ascii());
    let lines = proxy.lines().await;
    assert_eq!([&lines[0]["user"], &lines[0]["how"], &lines[1]["how"]], ["ann", "closed", "auth-failed"]);
}

/// Nothing is left of a program that gives no answer.
#[tokio::test]
async fn a_program_without_an_answer_ends_with_all_that_it_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let check = program(&dir, "cd \"${0%/*}\"; sleep 1000 & echo $! > started; mv started pid; wait");
    let more = format!("login = {{ free = true, check = {{ program = \"{check}\", limit = 1 }} }}\n{OPEN}");
    let proxy = Proxy::start("login", &more).await;
    let mut client = proxy.connect().await;
    client.write_all(b"ann\npw\n").await.unwrap();
    until(&mut client, "Login incorrect").await;
    let pid = fs::read_to_string(dir.path().join("pid")).unwrap();
    let status = format!("/proc/{}/stat", pid.trim());
    // killed, and perhaps not waited for yet
    let is_over = || fs::read_to_string(&status).map_or(true, |stat| stat.contains(") Z "));
    let over = async {
        while !is_over() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, over).await.expect("it has ended");
}

/// Clients cannot start as many processes as they like: others wait for their turn.
#[tokio::test]
async fn few_programs_run_at_once() {
    const CLIENTS: usize = 32;
    const AT_ONCE: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    let text = "cd \"${0%/*}\"; : > running-$$; ls | grep -c running- >> counts; while [ ! -e go ]; do sleep 0.01; done\n\
                rm running-$$";
    let check = program(&dir, text);
    let proxy = Proxy::start("login", &format!("login = {{ free = true, check.program = \"{check}\" }}\n{OPEN}")).await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = proxy.connect().await;
        client.write_all(b"ann\npw\n").await.unwrap();
        clients.push(client);
    }
    let counts = || fs::read_to_string(dir.path().join("counts")).unwrap_or_default();
    let started = async {
        while counts().lines().count() < AT_ONCE {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, started).await.expect("so many run");
    fs::write(dir.path().join("go"), "").unwrap();
    for client in &mut clients {
        until(client, "host: ").await;
    }
    let counts: Vec<usize> = counts().lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!((counts.len(), counts.iter().max()), (CLIENTS, Some(&AT_ONCE)), "{counts:?}");
}

#[tokio::test]
async fn another_process_knows_the_users() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        for answer in ["no\n", "perhaps\n", "", "yes\n"] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = vec![0; "ann\npw\n127.0.0.1\n".len()];
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, b"ann\npw\n127.0.0.1\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let more = format!("login = {{ free = true, check = {{ socket = \"{}\" }} }}\n{OPEN}", path.display());
    let proxy = Proxy::start("login", &more).await;
    let server = echo("127.0.0.1:0").await;
    let seen = proxy.answer(&b"ann\npw\n".repeat(3)).await;
    assert!(seen.ends_with(b"wrong name or password\r\n"), "{}", seen.escape_ascii());
    let mut client = proxy.connect().await;
    client.write_all(format!("ann\npw\n{server}\n").as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    assert!(rest(&mut client).await.ends_with("hello  bye"));
    // nobody listens any more
    fs::remove_file(path).unwrap();
    let seen = proxy.answer(&b"ann\npw\n".repeat(3)).await;
    assert!(seen.ends_with(b"wrong name or password\r\n"), "{}", seen.escape_ascii());
}

/// What the server is told of the client, before anything else.
#[tokio::test]
async fn proxy_headers_both_ways() {
    let server = echo("127.0.0.1:0").await;
    let proxy = start("proxy_protocol = { from = \"127.0.0.1\", send = \"v1\" }\n", server).await;
    let mut client = proxy.connect().await;
    client.write_all(b"PROXY TCP4 192.0.2.9 192.0.2.1 7 23\r\nann\nsecret\ndb\nx").await.unwrap();
    client.shutdown().await.unwrap();
    assert!(rest(&mut client).await.ends_with(r"hello PROXY TCP4 192.0.2.9 192.0.2.1 7 23\r\nx bye"));
    assert_eq!(proxy.line().await["client"], "192.0.2.9:7");
}
