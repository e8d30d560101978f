//! The host's OpenCL: any driver that the loader `libOpenCL.so.1` finds.

#[cfg(all(feature = "driver", any(test, feature = "test-support")))]
pub mod adder;
#[cfg(feature = "driver")]
pub mod api;
pub mod codes;
pub mod image;
#[cfg(all(feature = "driver", any(test, feature = "test-support")))]
pub mod null;

#[cfg(feature = "driver")]
pub use api::Api;
