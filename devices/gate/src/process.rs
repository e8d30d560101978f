//! Detects whether a process of the guest is still alive.
//!
//! The VMM is not told when a process of its guest ends: the guest's kernel knows nothing of the
//! gate, and a killed process sends no message. But its page table shows it. The kernel removes a
//! process's mappings, including the window, from its page table before it reuses the pages of the
//! table; it does the same when the process executes another program.

use std::sync::atomic::Ordering;

use device_model::memory::GuestRam;
use vm_memory::{Bytes, GuestAddress};

// Page-table entries (SDM volume 3, 4.5).
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Number of address bits below each level of four-level paging.
const LEVELS: [u32; 4] = [39, 30, 21, 12];

/// A process that has mapped the window.
#[derive(Debug)]
pub struct Process {
    cr3: u64,
    window: u64,
    place: u64,
}

impl Process {
    /// The process with page table `cr3`, if the virtual address of its window leads to the
    /// guest-physical address of the port's BAR. Other processes cannot be watched.
    pub fn find(ram: &GuestRam, cr3: u64, window: u64, place: u64) -> Option<Self> {
        let process = Self { cr3, window, place };
        process.lives(ram).then_some(process)
    }

    /// Whether it is still alive. Costs four reads of guest memory. A guest that fakes a living or
    /// dead process deceives only itself: it keeps its pair, or loses it.
    pub fn lives(&self, ram: &GuestRam) -> bool {
        translate(ram, self.cr3, self.window) == Some(self.place)
    }
}

/// Translates a virtual address to a guest-physical one.
fn translate(ram: &GuestRam, cr3: u64, address: u64) -> Option<u64> {
    let mut table = cr3 & ADDRESS;
    for shift in LEVELS {
        // Cannot overflow: 52 bits plus 12.
        let at = table + ((address >> shift) & 511) * 8;
        let entry: u64 = ram.load(GuestAddress(at), Ordering::Relaxed).ok()?;
        if entry & PRESENT == 0 {
            return None;
        }
        table = entry & ADDRESS;
        let is_page = shift == 12 || (shift < 39 && entry & LARGE != 0);
        if is_page {
            let offset = (1 << shift) - 1;
            return Some(table & !offset | address & offset);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use device_model::testing::guest_memory;
    use proptest::prelude::*;
    use vm_memory::GuestAddressSpace;

    use super::*;

    const CR3: u64 = 0x1000;
    const WINDOW: u64 = 0x40_0000_0000;
    const PLACE: u64 = 0xc_0000_0000;

    /// Tables at 0x1000, 0x2000, 0x3000 and 0x4000.
    fn map(ram: &GuestRam, page: u64) {
        for (level, next) in [(0, 0x2000), (1, 0x3000), (2, 0x4000), (3, page)] {
            let index = (WINDOW >> LEVELS[level]) & 511;
            let at = CR3 + 0x1000 * level as u64 + index * 8;
            let entry: u64 = next | 0x67;
            ram.write_obj(entry, GuestAddress(at)).unwrap();
        }
    }

    #[test]
    fn a_process_lives_until_its_window_is_not_mapped_any_more() {
        let memory = guest_memory(1 << 16);
        let ram = memory.memory();
        assert!(Process::find(&ram, CR3, WINDOW, PLACE).is_none());
        map(&ram, PLACE);
        // With a PCID, as kernels use it.
        let process = Process::find(&ram, CR3 | 5, WINDOW, PLACE).unwrap();
        assert!(process.lives(&ram));
        // Another mapping is there, as in another process that received the page of the table.
        map(&ram, 0x9000);
        assert!(!process.lives(&ram));
        map(&ram, PLACE);
        assert!(process.lives(&ram));
        ram.write_obj(0_u64, GuestAddress(CR3)).unwrap();
        assert!(!process.lives(&ram));
    }

    #[test]
    fn a_window_of_large_pages_is_found_and_tables_that_are_no_ram_end_the_search() {
        let memory = guest_memory(1 << 16);
        let ram = memory.memory();
        map(&ram, PLACE);
        let large: u64 = PLACE | 0xe7;
        ram.write_obj(large, GuestAddress(0x3000)).unwrap();
        assert_eq!(translate(&ram, CR3, WINDOW + 5), Some(PLACE + 5));
        ram.write_obj(0xffff_f067_u64, GuestAddress(0x3000))
            .unwrap();
        assert_eq!(translate(&ram, CR3, WINDOW), None);
    }

    proptest! {
        #[test]
        fn any_tables_come_to_an_end(
            words in proptest::collection::vec(any::<u64>(), 512),
            cr3 in any::<u64>(),
            address in any::<u64>(),
        ) {
            let memory = guest_memory(1 << 16);
            let ram = memory.memory();
            for (at, word) in (0..).step_by(8).zip(words) {
                // Mostly inside the memory.
                ram.write_obj(word & !0xf_ffff_ffff_0000, GuestAddress(at)).unwrap();
            }
            translate(&ram, cr3, address);
            translate(&ram, cr3 & 0xf000, address);
        }
    }
}
