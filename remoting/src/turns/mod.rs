//! Taking turns at a device that others use, too.
//!
//! A worker submits only during its turn. How long turns are and who gets the next one is an
//! arbiter's business (see the crate above); here is what a worker does with one.
//!
//! - [`meter`]: how much to submit, so that the device is busy to the end of a turn and not beyond.

mod clock;
pub mod meter;

pub use clock::Moment;
