//! Connections that stop to be HTTP: WebSocket between two programs of others, and another protocol, through a forward proxy
//! and through a site. All are spliced. Needs root and eBPF, and fails without; Debian package: python3-websockets.

use crate::running::{Setting, eventually, listener};
use longsplice_lab::{
    ChildGuard, Family, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

const PROXY: u16 = 3128;
const SITE: u16 = 8000;
const PORT: u16 = 8080;
/// Port of the server that switches to a protocol of its own.
const OTHER: u16 = 8081;
/// Time limit for every program.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes each way, at least.
const SIZE: usize = 6_000_000;

/// Sends back what it gets.
const ECHO: &str = "
import asyncio, sys, websockets
async def echo(socket):
    async for message in socket:
        await socket.send(message)
async def main():
    async with websockets.serve(echo, sys.argv[1], int(sys.argv[2]), max_size=None, compression=None, ping_interval=None):
        await asyncio.Future()
asyncio.run(main())
";

/// Says messages of all kinds and sizes to a server that sends them back: directly, after CONNECT, or with the whole URL.
const CLIENT: &str = "
import asyncio, os, socket, sys, websockets
from websockets.legacy.client import WebSocketClientProtocol
way, uri, host, port, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
class Whole(WebSocketClientProtocol):
    def write_http_request(self, path, headers):
        super().write_http_request(uri.replace('ws:', 'http:', 1), headers)
async def main():
    more = {}
    if way == 'connect':
        more['sock'] = socket.create_connection((host, port))
        server = uri.split('/')[2]
        more['sock'].sendall(f'CONNECT {server} HTTP/1.1\\r\\nHost: {server}\\r\\n\\r\\n'.encode())
        head = b''
        while not head.endswith(b'\\r\\n\\r\\n'):
            head += more['sock'].recv(1)
        assert head.startswith(b'HTTP/1.1 200'), head
    elif way == 'absolute':
        more = dict(host=host, port=port, create_protocol=Whole)
    async with websockets.connect(uri, max_size=None, compression=None, ping_interval=None, **more) as s:
        sent = n = 0
        while sent < size:
            message = os.urandom([0, 1, 125, 126, 65535, 65536, 200000][n % 7])
            if n % 14 == 1:
                message = 'text ' * 1000
            await s.send(message)
            assert await s.recv() == message
            sent, n = sent + len(message), n + 1
        await (await s.ping())
        await s.close(4000, 'done')
        assert s.close_code == 4000, s.close_code
    print('all came back')
asyncio.run(main())
";

fn setting() -> Setting {
    let mut text = String::new();
    for family in Family::BOTH {
        let at = |port: u16| FORWARDER_TO_CLIENT.port(family, port).to_string();
        let name = if family == Family::V4 { "four" } else { "six" };
        text += &listener("http", &at(PROXY), "");
        let routes = format!("route = [{{ path = \"/other\", pool = \"other-{name}\" }}, {{ pool = \"{name}\" }}]");
        text += &listener("http", &at(SITE), &routes);
    }
    // pools after all listeners: their tables end what belongs to the listener
    for (family, name) in Family::BOTH.into_iter().zip(["four", "six"]) {
        let server = |port: u16| SERVER.port(family, port);
        text += &format!("[pool.{name}]\nservers = [\"{}\"]\n", server(PORT));
        text += &format!("[pool.other-{name}]\nservers = [\"{}\"]\n", server(OTHER));
    }
    Setting::new(&text)
}

/// Checks that a connection was spliced, and that nearly all of its bytes were.
fn is_spliced(record: &Value, status: u16) {
    let number = |key: &str| record[key].as_u64().unwrap_or_default();
    let half = SIZE as u64 / 2;
    assert_eq!((number("status"), number("splices")), (u64::from(status), 1), "{record}");
    assert_eq!(record["method"], if status == 101 { "GET" } else { "CONNECT" }, "{record}");
    assert!(number("spliced_up") > half && number("spliced_down") > half, "{record}");
    assert_eq!(record["how"], "closed", "{record}");
}

#[test]
#[ignore = "root"]
fn web_sockets_are_spliced() {
    let setting = setting();
    let servers = Family::BOTH.map(|family| {
        let mut command = setting.lab.server.command("/usr/bin/python3");
        let at = SERVER.port(family, PORT);
        let host = at.ip().to_string();
        let server = ChildGuard::spawn(command.args(["-c", ECHO, &host, &PORT.to_string()])).unwrap();
        setting.lab.server.run(|| eventually("the server", || TcpStream::connect(at).ok()));
        server
    });
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    for family in Family::BOTH {
        for (way, through) in [("connect", PROXY), ("absolute", PROXY), ("site", SITE)] {
            let server = SERVER.port(family, PORT);
            let at = FORWARDER_TO_CLIENT.port(family, through);
            let uri = format!("ws://{}/", if way == "site" { at } else { server });
            let [host, port, size] = [at.ip().to_string(), through.to_string(), SIZE.to_string()];
            let mut command = setting.lab.client.command("/usr/bin/python3");
            let mut client = ChildGuard::spawn(command.args(["-c", CLIENT, way, &uri, &host, &port, &size])).unwrap();
            let status = client.wait(PATIENCE);
            let said = || format!("{way} {uri}: {status:?}: {}{}", client.output(), servers[0].output());
            assert!(client.output().contains("all came back"), "{}", said());
        }
    }
    let records = proxy.end(&setting.pins[0]);
    assert_eq!(records.len(), 6, "{records:#?}");
    for (number, record) in records.iter().enumerate() {
        is_spliced(record, if number % 3 == 0 { 200 } else { 101 });
    }
}

/// Reads a head. Returns its lines.
fn head(from: &mut impl BufRead) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        match line.trim_end() {
            "" => return lines,
            line => lines.push(line.to_ascii_lowercase()),
        }
    }
}

fn bytes(seed: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    pattern::fill(seed, 0, &mut bytes);
    bytes
}

/// Sends so many bytes of a seed, and reads as many of another one.
fn exchange(connection: &TcpStream, mut from: impl Read, size: usize, sends: u64, expects: u64) {
    let mut to = connection.try_clone().unwrap();
    let sender = thread::spawn(move || to.write_all(&bytes(sends, size)));
    let mut got = vec![0; size];
    from.read_exact(&mut got).unwrap();
    assert!(got == bytes(expects, size), "other bytes than those of seed {expects}");
    sender.join().unwrap().unwrap();
}

/// Both hosts speak at once, and the server's first bytes come together with its 101: they belong to the new protocol.
#[test]
#[ignore = "root"]
fn another_protocol_is_spliced_from_its_first_byte_on() {
    const OF_SERVER: u64 = 1;
    const OF_CLIENT: u64 = 2;
    /// By default, enough for a splice.
    const BEFORE: usize = 100_000;
    let setting = setting();
    for family in Family::BOTH {
        let listener = setting.listen(SERVER.port(family, OTHER));
        thread::spawn(move || {
            while let Ok((mut connection, _)) = listener.accept() {
                thread::spawn(move || {
                    let mut from = BufReader::new(connection.try_clone().unwrap());
                    let lines = head(&mut from);
                    assert!(lines.iter().any(|l| l == "upgrade: other/1.0"), "{lines:?}");
                    let switched =
                        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: other/1.0\r\n\r\n";
                    let all = [switched.as_bytes(), b"first"].concat();
                    connection.write_all(&all).unwrap();
                    for size in [BEFORE, SIZE] {
                        // not sooner: the client reads nothing until the flow is spliced, and a drain has to wait for it
                        assert!(!from.fill_buf().unwrap().is_empty());
                        exchange(&connection, &mut from, size, OF_SERVER, OF_CLIENT);
                    }
                    assert_eq!(from.read(&mut [0]).unwrap(), 0, "more than the client has sent");
                });
            }
        });
    }
    let mut proxy = setting.start_with(&["--log-format", "json"]);
    for family in Family::BOTH {
        let server = SERVER.port(family, OTHER);
        for (target, through) in [(format!("http://{server}/"), PROXY), ("/other".to_owned(), SITE)] {
            let mut connection = setting.connect(FORWARDER_TO_CLIENT.port(family, through));
            let asked =
                format!("GET {target} HTTP/1.1\r\nHost: {server}\r\nConnection: upgrade\r\nUpgrade: other/1.0\r\n\r\n");
            connection.write_all(asked.as_bytes()).unwrap();
            let mut from = BufReader::new(connection.try_clone().unwrap());
            let lines = head(&mut from);
            assert!(lines[0].contains(" 101 ") && lines.iter().any(|l| l == "upgrade: other/1.0"), "{lines:?}");
            let mut first = [0; 5];
            from.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"first");
            exchange(&connection, &mut from, BEFORE, OF_CLIENT, OF_SERVER);
            proxy.wait_flow("spliced");
            exchange(&connection, &mut from, SIZE, OF_CLIENT, OF_SERVER);
        }
    }
    let records = proxy.end(&setting.pins[0]);
    assert_eq!(records.len(), 4, "{records:#?}");
    records.iter().for_each(|record| is_spliced(record, 101));
}
