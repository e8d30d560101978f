//! The host's OpenCL: any driver that the loader `libOpenCL.so.1` finds.

#[cfg(any(test, feature = "test-support"))]
pub mod adder;
pub mod api;
mod calling;
#[cfg(any(test, feature = "test-support"))]
pub mod null;
#[cfg(any(test, feature = "test-support"))]
pub mod typed;
pub mod types;

pub use api::Api;
pub use calling::cl;
pub(crate) use calling::{c_string, enqueue, outcome, status};
