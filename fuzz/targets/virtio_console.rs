//! The queues of the console, with pending input.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::simple::Guest,
    thread::Unconfined,
    virtio::console::{Console, Options},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_console0".to_owned(),
        size: Some((80, 25)),
    };
    let output = Box::new(std::io::sink());
    let mut device =
        Console::new(options, output, Arc::new(Unconfined)).expect("there are eventfds");
    device.input().enqueue(bytes);
    drive(&Guest::new(), &mut device, bytes);
});
