//! The processes that serve applications.
//!
//! - [`pool`]: keeps workers ready; [`process`]: what each is; [`confine`]: what they may do;
//!   a `group` has the limits of all that it starts; [`compiled`]: what drivers have compiled, which
//!   outlives them; `folders`: where all of them write.
//! - [`control`]: how an application moves from one worker to another: the pool's side is `moves`, a worker's
//!   `standby`.
//! - [`stream`]: how they are reached from other machines; `greet`: by whom, a `crowd` at a time.
//! - [`gate`]: the process behind a gate.
//! - [`placement`]: which processors are near each other.

pub mod compiled;
pub mod confine;
pub mod control;
mod crowd;
mod folders;
pub mod gate;
mod greet;
mod group;
pub mod moves;
pub mod placement;
pub mod pool;
pub mod process;
mod standby;
pub mod stream;
