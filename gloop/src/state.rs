//! What a job is doing.

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not launched, or stopped.
    Ready,
    /// It has left the GPU because it waits for events.
    Waiting,
    /// On the GPU, or ended without this having been noticed.
    Running,
    /// Everything is done.
    Done,
}
