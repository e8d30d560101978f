//! Decides who may use an accelerator, and when.
//!
//! ```text
//!   who wants the device ---> Scheduler ---> who gets it, for how long
//!                                 |
//!                      Policy: fifo, credit, band, fair
//! ```
//!
//! - [`arbiter`]: the process that shares a real device among workers.
//! - [`gpu`]: shares one GPU among guests that use their own drivers.
//! - [`policy`]: the order of turns. Pure state machines on a clock that they are given: no
//!   threads, no I/O.
//! - [`scheduler`]: a policy, and the accounts of the clients, which do not depend on the policy.
//! - [`simulator`]: runs the same code in virtual time against clients with kernels of any length;
//!   measures fairness and its cost, and draws it.
//! - [`top`]: shows the figures of [`status`] in a terminal.

pub mod arbiter;
pub mod gpu;
pub mod policy;
pub mod scheduler;
pub mod simulator;
pub mod status;
#[cfg(feature = "top")]
pub mod top;

pub use remoting_turns::{Moment, meter::Slice, pauses::Expected};
