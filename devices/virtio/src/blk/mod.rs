//! Block device (virtio 1.2, 5.2) backed by a disk image.
//!
//! ```text
//!   Blk ── Shared: capacity, write-back mode, counters ──┐
//!    │ activate: one worker per queue, `_disk0_q0` ...   │
//!    └─> QueueWorker: kick -> parse -> AsyncIo::start ───┤ (image, one engine per queue)
//!                     completion event -> status, used ──┘
//! ```
//!
//! Only the kernel moves data between guest memory and the image: the worker passes the buffers of
//! a descriptor chain to io_uring directly.

mod config;
mod counters;
mod device;
mod queue;
mod request;
mod shared;
#[cfg(test)]
mod tests;

pub use device_model::throttle::SharedRateLimiter;

pub use device::{Blk, Error, Flush, Handle, Options, State};
