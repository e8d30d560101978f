//! The host's OpenCL: any driver that the loader `libOpenCL.so.1` finds.

pub mod api;
pub mod codes;
pub mod image;

pub use api::Api;
