//! The process that serves one application.
//!
//! One thread takes calls out of the ring and hands them to the host's driver; it never blocks in
//! the driver, so that one thread of the application that waits does not hold up another. What
//! has to be waited for is an event of the driver: polled for a bounded time, then slept on.
//! Building programs takes long and runs in a thread of its own.

pub mod commands;
pub mod confine;
pub mod cover;
pub mod notice;
pub mod objects;
pub mod platform;
pub mod pool;
pub mod query;
pub mod quota;
pub mod server;
pub mod table;
pub mod transfers;
