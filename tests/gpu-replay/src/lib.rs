//! A recording of what a driver does with a GPU, as a guest without an operating system does it again: steps that
//! its host writes into its memory, and how long each access took.
//!
//! ```text
//!   0          what the recorded guest had: the GPU reads and writes here
//!   DESK       the desk; the guest's program follows
//!   STEPS      steps, then the bytes that they put into RAM
//!   LOG        a word for each access of the part that was done last
//! ```

#![no_std]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Where the desk is.
pub const DESK: u64 = 0x2000_0000;
/// Where the steps are, and the end of what they and their bytes have.
pub const STEPS: u64 = 0x2100_0000;
/// Where the log is.
pub const LOG: u64 = 0x2800_0000;
/// The end of the guest's RAM.
pub const END: u64 = 0x3000_0000;
/// Words that the log has room for: as many as a recording may have accesses.
pub const MOST_LOGGED: u64 = (END - LOG) / 8;

/// What an access is, in the low bits of its word in the log; its time, in counts of the time stamp counter,
/// is above.
pub const CLASS_BITS: u32 = 8;

/// BARs: registers, BAR 1, BAR 3.
pub const BARS: usize = 3;

/// A step.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// One of [`kind`].
    pub kind: u32,
    /// What it counts as in the log.
    pub class: u32,
    /// Which BAR, below [`BARS`].
    pub bar: u32,
    /// log2 of the bytes of an access.
    pub size: u32,
    /// Where in the BAR, or in RAM.
    pub offset: u64,
    /// How many accesses, or bytes.
    pub count: u64,
    /// From one access to the next; wraps.
    pub stride: u64,
    /// What is written, or where the bytes are.
    pub value: u64,
    /// From one value to the next; wraps.
    pub step: u64,
}

/// Kinds of steps.
pub mod kind {
    /// Reads.
    pub const READ: u32 = 1;
    /// Writes.
    pub const WRITE: u32 = 2;
    /// Puts bytes into RAM.
    pub const RAM: u32 = 3;
    /// Waits until a ring's word in a BAR has reached `value`; `count` is the ring's entries.
    pub const WAIT: u32 = 4;
    /// A part is over: waits to be told to go on.
    pub const PART: u32 = 5;
    /// All is over.
    pub const END: u32 = 6;
}

/// What the guest is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum State {
    /// It has not begun.
    Start = 0,
    /// It has found the GPU, and waits to be told to go on.
    Ready = 1,
    /// It does what it was told.
    Working = 2,
    /// A part is over, and the log has it; it waits to be told to go on.
    Paused = 3,
    /// All is over.
    Done = 4,
    /// There is no GPU, or not what it should be.
    NoGpu = 5,
    /// A submission has not ended for a minute.
    Stuck = 6,
    /// A step makes no sense.
    Nonsense = 7,
}

/// What guest and host look at both. The host writes `go`, the guest everything else.
#[repr(C)]
#[derive(Debug)]
pub struct Desk {
    state: AtomicU32,
    go: AtomicU32,
    /// How often the guest has begun to wait.
    waits: AtomicU64,
    /// Words in the log.
    logged: AtomicU64,
    /// How often submissions' ends were looked for.
    polls: AtomicU64,
    /// The step that is done.
    at: AtomicU64,
}

impl Desk {
    /// One of a guest that has not begun.
    #[allow(clippy::new_without_default)] // Must be one for a static.
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            go: AtomicU32::new(0),
            waits: AtomicU64::new(0),
            logged: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            at: AtomicU64::new(0),
        }
    }

    /// The guest's state; [`State::Nonsense`] if it is none.
    pub fn state(&self) -> State {
        let states = [
            State::Start,
            State::Ready,
            State::Working,
            State::Paused,
            State::Done,
            State::NoGpu,
            State::Stuck,
        ];
        let number = self.state.load(Ordering::Acquire);
        let known = states.into_iter().find(|state| *state as u32 == number);
        known.unwrap_or(State::Nonsense)
    }

    /// Says what the guest is doing.
    pub fn enter(&self, state: State) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Says that the guest waits, and for what.
    pub fn wait(&self, state: State) {
        self.enter(state);
        self.waits.fetch_add(1, Ordering::Release);
    }

    /// How often it has begun to: a part may be over before anybody has looked.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Acquire)
    }

    /// Has the guest go on.
    pub fn go(&self) {
        self.go.fetch_add(1, Ordering::Release);
    }

    /// How often it was told to.
    pub fn gone(&self) -> u32 {
        self.go.load(Ordering::Acquire)
    }

    /// Says what has been done since the guest went on last.
    pub fn note(&self, logged: u64, polls: u64, at: u64) {
        self.logged.store(logged, Ordering::Relaxed);
        self.polls.store(polls, Ordering::Relaxed);
        self.at.store(at, Ordering::Release);
    }

    /// Words in the log.
    pub fn logged(&self) -> u64 {
        self.logged.load(Ordering::Acquire)
    }

    /// How often submissions' ends were looked for.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Acquire)
    }

    /// The step that is done.
    pub fn at(&self) -> u64 {
        self.at.load(Ordering::Acquire)
    }
}
