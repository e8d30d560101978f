//! KVM behind a small API.
//!
//! This crate owns all access to `/dev/kvm`. A [`Kvm`] is the host's hypervisor, a [`Vm`] is one
//! guest's address space and interrupt controllers, and a [`Vcpu`] is one virtual processor. The
//! layers above work with guest-physical addresses, eventfds and messages, and never see an ioctl.
//!
//! ```text
//!   Kvm ──create_vm──> Vm ──create_vcpu──> Vcpu ──run──> Exits (port I/O, MMIO: trait)
//!                       │                    └─ kicker: interrupts a run from another thread
//!                       ├─ map: memory slots ──watch──> DirtyLog: which pages were written
//!                       ├─ Gsis: interrupt routing table, MSI vectors as irqfds
//!                       └─ ioeventfds, irqfds
//! ```
//!
//! The kernel emulates the interrupt controllers (local APICs, I/O APIC, PICs) and the PIT.

mod current;
pub mod dirty_log;
mod emulation;
mod error;
mod gsi;
mod kvm;
mod nested;
mod raw;
mod state;
mod stats;
mod vcpu;
mod vm;

pub use current::{CurrentVcpu, current_vcpu};
pub use dirty_log::DirtyLog;
pub use error::Error;
pub use gsi::{Gsis, MsiRoute};
pub use kvm::{Kvm, permit_amx};
pub use state::{CpuNeeds, VcpuState, VmState};
pub use stats::VcpuStats;
pub use vcpu::{Exit, Exits, Kicker, Vcpu, install_kick_handler};
pub use vm::{MemorySlot, SlotId, Vm};

/// Result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;
