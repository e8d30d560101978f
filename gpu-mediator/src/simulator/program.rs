//! The behaviour of a simulated client.

use std::time::Duration;

use remoting_proto::wire::api::RequestClass;

/// Lengths of a client's kernels.
#[derive(Clone, Debug)]
pub enum Lengths {
    /// All the same.
    Always(Duration),
    /// Chosen at random from these; they can be distinguished, like different kernels.
    AnyOf(Vec<Duration>),
    /// Any length in between, each octave equally likely; they all look the same from outside.
    Between(Duration, Duration),
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Its length.
    pub length: Duration,
    /// What is known about it in advance.
    pub kind: RequestClass,
}

/// The behaviour of a client.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its kernels.
    pub lengths: Lengths,
    /// Maximum number of kernels in flight; one makes each call synchronous.
    pub in_flight: u32,
    /// How long it computes between the end of a kernel and the next one.
    pub think: Duration,
    /// Whether it is a closed loop: it submits `in_flight` kernels at once, waits for all of them
    /// and then thinks, like training steps and solvers. Otherwise, the end of each kernel lets it
    /// submit another one.
    pub batches: bool,
    /// Maximum additional think time, chosen uniformly at random.
    pub varies: Duration,
    /// Whether each kernel stands for many short ones that follow each other, so that its length can be measured although
    /// it is interrupted.
    pub short: bool,
}

impl Program {
    /// A client that always has kernels ready.
    pub fn busy(lengths: Lengths) -> Self {
        Self {
            lengths,
            in_flight: 64,
            think: Duration::ZERO,
            batches: false,
            varies: Duration::ZERO,
            short: false,
        }
    }

    /// A client that waits for each kernel.
    pub fn interactive(length: Duration, think: Duration) -> Self {
        Self {
            lengths: Lengths::Always(length),
            in_flight: 1,
            think,
            batches: false,
            varies: Duration::ZERO,
            short: false,
        }
    }

    /// A client that submits this many kernels, waits for all of them, thinks, and starts again.
    pub fn closed(kernels: u32, length: Duration, think: Duration) -> Self {
        Self {
            lengths: Lengths::Always(length),
            in_flight: kernels.max(1),
            think,
            batches: true,
            varies: Duration::ZERO,
            short: false,
        }
    }

    /// A client that waits for each step, and then pauses. Steps are up to 3 % shorter or longer, pauses up to a
    /// fifth.
    pub fn steps(step: Duration, pause: Duration) -> Self {
        Self {
            lengths: Lengths::Between(step * 97 / 100, step * 103 / 100),
            in_flight: 1,
            think: pause * 4 / 5,
            batches: true,
            varies: pause * 2 / 5,
            short: true,
        }
    }

    /// A small training program, as measured on an H200.
    pub fn training() -> Self {
        Self::steps(Duration::from_micros(1600), Duration::from_micros(210))
    }

    /// A language model that decodes, as measured on an H200.
    pub fn decoding() -> Self {
        Self::steps(Duration::from_micros(350), Duration::from_micros(370))
    }

    /// A training program that enqueues two more steps before it waits for one, as measured on an H200.
    pub fn training_ahead() -> Self {
        Self {
            in_flight: 3,
            batches: false,
            short: false,
            ..Self::steps(Duration::from_micros(3280), Duration::from_micros(10))
        }
    }

    /// Returns the think time of this iteration.
    pub(super) fn pause(&self, random: &mut fastrand::Rng) -> Duration {
        if self.varies.is_zero() {
            self.think
        } else {
            self.think + self.varies.mul_f64(random.f64())
        }
    }

    /// Returns the next kernel.
    pub(super) fn request(&self, random: &mut fastrand::Rng) -> Request {
        match &self.lengths {
            Lengths::Always(length) => Request {
                length: *length,
                kind: RequestClass(0),
            },
            Lengths::AnyOf(lengths) => {
                let index = random.usize(..lengths.len().max(1));
                Request {
                    length: lengths.get(index).copied().unwrap_or_default(),
                    kind: RequestClass(index as u64),
                }
            }
            Lengths::Between(shortest, longest) => {
                let octaves = (longest.as_secs_f64() / shortest.as_secs_f64()).log2();
                Request {
                    length: shortest.mul_f64((random.f64() * octaves).exp2()),
                    kind: RequestClass(0),
                }
            }
        }
    }
}
