use super::*;
use tokio::sync::mpsc;

const LIMIT: Duration = Duration::from_secs(60);

fn mixed(found: &[&str]) -> Vec<String> {
    let found = found.iter().map(|a| a.parse().unwrap()).collect();
    alternate(found).into_iter().map(|a| a.to_string()).collect()
}

#[test]
fn families_alternate() {
    assert_eq!(mixed(&["::1", "::2", "::3", "1.1.1.1"]), ["::1", "1.1.1.1", "::2", "::3"]);
    assert_eq!(mixed(&["1.1.1.1", "1.1.1.2", "::1"]), ["1.1.1.1", "::1", "1.1.1.2"]);
    assert_eq!(mixed(&["1.1.1.1", "::1", "::2", "::3"]), ["1.1.1.1", "::1", "::2", "::3"]);
    assert_eq!(mixed(&[]), Vec::<String>::new());
}

#[test]
fn duplicates_and_the_hundredth_address_are_dropped() {
    assert_eq!(mixed(&["1.1.1.1", "1.1.1.1", "::ffff:1.1.1.1"]), ["1.1.1.1"]);
    let many: Vec<String> = (0..100).map(|i| format!("10.0.0.{i}")).collect();
    assert_eq!(mixed(&many.iter().map(String::as_str).collect::<Vec<_>>()).len(), ADDRESSES_MAX);
}

#[tokio::test]
async fn addresses_need_no_lookup() {
    let resolver = Resolver::by(|name| panic!("{name} is looked up"));
    let found = resolver.resolve(&"[2001:db8::1]:80".parse().unwrap(), Duration::ZERO).await.unwrap();
    assert_eq!(found, ["[2001:db8::1]:80".parse().unwrap()]);
}

#[tokio::test]
async fn waiting_for_a_lookup_counts_as_looking_up() {
    let resolver = Resolver::by(|_| Box::pin(std::future::pending()));
    let r = resolver.resolve(&"localhost:80".parse().unwrap(), Duration::from_millis(20)).await;
    assert!(matches!(r, Err(Fault::Timeout(Step::Resolve))));
}

#[tokio::test]
async fn localhost() {
    let found = Resolver::default().resolve(&"localhost:80".parse().unwrap(), LIMIT).await.unwrap();
    assert!(found.iter().all(|a| a.ip().is_loopback() && a.port() == 80));
}

/// A resolver whose answers the test gives one by one, and the names that it is asked for.
fn scripted() -> (Resolver, mpsc::UnboundedSender<Found>, mpsc::UnboundedReceiver<String>) {
    let (answer, answers) = mpsc::unbounded_channel();
    let (ask, asked) = mpsc::unbounded_channel();
    let answers = Arc::new(tokio::sync::Mutex::new(answers));
    let resolver = Resolver::by(move |name| {
        let (answers, ask) = (answers.clone(), ask.clone());
        Box::pin(async move {
            ask.send(name).unwrap();
            answers.lock().await.recv().await.unwrap()
        })
    });
    (resolver, answer, asked)
}

fn target() -> Target {
    "db.example:5432".parse().unwrap()
}

fn good(ip: &str) -> Found {
    Ok(vec![ip.parse().unwrap()])
}

fn bad() -> Found {
    Err(io::Error::other("NXDOMAIN"))
}

/// Makes what is known about the name look older.
fn age(resolver: &Resolver, by: Duration) {
    let mut names = resolver.0.lock();
    for known in names.known.values_mut() {
        known.since = known.since.checked_sub(by).expect("this machine has run for longer");
        known.failed = known.failed.and_then(|at| at.checked_sub(by));
    }
}

async fn resolved(resolver: &Resolver) -> String {
    resolver.resolve(&target(), LIMIT).await.unwrap()[0].to_string()
}

#[tokio::test]
async fn all_who_wait_share_one_look_up() {
    let (resolver, answer, mut asked) = scripted();
    let one = tokio::spawn({
        let resolver = resolver.clone();
        async move { resolved(&resolver).await }
    });
    assert_eq!(asked.recv().await.unwrap(), "db.example");
    let (a, b, ()) =
        tokio::join!(resolved(&resolver), resolved(&resolver), async { answer.send(good("10.0.0.1")).unwrap() });
    assert_eq!([one.await.unwrap(), a, b], ["10.0.0.1:5432"; 3].map(String::from));
    assert_eq!(resolved(&resolver).await, "10.0.0.1:5432", "as it is fresh");
    assert!(asked.try_recv().is_err(), "only once");
}

#[tokio::test]
async fn a_name_that_changed_is_followed() {
    let (resolver, answer, _asked) = scripted();
    answer.send(good("10.0.0.1")).unwrap();
    assert_eq!(resolved(&resolver).await, "10.0.0.1:5432");
    answer.send(good("10.0.0.2")).unwrap();
    age(&resolver, FRESH);
    assert_eq!(resolved(&resolver).await, "10.0.0.2:5432", "after its time");
    answer.send(good("10.0.0.3")).unwrap();
    assert_eq!(resolved(&resolver).await, "10.0.0.2:5432");
    resolver.doubt(&target());
    assert_eq!(resolved(&resolver).await, "10.0.0.3:5432", "as nothing answered there");
    assert_eq!(resolver.stale(), 0);
}

#[tokio::test]
async fn the_last_good_answer_outlives_failures_for_an_hour() {
    let (resolver, answer, mut asked) = scripted();
    answer.send(good("10.0.0.1")).unwrap();
    assert_eq!(resolved(&resolver).await, "10.0.0.1:5432");
    let mut outage = Duration::ZERO;
    while outage + FRESH < STALE / 2 {
        age(&resolver, FRESH);
        outage += FRESH;
        answer.send(bad()).unwrap();
        assert_eq!(resolved(&resolver).await, "10.0.0.1:5432", "{outage:?}");
        assert_eq!(resolved(&resolver).await, "10.0.0.1:5432", "nobody asks again within {RETRY:?}");
    }
    let mut looked = 0;
    while asked.try_recv().is_ok() {
        looked += 1;
    }
    assert_eq!(resolver.stale(), 2 * (looked - 1));
    answer.send(bad()).unwrap();
    age(&resolver, STALE);
    let gone = resolver.resolve(&target(), LIMIT).await;
    assert!(matches!(&gone, Err(Fault::NoAddress(e)) if e.to_string() == "NXDOMAIN"), "{gone:?}");
}

#[tokio::test]
async fn a_slow_resolver_is_waited_for_once() {
    let (resolver, answer, mut asked) = scripted();
    answer.send(good("10.0.0.1")).unwrap();
    assert_eq!(resolved(&resolver).await, "10.0.0.1:5432");
    asked.recv().await.unwrap();
    age(&resolver, FRESH);
    // it does not answer: the first one waits, the others do not
    assert_eq!(resolved(&resolver).await, "10.0.0.1:5432");
    for _ in 0..100 {
        let at_once = resolver.begin("db.example");
        assert!(matches!(at_once, (Some(_), None)), "the last answer, without a look-up to wait for");
    }
    asked.recv().await.unwrap();
    assert!(asked.try_recv().is_err(), "one look-up for all");
    answer.send(good("10.0.0.2")).unwrap();
    while resolved(&resolver).await != "10.0.0.2:5432" {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn names_of_the_configuration_are_looked_up_before_anybody_asks_and_never_waited_for() {
    let (resolver, answer, mut asked) = scripted();
    let following = tokio::spawn(resolver.clone().follow("db.example".into()));
    asked.recv().await.unwrap();
    assert_eq!(resolver.known(&target()), []);
    answer.send(good("10.0.0.1")).unwrap();
    while resolver.known(&target()).is_empty() {
        tokio::task::yield_now().await;
    }
    age(&resolver, STALE / 2);
    assert!(matches!(resolver.begin("db.example"), (Some(_), None)));
    age(&resolver, STALE / 2);
    assert_eq!(resolver.known(&target()), [], "an hour");
    following.abort();
}

#[tokio::test]
async fn clients_names_have_a_limit_and_do_not_displace_those_of_the_configuration() {
    let resolver = Resolver::by(|_| Box::pin(async { good("10.0.0.1") }));
    let following = tokio::spawn(resolver.clone().follow("db.example".into()));
    while resolver.known(&target()).is_empty() {
        tokio::task::yield_now().await;
    }
    for n in 0..NAMES_MAX + 10 {
        let target = format!("n{n}.example:80").parse().unwrap();
        resolver.resolve(&target, LIMIT).await.unwrap();
    }
    let names = resolver.0.lock();
    assert_eq!((names.known.len(), names.running.len()), (NAMES_MAX + 1, 0));
    assert!(names.known.contains_key("db.example") && !names.known.contains_key("n0.example"));
    following.abort();
}

#[test]
fn what_answers_are_good_for() {
    let now = Instant::now() + STALE * 2;
    let known = |age: u64, failed: Option<u64>, doubted| Known {
        addresses: Arc::new([]),
        since: now - Duration::from_secs(age),
        used: now,
        failed: failed.map(|ago| now - Duration::from_secs(ago)),
        doubted,
    };
    for (age, failed, doubted, followed, want) in [
        (9, None, false, false, Use::Fresh),
        (10, None, false, false, Use::Else),
        (3599, None, false, false, Use::Else),
        (3600, None, false, false, Use::Never),
        (9, None, true, false, Use::Else),
        (100, Some(1), false, false, Use::Fresh),
        (100, Some(2), false, false, Use::Meanwhile),
        (100, Some(10), false, false, Use::Else),
        (3600, Some(1), false, false, Use::Never),
        (3599, None, false, true, Use::Fresh),
        (3600, None, false, true, Use::Never),
        (3599, None, true, true, Use::Else),
    ] {
        let judged = known(age, failed, doubted).judge(now, followed);
        assert_eq!(judged, want, "{age} s, failed {failed:?} s ago, doubted: {doubted}, followed: {followed}");
    }
}
