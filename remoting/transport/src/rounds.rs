//! Pre-copy rounds: how many are worth their time.
//!
//! An application may allocate much memory after a round that found little. All of that is new, and would be copied
//! while the application is stopped. The one who stops it therefore bounds how much may be new, and runs another round
//! when there is more, as long as further rounds are allowed.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use base::Patience;

use super::control::{self, AFTER_DRAIN, Command, NotMoved, Peer, Reply};

/// Maximum number of rounds.
const MOST: u32 = 5;
/// Below this number of bytes in a round, copying while the application is stopped is as fast.
const FEW: u64 = 1 << 20;
/// This many bytes allocated since the last round are worth another one: copying them takes about half a second.
const MUCH: u64 = 256 << 20;
/// Maximum time for all rounds of one application. A busy device delays copies like everything else, and other
/// applications wait to be moved.
const TIME: Duration = Duration::from_secs(120);

/// The rounds so far.
#[derive(Debug)]
pub struct Rounds {
    count: u32,
    /// Bytes of the last round.
    last: u64,
    /// When the last round began.
    begun: Instant,
    until: Instant,
}

impl Default for Rounds {
    fn default() -> Self {
        Self::within(TIME)
    }
}

impl Rounds {
    /// No rounds yet; `time` is the maximum for all of them together.
    fn within(time: Duration) -> Self {
        let now = Instant::now();
        Self {
            count: 0,
            last: u64::MAX,
            begun: now,
            until: now + time,
        }
    }

    /// The number of rounds so far, which is the next round's number.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Begins a round, and returns how long it may take.
    pub fn begin(&mut self) -> Duration {
        self.begun = Instant::now();
        self.until.saturating_duration_since(self.begun)
    }

    /// Records a round that copied `bytes`. Returns whether another one is worth its time: it is as long as each round
    /// has much less to copy than the one before.
    pub fn another(&mut self, bytes: u64) -> bool {
        self.count += 1;
        let shrinks = bytes <= self.last / 2;
        self.last = bytes;
        bytes >= FEW && shrinks && self.may_go_on()
    }

    /// Maximum bytes of memory objects that may have been created since the last round when the application stops. If
    /// there are more, it gets another round. Unlimited where no round can follow.
    pub fn most_made(&self) -> u64 {
        match self.count > 0 && self.may_go_on() {
            true => MUCH,
            false => u64::MAX,
        }
    }

    /// Whether there may be another round, assuming that it takes no longer than the last.
    fn may_go_on(&self) -> bool {
        self.count < MOST && Instant::now() + self.begun.elapsed() < self.until
    }
}

/// Sends a command to the worker that serves the application.
pub type Ask<'a> = dyn FnMut(&Command, &[BorrowedFd<'_>], &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved>
    + 'a;

/// Stops the worker that serves the application, within the drain time, once the destination has everything that can be
/// copied meanwhile. Returns the number of rounds; zero if the application has something that cannot be copied now,
/// which may no longer be so once it has stopped. With postcopy, any number of bytes may have been created since the
/// last round.
///
/// # Errors
/// One of the two workers is gone or refuses, or the patience is over.
pub fn stop(
    source: &mut Ask<'_>,
    destination: &Peer<'_>,
    (drain, postcopy): (Duration, bool),
    patience: &Patience,
) -> Result<u32, NotMoved> {
    let mut rounds = Rounds::default();
    let drained = drain.saturating_add(AFTER_DRAIN);
    let drain = u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
    loop {
        precopy(&mut rounds, source, destination, patience)?;
        let most = match postcopy {
            true => u64::MAX,
            false => rounds.most_made(),
        };
        let stop = Command::Quiesce(drain, most);
        match source(&stop, &[], &patience.at_most(drained))?.0 {
            // The number of rounds is bounded, whatever the worker says.
            Reply::Made(_) if most < u64::MAX => {}
            _ => return Ok(rounds.count()),
        }
    }
}

/// Copies what can be copied from one worker to another while the first one serves. Copies nothing if the first round
/// is refused.
fn precopy(
    rounds: &mut Rounds,
    source: &mut Ask<'_>,
    destination: &Peer<'_>,
    patience: &Patience,
) -> Result<(), NotMoved> {
    loop {
        let image = control::image().map_err(NotMoved::File)?;
        let left = rounds.begin();
        let command = Command::Precopy(rounds.count(), left.as_millis() as u64);
        // The worker itself reports that it takes too long.
        let answered = patience.at_most(left.saturating_add(AFTER_DRAIN));
        match source(&command, &[image.as_fd()], &answered) {
            Err(NotMoved::Refused(_)) if rounds.count() == 0 => return Ok(()),
            answer => answer?,
        };
        destination.make(&Command::Prepare(true), image.as_fd(), patience)?;
        let bytes = image.metadata().map_err(NotMoved::File)?.len();
        if !rounds.another(bytes) {
            return Ok(());
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

    /// A worker that makes what rounds bring, until it is not needed.
    struct Destination {
        channel: UnixStream,
        prepares: std::thread::JoinHandle<()>,
    }

    impl Destination {
        fn new() -> Self {
            let (channel, worker) = UnixStream::pair().unwrap();
            let prepares = std::thread::spawn(move || {
                while let Ok(Some(_)) = control::receive::<Command>(&worker) {
                    control::send(&worker, &Reply::Done(), &[]).unwrap();
                }
            });
            Self { channel, prepares }
        }

        fn peer(&self) -> Peer<'_> {
            Peer {
                channel: &self.channel,
                who: "the worker",
            }
        }

        fn end(self) {
            drop(self.channel);
            self.prepares.join().unwrap();
        }
    }

    /// How many rounds there are, and how many milliseconds each is given, if each takes so long and the
    /// first refuses or does not.
    fn precopied(time: Duration, each: Duration, refuses: bool) -> (u32, Vec<u64>) {
        let destination = Destination::new();
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
        let mut rounds = Rounds::within(time);
        precopy(&mut rounds, &mut source, &destination.peer(), &patience).unwrap();
        destination.end();
        (rounds.count(), given)
    }

    /// An application that has made so many bytes before each step: what each round has of them, and what is left for
    /// the stop at last.
    fn stopped(made: impl IntoIterator<Item = u64>, postcopy: bool) -> (Vec<u64>, u64) {
        let destination = Destination::new();
        let (mut made, mut new, mut rounds) = (made.into_iter(), 0, Vec::new());
        let mut source = |command: &Command, files: &[BorrowedFd<'_>], _: &Patience| {
            new += made.next().unwrap_or(0);
            let reply = match command {
                Command::Precopy(round, _) => {
                    assert_eq!(*round as usize, rounds.len());
                    let image = File::from(files[0].try_clone_to_owned().unwrap());
                    image.set_len(new).unwrap();
                    rounds.push(std::mem::take(&mut new));
                    Reply::Done()
                }
                Command::Quiesce(250, most) if new > *most => Reply::Made(new),
                Command::Quiesce(250, _) => Reply::Done(),
                other => panic!("{other:?}"),
            };
            Ok((reply, Vec::new()))
        };
        let patience = Patience::within(Duration::from_secs(600));
        let how = (Duration::from_millis(250), postcopy);
        let count = stop(&mut source, &destination.peer(), how, &patience).unwrap();
        destination.end();
        assert_eq!(count as usize, rounds.len());
        (rounds, new)
    }

    #[test]
    fn what_is_made_after_a_small_round_comes_by_another_one_and_not_while_all_stands_still() {
        let much = 80 << 30;
        // Little, then all that it needs, then nothing more.
        assert_eq!(stopped([4096, much], false), (vec![4096, much], 0));
        assert_eq!(stopped([4096, MUCH], false), (vec![4096], MUCH));
        // By postcopy it follows.
        assert_eq!(stopped([4096, much], true), (vec![4096], much));
    }

    #[test]
    fn an_application_that_never_ends_to_make_memory_moves_after_some_rounds() {
        let (rounds, left) = stopped(std::iter::repeat(2 * MUCH), false);
        assert_eq!((rounds.len(), left), (MOST as usize, 2 * MUCH));
        // A worker that says so whatever it is asked.
        let destination = Destination::new();
        let mut asked = 0;
        let mut source = |command: &Command, _: &[BorrowedFd<'_>], _: &Patience| {
            asked += 1;
            let reply = match command {
                Command::Quiesce(..) => Reply::Made(u64::MAX),
                _ => Reply::Done(),
            };
            Ok((reply, Vec::new()))
        };
        let patience = Patience::within(Duration::from_secs(600));
        let how = (Duration::ZERO, false);
        assert_eq!(
            stop(&mut source, &destination.peer(), how, &patience).unwrap(),
            MOST
        );
        assert_eq!(asked, 2 * MOST);
        destination.end();
    }

    #[test]
    fn rounds_without_time_stop_an_application_whatever_it_has_made() {
        let mut rounds = Rounds::within(Duration::from_secs(600));
        assert_eq!(rounds.most_made(), u64::MAX, "nothing was copied");
        rounds.another(4096);
        assert_eq!(rounds.most_made(), MUCH);
        rounds.until = Instant::now();
        assert_eq!(rounds.most_made(), u64::MAX);
    }

    #[test]
    fn the_rounds_of_an_application_share_their_time_and_end_with_it() {
        let (rounds, given) = precopied(Duration::from_secs(600), Duration::ZERO, false);
        assert_eq!((rounds, given.len()), (5, 5));
        assert!(given.is_sorted_by(|one, next| one >= next), "{given:?}");
        assert!(given[0] <= 600_000, "{given:?}");
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
