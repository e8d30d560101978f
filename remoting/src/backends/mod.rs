//! Executes calls, for each accelerator API.

#[cfg(feature = "server")]
pub mod cuda;
pub mod opencl;
