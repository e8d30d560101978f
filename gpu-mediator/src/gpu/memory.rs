//! Pages of the physical GPU: their owners, and the mediator's own pages.

use std::{collections::BTreeMap, fs::File, io};

use base::{Access, Mapping, memfd};
use gf100::format::{PAGE, VramPage};
use rustix::fs::SealFlags;

/// A page of the physical GPU's memory. Only this crate creates them, from pages that it has allocated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PhysPage(pub(super) u32);

impl PhysPage {
    /// Address in bytes. Page numbers have 28 bits, so this cannot overflow.
    pub fn address(self) -> u64 {
        u64::from(self.0) * PAGE
    }

    /// In the form that the formats use.
    pub fn vram(self) -> VramPage {
        VramPage(self.0)
    }
}

/// A page of RAM as the physical GPU addresses it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DmaPage(pub(super) u32);

/// Allocator of pages, by number.
#[derive(Debug)]
pub struct Pages {
    /// Lengths of free ranges by first page. There is an allocated page between any two ranges.
    free: BTreeMap<u32, u32>,
}

impl Pages {
    /// Creates an allocator in which a whole range is free.
    pub fn new(first: u32, count: u32) -> Self {
        Self {
            free: BTreeMap::from([(first, count)]),
        }
    }

    /// Allocates consecutive pages. The first one is a multiple of `align`, a power of two.
    pub fn take(&mut self, count: u32, align: u32) -> Option<u32> {
        let (&start, &len, first) = self.free.iter().find_map(|(start, len)| {
            let first = start.checked_next_multiple_of(align)?;
            let fits = (first - start).checked_add(count)? <= *len;
            fits.then_some((start, len, first))
        })?;
        self.free.remove(&start);
        if first > start {
            self.free.insert(start, first - start);
        }
        let (end, mine) = (start + len, first + count);
        if mine < end {
            self.free.insert(mine, end - mine);
        }
        Some(first)
    }

    /// Frees pages that [`Self::take`] returned.
    pub fn give(&mut self, first: u32, count: u32) {
        let (mut start, mut len) = (first, count);
        if let Some((&before, &its)) = self.free.range(..first).next_back()
            && before + its == first
        {
            self.free.remove(&before);
            start = before;
            len += its;
        }
        if let Some(its) = self.free.remove(&(first + count)) {
            len += its;
        }
        self.free.insert(start, len);
    }
}

/// `f_type` of in-memory files that do not use huge pages: `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// Whether the GPU's server can map a front's file without ever getting SIGBUS: the file cannot shrink, and does not
/// use huge pages. A seal against shrinking does not prevent punching holes, and a huge page that was punched out may
/// be unavailable at the next access.
pub fn is_safe_to_map(file: &File) -> bool {
    let is_sealed =
        rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    is_sealed && rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u64 == TMPFS)
}

/// The mediator's own memory on the GPU: its first pages, which belong to no partition.
pub struct Reserve {
    file: File,
    mapping: Mapping,
    pages: Pages,
}

impl Reserve {
    /// Creates a zeroed reserve of this size in bytes, whole pages.
    pub fn new(len: u64) -> io::Result<Self> {
        let file = memfd::sealed(c"gantry-gpu-shadows", len)?;
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        let mapping = Mapping::shared(&file, 0, bytes, Access::ReadWrite)?;
        // Page 0 is never allocated, since registers that were never written refer to it.
        let count = u32::try_from(len / PAGE).map_err(io::Error::other)? - 1;
        Ok(Self {
            file,
            mapping,
            pages: Pages::new(1, count),
        })
    }

    /// The file to pass to the GPU.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Allocates consecutive zeroed pages.
    pub fn take(&mut self, count: u32, align: u32) -> Option<PhysPage> {
        let first = PhysPage(self.pages.take(count, align)?);
        self.clear(first, count);
        Some(first)
    }

    /// Zeroes pages.
    pub fn clear(&mut self, first: PhysPage, count: u32) {
        if let Some(at) = self.at(first.address(), u64::from(count) * PAGE) {
            // SAFETY: within the mapping, as checked by `at`; others only use volatile accesses.
            unsafe { at.write_bytes(0, count as usize * PAGE as usize) };
        }
    }

    /// Frees pages.
    pub fn give(&mut self, first: PhysPage, count: u32) {
        self.pages.give(first.0, count);
    }

    fn at(&self, address: u64, len: u64) -> Option<*mut u8> {
        let end = address.checked_add(len)?;
        let is_there = end <= self.mapping.len() as u64;
        is_there.then(|| self.mapping.start().wrapping_add(address as usize))
    }

    /// Writes a word at a multiple of 8 within this memory; writes elsewhere are dropped.
    pub fn set64(&self, address: u64, value: u64) {
        if let Some(at) = self.at(address & !7, 8) {
            // SAFETY: within the mapping and aligned.
            unsafe { at.cast::<u64>().write_volatile(value.to_le()) };
        }
    }

    /// Writes a word at a multiple of 4.
    pub fn set32(&self, address: u64, value: u32) {
        if let Some(at) = self.at(address & !3, 4) {
            // SAFETY: within the mapping and aligned.
            unsafe { at.cast::<u32>().write_volatile(value.to_le()) };
        }
    }

    /// Reads a word at a multiple of 4; returns 0 elsewhere.
    pub fn get32(&self, address: u64) -> u32 {
        self.at(address & !3, 4).map_or(0, |at| {
            // SAFETY: within the mapping and aligned.
            u32::from_le(unsafe { at.cast::<u32>().read_volatile() })
        })
    }

    /// Reads a word at a multiple of 8; returns 0 elsewhere.
    pub fn get64(&self, address: u64) -> u64 {
        self.at(address & !7, 8).map_or(0, |at| {
            // SAFETY: within the mapping and aligned.
            u64::from_le(unsafe { at.cast::<u64>().read_volatile() })
        })
    }

    /// Writes bytes at a multiple of 4.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        for (at, word) in (address..).step_by(4).zip(bytes.chunks_exact(4)) {
            self.set32(at, u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// A file of this size in bytes in huge pages, none of which is allocated, that cannot shrink.
    pub fn huge(len: u64) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let file = memfd_create("huge", flags).expect("this kernel has huge pages");
        let file = File::from(file);
        file.set_len(len).expect("no page is taken");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).expect("it can be sealed");
        file
    }

    proptest! {
        #[test]
        fn nobody_gets_what_another_has(
            steps in prop::collection::vec((1_u32..40, 0_u32..6, any::<bool>()), 1..80),
        ) {
            let mut pages = Pages::new(1, 1000);
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (count, shift, gives) in steps {
                if gives && !taken.is_empty() {
                    let (first, count) = taken.swap_remove(count as usize % taken.len());
                    pages.give(first, count);
                } else if let Some(first) = pages.take(count, 1 << shift) {
                    prop_assert_eq!(first % (1 << shift), 0);
                    prop_assert!(first >= 1 && first + count <= 1001);
                    for (other, its) in &taken {
                        prop_assert!(first + count <= *other || other + its <= first);
                    }
                    taken.push((first, count));
                }
            }
            for (first, count) in taken {
                pages.give(first, count);
            }
            prop_assert_eq!(pages.take(1000, 1), Some(1));
        }
    }

    #[test]
    fn reserved_memory_is_written_and_read_within_its_bounds() {
        let mut reserve = Reserve::new(1 << 20).expect("there is room");
        let page = reserve.take(2, 2).expect("there are pages");
        reserve.set64(page.address(), 7);
        assert_eq!(reserve.get64(page.address()), 7);
        reserve.set64(1 << 20, 7);
        assert_eq!(reserve.get64(1 << 20), 0);
        reserve.give(page, 2);
        let again = reserve.take(2, 2).expect("they were given back");
        assert_eq!(reserve.get64(again.address()), 0, "as new");
        assert!(is_safe_to_map(reserve.file()));
    }

    #[test]
    fn a_file_that_can_shrink_or_has_huge_pages_is_not_safe_to_map() {
        assert!(is_safe_to_map(
            &memfd::sealed(c"ram", PAGE).expect("there is room")
        ));
        let loose = memfd_create("loose", MemfdFlags::CLOEXEC).expect("there is room");
        assert!(!is_safe_to_map(&loose.into()));
        assert!(!is_safe_to_map(&huge(2 << 20)));
    }
}
