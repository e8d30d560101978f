//! Virtual processors: one thread each, and the operations that the rest of the machine needs.
//!
//! - [`core_scheduling`]: which threads share physical cores.
//! - [`thread`]: the loop around `KVM_RUN`.
//! - `memory_faults`: accesses for which the host has no memory at the moment.
//! - [`calling`]: the vCPU that is currently accessing a device.
//! - [`throttle`]: throttling of all vCPUs.
//! - [`set`]: all vCPUs of a machine: start, pause, save, plug and unplug.

pub mod calling;
pub mod core_scheduling;
mod memory_faults;
pub mod set;
pub mod thread;
mod throttle;

pub use calling::Calling;
pub use memory_faults::DeviceMemory;
pub use set::{ACCESS, CpuSetup, Cpus, CpusError, SavedCpu};
pub use thread::CpuEvent;
