//! What a client may expect of the device.

use std::{fmt, time::Duration};

use remoting_turns::{message::IDLE, weight};

use crate::policy::{Class, NoWeight, Weight};

/// The longest latency in milliseconds.
const LONGEST: u32 = 1000;

/// A client's weight, and when it gets its part. An idle one has the weight 1 where turns are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) weight: Weight,
    pub(super) class: Class,
}

/// Terms that are out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoTerms {
    #[error(transparent)]
    Weight(#[from] NoWeight),
    #[error("invalid latency {0}: use 1 to {LONGEST} milliseconds, or 0 for none")]
    Latency(u32),
    #[error("an idle client has no latency: use latency 0 (gantry top: off), or another weight")]
    Idle,
    #[error(
        "native contexts are not idle, as their calls wait for the end of a stop: use a weight from 1 to 10000"
    )]
    Native,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            weight: Weight::ONE,
            class: Class::Shared,
        }
    }
}

impl Terms {
    /// Those of a message: a weight or [`IDLE`], and a latency in milliseconds, or zero.
    pub(super) fn new(weight: u32, latency: u32) -> Result<Self, NoTerms> {
        let class = match (weight, latency) {
            _ if latency > LONGEST => return Err(NoTerms::Latency(latency)),
            (IDLE, 0) => Class::Idle,
            (IDLE, _) => return Err(NoTerms::Idle),
            (_, 0) => Class::Shared,
            _ => Class::Latency(Duration::from_millis(latency.into())),
        };
        let weight = match weight {
            IDLE => Weight::ONE,
            _ => Weight::try_from(weight)?,
        };
        Ok(Self { weight, class })
    }

    /// The weight as messages have it.
    pub(super) fn number(self) -> u32 {
        match self.class {
            Class::Idle => IDLE,
            _ => self.weight.get(),
        }
    }

    /// The latency as messages have it, in milliseconds.
    pub(super) fn latency(self) -> u32 {
        match self.class {
            Class::Latency(latency) => u32::try_from(latency.as_millis()).unwrap_or(LONGEST),
            _ => 0,
        }
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weight {}", weight::text(self.number()))?;
        match self.latency() {
            0 => Ok(()),
            latency => write!(f, " with latency {latency} ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_those_of_messages() {
        for (weight, latency, text) in [
            (3, 0, "weight 3"),
            (10_000, 1000, "weight 10000 with latency 1000 ms"),
            (IDLE, 0, "weight idle"),
        ] {
            let terms = Terms::new(weight, latency).unwrap();
            assert_eq!((terms.number(), terms.latency()), (weight, latency));
            assert_eq!(terms.to_string(), text);
        }
        for (weight, latency) in [(10_001, 0), (1, 1001), (IDLE, 1)] {
            assert!(Terms::new(weight, latency).is_err());
        }
    }
}
