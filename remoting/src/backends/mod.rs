//! What carries calls out, for each accelerator API.

#[cfg(feature = "server")]
pub mod cuda;
pub mod opencl;
