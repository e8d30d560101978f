//! What the driver of any accelerator API needs inside a process: the connection to a worker, the
//! window that both sides share, and the data that passes through it. A driver adds its entry
//! points, its objects and the calls of its API ([`remoting_proto::apis`]), and implements
//! [`Driver`] for everything that is specific to it.
//!
//! The path of a call that copies 1 MiB of ordinary memory to the device and does not wait:
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
//! A call that returns data is sent by `Link::ask`, which reads answers until its own arrives. When
//! several threads wait, one of them reads for all.
//!
//! - [`driver`]: what an API's driver provides
//! - [`connection`]: a process's connection, which its children do not have
//! - [`connect`]: how a process obtains its connection; [`gate`]: to a worker that runs on the
//!   process's own CPU; `paired`: a real exitless gate; `peer`: what is at the other end
//! - [`link`]: the connection: calls out, answers in
//! - [`carry`]: moves the connection to another worker while the process runs; `park`: leaves the
//!   process without a worker for a while
//! - [`callbacks`]: pending callbacks; `listen`: the thread that is told when they are due;
//!   `event_fd`: how it is woken
//! - [`ids`]: object numbers; [`progress`]: how far a queue is known to have executed
//! - [`stage`]: stretches of the window that data passes through; `space`: which parts of the
//!   window are free
//! - [`copy_threads`]: large copies by several threads; `streaming`: copies that bypass the caches
//! - `hook`: places the application's large allocations in the window
//! - [`thread`]: the driver's own threads
//!
//! The call path allocates nothing beyond what the call itself needs, uses no dynamic dispatch, and
//! makes no system call unless the worker sleeps or a ring is full.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod callbacks;
pub mod carry;
pub mod connect;
pub mod connection;
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
#[cfg(test)]
mod testing;
pub mod thread;

pub use connection::Connection;
pub use driver::Driver;
pub use link::Link;
