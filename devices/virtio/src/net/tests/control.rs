//! The driver's choices, and how long they last.

use std::sync::atomic::Ordering;

use super::*;
use crate::net::State;

const CSUM: u64 = 1 << 1;
const GUEST_TSO4: u64 = 1 << 7;
const MQ: u64 = 1 << 22;
const CTRL_VQ: u64 = 1 << 17;

/// The state that a snapshot would contain.
fn state(net: &Net) -> State {
    serde_json::from_value(net.save().unwrap()).unwrap()
}

fn two_pairs() -> Card {
    card(|options| options.num_queues = 4)
}

/// All features except event indices.
fn all_features(net: &Net) -> u64 {
    net.features() & !(1 << 29)
}

/// Activates the card with `count` queues, for a guest driver with the given features.
fn driven(card: &mut Card, count: u16, features: u64) -> (Guest, Vec<GuestQueue>) {
    let guest = Guest::new();
    let queues: Vec<_> = (0..count).map(|index| guest.queue(index, 16)).collect();
    let all: Vec<_> = queues.iter().collect();
    card.net
        .activate(guest.activation_with(&all, features))
        .unwrap();
    (guest, queues)
}

fn offloads(bits: u64) -> Vec<u8> {
    let mut command = vec![5, 0];
    command.extend(bits.to_le_bytes());
    command
}

#[test]
fn the_control_queue_takes_what_makes_sense() {
    let mut card = two_pairs();
    let features = all_features(&card.net);
    let (_guest, queues) = driven(&mut card, 5, features);
    let ask = |bytes: &[u8]| queues[4].request(bytes, 1).1[0];
    assert_eq!(ask(&[4, 0, 2, 0]), 0);
    for refused in [
        &[4, 0, 3, 0][..],
        &[4, 0, 0, 0],
        &[4, 0],
        &[9, 9, 9],
        &offloads(u64::MAX),
        // An offload for transmitted frames is not valid for received ones.
        &offloads(1 << 0),
    ] {
        assert_eq!(ask(refused), 1, "{refused:?}");
    }
    assert_eq!(ask(&offloads(0)), 0);
    assert_eq!(card.net.deactivate().len(), 5);
}

#[test]
fn commands_need_the_features_that_they_belong_to() {
    let mut card = two_pairs();
    // Without multi-queue, the control queue has index 2.
    let (_guest, queues) = driven(&mut card, 3, CTRL_VQ | CSUM);
    assert_eq!(queues[2].request(&[4, 0, 1, 0], 1).1, [1]);
    assert_eq!(queues[2].request(&offloads(CSUM), 1).1, [1]);
    assert_eq!(card.net.deactivate().len(), 3);
    assert_eq!(state(&card.net).pairs, 1);
    assert_eq!(state(&card.net).offloads, None);
}

#[test]
fn pairs_that_cannot_be_attached_are_not_in_use() {
    let mut card = two_pairs();
    let features = all_features(&card.net);
    let (_guest, queues) = driven(&mut card, 5, features);
    card.asked[1].stubborn.store(true, Ordering::SeqCst);
    assert_eq!(queues[4].request(&[4, 0, 2, 0], 1).1, [1]);
    card.net.deactivate();
    assert_eq!(state(&card.net).pairs, 1);
}

#[test]
fn the_choice_survives_pause_and_restore_but_no_reset() {
    let mut first = two_pairs();
    let guest = Guest::new();
    let queues: Vec<_> = (0..5).map(|index| guest.queue(index, 16)).collect();
    let all: Vec<_> = queues.iter().collect();
    let features = all_features(&first.net);
    let kernel = |card: &Card| card.asked[0].offloads.load(Ordering::SeqCst);
    let activate = |card: &mut Card, queues| {
        let mut activation = guest.activation_with(&[], features);
        activation.queues = queues;
        card.net.activate(activation).unwrap();
    };
    activate(&mut first, guest.activation(&all).queues);
    assert_ne!(kernel(&first) & libc::TUN_F_TSO4, 0);
    assert_eq!(queues[4].request(&offloads(CSUM), 1).1, [0]);
    assert_eq!(kernel(&first), libc::TUN_F_CSUM);
    assert_eq!(queues[4].request(&[4, 0, 2, 0], 1).1, [0]);
    // Pause and resume.
    let held = first.net.deactivate();
    first.asked[0].offloads.store(0, Ordering::SeqCst);
    activate(&mut first, held);
    assert_eq!(kernel(&first), libc::TUN_F_CSUM);
    // Restore elsewhere.
    let held = first.net.deactivate();
    let mut second = two_pairs();
    second.net.restore(first.net.save().unwrap()).unwrap();
    activate(&mut second, held);
    assert_eq!(kernel(&second), libc::TUN_F_CSUM);
    second.net.deactivate();
    assert_eq!(state(&second.net), state(&first.net));
    assert_eq!(state(&second.net).pairs, 2);
    // Reset.
    second.net.reset();
    assert_eq!(state(&second.net).pairs, 1);
    activate(&mut second, guest.activation(&all).queues);
    assert_ne!(kernel(&second) & libc::TUN_F_TSO4, 0);
    second.net.deactivate();
}

#[test]
fn a_guest_that_has_moved_is_announced_once_by_a_frame_and_by_its_driver() {
    const ANNOUNCE: u64 = 1 << 21;
    let first = card(|_| {});
    let mut second = card(|options| options.mac = Some([2, 0, 0, 0, 0, 9]));
    second.net.restore(first.net.save().unwrap()).unwrap();
    let status = |card: &Card| {
        let mut status = [0; 2];
        card.net.read_config(6, &mut status);
        u16::from_le_bytes(status)
    };
    assert_eq!(status(&second), 1);
    let (guest, queues) = driven(&mut second, 3, CTRL_VQ | ANNOUNCE);
    let mut frame = [0; 200];
    let len = second.wires[0].recv(&mut frame).unwrap();
    let frame = &frame[12..len];
    let mac = [2, 0, 0, 0, 0, 1];
    assert_eq!((frame.len(), &frame[..6]), (60, &[0xff; 6][..]));
    assert_eq!(
        (&frame[6..12], &frame[12..14]),
        (&mac[..], &[0x80, 0x35][..])
    );
    assert_eq!((&frame[22..28], &frame[32..38]), (&mac[..], &mac[..]));
    assert_eq!(status(&second), 3);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 1);
    // The driver acknowledges the announcement.
    assert_eq!(queues[2].request(&[3, 0], 1).1, [0]);
    assert_eq!(status(&second), 1);
    // A pause is not a move.
    second.net.deactivate();
    let (guest, queues) = driven(&mut second, 3, CTRL_VQ);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 0);
    // Not negotiated.
    assert_eq!(queues[2].request(&[3, 0], 1).1, [1]);
    second.wires[0].set_nonblocking(true).unwrap();
    assert!(second.wires[0].recv(&mut [0; 200]).is_err());
    second.net.deactivate();
}

#[test]
fn a_saved_choice_never_goes_beyond_what_is_negotiated() {
    let mut card = card(|_| {});
    let mut saved = state(&card.net);
    saved.offloads = Some(u64::MAX);
    card.net
        .restore(serde_json::to_value(saved).unwrap())
        .unwrap();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    card.net
        .activate(guest.activation_with(&[&rx, &tx], CSUM | GUEST_TSO4))
        .unwrap();
    card.net.deactivate();
    let expected = libc::TUN_F_CSUM | libc::TUN_F_TSO4;
    assert_eq!(card.asked[0].offloads.load(Ordering::SeqCst), expected);
}

#[test]
fn states_that_make_no_sense_are_refused() {
    let mut card = card(|_| {});
    let good = state(&card.net);
    for change in [
        |state: &mut State| state.pairs = 0,
        |state: &mut State| state.pairs = 2,
        |state: &mut State| state.mac[0] |= 1,
        |state: &mut State| state.host_mac = Some([1; 6]),
    ] {
        let mut bad = good.clone();
        change(&mut bad);
        assert!(
            card.net
                .restore(serde_json::to_value(bad).unwrap())
                .is_err()
        );
    }
}

#[test]
fn every_queue_comes_back_whichever_the_driver_enabled() {
    for (features, enabled) in [
        (MQ | CTRL_VQ, &[0, 1, 2, 4][..]),
        (MQ | CTRL_VQ, &[0, 1, 3]),
        (MQ | CTRL_VQ, &[0, 3, 4]),
        (CTRL_VQ, &[0, 1, 2, 3, 4]),
        (CTRL_VQ, &[1, 2]),
        (0, &[0, 1, 2, 4]),
    ] {
        let mut card = two_pairs();
        let guest = Guest::new();
        let queues: Vec<_> = enabled
            .iter()
            .map(|&index| guest.queue(index, 16))
            .collect();
        let all: Vec<_> = queues.iter().collect();
        card.net
            .activate(guest.activation_with(&all, features))
            .unwrap();
        let back = card.net.deactivate();
        let indexes: Vec<_> = back.iter().map(|queue| queue.index).collect();
        assert_eq!(indexes, enabled);
    }
}

#[test]
fn impossible_cards_are_refused_with_a_reason() {
    let mut odd = options();
    odd.num_queues = 3;
    let error = Net::new(odd, Arc::new(Unconfined)).err();
    assert!(matches!(error, Some(Error::NumQueues(3))));
    let mut size = options();
    size.queue_size = 24;
    let error = Net::new(size, Arc::new(Unconfined)).err();
    assert!(matches!(error, Some(Error::QueueSize(24))));
}
