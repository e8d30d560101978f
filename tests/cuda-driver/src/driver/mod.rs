//! The device's objects: memory, contexts, streams, modules.

pub mod context;
pub mod memory;
pub mod module;
pub mod objects;
pub mod stream;

use cuda_definition::driver::types::CUresult;

/// The result of an entry point.
pub type Answer<T = ()> = Result<T, CUresult>;

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
