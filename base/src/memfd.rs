//! Files in memory, which are passed to other processes as descriptors (memfd_create(2)).

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd},
};

/// Which pages a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The kernel's usual ones.
    Usual,
    /// Huge ones of the size that is the kernel's default.
    Huge,
    /// Huge ones of so many bytes, a power of two.
    HugeOf(u64),
}

impl Pages {
    fn flags(self) -> libc::c_uint {
        match self {
            Self::Usual => 0,
            Self::Huge => libc::MFD_HUGETLB,
            Self::HugeOf(bytes) => {
                libc::MFD_HUGETLB | (bytes.trailing_zeros() << libc::MFD_HUGE_SHIFT)
            }
        }
    }
}

/// An empty file. Whoever gets it may seal it.
///
/// # Errors
/// The kernel's: there are no more descriptors.
pub fn create(name: &CStr) -> io::Result<File> {
    create_of(name, Pages::Usual)
}

fn create_of(name: &CStr, pages: Pages) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | pages.flags();
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made just now and has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A file of `len` bytes, all zero, that keeps its size for ever: nobody who has it can make another's access to a
/// mapping of it fault by shortening it.
///
/// # Errors
/// As of [`create`]; or it cannot have this size.
pub fn sealed(name: &CStr, len: u64) -> io::Result<File> {
    sealed_of(name, len, Pages::Usual)
}

/// The same, of these pages.
///
/// # Errors
/// As of [`sealed`]; or there are no such pages.
pub fn sealed_of(name: &CStr, len: u64, pages: Pages) -> io::Result<File> {
    let file = create_of(name, pages)?;
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: a call without pointers on an open descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_file_keeps_its_size() {
        let file = sealed(c"sealed", 8192).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 8192);
        for len in [0, 4096, 12288] {
            assert!(file.set_len(len).is_err());
        }
        let open = create(c"open").unwrap();
        open.set_len(4096).unwrap();
    }

    #[test]
    fn a_kind_of_huge_pages_is_asked_for_by_its_size() {
        assert_eq!(
            Pages::HugeOf(2 << 20).flags(),
            libc::MFD_HUGE_2MB | libc::MFD_HUGETLB
        );
        assert_eq!(
            Pages::HugeOf(1 << 30).flags(),
            libc::MFD_HUGE_1GB | libc::MFD_HUGETLB
        );
    }
}
