//! Data and holes: the parts of a file that contain data, and the parts of guest memory that may not be zero.

use std::{fs::File, io, ops::Range, os::fd::AsRawFd, os::unix::fs::FileExt};

use super::{Mapping, mapping::FileSystem};

/// Number of bytes that are compared with zero at once.
const STEP: usize = 64 << 10;

/// Number of bytes that are examined at a time of huge pages, of which what is not mapped has to be read, and of memory
/// without a file.
const WINDOW: usize = 256 << 20;

/// Size of a page in bytes.
const PAGE: usize = 4096;

/// Which pages this process has: `/proc/self/pagemap`.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// `None` if the process may not read it, as one that Landlock restricts.
    pub fn open() -> Option<Self> {
        File::open("/proc/self/pagemap").ok().map(Self)
    }

    /// The pages in a range of a mapping that are in memory or swapped out.
    fn pages(&self, mapping: &Mapping, within: Range<usize>) -> Option<Vec<Range<usize>>> {
        let (first, end) = (within.start / PAGE, within.end.div_ceil(PAGE));
        let mut entries = vec![0; (end - first) * 8];
        let at = mapping.address() as usize / PAGE + first;
        self.0.read_exact_at(&mut entries, at as u64 * 8).ok()?;
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (page, entry) in (first..).zip(entries.chunks_exact(8)) {
            // Bit 63: present. Bit 62: swapped out.
            if entry[7] & 0xc0 == 0 {
                continue;
            }
            let page = (page * PAGE).max(within.start)..((page + 1) * PAGE).min(within.end);
            match parts.last_mut() {
                Some(last) if last.end == page.start => last.end = page.end,
                _ => parts.push(page),
            }
        }
        Some(parts)
    }
}

/// How much of a mapping should be examined at a time ([`touched`]), so that cancelling does not wait for long. tmpfs
/// goes through everything up to the next hole at each call, whatever range is asked for: all of it is examined at once.
pub fn window(mapping: &Mapping) -> usize {
    if mapping.file().is_none() {
        return WINDOW;
    }
    match mapping.file_system() {
        FileSystem::Hugetlbfs => WINDOW,
        FileSystem::Tmpfs | FileSystem::Other => mapping.size(),
    }
}

/// The parts of a range of memory that may contain other bytes than zero, found without allocating memory; `None` if
/// this cannot be told, and all of it has to be read. Of memory without a file, `pagemap` tells it.
pub fn touched(
    mapping: &Mapping,
    within: Range<usize>,
    pagemap: Option<&Pagemap>,
) -> Option<Vec<Range<usize>>> {
    let Some(file) = mapping.file() else {
        return pagemap?.pages(mapping, within);
    };
    match mapping.file_system() {
        FileSystem::Tmpfs if mapping.is_shared() => in_file(mapping, file, within),
        FileSystem::Hugetlbfs => Some(huge_pages(mapping, file, within)),
        // Other file systems may not know yet what was written to memory; private memory is not in the file.
        FileSystem::Tmpfs | FileSystem::Other => None,
    }
}

/// Finds touched memory, range by range from the start of a mapping to its end.
///
/// tmpfs goes through all data up to the next hole at each call. It is asked once for each part that is data, not for
/// each range: that would take a time that grows with the square of the part's size. Holes are not remembered, because
/// they may be written before their range's turn. A remembered part that has become a hole only takes longer: its bytes
/// are zero.
#[derive(Debug, Default)]
pub struct Search {
    /// The part of the mapping that was last found to be data, up to the next hole.
    data: Range<usize>,
    /// Number of parts that were found.
    #[cfg(test)]
    found: usize,
}

impl Search {
    /// As [`touched`]; of a remembered part, parts that are zero meanwhile may be among them.
    pub fn touched(
        &mut self,
        mapping: &Mapping,
        within: Range<usize>,
        pagemap: Option<&Pagemap>,
    ) -> Option<Vec<Range<usize>>> {
        match mapping.file_system() {
            FileSystem::Tmpfs if mapping.is_shared() => {
                self.in_file(mapping, mapping.file()?, within).ok()
            }
            FileSystem::Tmpfs | FileSystem::Hugetlbfs | FileSystem::Other => {
                touched(mapping, within, pagemap)
            }
        }
    }

    fn in_file(
        &mut self,
        mapping: &Mapping,
        file: &File,
        within: Range<usize>,
    ) -> io::Result<Vec<Range<usize>>> {
        let offset = mapping.offset();
        let mut parts = Vec::new();
        let mut at = within.start;
        while at < within.end {
            if !self.data.contains(&at) {
                let end = offset + within.end as u64;
                let start = seek(file, offset + at as u64, libc::SEEK_DATA)?;
                // Data behind this range is left to its own range. Its end would be looked for in each range before it.
                let Some(start) = start.filter(|&start| start < end) else {
                    break;
                };
                let end = offset + mapping.size() as u64;
                let stop = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(end).min(end);
                if stop <= start {
                    // It was taken away between the two calls: ask again.
                    continue;
                }
                // Within the mapping.
                self.data = (start - offset) as usize..(stop - offset) as usize;
                #[cfg(test)]
                {
                    self.found += 1;
                }
            }
            let part = at.max(self.data.start)..self.data.end.min(within.end);
            at = part.end;
            parts.push(part);
        }
        Ok(parts)
    }
}

/// The parts of memory that nothing has used yet that may contain other bytes than zero; otherwise as [`touched`]. Private
/// memory still is its file then.
pub fn initial(mapping: &Mapping) -> Option<Vec<Range<usize>>> {
    match mapping.file_system() {
        FileSystem::Tmpfs => in_file(mapping, mapping.file()?, 0..mapping.size()),
        FileSystem::Hugetlbfs | FileSystem::Other => touched(mapping, 0..mapping.size(), None),
    }
}

/// The parts of a range of memory that are data of its file.
fn in_file(mapping: &Mapping, file: &File, within: Range<usize>) -> Option<Vec<Range<usize>>> {
    let start = mapping.offset();
    let bytes = start + within.start as u64..start + within.end as u64;
    let extents = data_extents(file, bytes).ok()?;
    // Within the mapping.
    let part = |extent: Range<u64>| (extent.start - start) as usize..(extent.end - start) as usize;
    Some(extents.into_iter().map(part).collect())
}

/// Touched huge pages. Reading one that is neither mapped nor in the file would allocate it, and end the process if the
/// host has none left; reading the file does not, and hugetlbfs calls all of it data.
fn huge_pages(mapping: &Mapping, file: &File, within: Range<usize>) -> Vec<Range<usize>> {
    let page = mapping.page_size() as usize;
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut at = within.start;
    while at < within.end {
        let end = (at + 1).next_multiple_of(page).min(within.end);
        let offset = mapping.offset() + at as u64;
        if is_mapped(mapping, at) || !is_zero_in(file, offset, end - at) {
            match parts.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ => parts.push(at..end),
            }
        }
        at = end;
    }
    parts
}

/// Whether this process has the huge page at an offset of the mapping, a multiple of 4096. True if the kernel does not
/// say.
fn is_mapped(mapping: &Mapping, at: usize) -> bool {
    let mut state = 0_u8;
    let address = mapping.address().wrapping_add(at);
    // SAFETY: the kernel writes one byte for the 4096 bytes at the address, which are within the mapping.
    let result = unsafe { libc::mincore(address.cast(), 4096, &raw mut state) };
    result != 0 || state & 1 != 0
}

/// Whether a part of a file is zero. False if it cannot be read.
fn is_zero_in(file: &File, mut offset: u64, mut len: usize) -> bool {
    let mut bytes = vec![0; STEP];
    while len > 0 {
        let part = &mut bytes[..len.min(STEP)];
        if file.read_exact_at(part, offset).is_err() || !is_zero(part) {
            return false;
        }
        offset += part.len() as u64;
        len -= part.len();
    }
    true
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: any bits make a valid u128.
    let (head, words, tail) = unsafe { bytes.align_to::<u128>() };
    head.iter().chain(tail).all(|&byte| byte == 0) && words.iter().all(|&word| word == 0)
}

/// The parts of a range of a file that are not holes, if it was written by system calls. What is written to mapped
/// memory of the file may be missing, except on tmpfs.
pub fn data_extents(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let Range { start: mut at, end } = range;
    let mut extents = Vec::new();
    while at < end {
        let Some(start) = seek(file, at, libc::SEEK_DATA)?.filter(|&start| start < end) else {
            break;
        };
        let stop = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(end).min(end);
        extents.push(start..stop);
        at = stop;
    }
    Ok(extents)
}

/// Whether there is data, not only holes, in a range of a file that was written by system calls.
pub fn has_data(file: &File, range: Range<u64>) -> io::Result<bool> {
    Ok(seek(file, range.start, libc::SEEK_DATA)?.is_some_and(|at| at < range.end))
}

fn seek(file: &File, at: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    // SAFETY: seeking in an open file has no preconditions.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    if found >= 0 {
        return Ok(Some(found as u64));
    }
    let error = io::Error::last_os_error();
    // Nothing of this kind up to the end of the file.
    if error.raw_os_error() == Some(libc::ENXIO) {
        Ok(None)
    } else {
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::MetadataExt, path::Path, slice};

    use super::*;
    use crate::{Backing, MappingError};

    const MIB: usize = 1 << 20;

    fn write(mapping: &Mapping, at: usize) {
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { mapping.address().add(at).write(7) };
    }

    #[test]
    fn holes_of_a_file_are_believed_only_where_memory_is_the_file() {
        // Beside the test's program: it is on the disk, where builds are.
        let program = std::env::current_exe().unwrap();
        for (folder, shared, is_known) in [
            (Path::new("/dev/shm"), true, true),
            (Path::new("/dev/shm"), false, false),
            (program.parent().unwrap(), true, false),
        ] {
            let dir = tempfile::tempdir_in(folder).unwrap();
            let backing = Backing {
                shared,
                file: Some(dir.path().join("ram")),
                ..Backing::default()
            };
            let mapping = Mapping::new(4 << 20, &backing, 0).unwrap();
            write(&mapping, 2 * MIB);
            let is_tmpfs = mapping.file_system() == FileSystem::Tmpfs;
            let parts = touched(&mapping, MIB..4 * MIB, None);
            assert_eq!(
                parts.is_some(),
                is_known || is_tmpfs && shared,
                "{folder:?}"
            );
            if let Some(parts) = parts {
                let starts: Vec<_> = parts.iter().map(|part| part.start).collect();
                assert_eq!(starts, [2 * MIB], "{folder:?}");
            }
        }
    }

    #[test]
    fn private_memory_that_was_never_touched_stays_so() {
        let mapping = Mapping::new(64 << 20, &Backing::default(), 0).unwrap();
        write(&mapping, 3 * MIB + 9);
        let pagemap = Pagemap::open().unwrap();
        let parts = |within| touched(&mapping, within, Some(&pagemap)).unwrap();
        let all = parts(0..mapping.size());
        // A page, or a huge one.
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            all[0].contains(&(3 * MIB)) && all[0].len() <= 2 * MIB,
            "{all:?}"
        );
        assert_eq!(
            parts(3 * MIB + 5..3 * MIB + 7),
            slice::from_ref(&(3 * MIB + 5..3 * MIB + 7))
        );
        assert!(parts(4 * MIB..mapping.size()).is_empty());
        assert_eq!(touched(&mapping, 0..MIB, None), None);
    }

    /// Shared memory of tmpfs.
    fn shared(size: usize) -> Mapping {
        let backing = Backing {
            shared: true,
            ..Backing::default()
        };
        let mapping = Mapping::new(size as u64, &backing, 0).unwrap();
        assert_eq!(mapping.file_system(), FileSystem::Tmpfs);
        mapping
    }

    #[test]
    fn a_search_by_ranges_finds_what_one_of_all_memory_does() {
        const PAGES: usize = 64;
        let mut random = 7_u64;
        for _ in 0..200 {
            let mapping = shared(PAGES * PAGE);
            let mut bit = || {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                random >> 61
            };
            let mut is_data = false;
            for page in 0..PAGES {
                // Runs of a few pages.
                is_data ^= bit() == 0;
                if is_data {
                    write(&mapping, page * PAGE);
                }
            }
            let all = touched(&mapping, 0..PAGES * PAGE, None).unwrap();
            let step = PAGE * (1 + bit() as usize);
            let mut search = Search::default();
            let mut found: Vec<Range<usize>> = Vec::new();
            for start in (0..PAGES * PAGE).step_by(step) {
                let within = start..(PAGES * PAGE).min(start + step);
                for part in search.touched(&mapping, within.clone(), None).unwrap() {
                    assert!(within.start <= part.start && part.end <= within.end);
                    match found.last_mut() {
                        Some(last) if last.end == part.start => last.end = part.end,
                        _ => found.push(part),
                    }
                }
            }
            assert_eq!(found, all);
            assert_eq!(search.found, all.len(), "each part is gone through once");
        }
    }

    #[test]
    fn a_search_sees_what_was_a_hole_when_it_asked_before() {
        // Less than a huge page in all.
        const UNIT: usize = 64 << 10;
        let mapping = shared(8 * UNIT);
        write(&mapping, 0);
        let mut search = Search::default();
        assert_eq!(search.touched(&mapping, 0..UNIT, None).unwrap().len(), 1);
        assert!(
            search
                .touched(&mapping, UNIT..2 * UNIT, None)
                .unwrap()
                .is_empty()
        );
        // Behind the hole, and in front of data that was there before.
        write(&mapping, 3 * UNIT);
        let parts = search.touched(&mapping, 2 * UNIT..4 * UNIT, None).unwrap();
        assert_eq!((parts.len(), parts[0].start), (1, 3 * UNIT));
        write(&mapping, 5 * UNIT);
        write(&mapping, 4 * UNIT);
        let parts = search.touched(&mapping, 4 * UNIT..8 * UNIT, None).unwrap();
        let starts: Vec<_> = parts.iter().map(|part| part.start).collect();
        assert_eq!(starts, [4 * UNIT, 5 * UNIT]);
        // It may begin anywhere.
        assert_eq!(search.touched(&mapping, 0..UNIT, None).unwrap().len(), 1);
    }

    /// Memory of huge pages; `None`, and a word about it, if the host has none.
    fn huge(shared: bool, pages: u64) -> Option<Mapping> {
        let backing = Backing {
            shared,
            hugepages: Some(2 << 20),
            reserve: true,
            ..Backing::default()
        };
        match Mapping::new(pages << 21, &backing, 0) {
            Ok(mapping) => Some(mapping),
            Err(MappingError::Memfd { .. } | MappingError::Map { .. }) => {
                eprintln!("not tested: the host has no {pages} huge pages of 2 MiB");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Bytes of the file, and huge pages that this process has.
    fn taken(mapping: &Mapping) -> (u64, usize) {
        let blocks = mapping.file().unwrap().metadata().unwrap().blocks();
        let pages = (0..mapping.size()).step_by(2 * MIB);
        (
            blocks * 512,
            pages.filter(|at| is_mapped(mapping, *at)).count(),
        )
    }

    #[test]
    fn huge_pages_that_were_never_touched_are_not_taken() {
        for shared in [true, false] {
            let Some(mapping) = huge(shared, 3) else {
                return;
            };
            write(&mapping, 2 * MIB + 9);
            let before = taken(&mapping);
            assert_eq!(before.1, 1);
            // A page begins before the range that is asked for.
            let parts = touched(&mapping, MIB..6 * MIB, None).unwrap();
            assert_eq!(parts, slice::from_ref(&(2 * MIB..4 * MIB)));
            assert_eq!(taken(&mapping), before);
        }
    }

    #[test]
    fn huge_pages_that_only_another_process_has_written_are_seen() {
        let Some(mapping) = huge(true, 3) else {
            return;
        };
        let backing = Backing {
            shared: true,
            hugepages: Some(2 << 20),
            ..Backing::default()
        };
        let file = mapping.file().unwrap().try_clone().unwrap();
        let others = Mapping::given(6 << 20, &backing, 0, file).unwrap();
        write(&others, 5 * MIB);
        let parts = touched(&mapping, 0..6 * MIB, None).unwrap();
        assert_eq!(parts, slice::from_ref(&(4 * MIB..6 * MIB)));
    }
}
