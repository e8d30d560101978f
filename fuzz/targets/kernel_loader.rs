//! Untrusted files of kernels and firmware.

#![no_main]

use std::io::Cursor;

use arch::{
    boot::{load_firmware, load_kernel},
    layout::AddressMap,
};
use libfuzzer_sys::fuzz_target;
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Size of the guest's memory in bytes.
const MEMORY: usize = 64 << 20;

fuzz_target!(|bytes: &[u8]| {
    let map = AddressMap::new(MEMORY as u64, 0, 40, 1).expect("64 MiB can be laid out");
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)])
        .expect("64 MiB can be mapped");
    // A file that is not a kernel is an error.
    let _ = load_kernel(&memory, &map, &mut Cursor::new(bytes));
    let _ = load_firmware(&memory, &map, &mut Cursor::new(bytes));
});
