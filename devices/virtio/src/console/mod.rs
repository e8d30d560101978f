//! Console with one port (virtio 1.2, 5.3).
//!
//! ```text
//!   console thread ── InputSink::enqueue ──> Input (bounded) ──> worker ──> receive queue
//!   transmit queue ──> worker ──> ConsoleOutput (never blocks)
//! ```

mod device;
mod input;

pub use device::{Console, Handle, Options};

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
