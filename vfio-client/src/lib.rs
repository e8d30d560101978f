//! A client's side of vfio-user: questions to a server of a device, and its answers.
//!
//! - [`wire`]: the messages. [`connection`]: a question and its answer in time.
//!
//! Crate `vfio_user` has the numbers of the format, and its server is what this is tested with. Its
//! client waits for ever, looks at no answer's length, number or error flag, and asserts what a
//! server says of a region: a server could hang or end the client, so the client is written here.
//! A server is not trusted: every answer is checked, and has to come within a time limit.

pub mod connection;
pub mod wire;

pub use connection::{Connection, Deadline, Failure};
