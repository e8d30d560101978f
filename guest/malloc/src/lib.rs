//! Allocations in the window: `LD_PRELOAD=libgantry_malloc.so PROGRAM`.
//!
//! The host's device accesses the window directly, but other memory only through a copy. Programs
//! that transfer from and to memory from `malloc` avoid that copy if their large allocations are in
//! the window. Once the OpenCL driver has connected, it tells this library how to allocate space
//! there ([`gantry_malloc_serve`]). Earlier allocations, small ones, and those that find no room
//! are left to the C library.
//!
//! The window is shared with the worker. A program that forks and continues to use its large
//! allocations in both processes must not be run with this library: the processes would see each
//! other's changes. Inside a VM the window belongs to a device that may be unplugged, and is not
//! cached on every processor: there the driver offers no space.

use std::{
    ffi::{c_int, c_void},
    ptr::{copy_nonoverlapping, null_mut, write_bytes},
    sync::atomic::{AtomicUsize, Ordering},
};

/// The minimum size of an allocation in the window, in bytes: one for which a copy takes longer
/// than everything else in a transfer.
const LEAST: usize = 256 << 10;
/// The alignment of space in the window, in bytes.
const PAGE: usize = 4096;

unsafe extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_memalign(alignment: usize, size: usize) -> *mut c_void;
    fn __libc_free(old: *mut c_void);
}

type Take = extern "C" fn(usize) -> *mut c_void;
type Size = extern "C" fn(*mut c_void) -> usize;
type Give = extern "C" fn(*mut c_void);

static TAKE: AtomicUsize = AtomicUsize::new(0);
static SIZE: AtomicUsize = AtomicUsize::new(0);
static GIVE: AtomicUsize = AtomicUsize::new(0);
/// The window's address range. Nothing outside it is looked up.
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Called by the driver, once. `take` allocates space in the window or returns null, `size` returns
/// the size of an allocation, and `give` frees it. The window keeps its address until the process
/// ends.
#[unsafe(no_mangle)]
pub extern "C" fn gantry_malloc_serve(
    take: Take,
    size: Size,
    give: Give,
    start: *mut c_void,
    length: usize,
) {
    START.store(start as usize, Ordering::Relaxed);
    END.store(start as usize + length, Ordering::Relaxed);
    SIZE.store(size as usize, Ordering::Relaxed);
    GIVE.store(give as usize, Ordering::Relaxed);
    // Last: a thread that sees it also sees the others.
    TAKE.store(take as usize, Ordering::Release);
}

fn take(size: usize) -> *mut c_void {
    if size < LEAST {
        return null_mut();
    }
    let take = TAKE.load(Ordering::Acquire);
    if take == 0 {
        return null_mut();
    }
    // SAFETY: only `gantry_malloc_serve` stores there, and what it stores is a `Take`.
    let take = unsafe { std::mem::transmute::<usize, Take>(take) };
    take(size)
}

/// Whether this address is in the window.
fn is_ours(pointer: *mut c_void) -> bool {
    let (start, end) = (START.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    (start..end).contains(&(pointer as usize))
}

/// The size of an allocation in the window.
fn size_of_ours(pointer: *mut c_void) -> usize {
    // SAFETY: an address is in the window only after `gantry_malloc_serve`, which stores a `Size`.
    let size = unsafe { std::mem::transmute::<usize, Size>(SIZE.load(Ordering::Relaxed)) };
    size(pointer)
}

fn give(pointer: *mut c_void) {
    // SAFETY: as above, with a `Give`.
    let give = unsafe { std::mem::transmute::<usize, Give>(GIVE.load(Ordering::Relaxed)) };
    give(pointer);
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    let taken = take(size);
    if !taken.is_null() {
        return taken;
    }
    // SAFETY: passed on to the caller.
    unsafe { __libc_malloc(size) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    let taken = count.checked_mul(size).map_or(null_mut(), take);
    if !taken.is_null() {
        // SAFETY: it has this many bytes, which may have been used before.
        unsafe { write_bytes(taken.cast::<u8>(), 0, count * size) };
        return taken;
    }
    // SAFETY: passed on to the caller.
    unsafe { __libc_calloc(count, size) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(old: *mut c_void) {
    if is_ours(old) {
        return give(old);
    }
    // SAFETY: passed on to the caller.
    unsafe { __libc_free(old) };
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(old: *mut c_void, size: usize) -> *mut c_void {
    if !is_ours(old) {
        // An allocation of the C library stays there: it grows without a copy, by remapping pages.
        // SAFETY: passed on to the caller.
        return unsafe { __libc_realloc(old, size) };
    }
    if size == 0 {
        give(old);
        return null_mut();
    }
    // SAFETY: a new allocation; both have at least this many bytes and do not overlap.
    unsafe {
        let new = malloc(size);
        if !new.is_null() {
            let kept = size_of_ours(old).min(size);
            copy_nonoverlapping(old.cast::<u8>(), new.cast(), kept);
            give(old);
        }
        new
    }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(old: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: passed on to the caller.
        Some(size) => unsafe { realloc(old, size) },
        None => {
            // SAFETY: the thread's own.
            unsafe { *libc::__errno_location() = libc::ENOMEM };
            null_mut()
        }
    }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    if alignment <= PAGE {
        let taken = take(size);
        if !taken.is_null() {
            return taken;
        }
    }
    // SAFETY: passed on to the caller.
    unsafe { __libc_memalign(alignment, size) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: passed on to the caller.
    unsafe { memalign(alignment, size) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    to: *mut *mut c_void,
    alignment: usize,
    size: usize,
) -> c_int {
    if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    // SAFETY: passed on to the caller, who wants the result written there.
    unsafe {
        let new = memalign(alignment, size);
        if new.is_null() {
            return libc::ENOMEM;
        }
        *to = new;
    }
    0
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if is_ours(pointer) {
        return size_of_ours(pointer);
    }
    let mut next = NEXT.load(Ordering::Relaxed);
    if next == 0 {
        // SAFETY: the name is a C string.
        next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc_usable_size".as_ptr()) } as usize;
        NEXT.store(next, Ordering::Relaxed);
    }
    // SAFETY: the C library's function of this name has this signature.
    match unsafe { std::mem::transmute::<usize, Option<Size>>(next) } {
        Some(size) => size(pointer),
        None => 0,
    }
}
