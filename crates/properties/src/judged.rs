//! What is looked for in bytes that pass: in the first ones of a connection, and in bodies.

use longsplice_http::Response;
use longsplice_proxy::{
    access::Action,
    filter::{Filter, FilterDecision, ReplyFilter, ReplyRule},
    first_bytes::{Conditions, Judge},
};
use std::sync::{Arc, LazyLock};

static CONDITIONS: LazyLock<Vec<Conditions>> = LazyLock::new(|| {
    let of = |text: &str| Some(text).filter(|text| !text.is_empty()).map(|text| text.parse().expect("an expression"));
    let all =
        [("^ab", "", 8), ("ab|abcd$", "", 4), ("", "b{2}", 16), ("(?i)a.{0,3}c", r"\bx", 32), ("^(a|b)+$", "cc$", 6)];
    all.map(|(must, never, first)| Conditions { must: of(must), never: of(never), first, ..Conditions::default() })
        .into()
});

/// Whether the conditions hold at the end of the stream, and whether nothing had been passed on when that was known.
fn judged(conditions: &Conditions, input: &[u8], piece: usize) -> (bool, bool) {
    let mut judge = Judge::new(Some(conditions));
    let mut held = judge.holds();
    for piece in input.chunks(piece) {
        if judge.read(Some(piece)).is_err() {
            return (false, held);
        }
        assert!(held || !judge.holds(), "what was passed on is not held back");
        held = judge.holds();
    }
    let fits = judge.read(None).is_ok();
    assert!(!fits || judge.is_done(), "undecided at the end");
    (fits, held)
}

/// However the first bytes are cut, they fit or not. What is behind them does not matter.
pub(crate) fn first_bytes(input: &[u8]) {
    for conditions in CONDITIONS.iter() {
        let (fits, _) = judged(conditions, input, usize::MAX);
        let bytewise = judged(conditions, input, 1);
        assert_eq!(bytewise.0, fits, "{conditions:?}, byte by byte");
        assert_eq!(judged(conditions, input, 3).0, fits, "{conditions:?}, in threes");
        if input.len() > conditions.first {
            // the end of the stream is no end of the first bytes, and none of what is behind them counts
            let other = [&input[..conditions.first], b"x"].concat();
            assert_eq!(judged(conditions, &other, 1), bytewise, "{conditions:?}, with something else behind");
        }
    }
}

static FILTERS: LazyLock<Vec<Arc<Filter>>> = LazyLock::new(|| {
    let of = |text: &str| Some(text).filter(|text| !text.is_empty()).map(|text| text.parse().expect("an expression"));
    let rule = |(action, begins, contains, length): (Action, &str, &str, &str)| ReplyRule {
        action,
        status: Vec::new(),
        media: Vec::new(),
        encoding: Vec::new(),
        length: Some(length)
            .filter(|text| !text.is_empty())
            .map(|text| text.parse().expect("a length"))
            .into_iter()
            .collect(),
        body_begins: of(begins),
        body_contains: of(contains),
    };
    let filter = |rules: &[(Action, &str, &str, &str)]| {
        Arc::new(Filter { rules: rules.iter().copied().map(rule).collect(), first: 8, ..Filter::default() })
    };
    vec![
        filter(&[(Action::Deny, "^MZ", "", ""), (Action::Allow, "", "ab{2}", ""), (Action::Deny, "", "", "100-")]),
        filter(&[(Action::Allow, "a$", "", "0-20"), (Action::Deny, "", "evil", ""), (Action::Deny, "b", "c", "7")]),
    ]
});

/// However a body is cut, it passes or not, as soon as that is known. The first byte chooses its framing.
pub(crate) fn body(input: &[u8]) {
    let Some((first, content)) = input.split_first() else { return };
    let length = if first % 2 == 0 { format!("Content-Length: {}\r\n", content.len()) } else { String::new() };
    let head = format!("HTTP/1.1 200 OK\r\n{length}\r\n");
    let reply = Response::parse(head.as_bytes(), "GET").expect("a reply");
    for filter in FILTERS.iter() {
        let passes = |piece: usize| {
            let mut judge = ReplyFilter::new(filter, &reply);
            let known = |judge: &ReplyFilter| match judge.decision() {
                FilterDecision::Allowed(_) => Some(true),
                FilterDecision::Denied(_) | FilterDecision::Unreadable(_) => Some(false),
                FilterDecision::Open { .. } => None,
            };
            let early = content.chunks(piece).find_map(|piece| {
                let before = known(&judge);
                judge.read(piece);
                before.or(known(&judge))
            });
            early.unwrap_or_else(|| {
                judge.end();
                known(&judge).expect("decided at the end")
            })
        };
        let whole = passes(usize::MAX);
        assert_eq!(passes(1), whole, "{filter:?}, byte by byte");
        assert_eq!(passes(7), whole, "{filter:?}, in sevens");
    }
}
