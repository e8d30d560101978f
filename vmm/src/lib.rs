//! The virtual machine monitor: what stands behind the `gantry` binary.
//!
//! ```text
//!   cli ──VmConfig──┐
//!                   ├──> control ──> machine ──> cpu, memory, devices (crates devices, hypervisor)
//!   api ──requests──┘       │           └──────> snapshot
//!                           └──> events, metrics
//! ```
//!
//! - [`cli`]: the command line; [`config`]: what a VM consists of, and what of it can be done.
//! - [`api`]: the REST API; [`control`]: the one thread that owns the machine.
//! - [`machine`]: puts a machine together and changes it; [`cpu`]: vCPU threads; [`memory`]: guest
//!   RAM; [`snapshot`]: its state on disk.
//! - [`migration`]: VMs that move to another host while they run.
//! - [`events`], [`metrics`], [`logging`]: what others see of it.
//! - [`seccomp`], [`landlock`]: what the process may do; [`open_files`]: how many descriptors it
//!   may have; [`doctor`]: what a host lacks.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod api;
pub mod cli;
pub mod config;
pub mod control;
mod cpu;
pub mod doctor;
pub mod events;
mod landlock;
pub mod logging;
pub mod machine;
mod memory;
mod metrics;
pub mod migration;
pub mod open_files;
pub mod seccomp;
pub mod snapshot;
