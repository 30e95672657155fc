//! A stored reply, as a self-contained file:
//!
//! | bytes | contents |
//! | --- | --- |
//! | `length` | body |
//! | 4 for each [`BLOCK`] of the body | CRC-32 of the block |
//! | `head` | [`Meta`] as JSON |
//! | 24 | [`MAGIC`], `length` (8 bytes), `head` (4), CRC-32 of the sums, the head and these two lengths (4) |
//!
//! Numbers are little-endian. The body comes first, so that it can be written before its metadata is known, and the
//! metadata can be rewritten later. No byte of a block is returned before the checksum of the block is verified.

use super::policy::Meta;
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// Unit of checksums, reads and writes in bytes: large enough for the disk, and small because each reply in progress has one.
pub(crate) const BLOCK: usize = 64 * 1024;
const MAGIC: &[u8; 8] = b"lscache1";
const FOOT: u64 = 24;
/// Maximum size of [`Meta`] in bytes: the heads of request and reply, escaped.
const HEAD_MAX: u32 = 1 << 20;

/// A body that is being written.
#[derive(Debug)]
pub(super) struct Writing {
    file: File,
    length: u64,
    block: Vec<u8>,
    sums: Vec<u8>,
}

impl Writing {
    /// Creates a new file, accessible to its owner only.
    pub fn create(path: &Path) -> io::Result<Writing> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Writing { file, length: 0, block: Vec::with_capacity(BLOCK), sums: Vec::new() })
    }

    /// Returns the number of bytes so far.
    pub fn length(&self) -> u64 {
        self.length + self.block.len() as u64
    }

    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = bytes.len().min(BLOCK - self.block.len());
            self.block.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.block.len() == BLOCK {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.block.is_empty() {
            self.file.write_all_at(&self.block, self.length)?;
            self.sums.extend(crc32fast::hash(&self.block).to_le_bytes());
            self.length += self.block.len() as u64;
            self.block.clear();
        }
        Ok(())
    }

    /// Writes the end of the file. Returns the size of the file.
    pub fn finish(mut self, meta: &Meta) -> io::Result<u64> {
        self.flush()?;
        write_end(&self.file, self.length, &self.sums, meta)
    }
}

/// Writes the part of the file after the body. Returns the size of the file.
fn write_end(file: &File, length: u64, sums: &[u8], meta: &Meta) -> io::Result<u64> {
    let head = serde_json::to_vec(meta)?;
    let size = u32::try_from(head.len()).ok().filter(|n| *n <= HEAD_MAX);
    let size = size.ok_or_else(|| io::Error::other("a head of more than 1 MB"))?;
    let mut end = [sums, &head, MAGIC, &length.to_le_bytes(), &size.to_le_bytes()].concat();
    let sum = sum(sums, &head, length, size);
    end.extend(sum.to_le_bytes());
    file.write_all_at(&end, length)?;
    file.set_len(length + end.len() as u64)?;
    Ok(length + end.len() as u64)
}

fn sum(sums: &[u8], head: &[u8], length: u64, size: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    [sums, head, &length.to_le_bytes(), &size.to_le_bytes()].into_iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// A stored reply with verified metadata. The body is verified as it is read.
#[derive(Debug)]
pub(crate) struct Stored {
    file: File,
    /// Length of the body in bytes.
    pub length: u64,
    sums: Vec<u8>,
    pub meta: Meta,
    /// Size of the file in bytes.
    pub(super) size: u64,
}

fn damaged() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Stored {
    /// Opens a stored reply and verifies everything except the body.
    ///
    /// # Errors
    /// `InvalidData` if the file is damaged, or the error of the system, for example if there is no such file.
    pub fn open(path: &Path) -> io::Result<Stored> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let body_and_end = size.checked_sub(FOOT).ok_or_else(damaged)?;
        let mut foot = [0; FOOT as usize];
        file.read_exact_at(&mut foot, body_and_end)?;
        let (magic, rest) = foot.split_at(8);
        let number = |at: usize| rest[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | u32::from(*b));
        let length = u64::from(number(4)) << 32 | u64::from(number(0));
        let (head, sum_of_end) = (number(8), number(12));
        let sums = length.div_ceil(BLOCK as u64).checked_mul(4).ok_or_else(damaged)?;
        let end = sums.checked_add(u64::from(head)).ok_or_else(damaged)?;
        if magic != MAGIC || head > HEAD_MAX || length.checked_add(end) != Some(body_and_end) {
            return Err(damaged());
        }
        let mut end = vec![0; end as usize]; // no longer than the file
        file.read_exact_at(&mut end, length)?;
        let head_bytes = end.split_off(sums as usize);
        if sum(&end, &head_bytes, length, head) != sum_of_end {
            return Err(damaged());
        }
        let meta = serde_json::from_slice(&head_bytes).map_err(|_| damaged())?;
        Ok(Stored { file, length, sums: end, meta, size })
    }

    /// Returns the block of the body that begins at `at`; empty at the end.
    ///
    /// # Errors
    /// `InvalidData` if the block is damaged, or the error of the system.
    pub fn block(&self, at: u64) -> io::Result<Vec<u8>> {
        let n = usize::try_from(self.length - at).unwrap_or(usize::MAX).min(BLOCK);
        let mut block = vec![0; n];
        self.file.read_exact_at(&mut block, at)?;
        let index = (at / BLOCK as u64) as usize * 4; // each block has a sum
        if n > 0 && self.sums[index..index + 4] != crc32fast::hash(&block).to_le_bytes() {
            return Err(damaged());
        }
        Ok(block)
    }

    /// Rewrites the metadata in place. The file must not be opened meanwhile. Returns the size of the file.
    pub fn rewrite(&self, path: &Path, meta: &Meta) -> io::Result<u64> {
        let file = OpenOptions::new().write(true).open(path)?;
        write_end(&file, self.length, &self.sums, meta)
    }
}
