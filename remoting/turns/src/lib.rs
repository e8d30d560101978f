//! Taking turns on a device that others share.
//!
//! ```text
//!              connection, process           grants (shared memory that the worker reads)
//!   pool ───────────────────────> arbiter ──────────────────────────────────────────> worker
//!     └── connection ──> worker      ^ └───── "look" (socket) ──────────────────────────┘ │
//!                                    └── "I want it", "I am done", account (shared) ──────┘
//! ```
//!
//! A worker submits only during its turn. It reads from shared memory whether it has a turn and
//! whether somebody else waits: as long as it is alone, it sends no messages. The arbiter (the
//! crate above) decides how long turns are and who gets the next one.
//!
//! - [`meter`]: how much to submit, so that the device is busy until the end of a turn and not beyond.
//! - [`pauses`]: how long an application is expected to stay away between two batches; [`presence`]: for how long it has
//!   had work.
//! - [`slices`]: where the device serves workers in time slices, a worker's are as the arbiter says; [`usage`]: what its
//!   requests use there; [`waits`]: how long it waits for some of them; [`trial`]: whether time slices work, which one pool at a time tries.
//! - [`weight`]: changing a client's weight while it runs.
//! - [`page`]: the memory that worker and arbiter share; [`message`]: their messages; [`session`]: a
//!   connection with both.
//! - [`worker`]: a worker's side; [`introduce`]: how its pool gets it a connection, since a confined
//!   worker makes none, and how a program of the host without a pool introduces itself.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod clock;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub mod fake;
pub mod introduce;
pub mod message;
pub mod meter;
pub mod page;
pub mod pauses;
pub mod presence;
pub mod session;
pub mod slices;
pub mod trial;
pub mod usage;
pub mod waits;
pub mod weight;
pub mod worker;

pub use clock::Moment;
