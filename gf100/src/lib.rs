//! NVIDIA's GF100 ("Fermi", 2010), as far as its driver `nouveau` and a virtual GPU need it.
//!
//! - [`format`]: what the GPU reads from memory (page tables, instance blocks, push buffers): parsed
//!   and encoded.
//! - [`registers`]: the register file as the CPU sees it in BAR 0, with its values at power-on. What
//!   a register causes elsewhere goes through [`registers::Effects`].
//! - [`recording`]: what a driver does with the GPU, as a file.
//! - `device` (a feature): a functional model of the GPU, and its server for vfio-user clients.
//!
//! ```text
//!   CPU  --BAR 0-->  registers --Effects-->  device: fifo -> host, copy, m2mf, graphics
//!        --BAR 1, BAR 3-------------------->  device: mmu -> vram, guest memory
//! ```
//!
//! The facts are those that Linux 6.1's nouveau relies on, and NVIDIA's published class headers.
//! Functions of the silicon that neither uses are not there: no display, no video engines, no
//! shaders, no falcon microcode (it can be uploaded, and is never run).

pub mod format;
pub mod recording;
pub mod registers;

#[cfg(feature = "device")]
pub mod device;
