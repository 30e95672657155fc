//! What the C library does with memory that was freed.

use nix::libc;

/// Blocks of this size and more go back to the kernel as soon as they are freed.
const LARGE: i32 = 1 << 20;

/// Makes the allocator give large blocks back to the kernel, and never more than twice [`LARGE`] be left free at the end of a heap.
/// Otherwise glibc learns from the first large block that is freed, up to 32 MB, and keeps smaller ones in heaps of 64 MB, one
/// for each thread, where the windows of decoders leave gaps: three times the memory in use, for good (mallopt(3)). Call it
/// before other threads are started. With other C libraries it does nothing.
pub fn give_large_blocks_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers are passed, and it only sets numbers. An error leaves the defaults.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * LARGE);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn large_blocks_are_mapped_even_after_larger_ones_were_freed() {
        // SAFETY: it only reads numbers.
        let mapped = || unsafe { libc::mallinfo2().hblkhd };
        give_large_blocks_back();
        // The compiler leaves out blocks that nothing looks at.
        drop(black_box(vec![1_u8; 16 << 20]));
        let before = mapped();
        let block = black_box(vec![1_u8; 8 << 20]);
        assert!(mapped() >= before + block.len(), "{} after {before}", mapped());
    }
}
