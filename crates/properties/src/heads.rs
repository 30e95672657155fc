//! Changes of heads: fields of requests, and paths that servers name.

use longsplice_http::{
    Form, Kind, Request, Scan, Wrong,
    accept::Codings,
    forward::{self, Forwarded, Onward},
};
use longsplice_proxy::{
    fields::{About, Change, FieldChange, Head, change},
    routes::{Origins, Rewrite},
};
use std::{
    net::{IpAddr, Ipv6Addr},
    sync::LazyLock,
};

const CLIENT: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);
const ABOUT: About<'static> = About { client: CLIENT, host: "a.example:81", user: Some("ann") };

/// None of them does anything the second time.
static CHANGES: LazyLock<Vec<FieldChange>> = LazyLock::new(|| {
    let name = |text: &str| text.parse().expect("a name");
    let all = [
        Change::Remove(vec!["Cookie".parse().expect("a name"), "X-D*".parse().expect("a beginning")]),
        Change::Set(name("X-User"), "${user} of ${client}".parse().expect("a value")),
        Change::Default(name("X-Known"), "yes".parse().expect("a value")),
        Change::Replace(name("Accept"), "[a-m/]+".parse().expect("an expression"), "*".into()),
    ];
    all.map(|what| FieldChange { status: Vec::new(), what }).into()
});

fn parse(head: &[u8]) -> Result<Option<Request>, Wrong> {
    let end = Scan::new(Kind::Request).feed(head)?;
    end.map(|end| Request::parse(&head[..end])).transpose()
}

/// A changed request is the same request, and no client stands in for what is set.
pub(crate) fn fields(input: &[u8]) {
    let Ok(Some(request)) = parse(input) else { return };
    if let Form::Authority(_) = request.form {
        return; // CONNECT is not passed on
    }
    let (via, forwarded, codings) = (Some("us"), Forwarded::Standard, Codings::Any);
    let head =
        forward::request(&request, &Onward { host: "b.example", via, forwarded, client: CLIENT, codings, site: None });
    let changed = change(head.clone(), Head::Request, CHANGES.iter(), &ABOUT);
    let (Ok(Some(before)), Ok(Some(after))) = (parse(&head), parse(&changed)) else {
        // fields are added, of which a head may have too many
        let is_full = |wrong| matches!(wrong, Some(Wrong::TooManyFields | Wrong::HeadTooLong));
        assert!(is_full(parse(&changed).err()), "{}", changed.escape_ascii());
        return;
    };
    let same = |r: &Request| (r.method.clone(), r.form.clone(), r.framing, r.keep_alive, r.upgrade.clone());
    assert_eq!(same(&after), same(&before));
    assert_eq!(after.fields.all("x-user").collect::<Vec<_>>(), [b"ann of ::1"]);
    let is_left = |name: &str| forward::is_disguised(name.as_bytes(), "X-User") || name.eq_ignore_ascii_case("cookie");
    assert!(!after.fields.iter().any(|(name, _)| is_left(name)), "{}", changed.escape_ascii());
    assert_eq!(change(changed.clone(), Head::Request, CHANGES.iter(), &ABOUT), changed, "the second time");
}

/// What becomes of the value of a field of a reply.
fn back(rewrite: &Rewrite, field: &str, value: &str) -> String {
    let servers = ["10.0.0.1:8080".to_owned()];
    let [before, behind] = [format!("HTTP/1.1 302 Found\r\nA: /v2/x\r\n{field}: "), "\r\nB: /v2\r\n\r\n".to_owned()];
    let head = format!("{before}{value}{behind}").into_bytes();
    let out = rewrite.back_in(head, &Origins { site: "a.example", servers: &servers });
    let out = String::from_utf8(out).expect("a text stays one");
    let value = out.strip_prefix(&before).and_then(|out| out.strip_suffix(&behind)).expect("nothing else has changed");
    assert!(!value.contains(['\r', '\n']), "{value:?}");
    value.to_owned()
}

/// A server names a URL, a path with a time, or a cookie. What a client has asked for, it can be sent to.
pub(crate) fn location(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if text.bytes().any(|b| b < b' ' || b == 0x7f) {
        return; // it is more than a value
    }
    let prefix = |from: &str, to: &str| Rewrite::Prefix(from.parse().expect("a path"), to.parse().expect("a path"));
    for (from, to) in [("/api", "/v2"), ("/api", "/"), ("/", "/v2"), ("/a", "/a/b")] {
        for field in ["Location", "Refresh", "Set-Cookie"] {
            back(&prefix(from, to), field, text);
        }
    }
    let rewrite = prefix("/api", "/v2");
    if let Some(there) = rewrite.apply(text).filter(|_| text.starts_with('/')) {
        assert_eq!(rewrite.apply(&back(&rewrite, "Location", &there)), Some(there), "{text}");
    }
}
