//! The same messages through a socket, for a device of another machine.
//!
//! Each side keeps its own window, with two rings, in its own memory. Two threads on each side, a [bridge], carry what
//! is put into one side's ring to the same ring of the other side. Neither the driver nor the serving thread therefore
//! deals with sockets, and for the application an enqueue is a copy into a ring.
//!
//! ```text
//!   driver             bridge                          bridge              worker
//!   ring of calls   -> outward --,                 ,-> inward  -> ring of calls
//!   data                ^         }-- connection --{    |         data
//!   ring of answers <- inward  <-'                 '-- outward <- ring of answers
//! ```
//!
//! The windows have the same layout and different contents. The data that a command reads or writes travels with it
//! ([`carried`]): data that the device is to read precedes the call, and data that the device has written precedes the
//! message that releases its stage. Data travels in chunks of [`frame::CHUNK`] bytes. Each chunk is a frame with number
//! [`DATA`](frame::DATA) whose sequence is its offset in the window.
//!
//! Nothing is buffered twice: a thread holds [`frame::BATCH`] bytes and a frame, and stops at a full ring or a full
//! connection. What arrives is hostile: frames are bounded before they are received, data goes into the window or
//! nowhere, and the worker checks calls in any case.
//!
//! - [`address`]: where workers are; [`connect`]: how an application connects to one.
//! - [`channel`]: a connection, plain or with TLS ([`tls`]).
//! - [`frame`]: splits bytes into frames.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod address;
pub mod bridge;
pub mod carried;
pub mod channel;
pub mod connect;
pub mod frame;
pub mod tls;

#[cfg(test)]
mod tests;
