//! Shares one GPU among many virtual machines, each with its own unmodified driver.
//!
//! ```text
//!   guest's nouveau                                   gantry, one per VM
//!     registers, BARs  --> front (devices/gpu) --- walks the guest's tables
//!                             |  wire: mappings, channels, submissions
//!                             v
//!   gantry-gpu:  partition --> space --> channel --> dispatch --> physical
//!                             |  vfio-user
//!                             v
//!                       the GPU (gantry-gf100)
//! ```
//!
//! - [`wire`], [`link`]: the protocol with the fronts, and its transport. A front is not trusted.
//! - [`memory`]: pages of the GPU. [`partition`]: the pages of a VM, and its RAM.
//! - [`space`]: page tables that the GPU walks, built from validated mappings.
//! - [`channel`]: a guest's channel on the GPU, with a ring that the guest cannot write.
//! - [`mediator`]: everything together, and who has the GPU when; [`server`]: the process.
//! - [`physical`]: the GPU.
//!
//! Everything that isolates VMs from each other is checked here, and none of it relies on a front.
//! A VM's partition of VRAM is a file of its own, and its front holds nothing else. The GPU walks
//! tables that only this process writes, in which every page lies completely within the VM's own
//! memory. Its instance blocks consist of constants and these tables.

pub mod channel;
pub mod link;
pub mod mediator;
pub mod memory;
pub mod partition;
pub mod physical;
pub mod server;
pub mod space;
pub mod wire;

#[cfg(test)]
mod tests;
