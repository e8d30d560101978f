//! A ring of frames in shared memory: one producer, one consumer, neither of which trusts the other.
//!
//! The ring consists of lines, and a frame takes as many as it needs. A line is a pair of cache lines: processors fetch
//! the other cache line of a pair along with each (Intel's optimization manual, "spatial prefetcher"), so polling for a
//! frame does not take the next frame's line from the producer that is writing it. Each line begins with a mark. The
//! mark of a frame's first line publishes the frame, and is written after everything else. Its value is the line's
//! number, counted from the ring's beginning through all laps, plus one. Any other value in a mark's place is older and
//! never equal to that. A short frame is therefore one cache line in one message between two processors: the consumer
//! polls the very line that the frame will be in.
//!
//! Both sides count lines in private memory. The consumer publishes how far it has read, so a hostile consumer can
//! change only the producer's view of *its own* index, which the producer reads once and checks against the ring's
//! size. A hostile producer can publish any bytes at any time, and no more than that. A frame is copied out before it
//! is inspected.
//!
//! Reading what the other side has written costs a transfer of a cache line from its processor (`gantry-accel
//! distances` measures the round trip). The producer therefore reads the consumer's index only when the room that it
//! knows of is used up, and the consumer publishes its index once per quarter of the ring. No frame may take more than
//! half of the ring: there is room for it at the latest when everything before it has been read.
//!
//! Sleeping: a consumer that has polled without success announces it (`sleeping`), looks once more, and sleeps on the
//! bell. A producer that has published looks at `sleeping` and rings. A full fence between the store and the load of
//! each side ensures that at least one of the two sees the other: no wake-up is lost (model-checked by `loom` in this
//! crate's tests). While both sides are busy, a message costs an atomic store, a load and a fence: no system call.
//! Frames that nobody waits for may be written without checking whether the consumer sleeps; they then cost only a
//! copy.

use core::time::Duration;

use super::{
    bell::Bell,
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// The shared part of a ring besides its lines. Each word has a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Control {
    /// Total lines read, modulo 2^32; written by the consumer.
    head: Line,
    /// Whether the consumer sleeps or is about to; written by both sides.
    sleeping: Line,
    /// Whether the producer waits for room; written by both sides.
    starved: Line,
    /// What the consumer sleeps on.
    pub items: Line,
    /// What the producer sleeps on.
    pub room: Line,
    /// Whether the producer stays awake until it has what the consumer waits for; written by the producer.
    attending: Line,
}

/// Size of a line in bytes.
pub const LINE: usize = 128;
/// Size of a line without its mark, in bytes.
const PAYLOAD: usize = LINE - size_of::<AtomicU64>();

/// A word with a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line(pub AtomicU32);

/// The lines of a ring.
pub trait Lines {
    /// Bytes of a line that frames can use: at most what is left beside the mark.
    const PAYLOAD: usize = PAYLOAD;

    /// The number of lines: a power of two.
    fn count(&self) -> u32;
    /// The shared control words.
    fn control(&self) -> &Control;
    /// A line's mark. `line` is below the count.
    fn mark(&self, line: u32) -> &AtomicU64;
    /// Makes the processor prefetch a line that will be read soon. `line` is below the count.
    fn fetch(&self, _line: u32) {}
    /// Copies bytes out of a line, starting at `at`.
    ///
    /// # Safety
    /// `line` is below the count, `at + into.len()` is at most [`Self::PAYLOAD`], and the producer does not write there
    /// meanwhile (a hostile one may: then the bytes are arbitrary, with no further effect).
    unsafe fn read(&self, line: u32, at: usize, into: &mut [u8]);
    /// Copies bytes to the start of a line's payload.
    ///
    /// # Safety
    /// As for `read`, with producer and consumer exchanged.
    unsafe fn write(&self, line: u32, from: &[u8]);
}

/// The peer has broken the ring's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer claims to have read what is not in a ring of {count} lines: {claimed} are left")]
pub struct Broken {
    /// The number of lines that the ring would have to hold.
    pub claimed: u32,
    /// The number of lines that it can hold.
    pub count: u32,
}

/// Number of lines of a frame of typical length, such as a kernel launch.
const NEXT: u64 = 3;

/// The number of lines that a frame of `length` bytes takes.
fn span<R: Lines>(length: usize) -> usize {
    length.div_ceil(R::PAYLOAD).max(1)
}

/// The maximum number of lines of a frame.
fn longest<R: Lines>(ring: &R) -> usize {
    ring.count() as usize / 2
}

/// The index in the ring of a line that is counted through all laps.
fn place<R: Lines>(ring: &R, line: u64) -> u32 {
    // Below the count, which has 32 bits.
    (line & u64::from(ring.count() - 1)) as u32
}

/// The mark that publishes a frame that begins with this line.
fn mark(line: u64) -> u64 {
    // A ring that passes one line per nanosecond would take five centuries to reach the end.
    line + 1
}

/// The producer's end.
#[derive(Debug)]
pub struct Producer<R, L> {
    ring: R,
    bell: L,
    /// Total lines written.
    tail: u64,
    /// A sleeping consumer has been woken for everything before this line.
    announced: u64,
    /// The consumer's index as last seen: never ahead of the consumer's actual index.
    head: u32,
}

impl<R: Lines, L: Bell> Producer<R, L> {
    /// The producer's end of a ring that nobody has written to and that is all zeroes.
    pub fn new(ring: R, bell: L) -> Self {
        Self {
            ring,
            bell,
            tail: 0,
            announced: 0,
            head: 0,
        }
    }

    /// Total lines written: where another process may [resume](Self::go_on).
    pub fn written(&self) -> u64 {
        self.tail
    }

    /// Resumes where another producer of the same ring stopped, after this many lines.
    ///
    /// # Errors
    /// The index that the consumer claims is impossible for the ring.
    pub fn go_on(&mut self, written: u64) -> Result<(), Broken> {
        (self.tail, self.announced) = (written, written);
        self.room().map(drop)
    }

    /// The maximum size of a frame in bytes.
    pub fn longest(&self) -> usize {
        longest(&self.ring) * R::PAYLOAD
    }

    /// Announces whether this side stays awake until it has what the consumer waits for.
    pub fn attend(&self, attends: bool) {
        let attending = &self.ring.control().attending.0;
        attending.store(u32::from(attends), Ordering::Relaxed);
    }

    /// The number of lines that can be written now.
    pub fn room(&mut self) -> Result<u32, Broken> {
        let (head, room) = self.look()?;
        self.head = head;
        Ok(room)
    }

    /// The consumer's index, and the number of lines that can be written now.
    fn look(&self) -> Result<(u32, u32), Broken> {
        let head = self.ring.control().head.0.load(Ordering::Acquire);
        let claimed = (self.tail as u32).wrapping_sub(head);
        let count = self.ring.count();
        match count.checked_sub(claimed) {
            Some(room) => Ok((head, room)),
            None => Err(Broken { claimed, count }),
        }
    }

    /// Writes a frame in two parts if there is room, and wakes a sleeping consumer. Returns whether there was room. The
    /// first part must fit in one line, and both together must not take more than half of the ring.
    pub fn push(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let written = self.write(header, body)?;
        if written {
            self.announce();
        }
        Ok(written)
    }

    /// Writes a frame if there is room, and returns whether there was. A consumer that is awake may take it at once;
    /// [`Self::announce`] wakes one that sleeps.
    pub fn write(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let span = span::<R>(header.len() + body.len());
        debug_assert!(header.len() <= R::PAYLOAD && span <= longest(&self.ring));
        // Cannot underflow: `head` was checked when it was read.
        let known = self.ring.count() - (self.tail as u32).wrapping_sub(self.head);
        if span > known as usize && span > self.room()? as usize {
            return Ok(false);
        }
        let mut line = [0; PAYLOAD];
        let (start, rest) = body.split_at(body.len().min(R::PAYLOAD - header.len()));
        line[..header.len()].copy_from_slice(header);
        line[header.len()..][..start.len()].copy_from_slice(start);
        for (index, part) in (1..).zip(rest.chunks(R::PAYLOAD)) {
            // SAFETY: a part is no longer than a payload, and the indices keep an honest consumer
            // out of free lines.
            unsafe { self.ring.write(place(&self.ring, self.tail + index), part) };
        }
        let first = place(&self.ring, self.tail);
        // SAFETY: as above.
        unsafe { self.ring.write(first, &line[..R::PAYLOAD]) };
        let published = mark(self.tail);
        self.ring.mark(first).store(published, Ordering::Release);
        self.tail += span as u64;
        Ok(true)
    }

    /// Wakes the consumer if it sleeps and something was written since it was last woken.
    pub fn announce(&mut self) {
        if self.announced == self.tail {
            return;
        }
        self.announced = self.tail;
        fence(Ordering::SeqCst);
        let control = self.ring.control();
        if control.sleeping.0.load(Ordering::Relaxed) != 0 {
            control.sleeping.0.store(0, Ordering::Relaxed);
            self.bell.ring(&control.items.0);
        }
    }

    /// Sleeps until there may be room for a frame of `length` bytes, at most for the bell's patience.
    pub fn wait_for_room(&mut self, length: usize) -> Result<(), Broken> {
        // The consumer must be awake to read, which makes room.
        self.announce();
        let control = self.ring.control();
        let seen = control.room.0.load(Ordering::Acquire);
        control.starved.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if (self.look()?.1 as usize) < span::<R>(length) {
            self.bell.wait(&control.room.0, seen, Duration::ZERO);
        }
        control.starved.0.store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// The consumer's end.
#[derive(Debug)]
pub struct Consumer<R, L> {
    ring: R,
    bell: L,
    /// Total lines read.
    head: u64,
    /// The value of `head` last published to the producer.
    published: u64,
}

impl<R: Lines, L: Bell> Consumer<R, L> {
    /// The consumer's end of a ring that nobody has read from.
    pub fn new(ring: R, bell: L) -> Self {
        Self {
            ring,
            bell,
            head: 0,
            published: 0,
        }
    }

    /// Total lines read: where another process may [resume](Self::go_on).
    pub fn read(&self) -> u64 {
        self.head
    }

    /// Resumes where another consumer of the same ring stopped, after this many lines.
    pub fn go_on(&mut self, read: u64) {
        self.head = read;
        self.publish();
    }

    /// Whether the producer stays awake until it has what this side waits for, and publishes it at once. It is then
    /// worth staying awake too.
    pub fn is_attended(&self) -> bool {
        let attending = &self.ring.control().attending.0;
        attending.load(Ordering::Relaxed) != 0
    }

    /// Whether a frame is available: one load.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let first = self.ring.mark(place(&self.ring, self.head));
        first.load(Ordering::Acquire) == mark(self.head)
    }

    /// The maximum size of a frame in bytes.
    pub fn longest(&self) -> usize {
        longest(&self.ring) * R::PAYLOAD
    }

    /// Copies the first bytes of the next frame without consuming it. The caller has checked that the frame is there.
    /// `into` must fit in one line.
    #[inline]
    pub fn peek(&self, into: &mut [u8]) {
        assert!(into.len() <= R::PAYLOAD);
        // SAFETY: within a line; the indices keep an honest producer out of it until `head` has passed it.
        unsafe { self.ring.read(place(&self.ring, self.head), 0, into) };
    }

    /// Copies a frame from byte `skip`, which lies in its first line, to its end, and consumes it. The caller has
    /// checked that the frame is there and not longer than [`Self::longest`].
    #[inline]
    pub fn take(&mut self, skip: usize, into: &mut [u8]) {
        assert!(skip <= R::PAYLOAD);
        let span = span::<R>(skip + into.len());
        debug_assert!(span <= longest(&self.ring));
        let start = into.len().min(R::PAYLOAD - skip);
        let (start, rest) = into.split_at_mut(start);
        // SAFETY: each part is within a line; and as in `peek`.
        unsafe {
            self.ring.read(place(&self.ring, self.head), skip, start);
            for (index, part) in (1..).zip(rest.chunks_mut(R::PAYLOAD)) {
                self.ring
                    .read(place(&self.ring, self.head + index), 0, part);
            }
        }
        self.head += span as u64;
        if self.head - self.published >= u64::from(self.ring.count() / 4) {
            self.publish();
        }
    }

    /// Makes the processor prefetch the next frame while the current one is executed. The producer's writes are in
    /// another processor's caches, from which each line takes about 100 ns.
    #[inline]
    pub fn fetch_next(&self) {
        for line in 0..NEXT {
            self.ring.fetch(place(&self.ring, self.head + line));
        }
    }

    /// Publishes how far this side has read, and wakes the producer if it waits for room.
    fn publish(&mut self) {
        self.published = self.head;
        let control = self.ring.control();
        control.head.0.store(self.head as u32, Ordering::Release);
        fence(Ordering::SeqCst);
        if control.starved.0.load(Ordering::Relaxed) != 0 {
            control.starved.0.store(0, Ordering::Relaxed);
            self.bell.ring(&control.room.0);
        }
    }

    /// Sleeps until a frame may be available or `awake` reports other work, at most for the bell's patience. `waited`
    /// is the time waited so far. Returns whether the producer has rung meanwhile.
    pub fn sleep(&self, waited: Duration, awake: impl Fn() -> bool) -> bool {
        if self.is_ready() {
            return false;
        }
        let control = self.ring.control();
        let seen = control.items.0.load(Ordering::Acquire);
        control.sleeping.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.is_ready() && !awake() {
            self.bell.wait(&control.items.0, seen, waited);
        }
        control.sleeping.0.store(0, Ordering::Relaxed);
        control.items.0.load(Ordering::Relaxed) != seen
    }

    /// Stops reading: from now on the producer rings after each announcement. Returns whether nothing is left to read.
    pub fn leave(&self) -> bool {
        self.ring.control().sleeping.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// Sleeps, even if frames are available, until roused or until `awake` reports other work; at most for the bell's
    /// patience.
    pub fn rest(&self, awake: impl Fn() -> bool) {
        let items = &self.ring.control().items.0;
        let seen = items.load(Ordering::Acquire);
        if !awake() {
            self.bell.wait(items, seen, Duration::ZERO);
        }
    }

    /// Ends the consumer's sleep from elsewhere: rings its bell.
    pub fn rouse(&self) {
        self.bell.ring(&self.ring.control().items.0);
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
