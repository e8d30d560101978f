//! The queue of a disk with a raw image of 64 KiB.

#![no_main]

use std::sync::Arc;

use devices::{
    disk::{DiskOptions, ImageType, LockGranularity},
    testing::simple::Guest,
    thread::Unconfined,
    virtio::blk::{Blk, Options},
};
use gantry_fuzz::{driver::drive, scratch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_disk0".to_owned(),
        disk: DiskOptions {
            path: scratch::zeroes("image", 64 << 10),
            read_only: false,
            direct: false,
            image_type: ImageType::Raw,
            logical_block: None,
            backing_files: false,
            sparse: true,
            lock_granularity: LockGranularity::ByteRange,
            lock_later: false,
            // The first bit of the input chooses the engine.
            io_uring: bytes.first().is_some_and(|byte| byte & 1 != 0),
        },
        num_queues: 1,
        queue_size: 16,
        serial: None,
        rate_limiter: None,
        affinity: Vec::new(),
    };
    let mut device = Blk::new(options, Arc::new(Unconfined)).expect("it is a raw image");
    drive(&Guest::new(), &mut device, bytes);
});
