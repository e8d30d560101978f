//! The state of a snapshot: the file, and how devices restore their parts.

#![no_main]

use std::sync::Arc;

use devices::pci::PciFunction;
use devices::{
    testing::{Rig, resources, simple::Guest},
    thread::Unconfined,
    virtio::{VirtioDevice, balloon, console, mem, pci::VirtioPciFunction, rng},
};
use gantry_fuzz::driver::drive;
use libfuzzer_sys::fuzz_target;
use vm_memory::GuestAddress;
use vmm_machine::save::SavedMachine;
use vmm_snapshot::state_file;

fn devices() -> [Box<dyn VirtioDevice>; 4] {
    let spawner = || Arc::new(Unconfined);
    let thread_name = "_fuzz0".to_owned();
    let rng = rng::Options {
        thread_name: thread_name.clone(),
        source: "/dev/zero".into(),
    };
    let console = console::Options {
        thread_name: thread_name.clone(),
        size: None,
    };
    let balloon = balloon::Options {
        thread_name: thread_name.clone(),
        size: 0,
        deflate_on_oom: true,
        free_page_reporting: true,
        discards: Default::default(),
    };
    let mem = mem::Options {
        thread_name,
        address: GuestAddress(4 * mem::BLOCK),
        len: 4 * mem::BLOCK,
        block: mem::BLOCK,
        populate: false,
        requested: 0,
        discards: Default::default(),
    };
    let output = Box::new(std::io::sink());
    [
        Box::new(rng::Rng::new(rng, spawner()).expect("/dev/zero is there")),
        Box::new(console::Console::new(console, output, spawner()).expect("there are eventfds")),
        Box::new(balloon::Balloon::new(balloon, spawner())),
        Box::new(mem::Mem::new(mem, spawner()).expect("the region is made of blocks")),
    ]
}

fuzz_target!(|bytes: &[u8]| {
    let _ = state_file::decode::<SavedMachine>(bytes);
    // Skips the checksum, which no fuzzer guesses.
    let _ = serde_json::from_slice::<SavedMachine>(bytes);
    let Ok(state) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return;
    };
    for mut device in devices() {
        if device.restore(state.clone()).is_ok() {
            drive(&Guest::new(), &mut *device, &[]);
        }
    }
    let rig = Rig::new();
    for device in devices() {
        let mut function =
            VirtioPciFunction::new(device, resources(&rig)).expect("its queues are possible");
        let _ = function.restore(state.clone());
    }
});
