//! The Internet checksum (RFC 1071), of packets that are made here.

/// Adds 16-bit words in network byte order. The length must be even.
pub(crate) fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum()
}

/// Folds such a sum into the 16 bits of a checksum that is not inverted yet (RFC 1071).
pub(crate) fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}
