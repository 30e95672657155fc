//! Hostile and unusual requests, each with the required result: the status and the error, or the parsed request.

use crate::feed::{self, From, answer_however_cut, table};

/// Start lines and whole heads.
const HEADS: &[(&[u8], &str)] = &[
    // the four forms of a target (RFC 9112, 3.2)
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET a / none keep"),
    (b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n", "GET a / none keep"),
    (b"GET http://a?x=1 HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /?x=1 none keep"),
    (b"GET HTTP://A.Example:8080/B?c HTTP/1.1\r\nHost: a\r\n\r\n", "GET a.example:8080 /B?c none keep"),
    (b"GET http://[2001:DB8::1]:81/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET [2001:db8::1]:81 / none keep"),
    (b"GET http://[::1] HTTP/1.1\r\nHost: a\r\n\r\n", "GET [::1] / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a none keep"),
    (b"GET //evil/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET //evil/ none keep"),
    (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS * none keep"),
    (b"OPTIONS http://a HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS a * none keep"),
    (b"OPTIONS http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS a / none keep"),
    (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", "CONNECT a:443 none keep"),
    (b"CONNECT [::1]:443 HTTP/1.1\r\nHost: a\r\n\r\nearly", "CONNECT [::1]:443 none keep, 5 more"),
    (b"CONNECT a:443 HTTP/1.0\r\n\r\n", "CONNECT a:443 none close"),
    // characters in the query that browsers do not encode
    (b"GET http://a/?{|}^` HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /?{|}^` none keep"),
    (b"GET http://a/?b\\c HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /?b\\c none keep"),
    (b"GET /?b\\c HTTP/1.1\r\nHost: a\r\n\r\n", "GET /?b\\c none keep"),
    (b"GET /b\\c?d HTTP/1.1\r\nHost: a\r\n\r\n", "GET /b\\c?d none keep"),
    // ... and those that programs send as they were typed
    (b"GET http://a/b\\c HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /b\\c none keep"),
    (b"GET http://a/<b> HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /<b> none keep"),
    (b"GET http://a/\" HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /\" none keep"),
    (b"GET http://a/\xc3\xa4?\xc3\xb6 HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /\u{e4}?\u{f6} none keep"),
    // an empty port is none (RFC 3986, 3.2.3)
    (b"GET http://a:/ HTTP/1.1\r\nHost: a:\r\n\r\n", "GET a / none keep"),
    (b"GET http://[::1]:/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET [::1] / none keep"),
    (b"GET http://a:?b HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /?b none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a:\r\n\r\n", "GET /a none keep"),
    (b"GET http://a/%00%0d%0a HTTP/1.1\r\nHost: a\r\n\r\n", "GET a /%00%0d%0a none keep"),
    // invalid targets
    (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET a/b HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET http:/a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET http:a HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET ://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET 1x://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET http://a/#x HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET http://a\\b/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a\\@b/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://\xc3\xa4/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET \xc3\xa4://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET /\xc3\xa4#b HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    (b"GET http://a/\xff HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "501 Scheme"),
    (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "501 Scheme"),
    (b"GET file:///etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", "501 Scheme"),
    // ws: with an upgrade to WebSocket only (RFC 6455, 3)
    (b"GET ws://a/b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n", "GET a /b none keep"),
    (
        b"GET WS://a:81 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x, websocket\r\n\r\n",
        "GET a:81 / none keep",
    ),
    (b"GET ws://a/b HTTP/1.1\r\nHost: a\r\n\r\n", "501 Scheme"),
    (b"GET ws://a/b HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n", "501 Scheme"),
    (b"GET ws://a/b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", "501 Scheme"),
    (b"GET ws://a/b HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "501 Scheme"),
    (b"GET wss://a/b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "501 Scheme"),
    (b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http:/// HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://:80/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a:0/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a:65536/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a:+80/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a:80:80/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a:000080/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://b@a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://b:c@a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://a%2eb/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://::1/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://[::1]80/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://[fe80::1%25eth0]/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"GET http://[a]/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT a HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT a: HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT http://a:443/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT /a HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT * HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT a:443/x HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"CONNECT b@a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "400 Authority"),
    (b"connect a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "400 Target"),
    // methods (RFC 9112, 3.1)
    (b"PURGE http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "PURGE a / none keep"),
    (b"get http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "get a / none keep"),
    (b"G@T http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"G\xc3T http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"\"GET\" http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GETGETGETGETGETGETGETGETGETGETGETGET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "501 Method"),
    // start lines (RFC 9112, 2.2, 3)
    (b"\r\nGET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET a / none keep"),
    (b"\r\n\r\nGET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 EmptyLines"),
    (b"\nGET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 BareLf"),
    (b" GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 Fold"),
    (b"GET  http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/  HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ HTTP/1.1 \r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET\thttp://a/\tHTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ b HTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"hello\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ HTTP/1.1\nHost: a\n\n", "400 BareLf"),
    (b"GET http://a/ HTTP/1.1\rHost: a\r\n\r\n", "400 BareCr"),
    (b"GET http://a/ HTTP/1.1\r\r\nHost: a\r\n\r\n", "400 BareCr"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400 Control"),
    // versions (RFC 9112, 2.3)
    (b"GET http://a/ HTTP/1.0\r\n\r\n", "GET a / none close"),
    (b"GET http://a/ HTTP/1.2\r\nHost: a\r\n\r\n", "505 Version"),
    (b"GET http://a/ HTTP/0.9\r\nHost: a\r\n\r\n", "505 Version"),
    (b"GET http://a/ HTTP/2.0\r\nHost: a\r\n\r\n", "505 Version"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "505 Version"),
    (b"GET http://a/ http/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ HTTP/1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ HTTP/11.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ HTTP/1.10\r\nHost: a\r\n\r\n", "400 StartLine"),
    (b"GET http://a/ XTTP/1.1\r\nHost: a\r\n\r\n", "400 StartLine"),
    // Host (RFC 9112, 3.2)
    (b"GET http://a/ HTTP/1.1\r\n\r\n", "400 NoHost"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "400 Hosts"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\nhOST: b\r\n\r\n", "400 Hosts"),
    (b"GET http://a/ HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "400 Hosts"),
    (b"GET http://a/ HTTP/1.1\r\nHost:\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost:\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a b\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a b\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a, b\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a, b\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a/b\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a/b\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: x@a\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: x@a\r\n\r\n", "400 Host"),
    (b"CONNECT a:443 HTTP/1.1\r\nHost:\r\n\r\n", "CONNECT a:443 none keep"),
    (b"GET /a HTTP/1.1\r\nHost: a:x\r\n\r\n", "400 Host"),
    (b"GET /a HTTP/1.1\r\nHost: 2001:db8::1:80\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: 2001:db8::1:80\r\n\r\n", "GET a / none keep"),
    (b"GET http://a/ HTTP/1.1\r\nHost: \xc3\xa4\r\n\r\n", "GET a / none keep"),
    (b"GET /a HTTP/1.1\r\nHost: \xc3\xa4\r\n\r\n", "400 Host"),
    (b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n", "GET a / none keep"),
    // heads that are truncated or unfinished
    (b"", "more"),
    (b"\r\n", "more"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\n", "more"),
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r", "more"),
    // two messages in one segment
    (b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\nGET", "GET a / none keep, 3 more"),
];

/// Fields after `Host`, up to the end of the message.
const FIELDS: &[(&[u8], &str)] = &[
    // names and values (RFC 9112, 5.1, 5.2; RFC 9110, 5.5)
    (b"X: 1\r\n\r\n", "none keep"),
    (b"X:1\r\nX:\r\nX:\t 2 \t\r\n\r\n", "none keep"),
    (b"X: \xe4\x80\r\n\r\n", "none keep"),
    (b"!#$%&'*+-.^_`|~09aZ: 1\r\n\r\n", "none keep"),
    (b"X : 1\r\n\r\n", "400 FieldName"),
    (b"X\t: 1\r\n\r\n", "400 FieldName"),
    (b"Content-Length : 5\r\n\r\nhello", "400 FieldName"),
    (b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    (b": 1\r\n\r\n", "400 FieldName"),
    (b"X\r\n\r\n", "400 FieldName"),
    (b"X Y: 1\r\n\r\n", "400 FieldName"),
    (b"(X): 1\r\n\r\n", "400 FieldName"),
    (b"X\xe4: 1\r\n\r\n", "400 FieldName"),
    (b"X[]: 1\r\n\r\n", "400 FieldName"),
    (b"X\0: 1\r\n\r\n", "400 Control"),
    (b"X: a\0b\r\n\r\n", "400 Control"),
    (b"X: a\x0bb\r\n\r\n", "400 Control"),
    (b"X: a\x7fb\r\n\r\n", "400 Control"),
    (b"X: a\x1b[2J\r\n\r\n", "400 Control"),
    (b"X: a\nContent-Length: 5\r\n\r\nhello", "400 BareLf"),
    (b"X: a\rContent-Length: 5\r\n\r\nhello", "400 BareCr"),
    (b"X: a\r\n\n", "400 BareLf"),
    (b"X: a\n\r\n", "400 BareLf"),
    (b"X: a\r\n\r\r\n", "400 BareCr"),
    (b"X: a\r\n b\r\n\r\n", "400 Fold"),
    (b"X: a\r\n\tb\r\n\r\n", "400 Fold"),
    (b" X: a\r\n\r\n", "400 Fold"),
    (b"X: a\r\n Content-Length: 5\r\n\r\nhello", "400 Fold"),
    (b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "400 Fold"),
    // lengths (RFC 9110, 8.6; RFC 9112, 6.3)
    (b"Content-Length: 5\r\n\r\nhello", "5 keep \"hello\""),
    (b"Content-Length: 5\r\n\r\nhelloGET", "5 keep \"hello\", 3 more"),
    (b"Content-Length: 5\r\n\r\nhell", "5 keep \"hell\", Cut"),
    (b"Content-Length: 0\r\n\r\n", "0 keep"),
    (b"Content-Length: 005\r\n\r\nhello", "5 keep \"hello\""),
    (b"content-LENGTH:5\r\n\r\nhello", "5 keep \"hello\""),
    (b"Content-Length: 9223372036854775807\r\n\r\n", "9223372036854775807 keep, Cut"),
    (b"Content-Length: 9223372036854775808\r\n\r\n", "400 Length"),
    (b"Content-Length: 18446744073709551621\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 00000000000000000005\r\n\r\nhello", "400 Length"),
    (b"Content-Length:\r\n\r\n", "400 Length"),
    (b"Content-Length: -5\r\n\r\n", "400 Length"),
    (b"Content-Length: +5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5.0\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 0x5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5e0\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5 5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: five\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5, 5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5, 6\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5;\r\n\r\nhello", "400 Length"),
    (b"Content-Length: \"5\"\r\n\r\nhello", "400 Length"),
    (b"Content-Length: \xd9\xa5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "400 Lengths"),
    (b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "400 Lengths"),
    (b"Content-Length: 5\r\nX: y\r\ncontent-length: 0\r\n\r\nhello", "400 Lengths"),
    (b"Content_Length: 5\r\n\r\nhello", "none keep, 5 more"),
    // codings (RFC 9112, 6.1, 6.3)
    (b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "chunked keep"),
    (b"transfer-encoding:CHUNKED\r\n\r\n0\r\n\r\n", "chunked keep"),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", "400 LengthAndCoding"),
    (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 LengthAndCoding"),
    (b"Content-Length: 5\r\nTransfer-Encoding: identity\r\n\r\nhello", "400 LengthAndCoding"),
    (b"Content-Length: 5\r\nTransfer-Encoding:\r\n\r\nhello", "400 LengthAndCoding"),
    (b"Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n\r\nhello", "400 LengthAndCoding"),
    (b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    (b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    (b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked,\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: identity\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: gzip\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding:\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunkedx\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: x chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding: chunked\xa0\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer_Encoding: chunked\r\n\r\n0\r\n\r\n", "none keep, 5 more"),
    (b"X-Transfer-Encoding: chunked\r\n\r\n", "none keep"),
    // Connection (RFC 9110, 7.6.1; RFC 9112, 9.3)
    (b"Connection: close\r\n\r\n", "none close"),
    (b"Connection: CLOSE\r\n\r\n", "none close"),
    (b"Connection: x, close\r\n\r\n", "none close"),
    (b"Connection: keep-alive\r\nConnection: close\r\n\r\n", "none close"),
    (b"Connection: ,, keep-alive ,\r\n\r\n", "none keep"),
    (b"Proxy-Connection: close\r\n\r\n", "none keep"),
    (b"Connection: a b\r\n\r\n", "400 Connection"),
    (b"Connection: \"close\"\r\n\r\n", "400 Connection"),
    (b"Connection: close;x\r\n\r\n", "400 Connection"),
    // Max-Forwards concerns OPTIONS and TRACE only (RFC 9110, 7.6.2)
    (b"Max-Forwards: x\r\n\r\n", "none keep"),
    (b"Max-Forwards: 0\r\nMax-Forwards: 1\r\n\r\n", "400 MaxForwards"),
];

/// Chunked bodies (RFC 9112, 7.1).
const CHUNKS: &[(&[u8], &str)] = &[
    (b"5\r\nhello\r\n0\r\n\r\n", " \"hello\""),
    (b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", " \"hello world\""),
    (b"5\r\nhello\r\n0\r\n\r\nGET", " \"hello\", 3 more"),
    (b"a\r\n0123456789\r\n0\r\n\r\n", " \"0123456789\""),
    (b"A\r\n0123456789\r\n0\r\n\r\n", " \"0123456789\""),
    (b"0000000000000005\r\nhello\r\n000\r\n\r\n", " \"hello\""),
    (b"5;a=b\r\nhello\r\n0;c=\"d e\"\r\n\r\n", " \"hello\""),
    (b"5\r\n\r\n0\r\n\r\n0\r\n\r\n", " \"\\r\\n0\\r\\n\""),
    (b"5\r\nhello\r\n0\r\nX: 1\r\nY: 2\r\n\r\n!", " \"hello\", 1 more"),
    // sizes
    (b"00000000000000005\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"8000000000000000\r\n", ", ChunkSize"),
    (b"ffffffffffffffff\r\n", ", ChunkSize"),
    (b"10000000000000005\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"7fffffffffffffff\r\nx", " \"x\", Cut"),
    (b"0x5\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"+5\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"-5\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b" 5\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"5 \r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"5\t\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"5 ;a\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"5_0\r\nhello\r\n0\r\n\r\n", ", ChunkSize"),
    (b"g\r\n", ", ChunkSize"),
    (b"\r\n5\r\nhello\r\n", ", ChunkSize"),
    (b";a=b\r\n", ", ChunkSize"),
    (b"5\0\r\nhello", ", ChunkSize"),
    (b"5\nhello\n0\n\n", ", ChunkSize"),
    (b"\xef\xbc\x95\r\nhello", ", ChunkSize"),
    // ends
    (b"5\rhello\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\r\nhello\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\nhello0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\nhello\n0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\nhello\r0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\nhello!\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"5\r\nhello  0\r\n\r\n", ", ChunkEnd"),
    // extensions
    (b"5;\nhello\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"5;a\nb\r\nhello\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"5;a\0\r\nhello\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"5;\xe4\r\nhello\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"5;a\rb\r\nhello\r\n0\r\n\r\n", ", ChunkEnd"),
    // trailers (RFC 9110, 6.5.1)
    (b"0\r\nContent-Length: 5\r\n\r\n", ", Trailer"),
    (b"0\r\nTransfer-Encoding: chunked\r\n\r\n", ", Trailer"),
    (b"0\r\nHost: b\r\n\r\n", ", Trailer"),
    (b"0\r\nConnection: close\r\n\r\n", ", Trailer"),
    (b"0\r\nAuthorization: x\r\n\r\n", ", Trailer"),
    (b"0\r\nX : 1\r\n\r\n", ", Trailer"),
    (b"0\r\nGET / HTTP/1.1\r\n\r\n", ", Trailer"),
    (b"0\r\nX: 1\n\r\n", ", BareLf"),
    (b"0\r\n\n", ", BareLf"),
    (b"0\r\n X: 1\r\n\r\n", ", Fold"),
    (b"0\r\nX: 1\r\n 2\r\n\r\n", ", Fold"),
    (b"0\r\nX: \0\r\n\r\n", ", Control"),
    // truncated
    (b"", ", Cut"),
    (b"5", ", Cut"),
    (b"5\r\nhel", " \"hel\", Cut"),
    (b"5\r\nhello\r\n", " \"hello\", Cut"),
    (b"5\r\nhello\r\n0\r\n", " \"hello\", Cut"),
    (b"5\r\nhello\r\n0\r\n\r", " \"hello\", Cut"),
];

#[test]
fn heads() {
    table(From::Client, HEADS.iter().map(|(m, a)| (m.to_vec(), (*a).to_owned())));
}

#[test]
fn fields_and_framing() {
    let start = b"POST http://a/ HTTP/1.1\r\nHost: a\r\n";
    let whole = |a: &str| if a.starts_with("400") || a.starts_with("501") { a.into() } else { format!("POST a / {a}") };
    table(From::Client, FIELDS.iter().map(|(m, a)| ([&start[..], m].concat(), whole(a))));
}

#[test]
fn chunks() {
    let start = b"POST http://a/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let whole = |a: &str| format!("POST a / chunked keep{a}");
    table(From::Client, CHUNKS.iter().map(|(m, a)| ([&start[..], m].concat(), whole(a))));
}

#[test]
fn there_are_enough_of_them() {
    assert!(HEADS.len() + FIELDS.len() + CHUNKS.len() >= 250);
}

#[test]
fn old_clients_and_connect_have_rules_of_their_own() {
    for (message, required) in [
        ("POST http://a/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 CodingInOld"),
        ("POST http://a/ HTTP/1.0\r\nContent-Length: 1\r\n\r\nx", "POST a / 1 close \"x\""),
        ("GET http://a/ HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "GET a / none close"),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "CONNECT a:1 none keep"),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", "400 ConnectBody"),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 ConnectBody"),
        ("TRACE http://a/ HTTP/1.1\r\nHost: a\r\nMax-Forwards: x\r\n\r\n", "400 MaxForwards"),
        ("OPTIONS http://a/ HTTP/1.1\r\nHost: a\r\nMax-Forwards: 3\r\n\r\n", "OPTIONS a / none keep"),
    ] {
        assert_eq!(answer_however_cut(From::Client, message.as_bytes()), required, "{message}");
    }
}

#[test]
fn nothing_grows_without_end() {
    let long = |n: usize| "x".repeat(n);
    let fields = |n: usize| "X: y\r\n".repeat(n);
    for (message, required) in [
        (format!("GET http://a/{} HTTP/1.1\r\nHost: a\r\n\r\n", long(8000)), None),
        (format!("GET http://a/{} HTTP/1.1\r\nHost: a\r\n\r\n", long(17_000)), Some("414 LineTooLong")),
        (format!("GET http://a/{}", long(17_000)), Some("414 LineTooLong")),
        (format!("GET http://a/ HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", long(20_000)), None),
        (format!("GET http://a/ HTTP/1.1\r\nHost: a\r\nX: {}", long(33_000)), Some("431 HeadTooLong")),
        (format!("GET http://a/ HTTP/1.1\r\nHost: a\r\n{}\r\n", fields(127)), None),
        (format!("GET http://a/ HTTP/1.1\r\nHost: a\r\n{}\r\n", fields(128)), Some("431 TooManyFields")),
    ] {
        let found = feed::answer(From::Client, message.as_bytes().chunks(997));
        assert_eq!(found, feed::answer(From::Client, [message.as_bytes()]));
        match required {
            Some(required) => assert_eq!(found, required),
            None => assert!(found.ends_with(" none keep"), "{found}"),
        }
    }
    let chunked = "POST http://a/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (body, required) in [
        (format!("1;{}\r\nx\r\n0\r\n\r\n", long(9000)), "ChunkExtension"),
        (format!("{}0\r\n\r\n", format!("1;{}\r\nx\r\n", long(90)).repeat(100)), "ChunkExtension"),
        (format!("0\r\nX: {}\r\n\r\n", long(9000)), "Trailer"),
        (format!("0\r\n{}\r\n", fields(129)), "Trailer"),
    ] {
        let message = format!("{chunked}{body}");
        for pieces in [1, 7, 100_000] {
            let found = feed::answer(From::Client, message.as_bytes().chunks(pieces));
            assert!(found.ends_with(required), "{found}");
        }
    }
}
