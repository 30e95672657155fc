//! Hostile and unusual replies, each with the required result.

use crate::feed::{self, From, table};

/// Method of the request, the reply, and the required result.
const REPLIES: &[(&str, &[u8], &str)] = &[
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "200 5 keep \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP", "200 5 keep \"hello\", 4 more"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "200 5 keep \"hell\", Cut"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "200 0 keep"),
    ("GET", b"HTTP/1.1 200 OK\r\n\r\nhello", "200 until-close close \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\r\n\r\n", "200 until-close close"),
    ("GET", b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\nhello", "200 until-close close \"hello\""),
    (
        "GET",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "200 chunked keep \"hello\"",
    ),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "200 chunked keep \"hello\", Cut"),
    ("GET", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", "200 1 close \"x\""),
    ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", "200 1 close \"x\""),
    ("GET", b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx", "200 1 keep \"x\""),
    ("GET", b"HTTP/1.0 200 OK\r\n\r\nx", "200 until-close close \"x\""),
    // no body, regardless of the fields (RFC 9112, 6.3)
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "200 none keep"),
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "200 none keep, 5 more"),
    ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "200 none keep"),
    ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n", "200 none keep"),
    ("head", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", "200 1 keep \"x\""),
    ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", "204 none keep"),
    ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", "204 none keep, 5 more"),
    ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", "304 none keep"),
    ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", "304 none keep"),
    ("GET", b"HTTP/1.1 100 Continue\r\n\r\nHTTP", "100 none keep, 4 more"),
    ("GET", b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nhello", "103 none keep, 5 more"),
    ("GET", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nxyz", "101 none keep, 3 more"),
    ("GET", b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n", "205 0 keep"),
    // status lines
    ("GET", b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", "200 0 keep"),
    ("GET", b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", "200 0 keep"),
    ("GET", b"HTTP/1.1 200 \xc3\x84\r\nContent-Length: 0\r\n\r\n", "200 0 keep"),
    ("GET", b"HTTP/1.1 599 Odd\r\nContent-Length: 0\r\n\r\n", "599 0 keep"),
    ("GET", b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n", "400 Status"),
    ("GET", b"HTTP/1.1 000 Odd\r\nContent-Length: 0\r\n\r\n", "400 Status"),
    ("GET", b"HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n", "400 Status"),
    ("GET", b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "400 Status"),
    ("GET", b"HTTP/1.1 20 OK\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 2000 OK\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 -20 OK\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 OK\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1  200 OK\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/2.0 200 OK\r\n\r\n", "505 Version"),
    ("GET", b"HTTP/1.2 200 OK\r\n\r\n", "505 Version"),
    ("GET", b"ICY 200 OK\r\n\r\n", "505 Version"),
    ("GET", b"<html>\r\n\r\n", "505 Version"),
    ("GET", b"SSH-2.0-OpenSSH_9.2\r\n", "more"),
    ("GET", b"\r\nHTTP/1.1 200 OK\r\n\r\n", "400 EmptyLines"),
    ("GET", b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", "400 BareLf"),
    ("GET", b"HTTP/1.1 200 OK\rContent-Length: 0\r\n\r\n", "400 BareCr"),
    ("GET", b"HTTP/1.1 200 O\0K\r\n\r\n", "400 Control"),
    ("GET", b" HTTP/1.1 200 OK\r\n\r\n", "400 Fold"),
    ("GET", b"", "more"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", "more"),
    // framing
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "400 LengthAndCoding"),
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "400 LengthAndCoding"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "400 Lengths"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "400 Lengths"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", "400 Length"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhello", "400 Length"),
    ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: x\r\n\r\n", "400 Length"),
    ("GET", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 CodingInOld"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", "400 Coding"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, identity\r\n\r\n", "400 Coding"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX Y: 1\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n", "400 Fold"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n", "400 BareLf"),
    ("GET", b"HTTP/1.1 200 OK\r\nConnection: a b\r\n\r\n", "400 Connection"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n", "200 chunked keep, ChunkSize"),
    (
        "GET",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nSet-Cookie: a\r\n\r\n",
        "200 chunked keep, Trailer",
    ),
];

/// Replies parsed leniently; the result also shows the fields and the chunks as forwarded.
const CARELESS: &[(&str, &[u8], &str)] = &[
    // lines (RFC 9112, 2.2, 4, 5.1 and 5.2; RFC 9110, 5.5)
    ("GET", b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", "200 5 keep \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\nX: a\r\nY: b\n\r\nhello", "200 until-close close X=a Y=b \"hello\""),
    ("GET", b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "200 0 keep"),
    ("GET", b"\nHTTP/1.1 200 OK\nX: a\n b\nContent-Length: 0\n\n", "200 0 keep X=a b"),
    ("GET", b"\n\nHTTP/1.1 200 OK\n\n", "400 EmptyLines"),
    ("GET", b" HTTP/1.1 200 OK\r\n\r\n", "400 Fold"),
    ("GET", b"HTTP/1.1 200 OK\r\n X: a\r\n\r\n", "400 Fold"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: a\r\n\t b\r\n \r\n  c\r\nContent-Length: 0\r\n\r\n", "200 0 keep X=a\\t b   c"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: \0a\rb\x7f\x01c\x0c\r\r\nContent-Length: 0\r\n\r\n", "200 0 keep X=a b  c"),
    ("GET", b"HTTP/1.1 200 OK\r\nX \t: a\r\nContent-Length : 0\r\n\r\n", "200 0 keep X=a"),
    ("GET", b"HTTP/1.1 200 OK\r\nX Y: 1\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX\0: 1\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\n: 1\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: 1\r\n\r\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 200 O\0K\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 200 OK\r\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "999 0 keep"),
    ("GET", b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n", "400 Status"),
    ("GET", b"HTTP/1.1 1000 Odd\r\nContent-Length: 0\r\n\r\n", "400 StartLine"),
    ("GET", b"HTTP/1.2 200 OK\r\n\r\n", "505 Version"),
    // framing (RFC 9112, 6.3; RFC 9110, 8.6)
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "200 5 keep \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5, 05\r\n\r\nhello", "200 5 keep \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0000000000000000000005\r\n\r\nhello", "200 5 keep \"hello\""),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "400 Lengths"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5,\r\n\r\nhello", "400 Length"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello", "400 Length"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\x0b\r\n\r\nhello", "400 FieldValue"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length:\r\n 5\r\n\r\nhello", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nX: a\0\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: \0chunked\r\n\r\n0\r\n\r\n", "400 FieldValue"),
    (
        "GET",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "200 chunked close as 0\\r\\n\\r\\n",
    ),
    ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "200 none close"),
    ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\nTransfer-Encoding: chunked\r\n\r\n", "400 Length"),
    ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "501 UnknownCoding"),
    ("GET", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 CodingInOld"),
];

/// Chunks, and the form in which they are forwarded.
const CHUNKS: &[(&[u8], &str)] = &[
    (b"5\r\nhello\r\n0\r\n\r\n", "\"hello\" as 5\\r\\nhello\\r\\n0\\r\\n\\r\\n"),
    (b"5\nhello\n0\n\n", "\"hello\" as 5\\r\\nhello\\r\\n0\\r\\n\\r\\n"),
    (b"5\t \r\nhello\r\n0  \n\r\n", "\"hello\" as 5\\r\\nhello\\r\\n0\\r\\n\\r\\n"),
    (b"5 ;a=b\r\nhello\n0;c\n\n", "\"hello\" as 5;a=b\\r\\nhello\\r\\n0;c\\r\\n\\r\\n"),
    (b"00000000000000000000005\r\nhello\r\n00000\r\n\r\n", "\"hello\" as 05\\r\\nhello\\r\\n0\\r\\n\\r\\n"),
    (b"0\r\nX : a\n b\0\nY: c\n\n", " as 0\\r\\nX: a b \\r\\nY: c\\r\\n\\r\\n"),
    (b"0\r\nX: a\r\n\r\nHTTP", " as 0\\r\\nX: a\\r\\n\\r\\n, 4 more"),
    (b"05\r\nhello\r\n", "\"hello\", Cut"),
    (b"5 6\r\nhello", "ChunkSize"),
    (b" 5\r\nhello", "ChunkSize"),
    (b"5\r\rhello", "ChunkEnd"),
    (b"5\r\nhello \r\n", "ChunkEnd"),
    (b"5;\0\r\nhello", "ChunkExtension"),
    (b"10000000000000000\r\n", "ChunkSize"),
    (b"0\r\n X: a\r\n\r\n", "Fold"),
    (b"0\r\nX\r\n\r\n", "Trailer"),
    (b"0\r\nContent-Length : 5\n\n", "Trailer"),
    (b"0\r\nX: 1\r\n\r\r\n\r\n", "Trailer"),
];

#[test]
fn replies_are_mended() {
    for (method, reply, required) in CARELESS {
        table(From::Careless(method), [(reply.to_vec(), (*required).to_owned())]);
    }
    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (chunks, required) in CHUNKS {
        let refused = !required.contains(" as ") && !required.ends_with("Cut");
        let required = format!("200 chunked keep{}{required}", if refused { ", " } else { " " }).replace("  as", " as");
        table(From::Careless("GET"), [([head, *chunks].concat(), required)]);
    }
    // Everything that the strict parser accepts means the same to the lenient one.
    for (method, reply, required) in REPLIES.iter().filter(|(_, _, required)| required.starts_with("200 5 ")) {
        table(From::Careless(method), [(reply.to_vec(), (*required).to_owned())]);
    }
}

#[test]
fn replies_may_have_long_heads_and_many_fields() {
    let many = "X: a\r\n".repeat(longsplice_http::REPLY_FIELDS_MAX - 1);
    let long = format!("X: {}\r\n", "a".repeat(longsplice_http::REPLY_HEAD_MAX - 43));
    for (fields, more) in [(many, "Y: b"), (long, "Y")] {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{fields}\r\n");
        assert_eq!(feed::answer(From::Server("GET"), [head.as_bytes()]), "200 0 keep");
        let over = head.replacen("\r\n\r\n", &format!("\r\n{more}\r\n\r\n"), 1);
        let found = feed::answer(From::Server("GET"), [over.as_bytes()]);
        assert!(["431 TooManyFields", "431 HeadTooLong"].contains(&found.as_str()), "{found}");
    }
}

#[test]
fn every_size_may_be_padded() {
    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = format!("1{}\r\nx\r\n", " ".repeat(256)).repeat(1000) + "0\r\n\r\n";
    let found = feed::answer(From::Careless("GET"), [&head[..], chunks.as_bytes()]);
    assert!(found.ends_with("1\\r\\nx\\r\\n0\\r\\n\\r\\n"), "{found}");
    let found = feed::answer(From::Careless("GET"), [&head[..], "0".repeat(258).as_bytes()]);
    assert_eq!(found, "200 chunked keep, ChunkSize");
}

#[test]
fn replies() {
    for (method, reply, required) in REPLIES {
        table(From::Server(method), [(reply.to_vec(), (*required).to_owned())]);
    }
}
