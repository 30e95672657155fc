//! Parses the ClientHello at the start of a TLS connection (RFC 8446, 4.1.2), for the requested
//! server name and application protocols.
//!
//! Anything that only concerns the server is ignored: versions, ciphers and unknown extensions.
//! Of an encrypted ClientHello, the outer one is parsed, as intended by the protocol.

use crate::target::Host;
use tls_parser::{
    SNIType, TlsExtension, parse_tls_extension_alpn_content, parse_tls_extension_sni_content,
    parse_tls_handshake_client_hello,
};

/// Maximum size of a ClientHello in bytes, including record headers. Browsers send 2 KB with
/// post-quantum key shares, and tickets add to that. Common servers accept between 16 and 128 KB.
pub const HELLO_MAX: usize = 64 * 1024;
/// Length in bytes of content type, version and length field (RFC 8446, 5.1).
const RECORD_HEADER: usize = 5;
/// Maximum length of a plaintext record in bytes (RFC 8446, 5.1).
const RECORD_MAX: usize = 1 << 14;
/// Length in bytes of message type and length field (RFC 8446, 4).
const MESSAGE_HEADER: usize = 4;
/// Content type of records with handshake messages.
const HANDSHAKE: u8 = 22;
/// Type of the ClientHello message.
const CLIENT_HELLO: u8 = 1;
/// Types of extensions: RFC 6066, 3, and RFC 7301, 3.1.
const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;

/// The requested name and protocols of a ClientHello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// Server name; always a [`Host::Name`].
    pub name: Option<Host>,
    /// Application protocols in order of preference.
    pub alpn: Vec<Vec<u8>>,
}

/// Reason why there is no valid ClientHello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The first bytes are not a TLS record.
    #[error("not TLS: begins with byte 0x{0:02x}")]
    NotTls(u8),
    /// A record has an invalid length or version.
    #[error("a TLS record that is none")]
    Record,
    /// The first message is not a ClientHello.
    #[error("a TLS connection that begins with message {0} instead of a ClientHello")]
    Message(u8),
    /// The message is longer than [`HELLO_MAX`].
    #[error("a ClientHello of more than {HELLO_MAX} bytes")]
    TooLong,
    /// Lengths contradict each other, or there are trailing bytes.
    #[error("a malformed ClientHello")]
    Malformed,
    /// An extension that is used here occurs twice (RFC 8446, 4.2).
    #[error("a ClientHello with two extensions of type {0}")]
    Twice(u16),
    /// There is more than one name, or the name is not a host name (RFC 6066, 3).
    #[error("a ClientHello with a bad server name")]
    Name,
}

impl HelloError {
    /// Returns the description for an alert (RFC 8446, 6.2); none if the client does not speak TLS.
    pub fn alert(self) -> Option<u8> {
        match self {
            HelloError::NotTls(_) => None,
            HelloError::Message(_) => Some(10),                  // unexpected_message
            HelloError::Twice(_) | HelloError::Name => Some(47), // illegal_parameter
            HelloError::Record | HelloError::TooLong | HelloError::Malformed => Some(50), // decode_error
        }
    }
}

/// Incremental scanner: looks at each byte once, however the message is cut into records and segments.
#[derive(Debug, Default)]
pub struct Scan {
    /// Number of bytes scanned.
    at: usize,
    /// Bytes of the current record that are still to come.
    left: usize,
    /// The message so far, without record headers.
    message: Vec<u8>,
}

impl Scan {
    /// Takes all bytes that have arrived so far; `None` if the message is incomplete.
    pub fn feed(&mut self, input: &[u8]) -> Result<Option<ClientHello>, HelloError> {
        loop {
            if self.left == 0 && !self.record(&input[self.at..])? {
                return Ok(None);
            }
            let end = input.len().min(self.at + self.left);
            self.message.extend_from_slice(&input[self.at..end]);
            self.left -= end - self.at;
            self.at = end;
            if let Some(body) = self.body()? {
                return parse(body).map(Some);
            }
            if self.left > 0 {
                return Ok(None);
            }
        }
    }

    /// Takes the header of a record, if it is complete.
    fn record(&mut self, input: &[u8]) -> Result<bool, HelloError> {
        match *input {
            [first, ..] if first != HANDSHAKE && self.at == 0 => return Err(HelloError::NotTls(first)),
            [first, ..] if first != HANDSHAKE => return Err(HelloError::Record),
            [_, major, ..] if major != 3 => return Err(HelloError::Record),
            _ => {}
        }
        let Some(header) = input.get(..RECORD_HEADER) else { return Ok(false) };
        self.left = usize::from(u16::from_be_bytes([header[3], header[4]]));
        self.at += RECORD_HEADER;
        if self.left == 0 || self.left > RECORD_MAX {
            return Err(HelloError::Record);
        }
        Ok(true)
    }

    /// Returns the message without its header, if it is complete.
    fn body(&self) -> Result<Option<&[u8]>, HelloError> {
        match *self.message {
            [kind, ..] if kind != CLIENT_HELLO => Err(HelloError::Message(kind)),
            [_, a, b, c, ..] => {
                let end = MESSAGE_HEADER + u32::from_be_bytes([0, a, b, c]) as usize;
                if end > HELLO_MAX {
                    return Err(HelloError::TooLong);
                }
                Ok(self.message.get(MESSAGE_HEADER..end))
            }
            _ => Ok(None),
        }
    }
}

fn parse(body: &[u8]) -> Result<ClientHello, HelloError> {
    let (rest, contents) = parse_tls_handshake_client_hello(body).map_err(|_| HelloError::Malformed)?;
    if !rest.is_empty() {
        return Err(HelloError::Malformed);
    }
    let (mut name, mut alpn) = (None, None);
    // Not parsed with the parser's own list, which parses all extensions and stops at the first unknown one.
    let mut extensions = contents.ext.unwrap_or_default();
    while let [t, u, l, m, rest @ ..] = extensions {
        let (kind, len) = (u16::from_be_bytes([*t, *u]), usize::from(u16::from_be_bytes([*l, *m])));
        let (content, rest) = rest.split_at_checked(len).ok_or(HelloError::Malformed)?;
        let first = match kind {
            SERVER_NAME => name.replace(server_name(content)?).is_none(),
            ALPN => alpn.replace(protocols(content)?).is_none(),
            _ => true,
        };
        if !first {
            return Err(HelloError::Twice(kind));
        }
        extensions = rest;
    }
    if !extensions.is_empty() {
        return Err(HelloError::Malformed);
    }
    Ok(ClientHello { name, alpn: alpn.unwrap_or_default() })
}

fn server_name(content: &[u8]) -> Result<Host, HelloError> {
    let Ok(([], TlsExtension::SNI(names))) = parse_tls_extension_sni_content(content) else {
        return Err(HelloError::Malformed);
    };
    // The parser drops bytes after the last complete name in the list. Only two lengths and a
    // type may be there besides the name.
    match names[..] {
        [(SNIType::HostName, name)] if content.len() == name.len() + 5 => match Host::from_name(name) {
            Ok(host @ Host::Name(_)) => Ok(host),
            Ok(Host::Ip(_)) | Err(_) => Err(HelloError::Name),
        },
        _ => Err(HelloError::Name),
    }
}

fn protocols(content: &[u8]) -> Result<Vec<Vec<u8>>, HelloError> {
    let Ok(([], TlsExtension::ALPN(names))) = parse_tls_extension_alpn_content(content) else {
        return Err(HelloError::Malformed);
    };
    // Same check for trailing bytes; and names must not be empty (RFC 7301, 3.1).
    let whole = names.iter().map(|n| n.len() + 1).sum::<usize>() + 2 == content.len();
    if names.is_empty() || names.iter().any(|n| n.is_empty()) || !whole {
        return Err(HelloError::Malformed);
    }
    Ok(names.into_iter().map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;
