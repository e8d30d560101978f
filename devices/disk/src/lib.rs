//! Disk images and asynchronous I/O on them, independent of virtio.
//!
//! ```text
//!   Disk::open(path) ── locks, checks the format ──> Disk
//!   Disk::async_io() ──> AsyncIo ─┬─ Uring  raw images; the kernel works on guest memory itself
//!                                 └─ Pool   raw without io_uring, and qcow2: a few threads
//!        start(Io) ... submit() ──> completion event ──> take_finished() -> the same Io
//! ```
//!
//! Ownership of an [`Io`] passes to the engine and returns when the kernel no longer uses its
//! memory, so no buffer can disappear during a transfer.

pub mod claim;
pub mod error;
pub mod geometry;
pub mod image;
pub mod io;
pub mod lock;
pub mod options;
mod pool;
mod qcow2;
mod raw;
mod signature;
mod uring;

pub use error::DiskError;
pub use image::Disk;
pub use io::{AsyncIo, Buffers, Finished, Io, Operation};
pub use lock::{LockGranularity, Scope};
pub use options::{DiskOptions, ImageType};

/// Size of a sector in bytes, the unit of offsets and lengths in virtio-blk.
pub const SECTOR: u64 = 512;
