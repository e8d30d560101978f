//! Allocations in the window: `LD_PRELOAD=libgantry_malloc.so PROGRAM`.
//!
//! The host's device reaches the window directly and other memory by a copy. Programs that copy
//! from and to what `malloc` gave them are spared that copy if their large allocations lie in the
//! window. The OpenCL driver tells this library, when it has connected, how to take space there
//! ([`gantry_malloc_serve`]); what was allocated before, what is small, and what finds no room is
//! the C library's, as ever.
//!
//! The window is shared with the worker. A program that forks and goes on using its large
//! allocations in both processes must not be run with this library: they would see each other's
//! changes. Inside a virtual machine the window belongs to a device that may be unplugged, and is
//! not cached on every processor: the driver offers nothing there.

use std::{
    ffi::{c_int, c_void},
    ptr::{copy_nonoverlapping, null_mut, write_bytes},
    sync::atomic::{AtomicUsize, Ordering},
};

/// The smallest allocation that goes into the window, in bytes: one for which a copy takes longer
/// than all else of a transfer.
const LEAST: usize = 256 << 10;
/// What space in the window is aligned to, in bytes.
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
/// The window: nothing outside it is asked about.
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Called by the driver, once: `take` gives space in the window or null, `size` is how much was
/// asked for, and `give` takes it back. The window stays where it is until the process ends.
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
    // Last: who sees it sees the others.
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

/// Whether this is the window's.
fn is_ours(pointer: *mut c_void) -> bool {
    let (start, end) = (START.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    (start..end).contains(&(pointer as usize))
}

/// The size of what is the window's.
fn size_of_ours(pointer: *mut c_void) -> usize {
    // SAFETY: something is the window's only after `gantry_malloc_serve`, which stores a `Size`.
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
        // SAFETY: it has so many bytes, and they may have been used before.
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
        // What is the C library's stays there: it grows without a copy, by moving pages.
        // SAFETY: passed on to the caller.
        return unsafe { __libc_realloc(old, size) };
    }
    if size == 0 {
        give(old);
        return null_mut();
    }
    // SAFETY: a new allocation; both have at least so many bytes and do not overlap.
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
