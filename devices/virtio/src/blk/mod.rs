//! Block device (virtio 1.2, 5.2) on a disk image.
//!
//! ```text
//!   Blk ── Shared: capacity, write-back mode, counters ──┐
//!    │ activate: one worker per queue, `_disk0_q0` ...   │
//!    └─> QueueWorker: kick -> parse -> AsyncIo::start ───┤ (image, one engine per queue)
//!                     completion event -> status, used ──┘
//! ```
//!
//! The guest's data moves between its memory and the image by the kernel alone: the worker hands
//! the vectors of a descriptor chain to io_uring as they are.

mod config;
mod counters;
mod device;
mod queue;
mod request;
mod shared;
#[cfg(test)]
mod tests;

pub use device_model::throttle::SharedRateLimiter;

pub use device::{Blk, Error, Handle, Options, State};
