//! Address decoding for trapped accesses: port I/O and MMIO.
//!
//! Every exit that userspace handles performs a lookup, so lookups take no lock: a reader loads the
//! current map (one atomic load) and searches it; a change publishes a new map. Old maps are kept
//! while a reader may use them, so that a reader never drops the last reference to a device.

use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::ArcSwap;
use base::Unpoisoned;

/// A device that handles trapped accesses.
///
/// Methods take `&self`: vCPUs call them concurrently, and each device synchronizes only the state
/// that they share. `data` is 1, 2, 4 or 8 bytes long for port I/O and MMIO.
pub trait BusDevice: Send + Sync {
    /// Fills `data` from the registers at `offset` within the device's range.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` to the registers at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range could not be inserted.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// Another device decodes part of the range.
    #[error("addresses {base:#x} to {end:#x} overlap another device's")]
    Overlap {
        /// First address of the range.
        base: u64,
        /// Last address of the range.
        end: u64,
    },
    /// The range is empty or wraps around.
    #[error("{len:#x} bytes at {base:#x} are not an address range")]
    InvalidRange {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
}

#[derive(Clone)]
struct Entry {
    base: u64,
    end: u64,
    device: Arc<dyn BusDevice>,
}

/// An address space that is decoded to devices.
#[derive(Default)]
pub struct Bus {
    /// Sorted by base, without overlaps.
    entries: ArcSwap<Vec<Entry>>,
    /// Earlier maps that are still being read, or that hold a removed device. Locked while the map
    /// changes.
    retired: Mutex<Vec<Arc<Vec<Entry>>>>,
}

impl Bus {
    /// Creates an empty bus: reads return all ones, writes are dropped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers `device` for `len` bytes from `base`.
    pub fn insert(&self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), BusError> {
        let Some(end) = len.checked_sub(1).and_then(|last| base.checked_add(last)) else {
            return Err(BusError::InvalidRange { base, len });
        };
        let mut retired = self.lock();
        let mut entries = Vec::clone(&self.entries.load());
        let at = entries.partition_point(|entry| entry.end < base);
        if entries.get(at).is_some_and(|next| next.base <= end) {
            return Err(BusError::Overlap { base, end });
        }
        entries.insert(at, Entry { base, end, device });
        self.publish(entries, &mut retired);
        Ok(())
    }

    /// Removes the range that was inserted at `base`; false if there is none.
    pub fn remove(&self, base: u64) -> bool {
        let mut retired = self.lock();
        let mut entries = Vec::clone(&self.entries.load());
        let before = entries.len();
        entries.retain(|entry| entry.base != base);
        let removed = entries.len() != before;
        self.publish(entries, &mut retired);
        removed
    }

    /// Makes a map the current one. Drops earlier maps that have no readers, except those that hold
    /// the last reference to a device: this may be a vCPU thread.
    fn publish(&self, entries: Vec<Entry>, retired: &mut Vec<Arc<Vec<Entry>>>) {
        let current = Arc::new(entries);
        retired.push(self.entries.swap(Arc::clone(&current)));
        let stays = |old: &Entry| {
            let same = |new: &Entry| Arc::ptr_eq(&new.device, &old.device);
            current.iter().any(same)
        };
        retired.retain(|map| Arc::strong_count(map) > 1 || !map.iter().all(stays));
    }

    /// Drops removed devices that are not being accessed any more; false if any still is. For the
    /// thread that may close their host resources.
    pub fn reclaim(&self) -> bool {
        let mut retired = self.lock();
        retired.retain(|map| Arc::strong_count(map) > 1);
        retired.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Vec<Entry>>>> {
        self.retired.lock_unpoisoned()
    }

    /// Reads from the device at `address`; false (and all ones) if there is none.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match lookup(&self.entries.load(), address, data.len()) {
            Some((device, offset)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Writes to the device at `address`; false if there is none.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match lookup(&self.entries.load(), address, data.len()) {
            Some((device, offset)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }
}

/// The device whose range contains all `len` bytes at `address`, and the offset in its range.
fn lookup(entries: &[Entry], address: u64, len: usize) -> Option<(&dyn BusDevice, u64)> {
    let at = entries.partition_point(|entry| entry.end < address);
    let entry = entries.get(at)?;
    let last = address.checked_add((len as u64).checked_sub(1)?)?;
    (entry.base <= address && last <= entry.end)
        .then(|| (entry.device.as_ref(), address - entry.base))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Default)]
    struct Register(AtomicU64);

    impl BusDevice for Register {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(self.0.load(Ordering::Relaxed) as u8 + offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.store(u64::from(data[0]) + offset, Ordering::Relaxed);
        }
    }

    #[test]
    fn accesses_reach_the_device_that_decodes_them() {
        let bus = Bus::new();
        bus.insert(0x10, 0x10, Arc::<Register>::default()).unwrap();
        bus.insert(0x20, 0x10, Arc::<Register>::default()).unwrap();
        assert!(bus.write(0x24, &[1]));
        let mut data = [0; 2];
        assert!(bus.read(0x20, &mut data));
        assert_eq!(data, [5, 5]);
        assert!(bus.read(0x1e, &mut data));
        assert_eq!(data, [0xe, 0xe]);
    }

    #[test]
    fn an_access_that_straddles_a_border_or_hits_nothing_reads_ones() {
        let bus = Bus::new();
        bus.insert(0x10, 0x10, Arc::<Register>::default()).unwrap();
        for address in [0, 0xf, 0x1f, 0x20, u64::MAX] {
            let mut data = [0; 2];
            assert!(!bus.read(address, &mut data), "{address:#x}");
            assert_eq!(data, [0xff, 0xff]);
        }
    }

    #[test]
    fn a_removed_device_is_dropped_by_whoever_reclaims_it() {
        let bus = Bus::new();
        let device = Arc::<Register>::default();
        bus.insert(0x100, 4, Arc::clone(&device) as Arc<_>).unwrap();
        // A reader that is still active.
        let reader = bus.entries.load_full();
        bus.remove(0x100);
        assert!(!bus.reclaim());
        drop(reader);
        assert_eq!(Arc::strong_count(&device), 2, "the reader was not the last");
        assert!(bus.reclaim());
        assert_eq!(Arc::strong_count(&device), 1);
        // Moves leave nothing to reclaim.
        for base in [0x100, 0x200, 0x300] {
            bus.insert(base, 4, Arc::clone(&device) as Arc<_>).unwrap();
            bus.remove(base);
        }
        bus.insert(0x100, 4, Arc::clone(&device) as Arc<_>).unwrap();
        assert_eq!(Arc::strong_count(&device), 2);
    }

    #[test]
    fn overlapping_and_wrapping_ranges_are_refused() {
        let bus = Bus::new();
        bus.insert(0x10, 0x10, Arc::<Register>::default()).unwrap();
        for (base, len) in [(0, 0x11), (0x1f, 1), (0x18, 4), (0, 0x100)] {
            assert!(bus.insert(base, len, Arc::<Register>::default()).is_err());
        }
        assert!(bus.insert(1, 0, Arc::<Register>::default()).is_err());
        assert!(bus.insert(u64::MAX, 2, Arc::<Register>::default()).is_err());
        bus.insert(u64::MAX, 1, Arc::<Register>::default()).unwrap();
        assert!(bus.remove(0x10));
        assert!(!bus.remove(0x10));
    }
}
