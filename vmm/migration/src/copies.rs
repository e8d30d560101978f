//! Copies of accelerators' applications while they run: decides how many are worthwhile, and estimates what is left to
//! send during the downtime.

use std::{
    fs::File,
    time::{Duration, Instant},
};

use devices::accel::rounds::CopiedPort;

use super::offer::CopyOf;

/// Maximum number of copies.
const MOST: u32 = 8;
/// Maximum number of copies that the destination accepts, also from a Gantry version that makes more.
pub const MOST_TAKEN: u32 = 4 * MOST;
/// An application that was copied more recently than this has not written much since.
const RECENT: Duration = Duration::from_secs(10);
/// Up to this many bytes, sending the data during the downtime is just as fast.
const FEW: u64 = 1 << 20;
/// If this many bytes were allocated since the last copy, another copy is worthwhile on any connection: workers need
/// about half a second for them.
const MUCH: u64 = 256 << 20;

/// A copy of applications, or of what has changed since the previous one.
pub struct Copy {
    ports: Vec<CopiedPort>,
    /// Images and the contents of slices.
    pub archive: File,
}

impl Copy {
    /// A copy with its data in an archive.
    pub fn new(ports: Vec<CopiedPort>, archive: File) -> Self {
        Self { ports, archive }
    }

    /// Encodes the description for the destination; `archive` is the archive's length.
    pub fn describe(self, archive: u64) -> Result<Vec<u8>, String> {
        let ports = self.ports;
        serde_json::to_vec(&CopyOf { archive, ports }).map_err(|error| error.to_string())
    }
}

/// The copies of a migration.
#[derive(Debug, Default)]
pub struct Copies {
    /// The last copy; `None` if copies are not wanted.
    last: Option<Last>,
}

#[derive(Debug)]
struct Last {
    count: u32,
    /// Its size in bytes; 0 before the first copy.
    bytes: u64,
    /// Whether it was much smaller than the one before.
    shrinks: bool,
    ended: Instant,
    took: Duration,
}

impl Copies {
    /// No copies yet; and none at all if they are not `wanted`.
    pub fn new(wanted: bool) -> Self {
        Self {
            last: wanted.then(|| Last {
                count: 0,
                bytes: 0,
                shrinks: true,
                ended: Instant::now(),
                took: Duration::ZERO,
            }),
        }
    }

    /// Number of copies made so far, which is the number of the next one.
    pub fn count(&self) -> u32 {
        self.last.as_ref().map_or(0, |last| last.count)
    }

    /// Whether another copy would reduce what has to be sent during the downtime, with `left` until the migration's
    /// timeout: either there was none yet; or a copy that takes as long as the last one still fits, and either the last
    /// one was much smaller than the one before, or applications have run for longer than it took.
    pub fn are_due(&self, left: Duration) -> bool {
        self.are_due_at(Instant::now(), left)
    }

    fn are_due_at(&self, now: Instant, left: Duration) -> bool {
        self.last.as_ref().is_some_and(|last| {
            let since = now.saturating_duration_since(last.ended);
            let worth = last.bytes >= FEW && last.shrinks || since > last.took.max(RECENT);
            last.count == 0 || last.count < MOST && worth && last.took < left
        })
    }

    /// How many bytes of memory applications may have allocated since the last copy when they are to stop, with `left`
    /// until the migration's timeout and `in_stop` bytes that can be sent during the downtime. If they have allocated
    /// more, another copy is made. Unlimited where no further copy is possible.
    pub fn most_made(&self, left: Duration, in_stop: u64) -> u64 {
        let last = self.last.as_ref();
        let again = last.is_some_and(|last| (1..MOST).contains(&last.count) && last.took < left);
        match again {
            true => in_stop.clamp(FEW, MUCH),
            false => u64::MAX,
        }
    }

    /// Records a copy that sent `bytes` and started at `began`.
    pub fn add(&mut self, bytes: u64, began: Instant) {
        if let Some(last) = &mut self.last {
            let ended = Instant::now();
            *last = Last {
                count: last.count + 1,
                bytes,
                shrinks: last.count == 0 || bytes <= last.bytes / 2,
                ended,
                took: ended.saturating_duration_since(began),
            };
        }
    }

    /// Estimated number of bytes left to send, assuming that an application writes as much as before. The first copy
    /// contains everything, so it says nothing about this.
    pub fn outstanding(&self) -> u64 {
        let known = self.last.as_ref().filter(|last| last.count > 1);
        known.map_or(0, |last| last.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than enough time.
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn copies_end_when_they_hardly_shrink_or_little_is_left() {
        let mut copies = Copies::new(true);
        assert!(copies.are_due(HOUR));
        let mut after = |bytes| {
            copies.add(bytes, Instant::now());
            let ended = copies.last.as_ref().unwrap().ended;
            copies.are_due_at(ended, HOUR)
        };
        let sizes = [64 << 20, 16 << 20, 12 << 20, 1 << 20, 4096];
        assert_eq!(sizes.map(&mut after), [true, true, false, true, false]);
        assert_eq!(copies.outstanding(), 4096);
    }

    #[test]
    fn an_application_that_has_gone_on_for_long_is_copied_again_but_not_for_ever() {
        let mut copies = Copies::new(true);
        for count in 1..=MOST {
            assert_eq!(copies.count(), count - 1);
            copies.add(4096, Instant::now());
            let later = Instant::now() + Duration::from_secs(60);
            assert_eq!(copies.are_due_at(later, HOUR), count < MOST);
        }
    }

    #[test]
    fn the_first_copy_is_always_due_and_no_other_one_that_would_end_too_late() {
        let mut copies = Copies::new(true);
        assert!(copies.are_due(Duration::ZERO));
        let took = Duration::from_secs(100);
        copies.add(64 << 20, Instant::now() - took);
        assert!(copies.are_due(2 * took));
        assert!(!copies.are_due(took));
    }

    #[test]
    fn as_much_may_be_made_before_a_stop_as_fits_in_it_while_there_may_be_copies() {
        let mut copies = Copies::new(true);
        assert_eq!(copies.most_made(HOUR, 0), u64::MAX, "nothing was copied");
        let took = Duration::from_secs(100);
        for count in 1..=MOST {
            copies.add(0, Instant::now() - took);
            let most = [0, 2 * FEW, u64::MAX].map(|in_stop| copies.most_made(2 * took, in_stop));
            match count < MOST {
                true => assert_eq!(most, [FEW, 2 * FEW, MUCH]),
                false => assert_eq!(most, [u64::MAX; 3]),
            }
            assert_eq!(copies.most_made(took, 0), u64::MAX, "no time is left");
        }
    }

    #[test]
    fn what_is_not_wanted_is_never_due() {
        let mut copies = Copies::new(false);
        assert_eq!(copies.most_made(HOUR, 0), u64::MAX);
        assert!(!copies.are_due(HOUR));
        copies.add(1, Instant::now());
        assert_eq!((copies.count(), copies.outstanding()), (0, 0));
    }
}
