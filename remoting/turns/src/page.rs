//! The memory that a worker and the arbiter share: one page for each direction.

use std::{
    fs::File,
    io,
    marker::PhantomData,
    ops::Deref,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use base::{Access, Mapping, memfd};

use super::waits::Counts;

/// Size of a page in bytes.
const SIZE: usize = 4096;

/// The values of [`Account::claim`].
pub mod claim {
    /// It is not the worker's turn.
    pub const NONE: u32 = 0;
    /// It is, and it is in use.
    pub const BUSY: u32 = 1;
    /// It is, but nothing is submitted, and the client may be expected back. Whoever changes this to [`NONE`] first
    /// ends the turn; whoever changes it to [`BUSY`] continues it.
    pub const IDLE: u32 = 2;
}

/// The values of [`Account::sight`].
pub mod sight {
    /// It submits the client's requests itself.
    pub const REQUESTS: u32 = 0;
    /// It does not see what the client submits: when the client has work is read from the device's record. It takes no turns.
    pub const RECORD: u32 = 1;
    /// It does not see that either, or cannot stop its contexts, and takes no part.
    pub const NOTHING: u32 = 2;
}

/// How the device is shared: the value of [`Grant::mode`]. It counts the changes, so that a worker that has not looked
/// meanwhile sees that there was one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Mode {
    /// Whether all workers may submit at any time, as the device serves them in time slices; otherwise they take turns, as at
    /// first.
    pub fn is_slices(self) -> bool {
        self.0 & 1 != 0
    }

    /// After another change.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// What the arbiter tells a worker, which only reads it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Grant {
    /// Counts the worker's turns; incremented when one begins.
    pub turn: AtomicU64,
    /// The turn's length in nanoseconds; zero for one request.
    pub slice: AtomicU64,
    /// The lower half of the number of the turn that is over: who has that turn stops what it runs and
    /// gives the device back. A GPU may read this by itself, with the next word at once: both are a
    /// pair of eight bytes that is aligned to as many.
    pub stop: AtomicU32,
    /// Whether somebody else waits for the device: the turn then ends when the slice does.
    pub contended: AtomicU32,
    /// Whether to wake the client's processor at the start of this turn.
    pub coschedule: AtomicU32,
    /// How the device is shared: see [`Mode`]. This field and the following ones are for workers that have joined with
    /// [`Join::sliced`](super::message::Join::sliced).
    pub mode: AtomicU32,
    /// The length of the worker's time slices in microseconds; zero if it is the driver's own.
    pub time_slice: AtomicU32,
    /// Until when the worker is stopped, in nanoseconds of the monotonic clock. The arbiter moves it on while the stop is
    /// to last, so that it ends when the arbiter does not do anything any more.
    pub stopped_until: AtomicU64,
    /// The sum of the time slices of the other clients that have work on the worker's GPUs, in microseconds; zero if there are
    /// none. Older arbiters do not write it.
    pub round: AtomicU32,
}

// Read at once by a GPU.
const _: () = {
    assert!(std::mem::offset_of!(Grant, stop).is_multiple_of(8));
    assert!(std::mem::offset_of!(Grant, contended) == std::mem::offset_of!(Grant, stop) + 4);
};

/// What a worker tells the arbiter, which trusts none of it where others could be harmed.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Account {
    /// See [`claim`].
    pub claim: AtomicU32,
    /// When the oldest outstanding request got the device, in nanoseconds of the monotonic clock; zero if there is
    /// none.
    pub running_since: AtomicU64,
    /// Device time used so far, in nanoseconds.
    pub busy: AtomicU64,
    /// Total nanoseconds by which requests have exceeded what was expected when their turn was given back.
    pub overrun: AtomicU64,
    /// Number of requests submitted so far.
    pub calls: AtomicU64,
    /// Number of calls so far whose answer the client waited for.
    pub synchronous: AtomicU64,
    /// Device memory that the client has now, in bytes.
    pub memory: AtomicU64,
    /// When its last batch ended, in nanoseconds of the monotonic clock. This field and the following ones are written
    /// before [`claim::IDLE`].
    pub away_since: AtomicU64,
    /// Maximum nanoseconds until the client is expected to begin another batch ([`Expected`](super::pauses::Expected));
    /// zero if it is not expected.
    pub away_within: AtomicU64,
    /// The same on average.
    pub away_usual: AtomicU64,
    /// Mean device time between two pauses, in nanoseconds.
    pub batch: AtomicU64,
    /// For how long it had work ([`Presence`](super::presence::Presence)), in nanoseconds. The three fields may be seen
    /// in the middle of a change, which makes a report a little wrong once.
    pub present: AtomicU64,
    /// See above.
    pub present_since: AtomicU64,
    /// See above.
    pub present_until: AtomicU64,
    /// Nanoseconds for which requests that are shorter than a time slice have used the device so far.
    pub measured: AtomicU64,
    /// Since when its oldest request has been the oldest, in nanoseconds of the monotonic clock; zero if there is none.
    pub oldest_since: AtomicU64,
    /// Whether that request is longer than a time slice, as far as is known.
    pub long: AtomicU32,
    /// Number of requests that have completed so far.
    pub completions: AtomicU64,
    /// Whether it is stopped.
    pub stopped: AtomicU32,
    /// Nanoseconds that the driver took for its time slices, stops and starts so far.
    pub switching: AtomicU64,
    /// The GPUs on which it has contexts, as bits, by the driver's number.
    pub gpus: AtomicU64,
    /// Nanoseconds that it has had the device beside others, by the device's record.
    pub metered: AtomicU64,
    /// Whether others use the device, and the device keeps that record: it then counts, and not what requests are
    /// expected to use.
    pub is_metered: AtomicU32,
    /// How long it has waited until some of its work was done, while it had some.
    pub waits: Counts,
    /// What it sees of its client's work: see [`sight`]. Older workers see their requests.
    pub sight: AtomicU32,
}

const _: () = assert!(size_of::<Account>() <= SIZE);

/// Types that may be in memory that another process changes: every bit pattern is a valid value, and all changes are
/// atomic.
///
/// # Safety
/// Only for structs of atomics, of at most a page.
pub unsafe trait Shared {}

// SAFETY: atomics only, far smaller than a page.
unsafe impl Shared for Grant {}
// SAFETY: as above.
unsafe impl Shared for Account {}

/// A mapped page.
#[derive(Debug)]
pub struct Page<T> {
    memory: Mapping,
    _what: PhantomData<T>,
}

// SAFETY: the mapping belongs to the value, and its contents are atomic.
unsafe impl<T: Shared> Send for Page<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for Page<T> {}

impl<T: Shared> Page<T> {
    /// Creates a page of zeroes, and its file for the other side. The file's size is sealed, so that nobody can cause a
    /// fault.
    pub fn create() -> io::Result<(Self, File)> {
        let file = memfd::sealed(c"gantry-turns", SIZE as u64)?;
        Ok((Self::map(&file, true)?, file))
    }

    /// Maps a page that the other side has created; `write` tells whether this side changes it.
    pub fn map(file: &File, write: bool) -> io::Result<Self> {
        if file.metadata()?.len() < SIZE as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let access = if write {
            Access::ReadWrite
        } else {
            Access::Read
        };
        Ok(Self {
            memory: Mapping::shared(file, 0, SIZE, access)?,
            _what: PhantomData,
        })
    }
}

impl Page<Grant> {
    /// How the device is shared.
    pub fn mode(&self) -> Mode {
        Mode(self.mode.load(Ordering::Acquire))
    }
}

impl<T: Shared> Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is a page, page-aligned, and lives as long as the value; `Shared`
        // says that any contents are a value and that changes from elsewhere are atomic.
        unsafe { &*self.memory.start().cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_one_page_and_a_short_file_is_refused() {
        let (ours, file) = Page::<Account>::create().unwrap();
        let theirs = Page::<Account>::map(&file, false).unwrap();
        ours.busy.store(7, Ordering::Relaxed);
        assert_eq!(theirs.busy.load(Ordering::Relaxed), 7);
        assert!(file.set_len(0).is_err());
        assert!(Page::<Account>::map(&tempfile(), false).is_err());
    }

    fn tempfile() -> File {
        File::open("/dev/null").unwrap()
    }
}
