//! What the driver of any accelerator API needs in a process: the connection to a worker, the
//! window that both see, and what goes through it. A driver adds its entry points, its objects and
//! the calls of its API ([`gantry_remoting::apis`]), and says by a [`Driver`] what is its own.
//!
//! The way of a call that copies 1 MiB of ordinary memory to the device, and is not waited for:
//!
//! ```text
//!  the application's thread                                 |  window     |  worker
//!  clEnqueueWriteBuffer, cuMemcpyHtoDAsync                  |             |
//!    entry point (guest/opencl, ...): checks, ids           |             |
//!      connect::connected ............ the connection             |             |
//!      stage: Link::stage_copy . space of the window,  ---->|  data       |
//!        copy_threads::copy .... filled by several threads  |     \       |
//!      link: Link::post ........ header and body       ---->|  calls  --->|  decodes, enqueues
//!    returns                                                |       \     |        |
//!                                                           |        `--->|  the device reads
//!  whichever thread reads next (Link::ask, or listen)       |             |        |
//!    stage: Link::released ..... the space is free     <----|  answers <--|  released
//! ```
//!
//! A call that returns data is sent by `Link::ask`, which reads answers until its own is there: one
//! of the threads that wait reads for all.
//!
//! - [`driver`]: what an API's driver says of itself
//! - [`connect`]: how a process comes to its connection; [`gate`]: to a worker that its own CPU
//!   serves; `paired`: a real exitless gate; `peer`: whom it leads to
//! - [`link`]: the connection: calls out, answers in
//! - [`carry`]: the connection changes to another worker, while the process runs; `park`: to none, for
//!   a while
//! - [`callbacks`]: those that are waited for; `listen`: the thread that hears of them;
//!   `event_fd`: how it is woken
//! - [`ids`]: numbers of objects; [`progress`]: how far a queue is known to be
//! - [`stage`]: what data goes through; `space`: which parts of the window are free
//! - [`copy_threads`]: large copies by several threads; `streaming`: past the caches
//! - `hook`: the application's large allocations in the window
//! - [`thread`]: threads of the driver's own
//!
//! On the way of a call nothing is allocated that the call itself does not need, nothing is
//! dispatched at run time, and no system call is made unless the worker sleeps or a ring is full.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod callbacks;
pub mod carry;
pub mod connect;
pub mod copy_threads;
pub mod driver;
mod event_fd;
pub mod gate;
mod hook;
pub mod ids;
pub mod link;
mod listen;
#[cfg(feature = "gate")]
mod paired;
mod park;
mod peer;
pub mod progress;
mod space;
pub mod stage;
mod streaming;
pub mod thread;

pub use driver::{Connection, Driver};
pub use link::Link;
