//! The rigs and the integration scenarios that run in them.
//!
//! The nested rig boots Debian's kernel as *L1* in QEMU, which emulates a processor with AMD-V.
//! In L1 the `runner` program starts Gantry, which boots the same kernel as *L2* under real
//! nested KVM:
//!
//! ```text
//!   host: cargo xtask test ──> rig::Rig ── QEMU (TCG, SVM)
//!                                 ^          └─ L1: runner ──> scenario functions
//!            one line per result  │                  └─ gantry ──> L2: Debian, busybox, agent
//!                                 └── second serial port of L1 ──┘
//! ```
//!
//! - [`rig`]: on the host: packages, images, booting L1, collecting results.
//! - [`scenarios`]: the tests, one file per topic; they run in L1.
//! - [`opencl`]: a host with OpenCL; [`shared_vms`]: guests that share its device by weight.
//! - [`beside`]: a second host, for VMs that migrate.
//! - [`gantry`], [`guest`], [`hijack`], [`http`], [`net`]: helpers for scenarios.
//! - [`host_device`]: physical devices of L1; [`edu`]: a driver for one of them; [`pci`]: for any.
//! - [`edu_vfio`]: the same driver in a guest with an IOMMU.
//! - [`edu_server`]: the same device, served by a process; [`liar`]: corrupts what its server
//!   sends.
//! - [`nouveau`]: a program for a GPU in a guest; [`raw_gpu`]: attacks on a GPU without a driver;
//!   [`gpuvm`]: the cost of a virtual GPU, also on any host with KVM by replaying a recording.
//! - [`starts`]: resources that a process has used when its API replies.
//! - [`exits`]: the cost of a guest's I/O; [`idle`]: the cost of an idle guest.
//! - [`write_faults`]: the cost of dirty logging for a guest that writes.
//! - [`memory_checker`]: writes memory at a set rate, and checks that it stays as it was written.
//! - [`agent`]: the program in L2 besides busybox; [`demo`]: the demonstration; [`bench`]:
//!   measurements.
//! - [`ring`]: on any host with KVM: calls over an accelerator's rings, from ring 3 of a guest.

#![allow(
    clippy::needless_pass_by_value,
    reason = "json! values are written where they are used"
)]

pub mod agent;
pub mod bare_kernel;
pub mod bench;
pub mod beside;
pub mod demo;
pub mod edu;
pub mod edu_server;
pub mod edu_vfio;
pub mod exits;
pub mod gantry;
pub mod gpuvm;
pub mod guest;
pub mod hijack;
pub mod host_device;
pub mod http;
pub mod idle;
pub mod liar;
pub mod memory_checker;
pub mod moves;
pub mod net;
pub mod nouveau;
pub mod opencl;
pub mod pci;
pub mod processes;
pub mod programs;
pub mod raw_gpu;
pub mod report;
pub mod rig;
pub mod ring;
pub mod scenarios;
pub mod shared_vms;
pub mod starts;
pub mod write_faults;
