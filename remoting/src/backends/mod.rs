//! What carries calls out, for each accelerator API.

pub mod opencl;
