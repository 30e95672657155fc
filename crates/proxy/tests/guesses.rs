//! Guesses of passwords, by each protocol that asks for them, from one address on the loopback device: as many as are allowed, at
//! once over connections of their own, and then the right one.

use crate::proxying::{OPEN, Proxy};

/// As many as are looked at.
const GUESSES: usize = 100;

/// What `input` with each password is answered.
async fn answers(proxy: &Proxy, input: impl Fn(&str) -> Vec<u8>, passwords: &[&str]) -> Vec<Vec<u8>> {
    let inputs: Vec<_> = passwords.iter().map(|password| input(password)).collect();
    // one after the other here, and yet at once there: nobody reads an answer before all have asked
    let mut clients = Vec::new();
    for input in &inputs {
        let mut client = proxy.connect().await;
        tokio::io::AsyncWriteExt::write_all(&mut client, input).await.unwrap();
        clients.push(client);
    }
    let mut seen = Vec::new();
    for mut client in clients {
        let mut answer = Vec::new();
        let read = tokio::io::AsyncReadExt::read_to_end(&mut client, &mut answer);
        tokio::time::timeout(crate::proxying::LIMIT, read).await.unwrap().unwrap();
        seen.push(answer);
    }
    seen
}

#[tokio::test]
async fn guesses_come_to_an_end() {
    let limits = "limits.connections_per_client = 1000\n";
    let hashed = bcrypt::hash("secret", 4).unwrap();
    let socks = |password: &str| {
        let length = password.len() as u8;
        [&b"\x05\x01\x02\x01\x03ann"[..], &[length], password.as_bytes(), b"\x05\xf0\0\x01\0\0\0\0\0\0"].concat()
    };
    let ftp = |password: &str| format!("USER x@ann@127.0.0.1:1\r\nPASS x@{password}\r\nQUIT\r\n").into_bytes();
    let users = format!("{OPEN}{limits}users = {{ ann = \"{hashed}\" }}\n");

    let proxy = Proxy::start("socks5", &users).await;
    let right = answers(&proxy, socks, &["secret"]).await.remove(0);
    assert_eq!(right[..4], [5, 2, 1, 0], "{right:?}");
    let wrong = answers(&proxy, socks, &["guess"; GUESSES + 20]).await;
    assert!(wrong.iter().all(|answer| answer == b"\x05\x02\x01\x01"), "{wrong:?}");
    assert_eq!(answers(&proxy, socks, &["secret"]).await, [b"\x05\x02\x01\x01"]);
    assert_eq!(proxy.server.counters().auth_failed as usize, GUESSES + 21);
    let lines = proxy.lines().await;
    let said = |why: &str| lines.iter().filter(|line| line["refusal"] == why).count();
    let (wrong, many) = (said("wrong name or password"), said("too many wrong passwords from this address"));
    assert_eq!((wrong, many), (GUESSES, 21));

    let proxy = Proxy::start("ftp", &users).await;
    let right = answers(&proxy, ftp, &["secret"]).await.remove(0);
    assert!(String::from_utf8_lossy(&right).contains("421 "), "nobody serves there: {}", right.escape_ascii());
    let wrong = answers(&proxy, ftp, &["guess"; GUESSES + 20]).await;
    let with = |code: &str| wrong.iter().filter(|answer| String::from_utf8_lossy(answer).contains(code)).count();
    assert_eq!((with("\n530 "), with("\n421 ")), (GUESSES, 20));
    let right = answers(&proxy, ftp, &["secret"]).await.remove(0);
    assert!(String::from_utf8_lossy(&right).ends_with("421 Too many failed logins\r\n"), "{}", right.escape_ascii());
    assert_eq!(proxy.server.counters().auth_failed as usize, GUESSES + 21);
}
