//! What a snapshot is on disk, and how memory comes back from it.
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
//! - [`memory_file`]: writing and reading RAM.
//! - [`lazy`]: bringing RAM in while the guest runs already.
//! - [`lock`]: one writer at a time.
//! - [`staged`]: a new snapshot in an older one's place, or not at all.

pub mod lazy;
pub mod lock;
pub mod memory_file;
pub mod staged;
pub mod state_file;

/// The machine's configuration in a snapshot directory.
pub const CONFIG: &str = "config.json";
/// The state of vCPUs and devices in a snapshot directory.
pub const STATE: &str = "state.json";
/// Accelerators' applications in a snapshot directory, if it has them.
pub const APPLICATIONS: &str = "applications";
/// RAM in a snapshot directory.
pub const MEMORY: &str = "memory-ranges";
