//! The processes that serve applications.
//!
//! - [`pool`]: keeps workers ready; `listener`: its socket; `worker`: a worker as the pool sees it;
//!   [`process`]: the worker itself; [`confine`]: what they may do;
//!   a `group` has the limits of all that it starts; [`compiled`]: what drivers have compiled, which
//!   outlives them; `folders`: where all of them write.
//! - [`stream`]: how they are reached from other machines; `handshake`: how a worker accepts its
//!   application; `pending`: the connections that have not completed the handshake.
//! - [`gate`]: the process behind a gate.
//! - [`placement`]: which processors are near each other.

pub mod compiled;
pub mod confine;
mod folders;
pub mod gate;
mod group;
mod handshake;
mod listener;
mod pending;
pub mod placement;
pub mod pool;
pub mod process;
pub mod stream;
mod worker;
