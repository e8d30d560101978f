//! Rate limits.

use std::{sync::Arc, sync::Mutex};

use device_model::rate_limiter::{RateLimiter, RateLimiterConfig, TokenBucketConfig};
use virtio_queue::QueueT;

use super::{DATA, HEADER, IN, Image, Rig, STATUS, WRITE, grow, new_blk, pattern, rings, wait_for};
use crate::device::VirtioDevice;

#[test]
fn queues_and_disks_that_share_a_rate_limit_all_go_on_in_the_end() {
    let limit = |size, refill_time| {
        Some(TokenBucketConfig {
            size,
            one_time_burst: None,
            refill_time,
        })
    };
    let limiter = RateLimiter::new(&RateLimiterConfig {
        bandwidth: limit(1024, 50),
        ops: limit(1, 10),
    });
    let limiter = Arc::new(Mutex::new(limiter.unwrap()));
    let (one, two) = (Image::raw(&pattern(64)), Image::raw(&pattern(64)));
    let mut rigs = [&one, &two].map(|image| {
        let mut options = image.options();
        options.num_queues = 2;
        options.rate_limiter = Some(Arc::clone(&limiter));
        Rig::new(options)
    });
    for rig in &mut rigs {
        for k in 0..2 {
            let header = HEADER + 16 * k as u64;
            let data = DATA + 0x1000 * k as u64;
            let status = STATUS + k as u64;
            rig.header(header, IN, 8 * k as u64);
            let chain = [(header, 16, 0), (data, 4096, WRITE), (status, 1, WRITE)];
            rig.describe(rings(k), 0, &chain);
            rig.offer(k, 0);
            rig.offer(k, 0);
            rig.kicks[k].write(1).unwrap();
        }
    }
    for rig in &mut rigs {
        for k in 0..2 {
            wait_for(|| rig.used_index(k) == 2);
            let data = DATA + 0x1000 * k as u64;
            assert_eq!(rig.bytes(data, 4096), pattern(64)[4096 * k..4096 * (k + 1)]);
        }
    }
}

#[test]
fn a_request_held_back_by_a_rate_limit_survives_a_pause() {
    let bandwidth = Some(TokenBucketConfig {
        size: 512,
        one_time_burst: None,
        refill_time: 60,
    });
    let config = RateLimiterConfig {
        bandwidth,
        ops: None,
    };
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.rate_limiter = Some(Arc::new(Mutex::new(RateLimiter::new(&config).unwrap())));
    let mut rig = Rig::new(options);
    rig.header(HEADER, IN, 5);
    let chain = [(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)];
    rig.describe(rings(0), 0, &chain);
    for _ in 0..3 {
        rig.offer(0, 0);
    }
    rig.kicks[0].write(1).unwrap();
    wait_for(|| rig.used_index(0) > 0);
    let queues = rig.blk.deactivate();
    assert_eq!(queues[0].queue.next_avail(), rig.used_index(0));
    rig.activate(queues);
    wait_for(|| rig.used_index(0) == 3);
    assert_eq!(rig.bytes(DATA, 512), pattern(64)[5 * 512..6 * 512]);
}

#[test]
fn a_read_only_disk_says_why_it_is_not_resized() {
    let image = Image::raw(&pattern(8));
    let mut options = image.options();
    options.disk.read_only = true;
    let error = grow(&new_blk(options).unwrap().handle(), 1 << 20);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the disk is read-only"), "{error}");
}
