//! Changes of bodies: the same result however a body is cut, and nothing is put together that was removed.

use super::*;

fn replace(expression: &str, with: &str) -> Edit {
    Edit::Replace(expression.parse().unwrap(), with.as_bytes().into())
}

fn remove(names: &[&str]) -> Edit {
    Edit::Remove(names.iter().map(|n| n.parse().unwrap()).collect())
}

fn change(what: Edit, until: Option<u64>) -> BodyChange {
    BodyChange { status: Vec::new(), media: vec!["text/html".parse().unwrap()], what, until }
}

fn reply(head: &str) -> Response {
    Response::parse(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes(), "GET").unwrap()
}

/// What becomes of a text that comes in these pieces.
fn run<'a>(changes: &[BodyChange], is_xml: bool, pieces: impl Iterator<Item = &'a [u8]>) -> String {
    let mut rewriter = Rewriter::new(changes.iter(), is_xml);
    let mut out = Vec::new();
    pieces.for_each(|piece| rewriter.read(piece, false, &mut out));
    rewriter.read(b"", true, &mut out);
    assert!(rewriter.is_over());
    String::from_utf8(out).unwrap()
}

/// What becomes of a text, which is the same however it is cut in two, and byte by byte.
#[track_caller]
fn changed_as(is_xml: bool, text: &str, edits: &[(Edit, Option<u64>)]) -> String {
    let changes: Vec<_> = edits.iter().map(|(edit, until)| change(edit.clone(), *until)).collect();
    let out = run(&changes, is_xml, text.as_bytes().chunks(1));
    for at in 0..=text.len() {
        let (one, two) = text.as_bytes().split_at(at);
        assert_eq!(run(&changes, is_xml, [one, two].into_iter()), out, "{text} cut at {at}");
    }
    out
}

#[track_caller]
fn changed(text: &str, edit: Edit) -> String {
    changed_as(false, text, &[(edit, None)])
}

#[test]
fn expressions_are_replaced() {
    for (expression, with, text, want) in [
        ("colour", "color", "a colour, colours, colou", "a color, colors, colou"),
        ("(?i)secret", "", "SecretsecreTsecre", "secre"),
        ("abcdef|cd", "-", "abcd abcdef cd abcde", "ab- - - ab-e"),
        ("a{1,3}", "<>", "aaaab", "<><>b"),
        (r"\bcat\b", "dog", "cat concat cats cat", "dog concat cats dog"),
        ("^ab", "x", "ababab", "xabab"),
        ("ab$", "x", "ababab", "ababx"),
        ("(?m)^a", "x", "a a\na", "x a\nx"),
        (r"\x00\xff?", "", "a\0b", "ab"),
        ("aab", "x", "aaaaabaab", "aaaxx"),
        ("a{0,1}b{2}", "[$0]", "abbb", "[$0]b"),
    ] {
        assert_eq!(changed(text, replace(expression, with)), want, "{expression} in {text}");
    }
}

#[test]
fn expressions_without_a_longest_match_are_refused() {
    for text in ["a*", "a+", "a{1,1025}", "", "a?", "$", "(", r"\bx*"] {
        assert!(text.parse::<replace::Expression>().is_err(), "{text}");
    }
    assert!("a{1,1024}".parse::<replace::Expression>().is_ok());
}

/// Whoever waits for the end of an event gets it.
#[test]
fn only_what_may_match_is_held_back() {
    let changes = [change(replace("evil{1,9}", "good"), None)];
    let mut rewriter = Rewriter::new(changes.iter(), false);
    let mut now = |text: &str| {
        let mut out = Vec::new();
        rewriter.read(text.as_bytes(), false, &mut out);
        String::from_utf8(out).unwrap()
    };
    assert_eq!(now("data: 1\n\n"), "data: 1\n\n");
    assert_eq!(now("data: e"), "data: ");
    assert_eq!(now("vent\n\n"), "event\n\n");
    assert_eq!(now("ev"), "");
}

#[test]
fn elements_are_removed_with_their_content() {
    let script = || remove(&["script", "applet"]);
    for (text, want) in [
        ("a<script>x</script>b", "ab"),
        ("a<SCRIPT src='>' x=\"</script>\">x</ScRiPt foo='>' >b", "ab"),
        ("<p><script\nasync>if (a<b) { \"<script>\" }</script></p>", "<p></p>"),
        ("<script '>x</script>y", "y"),
        ("<script =\">x</script>y", "y"),
        ("<script/>x</script>y", "y"),
        ("<scripts>x</scripts><scrip>", "<scripts>x</scripts><scrip>"),
        ("<script>x</scripts>y</script >z", "z"),
        ("a<script>never ends", "a"),
        ("a<script", "a<script"),
        ("a < b <3 </script><", "a < b <3 </script><"),
        ("a<applet code=x><applet></applet>1<p></applet>b", "ab"),
        ("<svg><style><script>x</script></style></svg>", "<svg><style></style></svg>"),
        ("<!--<script>x</script>-->", "<!---->"),
        // what must not be put together
        ("<scr<script></script>ipt>x</script>", "<scr_ipt>x</script>"),
        ("<<script></script>script>x", "<_script>x"),
        ("<script<script>x</script> src=y>", "<script_ src=y>"),
        ("<scr<applet></applet>ipt>", "<scr_ipt>"),
        ("<scr<script></script><applet></applet>ipt>", "<scr_ipt>"),
        ("<app<script></script>let>", "<app_let>"),
    ] {
        let got = changed(text, script());
        assert_eq!(got, want, "{text}");
        assert_eq!(changed(&got, script()), got, "nothing is left to remove");
    }
    assert_eq!(changed("a<img src='>'>b<imgx><IMG/>c", remove(&["img"])), "ab<imgx>c");
    let xml = [(remove(&["script"]), None)];
    assert_eq!(changed_as(true, "<a><script href='x' />b<script>c</script>d", &xml), "<a>bd");
    for name in ["", "1a", "a b", "<a", &"a".repeat(65)] {
        assert!(name.parse::<Element>().is_err(), "{name}");
    }
}

/// Two changes must not undo each other.
#[test]
fn elements_are_removed_after_all_replacements() {
    let all = [(remove(&["script"]), None), (remove(&["applet"]), None), (replace("foo", ""), None)];
    assert_eq!(changed_as(false, "<scrfooipt>x</script>a", &all), "a");
    assert_eq!(changed_as(false, "<scr<applet></applet>ipt>x", &all), "<scr_ipt>x");
}

#[test]
fn changes_begin_within_their_limit() {
    let of = |edit, until| [(edit, Some(until))];
    assert_eq!(changed_as(false, "ab ab ab", &of(replace("ab", "x"), 5)), "x x ab");
    assert_eq!(changed_as(false, "ab ab ab", &of(replace("ab", "x"), 4)), "x ab ab");
    let two = "1<script>a</script>2<script>b</script>3";
    assert_eq!(changed_as(false, two, &of(remove(&["script"]), 9)), "12<script>b</script>3");
    assert_eq!(changed_as(false, two, &of(remove(&["script"]), 8)), two);
    assert_eq!(changed_as(false, two, &of(remove(&["script"]), 12)), "12<script>b</script>3");
    // and then the rest is as it is
    let changes = [change(remove(&["script"]), Some(12)), change(replace("^x", "y"), None)];
    let mut rewriter = Rewriter::new(changes.iter(), false);
    let mut over = |text: &str| {
        rewriter.read(text.as_bytes(), false, &mut Vec::new());
        rewriter.is_over()
    };
    assert_eq!([over("1<script>"), over("abcd"), over("</script>")], [false, false, true]);
}

#[test]
fn heads_say_what_is_changed() {
    let mut all = BodyChanges { list: vec![change(remove(&["script"]), None)], ..BodyChanges::default() };
    let wanted = |all: &BodyChanges, head: &str| match all.wanted(&reply(head)) {
        Wanted::Nothing => "nothing",
        Wanted::Unread => "unread",
        Wanted::Changes(_, None) => "changes",
        Wanted::Changes(_, Some(coding)) => coding.name(),
        Wanted::Whole => "whole",
        Wanted::Denied(_) | Wanted::Unreadable(_) => "denied",
    };
    let html = "Content-Type: Text/HTML; charset=utf-8";
    for (head, want) in [
        (format!("200 OK\r\n{html}"), "changes"),
        ("200 OK\r\nContent-Type: text/plain".into(), "nothing"),
        ("200 OK".into(), "nothing"),
        (format!("404 Not Found\r\n{html}"), "changes"),
        (format!("304 Not Modified\r\n{html}"), "nothing"),
        (format!("206 Part\r\n{html}"), "whole"),
        ("206 Part\r\nContent-Type: multipart/byteranges; boundary=x".into(), "whole"),
        ("206 Part\r\nContent-Type: video/mp4".into(), "nothing"),
        (format!("200 OK\r\n{html}\r\nCache-Control: public, No-Transform"), "nothing"),
        (format!("200 OK\r\n{html}\r\nContent-Encoding: X-GZip"), "gzip"),
        (format!("200 OK\r\n{html}\r\nContent-Encoding: identity, br"), "br"),
        (format!("200 OK\r\n{html}\r\nContent-Encoding: gzip\r\nContent-Encoding: br"), "denied"),
        (format!("200 OK\r\n{html}\r\nContent-Encoding: compress"), "denied"),
        // others may read that as no coding at all
        (format!("200 OK\r\n{html}\r\nContent-Encoding: gzip;q=1"), "denied"),
        (format!("200 OK\r\n{html}\r\nContent-Encoding: identity"), "changes"),
        ("200 OK\r\nContent-Type: text/html;charset=\"UTF-16LE\"".into(), "denied"),
        ("200 OK\r\nContent-Type: text/html; x=y; charset = iso-2022-jp".into(), "denied"),
    ] {
        assert_eq!(wanted(&all, &head), want, "{head}");
    }
    let (coded, forbidden) = (
        format!("200 OK\r\n{html}\r\nContent-Encoding: compress"),
        format!("200 OK\r\n{html}\r\nCache-Control: no-transform"),
    );
    (all.unreadable, all.no_transform) = (Unreadable::Pass, NoTransform::Change);
    assert_eq!([wanted(&all, &coded), wanted(&all, &forbidden)], ["unread", "changes"]);
    all.no_transform = NoTransform::Deny;
    assert_eq!(wanted(&all, &forbidden), "denied");
    all.list[0].status = vec![200..=200];
    assert_eq!(wanted(&all, &format!("404 No\r\n{html}")), "nothing");
    assert_eq!(wanted(&all, &format!("206 Part\r\n{html}")), "whole");
}

/// Texts of random words, and a random cut of each.
fn random(words: &[&str], seed: u64) -> impl Iterator<Item = (String, Vec<usize>)> {
    let mut state = seed;
    let mut next = move |below: usize| {
        // a linear congruential generator (Knuth): any will do, and a failure comes again
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
    (0..20_000).map(move |_| {
        let length = next(14);
        let text: String = (0..length).map(|_| words[next(words.len())].as_str()).collect();
        let cuts = (0..4).map(|_| next(text.len() + 1)).collect();
        (text, cuts)
    })
}

fn pieces<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut cuts = cuts.to_vec();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]]).collect()
}

/// A browser finds no such element in what is left, and nobody finds more by looking twice.
#[test]
fn no_element_survives_however_it_is_written_and_cut() {
    let words =
        ["<", "<scr", "ipt", "script", ">", " ", "<SCRIPT>", "</script>", "<applet>", "</applet>", "<app", "let"];
    let changes = [change(remove(&["script"]), None), change(remove(&["applet"]), None)];
    let tag = regex::Regex::new("(?i)<(script|applet)[\t\n\x0c\r />]").unwrap();
    for (text, cuts) in random(&words, 1) {
        let whole = run(&changes, false, [text.as_bytes()].into_iter());
        assert_eq!(run(&changes, false, pieces(&text, &cuts).into_iter()), whole, "{text} cut at {cuts:?}");
        assert!(!tag.is_match(&whole), "{text}: {whole}");
        assert_eq!(run(&changes, false, [whole.as_bytes()].into_iter()), whole, "{text}");
    }
}

#[test]
fn what_is_replaced_in_pieces_is_what_is_replaced_in_one() {
    for expression in
        ["ab|abcab|b", "a{1,3}b", r"\bab\b", "^a", "(?m)^ab", "ab$", "(?m)b$", "a.b|c", "(a|b){2,4}?", "[^a]b{0,2}"]
    {
        let whole = regex::bytes::RegexBuilder::new(expression).unicode(false).build().unwrap();
        let changes = [change(replace(expression, "<>"), None)];
        for (text, cuts) in random(&["a", "b", "c", "ab", " ", "\n"], 2) {
            let want = whole.replace_all(text.as_bytes(), regex::bytes::NoExpand(b"<>"));
            let got = run(&changes, false, pieces(&text, &cuts).into_iter());
            assert_eq!(got.as_bytes(), &*want, "{expression} in {text:?} cut at {cuts:?}");
        }
    }
}

#[test]
fn heads_of_uploads_say_what_is_changed() {
    let mut all = BodyChanges::default();
    let list = [change(replace("a", "b"), None)];
    let wanted = |all: &BodyChanges, fields: &str| {
        let head = format!("PUT / HTTP/1.1\r\nHost: x\r\nContent-Type: text/html\r\n{fields}\r\n");
        match all.wanted_of_upload(&list, &Request::parse(head.as_bytes()).unwrap()) {
            Wanted::Nothing => "nothing",
            Wanted::Unread => "unread",
            Wanted::Changes(_, coding) => coding.map_or("changes", Coding::name),
            Wanted::Denied(_) => "denied",
            Wanted::Unreadable(_) => "unreadable",
            Wanted::Whole => "whole",
        }
    };
    let some = "Content-Length: 1\r\n";
    for (fields, want, if_passed) in [
        ("", "nothing", "nothing"),
        ("Content-Length: 0\r\n", "nothing", "nothing"),
        (some, "changes", "changes"),
        ("Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n", "gzip", "gzip"),
        (&format!("{some}Content-Encoding: gzip, gzip\r\n"), "unreadable", "unread"),
        (&format!("{some}Content-Range: bytes 5-5/10\r\n"), "unreadable", "unread"),
        (&format!("{some}Content-Type: text/html; charset=utf-16\r\n"), "unreadable", "unread"),
    ] {
        all.unreadable = Unreadable::Deny;
        assert_eq!(wanted(&all, fields), want, "{fields}");
        all.unreadable = Unreadable::Pass;
        assert_eq!(wanted(&all, fields), if_passed, "{fields}");
    }
    let forbidden = format!("{some}Cache-Control: no-transform\r\n");
    let all_of = [NoTransform::Pass, NoTransform::Deny, NoTransform::Change];
    let got = all_of.map(|no_transform| wanted(&BodyChanges { no_transform, ..all.clone() }, &forbidden));
    assert_eq!(got, ["nothing", "denied", "changes"]);
}
