//! A VM's partition of the GPU's memory, and its RAM: translates its pages to physical ones.

use std::{fs::File, io};

use base::memfd::sealed;
use gf100::format::{Gfn, LARGE, PAGE, Target, pte::Pte};

use super::{
    memory::{DmaPage, PhysPage, is_safe_to_map},
    wire::Size,
};

/// Number of 4 KiB pages in a large page.
pub const PER_LARGE: u32 = (LARGE / PAGE) as u32;
/// Maximum number of RAM ranges of a VM.
pub const MOST_RANGES: usize = 64;
/// The storage kind that is tiled but not compressed.
const TILED: u8 = 0xfe;

/// A range of the VM's RAM that the GPU can access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RamRange {
    /// The first page, as numbered by the guest.
    pub first: Gfn,
    /// Number of pages.
    pub count: u32,
    /// The first page, as addressed by the GPU.
    pub dma: DmaPage,
}

/// Number of GPU bus pages that a RAM range occupies: whole large pages.
pub fn dma_pages(count: u32) -> u32 {
    count.next_multiple_of(PER_LARGE)
}

/// The physical memory of a VM.
pub struct Partition {
    first: PhysPage,
    count: u32,
    file: File,
    ram: Vec<RamRange>,
}

impl Partition {
    /// Creates a partition of these pages. Its contents are those of a new file, or of the file
    /// that its front has kept from an earlier mediator, which must be safe to map.
    pub fn new(first: PhysPage, count: u32, kept: Option<File>) -> io::Result<Self> {
        let len = u64::from(count) * PAGE;
        let file = match kept {
            Some(file) if is_safe_to_map(&file) && file.metadata()?.len() >= len => file,
            Some(_) => return Err(io::ErrorKind::InvalidInput.into()),
            None => sealed(c"gantry-gpu-partition", len)?,
        };
        Ok(Self {
            first,
            count,
            file,
            ram: Vec::new(),
        })
    }

    /// The file with the memory; the front gets a descriptor of it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The first page, and the number of pages.
    pub fn pages(&self) -> (PhysPage, u32) {
        (self.first, self.count)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.count) * PAGE
    }

    /// The RAM that the GPU can access.
    pub fn ram(&self) -> &[RamRange] {
        &self.ram
    }

    /// Number of GPU bus pages that the RAM occupies.
    pub fn dma_pages(&self) -> u32 {
        self.ram.iter().map(|range| dma_pages(range.count)).sum()
    }

    /// Whether a range can be added: it must not overlap another one.
    pub fn has_room_for(&self, first: Gfn, count: u32) -> bool {
        let Some(end) = first.0.checked_add(count) else {
            return false;
        };
        let apart =
            |range: &RamRange| end <= range.first.0 || range.first.0 + range.count <= first.0;
        self.ram.len() < MOST_RANGES && self.ram.iter().all(apart)
    }

    /// Adds a RAM range; see [`Self::has_room_for`].
    pub fn add(&mut self, range: RamRange) {
        self.ram.push(range);
    }

    /// The physical page for a page of the guest, of which `count` consecutive ones are used.
    fn vram(&self, page: u32, count: u32) -> Option<u32> {
        let end = page.checked_add(count)?;
        (end <= self.count).then(|| self.first.0 + page)
    }

    fn dma(&self, page: u32, count: u32) -> Option<u32> {
        let end = page.checked_add(count)?;
        let range = self
            .ram
            .iter()
            .find(|range| range.first.0 <= page && end <= range.first.0 + range.count)?;
        Some(range.dma.0 + (page - range.first.0))
    }

    /// The physical page table entry for a page of the guest. `None` unless the whole page belongs
    /// to the VM and its start is aligned to its size.
    pub fn entry(&self, target: Target, size: Size, read_only: bool, kind: u8) -> Option<Pte> {
        let count = match size {
            Size::Small => 1,
            Size::Large => PER_LARGE,
        };
        let physical = match target {
            Target::Vram(page) => self.vram(page.0, count).map(|page| {
                let page = gf100::format::VramPage(page);
                Target::Vram(page)
            }),
            Target::Ram(page) => self.dma(page.0, count).map(|page| Target::Ram(Gfn(page))),
        }?;
        let number = match physical {
            Target::Vram(page) => page.0,
            Target::Ram(page) => page.0,
        };
        if number % count != 0 {
            return None;
        }
        Some(Pte {
            read_only,
            // Compression tags are a resource that is not shared.
            kind: if kind == 0 { 0 } else { TILED },
            ..Pte::linear(physical)
        })
    }
}

#[cfg(test)]
mod tests {
    use gf100::format::VramPage;
    use proptest::prelude::*;

    use super::*;

    fn partition() -> Partition {
        let mut partition = Partition::new(PhysPage(320), 96, None).expect("there is room");
        partition.add(RamRange {
            first: Gfn(0x1000),
            count: 64,
            dma: DmaPage(64),
        });
        partition
    }

    proptest! {
        #[test]
        fn an_entry_reaches_the_vms_own_pages_only(
            page in 0_u32..0x1100,
            is_ram: bool,
            is_large: bool,
        ) {
            let partition = partition();
            let target = if is_ram { Target::Ram(Gfn(page)) } else { Target::Vram(VramPage(page)) };
            let size = if is_large { Size::Large } else { Size::Small };
            if let Some(entry) = partition.entry(target, size, false, 0) {
                let count = if is_large { PER_LARGE } else { 1 };
                let (first, end) = if is_ram { (64, 128) } else { (320, 416) };
                prop_assert!(first <= entry.number && entry.number + count <= end);
                prop_assert_eq!(entry.number % count, 0);
                prop_assert_eq!(entry.tag, 0);
                prop_assert!(!entry.privileged);
            }
        }
    }

    #[test]
    fn a_file_that_was_kept_is_taken_if_it_stays_as_long() {
        let len = 96 * PAGE;
        let made = |file| Partition::new(PhysPage(320), 96, Some(file));
        let kept = sealed(c"kept", len).expect("there is room");
        assert!(made(kept).is_ok());
        assert!(made(sealed(c"short", len - PAGE).expect("there is room")).is_err());
        let loose = tempfile::tempfile().expect("there is room");
        loose.set_len(len).expect("there is room");
        assert!(made(loose).is_err());
        let huge = super::super::memory::tests::huge(len.next_multiple_of(2 << 20));
        assert!(made(huge).is_err());
    }

    #[test]
    fn a_page_that_straddles_the_end_is_refused() {
        let partition = partition();
        let of = |page, size| {
            let target = Target::Vram(VramPage(page));
            partition
                .entry(target, size, false, 0)
                .map(|entry| entry.number)
        };
        assert_eq!(of(95, Size::Small), Some(415));
        assert_eq!(of(96, Size::Small), None);
        assert_eq!(of(64, Size::Large), Some(384));
        assert_eq!(of(65, Size::Large), None, "its last page is outside");
        assert_eq!(of(1, Size::Large), None, "not where a large page can be");
        assert_eq!(of(u32::MAX, Size::Large), None);
        assert!(!partition.has_room_for(Gfn(0x103f), 1));
        assert!(!partition.has_room_for(Gfn(u32::MAX), 2));
        assert!(partition.has_room_for(Gfn(0x1040), 1));
    }
}
