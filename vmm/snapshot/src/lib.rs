//! The on-disk format of snapshots, and how memory is loaded from them.
//!
//! A snapshot is a directory:
//!
//! | file            | contents                                                             |
//! |-----------------|----------------------------------------------------------------------|
//! | `config.json`   | the machine's configuration, as `vm.create` takes it                  |
//! | `state.json`    | a header line (format, version, checksum), then vCPUs and devices     |
//! | `memory-ranges` | RAM, region after region; zero pages are holes in the file            |
//! | `applications`  | those of accelerators, if the snapshot has them; checksums are in the state |
//!
//! - [`state_file`]: versioned and checksummed state.
//! - [`memory_file`]: saving and reading RAM.
//! - [`lazy`]: loading RAM while the guest is already running.
//! - [`lock`]: one writer at a time.
//! - [`staged`]: atomic replacement of an older snapshot.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod lazy;
pub mod lock;
pub mod memory_file;
pub mod staged;
pub mod state_file;
pub mod writing;

/// The machine's configuration in a snapshot directory.
pub const CONFIG: &str = "config.json";
/// The state of vCPUs and devices in a snapshot directory.
pub const STATE: &str = "state.json";
/// The applications of accelerators in a snapshot directory, if it has any.
pub const APPLICATIONS: &str = "applications";
/// RAM in a snapshot directory.
pub const MEMORY: &str = "memory-ranges";
