//! Reads the ClientHello that a TLS connection begins with (RFC 8446, 4.1.2), for the name and the protocols that it
//! asks for.
//!
//! Nothing is judged that only concerns the server: versions, ciphers and unknown extensions pass. Of an encrypted
//! ClientHello, the outer one is read, as it is meant to be.

use crate::target::Host;
use tls_parser::{
    SNIType, TlsExtension, parse_tls_extension_alpn_content, parse_tls_extension_sni_content,
    parse_tls_handshake_client_hello,
};

/// So much is read for a ClientHello, headers of records included. Browsers send 2 KB with post-quantum key shares, and
/// tickets add some; the servers we know take between 16 and 128 KB.
pub const HELLO_MAX: usize = 64 * 1024;
/// Content type, version, length (RFC 8446, 5.1).
const RECORD_HEADER: usize = 5;
/// The longest record before there are keys (RFC 8446, 5.1).
const RECORD_MAX: usize = 1 << 14;
/// Message type and length (RFC 8446, 4).
const MESSAGE_HEADER: usize = 4;
/// Content type of records with handshake messages.
const HANDSHAKE: u8 = 22;
/// Type of the message.
const CLIENT_HELLO: u8 = 1;
/// Types of extensions: RFC 6066, 3, and RFC 7301, 3.1.
const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;

/// What a ClientHello asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// The server's name; always a [`Host::Name`].
    pub name: Option<Host>,
    /// Protocols, the preferred first.
    pub alpn: Vec<Vec<u8>>,
}

/// Why something is no ClientHello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The first bytes are no record of TLS.
    #[error("not TLS: begins with byte 0x{0:02x}")]
    NotTls(u8),
    /// A record of a length, or with a version, that it must not have.
    #[error("a TLS record that is none")]
    Record,
    /// Another message than a ClientHello.
    #[error("a TLS connection that begins with message {0} instead of a ClientHello")]
    Message(u8),
    /// More than [`HELLO_MAX`].
    #[error("a ClientHello of more than {HELLO_MAX} bytes")]
    TooLong,
    /// Its lengths contradict each other, or something follows where nothing may.
    #[error("a malformed ClientHello")]
    Malformed,
    /// An extension that matters here is there twice (RFC 8446, 4.2).
    #[error("a ClientHello with two extensions of type {0}")]
    Twice(u16),
    /// More than one name, or none that is a host name (RFC 6066, 3).
    #[error("a ClientHello with a bad server name")]
    Name,
}

impl HelloError {
    /// The description that an alert has for it (RFC 8446, 6.2); none for those who do not speak TLS.
    pub fn alert(self) -> Option<u8> {
        match self {
            HelloError::NotTls(_) => None,
            HelloError::Message(_) => Some(10),                  // unexpected_message
            HelloError::Twice(_) | HelloError::Name => Some(47), // illegal_parameter
            HelloError::Record | HelloError::TooLong | HelloError::Malformed => Some(50), // decode_error
        }
    }
}

/// Looks at each byte once, in the order of arrival, however the message is cut into records and segments.
#[derive(Debug, Default)]
pub struct Scan {
    /// Bytes looked at.
    at: usize,
    /// Of the record there, bytes to come.
    left: usize,
    /// The message so far, without the headers of records.
    message: Vec<u8>,
}

impl Scan {
    /// Takes all that has come so far; `None`: more has to come.
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

    /// Takes the header of a record, if it is there.
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

    /// The message without its header, if it is whole.
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
    // Not by the parser's own list, which takes all extensions apart, and stops at the first it does not understand.
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
    // The parser drops what follows the last whole name in the list: two lengths and a type are all that may be there.
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
    // As above; and names are not empty (RFC 7301, 3.1).
    let whole = names.iter().map(|n| n.len() + 1).sum::<usize>() + 2 == content.len();
    if names.is_empty() || names.iter().any(|n| n.is_empty()) || !whole {
        return Err(HelloError::Malformed);
    }
    Ok(names.into_iter().map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;
