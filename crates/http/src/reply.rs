//! Replies of our own: a status, and a line of text that says what was wrong.

use std::time::SystemTime;

/// What a reply of ours says.
#[derive(Debug, Clone, Copy)]
pub struct Reply<'a> {
    /// The status.
    pub status: u16,
    /// What was wrong, for whoever reads it. Nothing of the client's bytes: it might be shown as something else.
    pub text: &'a str,
    /// A challenge for `Proxy-Authenticate` (RFC 9110, 11.7.1).
    pub challenge: Option<&'a str>,
    /// Whether we shall close after it.
    pub close: bool,
    /// Without the text: the answer to HEAD.
    pub head_only: bool,
}

impl Reply<'_> {
    /// The reply, head and body, as of now.
    pub fn encode(&self, now: SystemTime) -> Vec<u8> {
        let body = format!("longsplice: {}\n", self.text);
        let mut head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: text/plain; charset=utf-8\r\nX-Content-Type-Options: nosniff\r\n\
             Cache-Control: no-store\r\nDate: {}\r\nContent-Length: {}\r\n",
            self.status,
            reason(self.status),
            httpdate::fmt_http_date(now),
            body.len()
        );
        if let Some(challenge) = self.challenge {
            head += &format!("Proxy-Authenticate: {challenge}\r\n");
        }
        if self.close {
            head += "Connection: close\r\n";
        }
        head += "\r\n";
        if !self.head_only {
            head += &body;
        }
        head.into_bytes()
    }
}

/// The phrase of RFC 9110, 15, for the statuses that we answer with.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
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
