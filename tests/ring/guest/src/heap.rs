//! An allocator for values that are allocated and freed in stack order, like those of a call.

use core::{
    alloc::{GlobalAlloc, Layout},
    ptr::null_mut,
    sync::atomic::{AtomicUsize, Ordering},
};

/// From behind the program to the end of the RAM of a guest with 256 MiB.
const START: usize = 16 << 20;
const END: usize = 256 << 20;

/// Only the last allocation can be freed; everything else stays allocated.
struct Stack(AtomicUsize);

// SAFETY: each place is given to one owner; there is only one CPU.
unsafe impl GlobalAlloc for Stack {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let at = self.0.load(Ordering::Relaxed);
        let start = at.next_multiple_of(layout.align());
        let end = start + layout.size();
        if end > END {
            return null_mut();
        }
        self.0.store(end, Ordering::Relaxed);
        start as *mut u8
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let start = at as usize;
        if start + layout.size() == self.0.load(Ordering::Relaxed) {
            self.0.store(start, Ordering::Relaxed);
        }
    }
}

#[global_allocator]
static HEAP: Stack = Stack(AtomicUsize::new(START));
