//! The queues of the socket device; nobody listens on the host.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::simple::Guest,
    thread::Unconfined,
    virtio::vsock::{Options, Vsock},
};
use gantry_fuzz::{driver::drive, scratch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_vsock0".to_owned(),
        cid: 3,
        socket: scratch::path("vsock"),
    };
    let mut device = Vsock::new(options, Arc::new(Unconfined)).expect("nobody else listens");
    drive(&Guest::new(), &mut device, bytes);
});
