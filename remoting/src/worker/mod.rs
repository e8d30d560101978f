//! The process that serves one application.
//!
//! One thread takes calls out of the ring and hands them to the host's driver. It blocks in the
//! driver only where nothing else can happen meanwhile: while the one thread that an application
//! has waits for commands that wait for nothing of the application's, and waits were short so
//! far. All else that has to be waited for is an event of the driver: polled for a bounded time,
//! then slept on. Building and linking programs takes long and runs in threads of its own.

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
pub mod sharing;
pub mod table;
pub mod transfers;
