//! Drivers that violate the ring's rules, and the guarantees that hold regardless.

use std::sync::{Arc, atomic::Ordering};

use device_model::thread::Unconfined;
use proptest::prelude::*;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::{Options, Rng};
use crate::{
    Activation, VirtioDevice,
    testing::{
        raw::{INDIRECT, NEXT, RawQueue, WRITE},
        simple::Guest,
    },
};

const SIZE: u16 = 16;

fn rng() -> Rng {
    let options = Options {
        thread_name: "_rng0".to_owned(),
        source: "/dev/zero".into(),
    };
    Rng::new(options, Arc::new(Unconfined)).unwrap()
}

fn activation(guest: &Guest, queue: &RawQueue, features: u64) -> Activation {
    let mut activation = guest.activation_with(&[], features);
    activation.queues = vec![queue.active()];
    activation
}

/// An active device, with the features of [`Guest::activation`].
fn started(guest: &Guest) -> (Rng, RawQueue) {
    let mut rng = rng();
    let queue = RawQueue::new(guest, 0, SIZE);
    rng.activate(activation(guest, &queue, 0)).unwrap();
    (rng, queue)
}

/// Offers a chain and returns the used length that the device reports.
fn run(guest: &Guest, queue: &RawQueue, head: u16) -> u32 {
    let number = queue.used();
    queue.offer(head);
    queue.kick();
    guest.wait_until("the chain is used", || queue.used() != number);
    queue.used_len(number)
}

fn resets(guest: &Guest) -> usize {
    guest.interrupts.resets.load(Ordering::SeqCst)
}

#[test]
fn a_loop_of_descriptors_ends_and_the_device_goes_on() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    queue.describe(queue.table(), 0, (queue.free(), 8), WRITE | NEXT, 1);
    queue.describe(queue.table(), 1, (queue.free(), 8), WRITE | NEXT, 0);
    assert!(run(&guest, &queue, 0) <= 8 * u32::from(SIZE));
    queue.describe(queue.table(), 2, (queue.free(), 24), WRITE, 0);
    assert_eq!(run(&guest, &queue, 2), 24);
    assert_eq!(resets(&guest), 0);
    assert_eq!(rng.deactivate().len(), 1);
}

#[test]
fn a_buffer_of_no_length_gets_nothing() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    queue.describe(queue.table(), 0, (queue.free(), 0), WRITE, 0);
    assert_eq!(run(&guest, &queue, 0), 0);
    assert_eq!(rng.counters(), [("served_bytes", 0)]);
    rng.deactivate();
}

#[test]
fn indirect_tables_are_followed_and_nested_or_torn_ones_get_nothing() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    let (table, buffer) = (queue.free(), queue.free() + 0x1000);
    // More descriptors than the queue has.
    for slot in 0..40 {
        let flags = if slot < 39 { WRITE | NEXT } else { WRITE };
        queue.describe(table, slot, (buffer, 3), flags, slot + 1);
    }
    queue.describe(queue.table(), 0, (table, 40 * 16), INDIRECT, 0);
    assert_eq!(run(&guest, &queue, 0), 120);
    // A table within a table, a table that ends within a descriptor, and one outside RAM.
    queue.describe(table, 0, (table, 40 * 16), INDIRECT, 0);
    assert_eq!(run(&guest, &queue, 0), 0);
    queue.describe(queue.table(), 0, (table, 15), INDIRECT, 0);
    assert_eq!(run(&guest, &queue, 0), 0);
    queue.describe(queue.table(), 0, (u64::MAX - 64, 64), INDIRECT, 0);
    assert_eq!(run(&guest, &queue, 0), 0);
    rng.deactivate();
}

#[test]
fn overlapping_buffers_of_gigabytes_get_no_more_than_one_request_may_have() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    let table = queue.free();
    for slot in 0..200 {
        let flags = if slot < 199 { WRITE | NEXT } else { WRITE };
        queue.describe(table, slot, (0, 20 << 20), flags, slot + 1);
    }
    // All of them at address 0 and as long as the RAM below the queue.
    queue.describe(queue.table(), 0, (table, 200 * 16), INDIRECT, 0);
    assert_eq!(run(&guest, &queue, 0), 64 << 10);
    rng.deactivate();
}

#[test]
fn a_queue_with_impossible_indices_is_given_up_until_the_device_is_reset() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    queue.set_available(SIZE + 1);
    queue.kick();
    guest.wait_until("a reset is asked for", || resets(&guest) == 1);
    queue.kick();
    assert_eq!(rng.deactivate().len(), 1);
    assert_eq!(resets(&guest), 1, "asked for once");
    queue.set_available(0);
    rng.activate(activation(&guest, &queue, 0)).unwrap();
    queue.describe(queue.table(), 0, (queue.free(), 8), WRITE, 0);
    assert_eq!(run(&guest, &queue, 0), 8);
    rng.deactivate();
}

#[test]
fn a_head_outside_of_the_table_breaks_the_queue() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    queue.offer(SIZE);
    queue.kick();
    guest.wait_until("a reset is asked for", || resets(&guest) == 1);
    assert_eq!(rng.deactivate().len(), 1);
}

#[test]
fn a_driver_with_event_indices_is_interrupted_only_when_it_wants_to_be() {
    let guest = Guest::new();
    let mut rng = rng();
    let queue = RawQueue::new(&guest, 0, SIZE);
    let features = 1 << VIRTIO_RING_F_EVENT_IDX;
    queue.describe(queue.table(), 0, (queue.free(), 8), WRITE, 0);
    queue.set_used_event(2);
    rng.activate(activation(&guest, &queue, features)).unwrap();
    for _ in 0..2 {
        run(&guest, &queue, 0);
    }
    // Deactivated, so that nothing is still in flight.
    let queues = rng.deactivate();
    assert_eq!(guest.interrupts.queue.load(Ordering::SeqCst), 0);
    assert_eq!(queue.available_event(), 2, "kicks are wanted from here on");
    let mut again = guest.activation_with(&[], features);
    again.queues = queues;
    rng.activate(again).unwrap();
    run(&guest, &queue, 0);
    rng.deactivate();
    assert_eq!(guest.interrupts.queue.load(Ordering::SeqCst), 1);
}

#[test]
fn requests_made_while_the_device_stood_still_are_answered_when_it_goes_on() {
    let guest = Guest::new();
    let (mut rng, queue) = started(&guest);
    let queues = rng.deactivate();
    queue.describe(queue.table(), 0, (queue.free(), 8), WRITE, 0);
    queue.offer(0);
    queue.kick();
    let mut again = guest.activation(&[]);
    again.queues = queues;
    rng.activate(again).unwrap();
    guest.wait_until("the chain is used", || queue.used() == 1);
    assert_eq!(queue.used_len(0), 8);
    rng.deactivate();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_the_rings_hold_the_device_can_be_stopped(
        descriptors in prop::collection::vec(
            (prop_oneof![0..40_u64 << 20, any::<u64>()], any::<u32>(), 0..8_u16, 0..20_u16),
            16,
        ),
        heads in prop::collection::vec(0..18_u16, 0..16),
        event_indices: bool,
    ) {
        let guest = Guest::new();
        let queue = RawQueue::new(&guest, 0, SIZE);
        for (slot, (address, len, flags, next)) in (0..).zip(descriptors) {
            queue.describe(queue.table(), slot, (address, len), flags, next);
        }
        for head in heads {
            queue.offer(head);
        }
        let mut rng = rng();
        let features = u64::from(event_indices) << VIRTIO_RING_F_EVENT_IDX;
        rng.activate(activation(&guest, &queue, features)).unwrap();
        // The device sees the kick before it stops. Its own writes may hit its rings.
        queue.kick();
        prop_assert_eq!(rng.deactivate().len(), 1);
    }
}
