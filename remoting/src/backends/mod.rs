//! Executes calls, for each accelerator API.

pub mod cuda;
pub mod opencl;
