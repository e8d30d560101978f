//! The virtual machine monitor: the library behind the `gantry` binary.
//!
//! ```text
//!   cli ──VmConfig──┐
//!                   ├──> control ──> machine ──> cpu, memory, devices (crates devices, hypervisor)
//!   api ──requests──┘       │           └──────> snapshot
//!                           └──> events, metrics
//! ```
//!
//! - [`cli`]: the command line; [`config`]: the configuration of a VM and its validation.
//! - [`api`]: the REST API; [`control`]: the control thread, which owns the machine.
//! - [`machine`]: assembles a machine and changes it at run time; [`cpu`]: vCPU threads;
//!   [`memory`]: guest RAM; [`snapshot`]: saved machines on disk.
//! - [`migration`]: live migration of VMs to another host.
//! - [`events`], [`metrics`], [`logging`]: what a VM reports to the outside.
//! - [`seccomp`], [`landlock`]: confinement of the process; [`open_files`]: its limit of open file
//!   descriptors; [`doctor`]: checks for what a host lacks.

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
