//! Giving guest memory back to the host, and taking it again.

use std::{fmt, io, ops::Range, sync::RwLock};

use base::lock::UnpoisonedRw;
use device_model::memory::{GuestRam, GuestRegion as Region};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};

use super::plugged::PluggedBlocks;

/// Gives memory back unless somebody needs it where it is.
#[derive(Default)]
pub struct Discards {
    /// Who needs it: while there is anybody, RAM stays as it is.
    holders: RwLock<usize>,
    blocks: PluggedBlocks,
}

impl Discards {
    /// All RAM stays where it is from now on, until [`Discards::release`]: a physical device
    /// would go on using a page that the guest no longer sees.
    pub fn hold(&self) {
        *self.holders.write_unpoisoned() += 1;
    }

    /// Takes one [`Discards::hold`] back.
    pub fn release(&self) {
        let mut holders = self.holders.write_unpoisoned();
        *holders = holders.saturating_sub(1);
    }

    /// Gives `len` bytes at `address` back to the host, but for what is held and for huge pages:
    /// a part of one frees nothing, and a whole one may be gone when the guest wants it again,
    /// which ends the guest. The guest reads zeroes there from now on, or what the file has if
    /// RAM is a private mapping of one. The part of the range that is not RAM is left out.
    /// Returns the bytes that were given back.
    pub fn discard(&self, ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
        // Kept until the memory is gone: whoever holds RAM next must see all of it or nothing.
        let holders = self.holders.read_unpoisoned();
        if *holders > 0 {
            return Ok(0);
        }
        discard_parts(ram, address, len, |region| {
            region.get_mmap().is_hugetlbfs() != Some(true)
        })
    }

    /// RAM that comes and goes in blocks.
    pub fn blocks(&self) -> &PluggedBlocks {
        &self.blocks
    }
}

impl fmt::Debug for Discards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discards").finish_non_exhaustive()
    }
}

/// As [`Discards::discard`], huge pages and what is held as well: for blocks that are not plugged,
/// which no device can reach, and of whole pages that are populated before the guest has them
/// again.
pub fn discard_blocks(ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
    discard_parts(ram, address, len, |_| true)
}

fn discard_parts(
    ram: &GuestRam,
    address: GuestAddress,
    len: u64,
    wanted: impl Fn(&Region) -> bool,
) -> io::Result<u64> {
    let mut given = 0;
    for (region, part) in parts(ram, address, len).filter(|(region, _)| wanted(region)) {
        let shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
        // A hole in the file behind shared memory. Both ways are reported to userfaultfd, which a
        // restore on demand relies on.
        let advice = if shared {
            libc::MADV_REMOVE
        } else {
            libc::MADV_DONTNEED
        };
        advise(region, &part, advice)?;
        // What the guest reads there from now on is new to a migration.
        region
            .bitmap()
            .mark_dirty(part.start as usize, (part.end - part.start) as usize);
        given += part.end - part.start;
    }
    Ok(given)
}

/// Takes `len` bytes at `address` from the host now, instead of when they are touched: an error
/// if it does not have them.
pub fn populate(ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<()> {
    for (region, part) in parts(ram, address, len) {
        while let Err(error) = advise(region, &part, libc::MADV_POPULATE_WRITE) {
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// The parts of a range that are RAM: each a region, and offsets in it.
fn parts(
    ram: &GuestRam,
    address: GuestAddress,
    len: u64,
) -> impl Iterator<Item = (&Region, Range<u64>)> {
    let end = address.0.saturating_add(len);
    ram.iter().filter_map(move |region| {
        let first = region.start_addr().0;
        let start = address.0.max(first);
        let stop = end.min(region.last_addr().0.saturating_add(1));
        (start < stop).then(|| (region, start - first..stop - first))
    })
}

/// Calls madvise for a range of offsets that lies within the region.
fn advise(region: &Region, part: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let host = region
        .get_host_address(vm_memory::MemoryRegionAddress(part.start))
        .map_err(io::Error::other)?;
    // Regions have lengths that are a usize.
    let size = (part.end - part.start) as usize;
    // SAFETY: the range lies within a mapping of guest memory, which the guest and devices only
    // access as bytes that may change at any time.
    if unsafe { libc::madvise(host.cast(), size, advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn discarded_memory_reads_as_zero_and_its_neighbours_keep_theirs() {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0x1000), 0x10000)]).unwrap();
        ram.write_slice(&[7; 0x10000], GuestAddress(0x1000))
            .unwrap();
        let given = Discards::default().discard(&ram, GuestAddress(0x2000), 0x1000);
        assert_eq!(given.unwrap(), 0x1000);
        let byte = |at| ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!(
            [byte(0x1fff), byte(0x2000), byte(0x2fff), byte(0x3000)],
            [7, 0, 0, 7]
        );
    }

    #[test]
    fn held_memory_stays() {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        ram.write_obj(7_u8, GuestAddress(0)).unwrap();
        let discards = Discards::default();
        discards.hold();
        assert_eq!(discards.discard(&ram, GuestAddress(0), 0x1000).unwrap(), 0);
        assert_eq!(ram.read_obj::<u8>(GuestAddress(0)).unwrap(), 7);
        discards.release();
        let given = discards.discard(&ram, GuestAddress(0), 0x1000).unwrap();
        assert_eq!(given, 0x1000);
    }

    #[test]
    fn what_is_not_ram_is_left_out() {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0x1000), 0x2000)]).unwrap();
        for (address, len, given) in [
            (0, 0x2000, 0x1000),
            (0x8000, 0x1000, 0),
            (u64::MAX - 10, u64::MAX, 0),
        ] {
            let discards = Discards::default();
            let result = discards.discard(&ram, GuestAddress(address), len);
            assert_eq!(result.unwrap(), given);
            populate(&ram, GuestAddress(address), len).unwrap();
        }
    }

    #[test]
    fn huge_pages_are_given_back_only_as_blocks() {
        let region = vm_memory::mmap::MmapRegionBuilder::new(0x2000)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_PRIVATE)
            // Said of ordinary memory: not every machine has huge pages.
            .with_hugetlbfs(true)
            .build()
            .unwrap();
        let region = Region::new(region, GuestAddress(0)).unwrap();
        let ram = GuestRam::from_regions(vec![region]).unwrap();
        let discards = Discards::default();
        assert_eq!(discards.discard(&ram, GuestAddress(0), 0x1000).unwrap(), 0);
        let given = discard_blocks(&ram, GuestAddress(0), 0x1000);
        assert_eq!(given.unwrap(), 0x1000);
    }
}
