//! The queue of the memory device.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::simple::Guest,
    thread::Unconfined,
    virtio::mem::{BLOCK, Mem, Options},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;
use vm_memory::GuestAddress;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_mem0".to_owned(),
        address: GuestAddress(4 * BLOCK),
        // Ends before the queues.
        len: 4 * BLOCK,
        block: BLOCK,
        populate: true,
        requested: 3 * BLOCK,
        discards: Default::default(),
    };
    let mut device = Mem::new(options, Arc::new(Unconfined)).expect("the region is made of blocks");
    drive(&Guest::new(), &mut device, bytes);
});
