//! Heads as a proxy forwards them.

use longsplice_http::{
    Request, Response, Version,
    accept::Codings,
    forward::{self, Back, Content, Forwarded, Onward},
    reply::Reply,
};
use std::{net::IpAddr, time::SystemTime};

const ONWARD: Onward<'static> = Onward {
    host: "a.example:81",
    via: None,
    forwarded: Forwarded::None,
    client: IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7)),
    codings: Codings::Any,
    site: None,
};
const BACK: Back<'static> =
    Back { via: None, client: Version::Http11, close: false, now: NOW, content: Content::AsItIs };
const NOW: SystemTime = SystemTime::UNIX_EPOCH;
const DATE: &str = "Date: Thu, 01 Jan 1970 00:00:00 GMT";

fn request(fields: &str, to: &Onward<'_>) -> String {
    request_line("GET http://a.example:81/b?c HTTP/1.1", &format!("Host: other\r\n{fields}"), to)
}

fn request_line(line: &str, fields: &str, to: &Onward<'_>) -> String {
    let parsed = Request::parse(format!("{line}\r\n{fields}\r\n").as_bytes()).unwrap();
    let text = String::from_utf8(forward::request(&parsed, to)).unwrap();
    // the written head parses again, and means the same
    let again = Request::parse(text.as_bytes()).unwrap();
    assert_eq!((again.method, again.framing), (parsed.method, parsed.framing));
    text
}

fn response(method: &str, reply: &str, to: &Back<'_>) -> String {
    let parsed = Response::parse(format!("{reply}\r\n").as_bytes(), method).unwrap();
    let text = String::from_utf8(forward::response(&parsed, to)).unwrap();
    assert_eq!(Response::parse(text.as_bytes(), method).unwrap().status, parsed.status);
    text
}

#[test]
fn requests_lose_what_is_between_client_and_proxy() {
    let fields = "Accept: x\r\nConnection: close, X-Mine, host, cookie2\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nTE: gzip\r\n\
                  Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nTrailer: Y\r\nUpgrade: x\r\n\
                  HTTP2-Settings: x\r\nCookie2: z\r\nX-Other:  a  \r\n";
    assert_eq!(request(fields, &ONWARD), "GET /b?c HTTP/1.1\r\nHost: a.example:81\r\nAccept: x\r\nX-Other: a\r\n\r\n");
}

#[test]
fn names_that_servers_take_for_ours_are_left_out() {
    let fields = "Content_Length: 1\r\nTransfer---Encoding: chunked\r\ntransfer.encoding: x\r\nHOST_: b\r\nX_A: 1\r\n_: 2\r\n\
                  Content_Encoding: gzip\r\nCONTENT.TYPE: x\r\nContent--Range: bytes 0-0/1\r\nContent_Language: de\r\n\
                  X_Forwarded_For: 1.2.3.4\r\nX_Forwarded_Proto: https\r\n";
    let rest = "GET /b?c HTTP/1.1\r\nHost: a.example:81\r\nX_A: 1\r\n_: 2\r\nContent_Language: de\r\n";
    let theirs = "X_Forwarded_For: 1.2.3.4\r\nX_Forwarded_Proto: https\r\n\r\n";
    assert_eq!(request(fields, &ONWARD), format!("{rest}{theirs}"));
    let ours = "X-Forwarded-Host: b\r\nX-Forwarded-Proto: http\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n";
    let onward = Onward { forwarded: Forwarded::XForwardedFor, site: Some("b"), ..ONWARD };
    assert_eq!(request(fields, &onward), format!("{rest}{ours}"));
}

#[test]
fn content_that_has_no_meaning_is_the_last_of_its_connection() {
    let closes = |method: &str, framing: &str| {
        let line = format!("{method} http://a/ HTTP/1.1");
        let head = request_line(&line, &format!("Host: a\r\n{framing}\r\n"), &ONWARD);
        assert!(head.matches("\r\nConnection:").count() <= 1, "{head}");
        head.contains("\r\nConnection: close\r\n")
    };
    for method in ["GET", "HEAD", "DELETE", "OPTIONS", "ODD", "post"] {
        assert!(closes(method, "Content-Length: 1") && closes(method, "Transfer-Encoding: chunked"), "{method}");
        assert!(!closes(method, "Content-Length: 0") && !closes(method, "X: y"), "{method}");
    }
    assert!(!closes("POST", "Content-Length: 1") && !closes("PROPFIND", "Transfer-Encoding: chunked"));
}

#[test]
fn trailers_are_asked_for() {
    let asks = |te: &str| request(&format!("TE: {te}\r\nConnection: TE\r\n"), &ONWARD);
    assert!(asks("gzip;q=0.5, Trailers").ends_with("81\r\nConnection: TE\r\nTE: trailers\r\n\r\n"));
    assert!(!asks("gzip").contains("TE"));
    let both = request("TE: trailers\r\nConnection: TE, upgrade\r\nUpgrade: x\r\n", &ONWARD);
    assert!(both.ends_with("81\r\nConnection: upgrade, TE\r\nUpgrade: x\r\nTE: trailers\r\n\r\n"), "{both}");
    assert!(!request_line("GET http://a/ HTTP/1.0", "TE: trailers\r\n", &ONWARD).contains("TE"));
}

#[test]
fn lengths_and_codings_are_written_anew() {
    let text = request("Connection: content-length\r\nContent-Length: 005\r\n", &ONWARD);
    assert!(text.contains("\r\nContent-Length: 5\r\n") && !text.contains("005"), "{text}");
    let text = request("Transfer-Encoding: Chunked\r\nConnection: transfer-encoding\r\n", &ONWARD);
    assert!(text.contains("\r\nTransfer-Encoding: chunked\r\n") && !text.contains("Chunked"), "{text}");
}

#[test]
fn via_and_who_asked() {
    let via = Onward { via: Some("us"), ..ONWARD };
    assert!(request("Via: 1.0 x\r\nvia: 1.1 y\r\n", &via).ends_with("\r\nVia: 1.0 x, 1.1 y, 1.1 us\r\n\r\n"));
    assert!(request("Connection: via\r\nVia: 1.0 x\r\n", &via).ends_with("81\r\nVia: 1.1 us\r\n\r\n"));
    let old = request_line("GET http://a.example:81/ HTTP/1.0", "", &via);
    assert_eq!(old, "GET / HTTP/1.1\r\nHost: a.example:81\r\nVia: 1.0 us\r\n\r\n");
    let x = Onward { forwarded: Forwarded::XForwardedFor, ..ONWARD };
    let text = request("X-Forwarded-For: 1.2.3.4\r\n", &x);
    assert!(text.ends_with("\r\nX-Forwarded-For: 1.2.3.4, 192.0.2.7\r\n\r\n"), "{text}");
    let text = request("Connection: x-forwarded-for\r\nX-Forwarded-For: 1.2.3.4\r\n", &x);
    assert!(text.ends_with("81\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n"), "{text}");
    let standard = Onward { forwarded: Forwarded::Standard, client: "2001:db8::1".parse().unwrap(), ..ONWARD };
    assert!(request("", &standard).ends_with("\r\nForwarded: for=\"[2001:db8::1]\"\r\n\r\n"));
    assert!(request("X-Forwarded-For: 1.2.3.4\r\n", &ONWARD).contains("1.2.3.4"), "left alone unless configured");
    let site = Some("www.example.org:80");
    let claims = "X-Forwarded-Proto: https\r\nX-Forwarded-Host: b\r\n";
    let text = request(claims, &Onward { site, ..x });
    let said = "X-Forwarded-Host: www.example.org:80\r\nX-Forwarded-Proto: http\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n";
    assert!(text.ends_with(&format!("81\r\n{said}")), "{text}");
    let text = request("", &Onward { site, forwarded: Forwarded::Standard, ..ONWARD });
    assert!(text.contains("Forwarded: for=192.0.2.7;host=\"www.example.org:80\";proto=http\r\n"), "{text}");
}

#[test]
fn odd_requests_go_on_rightly() {
    let options = "Host: a\r\nMax-Forwards: 3\r\n";
    assert_eq!(
        request_line("OPTIONS http://a HTTP/1.1", options, &ONWARD),
        "OPTIONS * HTTP/1.1\r\nHost: a.example:81\r\nMax-Forwards: 2\r\n\r\n"
    );
    let old = request_line("PUT http://a/ HTTP/1.0", "Expect: 100-continue\r\nContent-Length: 1\r\n", &ONWARD);
    assert_eq!(old, "PUT / HTTP/1.1\r\nHost: a.example:81\r\nContent-Length: 1\r\n\r\n");
    assert!(request("Expect: 100-continue\r\nContent-Length: 1\r\n", &ONWARD).contains("\r\nExpect: 100-continue\r\n"));
}

#[test]
fn upgrades_are_passed_on_but_not_to_http_2() {
    let asks = |upgrade: &str| request(&format!("Connection: Upgrade\r\nUpgrade: {upgrade}\r\n"), &ONWARD);
    assert!(asks("websocket").ends_with("\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"));
    assert!(asks("a/1, h2c, b").ends_with("\r\nUpgrade: a/1, b\r\n\r\n"));
    assert!(asks("h2c, websocket").ends_with("\r\nUpgrade: websocket\r\n\r\n"));
    assert!(!asks("h2c").contains("Upgrade"));
    assert!(!request("Upgrade: websocket\r\n", &ONWARD).contains("Upgrade"), "not named by Connection");
    let empty = request("Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n", &ONWARD);
    assert!(empty.ends_with("\r\nContent-Length: 0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"), "{empty}");
    let body = request("Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n", &ONWARD);
    assert!(!body.contains("Upgrade"), "with a body it is not to be told where the other protocol begins");
}

#[test]
fn replies_lose_what_is_between_proxy_and_server() {
    let reply = "HTTP/1.0 200 Fine\r\nConnection: keep-alive, x\r\nX: 1\r\nKeep-Alive: 5\r\nProxy-Authenticate: Basic\r\n\
                 Content-Length: 05\r\nY: 2\r\nVia: 1.0 z\r\n";
    assert_eq!(
        response("GET", reply, &Back { via: Some("us"), ..BACK }),
        format!("HTTP/1.1 200 Fine\r\nY: 2\r\n{DATE}\r\nContent-Length: 5\r\nVia: 1.0 z, 1.0 us\r\n\r\n")
    );
    assert!(response("GET", reply, &Back { close: true, ..BACK }).ends_with("\r\nConnection: close\r\n\r\n"));
    assert!(response("HEAD", reply, &BACK).contains("\r\nContent-Length: 5\r\n"));
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n";
    assert!(response("GET", chunked, &BACK).contains("\r\nTransfer-Encoding: chunked\r\n"));
    let old = Back { client: Version::Http10, close: true, ..BACK };
    assert_eq!(response("GET", chunked, &old), format!("HTTP/1.1 200 OK\r\n{DATE}\r\nConnection: close\r\n\r\n"));
    let empty = "HTTP/1.1 204 No\r\nDate: x\r\nContent-Length: 9\r\n";
    assert_eq!(response("GET", empty, &BACK), "HTTP/1.1 204 No\r\nDate: x\r\n\r\n");
    let hidden = "HTTP/1.1 204 No\r\nDate: x\r\nConnection: date\r\n";
    assert_eq!(response("GET", hidden, &BACK), format!("HTTP/1.1 204 No\r\n{DATE}\r\n\r\n"));
    assert!(response("GET", "HTTP/1.1 304 Same\r\nContent-Length: 9\r\n", &BACK).contains("Content-Length: 9"));
    let early = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n";
    assert_eq!(response("GET", early, &old), "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n");
    let switched = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n";
    assert!(response("GET", switched, &BACK).ends_with("\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"));
}

#[test]
fn replies_of_our_own_can_be_read() {
    let reply = Reply {
        status: 407,
        text: "who?",
        field: Some(("Proxy-Authenticate", "Basic realm=\"x\"")),
        close: true,
        ..Reply::default()
    };
    let bytes = reply.encode(NOW);
    let head = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let parsed = Response::parse(&bytes[..head], "GET").unwrap();
    assert_eq!((parsed.status, parsed.keep_alive), (407, false));
    assert!(parsed.fields.all("date").eq([b"Thu, 01 Jan 1970 00:00:00 GMT"]));
    assert_eq!(parsed.framing, longsplice_http::Framing::Exact((bytes.len() - head) as u64));
    assert_eq!(parsed.fields.all("proxy-authenticate").next(), Some(&b"Basic realm=\"x\""[..]));
    assert!(Reply { head_only: true, ..reply }.encode(NOW).ends_with(b"\r\n\r\n"));
}
