//! Records of forwarded flows for the next process: bytes that the engine writes, in memory of the kernel that lives as long as the
//! entries of the flows. That memory is BPF arrays, pinned beside the tables. They are mapped, so that a record costs no system
//! call. There is one array from the start, so that a splice needs no descriptor; others are made when they are needed.
//!
//! A process may die at any moment: a record counts only if its checksum is right, which is written last.

use crate::{tables::bpffs, tables::maps::io_error};
use libbpf_rs::{MapCore, MapHandle, MapType, libbpf_sys};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    collections::HashSet,
    ffi::c_void,
    fs,
    io::{self, ErrorKind},
    num::{NonZeroU32, NonZeroUsize},
    os::fd::AsFd,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering, compiler_fence},
    },
};

/// Size of a slot in bytes. Most records take one.
const SLOT: usize = 512;
/// Checksum, length of the contents, and the slot that the record goes on in, each in 32 bits of this machine's byte order.
const HEAD: usize = 12;
/// Number of slots in an array: 2 MB.
const SLOTS: u32 = 4096;
/// Names of the pins, before their numbers.
const PIN: &str = "flow-records-";

/// Where a record is: the number of its first slot, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRecordId(NonZeroU32);

/// The records of forwarded flows.
#[derive(Debug)]
pub struct FlowRecords {
    pin: PathBuf,
    /// Maximum number of slots: a large record for each flow that the tables have room for.
    most: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    arrays: Vec<Array>,
    /// Slots that hold nothing. The last is used next.
    free: Vec<NonZeroU32>,
}

/// A mapped array. `map`: to pin it again; none in tests without a kernel.
#[derive(Debug)]
struct Array {
    at: NonNull<u8>,
    map: Option<MapHandle>,
}

// SAFETY: it owns its mapping, and is used by one thread at a time.
unsafe impl Send for Array {}

impl Array {
    const BYTES: usize = SLOTS as usize * SLOT;

    fn of(map: MapHandle) -> io::Result<Array> {
        if (map.value_size(), map.max_entries()) != (SLOT as u32, SLOTS) {
            return Err(io::Error::new(ErrorKind::InvalidData, "records of flows of another layout"));
        }
        let length = NonZeroUsize::new(Array::BYTES).expect("not empty");
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { mmap(None, length, rights, MapFlags::MAP_SHARED, map.as_fd(), 0) }?;
        Ok(Array { at: at.cast(), map: Some(map) })
    }

    /// Makes a new one, and pins it.
    fn create(pin: &Path) -> io::Result<Array> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
            map_flags: libbpf_sys::BPF_F_MMAPABLE,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::Array, Some("flow_records"), 4, SLOT as u32, SLOTS, &options);
        let map = map.map_err(io_error)?;
        bpffs::pin(map.as_fd(), pin)?;
        Array::of(map)
    }

    fn open(pin: &Path) -> io::Result<Array> {
        Array::of(MapHandle::from_pinned_path(pin).map_err(io_error)?)
    }

    fn slot(&mut self, number: usize) -> &mut [u8; SLOT] {
        assert!(number < SLOTS as usize);
        // SAFETY: within the mapping, whose memory nobody else touches: the process that had it before is dead, or has handed it over.
        unsafe { &mut *self.at.as_ptr().add(number * SLOT).cast() }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: its own mapping, which nothing refers to any more.
        let unmapped = unsafe { munmap(self.at.cast::<c_void>(), Array::BYTES) };
        debug_assert!(unmapped.is_ok());
    }
}

fn pin_of(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("{PIN}{number}"))
}

/// FNV-1a, of 32 bits. Never 0, which marks what is no record.
fn checksum(length: usize, next: u32, contents: &[u8]) -> u32 {
    let head = [length as u32, next].map(u32::to_ne_bytes);
    let bytes = head.as_flattened().iter().chain(contents);
    bytes.fold(0x811c_9dc5u32, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193)) | 1
}

fn word(slot: &[u8; SLOT], at: usize) -> u32 {
    u32::from_ne_bytes([slot[at], slot[at + 1], slot[at + 2], slot[at + 3]])
}

/// Writes the checksum of a record before or after everything else in it.
fn mark(slot: &mut [u8; SLOT], sum: u32) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: slots are aligned to their size, and borrowed by this function alone.
    unsafe { AtomicU32::from_ptr(slot.as_mut_ptr().cast()) }.store(sum, Ordering::SeqCst);
    compiler_fence(Ordering::SeqCst);
}

impl State {
    fn slot(&mut self, number: NonZeroU32) -> &mut [u8; SLOT] {
        let number = number.get() as usize - 1;
        self.arrays[number / SLOTS as usize].slot(number % SLOTS as usize)
    }

    fn add(&mut self, array: Array) {
        let first = self.arrays.len() as u32 * SLOTS + 1;
        self.arrays.push(array);
        self.free.extend((first..first + SLOTS).rev().filter_map(NonZeroU32::new));
    }

    /// Returns the contents of a record and the slot in which they go on, if the slot begins one.
    fn read(&mut self, number: NonZeroU32) -> Option<(Vec<u8>, Option<NonZeroU32>)> {
        let most = self.arrays.len() as u32 * SLOTS;
        let slot = self.slot(number);
        let [sum, length, next] = [0, 4, 8].map(|at| word(slot, at));
        let length = length as usize;
        if sum == 0 || length > FlowRecords::MOST || next > most {
            return None;
        }
        let mut contents = slot[HEAD..][..length.min(SLOT - HEAD)].to_vec();
        let rest = length - contents.len();
        let behind = NonZeroU32::new(next);
        if behind.is_some() != (rest > 0) {
            return None;
        }
        if let Some(behind) = behind {
            contents.extend(&self.slot(behind)[..rest]);
        }
        (checksum(length, next, &contents) == sum).then_some((contents, behind))
    }
}

impl FlowRecords {
    /// Length in bytes of the largest record: two slots.
    pub const MOST: usize = 2 * SLOT - HEAD;

    /// Opens the records pinned in a directory whose lock this process holds, or makes room for the first ones.
    pub(crate) fn open(pin: &Path, max_flows: u32) -> io::Result<FlowRecords> {
        let mut state = State::default();
        let pins = (0..).map(|n| pin_of(pin, n)).take_while(|path| path.exists());
        let mut pins = pins.collect::<Vec<_>>().into_iter();
        for path in pins.by_ref() {
            match Array::open(&path) {
                Ok(array) => state.add(array),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the records of an earlier process: its flows go on without their names");
                    fs::remove_file(path)?;
                    break;
                }
            }
        }
        pins.try_for_each(fs::remove_file)?; // their numbers are given again
        if state.arrays.is_empty() {
            state.add(Array::create(&pin_of(pin, 0))?);
        }
        Ok(FlowRecords { pin: pin.to_owned(), most: max_flows.saturating_mul(2), state: Mutex::new(state) })
    }

    /// Returns all records that an earlier process has left. Call it once, before the first [`FlowRecords::put`].
    pub fn left(&self) -> Vec<(FlowRecordId, Vec<u8>)> {
        let mut state = self.state();
        let (mut found, mut used) = (Vec::new(), Vec::new());
        for number in std::mem::take(&mut state.free) {
            match state.read(number) {
                Some((contents, behind)) => {
                    found.push((FlowRecordId(number), contents));
                    used.extend([Some(number), behind].into_iter().flatten());
                }
                None => state.free.push(number),
            }
        }
        let used: HashSet<_> = used.into_iter().collect();
        state.free.retain(|number| !used.contains(number));
        found
    }

    /// Writes a record. Errors: [`ErrorKind::InvalidInput`] if it is longer than [`FlowRecords::MOST`] bytes,
    /// [`ErrorKind::StorageFull`] if there are as many as flows find room, and those of bpf(2) and mmap(2).
    pub fn put(&self, contents: &[u8]) -> io::Result<FlowRecordId> {
        if contents.len() > FlowRecords::MOST {
            return Err(ErrorKind::InvalidInput.into());
        }
        let mut state = self.state();
        let (first, rest) = contents.split_at(contents.len().min(SLOT - HEAD));
        if state.free.len() < 2 {
            let arrays = state.arrays.len() as u32;
            if arrays * SLOTS >= self.most {
                return Err(ErrorKind::StorageFull.into());
            }
            let array = Array::create(&pin_of(&self.pin, arrays as usize))?;
            state.add(array);
        }
        let number = state.free.pop().expect("there are two");
        let behind = if rest.is_empty() { None } else { state.free.pop() };
        if let Some(behind) = behind {
            state.slot(behind)[..rest.len()].copy_from_slice(rest);
        }
        let next = behind.map_or(0, NonZeroU32::get);
        let slot = state.slot(number);
        slot[4..8].copy_from_slice(&(contents.len() as u32).to_ne_bytes());
        slot[8..HEAD].copy_from_slice(&next.to_ne_bytes());
        slot[HEAD..][..first.len()].copy_from_slice(first);
        mark(slot, checksum(contents.len(), next, contents));
        Ok(FlowRecordId(number))
    }

    /// Writes a record in place of another one. If it cannot be written, the old one stays.
    pub fn replace(&self, old: FlowRecordId, contents: &[u8]) -> io::Result<FlowRecordId> {
        let new = self.put(contents)?;
        self.remove(old);
        Ok(new)
    }

    /// Removes a record.
    pub fn remove(&self, id: FlowRecordId) {
        let mut state = self.state();
        let slot = state.slot(id.0);
        let behind = NonZeroU32::new(word(slot, 8));
        mark(slot, 0);
        state.free.extend(behind);
        state.free.push(id.0);
    }

    /// Pins arrays again whose pins were removed. Returns their number.
    pub(crate) fn mend(&self) -> io::Result<usize> {
        let state = self.state();
        let maps = state.arrays.iter().map(|array| &array.map).enumerate();
        let lost =
            maps.filter_map(|(n, map)| Some((pin_of(&self.pin, n), map.as_ref()?))).filter(|(pin, _)| !pin.exists());
        lost.map(|(pin, map)| bpffs::pin(map.as_fd(), &pin)).try_fold(0, |n, pinned| pinned.map(|()| n + 1))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::mman::mmap_anonymous;

    impl FlowRecords {
        /// In memory of this process.
        fn of_memory() -> FlowRecords {
            let length = NonZeroUsize::new(Array::BYTES).unwrap();
            let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let memory = unsafe { mmap_anonymous(None, length, rights, MapFlags::MAP_SHARED) }.unwrap();
            let mut state = State::default();
            state.add(Array { at: memory.cast(), map: None });
            FlowRecords { pin: PathBuf::new(), most: SLOTS, state: Mutex::new(state) }
        }

        /// What the next process would find.
        fn next(self) -> FlowRecords {
            let arrays = std::mem::take(&mut self.state().arrays);
            let mut state = State::default();
            arrays.into_iter().for_each(|array| state.add(array));
            FlowRecords { state: Mutex::new(state), ..self }
        }
    }

    #[test]
    fn the_next_process_finds_what_was_not_removed() {
        let records = FlowRecords::of_memory();
        let contents: Vec<Vec<u8>> = [0, 1, SLOT - HEAD, SLOT - HEAD + 1, FlowRecords::MOST]
            .iter()
            .map(|length| (0..*length).map(|n| n as u8).collect())
            .collect();
        let ids: Vec<_> = contents.iter().map(|contents| records.put(contents).unwrap()).collect();
        records.remove(ids[1]);
        records.replace(ids[3], b"short").unwrap();
        let refused = records.put(&vec![1; FlowRecords::MOST + 1]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        let records = records.next();
        let mut left: Vec<_> = records.left().into_iter().map(|(_, contents)| contents).collect();
        left.sort_by_key(Vec::len);
        assert_eq!(left, [&[], &b"short"[..], &contents[2], &contents[4]]);
    }

    #[test]
    fn slots_are_used_again_and_not_twice() {
        let records = FlowRecords::of_memory();
        let long = vec![7; FlowRecords::MOST];
        let mut ids = Vec::new();
        let refused = loop {
            match records.put(&long) {
                Ok(id) => ids.push(id),
                Err(e) => break e,
            }
        };
        assert_eq!((refused.kind(), ids.len()), (ErrorKind::StorageFull, SLOTS as usize / 2));
        ids.drain(..10).for_each(|id| records.remove(id));
        let records = records.next();
        assert_eq!(records.left().len(), ids.len());
        for _ in 0..10 {
            records.put(&long).unwrap();
        }
        assert!(records.put(&long).is_err());
        assert_eq!(records.next().left().len(), SLOTS as usize / 2);
    }

    /// Whatever has not reached the memory when a process died.
    #[test]
    fn half_a_record_is_not_read() {
        for length in [100, FlowRecords::MOST] {
            let records = FlowRecords::of_memory();
            let id = records.put(&vec![7; length]).unwrap();
            for at in 0..HEAD + length {
                let change = |state: &mut State| {
                    let head = state.slot(id.0);
                    let behind = NonZeroU32::new(word(head, 8));
                    let byte = if at < SLOT { &mut head[at] } else { &mut state.slot(behind.unwrap())[at - SLOT] };
                    *byte ^= 0x40;
                };
                change(&mut records.state());
                assert_eq!(records.state().read(id.0), None, "{length}: {at}");
                change(&mut records.state());
            }
            assert_eq!(records.state().read(id.0).unwrap().0.len(), length);
        }
    }
}
