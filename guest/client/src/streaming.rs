//! Copies that bypass the caches, for memory that a device reads next.
//!
//! A device that reads lines which are modified in a processor's caches waits for them to be
//! transferred line by line, at half the rate of reading from memory. Non-temporal stores do not
//! leave lines in the caches. A single thread stores that way more slowly than it copies, so they
//! pay off only with several threads.

use std::ptr::copy_nonoverlapping;

/// Copies memory that does not overlap, without leaving what is written in this processor's caches.
/// Whoever sees a later write of this thread also sees the copy.
///
/// # Safety
/// `from` must be readable and `to` writable for `length` bytes.
#[cfg(target_arch = "x86_64")]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// A cache line, which the processor writes out once it is complete.
    const LINE: usize = 4 * size_of::<__m128i>();

    let head = to.align_offset(LINE).min(length);
    let lines = (length - head) / LINE * LINE;
    // SAFETY: all accesses are within what the caller guarantees. After the head, `to` is aligned
    // to a cache line, and each store of a part of a line is aligned to its size.
    unsafe {
        copy_nonoverlapping(from, to, head);
        for at in (head..head + lines).step_by(LINE) {
            // One by one: the compiler makes functions of closures here, and calls them for each word.
            let line: *const __m128i = from.add(at).cast();
            let [first, second] = [_mm_loadu_si128(line), _mm_loadu_si128(line.add(1))];
            let [third, fourth] = [_mm_loadu_si128(line.add(2)), _mm_loadu_si128(line.add(3))];
            let line: *mut __m128i = to.add(at).cast();
            _mm_stream_si128(line, first);
            _mm_stream_si128(line.add(1), second);
            _mm_stream_si128(line.add(2), third);
            _mm_stream_si128(line.add(3), fourth);
        }
        let tail = head + lines;
        copy_nonoverlapping(from.add(tail), to.add(tail), length - tail);
        // No other fence orders non-temporal stores.
        _mm_sfence();
    }
}

/// As above, except that the processor decides what stays in its caches.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { copy_nonoverlapping(from, to, length) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn exactly_the_bytes_that_were_meant_are_copied(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            from in 0..70usize,
            to in 0..70usize,
        ) {
            let from = from.min(bytes.len());
            let length = bytes.len() - from;
            let mut copied = vec![0xa5u8; to + length + 70];
            // SAFETY: both have this many bytes from there on.
            unsafe { copy(bytes.as_ptr().add(from), copied.as_mut_ptr().add(to), length) };
            prop_assert_eq!(&copied[to..to + length], &bytes[from..]);
            prop_assert!(copied[..to].iter().chain(&copied[to + length..]).all(|&b| b == 0xa5));
        }
    }
}
