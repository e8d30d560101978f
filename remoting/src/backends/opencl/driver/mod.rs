//! The host's OpenCL: any driver that the loader `libOpenCL.so.1` finds.

#[cfg(any(test, feature = "test-support"))]
pub mod adder;
pub mod api;
#[cfg(feature = "server")]
mod calling;
#[cfg(any(test, feature = "test-support"))]
pub mod null;
#[cfg(any(test, feature = "test-support"))]
pub mod typed;

pub use api::Api;
#[cfg(feature = "server")]
pub(crate) use calling::{c_string, cl, outcome, status};
