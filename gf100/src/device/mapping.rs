//! Memory of a file that others may change at any time.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd},
    ptr::NonNull,
};

use vm_memory::VolatileSlice;

/// A shared mapping of (parts of) files, at an address that stays.
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value, and its bytes are only accessed by volatile copies.
unsafe impl Send for Mapping {}

/// A file in memory of `len` bytes, all zero. Whoever gets it may forbid that it shrinks.
pub fn memory_file(name: &std::ffi::CStr, len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is checked.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made just now, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

fn map(
    at: *mut libc::c_void,
    flags: libc::c_int,
    file: &File,
    offset: u64,
    len: usize,
) -> io::Result<NonNull<u8>> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: callers give no address, or one within a mapping of theirs with MAP_FIXED.
    let address = unsafe {
        libc::mmap(
            at,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            // Huge pages are reserved now: one that is missing later would end this process.
            libc::MAP_SHARED | flags,
            file.as_raw_fd(),
            offset,
        )
    };
    match NonNull::new(address.cast::<u8>()) {
        Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => Ok(address),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Mapping {
    /// Maps `len` bytes of a file from `offset`, which it must have: reading behind its end would
    /// end this process.
    pub fn new(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        has(file, offset, len)?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let address = map(std::ptr::null_mut(), 0, file, offset, len)?;
        Ok(Self { address, len })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether there are none; that cannot be.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Replaces `len` bytes from `at` by those of another file from `offset`. All are multiples of
    /// the page size, and the bytes are within the mapping, or this fails.
    pub fn replace(&mut self, at: u64, file: &File, offset: u64, len: u64) -> io::Result<()> {
        has(file, offset, len)?;
        if at.checked_add(len).is_none_or(|end| end > self.len as u64) || len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: within the mapping, checked above.
        let address = unsafe { self.address.as_ptr().add(at as usize) };
        map(address.cast(), libc::MAP_FIXED, file, offset, len as usize).map(drop)
    }

    fn slice(&self, at: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let end = at.checked_add(len as u64)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: within the mapping, which lives as long as the borrow; every access to it is one
        // of a volatile slice.
        Some(unsafe { VolatileSlice::new(self.address.as_ptr().add(at as usize), len) })
    }

    /// Copies bytes out, if all of them are there.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.slice(at, data.len())
            .is_some_and(|slice| slice.copy_to(data) == data.len())
    }

    /// Copies bytes in, if there is room for all of them.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        self.slice(at, data.len())
            .map(|slice| slice.copy_from(data))
            .is_some()
    }
}

/// Whether a file has these bytes.
fn has(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let size = file.metadata()?.len();
    match offset.checked_add(len) {
        Some(end) if end <= size && len > 0 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a file of {size} bytes has no {len} bytes from {offset}"),
        )),
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used after this.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}
