//! Rounds of pre-copy: how many are worth their time, whoever asks for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use base::Patience;

use super::control::{self, Command, NotMoved, Peer, Reply};

/// The most rounds.
const MOST: u32 = 5;
/// So few bytes, in a round, are as soon copied while the application stands still.
const FEW: u64 = 1 << 20;

/// How many rounds there have been.
#[derive(Debug)]
pub struct Rounds {
    count: u32,
    /// Bytes of the last one.
    last: u64,
}

impl Default for Rounds {
    fn default() -> Self {
        Self {
            count: 0,
            last: u64::MAX,
        }
    }
}

impl Rounds {
    /// How many there have been: the next one's number.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// One has copied so many bytes. Whether another one is worth its time: it is as long as each has
    /// much less to copy than the one before.
    pub fn another(&mut self, bytes: u64) -> bool {
        self.count += 1;
        let shrinks = bytes <= self.last / 2;
        self.last = bytes;
        bytes >= FEW && shrinks && self.count < MOST
    }
}

/// Asks the worker that serves for something.
pub type Ask<'a> = dyn FnMut(&Command, &[BorrowedFd<'_>], &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved>
    + 'a;

/// Copies what can be copied from one worker to another while the first one serves. How many rounds
/// there were: none if the application has something that cannot be copied now, which may have passed
/// once it has stopped.
///
/// # Errors
/// Either of the two is gone or refuses, or there is no more patience.
pub fn precopy(
    source: &mut Ask<'_>,
    destination: &Peer<'_>,
    patience: &Patience,
) -> Result<u32, NotMoved> {
    let mut rounds = Rounds::default();
    loop {
        let image = control::image().map_err(NotMoved::File)?;
        match source(
            &Command::Precopy(rounds.count()),
            &[image.as_fd()],
            patience,
        ) {
            Err(NotMoved::Refused(_)) if rounds.count() == 0 => return Ok(0),
            answer => answer?,
        };
        destination.ask(&Command::Prepare(true), &[image.as_fd()], patience)?;
        let bytes = image.metadata().map_err(NotMoved::File)?.len();
        if !rounds.another(bytes) {
            return Ok(rounds.count());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// How many rounds there are if they have so many bytes.
    fn rounds(bytes: impl IntoIterator<Item = u64>) -> u32 {
        let mut rounds = Rounds::default();
        let mut all = bytes.into_iter();
        while all.next().is_some_and(|bytes| rounds.another(bytes)) {}
        rounds.count()
    }

    #[test]
    fn rounds_end_when_they_hardly_shrink_when_little_is_left_or_after_some() {
        let mib = |count: u64| count << 20;
        assert_eq!(rounds([mib(256), mib(200), mib(1)]), 2);
        assert_eq!(rounds([mib(256), mib(128), 4096, 4096]), 3);
        assert_eq!(rounds([4096, 4096]), 1);
        assert_eq!(rounds((0..20).map(|round| mib(1 << 40) >> round)), MOST);
    }
}
