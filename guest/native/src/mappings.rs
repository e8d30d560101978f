//! Mappings of this process, as the kernel lists them, and what of them is of the slice.

use std::{
    fs,
    io::{self, BufRead},
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
};

use libc::c_void;

use crate::memory;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// How a mapping of a slice is shown in the list of mappings, where it is no device's.
const SLICE: &str = "/memfd:gantry-slice (deleted)";
/// How the memory that the vendor's library allocates for itself is shown.
pub const ZERO: &str = "/dev/zero (deleted)";

/// A range of the program in the slice.
pub struct Pinned {
    /// Its first byte.
    pub start: usize,
    /// Its length in bytes, whole pages.
    pub length: usize,
    /// Where it is in the slice.
    pub offset: u64,
    /// The parts of which a child has a copy: those that were the program's alone, and all where the slice is a device's
    /// memory, which may be another program's when this one has ended.
    pub copied: Vec<Range<usize>>,
    /// Client, parent and handle of the object.
    pub object: [u32; 3],
}

/// A mapping of this process.
pub struct Found {
    /// Its first byte.
    pub start: usize,
    /// The first byte after it.
    pub end: usize,
    /// The program's rights to it.
    pub protection: i32,
    /// Whether it is shared.
    pub is_shared: bool,
    /// Where it begins in the file.
    pub offset: u64,
    /// The file's device and number. 0: no file.
    pub file: (u64, u64),
    /// The file's name, or what the kernel shows in place of one.
    pub path: String,
}

impl Found {
    /// Whether it is a file that other processes may have.
    pub fn is_file(&self) -> bool {
        self.is_shared && self.file.1 != 0 && ![ZERO, SLICE].contains(&self.path.as_str())
    }
}

/// The file of a slice, as the list of mappings shows it.
#[derive(Clone, Copy)]
pub struct SliceFile {
    /// Its device and number.
    file: (u64, u64),
    /// Where it begins: the kernel shows a device's memory by its address.
    base: u64,
    is_device: bool,
}

impl SliceFile {
    /// Whether it is a device's memory: the program runs in a VM.
    pub fn is_device(self) -> bool {
        self.is_device
    }

    /// How a slice is shown.
    pub fn new(slice: &OwnedFd) -> io::Result<Self> {
        // SAFETY: zeroes are a valid value.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes the value. The replaced functions would wait for the program.
        if unsafe { libc::syscall(libc::SYS_fstat, slice.as_raw_fd(), &raw mut found) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut known = Self {
            file: (found.st_dev, found.st_ino),
            base: 0,
            is_device: !is_memory(slice),
        };
        if !known.is_device {
            return Ok(known);
        }
        let file = slice.as_raw_fd();
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping, which is unmapped below.
        let page = unsafe { memory::map(ptr::null_mut(), PAGE, protection, flags, file, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let shown = mappings(page as usize, PAGE);
        // SAFETY: it was made above.
        unsafe { memory::unmap(page, PAGE)? };
        let shown = shown?.into_iter().find(|shown| shown.file == known.file);
        known.base = shown.ok_or(io::ErrorKind::NotFound)?.offset;
        Ok(known)
    }
}

/// The mappings of this process that lie in a range. The kernel writes the list while it is read, in the order of
/// addresses: what comes after the range is not read, because a program may have thousands of mappings.
pub fn mappings(start: usize, length: usize) -> io::Result<Vec<Found>> {
    let list = io::BufReader::with_capacity(PAGE, fs::File::open("/proc/self/maps")?);
    let parse = |line: &str| {
        let mut words = line.splitn(6, ' ');
        let (from, to) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let [major, minor] = [major, minor].map(|number| u32::from_str_radix(number, 16).ok());
        let number = words.next()?.parse().ok()?;
        Some(Found {
            start: usize::from_str_radix(from, 16).ok()?,
            end: usize::from_str_radix(to, 16).ok()?,
            protection: protection(rights),
            is_shared: rights.ends_with('s'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            file: (libc::makedev(major?, minor?), number),
            path: words.next().unwrap_or_default().trim_start().to_owned(),
        })
    };
    let mut all = Vec::new();
    // Paths of mapped files are not always text.
    for line in list.split(b'\n') {
        let Some(found) = parse(&String::from_utf8_lossy(&line?)) else {
            continue;
        };
        if found.start >= start + length {
            break;
        }
        if found.end > start {
            all.push(found);
        }
    }
    Ok(all)
}

/// Whether a file is one of shared memory. The worker takes no other.
pub fn is_memory(file: &OwnedFd) -> bool {
    // SAFETY: zeroes are a valid value.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the value.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    result == 0 && found.f_type == libc::TMPFS_MAGIC
}

/// The rights to a mapping as they are shown.
fn protection(rights: &str) -> i32 {
    let all = [
        ('r', libc::PROT_READ),
        ('w', libc::PROT_WRITE),
        ('x', libc::PROT_EXEC),
    ];
    let given = all.into_iter().filter(|(sign, _)| rights.contains(*sign));
    given.fold(libc::PROT_NONE, |sum, (_, right)| sum | right)
}

/// Memory of which a child gets a copy.
pub struct Inherited {
    start: usize,
    length: usize,
    protection: i32,
}

impl Inherited {
    /// In the child: replaces the pages of the slice by a copy of them. The child may call nothing that takes a lock.
    pub fn copy(&self) {
        let &Self {
            start,
            length,
            protection,
        } = self;
        let place = start as *mut c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is the child's memory, which stays as it is but for the pages behind it. Another thread of
        // the parent may have unmapped it meanwhile: then it cannot be read, and stays as it is.
        unsafe {
            if protection & libc::PROT_READ == 0
                && libc::mprotect(place, length, libc::PROT_READ) < 0
            {
                return;
            }
            let new = memory::map(ptr::null_mut(), length, access, flags, -1, 0);
            if new == libc::MAP_FAILED {
                // Rather a fault than memory that the parent and its device write.
                let flags = flags | libc::MAP_FIXED | libc::MAP_NORESERVE;
                memory::map(place, length, libc::PROT_NONE, flags, -1, 0);
                return;
            }
            let is_done = memory::copy(start, new as usize, length)
                && libc::mprotect(new, length, protection) == 0;
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            if !is_done || libc::mremap(new, length, length, flags, place) == libc::MAP_FAILED {
                let _ = memory::unmap(new, length);
            }
        }
    }
}

/// The mappings in a range that are of the slice, from `offset` on. A part that was unmapped or replaced by the program
/// is none.
fn of_slice(
    slice: SliceFile,
    start: usize,
    length: usize,
    offset: u64,
) -> impl Iterator<Item = Found> {
    let place = slice.base.wrapping_add(offset).wrapping_sub(start as u64);
    let found = mappings(start, length).into_iter().flatten();
    found.filter(move |found| {
        found.file == slice.file && found.offset.wrapping_sub(found.start as u64) == place
    })
}

/// Whether any page of a range is of the slice, which it was mapped from at `offset`.
pub fn is_mapped(slice: SliceFile, start: usize, length: usize, offset: u64) -> bool {
    of_slice(slice, start, length, offset).next().is_some()
}

impl Pinned {
    /// Its mappings.
    pub fn mappings(&self, slice: SliceFile) -> impl Iterator<Item = Found> {
        of_slice(slice, self.start, self.length, self.offset)
    }

    /// What a child gets a copy of.
    pub fn inherited(&self, slice: SliceFile) -> Vec<Inherited> {
        if self.copied.is_empty() {
            return Vec::new();
        }
        let common = |found: &Found, part: &Range<usize>| {
            let (start, end) = (found.start.max(part.start), found.end.min(part.end));
            (start < end).then(|| Inherited {
                start,
                length: end - start,
                protection: found.protection,
            })
        };
        self.mappings(slice)
            .flat_map(|found| {
                self.copied
                    .iter()
                    .filter_map(move |part| common(&found, part))
            })
            .collect()
    }
}
