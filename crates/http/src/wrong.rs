//! The errors of a message, each with the rule it violates.

/// Why a message is refused. Section numbers without an RFC refer to RFC 9112.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// 2.2: LF without CR, which some programs take for the end of a line.
    #[error("a line ends with LF alone (RFC 9112, 2.2)")]
    BareLf,
    /// 2.2: CR without LF.
    #[error("a CR that ends no line (RFC 9112, 2.2)")]
    BareCr,
    /// RFC 9110, 5.5: NUL and other control characters.
    #[error("a control character in the head (RFC 9110, 5.5)")]
    Control,
    /// 5.2: a line that begins with white space.
    #[error("a line that begins with white space (RFC 9112, 5.2)")]
    Fold,
    /// 2.2: more than one empty line before a request, or any before a reply.
    #[error("empty lines before the message (RFC 9112, 2.2)")]
    EmptyLines,
    /// 3: the start line is longer than [`LINE_MAX`](crate::LINE_MAX).
    #[error("a start line that is too long (RFC 9112, 3)")]
    LineTooLong,
    /// RFC 6585, 5: the head is longer than [`HEAD_MAX`](crate::HEAD_MAX).
    #[error("a head that is too long (RFC 6585, 5)")]
    HeadTooLong,
    /// RFC 6585, 5: more fields than [`FIELDS_MAX`](crate::FIELDS_MAX).
    #[error("too many fields (RFC 6585, 5)")]
    TooManyFields,
    /// 3, 4: not a request line or a status line.
    #[error("a malformed start line (RFC 9112, 3 and 4)")]
    StartLine,
    /// 3: a method longer than [`METHOD_MAX`](crate::METHOD_MAX).
    #[error("an invalid method (RFC 9112, 3)")]
    Method,
    /// 2.3: neither HTTP/1.0 nor HTTP/1.1.
    #[error("a version that is not spoken here: HTTP/1.0 and HTTP/1.1 are (RFC 9112, 2.3)")]
    Version,
    /// 3.2: the request target.
    #[error("a bad request target (RFC 9112, 3.2)")]
    Target,
    /// RFC 3986, 5.2.4 and 2.1: a path that can be read in several ways, where rules or routes depend on it.
    #[error("a path with dot segments, bad escapes or control characters (RFC 3986, 5.2.4 and 2.1)")]
    Path,
    /// RFC 9110, 4.2: a scheme other than http.
    #[error("a scheme that is not spoken here: use http, or CONNECT (RFC 9110, 4.2)")]
    Scheme,
    /// RFC 9110, 4.2.4, and RFC 3986, 3.2: the host and port of the target.
    #[error("a bad host or port in the request target (RFC 9110, 4.2)")]
    Authority,
    /// RFC 9110, 15: a status outside 100 to 599.
    #[error("a status outside of 100 to 599 (RFC 9110, 15)")]
    Status,
    /// 5.1: a bad field name, or white space before its colon.
    #[error("a bad field name, or white space before its colon (RFC 9112, 5.1)")]
    FieldName,
    /// RFC 9110, 5.5: a bad field value.
    #[error("a bad field value (RFC 9110, 5.5)")]
    FieldValue,
    /// 3.2: HTTP/1.1 without `Host`.
    #[error("no Host (RFC 9112, 3.2)")]
    NoHost,
    /// 3.2: more than one `Host`.
    #[error("more than one Host (RFC 9112, 3.2)")]
    Hosts,
    /// 3.2: a `Host` that is not a valid host.
    #[error("a bad Host (RFC 9112, 3.2)")]
    Host,
    /// 6.3: both fields that delimit a body.
    #[error("both Content-Length and Transfer-Encoding (RFC 9112, 6.3)")]
    LengthAndCoding,
    /// RFC 9110, 8.6: more than one length, equal ones included.
    #[error("more than one Content-Length (RFC 9110, 8.6)")]
    Lengths,
    /// RFC 9110, 8.6: a length that is not a number of at most 2^63-1.
    #[error("a bad Content-Length (RFC 9110, 8.6)")]
    Length,
    /// 6.1: a transfer coding in HTTP/1.0.
    #[error("Transfer-Encoding in HTTP/1.0 (RFC 9112, 6.1)")]
    CodingInOld,
    /// 6.3: chunked is not the last coding, or appears twice.
    #[error("a Transfer-Encoding that does not end with chunked, so that the length is unknown (RFC 9112, 6.3)")]
    Coding,
    /// 6.1: a coding other than chunked.
    #[error("a transfer coding that is not spoken here: chunked is (RFC 9112, 6.1)")]
    UnknownCoding,
    /// RFC 9110, 9.3.6: CONNECT with a body.
    #[error("CONNECT with a body (RFC 9110, 9.3.6)")]
    ConnectBody,
    /// RFC 9110, 7.6.1: `Connection` is not a list of tokens.
    #[error("a bad Connection (RFC 9110, 7.6.1)")]
    Connection,
    /// RFC 9110, 7.6.2: `Max-Forwards` is not a number.
    #[error("a bad Max-Forwards (RFC 9110, 7.6.2)")]
    MaxForwards,
    /// 7.1: the size of a chunk is not a hexadecimal number of at most 2^63-1.
    #[error("a bad chunk size (RFC 9112, 7.1)")]
    ChunkSize,
    /// 7.1.1: chunk extensions with forbidden characters, or too many.
    #[error("bad or too many chunk extensions (RFC 9112, 7.1.1)")]
    ChunkExtension,
    /// 7.1: no CR LF at the end of a chunk or its size line.
    #[error("a chunk that does not end where it should (RFC 9112, 7.1)")]
    ChunkEnd,
    /// 7.1.2: invalid or forbidden trailer fields.
    #[error("bad trailer fields (RFC 9112, 7.1.2; RFC 9110, 6.5.1)")]
    Trailer,
    /// 8: the connection ended before the message did.
    #[error("the message is cut off (RFC 9112, 8)")]
    Cut,
}

impl Wrong {
    /// The status of our answer to such a request. For a reply from a server, the caller always answers 502.
    pub fn status(self) -> u16 {
        match self {
            Wrong::LineTooLong => 414,
            Wrong::HeadTooLong | Wrong::TooManyFields => 431,
            Wrong::Method | Wrong::Scheme | Wrong::UnknownCoding => 501,
            Wrong::Version => 505,
            _ => 400,
        }
    }
}
