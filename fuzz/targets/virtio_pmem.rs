//! The queue of persistent memory.

#![no_main]

use std::sync::Arc;

use devices::{
    memory::{AddressSpace, HostMemory, Mapping},
    testing::simple::Guest,
    thread::Unconfined,
    virtio::pmem::{Options, Pmem},
};
use gantry_fuzz::{driver::drive, scratch};
use libfuzzer_sys::fuzz_target;
use vm_memory::GuestAddress;

/// An address space in which mappings have no effect.
struct Nowhere;

impl AddressSpace for Nowhere {
    fn map(
        &self,
        _memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> std::io::Result<Box<dyn Mapping>> {
        Ok(Box::new(At(at.unwrap_or(GuestAddress(16 * align)))))
    }
}

struct At(GuestAddress);

impl Mapping for At {
    fn guest_address(&self) -> GuestAddress {
        self.0
    }
}

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        thread_name: "_pmem0".to_owned(),
        file: scratch::zeroes("file", 2 << 20),
        size: None,
        discard_writes: false,
    };
    let mut device =
        Pmem::new(options, Arc::new(Nowhere), Arc::new(Unconfined)).expect("the file has a size");
    drive(&Guest::new(), &mut device, bytes);
});
