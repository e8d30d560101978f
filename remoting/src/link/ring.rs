//! A ring of frames in shared memory: one producer, one consumer, neither trusts the other.
//!
//! The ring is made of lines, and a frame takes as many as it needs. A line is a pair of cache lines:
//! processors fetch the other one of a pair along with each (Intel's optimization manual, "spatial
//! prefetcher"), so that polling for a frame does not take the next one's line from the producer
//! who writes it. Each line begins with place for a mark. A frame is published by the mark of its
//! first line, which is written after all else: the line's number, counted from the ring's beginning
//! through all laps, plus one. Whatever else a mark's place holds, it is older and never that. So a
//! short frame is one cache line in one message between two processors: the consumer polls the very
//! line that the frame will be in.
//!
//! Both sides count the lines in private memory. The consumer publishes how far it has read, so that
//! a hostile one can change what is seen of *its* index alone; that one is read once and checked
//! against the ring's size. A hostile producer can publish any bytes at any time, and no more than
//! that. A frame is copied out before anybody looks into it.
//!
//! What the other side writes costs a trip of a cache line from its processor (`gantry-accel
//! distances` measures how long there and back): the producer looks at the consumer's index only
//! when the room that it knows of is used up, and the consumer says how far it has read once for
//! each quarter of the ring. No frame may take more than half of the ring: then there is room for it
//! at the latest when all before it has been read.
//!
//! Sleeping: a consumer that has polled without success says so (`sleeping`), looks once more, and sleeps
//! on the bell. A producer that has published looks at `sleeping` and rings. Between the store
//! and the load of each side stands a full fence, so that one of the two sees the other: no
//! wake-up is lost (model-checked by `loom` in this crate's tests). While both sides are busy, a
//! message costs an atomic store, a load and a fence: no system call. Frames that nobody waits for
//! may be written without looking whether the consumer sleeps: then they cost a copy.

use core::time::Duration;

use super::{
    bell::Bell,
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// The shared part of a ring besides its lines. One cache line per writer.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Control {
    /// Lines ever read, modulo 2^32; written by the consumer.
    head: Line,
    /// Whether the consumer sleeps or is about to; written by both.
    sleeping: Line,
    /// Whether the producer waits for room; written by both.
    starved: Line,
    /// What the consumer sleeps on.
    pub items: Line,
    /// What the producer sleeps on.
    pub room: Line,
    /// Whether the producer stays awake until it has what the consumer waits for; written by the
    /// producer.
    attending: Line,
}

/// Bytes of a line.
pub const LINE: usize = 128;
/// Bytes of a line beside its mark.
const PAYLOAD: usize = LINE - size_of::<AtomicU64>();

/// A word that has a cache line for itself.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line(pub AtomicU32);

/// The lines of a ring.
pub trait Lines {
    /// Bytes that a line has for frames: at most what is left beside the mark.
    const PAYLOAD: usize = PAYLOAD;

    /// How many lines there are: a power of two.
    fn count(&self) -> u32;
    /// The shared control words.
    fn control(&self) -> &Control;
    /// A line's mark. `line` is below the count.
    fn mark(&self, line: u32) -> &AtomicU64;
    /// Has the processor fetch a line that will be read soon. `line` is below the count.
    fn fetch(&self, _line: u32) {}
    /// Copies bytes out of a line, from `at` on.
    ///
    /// # Safety
    /// `line` is below the count, `at + into.len()` is at most [`Self::PAYLOAD`], and the producer
    /// does not write there meanwhile (a hostile one may: the bytes are then arbitrary, and nothing
    /// else happens).
    unsafe fn read(&self, line: u32, at: usize, into: &mut [u8]);
    /// Copies bytes to a line's start.
    ///
    /// # Safety
    /// As for `read`, with the consumer in the producer's place.
    unsafe fn write(&self, line: u32, from: &[u8]);
}

/// The peer has broken the ring's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer claims to have read what is not in a ring of {count} lines: {claimed} are left")]
pub struct Broken {
    /// What the ring would hold.
    pub claimed: u32,
    /// What it can hold.
    pub count: u32,
}

/// Lines of a frame of usual length, as a launch is.
const NEXT: u64 = 3;

/// How many lines a frame of so many bytes takes.
fn span<R: Lines>(length: usize) -> usize {
    length.div_ceil(R::PAYLOAD).max(1)
}

/// The most lines that a frame may take.
fn longest<R: Lines>(ring: &R) -> usize {
    ring.count() as usize / 2
}

/// Where a line is that is counted through all laps.
fn place<R: Lines>(ring: &R, line: u64) -> u32 {
    // Below the count, which has 32 bits.
    (line & u64::from(ring.count() - 1)) as u32
}

/// What publishes a frame that begins with this line.
fn mark(line: u64) -> u64 {
    // A ring that passes on a line each nanosecond would take five centuries to get to the end.
    line + 1
}

/// The writing end.
#[derive(Debug)]
pub struct Producer<R, L> {
    ring: R,
    bell: L,
    /// Lines ever written.
    tail: u64,
    /// Up to here, a sleeping consumer has been woken.
    announced: u64,
    /// The consumer's index as it was last seen: not further than the consumer is.
    head: u32,
}

impl<R: Lines, L: Bell> Producer<R, L> {
    /// The writing end of a ring that nobody has written to, and that is all zeroes.
    pub fn new(ring: R, bell: L) -> Self {
        Self {
            ring,
            bell,
            tail: 0,
            announced: 0,
            head: 0,
        }
    }

    /// Lines ever written: where another process may [go on](Self::go_on).
    pub fn written(&self) -> u64 {
        self.tail
    }

    /// Goes on where another producer of the same ring has stopped, after so many lines.
    ///
    /// # Errors
    /// What the consumer says that it has read cannot be in the ring.
    pub fn go_on(&mut self, written: u64) -> Result<(), Broken> {
        (self.tail, self.announced) = (written, written);
        self.room().map(drop)
    }

    /// The most bytes that a frame may have.
    pub fn longest(&self) -> usize {
        longest(&self.ring) * R::PAYLOAD
    }

    /// Says that this side stays awake until it has what the consumer waits for, or no longer.
    pub fn attend(&self, attends: bool) {
        let attending = &self.ring.control().attending.0;
        attending.store(u32::from(attends), Ordering::Relaxed);
    }

    /// How many lines can be written now.
    pub fn room(&mut self) -> Result<u32, Broken> {
        let (head, room) = self.look()?;
        self.head = head;
        Ok(room)
    }

    /// The consumer's index, and how many lines can be written now.
    fn look(&self) -> Result<(u32, u32), Broken> {
        let head = self.ring.control().head.0.load(Ordering::Acquire);
        let claimed = (self.tail as u32).wrapping_sub(head);
        let count = self.ring.count();
        match count.checked_sub(claimed) {
            Some(room) => Ok((head, room)),
            None => Err(Broken { claimed, count }),
        }
    }

    /// Writes a frame of two parts if there is room, and wakes a sleeping consumer. The first part
    /// is no longer than a line has room for, and both together take no more than half of the ring.
    pub fn push(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let written = self.write(header, body)?;
        if written {
            self.announce();
        }
        Ok(written)
    }

    /// Writes a frame if there is room. A consumer that does not sleep may take it at once; one that
    /// does is woken by [`Self::announce`].
    pub fn write(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let span = span::<R>(header.len() + body.len());
        debug_assert!(header.len() <= R::PAYLOAD && span <= longest(&self.ring));
        // Never more than there are: `head` was checked when it was read.
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

    /// Wakes the consumer if it sleeps and something was written since it was woken last.
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

    /// Sleeps until there may be room for a frame of `length` bytes; at most for the bell's patience.
    pub fn wait_for_room(&mut self, length: usize) -> Result<(), Broken> {
        // The consumer makes room by reading, for which it has to be awake.
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

/// The reading end.
#[derive(Debug)]
pub struct Consumer<R, L> {
    ring: R,
    bell: L,
    /// Lines ever read.
    head: u64,
    /// What of `head` the producer has been told.
    published: u64,
}

impl<R: Lines, L: Bell> Consumer<R, L> {
    /// The reading end of a ring that nobody has read from.
    pub fn new(ring: R, bell: L) -> Self {
        Self {
            ring,
            bell,
            head: 0,
            published: 0,
        }
    }

    /// Lines ever read: where another process may [go on](Self::go_on).
    pub fn read(&self) -> u64 {
        self.head
    }

    /// Goes on where another consumer of the same ring has stopped, after so many lines.
    pub fn go_on(&mut self, read: u64) {
        self.head = read;
        self.publish();
    }

    /// Whether the producer stays awake until it has what this side waits for, and publishes it at
    /// once: worth staying awake for, too.
    pub fn is_attended(&self) -> bool {
        let attending = &self.ring.control().attending.0;
        attending.load(Ordering::Relaxed) != 0
    }

    /// Whether there is a frame: one load.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let first = self.ring.mark(place(&self.ring, self.head));
        first.load(Ordering::Acquire) == mark(self.head)
    }

    /// The most bytes that a frame may have.
    pub fn longest(&self) -> usize {
        longest(&self.ring) * R::PAYLOAD
    }

    /// Copies the next frame's first bytes out without taking it. The caller has seen that it is
    /// there; they are no more than a line has room for.
    #[inline]
    pub fn peek(&self, into: &mut [u8]) {
        assert!(into.len() <= R::PAYLOAD);
        // SAFETY: within a line; the indices keep an honest producer out of it until `head` has
        // passed.
        unsafe { self.ring.read(place(&self.ring, self.head), 0, into) };
    }

    /// Copies a frame's bytes out, from `skip` bytes on, which are in its first line, to its end, and
    /// takes the frame. The caller has seen that it is there and not longer than [`Self::longest`].
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

    /// Has the processor fetch the next frame while the one before is carried out: the producer's writes lie in
    /// another processor's caches, from where each line takes some 100 ns.
    #[inline]
    pub fn fetch_next(&self) {
        for line in 0..NEXT {
            self.ring.fetch(place(&self.ring, self.head + line));
        }
    }

    /// Tells the producer how far this side has read, and wakes it if it waits for room.
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

    /// Sleeps until something may be there or `awake` says that there is something else to do;
    /// at most for the bell's patience. It has been `waited` for that long before. Whether the
    /// producer has rung meanwhile.
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

    /// Goes away: from now on the producer rings when it has announced something. Whether nothing
    /// is left to read.
    pub fn leave(&self) -> bool {
        self.ring.control().sleeping.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// Sleeps, whatever there is, until roused or `awake` says that there is something else to
    /// do; at most for the bell's patience.
    pub fn rest(&self, awake: impl Fn() -> bool) {
        let items = &self.ring.control().items.0;
        let seen = items.load(Ordering::Acquire);
        if !awake() {
            self.bell.wait(items, seen, Duration::ZERO);
        }
    }

    /// The bell and the word that it rings to end the consumer's sleep from elsewhere.
    pub fn rouse(&self) {
        self.bell.ring(&self.ring.control().items.0);
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
