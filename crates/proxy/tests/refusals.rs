//! What clients of SOCKS and FTP are told when they are refused, and what counts it. Everything is on the loopback device.

use crate::proxying::{OPEN, Proxy, closed};
use std::{fs, net::SocketAddr};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
};

/// The faults that were counted, as the access log calls them.
fn faults(proxy: &Proxy) -> Vec<(&'static str, u64)> {
    let v = proxy.server.counters();
    let all = [
        ("bad-request", v.bad_requests),
        ("auth-failed", v.auth_failed),
        ("denied", v.denied),
        ("unreachable", v.unreachable),
        ("bad-reply", v.bad_replies),
        ("timeout", v.timeouts),
        ("limit", v.over_limit),
    ];
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

#[tokio::test]
async fn refusals_of_socks() {
    let port = closed().await.port().to_be_bytes();
    let v5 = |request: &[u8]| [&[5, 1, 0][..], request].concat();
    let there = [&[127, 0, 0, 1][..], &port].concat();
    let connect5 = v5(&[&[5, 1, 0, 1][..], &there].concat());
    let connect4 = [&[4, 1][..], &port, &[127, 0, 0, 1, 0]].concat();
    let no = |code| vec![5, 0, 5, code, 0, 1, 0, 0, 0, 0, 0, 0];
    let no4 = vec![0, 0x5b, 0, 0, 0, 0, 0, 0];
    let users = "users = { ann = \"pw\" }\n";
    for (more, input, answer, how) in [
        (OPEN, connect5.clone(), no(5), "unreachable"),
        ("", connect5, no(2), "denied"),
        (OPEN, v5(b"\x05\x04\0\x01\0\0\0\0\0\0"), no(7), "bad-request"),
        (OPEN, v5(b"\x05\x01\0\x02"), no(8), "bad-request"),
        (OPEN, v5(b"\x05\x01\0\x03\0"), no(1), "bad-request"),
        (OPEN, v5(b"\x04"), no(1), "bad-request"),
        (OPEN, b"\x05\x01\x02".to_vec(), vec![5, 0xff], "auth-failed"),
        (users, b"\x05\x01\x02\x01\x03ann\x02pX".to_vec(), vec![5, 2, 1, 1], "auth-failed"),
        (users, b"\x05\x01\x02\x05".to_vec(), vec![5, 2], "bad-request"),
        (OPEN, connect4.clone(), no4.clone(), "unreachable"),
        ("", connect4.clone(), no4.clone(), "denied"),
        (users, connect4, no4.clone(), "auth-failed"),
        (OPEN, [&[4, 7][..], &port, &[127, 0, 0, 1, 0]].concat(), no4.clone(), "bad-request"),
        (OPEN, [&b"\x04\x01\0\x50\x7f\0\0\x01"[..], &[b'u'; 300]].concat(), no4, "bad-request"),
        (OPEN, b"GET / HTTP/1.1\r\n\r\n".to_vec(), Vec::new(), "bad-request"),
    ] {
        let proxy = Proxy::start("socks5", more).await;
        assert_eq!(proxy.answer(&input).await, answer, "{}", input.escape_ascii());
        assert_eq!(proxy.line().await["how"], how, "{}", input.escape_ascii());
        assert_eq!(faults(&proxy), [(how, 1)], "{}", input.escape_ascii());
    }
}

/// A server that takes every command, but names no port, and makes no sense of SYST.
async fn server(greeting: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (from, mut to) = stream.split();
                to.write_all(greeting.as_bytes()).await.unwrap();
                let mut lines = BufReader::new(from).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    let reply = match line.split(' ').next() {
                        Some("PASV") => "227 (1,2,3)",
                        Some("SYST") => "nonsense",
                        Some("QUIT") => "221 bye",
                        _ => "200 ok",
                    };
                    to.write_all(format!("{reply}\r\n").as_bytes()).await.unwrap();
                }
            });
        }
    });
    at
}

/// A command, its answer, and the fault that is counted. Nothing is counted where a client may well ask in vain.
#[tokio::test]
async fn refusals_of_ftp() {
    let [good, full] = ["220 hello\r\n", "530 full\r\n"].map(server);
    let (good, full, closed) = (good.await, full.await, closed().await);
    let fixed = format!("target = \"{good}\"\n");
    let rules = |rules: &str| format!("{fixed}rules = [{{ action = \"deny\", {rules} }}]\n");
    let (verb, pass) = (rules("methods = \"DELE\""), rules("methods = \"PASS\""));
    let (path, open) = (rules("path = [\"/secret\", \"/secret/*\"]"), OPEN.to_owned());
    let (long, late) = (format!("RETR {}", "x".repeat(9000)), format!("{OPEN}limits.keep_alive = 0.1\n"));
    let [to_good, to_full, to_nobody] = [good, full, closed].map(|at| format!("USER a@{at}"));
    let (none, low) = (String::new(), format!("{fixed}ftp.low_ports = true\n"));
    for (keys, command, code, how) in [
        (&fixed, "  NOOP", 500, "bad-request"),
        (&fixed, "NOOP\rDELE x", 500, "bad-request"),
        (&fixed, long.as_str(), 500, "bad-request"),
        (&fixed, "PORT 127,0,0,1,4", 501, "bad-request"),
        (&fixed, "EPRT nothing", 501, "bad-request"),
        (&fixed, "EPRT |2|::1|6446|", 522, ""),
        (&fixed, "PORT 10,0,0,1,25,46", 504, "bad-request"),
        (&fixed, "PORT 127,0,0,1,0,25", 504, "bad-request"),
        (&low, "PORT 127,0,0,1,0,25", 425, "bad-reply"),
        (&low, "PORT 127,0,0,1,0,0", 504, "bad-request"),
        (&fixed, "LPRT 6", 502, ""),
        (&fixed, "AUTH TLS", 502, ""),
        (&fixed, "RETR x", 425, ""),
        (&fixed, "PASV", 425, "bad-reply"),
        (&fixed, "SYST", 421, "bad-reply"),
        (&verb, "dele x", 550, "denied"),
        (&path, "RETR /secret/x", 550, "denied"),
        (&path, "RETR  /secret/x", 550, "bad-request"),
        (&path, "RETR /secret\t", 550, "bad-request"),
        (&pass, "PASS hidden", 550, "denied"),
        (&open, "  NOOP", 500, "bad-request"),
        (&open, "USER a", 501, "bad-request"),
        (&open, "PASV", 530, ""),
        (&open, "PASS x", 503, ""),
        (&open, to_nobody.as_str(), 421, "unreachable"),
        (&open, to_full.as_str(), 530, "bad-reply"),
        (&none, to_good.as_str(), 421, "denied"),
        (&late, "", 421, "timeout"),
    ] {
        let proxy = Proxy::start("ftp", keys).await;
        let input = if command.is_empty() { String::new() } else { format!("{command}\r\nQUIT\r\n") };
        let answer = proxy.answer(input.as_bytes()).await;
        let lines = String::from_utf8_lossy(&answer).into_owned();
        assert!(lines.lines().nth(1).unwrap_or_default().starts_with(&code.to_string()), "{command}: {lines}");
        proxy.lines().await;
        let want = if how.is_empty() { Vec::new() } else { vec![(how, 1)] };
        assert_eq!(faults(&proxy), want, "{command}");
        let log = fs::read_to_string(proxy.dir.path().join("log")).unwrap();
        assert!((how.is_empty() || log.contains(how) || code <= 501) && !log.contains("hidden"), "{command}: {log}");
    }
}
