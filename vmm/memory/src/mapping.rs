//! Host memory behind guest RAM.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::Arc,
};

use base::memfd::{self, Pages};

/// Alignment of every mapping: nested page tables can then use 2 MiB pages, because guest
/// addresses of RAM regions are multiples of it too.
const ALIGNMENT: usize = 2 << 20;

/// Inaccessible bytes below every mapping. The kernel places the next mapping right below: a thread's 2 MiB stack would
/// then start and end at multiples of 2 MiB, and become a huge page as soon as it is touched, where transparent huge
/// pages are always on (and Linux is older than 6.7).
const GUARD: usize = 64 << 10;

/// How a region's memory is allocated.
#[derive(Clone, Debug, Default)]
pub struct Backing {
    /// Other processes can map it: uses a memfd or the file itself, instead of private memory.
    pub shared: bool,
    /// Size of the huge pages to use, in bytes; `Some(0)` for the host's default size.
    pub hugepages: Option<u64>,
    /// A file, or a directory for an unnamed file (hugetlbfs, tmpfs).
    pub file: Option<PathBuf>,
    /// The kernel may use transparent huge pages.
    pub transparent_hugepages: bool,
    /// The kernel may merge identical pages (KSM).
    pub mergeable: bool,
    /// Touches every page immediately.
    pub prefault: bool,
    /// Counts the memory against the host's commit limit (swap space).
    pub reserve: bool,
    /// Allocates the memory from this NUMA node of the host.
    pub host_numa_node: Option<u32>,
}

/// Memory could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The backing file failed.
    #[error("cannot use {path} as guest memory")]
    File {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A memfd could not be created.
    #[error("cannot create a memory file of {len} bytes")]
    Memfd {
        /// Wanted length in bytes.
        len: u64,
        /// Why.
        source: io::Error,
    },
    /// The memory could not be mapped.
    #[error("cannot map {len} bytes of memory{}", hugepage_hint(.hugepages))]
    Map {
        /// Wanted length in bytes.
        len: u64,
        /// Whether huge pages were requested.
        hugepages: bool,
        /// Why.
        source: io::Error,
    },
    /// The size is not a multiple of the page size.
    #[error("{len} bytes of guest memory are not a multiple of the page size {page}")]
    Unaligned {
        /// Wanted length in bytes.
        len: u64,
        /// Page size in bytes.
        page: u64,
    },
    /// The NUMA node does not exist.
    #[error("cannot take guest memory from the host's NUMA node {node}")]
    Numa {
        /// The host's node.
        node: u32,
        /// Why.
        source: io::Error,
    },
    /// A file from another process is not suitable as guest memory.
    #[error("the file that came for {len} bytes of guest memory {reason}")]
    Given {
        /// Wanted length in bytes.
        len: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Prefaulting failed.
    #[error("cannot prefault {len} bytes of guest memory: too little memory is free")]
    Prefault {
        /// Length in bytes.
        len: u64,
        /// Why.
        source: io::Error,
    },
}

fn hugepage_hint(hugepages: &bool) -> &'static str {
    if *hugepages {
        ": reserve more huge pages (/sys/kernel/mm/hugepages/*/nr_hugepages)"
    } else {
        ""
    }
}

/// The file system of the file behind memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FileSystem {
    /// Memory files without huge pages, and tmpfs.
    Tmpfs,
    /// Memory files with huge pages, and hugetlbfs.
    Hugetlbfs,
    /// Another one, or there is no file.
    Other,
}

/// An owned mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
    page: u64,
    file: Option<Arc<File>>,
    file_system: FileSystem,
    offset: u64,
    shared: bool,
    /// The file existed before, or may have: it can have contents.
    named: bool,
}

// SAFETY: a mapping is plain memory that belongs to this value; its contents are only accessed through volatile or
// atomic accesses of crate vm-memory.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out only numbers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of zeroed memory, or of the backing file's contents from `offset` (a
    /// multiple of the page size; 0 for memory without a file of that name).
    pub fn new(len: u64, backing: &Backing, offset: u64) -> Result<Self, MappingError> {
        Self::of(len, backing, offset, |end| {
            Ok(open(end, backing)?.map(Arc::new))
        })
    }

    /// Maps `len` bytes at `offset` of a file that another process created and uses as the same memory. The file is
    /// untrusted.
    pub fn given(
        len: u64,
        backing: &Backing,
        offset: u64,
        file: File,
    ) -> Result<Self, MappingError> {
        Self::of(len, backing, offset, |end| {
            check_given(&file, len, end, backing)?;
            Ok(Some(Arc::new(file)))
        })
    }

    /// `open` is called with the end of the memory in its file.
    fn of(
        len: u64,
        backing: &Backing,
        offset: u64,
        open: impl FnOnce(u64) -> Result<Option<Arc<File>>, MappingError>,
    ) -> Result<Self, MappingError> {
        let page = match backing.hugepages {
            Some(0) => default_hugepage_size(),
            Some(size) => size,
            None => 4096,
        };
        let size = usize::try_from(len)
            .ok()
            .filter(|&size| size > 0 && page.is_power_of_two() && len.is_multiple_of(page));
        let Some(size) = size else {
            return Err(MappingError::Unaligned { len, page });
        };
        let file = open(offset.saturating_add(len))?;
        // hugetlbfs has pages of its own size, whatever was asked for.
        let (file_system, block) = match file.as_deref() {
            Some(file) => file_system(file),
            None => (FileSystem::Other, page),
        };
        let page = match file_system {
            FileSystem::Hugetlbfs if len.is_multiple_of(block) => block,
            FileSystem::Hugetlbfs => return Err(MappingError::Unaligned { len, page: block }),
            FileSystem::Tmpfs | FileSystem::Other => page,
        };
        let failed = |source| MappingError::Map {
            len,
            hugepages: backing.hugepages.is_some(),
            source,
        };
        let mut flags = if backing.shared {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
        if !backing.reserve {
            flags |= libc::MAP_NORESERVE;
        }
        let fd = match &file {
            Some(file) => file.as_raw_fd(),
            None => {
                flags |= libc::MAP_ANONYMOUS;
                -1
            }
        };
        let align = ALIGNMENT.max(usize::try_from(page).unwrap_or(ALIGNMENT));
        let address = map_aligned(size, align, flags, fd, offset).map_err(failed)?;
        let mapping = Self {
            address,
            len: size,
            page,
            file,
            file_system,
            offset,
            shared: backing.shared,
            named: backing.file.as_ref().is_some_and(|path| !path.is_dir()),
        };
        if let Some(file) = mapping.file.as_ref().filter(|_| mapping.named) {
            // Whoever discards its contents now has it locked for no longer than that.
            let _ = mapping.lock(file, libc::F_RDLCK);
        }
        mapping.advise(backing);
        if let Some(node) = backing.host_numa_node {
            mapping
                .bind(node)
                .map_err(|source| MappingError::Numa { node, source })?;
        }
        if backing.prefault {
            mapping
                .prefault()
                .map_err(|source| MappingError::Prefault { len, source })?;
        }
        Ok(mapping)
    }

    /// First address, a multiple of 2 MiB.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Size of the host's pages behind it in bytes, transparent huge pages aside.
    pub fn page_size(&self) -> u64 {
        self.page
    }

    /// Offset of the memory in its file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The file that is mapped, if the memory has one.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// The file system of its file.
    pub fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// Whether other processes that map its file see the same memory.
    pub fn is_shared(&self) -> bool {
        self.shared && self.file.is_some()
    }

    /// Whether its file existed before, or may have: it can have contents.
    pub fn is_named(&self) -> bool {
        self.named
    }

    /// Locks this memory's part of a named file that others may map, before its contents are discarded. Fails if another
    /// VM uses it. Not every file system has locks.
    pub fn claim(&self) -> io::Result<()> {
        self.lock_named(libc::F_WRLCK)
    }

    /// Lets others map what was claimed.
    pub fn release_claim(&self) -> io::Result<()> {
        self.lock_named(libc::F_RDLCK)
    }

    fn lock_named(&self, kind: libc::c_int) -> io::Result<()> {
        match self.file.as_ref().filter(|_| self.named && self.shared) {
            Some(file) => self.lock(file, kind),
            None => Ok(()),
        }
    }

    /// Makes the memory, which must be claimed, read as zeroes, for a restored guest: a file that backs it may have
    /// contents of an earlier VM. Does nothing for memory that is new. Returns false if the file is mapped privately: it
    /// is not this VM's to change.
    pub fn discard_contents(&self) -> io::Result<bool> {
        let Some(file) = self.file.as_ref().filter(|_| self.named) else {
            return Ok(true);
        };
        if !self.shared {
            return Ok(false);
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let offset = libc::off_t::try_from(self.offset).map_err(io::Error::other)?;
        let len = libc::off_t::try_from(self.len).map_err(io::Error::other)?;
        // SAFETY: a system call without pointers. The memory is only accessed as bytes that may change at any time.
        match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } {
            0 => Ok(true),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Locks this memory's part of its named file: for reading as long as it is mapped, so that no VM discards the memory
    /// of another one that runs; for writing while its contents are discarded. Not every file system has locks.
    fn lock(&self, file: &File, kind: libc::c_int) -> io::Result<()> {
        // SAFETY: all-zero locks are valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = libc::off_t::try_from(self.offset).map_err(io::Error::other)?;
        lock.l_len = libc::off_t::try_from(self.len).map_err(io::Error::other)?;
        // SAFETY: the kernel reads the lock, which outlives the call.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "another VM uses this memory file: name another file",
            )),
            _ => {
                log::debug!("a memory file is not locked: {error}");
                Ok(())
            }
        }
    }

    /// Gives hints to the kernel; they have no effect if it lacks the feature.
    fn advise(&self, backing: &Backing) {
        let mut advice = vec![(libc::MADV_DONTDUMP, "leave guest memory out of core dumps")];
        if backing.transparent_hugepages && backing.hugepages.is_none() {
            advice.push((libc::MADV_HUGEPAGE, "use transparent huge pages"));
        }
        if backing.mergeable {
            advice.push((libc::MADV_MERGEABLE, "merge equal pages"));
        }
        for (advice, what) in advice {
            // SAFETY: the range is this mapping; none of the hints changes its contents.
            if unsafe { libc::madvise(self.address.as_ptr().cast(), self.len, advice) } != 0 {
                log::debug!("the kernel does not {what}: {}", io::Error::last_os_error());
            }
        }
    }

    fn bind(&self, node: u32) -> io::Result<()> {
        const MPOL_BIND: libc::c_ulong = 2;
        let mut mask = [0_u64; 16];
        let word = mask
            .get_mut(node as usize / 64)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        *word = 1 << (node % 64);
        // SAFETY: the range is this mapping and the mask outlives the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address.as_ptr(),
                self.len,
                MPOL_BIND,
                mask.as_ptr(),
                mask.len() * 64,
                0,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    fn prefault(&self) -> io::Result<()> {
        loop {
            // SAFETY: the range is this mapping; populating does not change its contents.
            let result = unsafe {
                libc::madvise(
                    self.address.as_ptr().cast(),
                    self.len,
                    libc::MADV_POPULATE_WRITE,
                )
            };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                _ => return Err(error),
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let guard = self.address.as_ptr().wrapping_sub(GUARD);
        // SAFETY: both were mapped by `new` and are owned by this value; nothing refers to addresses in the guard.
        unsafe {
            libc::munmap(guard.cast(), GUARD);
            libc::munmap(self.address.as_ptr().cast(), self.len);
        }
    }
}

/// Maps `size` bytes at a multiple of `align`, by cutting them out of a larger reservation. [`GUARD`] bytes below them
/// are kept.
fn map_aligned(
    size: usize,
    align: usize,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: u64,
) -> io::Result<NonNull<u8>> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let out_of_space = || io::Error::from_raw_os_error(libc::ENOMEM);
    let around = align.checked_add(GUARD).ok_or_else(out_of_space)?;
    let reserved = size.checked_add(around).ok_or_else(out_of_space)?;
    let mmap = |at: usize, len, prot, flags, fd, offset| {
        // SAFETY: without MAP_FIXED the kernel picks unused addresses; with it (below) the range
        // lies inside of a reservation that nobody else knows.
        let address = unsafe { libc::mmap(at as *mut _, len, prot, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(address as usize)
        }
    };
    let munmap = |at: usize, len: usize| {
        if len > 0 {
            // SAFETY: part of the reservation, which nobody else knows.
            unsafe { libc::munmap(at as *mut _, len) };
        }
    };
    let quiet = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let start = mmap(0, reserved, libc::PROT_NONE, quiet, -1, 0)?;
    // Cannot overflow: both lie in the reservation.
    let aligned = (start + GUARD).next_multiple_of(align);
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let mapped = match mmap(aligned, size, prot, flags | libc::MAP_FIXED, fd, offset) {
        Ok(address) => address,
        Err(error) => {
            munmap(start, reserved);
            return Err(error);
        }
    };
    munmap(start, aligned - GUARD - start);
    munmap(aligned + size, start + reserved - aligned - size);
    NonNull::new(mapped as *mut u8).ok_or_else(out_of_space)
}

/// Opens the file that backs the memory, at least `len` bytes long; `None` for private memory without huge pages or a
/// path.
fn open(len: u64, backing: &Backing) -> Result<Option<File>, MappingError> {
    if let Some(path) = &backing.file {
        let failed = |source| MappingError::File {
            path: path.clone(),
            source,
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let file = if path.is_dir() {
            options.custom_flags(libc::O_TMPFILE).mode(0o600).open(path)
        } else {
            options.create(true).truncate(false).mode(0o600).open(path)
        }
        .map_err(failed)?;
        if file.metadata().map_err(failed)?.len() < len {
            file.set_len(len).map_err(failed)?;
        }
        return Ok(Some(file));
    }
    if !backing.shared && backing.hugepages.is_none() {
        return Ok(None);
    }
    let pages = match backing.hugepages {
        None => Pages::Usual,
        Some(0) => Pages::Huge,
        Some(size) => Pages::HugeOf(size),
    };
    // A process that gets the file, to serve a device, must not be able to shrink it: accessing the missing memory
    // would kill Gantry and the guest.
    memfd::sealed_of(c"guest-ram", len, pages)
        .map(Some)
        .map_err(|source| MappingError::Memfd { len, source })
}

/// Rejects a file whose memory could be taken away later, and one that is too short.
fn check_given(file: &File, len: u64, end: u64, backing: &Backing) -> Result<(), MappingError> {
    let given = |reason| Err(MappingError::Given { len, reason });
    if !backing.shared {
        return given("is of no use for private memory (shared=on)");
    }
    let metadata = file
        .metadata()
        .map_err(|source| MappingError::Memfd { len, source })?;
    if !metadata.is_file() || metadata.len() < end {
        return given("is too short, or no file");
    }
    // SAFETY: asks for flags of a descriptor that is open.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    // A named file has no seals: whoever configures one trusts everyone who can write it.
    if backing.file.is_none() && (seals < 0 || seals & libc::F_SEAL_SHRINK == 0) {
        return given("can be shortened while it is in use: it is not sealed");
    }
    Ok(())
}

/// The file system of a file, and the size of its blocks in bytes; on hugetlbfs these are the pages.
fn file_system(file: &File) -> (FileSystem, u64) {
    // SAFETY: all zeroes are a valid value of this plain struct.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the struct outlives the call.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) };
    let kind = match (result, stat.f_type) {
        (0, libc::HUGETLBFS_MAGIC) if stat.f_bsize > 0 => FileSystem::Hugetlbfs,
        (0, libc::TMPFS_MAGIC) => FileSystem::Tmpfs,
        _ => FileSystem::Other,
    };
    (kind, stat.f_bsize.unsigned_abs())
}

/// Whether a file, or one that is yet to be created, is on hugetlbfs: its pages are huge, whatever was asked for.
pub fn is_on_hugetlbfs(path: &Path) -> bool {
    // Nothing is opened but the name, so that nothing can block.
    let is_huge = |path: &Path| {
        let mut options = std::fs::OpenOptions::new();
        let named = options.read(true).custom_flags(libc::O_PATH).open(path);
        Some(file_system(&named.ok()?).0 == FileSystem::Hugetlbfs)
    };
    // Until the file is there, its folder says.
    let found = is_huge(path).or_else(|| is_huge(path.parent()?));
    found == Some(true)
}

/// The host's default huge page size in bytes (`Hugepagesize` of /proc/meminfo).
fn default_hugepage_size() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse::<u64>().ok())
        .map_or(2 << 20, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use std::{ffi::CString, os::unix::ffi::OsStrExt};

    use super::*;

    #[test]
    fn a_file_that_is_mapped_elsewhere_is_not_claimed() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing {
            shared: true,
            file: Some(dir.path().join("ram")),
            ..Backing::default()
        };
        let own = Mapping::new(2 << 20, &backing, 0).unwrap();
        let others = Mapping::new(2 << 20, &backing, 0).unwrap();
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { others.address().write(7) };
        let error = own.claim().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
        // Another part of the file is not theirs.
        let behind = Mapping::new(2 << 20, &backing, 2 << 20).unwrap();
        behind.claim().unwrap();
        drop(others);
        own.claim().unwrap();
        assert!(own.discard_contents().unwrap());
        // SAFETY: as above.
        assert_eq!(unsafe { own.address().read() }, 0);
    }

    #[test]
    fn files_of_hugetlbfs_are_known_before_they_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("huge");
        std::fs::create_dir(&at).unwrap();
        assert!(!is_on_hugetlbfs(&at) && !is_on_hugetlbfs(&at.join("ram")));
        let path = CString::new(at.as_os_str().as_bytes()).unwrap();
        let kind = c"hugetlbfs".as_ptr();
        // SAFETY: the strings outlive the calls.
        let mounted = unsafe { libc::mount(kind, path.as_ptr(), kind, 0, std::ptr::null()) };
        if mounted != 0 {
            let error = io::Error::last_os_error();
            eprintln!("not tested: hugetlbfs cannot be mounted: {error}");
            return;
        }
        let known = [at.clone(), at.join("ram")].map(|path| is_on_hugetlbfs(&path));
        // SAFETY: as above.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        assert_eq!(known, [true; 2]);
    }

    #[test]
    fn what_the_kernel_places_below_memory_is_no_huge_page() {
        /// A thread's stack, and a page that guards it.
        const STACK: usize = 2 << 20;
        const OWN_GUARD: usize = 4 << 10;
        for shared in [false, true] {
            let backing = Backing {
                shared,
                ..Backing::default()
            };
            let mapping = Mapping::new(4 << 20, &backing, 0).unwrap();
            let start = mapping.address() as usize;
            assert!(start.is_multiple_of(ALIGNMENT));
            // Other threads map memory, too: what matters is where such a stack would be.
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let below = maps.lines().find_map(|line| {
                let (from, rest) = line.split_once('-')?;
                let (to, rest) = rest.split_once(' ')?;
                let number = |text| usize::from_str_radix(text, 16).ok();
                (number(to)? == start).then_some((number(from)?, rest.starts_with("---p")))
            });
            let (from, nobodys) = below.expect("nothing is below it");
            assert!(nobodys && start - from >= GUARD);
            let stack = start - GUARD - STACK - OWN_GUARD..start - GUARD;
            let huge = stack.start.next_multiple_of(ALIGNMENT);
            assert!(huge + ALIGNMENT > stack.end);
        }
    }

    #[test]
    fn mappings_are_aligned_for_huge_pages() {
        for backing in [
            Backing::default(),
            Backing {
                shared: true,
                ..Default::default()
            },
        ] {
            let mapping = Mapping::new(3 << 20, &backing, 0).unwrap();
            assert_eq!(mapping.address() as usize % ALIGNMENT, 0);
            assert_eq!(mapping.size(), 3 << 20);
            assert_eq!(mapping.file().is_some(), backing.shared);
        }
    }

    #[test]
    fn memory_that_others_map_cannot_be_taken_away_by_them() {
        let backing = Backing {
            shared: true,
            ..Default::default()
        };
        let mapping = Mapping::new(2 << 20, &backing, 0).unwrap();
        let file = mapping.file().unwrap();
        assert!(file.set_len(0).is_err());
        assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    }

    #[test]
    fn memory_that_another_process_has_made_is_the_same_memory() {
        let backing = Backing {
            shared: true,
            ..Default::default()
        };
        let there = Mapping::new(2 << 20, &backing, 0).unwrap();
        let copy = || there.file().unwrap().try_clone().unwrap();
        let here = Mapping::given(1 << 20, &backing, 1 << 20, copy()).unwrap();
        // SAFETY: inside of the mappings, which nobody else uses.
        unsafe {
            *there.address().add(1 << 20) = 7;
            assert_eq!(*here.address(), 7);
        }
        // Too short, not sealed, not shared.
        for (file, offset, backing) in [
            (copy(), 2 << 20, backing.clone()),
            (tempfile::tempfile().unwrap(), 0, backing.clone()),
            (copy(), 0, Backing::default()),
        ] {
            file.set_len(2 << 20).unwrap_or_default();
            let refused = Mapping::given(1 << 20, &backing, offset, file);
            assert!(matches!(refused, Err(MappingError::Given { .. })));
        }
    }

    #[test]
    fn memory_backed_by_a_file_is_the_files_contents() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        std::fs::write(&path, b"hello").unwrap();
        let backing = Backing {
            shared: true,
            file: Some(path.clone()),
            ..Default::default()
        };
        let mapping = Mapping::new(4096, &backing, 0).unwrap();
        // SAFETY: inside of the mapping, which nobody else uses.
        unsafe {
            assert_eq!(*mapping.address(), b'h');
            *mapping.address() = b'j';
        }
        drop(mapping);
        assert!(std::fs::read(&path).unwrap().starts_with(b"jello\0"));
    }

    #[test]
    fn regions_of_one_file_do_not_share_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        let backing = Backing {
            shared: true,
            file: Some(path.clone()),
            ..Default::default()
        };
        let first = Mapping::new(4096, &backing, 0).unwrap();
        let second = Mapping::new(4096, &backing, 4096).unwrap();
        // SAFETY: inside of the mappings, which nobody else uses.
        unsafe {
            *first.address() = 1;
            *second.address() = 2;
        }
        let file = std::fs::read(&path).unwrap();
        assert_eq!((file.len(), file[0], file[4096]), (8192, 1, 2));
    }

    #[test]
    fn odd_sizes_and_missing_directories_are_named() {
        let error = Mapping::new(5000, &Backing::default(), 0).unwrap_err();
        assert!(error.to_string().contains("5000"), "{error}");
        let file = Some("/nonexistent/ram".into());
        let error = Mapping::new(
            4096,
            &Backing {
                file,
                ..Default::default()
            },
            0,
        )
        .unwrap_err();
        assert!(error.to_string().contains("/nonexistent/ram"), "{error}");
    }
}
