//! A functional model of the GPU.
//!
//! - [`mapping`]: memory of files. [`vram`]: the GPU's own. [`ram`]: the machine's, by address.
//! - [`mmu`]: virtual addresses.
//! - [`fifo`]: channels, run lists and the interpreter of push buffers; [`host`], [`copy`],
//!   [`m2mf`], [`graphics`], [`compute`]: methods.
//! - [`bars`]: what the CPU sees through BAR 1 and BAR 3.
//! - [`gpu`]: all of it behind registers.
//! - [`config`], [`lines`], [`server`]: a PCI function for one vfio-user client after the other.
//! - [`confine`]: what the server's process may do.
//!
//! Work is done in slices of a bounded cost, of one channel after the other: a push buffer that
//! never ends, a copy of terabytes or a semaphore that nobody releases keeps its channel busy and
//! nothing else. What a channel may not do ends that channel.

pub mod bars;
pub mod compute;
pub mod config;
pub mod confine;
pub mod copy;
pub mod fifo;
pub mod gpu;
pub mod graphics;
pub mod host;
mod kept;
pub mod lines;
pub mod m2mf;
pub mod mapping;
pub mod mmu;
pub mod ram;
pub mod server;
pub mod vram;

#[cfg(test)]
mod tests;
