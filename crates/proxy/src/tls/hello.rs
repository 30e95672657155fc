//! Parses the ClientHello at the start of a TLS connection (RFC 8446, 4.1.2), for the requested
//! server name and application protocols.
//!
//! Anything that only concerns the server is ignored: versions, ciphers and unknown extensions.
//! Of an encrypted ClientHello, the outer one is parsed, as intended by the protocol.

use crate::target::Host;

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
/// Type of a host name in a list of server names (RFC 6066, 3).
const HOST_NAME: u8 = 0;
/// Maximum length of a session id in bytes (RFC 8446, 4.1.2).
const SESSION_ID_MAX: usize = 32;

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

/// Fields at the front of a message. Each method takes one, or returns `None` if it is incomplete.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (field, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(field)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes(1).map(|b| b[0])
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2).map(|b| u16::from_be_bytes([b[0], b[1]]))
    }

    /// A vector with a length of one byte (RFC 8446, 3.4).
    fn vec8(&mut self) -> Option<&'a [u8]> {
        let len = self.u8()?;
        self.bytes(len.into())
    }

    /// A vector with a length of two bytes.
    fn vec16(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.bytes(len.into())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the content of a vector with a length of two bytes, if nothing follows it.
fn only_vec16(field: &[u8]) -> Option<Fields<'_>> {
    let mut fields = Fields(field);
    fields.vec16().filter(|_| fields.is_empty()).map(Fields)
}

/// Returns the extensions of a ClientHello. Before TLS 1.3, it may end without any (RFC 5246, 7.4.1.2).
fn extensions(body: &[u8]) -> Option<Fields<'_>> {
    let mut fields = Fields(body);
    fields.bytes(2 + 32)?; // version and random
    let session_id = fields.vec8()?;
    let ciphers = fields.vec16()?;
    fields.vec8()?; // compression methods
    if session_id.len() > SESSION_ID_MAX || ciphers.len() % 2 != 0 {
        return None;
    }
    if fields.is_empty() { Some(fields) } else { only_vec16(fields.0) }
}

fn parse(body: &[u8]) -> Result<ClientHello, HelloError> {
    let (mut name, mut alpn) = (None, None);
    let mut extensions = extensions(body).ok_or(HelloError::Malformed)?;
    while !extensions.is_empty() {
        let kind = extensions.u16().ok_or(HelloError::Malformed)?;
        let content = extensions.vec16().ok_or(HelloError::Malformed)?;
        let first = match kind {
            SERVER_NAME => name.replace(server_name(content)?).is_none(),
            ALPN => alpn.replace(protocols(content).ok_or(HelloError::Malformed)?).is_none(),
            _ => true,
        };
        if !first {
            return Err(HelloError::Twice(kind));
        }
    }
    Ok(ClientHello { name, alpn: alpn.unwrap_or_default() })
}

fn server_name(content: &[u8]) -> Result<Host, HelloError> {
    if content.is_empty() {
        return Err(HelloError::Name); // as a server answers (RFC 6066, 3)
    }
    let mut list = only_vec16(content).ok_or(HelloError::Malformed)?;
    match (list.u8(), list.vec16(), list.is_empty()) {
        (Some(HOST_NAME), Some(name), true) => match Host::from_name(name) {
            Ok(host @ Host::Name(_)) => Ok(host),
            Ok(Host::Ip(_)) | Err(_) => Err(HelloError::Name),
        },
        _ => Err(HelloError::Name),
    }
}

/// Returns the names of the protocols: at least one, and none of them empty (RFC 7301, 3.1).
fn protocols(content: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (mut list, mut names) = (only_vec16(content)?, Vec::new());
    while !list.is_empty() || names.is_empty() {
        names.push(list.vec8().filter(|name| !name.is_empty())?.to_vec());
    }
    Some(names)
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;
