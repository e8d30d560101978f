//! The same messages through a socket, for a device of another machine.
//!
//! Both sides keep what they have for the ring, in memory of their own: a window with its two rings.
//! Two threads on each side, a [bridge], carry what is put into one side's ring over to the
//! other side's ring of the same name. So neither the driver nor the serving thread knows of sockets,
//! and an enqueue is a copy into a ring for the application.
//!
//! ```text
//!   driver             bridge                          bridge              worker
//!   ring of calls   -> outward --,                 ,-> inward  -> ring of calls
//!   data                ^         }-- connection --{    |         data
//!   ring of answers <- inward  <-'                 '-- outward <- ring of answers
//! ```
//!
//! The windows have the same layout and different contents. What a command reads or writes there
//! goes with it ([`carried`]): what the device is to read goes before the call, what the device has
//! written goes before the message that gives its stage back. It goes in chunks of [`frame::CHUNK`]
//! bytes, each a frame of the number [`DATA`](frame::DATA) whose sequence is its place in the window.
//!
//! Nothing is held twice: a thread has [`frame::BATCH`] bytes and a frame on their way, and stops at
//! a full ring or a full connection. What arrives is hostile: frames are bounded before they are
//! received, data goes into the window or nowhere, and calls are what a worker checks in any case.
//!
//! - [`address`]: where workers are; [`connect`]: how an application comes there.
//! - [`channel`]: a connection, plain or by TLS ([`tls`]).
//! - [`frame`]: frames out of bytes.

pub mod address;
pub mod bridge;
pub mod carried;
pub mod channel;
pub mod connect;
pub mod frame;
pub mod tls;

#[cfg(test)]
mod tests;
