//! Request smuggling and response splitting as published: messages that two programs would end in different places. The
//! required result is a refusal, or the only possible interpretation with the bytes left for the next message.

use crate::feed::{From, table};

/// Fields after `Host`, up to the end of the connection.
const REQUESTS: &[(&[u8], &str)] = &[
    // CL.TE and TE.CL: one program uses the length, the other the chunks
    (b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", "400 LengthAndCoding"),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\nGPOST / HTTP/1.1\r\n", "400 LengthAndCoding"),
    (b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 LengthAndCoding"),
    (b"Content-Length: 3\r\nX: y\r\nTransfer-Encoding: chunked\r\nZ: 1\r\n\r\n1\r\nA\r\nX", "400 LengthAndCoding"),
    (b"Content-Length: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 LengthAndCoding"),
    (b"Content-Length:\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 LengthAndCoding"),
    (b"Connection: content-length\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "400 LengthAndCoding"),
    (
        b"Connection: transfer-encoding\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "400 LengthAndCoding",
    ),
    // TE.TE: one program does not recognize the coding
    (b"Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n\r\nabcd", "400 LengthAndCoding"),
    (b"Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-encoding: cow\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    (b"Transfer-Encoding: chunked, cow\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: cow, chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    (b"Transfer-Encoding: identity, chunked, identity\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding:\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding:\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding : chunked\r\nContent-Length: 4\r\n\r\n", "400 FieldName"),
    (b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    (b"Transfer-Encoding\0: chunked\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding\x0b: chunked\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding\r\n: chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    (b"Transfer-Encoding\n : chunked\r\n\r\n0\r\n\r\n", "400 BareLf"),
    (b"X: X\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 BareLf"),
    (b"X: X\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 BareCr"),
    (b"X: X\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 Fold"),
    (b"X:\r\n\tTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 Fold"),
    (b"Transfer-Encoding: chunked\r\n\t, gzip\r\n\r\n0\r\n\r\n", "400 Fold"),
    (b"Transfer-Encoding:\tchunked\t\r\n\r\n0\r\n\r\n", "chunked keep"),
    (b"TrAnSfer-EnCODinG:cHuNkeD \r\n\r\n0\r\n\r\n", "chunked keep"),
    (b"Transfer-Encoding:\x0cchunked\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding: \0chunked\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n", "400 Control"),
    (b"Transfer-Encoding: \x85chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: \xff\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chun\xe2\x84\xaaed\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: 'chunked'\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: {chunked}\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunk\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: ch\xc3\xbcnked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: chunked; chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer-Encoding: , , chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    (b"Transfer\xadEncoding: chunked\r\n\r\n", "400 FieldName"),
    (b"Transfer Encoding: chunked\r\n\r\n", "400 FieldName"),
    (b"Transfer-Encoding : chunked, gzip\r\n\r\n", "400 FieldName"),
    (b"Transfer-Encodin\xc4\xa3: chunked\r\n\r\n", "400 FieldName"),
    (b"Content-Encoding: chunked\r\n\r\n", "none keep"),
    (b"TE: chunked\r\n\r\n0\r\n\r\n", "none keep, 5 more"),
    // CL.CL, and lengths that some programs round, add up or truncate
    (b"Content-Length: 5\r\nContent-Length: 05\r\n\r\nhello", "400 Lengths"),
    (b"Content-Length: 0\r\nContent-Length: 44\r\n\r\nGET /", "400 Lengths"),
    (b"Content-Length: 5\r\nCONTENT-LENGTH: 0\r\n\r\nhello", "400 Lengths"),
    (b"Content-Length: ,5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5,\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 0,5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 0\t5\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 1_0\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 4294967301\r\n\r\nhello", "4294967301 keep \"hello\", Cut"),
    (b"Content-Length: 99999999999999999999999\r\n\r\nhello", "400 Length"),
    (b"Content-Length: 5\0\r\n\r\nhello", "400 Control"),
    (b"Content-Length\0: 5\r\n\r\nhello", "400 Control"),
    (b"Content-Length\t: 5\r\n\r\nhello", "400 FieldName"),
    (b"Content-Length 5\r\n\r\nhello", "400 FieldName"),
    (b"Content-Length: 5\n\r\nhello", "400 BareLf"),
    (b"X: y\x0bContent-Length: 5\r\n\r\nhello", "400 Control"),
    (b" Content-Length: 5\r\n\r\nhello", "400 Fold"),
    (b"Content-Length: \r\n 5\r\n\r\nhello", "400 Fold"),
    (b"Content-Length: 5\t\r\n\r\nhello", "5 keep \"hello\""),
    (b"Connection: content-length\r\nContent-Length: 5\r\n\r\nhello", "5 keep \"hello\""),
    // CL.0: the next message begins where the length says, whatever the bytes look like
    (b"Content-Length: 0\r\n\r\nGET /admin HTTP/1.1\r\n", "0 keep, 21 more"),
    (b"\r\nGET /admin HTTP/1.1\r\n", "none keep, 21 more"),
    (b"Content-Length: 21\r\n\r\nGET /admin HTTP/1.1\r\n", "21 keep \"GET /admin HTTP/1.1\\r\\n\""),
    // the end of the head
    (b"X: y\r\n\r\r\n\r\n", "400 BareCr"),
    (b"X: y\r\n\x0b\r\n\r\n", "400 Control"),
    (b"X: y\r\n\0\r\n\r\n", "400 Control"),
    (b"X: y\r\n\r\x00\n", "400 BareCr"),
    (b"X: y\r\n\t\r\n\r\n", "400 Fold"),
];

/// Chunked bodies of requests that two programs divide differently.
const CHUNKS: &[(&[u8], &str)] = &[
    // TERM.EXT and EXT.TERM: line feeds in extensions and after chunks
    (b"2;\nxx\r\n4c\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"2;\rxx\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"2;a=\"\n\"\r\nxx\r\n0\r\n\r\n", ", ChunkExtension"),
    (b"2;a=\"\r\n\"\r\nxx\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"2\r\nxx\n0\r\n\r\n", ", ChunkEnd"),
    (b"2\r\nxx\r0\r\n\r\n", ", ChunkEnd"),
    (b"2\r\nxxx\r\n0\r\n\r\n", ", ChunkEnd"),
    (b"2\r\nxx0\r\n\r\n", ", ChunkEnd"),
    (b"2\r\nxxXX0\r\n\r\n", ", ChunkEnd"),
    (b"2;\r\nxx\r\n0;\r\n\r\n", " \"xx\""),
    (b"2\r\nxx\r\n0\r\n\r\nGET", " \"xx\", 3 more"),
    // sizes that overflow or are truncated
    (b"100000000\r\nxx", " \"xx\", Cut"),
    (b"10000000000000002\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"fffffffffffffffe\r\n", ", ChunkSize"),
    (b"00000000000000000\r\n\r\n", ", ChunkSize"),
    (b"2,2\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"2 2\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"2\x0b\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"2\xa0\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"2h\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"0X2\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"\n2\r\nxx\r\n0\r\n\r\n", ", ChunkSize"),
    (b"\r\n\r\n", ", ChunkSize"),
    // the end of the body, and what looks like it
    (b"0\n\r\n", ", ChunkSize"),
    (b"0\r\n\r\r\n", ", BareCr"),
    (b"0\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", ", Trailer"),
    (b"0\r\nX: y\r\n\r\nGET", ", 3 more"),
    (b"0\r\ncontent-length: 5\r\n\r\nhello", ", Trailer"),
    (b"0\r\nTransfer-encoding: x\r\n\r\n", ", Trailer"),
    (b"0\r\nProxy-Authorization: x\r\n\r\n", ", Trailer"),
    (b"0\r\n: y\r\n\r\n", ", Trailer"),
];

/// Method of the request, and the reply after its version.
const REPLIES: &[(&str, &[u8], &str)] = &[
    ("GET", b"200 OK\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", "400 LengthAndCoding"),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", "400 LengthAndCoding"),
    ("HEAD", b"200 OK\r\nTransfer-Encoding: cow\r\n\r\n", "400 Coding"),
    ("GET", b"204 No\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "400 LengthAndCoding"),
    ("GET", b"204 No\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "204 none keep, 5 more"),
    ("GET", b"304 Same\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", "400 Lengths"),
    ("GET", b"100 Go\r\nContent-Length: 5\r\n\r\nHTTP/1.1 200 OK\r\n", "100 none keep, 17 more"),
    ("GET", b"100 Go\r\nTransfer-Encoding: gzip\r\n\r\n", "400 Coding"),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 Coding"),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n", "400 Coding"),
    ("GET", b"200 OK\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", "400 Control"),
    ("GET", b"200 OK\r\nTransfer-Encoding: identity\r\n\r\nx", "400 Coding"),
    ("GET", b"200 OK\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", "501 UnknownCoding"),
    ("GET", b"200 OK\r\nTransfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", "400 FieldName"),
    ("GET", b"200 OK\r\nContent-Length : 5\r\n\r\nhello", "400 FieldName"),
    ("GET", b"200 OK\r\nContent-Length: 5\r\ncontent-length: 0\r\n\r\nhello", "400 Lengths"),
    ("GET", b"200 OK\r\nContent-Length: +5\r\n\r\nhello", "400 Length"),
    ("GET", b"200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", "400 Length"),
    ("GET", b"200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello", "400 Length"),
    ("HEAD", b"200 OK\r\nContent-Length: x\r\n\r\n", "400 Length"),
    ("HEAD", b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "200 none keep, 5 more"),
    // splitting: a field value that the program behind the server did not sanitize
    ("GET", b"302 Go\r\nLocation: /\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n", "302 0 keep, 17 more"),
    ("GET", b"302 Go\r\nLocation: /\rSet-Cookie: a\r\n\r\n", "400 BareCr"),
    ("GET", b"302 Go\r\nLocation: /\nSet-Cookie: a\r\n\r\n", "400 BareLf"),
    ("GET", b"302 Go\r\nLocation: /\0\r\n\r\n", "400 Control"),
    ("GET", b"302 Go\r\nLocation: /\r\n\r\n\r\n", "302 until-close close \"\\r\\n\""),
    ("GET", b"200 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "200 until-close close \"HTTP/1.1 200 OK\\r\\n\\r\\n\""),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;\nxx\r\n0\r\n\r\n", "200 chunked keep, ChunkExtension"),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Type: x\r\n\r\n", "200 chunked keep, Trailer"),
    ("GET", b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxxHTTP/1.1", "200 chunked keep, ChunkEnd"),
];

#[test]
fn requests() {
    let start = b"POST / HTTP/1.1\r\nHost: a\r\n";
    let whole = |a: &str| if a.starts_with("400") || a.starts_with("501") { a.into() } else { format!("POST / {a}") };
    table(From::Client, REQUESTS.iter().map(|(m, a)| ([&start[..], m].concat(), whole(a))));
}

#[test]
fn chunks() {
    let start = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let whole = |a: &str| format!("POST / chunked keep{a}");
    table(From::Client, CHUNKS.iter().map(|(m, a)| ([&start[..], m].concat(), whole(a))));
}

#[test]
fn replies() {
    for (method, reply, required) in REPLIES {
        table(From::Server(method), [([b"HTTP/1.1 ", *reply].concat(), (*required).to_owned())]);
    }
}
