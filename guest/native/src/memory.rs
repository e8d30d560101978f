//! This process's memory, read and written without faults.
//!
//! In a guest, the slice is memory of a device, whose pages other processes' calls cannot reach, this process's own
//! included: there the contents go through a pipe.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use libc::{c_int, c_void};

/// Reads memory to the end of `bytes`.
pub fn read(address: u64, length: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
    let start = bytes.len();
    bytes.resize(start + length, 0);
    let local = libc::iovec {
        iov_base: bytes[start..].as_mut_ptr().cast(),
        iov_len: length,
    };
    let remote = libc::iovec {
        iov_base: address as *mut c_void,
        iov_len: length,
    };
    // SAFETY: the local vector is the new part of `bytes`; the kernel checks the other.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    let to = bytes[start..].as_mut_ptr() as usize;
    // SAFETY: as above.
    done(copied, length, || unsafe {
        copy_by_pipe(address as usize, to, length)
    })
}

/// Writes memory.
pub fn write(address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: address as *mut c_void,
        iov_len: bytes.len(),
    };
    // SAFETY: the local vector is only read. The program asked for the write with its call.
    let copied = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
    let from = bytes.as_ptr() as usize;
    // SAFETY: as above.
    done(copied, bytes.len(), || unsafe {
        copy_by_pipe(from, address as usize, bytes.len())
    })
}

/// Copies memory to other memory. Takes no lock. Answers whether all of it could be read.
///
/// # Safety
/// The memory at `to` is the caller's.
pub unsafe fn copy(mut from: usize, mut to: usize, mut length: usize) -> bool {
    /// The kernel copies less than 2 GiB at a time.
    const MOST: usize = 1 << 30;
    while length > 0 {
        let vector = |at: usize| libc::iovec {
            iov_base: at as *mut c_void,
            iov_len: length.min(MOST),
        };
        let (local, remote) = (vector(to), vector(from));
        // SAFETY: the caller's; the kernel checks the other.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        let copied = usize::try_from(copied).unwrap_or(0);
        if copied == 0 {
            // SAFETY: the caller's.
            return unsafe { copy_by_pipe(from, to, length) };
        }
        (from, to, length) = (from + copied, to + copied, length - copied);
    }
    true
}

/// Copies memory to other memory, both of which the kernel checks. Takes no lock. Answers whether all of it was copied.
///
/// # Safety
/// The memory at `to` is the caller's.
unsafe fn copy_by_pipe(mut from: usize, mut to: usize, mut length: usize) -> bool {
    let mut ends = [0; 2];
    // SAFETY: the kernel fills the array; then new descriptors that nothing else owns.
    let [reads, writes] = unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) < 0 {
            return false;
        }
        ends.map(|end| OwnedFd::from_raw_fd(end))
    };
    while length > 0 {
        // SAFETY: the kernel checks the memory.
        let put = unsafe { libc::write(writes.as_raw_fd(), from as *const c_void, length) };
        let mut left = usize::try_from(put).unwrap_or(0);
        if left == 0 {
            return false;
        }
        (from, length) = (from + left, length - left);
        while left > 0 {
            // SAFETY: the caller's; the kernel checks the memory.
            let got = unsafe { libc::read(reads.as_raw_fd(), to as *mut c_void, left) };
            let got = usize::try_from(got).unwrap_or(0);
            if got == 0 {
                return false;
            }
            (to, left) = (to + got, left - got);
        }
    }
    true
}

/// Whether all of it was copied, if need be in another way.
fn done(copied: isize, length: usize, otherwise: impl FnOnce() -> bool) -> io::Result<()> {
    if usize::try_from(copied) == Ok(length) || otherwise() {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EFAULT))
}

/// Maps as the kernel does, past the replaced function.
///
/// # Safety
/// As for `mmap`.
pub unsafe fn map(
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe {
        libc::syscall(libc::SYS_mmap, at, length, protection, flags, file, offset) as *mut c_void
    }
}

/// Children do not inherit a mapping.
pub fn keep_from_children(start: *mut c_void, length: usize) -> io::Result<()> {
    // SAFETY: this process keeps the mapping as it is.
    if unsafe { libc::madvise(start, length, libc::MADV_DONTFORK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Unmaps as the kernel does, past the replaced function.
///
/// # Safety
/// As for `munmap`.
pub unsafe fn unmap(at: *mut c_void, length: usize) -> io::Result<()> {
    // SAFETY: the caller's.
    if unsafe { libc::syscall(libc::SYS_munmap, at, length) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
