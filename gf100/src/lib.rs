//! NVIDIA's GF100 ("Fermi", 2010), as far as its driver `nouveau` and a virtual GPU need it.
//!
//! - [`format`]: data that the GPU reads from memory (page tables, instance blocks, push buffers),
//!   parsed and encoded.
//! - [`registers`]: the register file as the CPU sees it in BAR 0, with its values at power-on.
//!   Effects of a register elsewhere go through [`registers::Effects`].
//! - [`recording`]: records what a driver does with the GPU in a file.
//! - `device` (a feature): a functional model of the GPU, and its server for vfio-user clients.
//!
//! ```text
//!   CPU  --BAR 0-->  registers --Effects-->  device: fifo -> host, copy, m2mf, graphics
//!        --BAR 1, BAR 3-------------------->  device: mmu -> vram, guest memory
//! ```
//!
//! The facts are those that Linux 6.1's nouveau relies on, and NVIDIA's published class headers.
//! Functions of the silicon that neither of them uses are missing: there is no display, no video
//! engine, no shaders for drawing, and no falcon microcode (it can be uploaded, but is never run).

pub mod format;
pub mod recording;
pub mod registers;

#[cfg(feature = "device")]
pub mod device;
