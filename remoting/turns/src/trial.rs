//! A pool's trial of the device's time slices: one pool at a time tries, as two would measure each other, and what works is known
//! to the others of its arbiter.
//!
//! A pool connects as for a worker, with its own process handle and [`First::Trial`] as its first message. The arbiter answers with
//! one byte, an [`Answer`], as soon as no other pool tries. A pool that is to try sends one byte when it knows.

use std::{
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{introduce::handle_of, message::First};

/// Maximum time for a trial. The next pool tries after that.
pub const LONGEST: Duration = Duration::from_secs(30);
/// Maximum time that a pool waits for its turn.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a pool says that has found time slices to work, and one that has not.
pub const WORK: u8 = b'w';
const FAIL: u8 = b'f';

/// What the arbiter answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// Its policy uses no time slices.
    Unneeded = b'n',
    /// The pool is to try: nobody else does.
    Try = b't',
    /// Another pool has found that they work.
    Known = b'k',
}

impl Answer {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Unneeded, Self::Try, Self::Known]
            .into_iter()
            .find(|answer| *answer as u8 == byte)
    }
}

/// A turn to try.
#[derive(Debug)]
pub struct Turn(UnixStream);

impl Turn {
    /// Says whether they work, and gives the turn to the next pool.
    ///
    /// # Errors
    /// The arbiter has ended.
    pub fn end(mut self, works: bool) -> io::Result<()> {
        self.0.write_all(&[if works { WORK } else { FAIL }])
    }
}

/// Asks the arbiter at `path` whether to try, and waits for its answer. `device` says what would be tried; what works is
/// known to all who say the same. The turn is held until it is dropped.
///
/// # Errors
/// No arbiter answers, or none of this version.
pub fn ask(path: &Path, device: &str) -> io::Result<(Answer, Turn)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let this = handle_of(std::process::id())?;
    stream.send_with_fd([0u8].as_slice(), this.as_raw_fd())?;
    stream.write_all(&First::Trial(device.to_owned()).to_bytes())?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    let answer = Answer::from_byte(answer[0]).ok_or(io::ErrorKind::InvalidData)?;
    Ok((answer, Turn(stream)))
}
