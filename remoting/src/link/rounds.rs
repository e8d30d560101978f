//! Rounds of pre-copy: how many are worth their time, whoever asks for them.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use base::Patience;

use super::control::{self, AFTER_DRAIN, Command, NotMoved, Peer, Reply};

/// The most rounds.
const MOST: u32 = 5;
/// So few bytes, in a round, are as soon copied while the application stands still.
const FEW: u64 = 1 << 20;
/// How long the rounds of one application may take: a device that is busy holds up what copies as all
/// else, and other applications wait to be moved.
const TIME: Duration = Duration::from_secs(120);

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
    precopy_within(TIME, source, destination, patience)
}

fn precopy_within(
    time: Duration,
    source: &mut Ask<'_>,
    destination: &Peer<'_>,
    patience: &Patience,
) -> Result<u32, NotMoved> {
    let until = Instant::now() + time;
    let mut rounds = Rounds::default();
    loop {
        let image = control::image().map_err(NotMoved::File)?;
        let begun = Instant::now();
        let left = until.saturating_duration_since(begun);
        let command = Command::Precopy(rounds.count(), left.as_millis() as u64);
        // The worker says itself that it takes too long.
        let answered = patience.at_most(left.saturating_add(AFTER_DRAIN));
        match source(&command, &[image.as_fd()], &answered) {
            Err(NotMoved::Refused(_)) if rounds.count() == 0 => return Ok(0),
            answer => answer?,
        };
        destination.make(&Command::Prepare(true), image.as_fd(), patience)?;
        let bytes = image.metadata().map_err(NotMoved::File)?.len();
        // Another one is as long at most, or nearly.
        let has_time = Instant::now() + begun.elapsed() < until;
        if !rounds.another(bytes) || !has_time {
            return Ok(rounds.count());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::{fs::File, os::unix::net::UnixStream};

    use super::*;

    /// How many rounds there are if they have so many bytes.
    fn rounds(bytes: impl IntoIterator<Item = u64>) -> u32 {
        let mut rounds = Rounds::default();
        let mut all = bytes.into_iter();
        while all.next().is_some_and(|bytes| rounds.another(bytes)) {}
        rounds.count()
    }

    /// How many rounds there are, and how many milliseconds each is given, if each takes so long and the
    /// first refuses or does not.
    fn precopied(time: Duration, each: Duration, refuses: bool) -> (u32, Vec<u64>) {
        let (channel, worker) = UnixStream::pair().unwrap();
        let prepares = std::thread::spawn(move || {
            while let Ok(Some(_)) = control::receive::<Command>(&worker) {
                control::send(&worker, &Reply::Done(), &[]).unwrap();
            }
        });
        let destination = Peer {
            channel: &channel,
            who: "the worker",
        };
        let mut given = Vec::new();
        let mut source = |command: &Command, files: &[BorrowedFd<'_>], _: &Patience| {
            let Command::Precopy(round, patience) = command else {
                panic!("{command:?}");
            };
            given.push(*patience);
            std::thread::sleep(each);
            if refuses {
                return Err(NotMoved::Refused("the device is busy".to_owned()));
            }
            let image = File::from(files[0].try_clone_to_owned().unwrap());
            image.set_len((64 << 20) >> (2 * round)).unwrap();
            Ok((Reply::Done(), Vec::new()))
        };
        let patience = Patience::within(Duration::from_secs(600));
        let rounds = precopy_within(time, &mut source, &destination, &patience);
        drop(channel);
        prepares.join().unwrap();
        (rounds.unwrap(), given)
    }

    #[test]
    fn the_rounds_of_an_application_share_their_time_and_end_with_it() {
        let (rounds, given) = precopied(Duration::from_secs(60), Duration::ZERO, false);
        assert_eq!((rounds, given.len()), (5, 5));
        assert!(given.is_sorted_by(|one, next| one >= next), "{given:?}");
        assert!(given[0] <= 60_000, "{given:?}");
        let each = Duration::from_millis(20);
        let (rounds, given) = precopied(each, each, false);
        assert_eq!((rounds, given.len()), (1, 1));
        // One that has not been copied in time is saved while it stands still.
        assert_eq!(precopied(each, Duration::ZERO, true).0, 0);
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
