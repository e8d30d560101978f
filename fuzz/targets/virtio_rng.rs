//! The queue of the entropy source.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::simple::Guest,
    thread::Unconfined,
    virtio::rng::{Options, Rng},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_rng0".to_owned(),
        source: "/dev/zero".into(),
    };
    let mut device = Rng::new(options, Arc::new(Unconfined)).expect("/dev/zero is there");
    drive(&Guest::new(), &mut device, bytes);
});
