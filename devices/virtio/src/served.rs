//! Serves a queue: takes chains, returns them, and notifies the driver when it asks for it. For
//! devices that answer each request immediately.

mod groups;

use std::sync::Arc;

use virtio_bindings::bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestAddressSpace;

pub use self::groups::{Next, Taken};
use device_model::memory::{GuestMemory, GuestRam};

use super::device::{ActiveQueue, VirtioInterrupt};

/// Features that every device offers: the modern interface, event indices, indirect descriptors.
pub const COMMON_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Outcome of handling a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Chain {
    /// The chain was used; this many bytes were written to it.
    Used(u32),
    /// The chain cannot be handled now: it stays in the queue, and serving stops.
    Later,
}

/// A queue together with everything needed to serve it.
pub struct ServedQueue {
    /// The queue.
    pub active: ActiveQueue,
    memory: GuestMemory,
    interrupt: Arc<dyn VirtioInterrupt>,
    /// Device name, for log messages.
    name: String,
    /// The driver has made the queue unusable. It is not served again until the device is reset.
    broken: bool,
}

impl ServedQueue {
    /// Wraps a queue that the driver has set up with the negotiated `features`.
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

    /// Clears the kick, so that the event loop sees the next one.
    pub fn acknowledge_kick(&self) {
        // Fails only if another reader has cleared it.
        let _ = self.active.kick.read();
    }

    /// Wakes the event loop for this queue, as if the driver had kicked.
    pub fn wake(&self) {
        // Fails only if the counter is full, in which case it is readable anyway.
        let _ = self.active.kick.write(1);
    }

    /// Passes the chains in the queue to `handle`, at most one queue's worth of them. After that
    /// the queue wakes itself, so that other work gets its turn whatever the driver does meanwhile.
    /// Returns whether the queue is now empty.
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
                self.give_up(&error);
                true
            }
        }
    }

    /// Stops serving a queue that the driver has made unusable.
    fn give_up(&mut self, error: &virtio_queue::Error) {
        self.broken = true;
        log::warn!(
            "queue {} of {} is unusable: {error}",
            self.active.index,
            self.name
        );
        self.interrupt.needs_reset();
    }

    fn try_serve(
        &mut self,
        mut handle: impl FnMut(DescriptorChain<&GuestRam>, &GuestRam) -> Chain,
    ) -> Result<bool, virtio_queue::Error> {
        let memory = self.memory.memory();
        let ram: &GuestRam = &memory;
        let queue = &mut self.active.queue;
        let mut used = false;
        let mut empty = None;
        // One step is either a chain, or a check whether the driver added one while notifications
        // were being enabled. A driver that keeps moving its index is thus bounded in both.
        for _ in 0..=queue.size() {
            let Some(chain) = queue.iter(ram)?.next() else {
                if queue.enable_notification(ram)? {
                    continue;
                }
                empty = Some(true);
                break;
            };
            let head = chain.head_index();
            match handle(chain, ram) {
                Chain::Used(len) => queue.add_used(ram, head, len)?,
                Chain::Later => {
                    queue.iter(ram)?.go_to_previous_position();
                    empty = Some(false);
                    break;
                }
            }
            used = true;
        }
        let empty = empty.unwrap_or_else(|| {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.active.kick.write(1);
            false
        });
        if used
            && queue.needs_notification(ram)?
            && let Err(error) = self.interrupt.queue(self.active.index)
        {
            log::error!("cannot interrupt the guest for {}: {error}", self.name);
        }
        Ok(empty)
    }
}

/// Copies the part of a configuration structure at `offset`. Bytes beyond its end read as zero.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let tail = usize::try_from(offset)
        .ok()
        .and_then(|offset| config.get(offset..));
    let tail = tail.unwrap_or_default();
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::testing::{
        raw::{RawQueue, WRITE},
        simple::Guest,
    };

    const SIZE: u16 = 4;
    const EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

    fn served(guest: &Guest, queue: &RawQueue, features: u64) -> ServedQueue {
        queue.describe(queue.table(), 0, (queue.free(), 8), WRITE, 0);
        let interrupt = guest.interrupts.clone();
        ServedQueue::new(
            queue.active(),
            guest.memory.clone(),
            interrupt,
            features,
            "test",
        )
    }

    fn interrupts(guest: &Guest) -> usize {
        guest.interrupts.queue.load(Ordering::SeqCst)
    }

    #[test]
    fn an_unusable_queue_asks_for_a_reset_once_and_is_left_alone() {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        let mut served = served(&guest, &queue, 0);
        queue.offer(0);
        assert!(served.serve(|_, _| Chain::Used(0)));
        queue.set_available(SIZE + 2);
        for _ in 0..3 {
            assert!(served.serve(|_, _| panic!("more chains than the queue holds")));
        }
        assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 1);
        queue.set_available(2);
        assert!(served.serve(|_, _| panic!("broken until the driver resets the device")));
        assert_eq!((queue.used(), interrupts(&guest)), (1, 1));
    }

    #[test]
    fn a_chain_that_lies_outside_of_the_table_breaks_the_queue() {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        let mut served = served(&guest, &queue, 0);
        queue.offer(SIZE);
        served.serve(|_, _| Chain::Used(0));
        assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn with_event_indices_the_driver_is_interrupted_for_the_chain_that_it_named() {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        let mut served = served(&guest, &queue, EVENT_INDEX);
        queue.set_used_event(2);
        for (number, expected) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
            queue.offer(0);
            assert!(served.serve(|_, _| Chain::Used(0)));
            assert_eq!(interrupts(&guest), expected, "after chain {number}");
            assert_eq!(queue.available_event(), number, "kicks are wanted again");
        }
        // Several at once that pass the chain.
        queue.set_used_event(5);
        for _ in 0..3 {
            queue.offer(0);
        }
        assert!(served.serve(|_, _| Chain::Used(0)));
        assert_eq!(interrupts(&guest), 2);
    }

    #[test]
    fn without_event_indices_every_round_interrupts_once() {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        let mut served = served(&guest, &queue, 0);
        for _ in 0..3 {
            queue.offer(0);
        }
        assert!(served.serve(|_, _| Chain::Used(0)));
        assert!(served.serve(|_, _| panic!("all were used")));
        assert_eq!((queue.used(), interrupts(&guest)), (3, 1));
    }

    #[test]
    fn a_chain_that_cannot_be_used_yet_comes_again() {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        let mut served = served(&guest, &queue, EVENT_INDEX);
        queue.offer(0);
        assert!(!served.serve(|_, _| Chain::Later));
        assert_eq!((queue.used(), interrupts(&guest)), (0, 0));
        assert!(served.serve(|_, _| Chain::Used(3)));
        assert_eq!((queue.used(), queue.used_len(0)), (1, 3));
    }

    #[test]
    fn a_driver_that_adds_chains_as_fast_as_they_are_used_has_to_let_others_work() {
        for features in [0, EVENT_INDEX] {
            let guest = Guest::new();
            let queue = RawQueue::new(&guest, 0, SIZE);
            let mut served = served(&guest, &queue, features);
            queue.offer(0);
            let mut chains = 0;
            let empty = served.serve(|_, _| {
                chains += 1;
                assert!(chains < 100);
                queue.offer(0);
                Chain::Used(0)
            });
            assert!(!empty);
            assert_eq!(served.active.kick.read().unwrap(), 1, "it goes on later");
        }
    }
}
