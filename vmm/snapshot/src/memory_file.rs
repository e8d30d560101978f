//! Saves RAM to a file and reads it back.
//!
//! Regions follow each other without gaps. Zero pages are omitted as holes: that costs a scan at
//! memory speed and saves disk I/O, which is slower.

use std::{
    fs::File,
    io, iter,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use base::{
    Cancel,
    regular_file::{self, Links},
};
use serde::{Deserialize, Serialize};
use vmm_memory::{
    Mapping, Ram, Region,
    data::{self, Pagemap},
};

use super::writing::Writing;

/// Granularity of holes in the file, in bytes.
const CHUNK: usize = 64 << 10;

/// Maximum number of bytes written per system call. Of at most two such writes, the disk may have yet to store
/// something, so that a slow disk keeps neither the thread nor the end of the process for long.
const MAX_WRITE: usize = 4 << 20;

/// A region of RAM in the file.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryRange {
    /// Guest-physical address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the region in the file, in bytes.
    pub offset: u64,
}

impl MemoryRange {
    /// Its byte range in the file.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

/// RAM could not be saved or read back.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFileError {
    /// An operation on the file failed.
    #[error("cannot {action} {path}")]
    Io {
        /// The attempted operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// What the file behind RAM contained before could not be discarded.
    #[error("cannot discard the earlier contents of the file behind the RAM at {guest:#x}")]
    Discard {
        /// Guest-physical address.
        guest: u64,
        /// The cause.
        source: io::Error,
    },
    /// The memory in the state differs from the machine's.
    #[error("the snapshot has {len} bytes of RAM at {guest:#x}, the machine does not")]
    Mismatch {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A client no longer wants the VM.
    #[error("it was cancelled")]
    Cancelled,
    /// The file is shorter than the state says.
    #[error("{path} is truncated: {found} bytes instead of {expected}")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its actual length in bytes.
        found: u64,
        /// The expected length in bytes.
        expected: u64,
    },
}

/// The bytes of RAM. The guest and devices must be stopped.
fn bytes(mapping: &Mapping) -> &[u8] {
    // SAFETY: the mapping has this length; nothing writes to it while the machine is paused, which
    // callers of this module ensure.
    unsafe { std::slice::from_raw_parts(mapping.address(), mapping.size()) }
}

/// Saves all RAM, of a paused machine, to a new file and returns the position of each region. An existing file is
/// replaced, not overwritten, because a machine may still be loading its memory from it.
pub fn write(
    path: &Path,
    regions: &[Region],
    untouched: &Untouched,
    writing: &Writing,
) -> Result<Vec<MemoryRange>, MemoryFileError> {
    let failed = |action| {
        move |source| MemoryFileError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let file = replace(path).map_err(failed("create"))?;
    let mut ranges = Vec::new();
    let mut offset = 0;
    for region in regions {
        let len = region.mapping.size() as u64;
        let mapping = &region.mapping;
        write_memory(&file, offset, mapping, untouched, writing).map_err(failed("write"))?;
        ranges.push(MemoryRange {
            guest: region.guest,
            len,
            offset,
        });
        offset += len;
    }
    file.set_len(offset).map_err(failed("extend"))?;
    file.sync_all().map_err(failed("flush"))?;
    Ok(ranges)
}

/// Creates a file that only its owner can read, because a guest's memory contains secrets.
pub fn create_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Creates an empty file at `path`; a process that has the old one open keeps it.
fn replace(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    create_private(path)
}

/// Number of bytes of RAM in regions.
pub fn total(regions: &[Region]) -> u64 {
    let sizes = regions.iter().map(|region| region.mapping.size() as u64);
    sizes.sum()
}

/// Whether memory that has never been touched may be left out without looking at it.
#[derive(Debug)]
pub enum Untouched {
    /// It reads as zeroes, but looking at it would allocate it, or page tables for it.
    Skip(Option<Pagemap>),
    /// It may be data that is still being restored on demand.
    Read,
}

/// Writes memory to an open file at `offset`, with holes for zero chunks.
pub fn write_memory(
    file: &File,
    offset: u64,
    mapping: &Mapping,
    untouched: &Untouched,
    writing: &Writing,
) -> io::Result<()> {
    let bytes = bytes(mapping);
    let mut out = Sparse {
        file,
        offset,
        fresh: 0..0,
        waits: 0..0,
    };
    let step = data::window(mapping);
    for start in (0..bytes.len()).step_by(step) {
        let window = start..bytes.len().min(start + step);
        let parts = match untouched {
            Untouched::Skip(pagemap) => data::touched(mapping, window.clone(), pagemap.as_ref()),
            Untouched::Read => None,
        };
        let mut done = start;
        for part in parts.unwrap_or_else(|| iter::once(window.clone()).collect()) {
            writing.advance((part.start - done) as u64)?;
            done = part.end;
            out.offset = offset + part.start as u64;
            out.write(&bytes[part], writing)?;
        }
        writing.advance((window.end - done) as u64)?;
    }
    Ok(())
}

/// A part of a file that is written with holes, at the speed of the disk.
struct Sparse<'a> {
    file: &'a File,
    /// Where the part begins in the file.
    offset: u64,
    /// What was written since the disk was last told to store something.
    fresh: Range<u64>,
    /// What the disk was told to store before.
    waits: Range<u64>,
}

impl Sparse<'_> {
    /// Writes the non-zero chunks of `bytes`, with adjacent ones in a single write.
    fn write(&mut self, bytes: &[u8], writing: &Writing) -> io::Result<()> {
        let mut run = 0..0;
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let start = index * CHUNK;
            if data::is_zero(chunk) {
                self.flush(bytes, &mut run)?;
            } else {
                if run.is_empty() {
                    run = start..start;
                }
                run.end = start + chunk.len();
                if run.len() >= MAX_WRITE {
                    self.flush(bytes, &mut run)?;
                }
            }
            writing.advance(chunk.len() as u64)?;
        }
        self.flush(bytes, &mut run)
    }

    /// Writes a run, and waits until the disk has stored the one before.
    fn flush(&mut self, bytes: &[u8], run: &mut Range<usize>) -> io::Result<()> {
        let run = std::mem::take(run);
        if run.is_empty() {
            return Ok(());
        }
        let start = self.offset + run.start as u64;
        let end = start + run.len() as u64;
        self.file.write_all_at(&bytes[run], start)?;
        // Many small runs are stored together.
        if self.fresh.is_empty() {
            self.fresh.start = start;
        }
        self.fresh.end = end;
        if end - self.fresh.start < MAX_WRITE as u64 {
            return Ok(());
        }
        let written = std::mem::take(&mut self.fresh);
        store(self.file, &written, libc::SYNC_FILE_RANGE_WRITE)?;
        let before = std::mem::replace(&mut self.waits, written);
        store(
            self.file,
            &before,
            libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER,
        )
    }
}

/// Starts to store a range of the file on the disk, or waits until it is stored.
fn store(file: &File, range: &Range<u64>, how: libc::c_uint) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let (start, len) = (
        range.start.cast_signed(),
        (range.end - range.start).cast_signed(),
    );
    // SAFETY: a call without pointers, on an open file.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, how) };
    if result == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // A file system that cannot do this only for a part; `fsync` follows in any case.
        error
            if matches!(
                error.raw_os_error(),
                Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE)
            ) =>
        {
            Ok(())
        }
        error => Err(error),
    }
}

/// Matches `ranges` to the regions of `ram`, after checking that they describe the same memory and
/// that the file at `path` contains all of it.
pub fn matching<'a>(
    file: &File,
    path: &Path,
    regions: &'a [Region],
    ranges: &[MemoryRange],
) -> Result<Vec<(&'a Region, MemoryRange)>, MemoryFileError> {
    let found = file
        .metadata()
        .map_err(|source| MemoryFileError::Io {
            action: "examine",
            path: path.to_owned(),
            source,
        })?
        .len();
    let mut pairs = Vec::new();
    for range in ranges {
        let region = regions
            .iter()
            .find(|region| region.guest == range.guest && region.mapping.size() as u64 == range.len)
            .ok_or(MemoryFileError::Mismatch {
                guest: range.guest,
                len: range.len,
            })?;
        let expected = range.offset.saturating_add(range.len);
        if found < expected {
            let path = path.to_owned();
            return Err(MemoryFileError::Truncated {
                path,
                found,
                expected,
            });
        }
        pairs.push((region, range.clone()));
    }
    // As many as there are regions, each of which has one.
    if let Some(range) = ranges.get(regions.len()) {
        return Err(MemoryFileError::Mismatch {
            guest: range.guest,
            len: range.len,
        });
    }
    if let Some(region) = regions
        .iter()
        .find(|region| !ranges.iter().any(|range| range.guest == region.guest))
    {
        let len = region.mapping.size() as u64;
        return Err(MemoryFileError::Mismatch {
            guest: region.guest,
            len,
        });
    }
    Ok(pairs)
}

/// Reads all of RAM from the file, before anything runs, at the speed of the disk. `advance` is told of bytes that are
/// there.
///
/// # Errors
///
/// Among others that it was cancelled: then some of it has been read.
pub fn read(
    path: &Path,
    regions: &[Region],
    ranges: &[MemoryRange],
    cancel: &Cancel,
    advance: impl Fn(u64),
) -> Result<(), MemoryFileError> {
    /// What is read at once: a second on a disk of 6 MB/s.
    const STEP: usize = 8 << 20;
    let failed = |action| {
        move |source| MemoryFileError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let file = regular_file::open(path, Links::Refuse).map_err(failed("open"))?;
    let pairs = matching(&file, path, regions, ranges)?;
    clear_each(
        &regions
            .iter()
            .map(|region| (region.guest, &*region.mapping)),
    )?;
    for (region, range) in pairs {
        let mut read = 0;
        for extent in data::data_extents(&file, range.bytes()).map_err(failed("examine"))? {
            // Within the region: `data_extents` stays within the range, and both have the same
            // length.
            let start = (extent.start - range.offset) as usize;
            let len = (extent.end - extent.start) as usize;
            // SAFETY: the mapping has this length and lives as long as the region, and nothing else
            // accesses it yet.
            let target =
                unsafe { std::slice::from_raw_parts_mut(region.mapping.address().add(start), len) };
            for (part, at) in target.chunks_mut(STEP).zip((extent.start..).step_by(STEP)) {
                if cancel.is_cancelled() {
                    return Err(MemoryFileError::Cancelled);
                }
                file.read_exact_at(part, at).map_err(failed("read"))?;
                read += part.len() as u64;
                advance(part.len() as u64);
            }
        }
        // And its holes.
        advance(range.len.saturating_sub(read));
    }
    Ok(())
}

/// Makes all RAM, which nothing uses yet, read as zeroes. If another VM uses some of it, nothing is changed.
pub fn clear_all(ram: &Ram) -> Result<(), MemoryFileError> {
    let regions = ram.regions().iter();
    clear_each(&regions.map(|region| (region.guest, &*region.mapping)))
}

fn clear_each<'a>(
    regions: &(impl Iterator<Item = (u64, &'a Mapping)> + Clone),
) -> Result<(), MemoryFileError> {
    for step in [Mapping::claim, clear, Mapping::release_claim] {
        for (guest, mapping) in regions.clone() {
            step(mapping).map_err(|source| MemoryFileError::Discard { guest, source })?;
        }
    }
    Ok(())
}

/// Makes memory that nothing uses yet read as zeroes: a file behind it may have contents of an earlier VM.
fn clear(mapping: &Mapping) -> io::Result<()> {
    match mapping.discard_contents() {
        Ok(true) => return Ok(()),
        Ok(false) => {}
        // A file system without holes.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        Err(error) => return Err(error),
    }
    let all = 0..mapping.size();
    for part in data::initial(mapping).unwrap_or_else(|| iter::once(all).collect()) {
        for start in part.clone().step_by(CHUNK) {
            let chunk = start..part.end.min(start + CHUNK);
            if !data::is_zero(&bytes(mapping)[chunk.clone()]) {
                // SAFETY: within the mapping, and nothing else accesses it yet.
                unsafe { mapping.address().add(start).write_bytes(0, chunk.len()) };
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::CString,
        os::unix::fs::{MetadataExt, PermissionsExt},
        ptr,
    };

    use super::*;
    use vmm_memory::{Backing, mapping::FileSystem};

    #[test]
    fn whoever_reads_an_old_snapshot_keeps_it_when_a_new_one_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        replace(&path).unwrap().write_all_at(b"old", 0).unwrap();
        let reader = File::open(&path).unwrap();
        replace(&path).unwrap().write_all_at(b"new", 0).unwrap();
        let mut bytes = [0; 3];
        reader.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"old");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others can read the guest's memory");
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn contents_of_an_earlier_vm_do_not_stay_in_a_memory_file() {
        for shared in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("ram");
            std::fs::write(&path, vec![9; 2 << 20]).unwrap();
            let backing = Backing {
                shared,
                file: Some(path.clone()),
                ..Backing::default()
            };
            let mapping = Mapping::new(1 << 20, &backing, 1 << 20).unwrap();
            assert_eq!(bytes(&mapping)[7], 9);
            clear(&mapping).unwrap();
            assert!(data::is_zero(bytes(&mapping)));
            let file = std::fs::read(&path).unwrap();
            // The other half is another region's. A private view leaves the file as it is.
            assert_eq!((file[0], file[1 << 20]), (9, if shared { 0 } else { 9 }));
        }
    }

    #[test]
    fn nothing_is_cleared_if_another_vm_uses_a_part_of_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let map = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![9; 1 << 20]).unwrap();
            let backing = Backing {
                shared: true,
                file: Some(path),
                ..Backing::default()
            };
            (Mapping::new(1 << 20, &backing, 0).unwrap(), backing)
        };
        let ((first, _), (second, backing)) = (map("first"), map("second"));
        let others = Mapping::new(1 << 20, &backing, 0).unwrap();
        let all = || [(0, &first), (1 << 20, &second)].into_iter();
        let error = clear_each(&all()).unwrap_err();
        assert!(
            matches!(error, MemoryFileError::Discard { guest, .. } if guest == 1 << 20),
            "{error}"
        );
        assert_eq!((bytes(&first)[7], bytes(&second)[7]), (9, 9));
        drop(others);
        clear_each(&all()).unwrap();
        assert!(data::is_zero(bytes(&first)) && data::is_zero(bytes(&second)));
    }

    #[test]
    fn clearing_private_memory_of_a_sparse_file_takes_none_for_its_holes() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("ram");
        let file = File::create_new(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[9; 4096], 40 << 20).unwrap();
        let backing = Backing {
            file: Some(path),
            ..Backing::default()
        };
        let mapping = Mapping::new(64 << 20, &backing, 0).unwrap();
        if mapping.file_system() != FileSystem::Tmpfs {
            return eprintln!("not tested: /dev/shm is not on tmpfs");
        }
        let allocated = || file.metadata().unwrap().blocks() * 512;
        let before = allocated();
        clear(&mapping).unwrap();
        assert_eq!(allocated(), before, "holes have been read");
        assert!(data::is_zero(bytes(&mapping)));
    }

    #[test]
    fn memory_of_a_file_system_without_holes_is_cleared() {
        // Mounts of this thread only.
        let cleared = std::thread::spawn(|| {
            let dir = tempfile::tempdir().unwrap();
            let at = CString::new(dir.path().to_str().unwrap()).unwrap();
            let root = c"/";
            let kind = c"ramfs";
            let private = libc::MS_REC | libc::MS_PRIVATE;
            // SAFETY: calls with strings that outlive them.
            let is_mounted = unsafe {
                libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) == 0
                    && libc::mount(
                        ptr::null(),
                        root.as_ptr(),
                        ptr::null(),
                        private,
                        ptr::null(),
                    ) == 0
                    && libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, ptr::null()) == 0
            };
            if !is_mounted {
                return eprintln!("not tested without root: {}", io::Error::last_os_error());
            }
            let path = dir.path().join("ram");
            std::fs::write(&path, vec![9; 1 << 20]).unwrap();
            let backing = Backing {
                shared: true,
                file: Some(path),
                ..Backing::default()
            };
            let mapping = Mapping::new(1 << 20, &backing, 0).unwrap();
            assert_eq!(bytes(&mapping)[7], 9);
            clear(&mapping).unwrap();
            assert!(data::is_zero(bytes(&mapping)));
            drop(mapping);
            // SAFETY: as above.
            unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
        });
        cleared.join().unwrap();
    }

    #[test]
    fn shared_memory_that_was_never_touched_stays_unallocated() {
        let backing = Backing {
            shared: true,
            ..Backing::default()
        };
        let mapping = Mapping::new(64 << 20, &backing, 0).unwrap();
        for at in [5 << 20, (40 << 20) + 123] {
            // SAFETY: within the mapping, which nobody else uses.
            unsafe { mapping.address().add(at).write(7) };
        }
        let file = mapping.file().unwrap().clone();
        let allocated = || file.metadata().unwrap().blocks() * 512;
        let before = allocated();
        let out = tempfile::tempfile().unwrap();
        let writing = Writing::new(64 << 20);
        write_memory(&out, 4096, &mapping, &Untouched::Skip(None), &writing).unwrap();
        assert_eq!(writing.bytes(), (64 << 20, 64 << 20));
        assert_eq!(allocated(), before, "looking at memory has allocated it");
        out.set_len(4096 + (64 << 20)).unwrap();
        let mut back = vec![1; 64 << 20];
        out.read_exact_at(&mut back, 4096).unwrap();
        assert!(back == bytes(&mapping));
        assert_eq!(back.iter().filter(|byte| **byte == 7).count(), 2);
    }

    #[test]
    fn zero_chunks_become_holes_and_the_rest_is_written() {
        let mut bytes = vec![0; 16 * CHUNK + 4096];
        for at in [3 * CHUNK + 17, 4 * CHUNK, 16 * CHUNK + 4095] {
            bytes[at] = 7;
        }
        let file = tempfile::tempfile().unwrap();
        let mut out = Sparse {
            file: &file,
            offset: 4096,
            fresh: 0..0,
            waits: 0..0,
        };
        let writing = Writing::new(bytes.len() as u64);
        out.write(&bytes, &writing).unwrap();
        assert_eq!(writing.bytes().0, bytes.len() as u64);
        file.set_len(4096 + bytes.len() as u64).unwrap();
        let mut back = vec![1; bytes.len()];
        file.read_exact_at(&mut back, 4096).unwrap();
        assert_eq!(back, bytes);
        let range = MemoryRange {
            guest: 0,
            len: bytes.len() as u64,
            offset: 4096,
        };
        let data: u64 = data::data_extents(&file, range.bytes())
            .unwrap()
            .iter()
            .map(|e| e.end - e.start)
            .sum();
        assert!(data < 5 * CHUNK as u64, "{data} bytes of data");
    }

    #[test]
    fn writing_ends_when_it_is_cancelled() {
        let file = tempfile::tempfile().unwrap();
        let mut out = Sparse {
            file: &file,
            offset: 0,
            fresh: 0..0,
            waits: 0..0,
        };
        let writing = Writing::new(2 * CHUNK as u64);
        assert!(writing.cancel());
        let error = out.write(&[0; 2 * CHUNK], &writing).unwrap_err();
        assert!(error.to_string().contains("cancelled"), "{error}");
        assert_eq!(writing.bytes().0, CHUNK as u64);
    }
}
