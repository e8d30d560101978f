//! Large copies by several threads: one thread copies 14 GB/s on a machine whose device copies 55 GB/s.
//!
//! The copy threads are spawned by the first large transfer, or the first that closely follows another. They poll for a
//! moment after each share and sleep otherwise. A thread that begins such a transfer wakes the first sleeping copy
//! thread, which wakes the next. When the calling thread has finished its own share, it takes back any share that no
//! copy thread has begun, so that a late wake-up delays nothing. A copy thread that is preempted in the middle of a
//! share does delay the copy. All copy threads are then paused for as long as that delay, and for twice as long each
//! time that it soon happens again ([`Pause`]).

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

use crate::{streaming, thread::spawn};

/// The smallest copy that is divided into shares, in bytes: two microseconds of one thread.
const LEAST: usize = 32 << 10;
/// The smallest transfer that wakes the copy threads if it closely follows another, in bytes.
const FOLLOWING: u64 = 64 << 10;
/// The smallest transfer that always wakes the copy threads, in bytes.
const WAKING: u64 = 1 << 20;
/// The minimum number of threads for which a copy bypasses the caches: from here on the copy loses less than the device
/// gains.
const STREAMING: usize = 3;
/// The most bytes that are divided among the threads at a time: those that wake during one part share in the next.
const PART: usize = 2 << 20;
/// The maximum number of copy threads. Only half of the processors get one: the others are for the application's other
/// threads, and for a worker on this machine.
const MOST: usize = 6;
/// How long a copy thread polls for its next share. A transfer that starts within this time of another follows it
/// closely.
const POLL: Duration = Duration::from_micros(200);

/// A copy thread that takes this much longer than the caller for the same length was preempted.
const LATE: Duration = Duration::from_micros(500);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

const IDLE: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;

/// Who reads a copy next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A device, which does not read through this processor's caches.
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
        // SAFETY: the caller of `copy` guarantees both sides until it returns, and it returns after all shares are
        // done.
        unsafe {
            if self.streams {
                streaming::copy(self.from, self.to, self.length);
            } else {
                copy_nonoverlapping(self.from, self.to, self.length);
            }
        }
    }
}

/// The state that the caller and one copy thread share, on its own cache lines.
#[repr(align(128))]
struct CopyThread {
    /// `IDLE`: the caller may fill the share. `OFFERED`: anyone may take it. `TAKEN`: being copied.
    state: AtomicU32,
    share: UnsafeCell<Share>,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

// SAFETY: `state` determines who may access `share`.
unsafe impl Send for CopyThread {}
// SAFETY: as above.
unsafe impl Sync for CopyThread {}

impl CopyThread {
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
        // A compare-exchange would take the cache line from the other side each time.
        if self.state.load(Ordering::Relaxed) != OFFERED {
            return None;
        }
        self.state
            .compare_exchange(OFFERED, TAKEN, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        // SAFETY: the thread that changed OFFERED to TAKEN has exclusive access to the share.
        Some(unsafe { *self.share.get() })
    }

    /// Copies shares until none has arrived for a while.
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

    /// Wakes the thread if it sleeps.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::Relaxed)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn offer(&self, share: Share) {
        // SAFETY: `state` is IDLE, and only the caller, who holds `pause`, changes that.
        unsafe { *self.share.get() = share };
        self.state.store(OFFERED, Ordering::Release);
    }

    /// Takes the share back and copies it, or waits until the copy thread has done so.
    fn finish(&self) {
        if let Some(share) = self.take() {
            share.copy();
            self.state.store(IDLE, Ordering::Relaxed);
        }
        while self.state.load(Ordering::Acquire) != IDLE {
            std::hint::spin_loop();
        }
    }
}

/// The main loop of the copy thread with this number. Never returns.
fn serve(threads: &[CopyThread], number: usize) {
    let own = &threads[number];
    loop {
        // A spurious wake-up only makes it poll for a while.
        thread::park();
        own.asleep.store(false, Ordering::Relaxed);
        if let Some(next) = threads.get(number + 1) {
            next.wake();
        }
        own.work();
        // A caller that has not seen this yet takes its share back.
        own.asleep.store(true, Ordering::Relaxed);
    }
}

/// The time in which copy threads are not used, because one was preempted.
///
/// Where preemption is rare, the copy threads gain more in a few milliseconds than was lost. Where there are few
/// processors, each delay is soon followed by the next.
#[derive(Debug)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Pause {
    fn none() -> Self {
        Self {
            until: Instant::now(),
            length: Duration::ZERO,
        }
    }

    /// Records that a copy thread has delayed a copy by this long, until now.
    fn delayed(&mut self, now: Instant, by: Duration) {
        // Soon: the threads were used for no longer than they had been paused.
        let soon = now.saturating_duration_since(self.until) <= self.length;
        let length = if soon { by.max(2 * self.length) } else { by };
        self.length = length.min(LONGEST_PAUSE);
        self.until = now + self.length;
    }
}

struct CopyThreads {
    threads: Arc<[CopyThread]>,
    /// Held by the caller whose copy is being shared.
    pause: Mutex<Pause>,
}

impl CopyThreads {
    /// Spawns as many threads as this machine has processors for and the system allows.
    fn spawn() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads: Arc<[CopyThread]> = (0..MOST.min(processors / 2))
            .map(|_| CopyThread::new())
            .collect();
        for (number, state) in threads.iter().enumerate() {
            let all = Arc::clone(&threads);
            // If the thread cannot be spawned, its share is taken back.
            if let Ok(thread) = spawn("gantry-copy", move || serve(&all, number)) {
                let _ = state.thread.set(thread);
            }
        }
        Self {
            threads,
            pause: Mutex::new(Pause::none()),
        }
    }

    /// Wakes the sleeping threads, unless they are paused.
    fn wake(&self, now: Instant) {
        if self.pause.try_lock().is_ok_and(|pause| now < pause.until) {
            return;
        }
        if let Some(first) = self.threads.iter().find(|thread| thread.sleeps()) {
            first.wake();
        }
    }

    fn copy(&self, whole: Share, pause: &mut Pause) {
        let start = Instant::now();
        let mut awake = [const { None }; MOST];
        let mut count = 0;
        let used = start >= pause.until;
        for thread in self
            .threads
            .iter()
            .filter(|thread| used && !thread.sleeps())
        {
            awake[count] = Some(thread);
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
        for (index, thread) in awake.iter().flatten().enumerate() {
            thread.offer(part(index + 1));
        }
        part(0).copy();
        let own = Instant::now();
        awake.iter().flatten().for_each(|thread| thread.finish());
        let end = Instant::now();
        let late = (end - own).saturating_sub(own - start);
        if late > LATE {
            pause.delayed(end, late);
        }
    }
}

static COPY_THREADS: OnceLock<CopyThreads> = OnceLock::new();

fn all() -> &'static CopyThreads {
    COPY_THREADS.get_or_init(CopyThreads::spawn)
}

/// Called when a transfer of this size begins: wakes the copy threads if that pays off.
pub fn prepare(size: u64) {
    thread_local! {
        /// When this thread last began a transfer that others might follow.
        static LAST: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    if size < FOLLOWING {
        return;
    }
    let now = Instant::now();
    let close = |last| now.duration_since(last) < POLL;
    let follows = LAST.replace(Some(now)).is_some_and(close);
    // Where there are few processors, waking threads for so little takes time from others.
    if size >= WAKING || follows && all().threads.len() + 1 >= STREAMING {
        all().wake(now);
    }
}

/// Copies memory that does not overlap.
///
/// # Safety
/// `from` must be readable and `to` writable for `length` bytes.
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize, reader: Reader) {
    let Some(threads) = COPY_THREADS.get().filter(|_| length >= LEAST) else {
        // SAFETY: the caller's promise.
        return unsafe { copy_nonoverlapping(from, to, length) };
    };
    if length > PART {
        // Those that were woken when the transfer began may sleep again.
        threads.wake(Instant::now());
    }
    for at in (0..length).step_by(PART) {
        let part = Share {
            from: from.wrapping_add(at),
            to: to.wrapping_add(at),
            length: PART.min(length - at),
            streams: false,
        };
        // A caller that finds the copy threads in use copies alone.
        let mut pause = match threads.pause.try_lock() {
            Ok(pause) => pause,
            Err(TryLockError::Poisoned(pause)) => pause.into_inner(),
            Err(TryLockError::WouldBlock) => {
                part.copy();
                continue;
            }
        };
        let streams = reader == Reader::Device;
        threads.copy(Share { streams, ..part }, &mut pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_whoever_copies_it() {
        prepare(WAKING);
        thread::scope(|scope| {
            for seed in 0..3u8 {
                scope.spawn(move || {
                    for length in [0, 1, LEAST - 1, LEAST + 1, 3 * LEAST + 77, 2 * PART + 77] {
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

    fn threads_of(threads: Vec<CopyThread>) -> CopyThreads {
        CopyThreads {
            threads: threads.into(),
            pause: Mutex::new(Pause::none()),
        }
    }

    fn copies(threads: &CopyThreads, length: u32) {
        let from: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let mut to = vec![0u8; from.len()];
        let whole = Share {
            from: from.as_ptr(),
            to: to.as_mut_ptr(),
            length: from.len(),
            streams: true,
        };
        threads.copy(whole, &mut threads.pause.lock().unwrap());
        assert!(from == to);
    }

    /// A thread that appears to be awake, although nothing runs for it.
    fn awake() -> CopyThread {
        let thread = CopyThread::new();
        thread.asleep.store(false, Ordering::Relaxed);
        thread
    }

    #[test]
    fn without_copy_threads_the_caller_copies_all() {
        copies(&threads_of(Vec::new()), 100_001);
    }

    #[test]
    fn a_share_that_no_copy_thread_takes_is_taken_back() {
        copies(&threads_of(vec![awake()]), 100_001);
    }

    #[test]
    fn enough_threads_copy_past_their_caches_and_nothing_is_lost() {
        let threads = threads_of((1..STREAMING).map(|_| awake()).collect());
        copies(&threads, 100_001);
        for thread in &threads.threads[..] {
            // SAFETY: no thread copies at this point.
            assert!(unsafe { (*thread.share.get()).streams });
        }
    }

    #[test]
    fn a_sleeping_copy_thread_gets_no_share() {
        let threads = threads_of(vec![CopyThread::new()]);
        copies(&threads, 100_001);
        assert_eq!(threads.threads[0].state.load(Ordering::Relaxed), IDLE);
    }

    #[test]
    fn a_pause_is_as_long_as_the_delay_and_longer_where_delays_come_one_after_the_other() {
        let millis = Duration::from_millis;
        let mut pause = Pause::none();
        let mut now = pause.until + millis(1000);
        pause.delayed(now, millis(1));
        assert_eq!(pause.until, now + millis(1));
        for length in [2, 4, 8, 16, 32, 50, 50] {
            now = pause.until + pause.length;
            pause.delayed(now, millis(1));
            assert_eq!(pause.length, millis(length));
        }
        now = pause.until + pause.length + millis(1);
        pause.delayed(now, millis(3));
        assert_eq!(pause.length, millis(3));
    }

    #[test]
    fn after_a_copy_thread_was_preempted_none_is_used_for_a_while() {
        let threads = threads_of(vec![awake()]);
        let (thread, begun) = (&threads.threads[0], Instant::now());
        // SAFETY: no thread copies at this point.
        let offered = || unsafe { (*thread.share.get()).length };
        thread::scope(|scope| {
            let work = scope.spawn(|| {
                let share = loop {
                    if let Some(share) = thread.take() {
                        break share;
                    }
                };
                thread::sleep(Duration::from_millis(300));
                share.copy();
                thread.state.store(IDLE, Ordering::Release);
            });
            // The share is taken back as long as the thread has not started.
            while !work.is_finished() {
                copies(&threads, 256 << 10);
            }
        });
        let pause = |until| std::mem::replace(&mut threads.pause.lock().unwrap().until, until);
        let now = Instant::now();
        assert!(pause(now + Duration::from_secs(1000)) > begun);
        copies(&threads, 4096);
        assert_eq!(offered(), 128 << 10);
        pause(now);
        copies(&threads, 4096);
        assert_eq!(offered(), 2048);
    }
}
