//! Hostile and odd replies, each with the required answer.

mod feed;

use feed::{From, table};

/// Method of the request, the reply, how it is understood.
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
    // no body, whatever the fields say (RFC 9112, 6.3)
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

#[test]
fn replies() {
    for (method, reply, required) in REPLIES {
        table(From::Server(method), [(reply.to_vec(), (*required).to_owned())]);
    }
}
