//! A queue being served: taking chains, giving them back, telling the driver when it wants to
//! know. For devices that answer a request as soon as they see it.

use std::sync::Arc;

use virtio_bindings::bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestAddressSpace;

use super::device::{ActiveQueue, VirtioInterrupt};
use crate::memory::{GuestMemory, GuestRam};

/// Features that every device offers: the modern interface, event indices, indirect descriptors.
pub const COMMON_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// What became of a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Chain {
    /// It was used; so many bytes were written to it.
    Used(u32),
    /// Nothing can be done with it now: it stays in the queue, and serving ends.
    Later,
}

/// A queue with all that serving it takes.
pub struct ServedQueue {
    /// The queue.
    pub active: ActiveQueue,
    memory: GuestMemory,
    interrupt: Arc<dyn VirtioInterrupt>,
    /// The device's name, for messages.
    name: String,
    /// The driver made the queue unusable; it is left alone until the device is reset.
    broken: bool,
}

impl ServedQueue {
    /// A queue that the driver has set up with `features`.
    pub fn new(
        mut active: ActiveQueue,
        memory: GuestMemory,
        interrupt: Arc<dyn VirtioInterrupt>,
        features: u64,
        name: &str,
    ) -> Self {
        active
            .queue
            .set_event_idx(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        Self {
            active,
            memory,
            interrupt,
            name: name.to_owned(),
            broken: false,
        }
    }

    /// Takes the kick back, so that the event loop sees the next one.
    pub fn acknowledge_kick(&self) {
        // Fails only if someone else has read it.
        let _ = self.active.kick.read();
    }

    /// Wakes the event loop for this queue, as if the driver had kicked.
    pub fn wake(&self) {
        // Fails only when the counter is full: also readable.
        let _ = self.active.kick.write(1);
    }

    /// Hands every chain in the queue to `handle`, a queue's worth at most (then the queue wakes
    /// itself, so that other work gets its turn). Returns whether the queue is empty now.
    pub fn serve(
        &mut self,
        handle: impl FnMut(DescriptorChain<&GuestRam>, &GuestRam) -> Chain,
    ) -> bool {
        if self.broken {
            return true;
        }
        match self.try_serve(handle) {
            Ok(empty) => empty,
            Err(error) => {
                self.broken = true;
                log::warn!(
                    "queue {} of {} is unusable: {error}",
                    self.active.index,
                    self.name
                );
                self.interrupt.needs_reset();
                true
            }
        }
    }

    fn try_serve(
        &mut self,
        mut handle: impl FnMut(DescriptorChain<&GuestRam>, &GuestRam) -> Chain,
    ) -> Result<bool, virtio_queue::Error> {
        let memory = self.memory.memory();
        let ram: &GuestRam = &memory;
        let queue = &mut self.active.queue;
        let mut budget = queue.size();
        let mut used = false;
        let empty = loop {
            let chain = queue.iter(ram)?.next();
            let Some(chain) = chain else {
                if queue.enable_notification(ram)? {
                    continue;
                }
                break true;
            };
            let head = chain.head_index();
            match handle(chain, ram) {
                Chain::Used(len) => queue.add_used(ram, head, len)?,
                Chain::Later => {
                    queue.iter(ram)?.go_to_previous_position();
                    break false;
                }
            }
            used = true;
            budget -= 1;
            if budget == 0 {
                // Fails only when the counter is full: also readable.
                let _ = self.active.kick.write(1);
                break false;
            }
        };
        if used
            && queue.needs_notification(ram)?
            && let Err(error) = self.interrupt.queue(self.active.index)
        {
            log::error!("cannot interrupt the guest for {}: {error}", self.name);
        }
        Ok(empty)
    }
}

/// Copies the part of a configuration structure at `offset`; what is beyond reads as zero.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let tail = usize::try_from(offset)
        .ok()
        .and_then(|offset| config.get(offset..));
    let tail = tail.unwrap_or_default();
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
}
