//! One GPU for many virtual machines, each with its own unmodified driver.
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
//! - [`wire`], [`link`]: what a front says, and how. A front is not trusted.
//! - [`memory`]: pages of the GPU. [`partition`]: those of a VM, and its RAM.
//! - [`space`]: page tables that the GPU walks, made of mappings that have been validated.
//! - [`channel`]: a guest's channel on the GPU, with a ring that the guest does not write.
//! - [`mediator`]: all of it, and who has the GPU when; [`server`]: the process.
//! - [`physical`]: the GPU.
//!
//! What isolates VMs from each other is checked here, and nothing of it relies on a front: a VM's
//! part of VRAM is a file of its own, which is all that its front holds; the GPU walks tables that
//! only this process writes, in which every page lies wholly in the VM's own memory; its instance
//! blocks are made of constants and these tables.

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
