//! This process's memory, read and written without faults.

use std::io;

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
    done(copied, length)
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
    done(copied, bytes.len())
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
            return false;
        }
        (from, to, length) = (from + copied, to + copied, length - copied);
    }
    true
}

fn done(copied: isize, length: usize) -> io::Result<()> {
    if copied < 0 {
        return Err(io::Error::last_os_error());
    }
    if copied.cast_unsigned() != length {
        return Err(io::Error::from_raw_os_error(libc::EFAULT));
    }
    Ok(())
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
