use super::*;
use crate::testing::raw::{INDIRECT, NEXT, RawQueue, WRITE};

#[test]
fn frames_travel_both_ways() {
    let mut card = card(|_| {});
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    card.net.activate(guest.activation(&[&rx, &tx])).unwrap();
    // Transmit.
    tx.request(&frame(7, 200), 0);
    let mut seen = vec![0; 2000];
    let len = card.wires[0].recv(&mut seen).unwrap();
    assert_eq!(seen[..len], frame(7, 200));
    // Receive, into a chain that splits the header.
    rx.submit(&[(rx.buffers(), 11, true), (rx.buffers() + 11, 2000, true)]);
    card.wires[0].send(&frame(9, 300)).unwrap();
    assert_eq!(rx.wait_used(), 300);
    let seen = bytes(&guest, rx.buffers(), 300);
    assert_eq!(seen[10..12], [1, 0], "one buffer");
    assert_eq!(seen[12..], frame(9, 300)[12..]);
    assert_eq!(card.net.deactivate().len(), 2);
    for (counter, value) in [
        ("rx_bytes", 288),
        ("rx_frames", 1),
        ("tx_bytes", 188),
        ("tx_frames", 1),
    ] {
        assert_eq!(card.count(counter), value, "{counter}");
    }
}

#[test]
fn a_frame_costs_one_call_and_a_batch_one_interrupt() {
    let mut card = card(|_| {});
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    // Everything is available when the card starts, so there is one batch per direction.
    for mark in 0..5 {
        card.wires[0].send(&frame(mark, 100)).unwrap();
        tx.submit(&[(tx.buffers(), 100, false)]);
    }
    post(&rx, 0, 8, 1000);
    card.net.activate(guest.activation(&[&rx, &tx])).unwrap();
    (0..5).for_each(|_| assert_eq!(rx.wait_used(), 100));
    (0..5).for_each(|_| assert_eq!(tx.wait_used(), 0));
    card.net.deactivate();
    use std::sync::atomic::Ordering::SeqCst;
    let interrupts = guest.interrupts.queue.load(SeqCst);
    assert_eq!(interrupts, 2);
    let (reads, writes) = &card.asked[0].calls;
    assert_eq!(writes.load(SeqCst), 5);
    // A read that finds nothing ends a batch. The kick and the frames wake the card once each.
    let reads = reads.load(SeqCst);
    assert!((6..=7).contains(&reads), "{reads}");
}

#[test]
fn hostile_chains_hurt_nobody() {
    for features in [0, 1 << 15] {
        let mut card = card(|_| {});
        let guest = Guest::new();
        let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
        card.net
            .activate(guest.activation_with(&[&rx, &tx], features))
            .unwrap();
        tx.raw(&[(u64::MAX - 8, 64, false)]);
        tx.raw(&[(tx.buffers(), 64, true)]);
        tx.raw(&[(tx.buffers(), 0, false)]);
        assert_eq!(rx.raw(&[(rx.buffers(), 64, false)]), 0);
        assert_eq!(rx.raw(&[(u64::MAX - 8, 64, true)]), 0);
        assert_eq!(rx.raw(&[(rx.buffers(), 4, true)]), 0);
        // The card still works.
        post(&rx, 0, 1, 1000);
        card.wires[0].send(&frame(1, 100)).unwrap();
        assert_eq!(rx.wait_used(), 100);
        card.net.deactivate();
    }
}

/// An indirect chain of `count` empty descriptors, and one of 64 bytes.
fn mostly_nothing(queue: &RawQueue, count: u16, flags: u16) {
    let table = queue.free();
    for slot in 0..count {
        queue.describe(table, slot, (table, 0), flags | NEXT, slot + 1);
    }
    queue.describe(table, count, (table, 64), flags, 0);
    let len = 16 * (u32::from(count) + 1);
    queue.describe(queue.table(), 0, (table, len), INDIRECT, 0);
    queue.offer(0);
}

#[test]
fn descriptors_without_bytes_count_like_any_other() {
    for (count, sent) in [(10, 1), (5000, 0)] {
        let mut card = card(|_| {});
        let guest = Guest::new();
        let (rx, tx) = (RawQueue::new(&guest, 0, 16), RawQueue::new(&guest, 1, 16));
        mostly_nothing(&rx, count, WRITE);
        mostly_nothing(&tx, count, 0);
        let mut activation = guest.activation(&[]);
        activation.queues = vec![rx.active(), tx.active()];
        card.net.activate(activation).unwrap();
        card.wires[0].send(&frame(1, 60)).unwrap();
        rx.kick();
        tx.kick();
        guest.wait_until("the chains are used", || rx.used() == 1 && tx.used() == 1);
        card.net.deactivate();
        assert_eq!(card.count("tx_frames"), sent);
        assert_eq!(card.count("rx_frames"), sent);
    }
}

#[test]
fn a_tap_that_has_ended_does_not_keep_the_card_busy() {
    let mut card = card(|_| {});
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    post(&rx, 0, 4, 1000);
    // An empty message reads like the end of a stream.
    card.wires[0].send(&[]).unwrap();
    card.net.activate(guest.activation(&[&rx, &tx])).unwrap();
    card.wires[0].send(&frame(1, 100)).unwrap();
    assert_eq!(rx.wait_used(), 100);
    card.net.deactivate();
}
