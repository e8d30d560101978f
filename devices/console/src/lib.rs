//! The host side of a guest's consoles: terminal, pseudo terminal, file or socket.
//!
//! Serial port, virtio console and debug console use the same backends:
//!
//! ```text
//!  guest writes ──> device ──> ConsoleOutput ──────────────> host, if it takes the bytes now
//!                                    └─ backlog ─┐              ^
//!                                            _console thread ───┘ when the host takes more
//!  guest reads <── device <── InputSink::enqueue <──┴───────── host
//! ```
//!
//! - **A vCPU never waits for the host.** Output that the host does not accept immediately goes to
//!   a backlog of at most [`OUTPUT_BACKLOG`] bytes; when that is full, its oldest bytes are dropped
//!   and counted ([`ConsoleOutput::dropped`]). A socket without a client, and a pseudo terminal
//!   without a reader, thus keep their newest output for the next one.
//! - **Input is never dropped.** Input for which the device has no room is held back, and nothing
//!   more is read from the host until the device signals that there is room.
//! - **An idle console costs nothing.** At the end of input (a closed pipe, `/dev/null`), it is no
//!   longer watched.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use {console::*, device_model::thread::Unconfined, legacy::Serial};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let irq = vmm_sys_util::eventfd::EventFd::new(0)?;
//! let backend = ConsoleBackend::open(&ConsoleMode::Pty)?;
//! let serial = Arc::new(Serial::new(irq, Box::new(backend.output()))?);
//! let mut service = ConsoleService::new(vec![ConsoleLine::new(backend, Some(serial))]);
//! service.start(&Unconfined)?;
//! # Ok(())
//! # }
//! ```

mod backend;
mod output;
mod service;
mod terminal;

use vmm_sys_util::eventfd::EventFd;

pub use backend::{ConsoleBackend, ConsoleError, ConsoleMode, Terminal};
pub use output::{ConsoleOutput, OUTPUT_BACKLOG};
pub use service::{ConsoleLine, ConsoleService};
pub use terminal::restore_terminal;

/// A device that receives the input of a console.
pub trait InputSink: Send + Sync {
    /// Accepts a prefix of `data` and returns its length in bytes; 0 if there is no room.
    ///
    /// A device that does not accept everything writes [`InputSink::room_event`] when it has room
    /// again. Called on the console thread; must not block.
    fn enqueue(&self, data: &[u8]) -> usize;

    /// Becomes readable when there is room for input that was rejected. Non-blocking.
    fn room_event(&self) -> &EventFd;
}
