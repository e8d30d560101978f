//! An untrusted disk image: any file, or a qcow2 image with modified tables and header. If it can
//! be opened, the queue of a disk on it runs, too.

#![no_main]

use std::sync::Arc;

use devices::{
    disk::{DiskOptions, ImageType, LockGranularity},
    testing::simple::Guest,
    thread::Unconfined,
    virtio::blk::{Blk, Options},
};
use gantry_fuzz::{driver::drive, input::Input, scratch};
use libfuzzer_sys::fuzz_target;

/// Cluster size in bytes: the minimum, so that small inputs reach all tables.
const CLUSTER: usize = 512;
/// Offsets of the tables, and of two data clusters.
const L1: usize = CLUSTER;
const REFCOUNTS: usize = 2 * CLUSTER;
const REFCOUNT_BLOCK: usize = 3 * CLUSTER;
const L2: usize = 4 * CLUSTER;
const DATA: usize = 5 * CLUSTER;
const CLUSTERS: usize = 8;

/// A valid image of 16 KiB, of which two clusters are written (QEMU's docs/interop/qcow2.rst).
fn qcow2() -> Vec<u8> {
    let mut image = vec![0; CLUSTERS * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &9u32.to_be_bytes());
    put(24, &(16u64 << 10).to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &(L1 as u64).to_be_bytes());
    put(48, &(REFCOUNTS as u64).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    // Reference counts of 16 bits; length of the header.
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    let copied = 1u64 << 63;
    put(L1, &(copied | L2 as u64).to_be_bytes());
    put(REFCOUNTS, &(REFCOUNT_BLOCK as u64).to_be_bytes());
    for cluster in 0..DATA / CLUSTER + 2 {
        put(REFCOUNT_BLOCK + 2 * cluster, &1u16.to_be_bytes());
    }
    for data in 0..2 {
        let at = (DATA + data * CLUSTER) as u64;
        put(L2 + 8 * data, &(copied | at).to_be_bytes());
    }
    image
}

/// Builds the file, and chooses how it is opened.
fn image(input: &mut Input) -> (Vec<u8>, u8) {
    let how = input.u8();
    let mut image = if how & 1 != 0 { qcow2() } else { Vec::new() };
    for _ in 0..input.u8() % 16 {
        let at = usize::from(input.u16()) % (CLUSTERS * CLUSTER);
        let len = usize::from(input.u8() % 33);
        let bytes = input.bytes(len);
        image.resize(image.len().max(at + bytes.len()), 0);
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
    if how & 2 != 0 {
        // Truncates or extends the file.
        image.resize(usize::from(input.u16()) % (2 * CLUSTERS * CLUSTER), 0);
    }
    (image, how)
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let (image, how) = image(&mut input);
    let path = scratch::path("image");
    std::fs::write(&path, image).expect("there is room");
    let options = Options {
        thread_name: "_disk0".to_owned(),
        disk: DiskOptions {
            path,
            read_only: how & 4 != 0,
            direct: false,
            image_type: match how >> 4 & 3 {
                0 | 1 => ImageType::Unknown,
                2 => ImageType::Qcow2,
                _ => ImageType::Raw,
            },
            logical_block: (how & 0x80 != 0).then_some(4096),
            // A backing file would be a file of this machine.
            backing_files: false,
            sparse: how & 8 != 0,
            lock_granularity: LockGranularity::ByteRange,
            lock_later: false,
            io_uring: how & 0x40 != 0,
        },
        num_queues: 1,
        queue_size: 16,
        serial: None,
        rate_limiter: None,
        affinity: Vec::new(),
    };
    if let Ok(mut device) = Blk::new(options, Arc::new(Unconfined)) {
        drive(&Guest::new(), &mut device, input.bytes(usize::MAX));
    }
});
