use super::*;
use std::{fs, io::ErrorKind, os::unix::fs::PermissionsExt};
use tempfile::TempDir;
use tokio::{net::UnixListener, task::JoinSet};

const CLIENT: &str = "2001:db8::7";
/// Length of what the process behind a socket is told of ann.
const LINES: usize = "ann\nsecret\n".len() + CLIENT.len() + 1;

/// A check that asks this socket.
fn socket() -> (TempDir, UnixListener, Check) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    (dir, UnixListener::bind(&path).unwrap(), Check::new(Asked::Socket(path), LIMIT))
}

async fn allows(check: &Check, name: &[u8]) -> bool {
    check.allows(name, b"secret", CLIENT.parse().unwrap()).await
}

/// It has the client's address, and nothing of our own environment, which may hold secrets.
#[tokio::test]
async fn a_program_gets_an_environment_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (program, seen) = (dir.path().join("check"), dir.path().join("seen"));
    fs::write(
        &program,
        format!("#!/bin/sh\ntr '\\0' '\\n' < /proc/self/environ > {}\ncat > /dev/null\n", seen.display()),
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(std::env::vars().any(|(name, _)| name.starts_with("CARGO")), "there is something to hide");
    assert!(allows(&Check::new(Asked::Program(program), LIMIT), b"ann").await);
    let seen = fs::read_to_string(seen).unwrap();
    let mut names: Vec<_> = seen.lines().map(|line| line.split('=').next().unwrap()).collect();
    names.sort_unstable();
    names.retain(|name| !["PWD", "SHLVL", "OLDPWD", "_"].contains(name)); // the shell's own
    assert_eq!(names, ["CLIENT", "PATH"], "{seen}");
    assert!(seen.contains(&format!("CLIENT={CLIENT}\n")), "{seen}");
}

/// A name cannot bring a line of its own, such as another client's address.
#[tokio::test]
async fn no_name_has_an_end_of_a_line() {
    let (_dir, listener, check) = socket();
    for (name, want) in [(&b"ann"[..], format!("ann\nsecret\n{CLIENT}\n")), (b"ann\nx", String::new())] {
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut said = vec![0; 100];
            let n = if want.is_empty() { 0 } else { stream.read(&mut said).await.unwrap() };
            assert_eq!(String::from_utf8_lossy(&said[..n]), want);
            stream.write_all(b"no\n").await.unwrap();
            let more = stream.read(&mut said).await.unwrap();
            assert_eq!(more, 0, "{}", String::from_utf8_lossy(&said[..more]));
        };
        let (allowed, ()) = tokio::join!(allows(&check, name), answer);
        assert!(!allowed);
    }
}

/// What goes on without an end is no answer, however it begins.
#[tokio::test]
async fn long_answers() {
    let (_dir, listener, check) = socket();
    for (answer, allowed) in [("yes\n", true), ("yes", true), ("yes or no\n", false)] {
        let say = async {
            let (mut stream, _) = listener.accept().await?;
            while stream.read(&mut [0; 100]).await? < LINES {} // unread bytes would reset the connection
            stream.write_all(answer.as_bytes()).await
        };
        let (allows, said) = tokio::join!(allows(&check, b"ann"), say);
        said.unwrap();
        assert_eq!(allows, allowed, "{answer:?}");
    }
    let patient = Check { limit: Duration::from_secs(3600), ..check };
    let endless = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        while stream.write_all(&[b' '; 4096]).await.is_ok() {}
    };
    let (allowed, ()) = tokio::join!(allows(&patient, b"ann"), endless);
    assert!(!allowed);
}

#[tokio::test]
async fn eight_are_asked_for_at_a_time() {
    let (_dir, listener, check) = socket();
    let mut checks = JoinSet::new();
    for _ in 0..3 * AT_ONCE {
        let check = check.clone();
        checks.spawn(async move { allows(&check, b"ann").await });
    }
    let mut asking = Vec::new();
    for _ in 0..AT_ONCE {
        asking.push(listener.accept().await.unwrap().0);
    }
    // all of them have been begun: of this thread, nothing else is ready
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let listener = listener.into_std().unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let listener = UnixListener::from_std(listener).unwrap();
    for n in 1..=2 * AT_ONCE {
        asking.remove(0).write_all(b"yes\n").await.unwrap();
        assert_eq!(checks.join_next().await.unwrap().ok(), Some(true), "{n}");
        asking.push(listener.accept().await.unwrap().0);
    }
}
