//! A VM without KVM, for tests and fuzz targets: [`Rig`] is a segment with its buses, accessed as
//! by a vCPU; [`FakeLines`] counts interrupts.

mod lines;
mod rig;

pub use lines::FakeLines;
pub use rig::{ECAM_BASE, MMIO32, MMIO64, PORT_WINDOWS, PORTS, Rig};
