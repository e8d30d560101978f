//! A functional model of the GPU.
//!
//! - [`mapping`]: memory that is backed by files. [`vram`]: video memory. [`ram`]: system memory,
//!   by address.
//! - [`mmu`]: virtual addresses; [`tlb`]: what the GPU keeps of their translations.
//! - [`fifo`]: channels, run lists and the interpreter of push buffers; [`host`], [`copy`],
//!   [`m2mf`], [`graphics`], [`compute`]: methods.
//! - [`bars`]: what the CPU sees through BAR 1 and BAR 3.
//! - [`gpu`]: the whole GPU behind its registers.
//! - [`config`], [`lines`], [`server`]: a PCI function for one vfio-user client at a time.
//! - [`confine`]: what the server's process may do.
//!
//! Work is done in slices of bounded cost, round-robin over the channels. A push buffer that never
//! ends, a copy of terabytes or a semaphore that nobody releases keeps only its own channel busy. A
//! channel that does something forbidden is ended.

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
pub mod tlb;
pub mod vram;

#[cfg(test)]
mod tests;
