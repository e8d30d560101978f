//! The machine: buses, memory, processors and devices put together.

pub mod buses;
pub mod interrupts;
