//! Where a queue is in the guest's memory.

use std::sync::atomic::Ordering;

use device_model::memory::GuestMemory;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

/// Where a queue is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

impl Layout {
    pub(crate) fn of(queue: &Queue) -> Self {
        Self {
            size: queue.size(),
            descriptors: queue.desc_table(),
            available: queue.avail_ring(),
            used: queue.used_ring(),
        }
    }

    /// The number of entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// The index up to which the device has returned buffers.
    pub(crate) fn used_index(&self, memory: &GuestMemory) -> Option<u16> {
        index(self.used, memory)
    }

    /// The index up to which the driver has made buffers available.
    pub(crate) fn available_index(&self, memory: &GuestMemory) -> Option<u16> {
        index(self.available, memory)
    }

    /// The address of an entry of the available ring (virtio 1.2, 2.7.6).
    pub(crate) fn available_entry(&self, number: u16) -> Option<u64> {
        self.available.checked_add(4 + 2 * self.place(number))
    }

    /// The address of an entry of the used ring (2.7.8).
    pub(crate) fn used_entry(&self, number: u16) -> Option<u64> {
        self.used.checked_add(4 + 8 * self.place(number))
    }

    fn place(&self, number: u16) -> u64 {
        // The transport has checked that the size is not zero.
        u64::from(number.checked_rem(self.size).unwrap_or(0))
    }
}

/// The index of a ring, behind its flags.
fn index(ring: u64, memory: &GuestMemory) -> Option<u16> {
    let at = GuestAddress(ring.checked_add(2)?);
    let index = memory.memory().load::<u16>(at, Ordering::Acquire).ok();
    index.map(u16::from_le)
}
