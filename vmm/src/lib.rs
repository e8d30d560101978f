//! The machine.
pub mod cpu;
pub mod machine;
pub mod memory;
pub mod seccomp;
pub mod snapshot;
