//! The replaced functions of the C library. Each asks whether it is about a device file, and is the original if not.

use std::{
    ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void},
    io,
    mem::{transmute, zeroed},
    os::fd::{AsRawFd, RawFd},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{mode_t, off_t, pollfd, sigset_t, stat as Stat, statx as Statx, timespec};
use nvidia_abi::{
    Kind,
    wire::{DEVICE, MANAGED, Operation, SLICE},
};

use crate::{
    files::{self, Attributes, File, program},
    managed, managed_ranges, memory,
};

/// What the paths of all device files begin with.
const PREFIX: &[u8] = b"/dev/nvidia";

/// The next definition of a function: the C library's.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its address, or null if there is none.
    fn address(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a valid name.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next definition of a function of the type `$type`.
macro_rules! next {
    ($name:literal, $type:ty, $($argument:expr),*) => {{
        static NEXT: Next = Next::new($name);
        let address = NEXT.address();
        if address.is_null() {
            return fail(libc::ENOSYS);
        }
        // SAFETY: the C library defines the function with this type. The arguments are the caller's.
        unsafe { transmute::<*mut c_void, $type>(address)($($argument),*) }
    }};
}

fn fail(error: c_int) -> c_int {
    // SAFETY: it is this thread's own.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn answer(result: io::Result<c_int>) -> c_int {
    result.unwrap_or_else(|error| fail(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// The path, if it is one of a device file.
///
/// # Safety
/// The pointer is null or a valid string for `'a`.
unsafe fn device<'a>(path: *const c_char) -> Option<&'a [u8]> {
    if path.is_null() {
        return None;
    }
    for (at, byte) in PREFIX.iter().enumerate() {
        // SAFETY: the bytes before this one are not its end.
        if unsafe { path.add(at).read() }.cast_unsigned() != *byte {
            return None;
        }
    }
    // SAFETY: the caller's.
    Some(unsafe { CStr::from_ptr(path) }.to_bytes())
}

type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, mode_t) -> c_int;

/// # Safety
/// As for `openat`.
unsafe fn open_at(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's.
    if let Some(path) = unsafe { device(path) } {
        return answer(program().open(path, flags));
    }
    next!(c"openat", OpenAt, folder, path, flags, mode)
}

/// Replaces `open`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

/// Replaces `open64`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(libc::AT_FDCWD, path, flags | libc::O_LARGEFILE, mode) }
}

/// Replaces `openat`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(folder, path, flags, mode) }
}

/// Replaces `openat64`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(folder, path, flags | libc::O_LARGEFILE, mode) }
}

/// Replaces the checked `open`, which has no mode.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
}

/// Replaces the checked `open64`, which has no mode.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(libc::AT_FDCWD, path, flags | libc::O_LARGEFILE, 0) }
}

/// Replaces the checked `openat`, which has no mode.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_at(folder, path, flags, 0) }
}

/// Whether a command may be one of a device file: type `F`, or those of unified memory.
fn is_candidate(command: u32) -> bool {
    command >> 8 & 0xff == u32::from(b'F')
        || (1..0x80).contains(&command)
        || (0x3000_0001..=0x3000_0002).contains(&command)
}

/// Replaces `ioctl`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: c_int, command: c_ulong, argument: c_ulong) -> c_int {
    // The kernel looks at the low half only.
    let word = command as u32;
    if is_candidate(word) && is_socket(file) {
        let mut program = program();
        match program.find(file) {
            Ok(Some(known)) => return answer(program.call(known, word, argument)),
            Ok(None) => {}
            Err(error) => return answer(Err(error)),
        }
    }
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_ioctl, file, command, argument) as c_int }
}

fn is_socket(file: c_int) -> bool {
    // SAFETY: zeroes are a valid value.
    let mut found: Stat = unsafe { zeroed() };
    // SAFETY: the kernel writes the value.
    let result = unsafe { libc::syscall(libc::SYS_fstat, file, &raw mut found) };
    result == 0 && found.st_mode & libc::S_IFMT == libc::S_IFSOCK
}

/// Maps a device file from where the worker says.
fn map_device(
    known: File,
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    offset: off_t,
) -> io::Result<*mut c_void> {
    let is_unified = known.kind == Kind::Uvm;
    let usual = libc::PROT_READ | libc::PROT_WRITE;
    let is_usual = flags & libc::MAP_TYPE != libc::MAP_PRIVATE && protection & usual == usual;
    if is_unified && !is_usual {
        // As the driver.
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut program = program();
    if is_unified && flags & libc::MAP_FIXED != 0 && managed_ranges::is_among(at as usize, length) {
        // What was there goes first: the worker knows a range by its address.
        // SAFETY: the program asked for something else to be mapped there.
        unsafe { memory::unmap(at, length)? };
        program.replaced(at as usize, length);
    }
    let connection = program.connection()?;
    let reply = connection.ask(
        Operation::Map,
        known.number,
        offset.cast_unsigned(),
        length as u64,
    )?;
    let from = reply.answer.a;
    let file = match from {
        SLICE | MANAGED => connection.slice.as_raw_fd(),
        _ => reply
            .file
            .as_ref()
            .ok_or(io::ErrorKind::InvalidData)?
            .as_raw_fd(),
    };
    let place = reply.answer.b.cast_signed();
    // A child has no business with a device's pages, nor, where the slice is a device's memory, with the driver's: both
    // may be another program's when this one has ended. Of memory that the program has pinned it gets a copy.
    let is_own = from == DEVICE || from == SLICE && connection.shown.is_device();
    // SAFETY: the mapping that the program asked for, of another file.
    let mapped = unsafe { memory::map(at, length, protection, flags, file, place) };
    let mut result = if mapped == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(mapped)
    };
    if is_own {
        result = result.and_then(|mapped| {
            let kept = memory::keep_from_children(mapped, length);
            kept.map(|()| mapped).inspect_err(|_| {
                // SAFETY: it was made above.
                let _ = unsafe { memory::unmap(mapped, length) };
            })
        });
    }
    if from == MANAGED {
        let noted = result.and_then(|mapped| {
            let start = mapped as usize;
            let noted = if start as u64 == offset.cast_unsigned() {
                program.note_managed(start, length, reply.answer.b, known.number)
            } else {
                // The address is that of the GPUs, too.
                Err(io::Error::from_raw_os_error(libc::EINVAL))
            };
            noted.map(|()| mapped).inspect_err(|_| {
                // SAFETY: it was made above.
                let _ = unsafe { memory::unmap(mapped, length) };
            })
        });
        result = noted.inspect_err(|_| {
            let length = length.next_multiple_of(4096);
            program.free_range(known.number, offset.cast_unsigned() as usize, length);
        });
    }
    result
}

/// Replaces `mmap`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    if file >= 0 && flags & libc::MAP_ANONYMOUS == 0 && files::in_use() && is_socket(file) {
        let known = program().known(file);
        if let Some(known) = known {
            return map_device(known, at, length, protection, flags, offset).unwrap_or_else(
                |error| {
                    answer(Err(error));
                    libc::MAP_FAILED
                },
            );
        }
    }
    // SAFETY: the caller's.
    let map = || unsafe { memory::map(at, length, protection, flags, file, offset) };
    if flags & libc::MAP_FIXED == 0 {
        return map();
    }
    let mapped = managed::replacing(at as usize, length, || match map() {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        mapped => Ok(mapped),
    });
    mapped.unwrap_or_else(|error| {
        answer(Err(error));
        libc::MAP_FAILED
    })
}

/// Replaces `munmap`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(at: *mut c_void, length: usize) -> c_int {
    // SAFETY: the caller's.
    let unmap = || unsafe { memory::unmap(at, length) };
    answer(managed::replacing(at as usize, length, unmap).map(|()| 0))
}

/// Replaces `mmap64`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap(at, length, protection, flags, file, offset) }
}

const EVENT: i16 = libc::POLLIN | libc::POLLPRI;

/// Waits for readable bytes where the program waits for an event of a device file only. Answers the entries that were
/// changed.
fn widen(entries: &mut [pollfd]) -> bool {
    let mut is_widened = false;
    for entry in entries {
        if entry.events & EVENT == libc::POLLPRI && program().known(entry.fd).is_some() {
            entry.events |= libc::POLLIN;
            is_widened = true;
        }
    }
    is_widened
}

/// Takes the bytes of events, as the driver forgets an event once it was polled, and reports the event.
fn take_events(entries: &mut [pollfd], wished: impl Fn(usize) -> i16) {
    for (index, entry) in entries.iter_mut().enumerate() {
        if entry.revents & libc::POLLIN == 0
            || !is_socket(entry.fd)
            || program().known(entry.fd).is_none()
        {
            continue;
        }
        let mut bytes = [0u8; 16];
        // SAFETY: the kernel writes at most the array. Whoever polls a device file has no other reader of its bytes.
        while unsafe {
            libc::recv(
                entry.fd,
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT,
            )
        } > 0
        {}
        entry.revents = entry.revents & !EVENT | EVENT & wished(index);
    }
}

/// # Safety
/// `entries` has `count` entries, and `wait` is the original on them.
unsafe fn poll_with(
    entries: *mut pollfd,
    count: libc::nfds_t,
    wait: impl FnOnce() -> c_int,
) -> c_int {
    if !files::in_use() || entries.is_null() || count == 0 || count > 1 << 16 {
        return wait();
    }
    // SAFETY: the caller's.
    let list = unsafe { std::slice::from_raw_parts_mut(entries, count as usize) };
    let wished: Vec<i16> = list.iter().map(|entry| entry.events).collect();
    let is_widened = widen(list);
    let result = wait();
    if is_widened {
        for (entry, wished) in list.iter_mut().zip(&wished) {
            entry.events = *wished;
        }
    }
    if result > 0 {
        // SAFETY: it is this thread's own.
        let error = unsafe { *libc::__errno_location() };
        take_events(list, |index| wished.get(index).copied().unwrap_or_default());
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = error };
    }
    result
}

/// Replaces `poll`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(entries: *mut pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    type Poll = unsafe extern "C" fn(*mut pollfd, libc::nfds_t, c_int) -> c_int;
    let wait = || next!(c"poll", Poll, entries, count, timeout);
    // SAFETY: the caller's.
    unsafe { poll_with(entries, count, wait) }
}

/// Replaces `ppoll`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    entries: *mut pollfd,
    count: libc::nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    type Ppoll =
        unsafe extern "C" fn(*mut pollfd, libc::nfds_t, *const timespec, *const sigset_t) -> c_int;
    let wait = || next!(c"ppoll", Ppoll, entries, count, timeout, signals);
    // SAFETY: the caller's.
    unsafe { poll_with(entries, count, wait) }
}

/// Fills in what is known of a device file.
fn fill(found: &mut Stat, (device, mode): Attributes) {
    found.st_mode = mode as mode_t;
    found.st_rdev = device;
    found.st_nlink = 1;
    found.st_blksize = 4096;
}

type StatAt = unsafe extern "C" fn(c_int, *const c_char, *mut Stat, c_int) -> c_int;

/// # Safety
/// As for `fstatat`.
unsafe fn stat_at(folder: c_int, path: *const c_char, found: *mut Stat, flags: c_int) -> c_int {
    // SAFETY: the caller's.
    if let Some(path) = unsafe { device(path) } {
        return answer(program().attributes(path).map(|attributes| {
            // SAFETY: zeroes are a valid value.
            let mut value: Stat = unsafe { zeroed() };
            fill(&mut value, attributes);
            // SAFETY: the caller's.
            unsafe { found.write(value) };
            0
        }));
    }
    next!(c"fstatat", StatAt, folder, path, found, flags)
}

/// Replaces `stat`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, 0) }
}

/// Replaces `stat64`, which is the same.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, 0) }
}

/// Replaces `lstat`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lstat(path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, libc::AT_SYMLINK_NOFOLLOW) }
}

/// Replaces `lstat64`, which is the same.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lstat64(path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, libc::AT_SYMLINK_NOFOLLOW) }
}

/// Replaces `stat` of older programs.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat(_: c_int, path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, 0) }
}

/// Replaces `stat64` of older programs.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat64(_: c_int, path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, 0) }
}

/// Replaces `lstat` of older programs.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __lxstat(_: c_int, path: *const c_char, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { stat_at(libc::AT_FDCWD, path, found, libc::AT_SYMLINK_NOFOLLOW) }
}

/// Replaces `fstat`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat(file: RawFd, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    let result = unsafe { libc::syscall(libc::SYS_fstat, file, found) } as c_int;
    if result == 0 && files::in_use() && is_socket(file) {
        let known = program()
            .known(file)
            .filter(|known| known.attributes.1 != 0);
        if let Some(known) = known {
            // SAFETY: the kernel has filled it.
            fill(unsafe { &mut *found }, known.attributes);
        }
    }
    result
}

/// Replaces `fstat64`, which is the same.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat64(file: RawFd, found: *mut Stat) -> c_int {
    // SAFETY: the caller's.
    unsafe { fstat(file, found) }
}

/// Replaces `statx`.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn statx(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    found: *mut Statx,
) -> c_int {
    // SAFETY: the caller's.
    if let Some(path) = unsafe { device(path) } {
        return answer(program().attributes(path).map(|(device, mode)| {
            // SAFETY: zeroes are a valid value.
            let mut value: Statx = unsafe { zeroed() };
            value.stx_mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_NLINK;
            value.stx_mode = mode as u16;
            value.stx_nlink = 1;
            value.stx_blksize = 4096;
            value.stx_rdev_major = libc::major(device);
            value.stx_rdev_minor = libc::minor(device);
            // SAFETY: the caller's.
            unsafe { found.write(value) };
            0
        }));
    }
    // SAFETY: the caller's.
    unsafe {
        libc::syscall(
            libc::SYS_statx,
            folder,
            path,
            flags,
            c_long::from(mask),
            found,
        ) as c_int
    }
}

/// Replaces `access`. The worker's rights count.
///
/// # Safety
/// As for the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    type Access = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    // SAFETY: the caller's.
    if let Some(path) = unsafe { device(path) } {
        return answer(program().attributes(path).map(|_| 0));
    }
    next!(c"access", Access, path, mode)
}
