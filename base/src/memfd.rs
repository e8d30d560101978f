//! In-memory files, which are passed to other processes as descriptors (memfd_create(2)).

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd},
};

/// The page size that backs a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The kernel's base pages.
    Usual,
    /// Huge pages of the kernel's default size.
    Huge,
    /// Huge pages of this size in bytes, a power of two.
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

/// Creates an empty file. Whoever has it may seal it.
///
/// # Errors
/// Those of memfd_create(2), for example because no descriptors are left.
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

/// Creates a file of `len` zero bytes whose size can never change. Nobody who has it can make
/// another process's access to a mapping of it fault by truncating it.
///
/// # Errors
/// As for [`create`], or the file cannot have this size.
pub fn sealed(name: &CStr, len: u64) -> io::Result<File> {
    sealed_of(name, len, Pages::Usual)
}

/// Like [`sealed`], with this page size.
///
/// # Errors
/// As for [`sealed`], or such pages are not available.
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

/// Whether a file is shared memory: in memory without a name, or on tmpfs or hugetlbfs.
///
/// Asks no file system. `fstat`, `fstatfs`, reads and accesses to a mapping of a file that a peer has sent may wait for ever
/// for whoever serves its file system (FUSE, NFS), so this comes before them.
pub fn is_shared_memory(file: impl AsFd) -> bool {
    // SAFETY: a call without pointers on an open descriptor. Only shared memory has seals, if only the one against seals.
    unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_told_from_other_files() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let named = File::create(folder.path().join("named")).unwrap();
        assert!(is_shared_memory(create(c"memory").unwrap()) && is_shared_memory(named));
        let others = ["/dev/zero", "/proc/self/exe", "/proc/version", "/"];
        for other in others.map(|path| File::open(path).unwrap()) {
            assert!(!is_shared_memory(other));
        }
    }

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
