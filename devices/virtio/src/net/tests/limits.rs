//! Rate limits apply to the whole device, whichever queue a frame takes.

use device_model::rate_limiter::{RateLimiterConfig, TokenBucketConfig};

use super::*;

/// A budget of `size`, which is refilled only after an hour.
fn once(size: u64) -> Option<TokenBucketConfig> {
    Some(TokenBucketConfig {
        size,
        one_time_burst: None,
        refill_time: 3_600_000,
    })
}

/// A card with two queue pairs, and plenty of frames in both directions of each pair.
fn busy(limits: RateLimiterConfig) -> (Card, Guest, Vec<GuestQueue>) {
    let card = card(|options| {
        options.num_queues = 4;
        options.rate_limiter = Some(limits);
    });
    let guest = Guest::new();
    let queues: Vec<_> = (0..4).map(|index| guest.queue(index, 16)).collect();
    for pair in 0..2 {
        post(&queues[2 * pair], 0, 8, 1000);
        for _ in 0..8 {
            card.wires[pair].send(&frame(1, 612)).unwrap();
            let out = &queues[2 * pair + 1];
            out.submit(&[(out.buffers(), 612, false)]);
        }
    }
    (card, guest, queues)
}

/// Multi-queue.
const MQ: u64 = 1 << 22;

#[test]
fn all_queues_of_a_device_share_its_limit_over_a_pause() {
    let ops = once(3);
    let bandwidth = None;
    let (mut card, guest, queues) = busy(RateLimiterConfig { bandwidth, ops });
    let all: Vec<_> = queues.iter().collect();
    let mut queues = guest.activation(&all).queues;
    for _ in 0..2 {
        let mut activation = guest.activation_with(&[], MQ);
        activation.queues = queues;
        activation
            .queues
            .iter()
            .for_each(|queue| queue.kick.write(1).unwrap());
        card.net.activate(activation).unwrap();
        guest.wait_until("the limit is reached", || {
            card.count("rx_frames") >= 3 && card.count("tx_frames") >= 3
        });
        queues = card.net.deactivate();
        assert_eq!(queues.len(), 4);
    }
    within_limit(&card, "rx_frames", 3);
    assert_eq!(card.count("tx_frames"), 3);
}

#[test]
fn a_frame_that_was_read_into_debt_is_paid_before_the_next() {
    let bandwidth = once(1000);
    let ops = None;
    let (mut card, guest, queues) = busy(RateLimiterConfig { bandwidth, ops });
    let all: Vec<_> = queues.iter().collect();
    card.net.activate(guest.activation_with(&all, MQ)).unwrap();
    // Received frames pass until there is a debt, transmitted ones while there are tokens.
    guest.wait_until("the limit is reached", || {
        card.count("rx_frames") >= 2 && card.count("tx_frames") >= 1
    });
    card.net.deactivate();
    within_limit(&card, "rx_frames", 2);
    assert_eq!(card.count("tx_frames"), 1);
}

/// One pair's worker may be about to read a frame while the other takes the last token.
fn within_limit(card: &Card, counter: &str, limit: u64) {
    let count = card.count(counter);
    assert!((limit..=limit + 1).contains(&count), "{count} {counter}");
}
