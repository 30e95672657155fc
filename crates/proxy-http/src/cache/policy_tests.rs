//! Which replies are stored and served, message by message. Section numbers are those of RFC
//! 9111 unless another RFC is named.

use super::*;

/// The given number of seconds after Sunday, 6 November 1994, 08:49:37 GMT.
fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(784_111_777 + seconds)
}

const DATE: &str = "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n";

fn request(method: &str, fields: &str) -> Request {
    let head = format!("{method} http://x/ HTTP/1.1\r\nHost: x\r\n{fields}\r\n");
    Request::parse(head.as_bytes()).unwrap()
}

fn question(fields: &str) -> Option<Question> {
    Question::new(&request("GET", fields), "http://x/".into(), Codings::Any)
}

fn reply(status: u16, fields: &str) -> Response {
    Response::parse(format!("HTTP/1.1 {status} Some\r\n{fields}\r\n").as_bytes(), "GET").unwrap()
}

/// Returns the metadata stored for this reply, which arrived two seconds after its request.
fn stored(asked: &str, status: u16, fields: &str) -> Option<Meta> {
    let server = "192.0.2.1:80".parse().unwrap();
    question(asked).unwrap().meta(&reply(status, fields), server, "", [at(0), at(2)])
}

#[test]
fn what_may_be_stored() {
    for (asked, status, fields) in [
        ("", 200, "Cache-Control: max-age=10\r\n"),
        ("", 200, "CACHE-CONTROL: Public, S-MaxAge=10\r\nCache-Control: max-age=0\r\n"),
        ("", 200, "Expires: Sun, 06 Nov 1994 09:00:00 GMT\r\n"),
        ("", 200, "Last-Modified: Sun, 06 Nov 1993 08:49:37 GMT\r\n"), // 4.2.2
        ("", 200, "ETag: \"a\"\r\nCache-Control: no-cache\r\n"),
        ("", 404, "Cache-Control: max-age=10\r\n"),
        ("", 301, "Cache-Control: max-age=10\r\n"),
        ("", 302, "Cache-Control: max-age=10\r\n"),
        ("Authorization: a\r\n", 200, "Cache-Control: max-age=10, public\r\n"), // 3.5
        ("", 200, "Cache-Control: max-age=10\r\nAge: one\r\n"),                 // RFC 9111, 5.1
        ("", 200, "Cache-Control: max-age=10\r\nAge: -9\r\n"),
        ("", 200, "Cache-Control: max-age=10\r\nAge: 9.9\r\n"),
        ("", 200, "Cache-Control: max-age=10\r\nAge: 0, 60\r\n"),
        ("", 200, "Cache-Control: max-age=10\r\nVary: Accept\r\n"),
    ] {
        assert!(stored(asked, status, &format!("{DATE}{fields}")).is_some(), "{asked}{status} {fields}");
    }
    for (asked, status, fields) in [
        ("", 200, ""),                                                         // useless
        ("", 200, "Cache-Control: max-age=0\r\n"),                             // likewise
        ("", 200, "Cache-Control: max-age=10\r\nCache-Control: No-Store\r\n"), // 5.2.2.5
        ("Cache-Control: no-store\r\n", 200, "Cache-Control: max-age=10\r\n"), // 5.2.1.5
        ("", 200, "Cache-Control: PRIVATE, max-age=10\r\n"),                   // 5.2.2.7
        ("Authorization: a\r\n", 200, "Cache-Control: max-age=10\r\n"),        // 3.5
        ("", 200, "Cache-Control: max-age=10\r\nVary: accept, *\r\n"),         // 4.1
        ("", 200, "Cache-Control: max-age=10\r\nVary: X-Forwarded-For\r\n"),
        ("", 200, "Cache-Control: max-age=10\r\nSet-Cookie: a=b\r\n"),
        ("", 206, "Cache-Control: max-age=10\r\nContent-Range: bytes 0-1/9\r\n"), // 3.3
        ("", 500, "Cache-Control: max-age=10\r\n"),
        ("", 302, "ETag: \"a\"\r\n"),
        ("", 200, "Cache-Control: max-age=10\r\nAge: 8\r\n"), // stale with the two seconds, and no validator
        ("", 200, "Cache-Control: max-age=10\r\nAge: 99999999999999999999\r\n"), // RFC 9111, 1.2.2
        ("", 200, "Expires: 0\r\n"),                          // 5.3
    ] {
        assert!(stored(asked, status, &format!("{DATE}{fields}")).is_none(), "{asked}{status} {fields}");
    }
    let head = Question::new(&request("HEAD", ""), "http://x/".into(), Codings::Any).unwrap();
    let server = "192.0.2.1:80".parse().unwrap();
    assert!(head.meta(&reply(200, "Cache-Control: max-age=10\r\n"), server, "", [at(0); 2]).is_none());
}

/// RFC 9110, 5.6.7: three formats are dates, and mail's others are none.
#[test]
fn dates_are_those_of_http() {
    for (fields, counts) in [
        ("Expires: Sun, 06 Nov 1994 09:00:00 GMT\r\n", true),
        ("Expires: Sunday, 06-Nov-94 09:00:00 GMT\r\n", true),
        ("Expires: Sun Nov  6 09:00:00 1994\r\n", true),
        ("Expires: Thu, 18  Aug  2050 02:01:18 GMT\r\n", false), // 5.3
        ("Expires: Sun, 06 Nov 1994 09:00:00 +0000\r\n", false),
        ("Expires: 6 Nov 1994 09:00:00 GMT\r\n", false),
        ("Expires: Sun, 06 Nov 1994 09:00:00 GMT\r\nExpires: Sun, 06 Nov 1994 09:00:01 GMT\r\n", false),
        ("Last-Modified: Saturday, 06-Nov-93 08:49:37 GMT\r\n", true),
        ("Last-Modified: Sat, 06  Nov  1993 08:49:37 GMT\r\n", false),
    ] {
        let meta = stored("", 200, &format!("{DATE}{fields}ETag: \"a\"\r\n")).unwrap();
        let fit = meta.fit(&question("").unwrap(), at(3));
        assert_eq!(fit == Fit::Fresh, counts, "{fields}");
    }
    // the lifetime counts from Date (4.2.1), or from the time of the reply if that is none (RFC 9110, 6.6.1)
    let expires = "Expires: Sun, 06 Nov 1994 08:49:47 GMT\r\nETag: \"a\"\r\n";
    for date in ["Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
        let meta = stored("", 200, &format!("Date: {date}\r\n{expires}")).unwrap();
        let fit = |seconds| meta.fit(&question("").unwrap(), at(seconds));
        assert_eq!([fit(9), fit(10)], [Fit::Fresh, Fit::Stale], "{date}");
    }
    let meta = stored("", 200, &format!("Date: Sun, 06 Nov 1994 08:40:00 +0000\r\n{expires}")).unwrap();
    assert_eq!(meta.fit(&question("").unwrap(), at(9)), Fit::Stale);
}

#[test]
fn questions_that_are_none() {
    for fields in ["If-Match: *\r\n", "If-Unmodified-Since: x\r\n", "Expect: 100-continue\r\n"] {
        assert!(question(fields).is_none(), "{fields}");
    }
    for (method, fields) in [
        ("POST", ""),
        ("OPTIONS", ""),
        ("GET", "Content-Length: 1\r\n"),
        ("GET", "Expect: 100-continue\r\n"),
        ("GET", "Connection: upgrade\r\nUpgrade: websocket\r\n"),
    ] {
        assert!(
            Question::new(&request(method, fields), "http://x/".into(), Codings::Any).is_none(),
            "{method} {fields}"
        );
    }
    assert!(question("Cache-Control: max-age=3, Only-If-Cached\r\n").unwrap().only_if_cached);
    assert!(!question("").unwrap().only_if_cached && question("If-None-Match: *\r\n").unwrap().conditional);
}

#[test]
fn what_is_fresh() {
    let meta = stored("", 200, &format!("{DATE}Cache-Control: max-age=60\r\nAge: 10\r\nETag: \"a\"\r\n")).unwrap();
    assert_eq!([meta.age(at(2)), meta.age(at(7))], [12, 17]); // 4.2.3: the Age field, and the time in transit
    let fit = |fields: &str, seconds| meta.fit(&question(fields).unwrap(), at(seconds));
    assert_eq!([fit("", 2), fit("", 49), fit("", 50), fit("", 5000)], [Fit::Fresh, Fit::Fresh, Fit::Stale, Fit::Stale]);
    for (fields, want) in [
        ("Cache-Control: no-cache\r\n", Fit::Stale),
        ("Pragma: No-Cache\r\n", Fit::Stale),
        ("Cache-Control: Max-Age=16\r\n", Fit::Stale),
        ("Cache-Control: max-age=17\r\n", Fit::Fresh),
        ("Cache-Control: min-fresh=44\r\n", Fit::Stale),
        ("Cache-Control: min-fresh=43\r\n", Fit::Fresh),
    ] {
        assert_eq!(fit(fields, 7), want, "{fields}");
    }
    assert_eq!(fit("Cache-Control: max-stale\r\n", 100), Fit::Stale); // never stale without asking
    let asked_first =
        stored("", 200, &format!("{DATE}Cache-Control: no-cache, max-age=60\r\nETag: \"a\"\r\n")).unwrap();
    for fields in ["", "Cache-Control: max-stale\r\n", "Cache-Control: max-stale=9999\r\n"] {
        assert_eq!(asked_first.fit(&question(fields).unwrap(), at(3)), Fit::Stale, "{fields}"); // 5.2.2.4
    }
    // a clock behind the server's, and one ahead of it
    let late = stored("", 200, "Date: Sun, 06 Nov 1994 08:49:00 GMT\r\nCache-Control: max-age=60\r\n").unwrap();
    let early = stored("", 200, "Date: Sun, 06 Nov 1994 09:49:00 GMT\r\nCache-Control: max-age=60\r\n").unwrap();
    assert_eq!([late.age(at(2)), early.age(at(2))], [39, 2]);
    let other = Question { url: "http://y/".into(), ..question("").unwrap() };
    assert_eq!(meta.fit(&other, at(3)), Fit::Other);
}

#[test]
fn who_may_have_it() {
    let fields = format!("{DATE}Cache-Control: max-age=60\r\nVary: Accept-Language, COOKIE\r\n");
    let meta =
        stored("Accept-Language: de\r\nAccept-Language: en\r\nCookie: secret\r\nX: y\r\n", 200, &fields).unwrap();
    let fit = |fields: &str| meta.fit(&question(fields).unwrap(), at(3));
    assert_eq!(fit("Cookie: secret\r\nAccept-Language: de, en\r\n"), Fit::Fresh);
    for other in ["", "Accept-Language: de, en\r\n", "Cookie: secret\r\nAccept-Language: de\r\n"] {
        assert_eq!(fit(other), Fit::Other, "{other}");
    }
    let kept = &meta.asked.iter().find(|(name, _)| name == "cookie").unwrap().1;
    assert_eq!(fit(&format!("Cookie: {kept}\r\nAccept-Language: de, en\r\n")), Fit::Other, "a digest is no password");
    let written = serde_json::to_string(&meta).unwrap();
    assert!(!written.contains("secret") && !written.contains("\"x\""), "{written}");
    assert_eq!(serde_json::from_str::<Meta>(&written).unwrap(), meta);

    let identity = |fields: &str| Question::new(&request("GET", fields), "http://x/".into(), Codings::None).unwrap();
    let vary = reply(200, &format!("{DATE}Cache-Control: max-age=60\r\nVary: accept-encoding\r\n"));
    let meta =
        identity("Accept-Encoding: br\r\n").meta(&vary, "192.0.2.1:80".parse().unwrap(), "", [at(0); 2]).unwrap();
    assert_eq!(meta.fit(&identity("Accept-Encoding: gzip\r\n"), at(3)), Fit::Fresh, "servers were asked for the same");
}

#[test]
fn a_304_makes_it_fresh() {
    let fields =
        format!("{DATE}Cache-Control: max-age=5\r\nETag: \"a\"\r\nContent-Type: text/plain\r\nX: 1\r\nX: 2\r\n");
    let meta = stored("", 200, &fields).unwrap();
    assert_eq!(meta.conditions(), [("If-None-Match", b"\"a\"".to_vec())]);
    let now = [at(100), at(101)];
    let new = "Date: Sun, 06 Nov 1994 08:51:17 GMT\r\nETag: W/\"a\"\r\nX: 3\r\nContent-Type: a/b\r\nCache-Control: max-age=9\r\n";
    let fresh = meta.freshened(&reply(304, new), true, now).unwrap();
    assert_eq!((fresh.fit(&question("").unwrap(), at(108)), fresh.status), (Fit::Fresh, 200));
    assert_eq!(fresh.fit(&question("").unwrap(), at(109)), Fit::Stale);
    let values = |name: &str| list(&fresh.fields, name);
    assert_eq!(
        (values("x"), values("content-type"), values("etag")),
        (vec!["3".to_owned()], vec!["text/plain".to_owned()], vec!["w/\"a\"".to_owned()])
    );
    assert!(fresh.may_stay());
    let bare = reply(304, "");
    assert!(meta.freshened(&bare, true, now).is_some() && meta.freshened(&bare, false, now).is_none());
    for other in ["ETag: \"b\"\r\n", "Last-Modified: Sun, 06 Nov 1993 08:49:37 GMT\r\n", "Vary: accept\r\n"] {
        assert!(meta.freshened(&reply(304, other), true, now).is_none(), "{other}");
    }
    assert!(!meta.freshened(&reply(304, "Cache-Control: no-store\r\n"), true, now).unwrap().may_stay());
}

#[test]
fn conditions_of_clients() {
    let date = "Sun, 06 Nov 1994 08:00:00 GMT";
    let meta = stored("", 200, &format!("{DATE}ETag: W/\"a,b\"\r\nLast-Modified: {date}\r\n")).unwrap();
    for (fields, want) in [
        ("If-None-Match: *\r\n", true),
        ("If-None-Match: \"x\", \"a,b\"\r\n", true),
        ("If-None-Match: \"x\"\r\nIf-None-Match: W/\"a,b\"\r\n", true),
        ("If-None-Match: \"a\", b\"\r\n", false),
        ("If-None-Match: \"a,b\r\n", false),
        ("If-None-Match: \"x\"\r\nIf-Modified-Since: Sun, 06 Nov 1994 08:00:00 GMT\r\n", false), // RFC 9110, 13.2.2
        ("If-Modified-Since: Sun, 06 Nov 1994 08:00:00 GMT\r\n", true),
        ("If-Modified-Since: Sun Nov  6 08:00:00 1994\r\n", true),
        ("If-Modified-Since: Sun, 06 Nov 1994 07:59:59 GMT\r\n", false),
        ("If-Modified-Since: yesterday\r\n", false),
        ("", false),
    ] {
        assert_eq!(meta.is_known(&request("GET", fields)), want, "{fields}");
    }
    let lost = stored("", 404, &format!("{DATE}ETag: \"a\"\r\nCache-Control: max-age=9\r\n")).unwrap();
    assert!(!lost.is_known(&request("GET", "If-None-Match: \"a\"\r\n")));
}

#[test]
fn heads() {
    let fields =
        "Cache-Control: max-age=60\r\nX: \u{e9}\r\nConnection: y\r\nY: z\r\nKeep-Alive: 3\r\nContent-Length: 7\r\n";
    let meta = stored("", 200, fields).unwrap();
    let head = String::from_utf8(meta.head(&Part::Whole, 7, at(5))).unwrap();
    let want = "HTTP/1.1 200 Some\r\nCache-Control: max-age=60\r\nX: \u{e9}\r\nDate: Sun, 06 Nov 1994 08:49:39 GMT\r\n\
                Age: 5\r\nContent-Length: 7\r\n\r\n";
    assert_eq!(head, want);
    let head = String::from_utf8(meta.head(&Part::Known, 7, at(5))).unwrap();
    let want = "HTTP/1.1 304 Not Modified\r\nCache-Control: max-age=60\r\nDate: Sun, 06 Nov 1994 08:49:39 GMT\r\nAge: 5\r\n\r\n";
    assert_eq!(head, want);
}

#[test]
fn what_may_be_sent_stale() {
    let may = |reply: &str, asked: &str, default: Option<u64>, after: u64| {
        let meta = stored("", 200, &format!("{DATE}ETag: \"a\"\r\nCache-Control: {reply}\r\n")).unwrap();
        let q = question(asked).unwrap();
        meta.may_be_stale(&q, "stale-if-error", default.map(Duration::from_secs), at(after))
    };
    // RFC 5861: fresh for 10 s, and for 20 s more
    let said = "max-age=10, stale-if-error=20";
    assert!(may(said, "", None, 11) && may(said, "", None, 29) && !may(said, "", None, 30));
    assert!(!may("max-age=10, stale-while-revalidate=20", "", None, 11));
    assert!(
        may("max-age=10", "", Some(5), 14) && !may("max-age=10", "", Some(5), 15) && !may("max-age=10", "", None, 11)
    );
    assert!(!may("max-age=10, stale-if-error=1", "", Some(100), 12), "the reply decides");
    for never in ["must-revalidate", "proxy-revalidate", "no-cache", "s-maxage=5"] {
        assert!(!may(&format!("{said}, {never}"), "", Some(100), 11), "{never}");
    }
    for minds in ["Cache-Control: no-cache\r\n", "Cache-Control: max-age=0\r\n", "Pragma: no-cache\r\n"] {
        assert!(!may(said, minds, None, 11), "{minds}");
    }
    assert!(may(&format!("{said}\r\nAge: 7"), "", None, 22) && !may(&format!("{said}\r\nAge: 7"), "", None, 23));
}

#[test]
fn parts_of_what_is_certainly_the_same() {
    let meta = |fields: &str| stored("", 200, &format!("{DATE}Cache-Control: max-age=10\r\n{fields}")).unwrap();
    let part = |meta: &Meta, fields: &str| Part::of(&request("GET", fields), meta, 10);
    let strong = meta("ETag: \"a\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:36 GMT\r\n");
    let some = Part::Bytes(2..5);
    for (fields, want) in [
        ("Range: bytes=2-4\r\n", &some),
        ("Range: bytes=2-4\r\nIf-Range: \"a\"\r\n", &some),
        ("Range: bytes=2-4\r\nIf-Range: Sun, 06 Nov 1994 08:49:36 GMT\r\n", &some),
        ("Range: bytes=2-4\r\nIf-Range: W/\"a\"\r\n", &Part::Whole),
        ("Range: bytes=2-4\r\nIf-Range: \"b\"\r\n", &Part::Whole),
        ("Range: bytes=2-4\r\nIf-Range: Sun, 06 Nov 1994 08:49:37 GMT\r\n", &Part::Whole),
        ("Range: bytes=2-4\r\nRange: bytes=2-4\r\n", &Part::Whole),
        ("Range: bytes=2-4, 6-7\r\n", &Part::Whole),
        ("Range: bytes=2-4\r\nIf-None-Match: \"a\"\r\n", &Part::Known),
        ("Range: bytes=10-\r\n", &Part::Outside),
    ] {
        assert_eq!(part(&strong, fields), *want, "{fields}");
    }
    assert_eq!(Part::of(&request("HEAD", "Range: bytes=2-4\r\n"), &strong, 10), Part::Whole);
    let weak = meta("ETag: W/\"a\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n");
    for validator in ["W/\"a\"", "Sun, 06 Nov 1994 08:49:37 GMT"] {
        assert_eq!(part(&weak, &format!("Range: bytes=2-4\r\nIf-Range: {validator}\r\n")), Part::Whole);
    }
    let head = String::from_utf8(strong.head(&some, 10, at(2))).unwrap();
    assert!(head.starts_with("HTTP/1.1 206 ") && head.contains("Content-Range: bytes 2-4/10\r\n"), "{head}");
    assert!(head.contains("Content-Length: 3\r\n") && head.contains("ETag: \"a\"\r\n"), "{head}");
    let head = String::from_utf8(strong.head(&Part::Outside, 10, at(2))).unwrap();
    assert!(head.starts_with("HTTP/1.1 416 ") && head.contains("Content-Range: bytes */10\r\n"), "{head}");
}
