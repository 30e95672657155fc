use super::*;
use std::fmt;

fn rule(action: Action) -> ReplyRule {
    let (status, media, encoding, length) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    ReplyRule { action, status, media, encoding, length, body_begins: None, body_contains: None }
}

fn deny() -> ReplyRule {
    rule(Action::Deny)
}

fn allow() -> ReplyRule {
    rule(Action::Allow)
}

fn one<T: FromStr<Err: fmt::Debug>>(text: &str) -> Vec<T> {
    text.split(' ').map(|t| t.parse().unwrap()).collect()
}

fn pattern(text: &str) -> Option<Pattern> {
    Some(text.parse().unwrap())
}

fn reply(fields: &str) -> Response {
    Response::parse(format!("HTTP/1.1 200 OK\r\n{fields}\r\n").as_bytes(), "GET").unwrap()
}

fn filter(rules: &[ReplyRule]) -> Arc<Filter> {
    Arc::new(Filter { rules: rules.to_vec(), first: 8, ..Filter::default() })
}

/// Returns the decision, and the number of bytes after which it was certain. Checks that it
/// does not depend on how the body is cut.
#[track_caller]
fn decision(rules: &[ReplyRule], fields: &str, body: &str) -> (FilterDecision, usize) {
    let filter = filter(rules);
    let with = |pieces: &[&[u8]]| {
        let mut reply_filter = ReplyFilter::new(&filter, &reply(fields));
        let (mut first, mut at) = (reply_filter.decision(), 0);
        for piece in pieces {
            reply_filter.read(piece);
            at += piece.len();
            first = if let FilterDecision::Open { .. } = first { reply_filter.decision() } else { first };
            if let FilterDecision::Open { .. } = first {
                continue;
            }
            assert_eq!(reply_filter.decision(), first, "it stays so");
            return (first, at);
        }
        reply_filter.end();
        (reply_filter.decision(), body.len() + 1)
    };
    let bytes: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
    let whole = with(&bytes);
    for at in 0..=body.len() {
        let (a, b) = body.as_bytes().split_at(at);
        // The rule number may differ if several rules would decide alike.
        let kind = |v: FilterDecision| std::mem::discriminant(&v);
        assert_eq!(kind(with(&[a, b]).0), kind(whole.0), "{body}, cut at {at}");
    }
    whole
}

const ALLOWED: FilterDecision = FilterDecision::Allowed(None);

#[test]
fn heads() {
    let media = |m: &str, r: ReplyRule| ReplyRule { media: one(m), ..r };
    let bad = [media("application/x-Bad video/*", deny())];
    let of = |rules: &[ReplyRule], fields: &str| ReplyFilter::new(&filter(rules), &reply(fields)).decision();
    for (fields, required) in [
        ("Content-Type: application/x-bad\r\n", FilterDecision::Denied(1)),
        ("Content-Type: Application/X-BAD; charset=x\r\n", FilterDecision::Denied(1)),
        ("Content-Type: video/mp4\r\n", FilterDecision::Denied(1)),
        ("Content-Type: text/html, video/mp4\r\n", FilterDecision::Denied(1)),
        ("Content-Type: text/html\r\ncontent-type: video/mp4\r\n", FilterDecision::Denied(1)),
        ("Content-Type: application/x-badly\r\n", ALLOWED),
        ("Content-Type: xvideo/mp4\r\n", ALLOWED),
        ("X-Content-Type: video/mp4\r\n", ALLOWED),
        ("", ALLOWED),
        // a field named in Connection is not forwarded
        ("Connection: content-type\r\nContent-Type: video/mp4\r\n", ALLOWED),
    ] {
        assert_eq!(of(&bad, fields), required, "{fields}");
    }
    let good = [media("text/*", allow()), deny()];
    for (fields, required) in [
        ("Content-Type: text/plain\r\n", FilterDecision::Allowed(Some(1))),
        ("Content-Type: text/plain, video/mp4\r\n", FilterDecision::Denied(2)),
        ("Content-Type:\r\n", FilterDecision::Denied(2)),
        ("Connection: content-type\r\nContent-Type: text/plain\r\n", FilterDecision::Denied(2)),
        ("", FilterDecision::Denied(2)),
    ] {
        assert_eq!(of(&good, fields), required, "{fields}");
    }
    let plain = [ReplyRule { encoding: one("identity"), ..allow() }, deny()];
    assert_eq!(of(&plain, ""), FilterDecision::Allowed(Some(1)));
    assert_eq!(of(&plain, "Content-Encoding: gzip\r\n"), FilterDecision::Denied(2));
    assert_eq!(of(&plain, "Content-Encoding: identity, br\r\n"), FilterDecision::Denied(2));
    let status = [ReplyRule { status: vec![200..=299], length: one("100-"), ..deny() }];
    assert_eq!(of(&status, "Content-Length: 100\r\n"), FilterDecision::Denied(1));
    assert_eq!(of(&status, "Content-Length: 99\r\n"), ALLOWED);
    let head = Response::parse(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", "HEAD").unwrap();
    assert_eq!(ReplyFilter::new(&filter(&status), &head).decision(), FilterDecision::Denied(1), "as GET would be");
    let other = [ReplyRule { status: vec![404..=404], ..deny() }];
    assert_eq!(of(&other, ""), ALLOWED);
}

#[test]
fn lengths_that_were_not_announced_are_counted() {
    let length = |l: &str, r: ReplyRule| ReplyRule { length: one(l), ..r };
    assert_eq!(decision(&[length("5-", deny())], "", "1234"), (ALLOWED, 5));
    assert_eq!(decision(&[length("5-", deny())], "", "123456"), (FilterDecision::Denied(1), 5));
    assert_eq!(decision(&[length("0-3", allow()), deny()], "", "123"), (FilterDecision::Allowed(Some(1)), 4));
    assert_eq!(decision(&[length("0-3", allow()), deny()], "", "1234567"), (FilterDecision::Denied(2), 4));
    assert_eq!(decision(&[length("2 4", deny())], "", "1234"), (FilterDecision::Denied(1), 5));
    assert_eq!(decision(&[length("2 4", deny())], "", "123"), (ALLOWED, 4));
    assert_eq!(decision(&[length("5-", deny())], "Content-Length: 4\r\n", "1234"), (ALLOWED, 1));
}

#[test]
fn first_bytes() {
    let begins = |p: &str, r: ReplyRule| ReplyRule { body_begins: pattern(p), ..r };
    let magic = [begins(r"^(MZ|\x7fELF)", deny())];
    assert_eq!(decision(&magic, "", "MZ and more"), (FilterDecision::Denied(1), 2));
    assert_eq!(decision(&magic, "", "\x7fELF"), (FilterDecision::Denied(1), 4));
    assert_eq!(decision(&magic, "", "hello MZ"), (ALLOWED, 1));
    assert_eq!(decision(&magic, "", "M"), (ALLOWED, 2));
    assert_eq!(decision(&magic, "", ""), (ALLOWED, 1));
    // the first eight bytes count here
    let evil = [begins("(?i)evil", deny())];
    assert_eq!(decision(&evil, "", "an eVIl one").0, FilterDecision::Denied(1));
    assert_eq!(decision(&evil, "", "1234EVIL").0, FilterDecision::Denied(1));
    assert_eq!(decision(&evil, "", "12345EVIL"), (ALLOWED, 8));
    assert_eq!(decision(&[begins("4$", deny())], "", "12345674").0, FilterDecision::Denied(1));
    assert_eq!(decision(&[begins("4$", deny())], "", "123456784"), (ALLOWED, 8));
    assert_eq!(decision(&[begins("^$", deny())], "", "").0, FilterDecision::Denied(1));
    assert_eq!(decision(&[begins(r"\xff\xfe", deny())], "", "\u{ff}\u{fe}").0, ALLOWED, "bytes, not characters");
    assert_eq!(decision(&[begins("^\u{e4}", deny())], "", "\u{e4}").0, FilterDecision::Denied(1));
    // held back as long as the first bytes may decide
    let open = |body: &str| {
        let mut reply_filter = ReplyFilter::new(&filter(&evil), &reply(""));
        reply_filter.read(body.as_bytes());
        reply_filter.decision()
    };
    assert_eq!((open("1234567"), open("12345678")), (FilterDecision::Open { hold: true }, ALLOWED));
}

#[test]
fn whole_bodies() {
    let contains = |p: &str, r: ReplyRule| ReplyRule { body_contains: pattern(p), ..r };
    let secret = [contains(r"(?i)secret\s+\d{3}", deny())];
    assert_eq!(
        decision(&secret, "", "far behind the first bytes: Secret  007, and so on").0,
        FilterDecision::Denied(1)
    );
    assert_eq!(decision(&secret, "", "far behind the first bytes: Secret  00"), (ALLOWED, 39));
    assert_eq!(decision(&[contains("end$", deny())], "", "the end").0, FilterDecision::Denied(1));
    assert_eq!(decision(&[contains("end$", deny())], "", "the end.").0, ALLOWED);
    let mut reply_filter = ReplyFilter::new(&filter(&secret), &reply(""));
    reply_filter.read(b"x");
    assert_eq!(reply_filter.decision(), FilterDecision::Open { hold: false });
    let signed = [contains("signature", allow()), deny()];
    assert_eq!(decision(&signed, "", "text, signature, text").0, FilterDecision::Allowed(Some(1)));
    assert_eq!(decision(&signed, "", "text").0, FilterDecision::Denied(2));
}

#[test]
fn the_first_that_matches_decides_even_if_it_is_known_last() {
    let begins = |p: &str, r: ReplyRule| ReplyRule { body_begins: pattern(p), ..r };
    let contains = |p: &str, r: ReplyRule| ReplyRule { body_contains: pattern(p), ..r };
    // Open rules with the same action do not delay the decision.
    let rules = [contains("zzz", deny()), begins("^MZ", deny())];
    assert_eq!(decision(&rules, "", "MZ, zzz"), (FilterDecision::Denied(2), 2));
    assert_eq!(decision(&rules, "", "ab, zzz").0, FilterDecision::Denied(1));
    let rules = [contains("zzz", deny()), begins("^MZ", allow()), deny()];
    assert_eq!(decision(&rules, "", "MZ, zzz").0, FilterDecision::Denied(1));
    assert_eq!(decision(&rules, "", "MZ"), (FilterDecision::Allowed(Some(2)), 3));
    assert_eq!(decision(&rules, "", "MA"), (FilterDecision::Denied(3), 2));
    // All conditions of a rule have to match.
    let both = ReplyRule { length: one("5-"), body_contains: pattern("x"), ..begins("^a", deny()) };
    let both = std::slice::from_ref(&both);
    assert_eq!(decision(both, "", "abcdex").0, FilterDecision::Denied(1));
    assert_eq!(decision(both, "", "bbcdex"), (ALLOWED, 1));
    assert_eq!(decision(both, "", "abcx").0, ALLOWED);
    assert_eq!(decision(&[], "", "x"), (ALLOWED, 1));
}

#[test]
fn expressions_have_limits() {
    let error = |text: &str| text.parse::<Pattern>().unwrap_err();
    assert!(error("(").starts_with("bad regular expression: unclosed group; see"), "{}", error("("));
    assert!(error(r"\pL").contains("Unicode"), "{}", error(r"\pL"));
    let large = error("(a|b)*a(a|b){40}");
    assert!(large.starts_with("this expression takes more than 4 MB"), "{large}");
    assert_eq!("a".parse::<Pattern>(), "a".parse::<Pattern>());
    for bad in ["html", "*/*", "text/html; charset=x", "/", "text/"] {
        assert!(bad.parse::<MediaType>().is_err(), "{bad}");
    }
    for bad in ["", "-5", "5-4", "x", "1-2-3"] {
        assert!(bad.parse::<Lengths>().is_err(), "{bad}");
    }
}
