use super::*;
use crate::{
    config::login::Destination,
    users::{Users, failures::Failures},
};
use std::cell::Cell;
use tokio::{
    io::{DuplexStream, duplex},
    time::Instant,
};

#[derive(Default)]
struct Failed(Cell<u32>);

impl Counts for Failed {
    fn auth_failed(&self) {
        self.0.set(self.0.get() + 1);
    }
}

fn login() -> Login {
    let mut users = Users::default();
    users.add("ann", "secret").unwrap();
    let destination = |name: &str, users: &[&str]| Destination {
        name: name.into(),
        target: "192.0.2.1:23".parse().unwrap(),
        users: users.iter().map(|u| (*u).into()).collect(),
        telnet: true,
    };
    let destinations = vec![destination("db", &[]), destination("Web", &["ann"]), destination("safe", &["bob"])];
    Login { users, destinations, ..Login::default() }
}

fn record() -> Record {
    Record::new("login", None, ([192, 0, 2, 2], 1).into())
}

/// Runs a conversation whose client sends this, and then nothing. Returns the outcome, what it was told, and for how long
/// it took.
async fn run(login: &Login, input: &[u8]) -> (Result<String, Fault>, String, Duration, u32) {
    let (mut client, mut ours): (DuplexStream, DuplexStream) = duplex(64 * 1024);
    client.write_all(input).await.unwrap();
    let (started, failed) = (Instant::now(), Failed::default());
    let mut record = record();
    let mut talk = Talk::with(login, &mut ours, Cleared::default(), [192, 0, 2, 2].into());
    let asked = timeout(login.time, talk.ask((&failed, &|_: Option<&str>| None), login, &mut record)).await;
    let asked = asked.unwrap_or(Err(Fault::Timeout(Step::Handshake)));
    if let Err(fault) = &asked {
        talk.part(fault).await;
    }
    drop(ours);
    let mut told = String::new();
    client.read_to_string(&mut told).await.unwrap();
    let chosen = asked.map(|c| format!("{} {} {:?} {:?}", c.name, c.target, record.user, (c.configured, c.telnet)));
    (chosen, told, started.elapsed(), failed.0.get())
}

#[tokio::test(start_paused = true)]
async fn who_logs_in_goes_where_he_may() {
    let (chosen, told, time, _) = run(&login(), b"ann\nsecret\nweb\n").await;
    assert_eq!(chosen.unwrap(), r#"Web 192.0.2.1:23 Some("ann") (true, true)"#);
    assert_eq!((told.as_str(), time), ("login: password: host: ", Duration::ZERO));
    let (chosen, told, ..) = run(&login(), b"ann\nsecret\n\nsafe\x1b\nexample.org\ndb\n").await;
    assert!(chosen.unwrap().starts_with("db "));
    assert_eq!(
        told,
        "login: password: host: destinations: db Web\r\nhost: no such destination: safe\r\ndestinations: db Web\r\n\
         host: no such destination: example.org\r\ndestinations: db Web\r\nhost: "
    );
}

#[tokio::test(start_paused = true)]
async fn hosts_that_clients_name() {
    let free = Login { free: true, users: Users::default(), destinations: Vec::new(), ..login() };
    for (line, target) in [
        ("example.org", "example.org:23"),
        ("Example.org 2323", "example.org:2323"),
        ("192.0.2.7:80", "192.0.2.7:80"),
        ("2001:db8::7", "[2001:db8::7]:23"),
        ("2001:db8::7 80", "[2001:db8::7]:80"),
        (" [2001:db8::7]:80 ", "[2001:db8::7]:80"),
    ] {
        let (chosen, ..) = run(&free, format!("{line}\n").as_bytes()).await;
        let telnet = target.ends_with(":23");
        assert_eq!(chosen.unwrap(), format!("{target} {target} None (false, {telnet})"), "{line}");
    }
    let (chosen, told, ..) = run(&free, &b"a b c\n:23\na..b\nx:0\n\n".repeat(2)).await;
    assert!(matches!(chosen, Err(Fault::BadRequest(_))), "{chosen:?}");
    assert_eq!(told.matches("type HOST or HOST:PORT").count(), usize::from(session::HOSTS) - 1);
}

/// A client that has connected to a server goes there, if that is one of the user's destinations.
#[tokio::test]
async fn who_wants_a_server_is_led_there_if_he_may() {
    let led = |login: &Login, user, wanted: &str| {
        let known = |target: &Target| vec![target.to_string().replace("box", "192.0.2.2").parse().unwrap()];
        let chosen = login.lead(Some(user), wanted.parse().unwrap(), known);
        chosen.map(|c| format!("{} {} {:?}", c.name, c.target, (c.configured, c.telnet))).ok()
    };
    let mut login = login();
    login.destinations[2].target = "box:2323".parse().unwrap();
    assert_eq!(led(&login, "ann", "192.0.2.1:23").unwrap(), "db 192.0.2.1:23 (true, true)");
    assert_eq!(led(&login, "bob", "192.0.2.2:2323").unwrap(), "safe box:2323 (true, true)");
    assert_eq!([led(&login, "ann", "192.0.2.2:2323"), led(&login, "ann", "192.0.2.1:24")], [None, None]);
    (login.free, login.telnet) = (true, true);
    assert_eq!(led(&login, "ann", "192.0.2.2:2323").unwrap(), "192.0.2.2:2323 192.0.2.2:2323 (false, false)");
    assert_eq!(led(&login, "ann", "192.0.2.3:23").unwrap(), "192.0.2.3:23 192.0.2.3:23 (false, true)");
}

#[tokio::test(start_paused = true)]
async fn three_tries_a_delay_after_each_and_a_limit_for_each_address() {
    let login = Login { failures: std::sync::Arc::new(Failures::new(4)), ..login() };
    let (chosen, told, time, counted) = run(&login, b"ann\nwrong\nwrong\nsecret\nann\n\nann\nsecret\n").await;
    let Err(Fault::AuthFailed { user, why }) = chosen else { panic!("{chosen:?}") };
    assert_eq!((user.as_deref(), why), (Some("ann"), "wrong name or password"));
    assert_eq!((told.matches("Login incorrect").count(), told.contains("host:"), counted), (3, false, 2));
    assert_eq!(time, 3 * DELAY);
    assert!(run(&login, b"ann\nsecret\ndb\n").await.0.is_ok(), "a right one does not count");
    // a name that nobody has may be a password
    let (chosen, ..) = run(&login, b"secret\nann\n").await;
    assert!(matches!(chosen, Err(Fault::Timeout(_))), "{chosen:?}");
    let (chosen, told, ..) = run(&login, b"ann\nsecret\ndb\n").await;
    assert!(matches!(chosen, Err(Fault::AuthFailed { user: None, .. })), "{chosen:?}");
    assert!(told.ends_with("too many wrong passwords from this address\r\n"), "{told}");
}

#[tokio::test(start_paused = true)]
async fn names_that_nobody_has_are_not_logged() {
    let (chosen, ..) = run(&login(), b"secret\nann\nsecret\nann\nsecret\nann\n").await;
    assert!(matches!(chosen, Err(Fault::AuthFailed { user: None, .. })), "{chosen:?}");
}

#[tokio::test(start_paused = true)]
async fn every_question_has_a_limit_and_all_of_them() {
    let login = login();
    for input in [&b""[..], b"ann", b"ann\n", b"ann\nsecret\n", b"ann\nsecret\nd"] {
        let (chosen, told, time, _) = run(&login, input).await;
        assert!(matches!(chosen, Err(Fault::Timeout(Step::Handshake))), "{chosen:?}");
        assert_eq!((time, told.ends_with("\r\ntimed out\r\n")), (login.prompt, true), "{told}");
    }
    // one byte after the other, each within its limit
    let (mut client, mut ours) = duplex(1024);
    let slow = async {
        for byte in b"ann\nsecret" {
            sleep(login.prompt / 2).await;
            if client.write_all(&[*byte]).await.is_err() {
                return;
            }
        }
        std::future::pending().await
    };
    let mut record = record();
    let (started, failed) = (Instant::now(), Failed::default());
    let mut talk = Talk::with(&login, &mut ours, Cleared::default(), [192, 0, 2, 2].into());
    let asked = timeout(login.time, talk.ask((&failed, &|_: Option<&str>| None), &login, &mut record));
    let late = tokio::select! {
        asked = asked => asked.is_err(),
        () = slow => false,
    };
    assert_eq!((late, started.elapsed()), (true, login.time));
}

/// What was written before a limit has ended it is not written again.
#[tokio::test]
async fn output_that_is_broken_off_goes_on_where_it_was() {
    let (mut leg, mut client) = duplex(4);
    let mut out = b"0123456789".to_vec();
    assert!(timeout(Duration::ZERO, write_all(&mut leg, &mut out)).await.is_err());
    let rest = async {
        write_all(&mut leg, &mut out).await.unwrap();
        leg.shutdown().await.unwrap();
    };
    let mut seen = Vec::new();
    let ((), read) = tokio::join!(rest, client.read_to_end(&mut seen));
    assert_eq!((read.unwrap(), &seen[..]), (10, &b"0123456789"[..]));
}
