//! Giving guest memory back to the host.

use std::{
    io,
    sync::{PoisonError, RwLock},
};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::GuestRam;

/// Gives memory back unless somebody needs it where it is.
#[derive(Debug, Default)]
pub struct Discards {
    /// Who needs it: while there is anybody, RAM stays as it is.
    holders: RwLock<usize>,
}

impl Discards {
    /// All RAM stays where it is from now on, until [`Discards::release`]: a physical device
    /// would go on using a page that the guest no longer sees.
    pub fn hold(&self) {
        *self.holders.write().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    /// Takes one [`Discards::hold`] back.
    pub fn release(&self) {
        let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
        *holders = holders.saturating_sub(1);
    }

    /// As [`discard`]; gives nothing back while RAM is held.
    pub fn discard(&self, ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
        // Kept until the memory is gone: whoever holds RAM next must see all of it or nothing.
        let holders = self.holders.read().unwrap_or_else(PoisonError::into_inner);
        if *holders > 0 {
            return Ok(0);
        }
        discard(ram, address, len)
    }
}

/// Gives `len` bytes at `address` back to the host; the guest reads zeroes there from now on, or
/// what the file has if RAM is a private mapping of one. The part of the range that is not RAM is
/// left out. Returns the bytes that were given back.
fn discard(ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
    let mut given = 0;
    let end = address.0.saturating_add(len);
    for region in ram.iter() {
        let start = address.0.max(region.start_addr().0);
        let stop = end.min(region.last_addr().0.saturating_add(1));
        if start < stop {
            discard_in(region, start - region.start_addr().0, stop - start)?;
            given += stop - start;
        }
    }
    Ok(given)
}

fn discard_in(region: &vm_memory::GuestRegionMmap<()>, offset: u64, len: u64) -> io::Result<()> {
    let to_io = |error: vm_memory::GuestMemoryError| io::Error::other(error);
    let host = region
        .get_host_address(vm_memory::MemoryRegionAddress(offset))
        .map_err(to_io)?;
    // The caller kept the range within the region, whose length is a usize.
    let size = len as usize;
    let shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
    // A hole in the file behind shared memory. Both ways are reported to userfaultfd, which a
    // restore on demand relies on.
    let advice = if shared {
        libc::MADV_REMOVE
    } else {
        libc::MADV_DONTNEED
    };
    // SAFETY: the range lies within a mapping of guest memory, which the guest and devices only
    // access as bytes that may change at any time.
    let result = unsafe { libc::madvise(host.cast(), size, advice) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn discarded_memory_reads_as_zero_and_its_neighbours_keep_theirs() {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0x1000), 0x10000)]).unwrap();
        ram.write_slice(&[7; 0x10000], GuestAddress(0x1000))
            .unwrap();
        assert_eq!(discard(&ram, GuestAddress(0x2000), 0x1000).unwrap(), 0x1000);
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
        assert_eq!(discard(&ram, GuestAddress(0), 0x2000).unwrap(), 0x1000);
        assert_eq!(discard(&ram, GuestAddress(0x8000), 0x1000).unwrap(), 0);
        assert_eq!(
            discard(&ram, GuestAddress(u64::MAX - 10), u64::MAX).unwrap(),
            0
        );
    }
}
