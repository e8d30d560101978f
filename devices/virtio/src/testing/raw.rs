//! A queue whose rings are written by hand: for drivers that violate the rules, or that follow them
//! to the letter.

use std::sync::atomic::{Ordering, fence};

use device_model::memory::GuestMemory;
use virtio_queue::{Queue, QueueT};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::simple::Guest;
use crate::ActiveQueue;

/// Descriptor flag: another descriptor follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device may write.
pub const WRITE: u16 = 2;
/// Descriptor flag: the buffer is an indirect descriptor table.
pub const INDIRECT: u16 = 4;

/// Size of a queue's area in bytes.
const AREA: u64 = 0x10_0000;
/// Address of the first area.
const AREAS: u64 = 0x10_0000;
/// Offsets within an area: the rings and the free rest. The descriptor table is at offset 0.
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const FREE: u64 = 0x4000;

/// A split queue; nothing keeps its parts consistent.
pub struct RawQueue {
    memory: GuestMemory,
    index: u16,
    size: u16,
    base: u64,
    kick: EventFd,
}

impl RawQueue {
    /// Queue `index`, up to 15, with at most 256 entries. Its rings are empty, even if there was a
    /// queue of that index before.
    pub fn new(guest: &Guest, index: u16, size: u16) -> Self {
        let queue = Self {
            memory: guest.memory.clone(),
            index,
            size,
            base: AREAS + u64::from(index) * AREA,
            kick: EventFd::new(EFD_NONBLOCK).unwrap_or_else(|error| panic!("no eventfd: {error}")),
        };
        queue.set_available(0);
        queue.put(queue.base + USED + 2, 0_u16);
        queue
    }

    /// The queue as a device receives it when its driver has just set it up.
    pub fn active(&self) -> ActiveQueue {
        let mut queue =
            Queue::new(self.size).unwrap_or_else(|error| panic!("size {}: {error}", self.size));
        // The areas are below 4 GiB.
        let low = |address: u64| Some(address as u32);
        queue.set_size(self.size);
        queue.set_desc_table_address(low(self.base), Some(0));
        queue.set_avail_ring_address(low(self.base + AVAILABLE), Some(0));
        queue.set_used_ring_address(low(self.base + USED), Some(0));
        queue.set_ready(true);
        let kick = self
            .kick
            .try_clone()
            .unwrap_or_else(|error| panic!("no eventfd: {error}"));
        ActiveQueue {
            index: self.index,
            queue,
            kick,
        }
    }

    /// Address of the queue's own descriptor table.
    pub fn table(&self) -> u64 {
        self.base
    }

    /// Address of about 900 KiB that the queue does not use.
    pub fn free(&self) -> u64 {
        self.base + FREE
    }

    /// Writes descriptor `slot` of the table at `table`.
    pub fn describe(&self, table: u64, slot: u16, buffer: (u64, u32), flags: u16, next: u16) {
        let at = table + 16 * u64::from(slot);
        self.put(at, buffer.0);
        self.put(at + 8, buffer.1);
        self.put(at + 12, flags);
        self.put(at + 14, next);
    }

    /// Makes the chain that starts with descriptor `head` available; does not kick.
    pub fn offer(&self, head: u16) {
        let index = self.available();
        let slot = u64::from(index % self.size);
        self.put(self.base + AVAILABLE + 4 + 2 * slot, head);
        self.set_available(index.wrapping_add(1));
    }

    /// Number of chains made available.
    pub fn available(&self) -> u16 {
        self.get(self.base + AVAILABLE + 2)
    }

    /// Pretends that this many chains were made available; does not kick.
    pub fn set_available(&self, index: u16) {
        fence(Ordering::SeqCst);
        self.put(self.base + AVAILABLE + 2, index);
        fence(Ordering::SeqCst);
    }

    /// Wakes the device.
    pub fn kick(&self) {
        // Fails only if the counter is full, in which case it is readable anyway.
        let _ = self.kick.write(1);
    }

    /// Number of chains that the device has used.
    pub fn used(&self) -> u16 {
        let used = self.get(self.base + USED + 2);
        fence(Ordering::SeqCst);
        used
    }

    /// The length that the device reported for used entry `number`.
    pub fn used_len(&self, number: u16) -> u32 {
        self.get(self.base + USED + 8 + 8 * u64::from(number % self.size))
    }

    /// The index of the chain for which the device wants a kick (`avail_event`).
    pub fn available_event(&self) -> u16 {
        self.get(self.base + USED + 4 + 8 * u64::from(self.size))
    }

    /// Requests an interrupt when the chain with that index is used (`used_event`).
    pub fn set_used_event(&self, number: u16) {
        self.put(self.base + AVAILABLE + 4 + 2 * u64::from(self.size), number);
    }

    fn put<T: ByteValued>(&self, at: u64, value: T) {
        let put = self.memory.memory().write_obj(value, GuestAddress(at));
        put.unwrap_or_else(|error| panic!("{at:#x}: {error}"));
    }

    fn get<T: ByteValued>(&self, at: u64) -> T {
        let got = self.memory.memory().read_obj(GuestAddress(at));
        got.unwrap_or_else(|error| panic!("{at:#x}: {error}"))
    }
}
