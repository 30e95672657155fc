use super::*;
use longsplice_engine::Refusal;
use serde_json::Value;

fn client() -> SocketAddr {
    "192.0.2.7:40000".parse().unwrap()
}

/// A hub, and an engine that tells nothing.
fn hub() -> (Arc<Events>, Splicer) {
    (Arc::default(), Splicer::copying(Refusal::Policy))
}

fn record(name: &str) -> Record {
    let mut record = Record::new("plug", None, client());
    record.name = Some(name.into());
    record
}

/// All lines that are there.
fn lines(of: &mut Subscription) -> Vec<Value> {
    let mut text = String::new();
    while of.try_next(&mut text) {}
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn lines_are_those_of_the_access_log() {
    let (events, splicer) = hub();
    events.line(&record("to nobody"));
    let mut heard = events.subscribe(&splicer, Wanted::default()).unwrap();
    let mut ended = record("front");
    (ended.id, ended.refusal, ended.bytes_up) = (Some(7), Some("policy".into()), 3);
    events.line(&ended);
    let mut refused = record("front");
    (refused.how, refused.refusal) = ("denied", Some("rule 1".into()));
    events.line(&refused);
    let [ended, refused] = &lines(&mut heard)[..] else { panic!("two lines") };
    assert_eq!((&ended["event"], &ended["id"], &ended["bytes_up"]), (&"ended".into(), &7.into(), &3.into()));
    assert_eq!(
        (&refused["event"], &refused["how"], &refused["refusal"]),
        (&"refused".into(), &"denied".into(), &"rule 1".into())
    );
    assert!([ended, refused].iter().all(|line| line["time"].as_str().unwrap().ends_with('Z')), "{ended} {refused}");
}

#[test]
fn only_what_is_wanted_is_told() {
    let (events, splicer) = hub();
    let of =
        |listener: Option<&str>, kinds: &[Kind]| Wanted { listener: listener.map(String::from), kinds: kinds.into() };
    let wanted = [of(Some("front"), &[]), of(None, &[Kind::MemberDown]), of(Some("back"), &[Kind::Reloaded])];
    let mut all = wanted.map(|wanted| events.subscribe(&splicer, wanted).unwrap());
    events.line(&record("front"));
    events.line(&record("back"));
    events.member(Kind::MemberDown, ("db", "a:1"), &"refused");
    events.reloaded(&Ok(crate::Reloaded::default()));
    let told = all
        .each_mut()
        .map(|one| lines(one).iter().map(|l| l["event"].as_str().unwrap().to_owned()).collect::<Vec<_>>());
    assert_eq!(told, [&["ended", "member-down", "reloaded"][..], &["member-down"], &["reloaded"]]);
}

#[test]
fn a_slow_subscriber_hears_how_many_it_has_missed() {
    let (events, splicer) = hub();
    let mut heard = events.subscribe(&splicer, Wanted::default()).unwrap();
    (0..UNREAD + 10).for_each(|_| events.line(&record("front")));
    let told = lines(&mut heard);
    assert_eq!((told.len(), &told[0]["event"], &told[0]["count"]), (UNREAD + 1, &"missed".into(), &10.into()));
    events.line(&record("front"));
    assert_eq!(lines(&mut heard).len(), 1);
}

#[test]
fn places_are_limited_and_given_back() {
    let (events, splicer) = hub();
    let mut all: Vec<_> = (0..SUBSCRIBERS).map(|_| events.subscribe(&splicer, Wanted::default()).unwrap()).collect();
    assert_eq!(events.subscribe(&splicer, Wanted::default()).err(), Some(TooMany));
    all.pop();
    all.push(events.subscribe(&splicer, Wanted::default()).unwrap());
    all.clear();
    assert!(!events.is_heard());
    events.tell(Kind::Reloaded, || panic!("nobody listens"));
}
