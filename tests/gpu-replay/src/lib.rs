//! A recording of a driver's use of a GPU, in the form in which a guest without an operating system
//! repeats it: steps that the host writes into the guest's memory, and the duration of each access.
//!
//! ```text
//!   0          what the recorded guest had: the GPU reads and writes here
//!   DESK       the desk; the guest's program follows
//!   STEPS      steps, then the bytes that they put into RAM
//!   LOG        a word for each access of the part that was done last
//! ```

#![no_std]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Address of the desk.
pub const DESK: u64 = 0x2000_0000;
/// Address of the steps. They and their bytes end before the log.
pub const STEPS: u64 = 0x2100_0000;
/// Address of the log.
pub const LOG: u64 = 0x2800_0000;
/// The end of the guest's RAM.
pub const END: u64 = 0x3000_0000;
/// Number of words that fit in the log, and thus the maximum number of accesses in a recording.
pub const MOST_LOGGED: u64 = (END - LOG) / 8;

/// Bits of a log word that contain the access's class. The bits above contain its duration in
/// counts of the time-stamp counter.
pub const CLASS_BITS: u32 = 8;

/// Number of BARs: registers, BAR 1, BAR 3.
pub const BARS: usize = 3;

/// A step.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// One of [`kind`].
    pub kind: u32,
    /// Its class in the log.
    pub class: u32,
    /// Index of the BAR, below [`BARS`].
    pub bar: u32,
    /// log2 of the size of an access in bytes.
    pub size: u32,
    /// Offset in the BAR, or address in RAM.
    pub offset: u64,
    /// Number of accesses or bytes.
    pub count: u64,
    /// Distance from one access to the next; wraps.
    pub stride: u64,
    /// The value to write, or the address of the bytes.
    pub value: u64,
    /// Difference between one value and the next; wraps.
    pub step: u64,
}

/// Kinds of steps.
pub mod kind {
    /// Reads.
    pub const READ: u32 = 1;
    /// Writes.
    pub const WRITE: u32 = 2;
    /// Copies bytes into RAM.
    pub const RAM: u32 = 3;
    /// Waits until a ring's word in a BAR has reached `value`; `count` is the number of the ring's
    /// entries.
    pub const WAIT: u32 = 4;
    /// End of a part: waits for the order to continue.
    pub const PART: u32 = 5;
    /// End of all steps.
    pub const END: u32 = 6;
}

/// What the guest is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum State {
    /// It has not begun.
    Start = 0,
    /// It has found the GPU, and waits for the order to continue.
    Ready = 1,
    /// It is executing steps.
    Working = 2,
    /// A part is over and logged; it waits for the order to continue.
    Paused = 3,
    /// Everything is done.
    Done = 4,
    /// There is no GPU, or an unexpected one.
    NoGpu = 5,
    /// A submission has not ended for a minute.
    Stuck = 6,
    /// A step is invalid.
    Nonsense = 7,
}

/// Memory that guest and host share. The host writes `go`, the guest everything else.
#[repr(C)]
#[derive(Debug)]
pub struct Desk {
    state: AtomicU32,
    go: AtomicU32,
    /// How often the guest has started to wait.
    waits: AtomicU64,
    /// Number of words in the log.
    logged: AtomicU64,
    /// How often the guest polled for the end of submissions.
    polls: AtomicU64,
    /// Index of the current step.
    at: AtomicU64,
}

impl Desk {
    /// A desk of a guest that has not begun.
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

    /// The guest's state, or [`State::Nonsense`] if the value is invalid.
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

    /// Publishes the guest's state.
    pub fn enter(&self, state: State) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Publishes that the guest waits, and for what.
    pub fn wait(&self, state: State) {
        self.enter(state);
        self.waits.fetch_add(1, Ordering::Release);
    }

    /// How often the guest has started to wait. (A part may be over before the host looks.)
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Acquire)
    }

    /// Tells the guest to continue.
    pub fn go(&self) {
        self.go.fetch_add(1, Ordering::Release);
    }

    /// How often the guest was told to continue.
    pub fn gone(&self) -> u32 {
        self.go.load(Ordering::Acquire)
    }

    /// Publishes what has been done since the guest last continued.
    pub fn note(&self, logged: u64, polls: u64, at: u64) {
        self.logged.store(logged, Ordering::Relaxed);
        self.polls.store(polls, Ordering::Relaxed);
        self.at.store(at, Ordering::Release);
    }

    /// Number of words in the log.
    pub fn logged(&self) -> u64 {
        self.logged.load(Ordering::Acquire)
    }

    /// How often the guest polled for the end of submissions.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Acquire)
    }

    /// Index of the current step.
    pub fn at(&self) -> u64 {
        self.at.load(Ordering::Acquire)
    }
}
