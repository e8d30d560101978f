//! Drivers that violate the ring's rules, and the guarantees that hold regardless.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex, atomic::Ordering},
};

use device_model::thread::Unconfined;
use proptest::prelude::*;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{Console, Options};
use crate::{
    VirtioDevice,
    testing::{
        raw::{INDIRECT, NEXT, RawQueue, WRITE},
        simple::Guest,
    },
};

const SIZE: u16 = 16;

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    fn text(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An active console, and the driver's side of it.
struct Rig {
    guest: Guest,
    console: Console,
    screen: Screen,
    receive: RawQueue,
    transmit: RawQueue,
}

impl Rig {
    fn new(features: u64) -> Self {
        let mut rig = Self::idle();
        rig.start(features);
        rig
    }

    fn idle() -> Self {
        let guest = Guest::new();
        let screen = Screen::default();
        let options = Options {
            thread_name: "_console0".to_owned(),
            size: None,
        };
        let output = Box::new(screen.clone());
        Self {
            console: Console::new(options, output, Arc::new(Unconfined)).unwrap(),
            screen,
            receive: RawQueue::new(&guest, 0, SIZE),
            transmit: RawQueue::new(&guest, 1, SIZE),
            guest,
        }
    }

    fn start(&mut self, features: u64) {
        let mut activation = self.guest.activation_with(&[], features);
        activation.queues = vec![self.receive.active(), self.transmit.active()];
        self.console.activate(activation).unwrap();
    }

    /// Offers a chain on a queue and returns the used length that the device reports.
    fn run(&self, queue: &RawQueue, head: u16) -> u32 {
        let number = queue.used();
        queue.offer(head);
        queue.kick();
        self.wait_used(queue, number)
    }

    fn wait_used(&self, queue: &RawQueue, number: u16) -> u32 {
        self.guest
            .wait_until("the chain is used", || queue.used() != number);
        queue.used_len(number)
    }

    fn type_in(&self, text: &[u8]) {
        assert_eq!(self.console.input().enqueue(text), text.len());
    }

    fn fill(&self, at: u64, bytes: &[u8]) {
        let memory = self.guest.memory.memory();
        memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn bytes(&self, at: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let memory = self.guest.memory.memory();
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    fn resets(&self) -> usize {
        self.guest.interrupts.resets.load(Ordering::SeqCst)
    }
}

#[test]
fn loops_of_descriptors_end_and_the_console_goes_on() {
    let mut rig = Rig::new(0);
    for (queue, flags) in [(&rig.transmit, NEXT), (&rig.receive, WRITE | NEXT)] {
        queue.describe(queue.table(), 0, (queue.free(), 4), flags, 1);
        queue.describe(queue.table(), 1, (queue.free(), 4), flags, 0);
    }
    rig.fill(rig.transmit.free(), b"ring");
    rig.run(&rig.transmit, 0);
    let printed = rig.screen.text();
    assert!(printed.len() <= 4 * usize::from(SIZE), "{}", printed.len());
    rig.type_in(b"x");
    assert_eq!(rig.run(&rig.receive, 0), 1);
    assert_eq!(rig.resets(), 0);
    assert_eq!(rig.console.deactivate().len(), 2);
}

#[test]
fn indirect_tables_carry_output_and_input() {
    let mut rig = Rig::new(0);
    for (queue, flags) in [(&rig.transmit, 0), (&rig.receive, WRITE)] {
        let (table, buffer) = (queue.free(), queue.free() + 0x1000);
        // More descriptors than the queue has, one byte each.
        for slot in 0..40 {
            let next = if slot < 39 { NEXT } else { 0 };
            let at = buffer + u64::from(slot);
            queue.describe(table, slot, (at, 1), flags | next, slot + 1);
        }
        queue.describe(queue.table(), 0, (table, 40 * 16), INDIRECT, 0);
    }
    let text = *b"forty bytes of text, spread over a table";
    rig.fill(rig.transmit.free() + 0x1000, &text);
    rig.run(&rig.transmit, 0);
    assert_eq!(rig.screen.text(), text);
    rig.type_in(&text);
    assert_eq!(rig.run(&rig.receive, 0), 40);
    assert_eq!(rig.bytes(rig.receive.free() + 0x1000, 40), text);
    rig.console.deactivate();
}

#[test]
fn buffers_without_room_take_no_input() {
    let mut rig = Rig::new(0);
    let queue = &rig.receive;
    queue.describe(queue.table(), 0, (queue.free(), 0), WRITE, 0);
    queue.describe(queue.table(), 1, (u64::MAX - 8, 64), WRITE, 0);
    queue.describe(queue.table(), 2, (queue.free(), 64), 0, 0);
    queue.describe(queue.table(), 3, (queue.free(), 64), WRITE, 0);
    rig.type_in(b"kept");
    for head in 0..3 {
        assert_eq!(rig.run(queue, head), 0, "descriptor {head}");
    }
    assert_eq!(rig.run(queue, 3), 4);
    assert_eq!(rig.bytes(queue.free(), 4), b"kept");
    rig.console.deactivate();
}

#[test]
fn a_broken_queue_asks_for_a_reset_once_and_leaves_the_other_one_alone() {
    let mut rig = Rig::new(0);
    rig.transmit.set_available(SIZE + 1);
    rig.transmit.kick();
    rig.guest
        .wait_until("a reset is asked for", || rig.resets() == 1);
    rig.transmit.kick();
    let queue = &rig.receive;
    queue.describe(queue.table(), 0, (queue.free(), 8), WRITE, 0);
    rig.type_in(b"alive");
    assert_eq!(rig.run(queue, 0), 5);
    assert_eq!(rig.console.deactivate().len(), 2);
    assert_eq!(rig.resets(), 1);
    // After the reset.
    rig.transmit.set_available(0);
    rig.receive = RawQueue::new(&rig.guest, 2, SIZE);
    rig.start(0);
    let queue = &rig.transmit;
    queue.describe(queue.table(), 0, (queue.free(), 5), 0, 0);
    rig.fill(queue.free(), b"again");
    rig.run(queue, 0);
    assert_eq!(rig.screen.text(), b"again");
    rig.console.deactivate();
}

#[test]
fn input_reaches_a_driver_that_kicks_only_when_it_is_asked_to() {
    let mut rig = Rig::new(1 << VIRTIO_RING_F_EVENT_IDX);
    let queue = &rig.receive;
    queue.describe(queue.table(), 0, (queue.free(), 2), WRITE, 0);
    let mut got = Vec::new();
    let mut sent = Vec::new();
    for round in 0..100_u8 {
        let text = [round, round, round];
        rig.type_in(&text);
        sent.extend(text);
        // Two bytes per buffer, so that input waits for buffers and buffers wait for input.
        while got.len() + 1 < sent.len() {
            let number = queue.used();
            queue.offer(0);
            if queue.available_event() == number {
                queue.kick();
            }
            let len = rig.wait_used(queue, number);
            got.extend(rig.bytes(queue.free(), len));
        }
    }
    assert_eq!(got, sent[..got.len()]);
    rig.console.deactivate();
}

#[test]
fn buffers_that_came_before_any_input_are_kept_for_it() {
    let mut rig = Rig::new(0);
    for slot in 0..3 {
        let at = rig.receive.free() + 16 * u64::from(slot);
        let table = rig.receive.table();
        rig.receive.describe(table, slot, (at, 2), WRITE, 0);
        rig.receive.offer(slot);
    }
    rig.receive.kick();
    // After deactivation the console has certainly seen them without input.
    let queues = rig.console.deactivate();
    assert_eq!(rig.receive.used(), 0);
    let mut again = rig.guest.activation(&[]);
    again.queues = queues;
    rig.console.activate(again).unwrap();
    rig.type_in(b"abcdef");
    rig.guest
        .wait_until("all of them are used", || rig.receive.used() == 3);
    for slot in 0..3 {
        let at = rig.receive.free() + 16 * u64::from(slot);
        assert_eq!(rig.receive.used_len(slot), 2);
        let expected = &b"abcdef"[2 * usize::from(slot)..][..2];
        assert_eq!(rig.bytes(at, 2), expected);
    }
    rig.console.deactivate();
}

#[test]
fn what_was_typed_and_sent_while_the_console_stood_still_arrives_when_it_goes_on() {
    let mut rig = Rig::new(0);
    let queues = rig.console.deactivate();
    for (queue, flags) in [(&rig.transmit, 0), (&rig.receive, WRITE)] {
        queue.describe(queue.table(), 0, (queue.free(), 3), flags, 0);
        queue.offer(0);
        queue.kick();
    }
    rig.fill(rig.transmit.free(), b"out");
    rig.type_in(b"in");
    let mut again = rig.guest.activation(&[]);
    again.queues = queues;
    rig.console.activate(again).unwrap();
    assert_eq!(rig.wait_used(&rig.receive, 0), 2);
    rig.wait_used(&rig.transmit, 0);
    assert_eq!(rig.screen.text(), b"out");
    rig.console.deactivate();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_the_rings_hold_the_console_can_be_stopped(
        descriptors in prop::collection::vec(
            (prop_oneof![0..40_u64 << 20, any::<u64>()], any::<u32>(), 0..8_u16, 0..20_u16),
            32,
        ),
        heads in prop::collection::vec((any::<bool>(), 0..18_u16), 0..24),
        input in prop::collection::vec(any::<u8>(), 0..100),
        event_indices: bool,
    ) {
        let mut rig = Rig::idle();
        let (receive, transmit) = (&rig.receive, &rig.transmit);
        for (number, (address, len, flags, next)) in (0..).zip(descriptors) {
            let queue = if number < SIZE { receive } else { transmit };
            queue.describe(queue.table(), number % SIZE, (address, len), flags, next);
        }
        for (sent, head) in heads {
            let queue = if sent { transmit } else { receive };
            queue.offer(head);
        }
        rig.type_in(&input);
        rig.start(u64::from(event_indices) << VIRTIO_RING_F_EVENT_IDX);
        // The console sees the kicks before it stops. Its own writes may hit its rings.
        rig.receive.kick();
        rig.transmit.kick();
        prop_assert_eq!(rig.console.deactivate().len(), 2);
    }
}
