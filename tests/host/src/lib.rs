//! Scenarios that run on this machine, as plain processes or on its KVM, without the nested rig.
//!
//! - [`described`]: the description of the REST API, by Schemathesis.
//! - [`gate`]: the gate's hosts, in an emulator.
//! - [`gloop`]: kernels that give the GPU back.
//! - [`moved_guest`]: a VM that migrates together with its application, also over a [`network`].
//! - [`opencl`]: the OpenCL driver and a worker; programs of third parties.
//! - [`ring`]: calls over an accelerator's rings from ring 3 of a guest.
//! - [`sharing`]: one device for several applications, by weight; [`shared_device`]: its processes.

pub mod described;
pub mod gate;
pub mod gloop;
pub mod moved_guest;
pub mod network;
pub mod opencl;
pub mod ring;
mod selected;
pub mod shared_device;
pub mod sharing;
