//! Returns chains to the driver in groups, such as the chains that hold one frame.

use std::sync::atomic::{Ordering, fence};

use device_model::memory::GuestRam;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::ServedQueue;

/// What to do after a step of [`ServedQueue::serve_groups`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Next {
    /// Take another step.
    Step,
    /// Continue when the driver has made more chains available.
    MoreChains,
    /// Stop until another event occurs.
    Later,
}

/// Chains that are taken off a queue together and returned together.
pub struct Taken<'a> {
    queue: &'a mut Queue,
    ram: &'a GuestRam,
    /// Chains taken but not yet published.
    held: u16,
}

impl<'a> Taken<'a> {
    /// Takes the next chain. `None` if there is none, or if a full queue of chains is already held.
    pub fn take(&mut self) -> Result<Option<DescriptorChain<&'a GuestRam>>, virtio_queue::Error> {
        if self.is_all() {
            // A conforming driver has made no more available.
            return Ok(None);
        }
        let chain = self.queue.iter(self.ram)?.next();
        self.held += u16::from(chain.is_some());
        Ok(chain)
    }

    /// Puts back the chain that was taken last.
    pub fn put_back(&mut self) {
        if self.held > 0 {
            self.held -= 1;
            self.queue
                .set_next_avail(self.queue.next_avail().wrapping_sub(1));
        }
    }

    /// Whether all chains that the queue can hold have been taken.
    pub fn is_all(&self) -> bool {
        self.held >= self.queue.size()
    }

    /// Guest RAM.
    pub fn ram(&self) -> &'a GuestRam {
        self.ram
    }

    /// Returns the oldest chains, as (head, bytes written). The driver sees either all of them or
    /// none.
    pub fn publish(&mut self, used: &[(u16, u32)]) -> Result<(), virtio_queue::Error> {
        let Some((last, others)) = used.split_last() else {
            return Ok(());
        };
        // A used element has 8 bytes, after a header of 4 (2.7.8); the ring's address was
        // validated.
        let (ring, size) = (self.queue.used_ring(), self.queue.size());
        let mut next = self.queue.next_used();
        for (head, len) in others {
            let mut element = [0; 8];
            element[..2].copy_from_slice(&head.to_le_bytes());
            element[4..].copy_from_slice(&len.to_le_bytes());
            let at = ring + 4 + 8 * u64::from(next % size);
            self.ram
                .write_slice(&element, GuestAddress(at))
                .map_err(virtio_queue::Error::GuestMemory)?;
            next = next.wrapping_add(1);
        }
        self.queue.set_next_used(next);
        self.queue.add_used(self.ram, last.0, last.1)?;
        // At most the number taken. A buggy caller loses only chains of its own guest.
        self.held = self
            .held
            .saturating_sub(u16::try_from(used.len()).unwrap_or(u16::MAX));
        Ok(())
    }
}

/// Whether the driver wants an interrupt for the chains used since the used index was `before`
/// (2.7.7.2, 2.7.10). The queue's own count misses chains published as a group.
fn wants_interrupt(
    queue: &Queue,
    ram: &GuestRam,
    before: u16,
) -> Result<bool, virtio_queue::Error> {
    /// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
    const NO_INTERRUPT: u16 = 1;
    let now = queue.next_used();
    if now == before {
        return Ok(false);
    }
    // The used index must be visible before the driver's notification setting is read.
    fence(Ordering::SeqCst);
    let load = |at: u64| {
        ram.load::<u16>(GuestAddress(at), Ordering::Relaxed)
            .map(u16::from_le)
            .map_err(virtio_queue::Error::GuestMemory)
    };
    // The event field follows flags, index and ring; the ring's address was validated.
    let ring = queue.avail_ring();
    if !queue.event_idx_enabled() {
        return Ok(load(ring)? & NO_INTERRUPT == 0);
    }
    let event = load(ring + 4 + 2 * u64::from(queue.size()))?;
    Ok(now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before))
}

impl ServedQueue {
    /// Lets `step` take and publish chains until it returns [`Next::Later`] or runs out of chains,
    /// for at most one queue's worth of steps (after which the queue wakes itself). Chains that it
    /// has taken but not published go back into the queue. Interrupts the driver at most once.
    pub fn serve_groups(
        &mut self,
        step: impl FnMut(&mut Taken<'_>) -> Result<Next, virtio_queue::Error>,
    ) {
        if !self.broken
            && let Err(error) = self.try_serve_groups(step)
        {
            self.give_up(&error);
        }
    }

    fn try_serve_groups(
        &mut self,
        mut step: impl FnMut(&mut Taken<'_>) -> Result<Next, virtio_queue::Error>,
    ) -> Result<(), virtio_queue::Error> {
        // Runs one queue's worth of steps; false if there is more to do.
        fn run_steps(
            taken: &mut Taken<'_>,
            step: &mut impl FnMut(&mut Taken<'_>) -> Result<Next, virtio_queue::Error>,
        ) -> Result<bool, virtio_queue::Error> {
            for _ in 0..taken.queue.size() {
                match step(taken)? {
                    Next::Step => {}
                    Next::MoreChains => {
                        if !taken.queue.enable_notification(taken.ram)? {
                            return Ok(true);
                        }
                    }
                    Next::Later => return Ok(true),
                }
            }
            Ok(false)
        }
        let memory = self.memory.memory();
        let ram: &GuestRam = &memory;
        let before = self.active.queue.next_used();
        let mut taken = Taken {
            queue: &mut self.active.queue,
            ram,
            held: 0,
        };
        let result = run_steps(&mut taken, &mut step);
        let kept = taken.held;
        let queue = &mut self.active.queue;
        queue.set_next_avail(queue.next_avail().wrapping_sub(kept));
        if !result? {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.active.kick.write(1);
        }
        if wants_interrupt(queue, ram, before)?
            && let Err(error) = self.interrupt.queue(self.active.index)
        {
            log::error!("cannot interrupt the guest for {}: {error}", self.name);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

    use super::*;
    use crate::testing::{
        raw::{RawQueue, WRITE},
        simple::Guest,
    };

    const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

    /// A queue of 16 entries with `count` chains of one buffer available.
    fn served(guest: &Guest, features: u64, count: u16) -> (RawQueue, ServedQueue) {
        let raw = RawQueue::new(guest, 0, 16);
        for slot in 0..count {
            raw.describe(raw.table(), slot, (raw.free(), 64), WRITE, 0);
            raw.offer(slot);
        }
        let (memory, interrupt) = (guest.memory.clone(), guest.interrupts.clone());
        let queue = ServedQueue::new(raw.active(), memory, interrupt, features, "_test");
        (raw, queue)
    }

    fn take(taken: &mut Taken<'_>, count: usize) -> Vec<(u16, u32)> {
        let heads = (0..count).map(|_| taken.take().unwrap().unwrap().head_index());
        heads.zip(100..).collect()
    }

    #[test]
    fn chains_that_are_kept_are_back_in_the_queue() {
        let guest = Guest::new();
        let (raw, mut queue) = served(&guest, EVENT_IDX, 10);
        queue.serve_groups(|taken| {
            let used = take(taken, 5);
            taken.publish(&used[..2])?;
            taken.put_back();
            Ok(Next::Later)
        });
        assert_eq!(raw.used(), 2);
        assert_eq!([raw.used_len(0), raw.used_len(1)], [100, 101]);
        assert_eq!(queue.active.queue.next_avail(), 2);
        // And in the same order.
        queue.serve_groups(|taken| {
            assert_eq!(take(taken, 2), [(2, 100), (3, 101)]);
            Ok(Next::Later)
        });
    }

    #[test]
    fn one_interrupt_is_raised_if_the_driver_waits_for_any_chain_of_a_group() {
        for (event, interrupts) in [(0, 1), (1, 1), (4, 1), (5, 0), (u16::MAX, 0)] {
            let guest = Guest::new();
            let (raw, mut queue) = served(&guest, EVENT_IDX, 5);
            raw.set_used_event(event);
            queue.serve_groups(|taken| {
                let used = take(taken, 5);
                taken.publish(&used)?;
                Ok(Next::Later)
            });
            assert_eq!(raw.used(), 5);
            let raised = guest.interrupts.queue.load(Ordering::SeqCst);
            assert_eq!(raised, interrupts, "for chain {event}");
        }
    }

    #[test]
    fn a_driver_without_event_indices_is_interrupted_unless_it_says_no() {
        for (flags, interrupts) in [(0_u16, 1), (1, 0)] {
            let guest = Guest::new();
            let (_raw, mut queue) = served(&guest, 0, 5);
            let ring = GuestAddress(queue.active.queue.avail_ring());
            guest.memory.memory().write_obj(flags, ring).unwrap();
            // Nothing used, so no interrupt.
            queue.serve_groups(|_| Ok(Next::Later));
            queue.serve_groups(|taken| {
                let used = take(taken, 2);
                taken.publish(&used)?;
                Ok(Next::Later)
            });
            assert_eq!(guest.interrupts.queue.load(Ordering::SeqCst), interrupts);
        }
    }

    #[test]
    fn work_without_end_is_interrupted_and_goes_on_later() {
        let guest = Guest::new();
        let (_raw, mut queue) = served(&guest, EVENT_IDX, 0);
        let mut steps = 0;
        queue.serve_groups(|_| {
            steps += 1;
            Ok(Next::Step)
        });
        assert_eq!(steps, 16);
        assert_eq!(queue.active.kick.read().unwrap(), 1);
    }

    #[test]
    fn no_more_than_a_queues_worth_of_chains_is_taken() {
        let guest = Guest::new();
        let (raw, mut queue) = served(&guest, EVENT_IDX, 16);
        queue.serve_groups(|taken| {
            take(taken, 16);
            // A driver that makes more chains available than its queue holds.
            raw.set_available(20);
            assert!(taken.is_all());
            assert!(taken.take()?.is_none());
            Ok(Next::Later)
        });
        assert_eq!(queue.active.queue.next_avail(), 0);
    }

    #[test]
    fn a_queue_that_the_driver_broke_is_left_alone() {
        let guest = Guest::new();
        let (raw, mut queue) = served(&guest, EVENT_IDX, 2);
        raw.set_available(1000);
        for _ in 0..2 {
            queue.serve_groups(|taken| taken.take().map(|_| Next::Step));
        }
        assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 1);
    }
}
