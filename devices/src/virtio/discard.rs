//! Giving guest memory back to the host.

use std::{io, os::fd::AsRawFd};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::GuestRam;

/// Gives `len` bytes at `address` back to the host; the guest reads zeroes there from now on.
/// The part of the range that is not RAM is left out. Returns the bytes that were given back.
pub fn discard(ram: &GuestRam, address: GuestAddress, len: u64) -> io::Result<u64> {
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
    let private = region.get_mmap().flags() & libc::MAP_SHARED == 0;
    let hugepages = region.get_mmap().is_hugetlbfs() == Some(true);
    let result = match region.file_offset() {
        // A hole in the file behind shared memory.
        Some(file) if !private || hugepages => {
            let at = file.start().saturating_add(offset);
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: a system call on an open file; memory is only read as zeroes afterwards.
            unsafe {
                libc::fallocate(
                    file.file().as_raw_fd(),
                    mode,
                    at as libc::off_t,
                    len as libc::off_t,
                )
            }
        }
        // SAFETY: the range lies within a mapping of guest memory, which the guest and devices
        // only access as bytes that may change at any time.
        _ => unsafe { libc::madvise(host.cast(), size, libc::MADV_DONTNEED) },
    };
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
