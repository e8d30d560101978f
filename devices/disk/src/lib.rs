//! Disk images and asynchronous I/O on them, apart from any virtio.
//!
//! ```text
//!   Disk::open(path) ── locks, checks the format ──> Disk
//!   Disk::async_io() ──> AsyncIo ─┬─ Uring  raw images; the kernel works on guest memory itself
//!                                 └─ Pool   raw without io_uring, and qcow2: a few threads
//!        start(Io) ... submit() ──> completion event ──> take_finished() -> the same Io
//! ```
//!
//! Ownership of an [`Io`] passes to the engine and comes back when the kernel is done with its
//! memory, so no buffer can vanish under a transfer.

pub mod geometry;
pub mod image;
pub mod io;
pub mod lock;
mod pool;
mod qcow2;
mod raw;
mod uring;

pub use image::{Disk, DiskError, DiskOptions, ImageType};
pub use io::{AsyncIo, Buffers, Finished, Io, Operation};
pub use lock::{LockGranularity, Scope};

/// Bytes in a sector, the unit of offsets and lengths in virtio-blk.
pub const SECTOR: u64 = 512;
