//! The queues and the configuration of the balloon.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::simple::Guest,
    thread::Unconfined,
    virtio::balloon::{Balloon, Options},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_balloon0".to_owned(),
        size: 8 << 20,
        deflate_on_oom: true,
        free_page_reporting: true,
        discards: Default::default(),
    };
    let mut device = Balloon::new(options, Arc::new(Unconfined));
    drive(&Guest::new(), &mut device, bytes);
});
