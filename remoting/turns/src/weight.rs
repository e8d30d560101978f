//! Changing a client's weight or latency while it runs.

use std::{io, io::Read, path::Path, time::Duration};

use super::{
    introduce::connect_self,
    message::{First, IDLE, Join},
};

/// How long to wait for the arbiter.
const PATIENCE: Duration = Duration::from_secs(5);

/// The arbiter's answer: the weight was changed.
pub const CHANGED: u8 = b'y';
/// The arbiter knows no client of this name.
pub const UNKNOWN: u8 = b'n';

/// The word for [`IDLE`].
const WORD: &str = "idle";

/// Reads a weight: 1 to 10,000, or `idle` for [`IDLE`].
///
/// # Errors
/// It is another text.
pub fn parse(text: &str) -> Result<u32, Invalid> {
    let number = text
        .parse()
        .ok()
        .filter(|weight| (1..=10_000).contains(weight));
    match text {
        WORD => Ok(IDLE),
        _ => number.ok_or(Invalid),
    }
}

/// The text of a weight.
pub fn text(weight: u32) -> String {
    match weight {
        IDLE => WORD.to_owned(),
        _ => weight.to_string(),
    }
}

/// An invalid weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid weight: use 1 to 10000, or idle")]
pub struct Invalid;

/// What to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The weight: 1 to 10,000, or [`IDLE`].
    Weight(u32),
    /// For how many milliseconds the client waits at most for slices of others: 1 to 1,000, or 0 if it does not matter.
    Latency(u32),
}

/// Changes this of the client of this name, for as long as the arbiter at `path` remembers the client. Returns whether there is
/// one.
///
/// # Errors
/// No arbiter answers within five seconds, or it refuses the value or this version.
pub fn set(path: &Path, name: &str, change: Change) -> io::Result<bool> {
    let client = |weight, latency| Join {
        name: name.to_owned(),
        weight,
        latency,
        sliced: false,
    };
    let first = match change {
        Change::Weight(weight) => First::Weight(client(weight, 0)),
        Change::Latency(latency) => First::Latency(client(1, latency)),
    };
    let mut stream = connect_self(path, &first)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    match answer[0] {
        CHANGED => Ok(true),
        UNKNOWN => Ok(false),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
