//! Virtual processors: one thread each, and what the rest of the machine asks of them.
//!
//! - [`core_scheduling`]: who shares physical cores.
//! - [`thread`]: the loop around `KVM_RUN`.
//! - [`calling`]: the one that a device is just accessed by.
//! - [`throttle`]: takes time away from all of them.
//! - [`set`]: all vCPUs of a machine: start, pause, save, plug and unplug.

pub mod calling;
pub mod core_scheduling;
pub mod set;
pub mod thread;
mod throttle;

pub use calling::Calling;
pub use set::{CpuSetup, Cpus, CpusError, SavedCpu};
pub use thread::CpuEvent;
