//! Changing a client's weight while it runs.

use std::{io, io::Read, path::Path, time::Duration};

use super::{
    introduce::connect_self,
    message::{First, Join},
};

/// How long to wait for the arbiter.
const PATIENCE: Duration = Duration::from_secs(5);

/// The arbiter's answer: the weight was changed.
pub const CHANGED: u8 = b'y';
/// The arbiter knows no client of this name.
pub const UNKNOWN: u8 = b'n';

/// Gives the client of this name this weight, 1 to 10,000, for as long as the arbiter at `path` remembers the client. Returns whether
/// there is one.
///
/// # Errors
/// No arbiter answers within five seconds, or it refuses the weight or this version.
pub fn set(path: &Path, name: &str, weight: u32) -> io::Result<bool> {
    let client = Join {
        name: name.to_owned(),
        weight,
        sliced: false,
    };
    let mut stream = connect_self(path, &First::Weight(client))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    match answer[0] {
        CHANGED => Ok(true),
        UNKNOWN => Ok(false),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
