//! The queues and the configuration of the virtual IOMMU, whose endpoints check the requests.

#![no_main]

use std::sync::Arc;

use devices::{
    testing::{iommu::Recorder, simple::Guest},
    thread::Unconfined,
    virtio::iommu::{Endpoints, Options, VirtioIommu},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let endpoints = Endpoints::new();
    for id in 0..3 {
        let device = Arc::new(Recorder::default());
        // The last endpoint refuses a mapping at some point.
        device.lock().patience = (id == 2).then_some(2);
        endpoints.add(id, device).expect("nobody else is there");
    }
    let options = Options {
        thread_name: "_iommu".to_owned(),
        address_width: 48,
        reserved: Vec::new(),
    };
    let mut device = VirtioIommu::new(endpoints, options, Arc::new(Unconfined))
        .expect("addresses have a width that there is");
    drive(&Guest::new(), &mut device, bytes);
});
