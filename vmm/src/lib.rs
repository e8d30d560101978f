//! The virtual machine monitor: what of the `gantry` binary is not in a crate of its own.
//!
//! ```text
//!   cli ──VmConfig──┐
//!                   ├──> control ──> machine ──> memory, devices, hypervisor
//!   api ──requests──┘       │           └──────> snapshot
//!                           └──────> migration
//! ```
//!
//! - [`cli`]: the command line; [`vmm_config`]: the configuration of a VM and its validation.
//! - [`vmm_api`]: the REST API and metrics; [`vmm_control`]: the control thread, which owns the machine, and its events.
//! - [`vmm_machine`]: assembles a machine and changes it at run time; its vCPU threads. `vmm-memory`: guest RAM;
//!   `vmm-snapshot`: saved machines on disk.
//! - [`vmm_migration`]: live migration of VMs to another host.
//! - [`vmm_confinement`]: seccomp, Landlock and the limit of open file descriptors.
//! - [`doctor`]: checks for what a host lacks; [`logging`]: the log.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod cli;
pub mod doctor;
pub mod logging;
