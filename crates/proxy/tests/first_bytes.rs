//! Conditions on the first bytes of plugs and SOCKS, over real sockets on the loopback device.

use crate::proxying::{LIMIT, OPEN, Proxy};
use serde_json::Value;
use std::io::ErrorKind;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// A plug with a filter, and its server.
struct Scene {
    proxy: Proxy,
    listener: TcpListener,
}

impl Scene {
    async fn new(filter: &str) -> Scene {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        let proxy = Proxy::start("plug", &format!("target = \"{target}\"\n[listener.filter]\n{filter}\n")).await;
        Scene { proxy, listener }
    }

    async fn connect(&self) -> [TcpStream; 2] {
        let (client, accepted) = tokio::join!(self.proxy.connect(), self.listener.accept());
        [client, accepted.unwrap().0]
    }

    async fn denied(&self, whose: &str, why: &str) -> Value {
        let line = self.proxy.lines().await.pop().unwrap();
        assert_eq!(line["how"], "denied", "{line}");
        assert_eq!(line["refusal"], format!("the first bytes of the {whose} {why}"), "{line}");
        line
    }
}

async fn say(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn hear(stream: &mut TcpStream, text: &str) {
    let mut got = vec![0; text.len()];
    timeout(LIMIT, stream.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(String::from_utf8(got).unwrap(), text);
}

/// Both ends are reset, and get nothing more.
async fn are_reset(ends: &mut [TcpStream; 2]) {
    for end in ends {
        let mut rest = Vec::new();
        let read = timeout(LIMIT, end.read_to_end(&mut rest)).await.unwrap().map_err(|e| e.kind());
        assert_eq!((read, rest.len()), (Err(ErrorKind::ConnectionReset), 0), "{rest:?}");
    }
}

/// Half-closes and ends in order.
async fn end(mut ends: [TcpStream; 2]) {
    for n in 0..2 {
        ends[n].shutdown().await.unwrap();
        let mut rest = Vec::new();
        timeout(LIMIT, ends[1 - n].read_to_end(&mut rest)).await.unwrap().unwrap();
        assert_eq!(rest, b"");
    }
}

#[tokio::test]
async fn what_must_be_there_is_held_back_until_it_is() {
    let scene = Scene::new("client = { must = '^SSH-2\\.0-', first = 16 }").await;
    let [mut client, mut server] = scene.connect().await;
    // the server may speak meanwhile
    say(&mut server, "SSH-2.0-server").await;
    hear(&mut client, "SSH-2.0-server").await;
    say(&mut client, "SSH-").await;
    let early = timeout(std::time::Duration::from_millis(50), server.read_u8()).await;
    assert!(early.is_err(), "{early:?}");
    say(&mut client, "2.0-client").await;
    hear(&mut server, "SSH-2.0-client").await;
    say(&mut server, "more").await;
    hear(&mut client, "more").await;
    end([client, server]).await;
    let line = scene.proxy.line().await;
    assert_eq!(
        (&line["how"], &line["bytes_up"], &line["bytes_down"]),
        (&"closed".into(), &14.into(), &18.into()),
        "{line}"
    );

    for wrong in ["GET / HTTP/1.1", "SSH-1"] {
        let mut ends = scene.connect().await;
        say(&mut ends[0], wrong).await;
        are_reset(&mut ends).await;
        scene.denied("client", "lack what they must have").await;
    }
    assert_eq!(scene.proxy.server.counters().denied, 2);
}

#[tokio::test]
async fn a_host_that_says_nothing_is_not_waited_for_for_ever() {
    for whose in ["client", "server"] {
        let scene = Scene::new(&format!("{whose} = {{ must = 'x', wait = 0.05 }}")).await;
        are_reset(&mut scene.connect().await).await;
        scene.denied(whose, "are not there in time").await;
        let mut ends = scene.connect().await;
        ends[usize::from(whose == "server")].shutdown().await.unwrap();
        are_reset(&mut ends).await;
        scene.denied(whose, "lack what they must have").await;
    }
}

#[tokio::test]
async fn what_must_never_be_there_ends_the_connection() {
    let scene =
        Scene::new("client = { never = 'evil', first = 12 }\nserver = { must = '^2', never = 'x', first = 3 }").await;
    let mut ends = scene.connect().await;
    say(&mut ends[1], "220").await;
    hear(&mut ends[0], "220").await;
    // a conversation goes on meanwhile
    say(&mut ends[0], "helo").await;
    hear(&mut ends[1], "helo").await;
    say(&mut ends[1], "x").await; // not among the first
    hear(&mut ends[0], "x").await;
    say(&mut ends[0], "ev").await;
    hear(&mut ends[1], "ev").await;
    say(&mut ends[0], "il").await;
    are_reset(&mut ends).await;
    let line = scene.denied("client", "have what they must never have").await;
    assert_eq!((&line["bytes_up"], &line["bytes_down"]), (&6.into(), &4.into()), "{line}");
    assert_eq!(line["server"], scene.listener.local_addr().unwrap().to_string());
    // behind the first bytes
    let mut ends = scene.connect().await;
    say(&mut ends[1], "220").await;
    say(&mut ends[0], "123456789012evil").await;
    hear(&mut ends[1], "123456789012evil").await;
    hear(&mut ends[0], "220").await;
    end(ends).await;
    let line = scene.proxy.lines().await.pop().unwrap();
    assert_eq!(
        (&line["how"], &line["bytes_up"], &line["bytes_down"]),
        (&"closed".into(), &16.into(), &3.into()),
        "{line}"
    );
}

/// A server that answers at its client's FIN would wait for ever.
#[tokio::test]
async fn a_fin_is_passed_on_while_something_is_open() {
    let scene = Scene::new("client = { never = 'evil' }\nserver = { must = '^ok' }").await;
    let [mut client, mut server] = scene.connect().await;
    say(&mut client, "question").await;
    client.shutdown().await.unwrap();
    let mut got = Vec::new();
    timeout(LIMIT, server.read_to_end(&mut got)).await.unwrap().unwrap();
    assert_eq!(got, b"question");
    say(&mut server, "ok, answer").await;
    hear(&mut client, "ok, answer").await;
    drop(server);
    let mut rest = Vec::new();
    timeout(LIMIT, client.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(rest, b"");
    assert_eq!(scene.proxy.line().await["how"], "closed");
}

#[tokio::test]
async fn with_socks_they_are_those_behind_the_request() {
    let scene = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = scene.local_addr().unwrap().port().to_be_bytes();
    let proxy = Proxy::start("socks5", &format!("{OPEN}filter.client = {{ must = '^GET ' }}\n")).await;
    let ask = [&[5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1][..], &port].concat();
    for (first, good) in [("GET /", true), ("\x05\x01\0", false)] {
        let mut client = proxy.connect().await;
        // the first bytes are in the segment of the request
        client.write_all(&[&ask, first.as_bytes()].concat()).await.unwrap();
        let (mut server, _) = scene.accept().await.unwrap();
        let mut answer = [0; 12];
        timeout(LIMIT, client.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(answer[..4], [5, 0, 5, 0]);
        match good {
            true => hear(&mut server, first).await,
            false => are_reset(&mut [client, server]).await,
        }
    }
    let lines = proxy.lines().await;
    let how: Vec<_> = lines.iter().map(|line| line["how"].as_str().unwrap()).collect();
    assert!(how.contains(&"denied"), "{lines:?}");
}
