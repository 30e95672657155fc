//! TLS by name, over real sockets on the loopback device: the ClientHellos of real clients, routes, refusals, and
//! OpenSSL on either side. Of Debian: openssl, curl.

use crate::proxying::{LIMIT, OPEN, Proxy, closed};
use longsplice_proxy::tls::hello::{ClientHello, HELLO_MAX, Scan};
use serde_json::Value;
use std::{net::SocketAddr, path::Path, process::Stdio};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::timeout,
};

fn command(line: &str) -> Command {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// What this program sends first, up to a whole ClientHello, and the ClientHello; `PORT` stands for where we listen.
async fn hello_of(line: &str) -> (Vec<u8>, ClientHello) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut command = command(&line.replace("PORT", &port));
    let _client = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let (mut stream, _) = timeout(LIMIT, listener.accept()).await.unwrap().unwrap();
    let (mut bytes, mut scan) = (Vec::new(), Scan::default());
    loop {
        let read = timeout(LIMIT, stream.read_buf(&mut bytes)).await.unwrap().unwrap();
        if let Some(hello) = scan.feed(&bytes).unwrap() {
            return (bytes, hello);
        }
        assert_ne!(read, 0, "{line}");
    }
}

fn names(hello: &ClientHello) -> (Option<String>, Vec<String>) {
    let name = hello.name.as_ref().map(|host| format!("{host:?}"));
    (name, hello.alpn.iter().map(|p| String::from_utf8(p.clone()).unwrap()).collect())
}

#[tokio::test]
async fn hellos_of_real_clients_cut_at_every_byte() {
    let openssl = "openssl s_client -connect 127.0.0.1:PORT";
    // As large as with the key shares of several post-quantum schemes.
    let many: Vec<String> = (0..40).map(|i| format!("{i:02}-{}", "x".repeat(97))).collect();
    let all = many.join(",");
    let two = ["h2".to_owned(), "http/1.1".to_owned()];
    let table: [(String, Option<&str>, &[String], usize); 7] = [
        (format!("{openssl} -servername a.example.org -alpn h2,http/1.1"), Some("a.example.org"), &two, 100),
        (format!("{openssl} -servername a.example.org -alpn {all}"), Some("a.example.org"), &many, 4000),
        // Records of 512 bytes.
        (
            format!("{openssl} -servername b.example.org -alpn {all} -max_send_frag 512"),
            Some("b.example.org"),
            &many,
            4000,
        ),
        (format!("{openssl} -noservername"), None, &[], 100),
        (format!("{openssl} -servername old.example.org -tls1"), Some("old.example.org"), &[], 100),
        (format!("{openssl} -servername c.example.org -tls1_2"), Some("c.example.org"), &[], 100),
        (
            "curl --disable --noproxy * --insecure --silent --connect-to ::127.0.0.1:PORT https://www.example.org/"
                .into(),
            Some("www.example.org"),
            &two,
            100,
        ),
    ];
    for (line, name, alpn, size) in table {
        let (bytes, hello) = hello_of(&line).await;
        assert!(bytes.len() > size, "{line}: {} bytes", bytes.len());
        assert_eq!(names(&hello), (name.map(|n| format!("Name({n:?})")), alpn.to_vec()), "{line}");
        let mut slow = Scan::default();
        for cut in 0..bytes.len() {
            assert_eq!(Scan::default().feed(&bytes[..cut]), Ok(None), "{line}: cut at {cut}");
            assert_eq!(slow.feed(&bytes[..cut]), Ok(None), "{line}: grown to {cut}");
        }
        assert_eq!(slow.feed(&bytes), Ok(Some(hello)), "{line}");
    }
}

/// OpenSSL as a server of the files in `dir`, with a certificate for these names.
pub async fn server(dir: &Path, names: &str, more: &str) -> (Child, SocketAddr) {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key";
    let made = command(&format!("openssl req -x509 {key} -out certificate -days 2 -subj /CN=test"))
        .args(["-addext", &format!("subjectAltName={names}")])
        .current_dir(dir)
        .output()
        .await
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let mut command = command(&format!("openssl s_server -accept 127.0.0.1:0 -cert certificate -key key -WWW {more}"));
    let mut server = command.current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    loop {
        let line = timeout(LIMIT, lines.next_line()).await.unwrap().unwrap().expect("ACCEPT");
        if let Some(addr) = line.strip_prefix("ACCEPT ") {
            // It goes on talking.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return (server, addr.parse().unwrap());
        }
    }
}

/// Fetches a file with curl, which checks the certificate; what came, or curl's complaint.
async fn fetch(proxy: &Proxy, dir: &Path, name: &str, more: &str) -> Result<Vec<u8>, String> {
    let port = proxy.server.listen_addrs()[0].port();
    let mut curl =
        command("curl --disable --noproxy * --silent --show-error --fail --max-time 10 --cacert certificate");
    curl.args(more.split_whitespace()).arg("--resolve").arg(format!("{name}:{port}:127.0.0.1"));
    let output = curl.arg(format!("https://{name}:{port}/file")).current_dir(dir).output().await.unwrap();
    if output.status.success() { Ok(output.stdout) } else { Err(String::from_utf8(output.stderr).unwrap()) }
}

fn file(dir: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(dir.join("file"), &bytes).unwrap();
    bytes
}

#[tokio::test]
async fn routes_lead_to_servers_by_name_and_protocol() {
    let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_one, at_one) = server(one.path(), "DNS:*.one.test", "").await;
    let (_two, at_two) = server(two.path(), "DNS:two.test,DNS:a.one.test", "-alpn http/1.1").await;
    let bytes = file(one.path());
    std::fs::write(two.path().join("file"), "two").unwrap();
    let proxy = Proxy::start(
        "tls",
        &format!(
            "[[listener.route]]\nname = \"*.one.test\"\nalpn = \"http/1.1\"\ntarget = \"{at_two}\"\n\
             [[listener.route]]\nname = [\"*.one.test\", \"one.test\"]\ntarget = \"{at_one}\"\n\
             [[listener.route]]\nname = \"two.test\"\ntarget = \"{at_two}\"\n"
        ),
    )
    .await;
    assert!(fetch(&proxy, one.path(), "a.one.test", "--no-alpn").await.unwrap() == bytes);
    assert_eq!(fetch(&proxy, two.path(), "a.one.test", "--http1.1").await.unwrap(), b"two");
    assert_eq!(fetch(&proxy, two.path(), "two.test", "").await.unwrap(), b"two");
    // The certificate is the server's, and not for this name.
    assert!(
        fetch(&proxy, one.path(), "one.test", "--no-alpn").await.unwrap_err().contains("no alternative certificate")
    );
    let refused = fetch(&proxy, one.path(), "three.test", "").await.unwrap_err();
    assert!(refused.contains("unrecognized name"), "{refused}");
    let port = proxy.server.listen_addrs()[0].port();
    let word = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let lines = proxy.lines().await;
    let mut seen: Vec<_> = lines.iter().map(|l| ["target", "server"].map(|key| word(&l[key]))).collect();
    seen.sort_unstable();
    let line = |name: &str, server: &str| [format!("{name}:{port}"), server.into()];
    let (one, two) = (at_one.to_string(), at_two.to_string());
    let mut want = [
        line("a.one.test", &one),
        line("a.one.test", &two),
        line("one.test", &one),
        line("three.test", "-"),
        line("two.test", &two),
    ];
    want.sort_unstable();
    assert_eq!(seen, want);
    let refused = lines.iter().find(|l| l["server"].is_null()).unwrap();
    assert_eq!((&refused["how"], &refused["refusal"]), (&"no-route".into(), &"no route for three.test".into()));
    assert_eq!((proxy.server.counters().no_route, proxy.server.counters().relayed), (1, 4));
}

#[tokio::test]
async fn without_routes_the_name_is_the_target() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, addr) = server(dir.path(), "DNS:localhost", "").await;
    let bytes = file(dir.path());
    let proxy = Proxy::start("tls", &format!("{OPEN}port = {}", addr.port())).await;
    assert!(fetch(&proxy, dir.path(), "localhost", "").await.unwrap() == bytes);
    let line = proxy.line().await;
    let target = format!("localhost:{}", addr.port());
    assert_eq!((&line["target"], &line["server"]), (&target.into(), &addr.to_string().into()));
}

/// A ClientHello of OpenSSL.
async fn hello(more: &str) -> Vec<u8> {
    hello_of(&format!("openssl s_client -connect 127.0.0.1:PORT {more}")).await.0
}

async fn refusals(proxy: &Proxy) -> Vec<String> {
    proxy.lines().await.iter().map(|l| l["refusal"].as_str().unwrap().to_owned()).collect()
}

fn alert(description: u8) -> Vec<u8> {
    vec![21, 3, 3, 0, 2, 2, description]
}

#[tokio::test]
async fn names_chosen_by_clients_are_guarded() {
    let proxy = Proxy::start("tls", "rules = [{ action = \"allow\", target = \"localhost\" }]").await;
    assert_eq!(proxy.answer(&hello("-servername localhost").await).await, alert(49));
    assert_eq!(proxy.answer(&hello("-noservername").await).await, alert(112));
    let refusals = refusals(&proxy).await;
    assert!(refusals.contains(&"guarded address (loopback)".into()), "{refusals:?}");
    assert!(refusals.contains(&"no route for a client that names no server".into()), "{refusals:?}");
}

#[tokio::test]
async fn a_name_that_leads_back_here_is_no_loop() {
    // By another address of ours than the client has taken, too.
    for (listen, to) in [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.2")] {
        let proxy = Proxy::start_at(listen, "tls", OPEN).await;
        let mut client = TcpStream::connect((to, proxy.server.listen_addrs()[0].port())).await.unwrap();
        client.write_all(&hello("-servername localhost").await).await.unwrap();
        let mut seen = Vec::new();
        timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
        assert_eq!(seen, alert(49));
        let lines = proxy.lines().await;
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!(lines[0]["refusal"], "the target leads back to this listener", "{lines:?}");
    }
}

#[tokio::test]
async fn a_route_without_names_takes_the_rest_and_what_was_read_goes_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap();
    let proxy = Proxy::start("tls", &format!("[[listener.route]]\n[[listener.route]]\ntarget = \"{target}\"")).await;
    let hello = hello("-noservername").await;
    let mut client = proxy.connect().await;
    for byte in &hello {
        client.write_all(std::slice::from_ref(byte)).await.unwrap();
        tokio::task::yield_now().await;
    }
    client.write_all(b"early").await.unwrap();
    client.shutdown().await.unwrap();
    let (mut server, _) = timeout(LIMIT, listener.accept()).await.unwrap().unwrap();
    let mut seen = Vec::new();
    timeout(LIMIT, server.read_to_end(&mut seen)).await.unwrap().unwrap();
    assert_eq!(seen, [&hello[..], b"early"].concat());
    drop((client, server));
    let line = proxy.line().await;
    assert_eq!((&line["target"], &line["server"]), (&target.to_string().into(), &target.to_string().into()));
}

#[tokio::test]
async fn what_is_no_hello_is_refused() {
    let proxy = Proxy::start("tls", &format!("[[listener.route]]\ntarget = \"{}\"", closed().await)).await;
    assert_eq!(proxy.answer(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await, b"");
    assert_eq!(proxy.answer(&[22, 3, 1, 0, 0]).await, alert(50));
    assert_eq!(proxy.answer(&[22, 3, 1, 0, 1, 2]).await, alert(10));
    // Records of one byte, more of them than are read.
    let record = |byte| [22, 3, 1, 0, 1, byte];
    let drops: Vec<u8> =
        [1, 0, 255].into_iter().chain(std::iter::repeat_n(0, HELLO_MAX / 6)).flat_map(record).collect();
    assert_eq!(proxy.answer(&drops).await, alert(50));
    assert_eq!(proxy.answer(&hello("-servername a.b").await).await, alert(80)); // nobody listens there
    let refusals = refusals(&proxy).await;
    assert!(refusals.contains(&"not TLS: begins with byte 0x47".into()), "{refusals:?}");
    assert!(refusals.contains(&"a message of more than 65536 bytes".into()), "{refusals:?}");
    let counters = proxy.server.counters();
    assert_eq!((counters.bad_requests, counters.unreachable), (4, 1), "{refusals:?}");
}

#[tokio::test]
async fn silent_clients_are_cut_off() {
    let proxy = Proxy::start("tls", "limits.handshake = 0.1").await;
    let hello = hello("-servername a.b").await;
    let mut silent: Vec<TcpStream> = Vec::new();
    for input in [&b""[..], &hello[..1], &hello[..hello.len() - 1]] {
        silent.push(proxy.connect().await);
        silent.last_mut().unwrap().write_all(input).await.unwrap();
    }
    for client in &mut silent {
        let mut seen = Vec::new();
        timeout(LIMIT, client.read_to_end(&mut seen)).await.unwrap().unwrap();
        assert!(seen.is_empty());
    }
    assert!(proxy.lines().await.iter().all(|l| l["how"] == "timeout"));
    assert_eq!(proxy.server.counters().timeouts, 3);
}
