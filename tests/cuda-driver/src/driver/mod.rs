//! The device's objects: memory, contexts, streams, modules.

pub mod context;
pub mod memory;
pub mod module;
pub mod objects;
pub mod stream;

use cuda_definition::driver::types::CUresult;

/// What an entry point answers.
pub type Answer<T = ()> = Result<T, CUresult>;

/// Streaming multiprocessors that the device claims to have.
pub const MULTIPROCESSORS: u32 = 4;
/// Threads that a multiprocessor holds.
pub const THREADS: u32 = 2048;
/// Bytes of shared memory of a block, unless it asks for more.
pub const SHARED: u64 = 48 << 10;
/// Bytes of shared memory of a block that asks for more.
pub const SHARED_OPT_IN: u64 = 96 << 10;
/// The architecture that it claims: 8.0.
pub const ARCHITECTURE: u32 = 80;
