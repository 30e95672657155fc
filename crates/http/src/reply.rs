//! Replies of our own: a status, and a line of text that describes the error.

use std::time::SystemTime;

/// The contents of a reply of our own.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reply<'a> {
    /// The status code.
    pub status: u16,
    /// The description of the error. Contains no bytes from the client, which a browser might interpret.
    pub text: &'a str,
    /// One more field: a challenge (RFC 9110, 11.6.1 and 11.7.1), or where else to ask.
    pub field: Option<(&'a str, &'a str)>,
    /// A page instead of the text, and its media type.
    pub page: Option<(&'a str, &'a [u8])>,
    /// Whether we close the connection after the reply.
    pub close: bool,
    /// Leave out the text: the reply answers HEAD.
    pub head_only: bool,
}

impl Reply<'_> {
    /// Encodes head and body, with `now` as the date.
    pub fn encode(&self, now: SystemTime) -> Vec<u8> {
        let text = format!("longsplice: {}\n", self.text);
        let (kind, body) = self.page.unwrap_or(("text/plain; charset=utf-8", text.as_bytes()));
        let mut head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: {kind}\r\nX-Content-Type-Options: nosniff\r\n\
             Cache-Control: no-store\r\nDate: {}\r\nContent-Length: {}\r\n",
            self.status,
            reason(self.status),
            httpdate::fmt_http_date(now),
            body.len()
        );
        if let Some((name, value)) = self.field {
            head += &format!("{name}: {value}\r\n");
        }
        if self.close {
            head += "Connection: close\r\n";
        }
        head += "\r\n";
        [head.as_bytes(), if self.head_only { &[] } else { body }].concat()
    }
}

/// The reason phrase (RFC 9110, 15) of a status that we send.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}
