//! The processes that serve applications.
//!
//! - [`pool`]: keeps workers ready; `listener`: its socket; `worker`: a worker as the pool sees it;
//!   [`process`]: the worker itself; [`options`]: what it is told; [`confine`]: what they may do;
//!   a `group` has the limits of all that it starts; [`compiled`]: what drivers have compiled, which
//!   outlives them; `folders`: where all of them write.
//! - [`control`]: how an application moves from one worker to another: the pool's side is `moves` and
//!   `moving`, a worker's `standby`.
//! - [`stream`]: how they are reached from other machines; `handshake`: how a worker accepts its
//!   application; `pending`: the connections that have not completed the handshake.
//! - [`gate`]: the process behind a gate.
//! - [`placement`]: which processors are near each other.
//! - `drivers`: which drivers of OpenCL all of them find; [`probe`]: whether a driver works in a worker.

pub mod compiled;
pub mod confine;
pub mod control;
mod drivers;
mod folders;
pub mod gate;
mod group;
mod handshake;
mod listener;
pub mod moves;
mod moving;
pub mod options;
mod pending;
pub mod placement;
pub mod pool;
pub mod probe;
pub mod process;
mod standby;
pub mod stream;
mod worker;
