//! Mergeable receive buffers (5.1.6.4).

use super::*;
use crate::testing::raw::{RawQueue, WRITE};

const MERGEABLE: u64 = 1 << 15;

/// An active card with mergeable buffers, its guest and its receive queue.
fn running() -> (Card, Guest, GuestQueue) {
    let mut card = card(|_| {});
    assert_eq!(card.net.features() & MERGEABLE, MERGEABLE, "it is offered");
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let activation = guest.activation_with(&[&rx, &tx], MERGEABLE);
    card.net.activate(activation).unwrap();
    (card, guest, rx)
}

/// A frame without two equal adjacent bytes.
fn pattern(len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
    frame[..HEADER].fill(0);
    frame
}

/// Waits for a frame in chains of `len` bytes, from used entry `first`, and reassembles it.
fn assemble(guest: &Guest, rx: &GuestQueue, first: u64, len: usize) -> (u16, Vec<u8>) {
    let mut frame = Vec::new();
    let mut number = first;
    let mut count = 1;
    while number < first + u64::from(count) {
        let used = rx.wait_used() as usize;
        assert!(used <= len);
        frame.extend(bytes(guest, rx.buffers() + (number << 12), used));
        count = u16::from_le_bytes([frame[HEADER - 2], frame[HEADER - 1]]);
        number += 1;
    }
    frame[HEADER - 2..HEADER].fill(0);
    (count, frame)
}

#[test]
fn a_frame_takes_as_many_chains_as_it_needs() {
    let (mut card, guest, rx) = running();
    post(&rx, 0, 12, 100);
    for (first, len, chains) in [(0, 500, 5), (5, 60, 1), (6, 100, 1), (7, 101, 2)] {
        card.wires[0].send(&pattern(len)).unwrap();
        let frame = assemble(&guest, &rx, first, 100);
        assert_eq!(frame, (chains, pattern(len)));
    }
    assert_eq!(card.net.deactivate().len(), 2);
    assert_eq!(card.count("rx_frames"), 4);
}

#[test]
fn a_frame_waits_for_the_chains_that_it_needs() {
    let (mut card, guest, rx) = running();
    post(&rx, 0, 3, 100);
    card.wires[0].send(&pattern(1000)).unwrap();
    card.wires[0].send(&pattern(99)).unwrap();
    // No part of it is delivered before that.
    guest.wait_until("the frame is read", || {
        card.asked[0]
            .calls
            .0
            .load(std::sync::atomic::Ordering::SeqCst)
            > 0
    });
    assert_eq!(rx.poll_used(), None);
    post(&rx, 3, 3, 100);
    assert_eq!(rx.poll_used(), None);
    post(&rx, 6, 6, 100);
    assert_eq!(assemble(&guest, &rx, 0, 100), (10, pattern(1000)));
    assert_eq!(assemble(&guest, &rx, 10, 100), (1, pattern(99)));
    card.net.deactivate();
}

#[test]
fn a_frame_larger_than_the_whole_queue_is_lost_and_the_next_one_arrives() {
    let (mut card, guest, rx) = running();
    post(&rx, 0, 16, 20);
    card.wires[0].send(&pattern(16 * 20 + 1)).unwrap();
    card.wires[0].send(&pattern(16 * 20)).unwrap();
    assert_eq!(assemble(&guest, &rx, 0, 20), (16, pattern(320)));
    card.net.deactivate();
}

#[test]
fn an_unusable_chain_does_not_stop_those_before_and_behind_it() {
    let (mut card, guest, rx) = running();
    post(&rx, 0, 1, 100);
    rx.submit(&[(u64::MAX - 8, 100, true)]);
    post(&rx, 2, 8, 100);
    // It needs two consecutive chains, which exist only after the bad one.
    for _ in 0..2 {
        card.wires[0].send(&pattern(150)).unwrap();
        card.wires[0].send(&pattern(80)).unwrap();
    }
    assert_eq!(assemble(&guest, &rx, 0, 100), (1, pattern(80)));
    assert_eq!(rx.wait_used(), 0, "the bad one");
    assert_eq!(assemble(&guest, &rx, 2, 100), (2, pattern(150)));
    assert_eq!(assemble(&guest, &rx, 4, 100), (1, pattern(80)));
    card.net.deactivate();
}

#[test]
fn large_frames_find_their_room_gathered_after_the_first() {
    let (mut card, guest, rx) = running();
    // 16 chains of 4 KiB each time.
    for round in 0..3_u64 {
        post(&rx, 0, 16, 4096);
        card.wires[0].send(&pattern(65_000)).unwrap();
        assert_eq!(
            assemble(&guest, &rx, 0, 4096),
            (16, pattern(65_000)),
            "{round}"
        );
    }
    card.net.deactivate();
}

#[test]
fn chains_that_were_gathered_and_not_used_survive_a_pause() {
    let mut card = card(|_| {});
    let guest = Guest::new();
    let (rx, tx) = (RawQueue::new(&guest, 0, 16), RawQueue::new(&guest, 1, 16));
    for slot in 0..16 {
        let at = rx.free() + 0x100 * u64::from(slot);
        rx.describe(rx.table(), slot, (at, 0x100), WRITE, 0);
        rx.offer(slot);
    }
    let mut queues = vec![rx.active(), tx.active()];
    for count in 1..=4 {
        let mut activation = guest.activation_with(&[], MERGEABLE);
        activation.queues = queues;
        // One chain per frame, although several are gathered.
        card.wires[0].send(&frame(1, 100)).unwrap();
        card.net.activate(activation).unwrap();
        rx.kick();
        guest.wait_until("the frame has arrived", || rx.used() == count);
        queues = card.net.deactivate();
        use virtio_queue::QueueT;
        assert_eq!(queues[0].queue.next_avail(), count);
        assert_eq!(rx.used_len(count - 1), 100);
    }
}
