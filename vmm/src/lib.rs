//! The machine.
pub mod config;
pub mod cpu;
pub mod machine;
pub mod memory;
pub mod seccomp;
pub mod snapshot;
