//! A machine without KVM, for tests and fuzz targets: [`Rig`] is a segment with its buses, on which
//! accesses are made as a vCPU would make them; [`FakeLines`] count interrupts.

mod lines;
mod rig;

pub use lines::FakeLines;
pub use rig::{ECAM_BASE, MMIO32, MMIO64, PORT_WINDOWS, PORTS, Rig};
