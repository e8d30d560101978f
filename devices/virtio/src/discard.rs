//! Returns guest memory to the host and populates it again.

use std::{fmt, io, ops::Range, sync::RwLock};

use base::lock::UnpoisonedRw;
use device_model::memory::{GuestRam, GuestRegion as Region};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};

use super::plugged::PluggedBlocks;

/// Discards guest memory, unless a holder needs it to stay in place.
#[derive(Default)]
pub struct Discards {
    /// Number of holders. While it is not 0, no RAM is discarded.
    holders: RwLock<usize>,
    blocks: PluggedBlocks,
}

impl Discards {
    /// Keeps all RAM in place until [`Discards::release`]: a passthrough device would go on using a
    /// page that the guest no longer sees.
    pub fn hold(&self) {
        *self.holders.write_unpoisoned() += 1;
    }

    /// Undoes one [`Discards::hold`].
    pub fn release(&self) {
        let mut holders = self.holders.write_unpoisoned();
        *holders = holders.saturating_sub(1);
    }

    /// Returns `len` bytes at `address` to the host, except while RAM is held, and except for huge
    /// pages: discarding a part of one frees nothing, and a whole one may be unavailable when the
    /// guest touches it again, which would kill the guest. Afterwards the guest reads zeroes there,
    /// or the file's content if RAM is a private mapping of a file. Parts of the range that are not
    /// RAM are skipped. Returns the number of bytes discarded.
    pub fn discard(&self, ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
        // Held until the memory is gone: the next holder must see all of it or nothing.
        let holders = self.holders.read_unpoisoned();
        if *holders > 0 {
            return Ok(0);
        }
        discard_parts(ram, address, len, |region| {
            region.get_mmap().is_hugetlbfs() != Some(true)
        })
    }

    /// RAM that is plugged and unplugged in blocks.
    pub fn blocks(&self) -> &PluggedBlocks {
        &self.blocks
    }
}

impl fmt::Debug for Discards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discards").finish_non_exhaustive()
    }
}

/// Like [`Discards::discard`], but includes huge pages and held RAM. For blocks that are unplugged,
/// so that no device can reach them, and that consist of whole pages which are populated before the
/// guest gets them again.
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
        // For shared memory, punches a hole in the file. Both are reported to userfaultfd, on which
        // an on-demand restore relies.
        let advice = if shared {
            libc::MADV_REMOVE
        } else {
            libc::MADV_DONTNEED
        };
        advise(region, &part, advice)?;
        // To a migration, the guest's new view of this range is a change.
        region
            .bitmap()
            .mark_dirty(part.start as usize, (part.end - part.start) as usize);
        given += part.end - part.start;
    }
    Ok(given)
}

/// Populates `len` bytes at `address` now instead of at the first access, and fails if the host has
/// not enough memory.
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

/// The parts of a range that are RAM, each as a region and the offsets in it.
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

/// Calls madvise on a range of offsets within the region.
fn advise(region: &Region, part: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let host = region
        .get_host_address(vm_memory::MemoryRegionAddress(part.start))
        .map_err(io::Error::other)?;
    // A region's length fits a usize.
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
            // Pretends that ordinary memory is huge pages: not every machine has any.
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
