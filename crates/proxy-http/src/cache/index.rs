//! The index of stored replies in memory: files, sizes, the order of their last use, and what they are purged by. It takes about
//! 220 bytes per reply.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum number of replies: 220 MB of memory, and as many files as a directory handles well.
const ENTRIES: usize = 1 << 20;
/// Maximum number of replies per URL, selected by request fields (RFC 9111, 4.1). A lookup opens each of them.
const VARIANTS: usize = 8;
/// Minimum disk space per file besides its contents, in bytes: the directory entry and the rest of the last block.
const OVERHEAD: u64 = 4096;

/// The first 128 bits of a URL's SHA-256.
pub(super) type Key = u128;

/// Hashes of a reply's URL without its pool, and of its site. Others may have the same.
pub(super) type Labels = [u64; 2];

#[derive(Debug)]
struct Slot {
    file: u64,
    bytes: u64,
    used: u64,
    /// Hash of the fields that select this reply.
    variant: u64,
    labels: Labels,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Replies of a URL, the newest last.
    of: HashMap<Key, Vec<Slot>>,
    /// Key and file by time of last use.
    order: BTreeMap<u64, (Key, u64)>,
    /// Each label with its files, and their keys.
    labelled: BTreeSet<(u64, u64, Key)>,
    bytes: u64,
    clock: u64,
}

impl Index {
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns the bytes on the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Files of this key, the newest first.
    pub fn files(&self, key: Key) -> Vec<u64> {
        self.of.get(&key).into_iter().flatten().rev().map(|s| s.file).collect()
    }

    /// Returns files with this label and higher numbers, at most so many, in their order.
    pub fn after(&self, label: u64, file: Option<u64>, most: usize) -> Vec<(u64, Key)> {
        let from = (label, file.map_or(0, |file| file + 1), Key::MIN);
        let all = self.labelled.range(from..=(label, u64::MAX, Key::MAX));
        all.map(|(_, file, key)| (*file, *key)).take(most).collect()
    }

    /// Adds a file. Returns the files that it replaces.
    pub fn add(&mut self, key: Key, file: u64, size: u64, (variant, labels): (u64, Labels)) -> Vec<u64> {
        let slots = self.of.entry(key).or_default();
        let mut gone: Vec<u64> = slots.iter().filter(|s| s.variant == variant).map(|s| s.file).collect();
        if gone.is_empty() && slots.len() >= VARIANTS {
            gone.push(slots[0].file);
        }
        self.clock += 1;
        let bytes = size + OVERHEAD;
        slots.push(Slot { file, bytes, used: self.clock, variant, labels });
        self.order.insert(self.clock, (key, file));
        self.labelled.extend(labels.map(|label| (label, file, key)));
        self.bytes += bytes;
        for file in &gone {
            self.remove(key, *file);
        }
        if self.order.len() > ENTRIES {
            gone.extend(self.evict());
        }
        gone
    }

    /// Marks a file as just used, and updates its size.
    pub fn touch(&mut self, key: Key, file: u64, size: u64) {
        let Some(slot) = self.of.get_mut(&key).and_then(|all| all.iter_mut().find(|s| s.file == file)) else { return };
        self.clock += 1;
        self.order.remove(&slot.used);
        self.order.insert(self.clock, (key, file));
        let bytes = size + OVERHEAD;
        self.bytes = self.bytes - slot.bytes + bytes;
        (slot.used, slot.bytes) = (self.clock, bytes);
    }

    /// Removes a file. Returns whether it was there.
    pub fn remove(&mut self, key: Key, file: u64) -> bool {
        let Some(slots) = self.of.get_mut(&key) else { return false };
        let Some(at) = slots.iter().position(|s| s.file == file) else { return false };
        let slot = slots.remove(at);
        if slots.is_empty() {
            self.of.remove(&key);
        }
        self.order.remove(&slot.used);
        for label in slot.labels {
            self.labelled.remove(&(label, file, key));
        }
        self.bytes -= slot.bytes;
        true
    }

    /// Removes the least recently used file, and returns it.
    pub fn evict(&mut self) -> Option<u64> {
        let (_, (key, file)) = self.order.first_key_value().map(|(used, at)| (*used, *at))?;
        self.remove(key, file).then_some(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut index = Index::default();
        for file in 1..=3 {
            assert!(index.add(file.into(), file, 1000, (0, [0, 1])).is_empty());
        }
        assert_eq!((index.len(), index.bytes()), (3, 3 * (1000 + OVERHEAD)));
        index.touch(1, 1, 2000);
        assert_eq!(index.bytes(), 4000 + 3 * OVERHEAD);
        assert_eq!([index.evict(), index.evict(), index.evict(), index.evict()], [Some(2), Some(3), Some(1), None]);
        assert_eq!((index.len(), index.bytes(), index.of.len(), index.labelled.len()), (0, 0, 0, 0));
    }

    #[test]
    fn pages_in_the_order_of_numbers() {
        let mut index = Index::default();
        for file in [5_u64, 1, 4, 2, 3, 6] {
            index.add(file.into(), file, 1, (0, [file % 2, 10]));
        }
        assert_eq!(index.after(10, None, 2), [(1, 1), (2, 2)]);
        assert_eq!(index.after(10, Some(2), 2), [(3, 3), (4, 4)]);
        assert_eq!(index.after(10, Some(4), 9), [(5, 5), (6, 6)]);
        assert_eq!(index.after(10, Some(6), 9), []);
        assert_eq!(index.after(1, None, 2), [(1, 1), (3, 3)]);
        assert_eq!(index.after(1, Some(3), 2), [(5, 5)]);
        assert!(index.remove(3, 3));
        assert_eq!(index.after(1, None, 9), [(1, 1), (5, 5)]);
        assert_eq!(index.after(2, None, 9), []);
    }

    #[test]
    fn variants() {
        let mut index = Index::default();
        assert!((0..VARIANTS as u64).all(|v| index.add(7, v, 1, (v, [0, 1])).is_empty()));
        assert_eq!(index.add(7, 100, 1, (3, [0, 1])), [3]); // replaces the same variant
        assert_eq!(index.add(7, 101, 1, (99, [0, 1])), [0]); // replaces the oldest variant
        assert_eq!(index.files(7), [101, 100, 7, 6, 5, 4, 2, 1]);
        assert!(!index.remove(7, 0) && index.remove(7, 1) && !index.remove(8, 1));
        assert_eq!((index.files(8), index.len()), (vec![], VARIANTS - 1));
    }
}
