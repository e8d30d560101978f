//! Memory that is backed by a file and that others may change at any time.

use std::{fs::File, io, os::fd::AsRawFd, ptr::NonNull};

use base::memfd;
use vm_memory::VolatileSlice;

/// A shared mapping of (parts of) files, at a fixed address.
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: this value owns the mapping, and its bytes are only accessed by volatile copies.
unsafe impl Send for Mapping {}

/// Creates an in-memory file of `len` zero bytes. Whoever has it may seal it against shrinking.
pub fn memory_file(name: &std::ffi::CStr, len: u64) -> io::Result<File> {
    let file = memfd::create(name)?;
    file.set_len(len)?;
    Ok(file)
}

impl Mapping {
    /// Maps `len` bytes of a file from `offset`. The file must contain them: a read beyond its end
    /// would kill this process.
    pub fn new(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        has(file, offset, len)?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: no address is given, so this replaces no mapping.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                // This reserves huge pages now: one that is missing later would kill this process.
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        match NonNull::new(address.cast::<u8>()) {
            Some(start) if address != libc::MAP_FAILED => Ok(Self {
                address: start,
                len,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it is empty, which cannot happen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Replaces `len` bytes from `at` by those of another file from `offset`. All of these must be
    /// multiples of the page size, and the range must be within the mapping; otherwise this fails
    /// and replaces nothing.
    pub fn replace(&mut self, at: u64, file: &File, offset: u64, len: u64) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // If mmap fails with MAP_FIXED, it may leave a hole, which this process's next mapping
        // would fill. So the bytes are first mapped elsewhere, where they may fail, and then moved.
        let new = Self::new(file, offset, len)?;
        // SAFETY: the target is within this mapping, as checked above. The source is `new`, which
        // nobody else has.
        let moved = unsafe {
            libc::mremap(
                new.address.as_ptr().cast(),
                new.len,
                new.len,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                self.address.as_ptr().add(at as usize),
            )
        };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // It now belongs to this mapping.
        std::mem::forget(new);
        Ok(())
    }

    fn slice(&self, at: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let end = at.checked_add(len as u64)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: within the mapping, which lives as long as the borrow. All accesses go through
        // volatile slices.
        Some(unsafe { VolatileSlice::new(self.address.as_ptr().add(at as usize), len) })
    }

    /// Reads bytes. Returns whether all of them exist.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.slice(at, data.len())
            .is_some_and(|slice| slice.copy_to(data) == data.len())
    }

    /// Writes bytes. Returns whether all of them fit.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        self.slice(at, data.len())
            .map(|slice| slice.copy_from(data))
            .is_some()
    }
}

/// Checks that a file contains these bytes.
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

#[cfg(test)]
mod tests {
    use base::memfd::Pages;

    use super::*;

    /// Size of a huge page in bytes.
    const HUGE: u64 = 2 << 20;

    /// A file that needs more huge pages than the host has free.
    fn huge_file() -> File {
        let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
        let free = std::fs::read_to_string(free);
        let free: u64 = free.map_or(0, |text| text.trim().parse().expect("a number"));
        // This does not allocate any page.
        memfd::sealed_of(c"huge", (free + 1) * HUGE, Pages::HugeOf(HUGE))
            .expect("this kernel has huge pages")
    }

    #[test]
    fn bytes_that_cannot_be_replaced_are_still_there() {
        let huge = huge_file();
        let len = huge.metadata().expect("it is open").len();
        let file = memory_file(c"home", len + HUGE).expect("there is room");
        let mut mapping = Mapping::new(&file, 0, len + HUGE).expect("it has that much");
        // Huge pages can only be mapped at multiples of their size.
        let start = mapping.address.as_ptr() as u64;
        let at = start.next_multiple_of(HUGE) - start;
        assert!(mapping.write(at, &[7]));
        let replaced = mapping.replace(at, &huge, 0, len);
        assert_eq!(
            replaced.expect_err("they are missing").raw_os_error(),
            Some(libc::ENOMEM)
        );
        // The next mapping does not take the place of these bytes.
        let next = Mapping::new(&file, HUGE, len).expect("it has that much");
        assert!(next.write(0, &[8]));
        let mut seen = [0];
        assert!(mapping.read(at, &mut seen));
        assert_eq!(seen, [7]);
    }
}
