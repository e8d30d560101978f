//! Virtual processors: one thread each, and what the rest of the machine asks of them.
//!
//! - [`thread`]: the loop around `KVM_RUN`.

pub mod thread;

pub use thread::{CpuEvent, VcpuThread};
