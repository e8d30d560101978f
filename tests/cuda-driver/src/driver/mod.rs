//! The device's objects: memory, contexts, streams, modules.

pub mod array;
pub mod context;
pub mod memory;
pub mod module;
pub mod objects;
pub mod stream;

use std::sync::OnceLock;

use cuda_definition::driver::types::CUresult;

/// The result of an entry point.
pub type Answer<T = ()> = Result<T, CUresult>;

/// The most devices that there can be.
pub const MOST_DEVICES: i32 = 16;

/// Number of devices: `GANTRY_CUDA_DEVICES`, or 1. All are alike, and peers of each other.
pub fn devices() -> i32 {
    static DEVICES: OnceLock<i32> = OnceLock::new();
    *DEVICES.get_or_init(|| {
        let wanted = std::env::var("GANTRY_CUDA_DEVICES").ok();
        let wanted = wanted.and_then(|text| text.parse().ok());
        wanted.unwrap_or(1).clamp(1, MOST_DEVICES)
    })
}

/// What memory is allocated for.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The context that it is freed with; 0 for memory of pools and graphs, which outlives contexts.
    pub context: u64,
    /// The device that it is on, or that it was allocated or registered with.
    pub device: i32,
}

/// Number of streaming multiprocessors that the device reports.
pub const MULTIPROCESSORS: u32 = 4;
/// Number of threads per multiprocessor.
pub const THREADS: u32 = 2048;
/// Default limit of shared memory per block in bytes.
pub const SHARED: u64 = 48 << 10;
/// Limit of shared memory in bytes for a block that opts in.
pub const SHARED_OPT_IN: u64 = 96 << 10;
/// The architecture that the device reports: 8.0.
pub const ARCHITECTURE: u32 = 80;
