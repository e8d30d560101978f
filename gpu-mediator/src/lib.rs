//! Who may use an accelerator, and when.
//!
//! ```text
//!   who wants the device ---> Scheduler ---> who gets it, for how long
//!                                 |
//!                      Policy: fifo, credit, band, fair
//! ```
//!
//! - [`arbiter`]: the process that shares a real device among workers.
//! - [`gpu`]: one GPU as many, for guests with their own drivers.
//! - [`policy`]: in what order turns are given. Pure state machines over a clock that they are
//!   told: no thread, no input or output.
//! - [`scheduler`]: a policy, and the account of each client, whatever the policy.
//! - [`simulator`]: the same code in virtual time against clients whose kernels have any length;
//!   measures fairness and what it costs, and draws it.
//! - [`top`]: the arbiter's figures in a terminal; [`metrics`]: for Prometheus.

pub mod arbiter;
pub mod gpu;
pub mod metrics;
pub mod policy;
pub mod scheduler;
pub mod simulator;
pub mod status;
#[cfg(feature = "top")]
pub mod top;

pub use gantry_remoting::turns::{Moment, meter::Slice, pauses::Expected};
