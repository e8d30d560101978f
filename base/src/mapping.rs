//! Memory mappings that are unmapped when dropped.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    ptr::{self, NonNull},
};

/// How this process may access the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Not at all: the addresses are only reserved.
    None,
    /// Read only.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Access {
    fn protection(self) -> libc::c_int {
        match self {
            Self::None => libc::PROT_NONE,
            Self::Read => libc::PROT_READ,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// Memory of this process, in whole pages, that this value owns.
///
/// It is only handed out as pointers, since others (a device, a guest, the owner of the file) may change it at any
/// time. Whoever dereferences one must justify that it is valid; it is as long as the value lives.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the value owns the memory, and only hands it out as pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Maps at an address of the kernel's choice or, if `flags` has `MAP_FIXED`, at `at`. No swap space is reserved.
///
/// # Safety
/// With `MAP_FIXED`, nothing may rely on what is mapped at `at`.
unsafe fn map(
    at: *mut u8,
    len: usize,
    access: Access,
    flags: libc::c_int,
    file: libc::c_int,
    offset: u64,
) -> io::Result<NonNull<u8>> {
    let offset =
        libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let flags = flags | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, or one that replaces a mapping of the caller.
    let start = unsafe { libc::mmap(at.cast(), len, access.protection(), flags, file, offset) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Mapping {
    /// Maps the bytes of a file from `offset` (whole pages), shared: writes are visible on both sides.
    ///
    /// # Errors
    /// Those of mmap(2). A file that is too short is not refused: accesses beyond its end fault.
    pub fn shared(file: impl AsFd, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let file = file.as_fd().as_raw_fd();
        // SAFETY: the kernel chooses the address.
        let start = unsafe { map(ptr::null_mut(), len, access, libc::MAP_SHARED, file, offset)? };
        Ok(Self { start, len })
    }

    /// Like [`Mapping::shared`], but writes stay private to this process.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn private(file: impl AsFd, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let file = file.as_fd().as_raw_fd();
        // SAFETY: the kernel chooses the address.
        let start = unsafe {
            map(
                ptr::null_mut(),
                len,
                access,
                libc::MAP_PRIVATE,
                file,
                offset,
            )?
        };
        Ok(Self { start, len })
    }

    /// Maps zeroed memory that is not backed by a file and is private to this process.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn anonymous(len: usize, access: Access) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address.
        let start = unsafe { map(ptr::null_mut(), len, access, flags, -1, 0)? };
        Ok(Self { start, len })
    }

    /// Maps zeroed memory that is not backed by a file and is shared with the children that this process forks.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn common(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address.
        let start = unsafe { map(ptr::null_mut(), len, Access::ReadWrite, flags, -1, 0)? };
        Ok(Self { start, len })
    }

    /// Takes back a mapping that was given up by [`std::mem::forget`]. None if `start` is null.
    ///
    /// # Safety
    /// These are its start and its length, and nobody else has taken it back.
    pub unsafe fn from_raw_parts(start: *mut u8, len: usize) -> Option<Self> {
        NonNull::new(start).map(|start| Self { start, len })
    }

    /// Says whether children that this process forks inherit `len` bytes from byte `at` on (whole pages). They do,
    /// unless said otherwise. Memory of a device that they do not inherit stays that way.
    ///
    /// # Errors
    /// The range is not within the mapping, or those of madvise(2).
    pub fn inherit(&self, at: usize, len: usize, inherited: bool) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let advice = if inherited {
            libc::MADV_DOFORK
        } else {
            libc::MADV_DONTFORK
        };
        let start = self.start.as_ptr().wrapping_add(at);
        // SAFETY: within this mapping. The advice changes nothing in this process.
        match unsafe { libc::madvise(start.cast(), len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Replaces what is mapped from byte `at` on by the first `len` bytes of a file, shared. A concurrent access sees
    /// either the old or the new memory.
    ///
    /// # Errors
    /// The range is not within the mapping, or the system call fails.
    pub fn replace(
        &self,
        at: usize,
        file: impl AsFd,
        len: usize,
        access: Access,
    ) -> io::Result<()> {
        self.replace_from(at, file, 0, len, access)
    }

    /// Like [`Mapping::replace`], with the bytes of the file from `offset` (whole pages) on.
    ///
    /// # Errors
    /// As for [`Mapping::replace`].
    pub fn replace_from(
        &self,
        at: usize,
        file: impl AsFd,
        offset: u64,
        len: usize,
        access: Access,
    ) -> io::Result<()> {
        let file = file.as_fd().as_raw_fd();
        self.put(at, len, access, libc::MAP_SHARED, file, offset)
    }

    /// Replaces what is mapped from byte `at` on by private zeroed memory.
    ///
    /// # Errors
    /// The range is not within the mapping, or the system call fails.
    pub fn clear(&self, at: usize, len: usize, access: Access) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        self.put(at, len, access, flags, -1, 0)
    }

    fn put(
        &self,
        at: usize,
        len: usize,
        access: Access,
        flags: libc::c_int,
        file: libc::c_int,
        offset: u64,
    ) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let to = self.start.as_ptr().wrapping_add(at);
        let flags = flags | libc::MAP_FIXED;
        // SAFETY: within this mapping, whose memory is only referred to by pointers.
        unsafe { map(to, len, access, flags, file, offset) }.map(drop)
    }

    /// Replaces everything that is mapped by private zeroed memory. The device or file behind it may then go away:
    /// later accesses read zeroes instead of faulting.
    pub fn detach(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: this mapping, whose memory is only referred to by pointers. If the kernel has no memory for it,
        // everything stays as it is.
        let _ = unsafe {
            map(
                self.start.as_ptr(),
                self.len,
                Access::ReadWrite,
                flags,
                -1,
                0,
            )
        };
    }

    /// Replaces this mapping by another one of the same length.
    ///
    /// # Errors
    /// The lengths differ, or the system call fails.
    pub fn replace_by(&self, other: Self) -> io::Result<()> {
        if other.len != self.len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.replace_part_by(0, other)
    }

    /// Replaces what is mapped from byte `at` on by another mapping. Unlike with [`Mapping::replace`], whatever can
    /// refuse a mapping has done so before anything is replaced. A concurrent access sees either the old or the new
    /// memory.
    ///
    /// # Errors
    /// The range is not within the mapping, or the system call fails.
    pub fn replace_part_by(&self, at: usize, mut other: Self) -> io::Result<()> {
        if at.checked_add(other.len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let to = self.start.as_ptr().wrapping_add(at);
        // SAFETY: within this mapping, whose memory is only referred to by pointers.
        unsafe { other.move_to(to as usize) }?;
        // Two values now refer to one mapping; only `self` keeps it.
        std::mem::forget(other);
        Ok(())
    }

    /// Moves the mapping to another address and replaces whatever is mapped there: addresses that this process has
    /// reserved for it with a mapping without access.
    ///
    /// # Errors
    /// Those of mremap(2), for example because the address is not page aligned.
    ///
    /// # Safety
    /// Nothing may rely on what is mapped there.
    pub unsafe fn move_to(&mut self, at: usize) -> io::Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: this mapping, whose memory is only referred to by pointers; the caller vouches for the other
        // addresses.
        let start = unsafe {
            libc::mremap(
                self.start.as_ptr().cast(),
                self.len,
                self.len,
                flags,
                at as *mut libc::c_void,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(())
    }

    /// Start address, page aligned.
    #[inline]
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes, as requested.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "the kernel makes no empty one")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The whole mapping.
    pub fn bytes(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.start, self.len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; pointers into it are valid only while the value lives.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use super::*;

    const PAGE: usize = 4096;

    fn file(byte: u8, pages: usize) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![byte; pages * PAGE], 0).unwrap();
        file
    }

    fn read(mapping: &Mapping, at: usize) -> u8 {
        assert!(at < mapping.len());
        // SAFETY: within the mapping.
        unsafe { mapping.start().add(at).read_volatile() }
    }

    fn write(mapping: &Mapping, at: usize, byte: u8) {
        assert!(at < mapping.len());
        // SAFETY: within the mapping, which is writable.
        unsafe { mapping.start().add(at).write_volatile(byte) };
    }

    fn first_byte(file: &File) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn what_is_written_to_a_shared_mapping_is_in_the_file_and_to_a_private_one_is_not() {
        let file = file(1, 1);
        let shared = Mapping::shared(&file, 0, PAGE, Access::ReadWrite).unwrap();
        let private = Mapping::private(&file, 0, PAGE, Access::ReadWrite).unwrap();
        write(&private, 0, 7);
        assert_eq!((first_byte(&file), read(&private, 0)), (1, 7));
        write(&shared, 0, 2);
        assert_eq!(first_byte(&file), 2);
    }

    #[test]
    fn a_mapping_begins_at_the_offset() {
        let file = file(3, 2);
        file.write_all_at(&[4], PAGE as u64).unwrap();
        let mapping = Mapping::shared(&file, PAGE as u64, PAGE, Access::Read).unwrap();
        assert_eq!((read(&mapping, 0), read(&mapping, 1)), (4, 3));
    }

    #[test]
    fn mappings_that_were_dropped_take_no_addresses() {
        // If one mapping stayed, this would exceed the address space (128 TiB).
        for _ in 0..300 {
            Mapping::anonymous(1 << 40, Access::None).unwrap();
        }
    }

    #[test]
    fn a_part_is_replaced_by_a_file_and_nothing_outside_is() {
        let reserved = Mapping::anonymous(3 * PAGE, Access::ReadWrite).unwrap();
        write(&reserved, 0, 9);
        reserved
            .replace(PAGE, file(5, 1), PAGE, Access::Read)
            .unwrap();
        assert_eq!(
            [
                read(&reserved, 0),
                read(&reserved, PAGE),
                read(&reserved, 2 * PAGE)
            ],
            [9, 5, 0]
        );
        for at in [2 * PAGE + 1, 3 * PAGE, usize::MAX] {
            assert!(
                reserved
                    .replace(at, file(5, 1), PAGE, Access::Read)
                    .is_err()
            );
        }
    }

    #[test]
    fn a_part_is_replaced_by_another_mapping_and_nothing_outside_is() {
        let whole = Mapping::anonymous(3 * PAGE, Access::ReadWrite).unwrap();
        write(&whole, 0, 9);
        let part = |pages: usize| {
            Mapping::shared(file(5, pages), 0, pages * PAGE, Access::ReadWrite).unwrap()
        };
        whole.replace_part_by(PAGE, part(1)).unwrap();
        for (at, pages) in [(2 * PAGE, 2), (3 * PAGE, 1), (PAGE + 1, 1), (usize::MAX, 1)] {
            assert!(whole.replace_part_by(at, part(pages)).is_err(), "{at}");
        }
        assert!(whole.replace_by(part(2)).is_err());
        let bytes = [0, PAGE, 2 * PAGE].map(|at| read(&whole, at));
        assert_eq!(bytes, [9, 5, 0]);
    }

    #[test]
    fn what_was_detached_reads_as_zeroes_also_after_the_file_is_truncated() {
        let file = file(6, 1);
        let mapping = Mapping::shared(&file, 0, PAGE, Access::Read).unwrap();
        assert_eq!(read(&mapping, 0), 6);
        mapping.detach();
        file.set_len(0).unwrap();
        assert_eq!(read(&mapping, 0), 0);
        write(&mapping, 0, 1);
    }

    #[test]
    fn a_child_has_the_pages_that_it_is_to_inherit_and_shares_common_ones() {
        let (own, common) = (
            Mapping::anonymous(2 * PAGE, Access::ReadWrite).unwrap(),
            Mapping::common(PAGE).unwrap(),
        );
        own.inherit(0, 2 * PAGE, false).unwrap();
        own.inherit(PAGE, PAGE, true).unwrap();
        assert!(own.inherit(PAGE, 2 * PAGE, true).is_err());
        // SAFETY: the child only makes system calls and writes to memory.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let has = |at| {
                let mut seen = 0u8;
                // SAFETY: one entry, for a page of the mapping that may be missing.
                0 == unsafe { libc::mincore(own.start().add(at).cast(), PAGE, &raw mut seen) }
            };
            write(&common, 0, u8::from(has(0)) | u8::from(has(PAGE)) << 1);
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: no pointers but null.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
        assert_eq!(read(&common, 0), 2);
    }

    #[test]
    fn an_offset_that_no_file_has_is_refused() {
        let refused = Mapping::shared(file(0, 1), u64::MAX, PAGE, Access::Read).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}
