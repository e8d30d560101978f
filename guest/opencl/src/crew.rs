//! Large copies, by several threads: one alone moves 14 GB/s on a machine whose device moves 55.
//!
//! Helpers are started by the first large transfer, or the first that closely follows another. They
//! poll for a moment after each share and sleep otherwise; who begins such a transfer wakes the
//! first that sleeps, which wakes the next. A share that no helper has begun when the calling thread
//! is done with its own is taken back, so that a helper that wakes late holds nobody up. One that
//! has lost its processor to others in the middle of a share does: then all are left alone for a while.

use std::{
    cell::{Cell, UnsafeCell},
    ptr::{copy_nonoverlapping, null, null_mut},
    sync::{
        Arc, Mutex, OnceLock, TryLockError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::{link::quiet, streaming};

/// The smallest copy that is shared, in bytes: two microseconds of one thread.
const LEAST: usize = 32 << 10;
/// The smallest transfer for which helpers are woken if it closely follows another, in bytes.
const FOLLOWING: u64 = 64 << 10;
/// The smallest transfer for which helpers are woken in any case, in bytes.
const WAKING: u64 = 1 << 20;
/// So many threads at least copy past the caches: what is lost by that in the copy is less then than
/// what the device gains.
const STREAMING: usize = 3;
/// Helpers at most. Half of the processors have one each: the others are for the application's other
/// threads, and for a worker that is on this machine.
const MOST: usize = 3;
/// How long a helper polls for its next share. A transfer that follows another in this time follows
/// it closely.
const POLL: Duration = Duration::from_micros(200);

/// A helper that needs so much longer than the caller for as much has lost its processor.
const LATE: Duration = Duration::from_micros(500);
/// For so long nobody helps then: a turn of another thread takes some milliseconds, of which not many
/// are to be lost.
const REST: Duration = Duration::from_millis(50);

const IDLE: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;

/// Who looks at a copy next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A device, past this processor's caches.
    Device,
    /// A thread.
    Thread,
}

#[derive(Clone, Copy)]
struct Share {
    from: *const u8,
    to: *mut u8,
    length: usize,
    streams: bool,
}

impl Share {
    fn copy(self) {
        // SAFETY: the caller of `copy` vouches for both sides until it returns, and it returns
        // after all shares are done.
        unsafe {
            if self.streams {
                streaming::copy(self.from, self.to, self.length);
            } else {
                copy_nonoverlapping(self.from, self.to, self.length);
            }
        }
    }
}

/// A helper's state has two cache lines for itself.
#[repr(align(128))]
struct Helper {
    /// `IDLE`: the caller's to fill. `OFFERED`: for whoever takes it. `TAKEN`: being copied.
    state: AtomicU32,
    share: UnsafeCell<Share>,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

// SAFETY: `state` says who may touch `share`.
unsafe impl Send for Helper {}
// SAFETY: as above.
unsafe impl Sync for Helper {}

impl Helper {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(IDLE),
            share: UnsafeCell::new(Share {
                from: null(),
                to: null_mut(),
                length: 0,
                streams: false,
            }),
            asleep: AtomicBool::new(true),
            thread: OnceLock::new(),
        }
    }

    /// Takes the share that is offered, if there is one.
    fn take(&self) -> Option<Share> {
        // An exchange would take the line from the other side each time.
        if self.state.load(Ordering::Relaxed) != OFFERED {
            return None;
        }
        self.state
            .compare_exchange(OFFERED, TAKEN, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        // SAFETY: whoever has changed OFFERED to TAKEN is alone with the share.
        Some(unsafe { *self.share.get() })
    }

    /// Copies shares until none has come for a while.
    fn work(&self) {
        let mut since = Instant::now();
        while since.elapsed() < POLL {
            for _ in 0..64 {
                if let Some(share) = self.take() {
                    share.copy();
                    self.state.store(IDLE, Ordering::Release);
                    since = Instant::now();
                }
                std::hint::spin_loop();
            }
        }
    }

    fn sleeps(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Wakes the helper if it sleeps.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::Relaxed)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn offer(&self, share: Share) {
        // SAFETY: `state` is IDLE, and only the caller, who holds the crew, changes that.
        unsafe { *self.share.get() = share };
        self.state.store(OFFERED, Ordering::Release);
    }

    /// Waits until the share has been copied, or copies it.
    fn settle(&self) {
        if let Some(share) = self.take() {
            share.copy();
            self.state.store(IDLE, Ordering::Relaxed);
        }
        while self.state.load(Ordering::Acquire) != IDLE {
            std::hint::spin_loop();
        }
    }
}

/// What the helper of this number does for ever.
fn serve(helpers: &[Helper], number: usize) {
    let helper = &helpers[number];
    loop {
        // Spurious wake-ups only poll for a while.
        thread::park();
        helper.asleep.store(false, Ordering::Relaxed);
        if let Some(next) = helpers.get(number + 1) {
            next.wake();
        }
        helper.work();
        // Who has not seen this takes its share back.
        helper.asleep.store(true, Ordering::Relaxed);
    }
}

struct Crew {
    helpers: Arc<[Helper]>,
    /// Held by who lets the crew copy: until when nobody helps.
    rests: Mutex<Instant>,
}

impl Crew {
    /// As many helpers as can be had.
    fn muster() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let helpers: Arc<[Helper]> = (0..MOST.min(processors / 2))
            .map(|_| Helper::new())
            .collect();
        for (number, helper) in helpers.iter().enumerate() {
            let all = Arc::clone(&helpers);
            // Without a thread, its share is taken back.
            if let Ok(thread) = quiet("gantry-copy", move || serve(&all, number)) {
                let _ = helper.thread.set(thread);
            }
        }
        Self {
            helpers,
            rests: Mutex::new(Instant::now()),
        }
    }

    /// Wakes those that sleep, unless they are to rest.
    fn wake(&self, now: Instant) {
        if self.rests.try_lock().is_ok_and(|until| now < *until) {
            return;
        }
        if let Some(first) = self.helpers.iter().find(|helper| helper.sleeps()) {
            first.wake();
        }
    }

    fn copy(&self, whole: Share, rest: &mut Instant) {
        let start = Instant::now();
        let mut helpers = [const { None }; MOST];
        let mut count = 0;
        let rested = start >= *rest;
        for helper in self
            .helpers
            .iter()
            .filter(|helper| rested && !helper.sleeps())
        {
            helpers[count] = Some(helper);
            count += 1;
        }
        let threads = count + 1;
        let streams = whole.streams && threads >= STREAMING;
        let share = whole.length.div_ceil(threads).next_multiple_of(64);
        let part = |index: usize| {
            let at = (index * share).min(whole.length);
            Share {
                from: whole.from.wrapping_add(at),
                to: whole.to.wrapping_add(at),
                length: share.min(whole.length - at),
                streams,
            }
        };
        for (index, helper) in helpers.iter().flatten().enumerate() {
            helper.offer(part(index + 1));
        }
        part(0).copy();
        let own = Instant::now();
        helpers.iter().flatten().for_each(|helper| helper.settle());
        let end = Instant::now();
        if end - own > own - start + LATE {
            *rest = end + REST;
        }
    }
}

static CREW: OnceLock<Crew> = OnceLock::new();

fn crew() -> &'static Crew {
    CREW.get_or_init(Crew::muster)
}

/// A transfer of so many bytes begins: has the helpers wake up if they are worth it.
pub fn call(size: u64) {
    thread_local! {
        /// When this thread last began a transfer for which there might be others.
        static LAST: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    if size < FOLLOWING {
        return;
    }
    let now = Instant::now();
    let close = |last| now.duration_since(last) < POLL;
    let follows = LAST.replace(Some(now)).is_some_and(close);
    // Where processors are few, others need them more for so little.
    if size >= WAKING || follows && crew().helpers.len() + 1 >= STREAMING {
        crew().wake(now);
    }
}

/// Copies memory that does not overlap.
///
/// # Safety
/// `from` can be read and `to` written for `length` bytes.
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize, reader: Reader) {
    let alone = Share {
        from,
        to,
        length,
        streams: false,
    };
    let Some(crew) = CREW.get().filter(|_| length >= LEAST) else {
        return alone.copy();
    };
    let whole = Share {
        streams: reader == Reader::Device,
        ..alone
    };
    // Who finds the crew at work copies alone.
    match crew.rests.try_lock() {
        Ok(mut rest) => crew.copy(whole, &mut rest),
        Err(TryLockError::Poisoned(rest)) => crew.copy(whole, &mut rest.into_inner()),
        Err(TryLockError::WouldBlock) => alone.copy(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_whoever_copies_it() {
        call(WAKING);
        thread::scope(|scope| {
            for seed in 0..3u8 {
                scope.spawn(move || {
                    for length in [0, 1, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + 77] {
                        let from: Vec<u8> = (0..length)
                            .map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed))
                            .collect();
                        let mut to = vec![0; length];
                        // SAFETY: both have `length` bytes.
                        unsafe { copy(from.as_ptr(), to.as_mut_ptr(), length, Reader::Device) };
                        assert!(from == to, "{length} bytes");
                    }
                });
            }
        });
    }

    fn crew_of(helpers: Vec<Helper>) -> Crew {
        Crew {
            helpers: helpers.into(),
            rests: Mutex::new(Instant::now()),
        }
    }

    fn copies(crew: &Crew, length: u32) {
        let from: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let mut to = vec![0u8; from.len()];
        let whole = Share {
            from: from.as_ptr(),
            to: to.as_mut_ptr(),
            length: from.len(),
            streams: true,
        };
        crew.copy(whole, &mut crew.rests.lock().unwrap());
        assert!(from == to);
    }

    /// One that seems to be awake, though nobody works for it.
    fn awake() -> Helper {
        let helper = Helper::new();
        helper.asleep.store(false, Ordering::Relaxed);
        helper
    }

    #[test]
    fn a_crew_without_helpers_copies_as_well() {
        copies(&crew_of(Vec::new()), 100_001);
    }

    #[test]
    fn a_share_that_no_helper_takes_is_taken_back() {
        copies(&crew_of(vec![awake()]), 100_001);
    }

    #[test]
    fn enough_threads_copy_past_their_caches_and_nothing_is_lost() {
        let crew = crew_of((1..STREAMING).map(|_| awake()).collect());
        copies(&crew, 100_001);
        for helper in &crew.helpers[..] {
            // SAFETY: nobody copies when it is asked.
            assert!(unsafe { (*helper.share.get()).streams });
        }
    }

    #[test]
    fn a_sleeping_helper_gets_no_share() {
        let crew = crew_of(vec![Helper::new()]);
        copies(&crew, 100_001);
        assert_eq!(crew.helpers[0].state.load(Ordering::Relaxed), IDLE);
    }

    #[test]
    fn a_helper_that_loses_its_processor_is_left_alone_for_a_while() {
        let crew = crew_of(vec![awake()]);
        let (helper, begun) = (&crew.helpers[0], Instant::now());
        // SAFETY: nobody copies when it is asked.
        let offered = || unsafe { (*helper.share.get()).length };
        thread::scope(|scope| {
            let work = scope.spawn(|| {
                let share = loop {
                    if let Some(share) = helper.take() {
                        break share;
                    }
                };
                thread::sleep(Duration::from_millis(300));
                share.copy();
                helper.state.store(IDLE, Ordering::Release);
            });
            // Its share is taken back as long as that thread has not come.
            while !work.is_finished() {
                copies(&crew, 256 << 10);
            }
        });
        let rest = |until| std::mem::replace(&mut *crew.rests.lock().unwrap(), until);
        let now = Instant::now();
        assert!(rest(now + Duration::from_secs(1000)) > begun);
        copies(&crew, 4096);
        assert_eq!(offered(), 128 << 10);
        rest(now);
        copies(&crew, 4096);
        assert_eq!(offered(), 2048);
    }
}
