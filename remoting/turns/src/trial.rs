//! A pool's trial of the device's time slices: one pool at a time tries, as two would measure each other, and what works is known
//! to the others of its arbiter.
//!
//! A pool connects as for a worker, with its own process handle and [`First::Trial`] as its first message. The arbiter answers with
//! one byte, an [`Answer`], as soon as no other pool tries. A pool that is to try sends one byte when it knows.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use super::{introduce::connect_self, message::First};

/// Maximum time for a trial. The next pool tries after that.
pub const LONGEST: Duration = Duration::from_secs(30);
/// Maximum time that a pool waits for its turn.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum time without an arbiter, which may be about to start, and how often to look for one.
const WITHOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(100);

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
/// No arbiter answers within five seconds, or none of this version; [`TimedOut`](io::ErrorKind::TimedOut): others have tried for
/// too long.
pub fn ask(path: &Path, device: &str) -> io::Result<(Answer, Turn)> {
    let begin = Instant::now();
    let mut gone = begin;
    loop {
        let asked = Instant::now();
        let left = PATIENCE.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match ask_once(path, device, left) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error),
            Err(error) => {
                // One that has had it wait has ended.
                if asked.elapsed() > RETRY {
                    gone = Instant::now();
                }
                if gone.elapsed() >= WITHOUT {
                    return Err(error);
                }
                thread::sleep(RETRY);
            }
            answered => return answered,
        }
    }
}

fn ask_once(path: &Path, device: &str, patience: Duration) -> io::Result<(Answer, Turn)> {
    let mut stream = connect_self(path, &First::Trial(device.to_owned()))?;
    stream.set_read_timeout(Some(patience))?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    let answer = Answer::from_byte(answer[0]).ok_or(io::ErrorKind::InvalidData)?;
    Ok((answer, Turn(stream)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn who_waits_when_an_arbiter_ends_asks_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arbiter");
        let arbiters = thread::spawn({
            let path = path.clone();
            move || {
                // None is there at first, and the first one ends.
                for answer in [&[][..], &[Answer::Known as u8]] {
                    thread::sleep(RETRY * 2);
                    let arbiter = UnixListener::bind(&path).unwrap();
                    let (mut pool, _) = arbiter.accept().unwrap();
                    // The question is a byte with a descriptor, and the rest: one that ends before the rest breaks its pipe.
                    let mut said = 0;
                    while said <= 1 {
                        said += pool.read(&mut [0; 256]).unwrap();
                    }
                    std::fs::remove_file(&path).unwrap();
                    pool.write_all(answer).unwrap();
                }
            }
        });
        let (answer, _turn) = ask(&path, "one").unwrap();
        assert_eq!(answer, Answer::Known);
        arbiters.join().unwrap();
    }
}
