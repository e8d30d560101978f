//! The driver's description of a queue, and its conversion to a [`Queue`].

use device_model::memory::GuestRam;
use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

/// The driver's description of a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// Size in entries.
    pub size: u16,
    /// The driver has enabled the queue.
    pub enabled: bool,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the available ring.
    pub driver: u64,
    /// Address of the used ring.
    pub device: u64,
}

/// How far the device has processed a queue.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct QueueProgress {
    /// Index of the next available entry to take.
    pub next_avail: u16,
    /// Index of the next used entry to write.
    pub next_used: u16,
}

/// Why a queue cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum QueueError {
    #[error("{0}")]
    Registers(virtio_queue::Error),
    #[error("the {part} at {address:#x} ({len:#x} bytes) is not in guest memory")]
    NotInMemory {
        part: &'static str,
        address: u64,
        len: u64,
    },
}

impl QueueRegisters {
    /// The registers of a queue after reset.
    pub(super) fn new(max_size: u16) -> Self {
        Self {
            size: max_size,
            enabled: false,
            descriptors: 0,
            driver: 0,
            device: 0,
        }
    }

    /// Checks size, alignment and addresses, then builds the queue.
    pub(super) fn build(
        &self,
        max_size: u16,
        event_index: bool,
        progress: QueueProgress,
        memory: &GuestRam,
    ) -> Result<Queue, QueueError> {
        let queue = Queue::try_from(QueueState {
            max_size,
            next_avail: progress.next_avail,
            next_used: progress.next_used,
            event_idx_enabled: event_index,
            size: self.size,
            ready: true,
            desc_table: self.descriptors,
            avail_ring: self.driver,
            used_ring: self.device,
        })
        .map_err(QueueError::Registers)?;
        // Sizes as in 2.7: a ring has a header of 4 bytes and an event field of 2. None of these
        // can overflow, because the queue size is 16 bits.
        let size = u64::from(self.size);
        for (part, address, len, access) in [
            (
                "descriptor table",
                self.descriptors,
                16 * size,
                Permissions::Read,
            ),
            (
                "available ring",
                self.driver,
                6 + 2 * size,
                Permissions::Read,
            ),
            ("used ring", self.device, 6 + 8 * size, Permissions::Write),
        ] {
            let fits = address.checked_add(len).is_some()
                && memory.check_range(GuestAddress(address), len as usize, access);
            if !fits {
                return Err(QueueError::NotInMemory { part, address, len });
            }
        }
        debug_assert!(queue.is_valid(memory));
        Ok(queue)
    }
}

impl QueueProgress {
    /// The progress of `queue`.
    pub(super) fn of(queue: &Queue) -> Self {
        Self {
            next_avail: queue.next_avail(),
            next_used: queue.next_used(),
        }
    }
}
