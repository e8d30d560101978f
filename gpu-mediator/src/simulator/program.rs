//! What a simulated client does.

use std::time::Duration;

use gantry_remoting::turns::meter::RequestClass;

/// How long a client's kernels take.
#[derive(Clone, Debug)]
pub enum Lengths {
    /// All the same.
    Always(Duration),
    /// Each of these in turn at random; they are told apart, as different kernels are.
    AnyOf(Vec<Duration>),
    /// Anything between, as likely in each octave; they look all the same from outside.
    Between(Duration, Duration),
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// How long it takes.
    pub length: Duration,
    /// What can be told of it before.
    pub kind: RequestClass,
}

/// What a client does.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its kernels.
    pub lengths: Lengths,
    /// How many it has submitted and not seen the end of, at most: one makes each call synchronous.
    pub in_flight: u32,
    /// How long it computes itself between the end of a kernel and the next one.
    pub think: Duration,
    /// A closed loop: it submits `in_flight` kernels at once, waits for all of them and then thinks,
    /// as training steps and solvers do. Otherwise each kernel's end lets it submit another one.
    pub batches: bool,
    /// Up to so much longer it thinks at random, any time as likely.
    pub varies: Duration,
}

impl Program {
    /// One that always has kernels ready.
    pub fn busy(lengths: Lengths) -> Self {
        Self {
            lengths,
            in_flight: 64,
            think: Duration::ZERO,
            batches: false,
            varies: Duration::ZERO,
        }
    }

    /// One that waits for each kernel.
    pub fn interactive(length: Duration, think: Duration) -> Self {
        Self {
            lengths: Lengths::Always(length),
            in_flight: 1,
            think,
            batches: false,
            varies: Duration::ZERO,
        }
    }

    /// One that submits so many kernels, waits for all of them, thinks, and begins again.
    pub fn closed(kernels: u32, length: Duration, think: Duration) -> Self {
        Self {
            lengths: Lengths::Always(length),
            in_flight: kernels.max(1),
            think,
            batches: true,
            varies: Duration::ZERO,
        }
    }

    /// How long it thinks this time.
    pub(super) fn pause(&self, random: &mut fastrand::Rng) -> Duration {
        if self.varies.is_zero() {
            self.think
        } else {
            self.think + self.varies.mul_f64(random.f64())
        }
    }

    /// The next kernel.
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
