//! A ring of bytes in shared memory: one producer, one consumer, neither trusts the other.
//!
//! Both indices run freely and wrap at 2^32; their difference is what the ring holds. Each side
//! keeps its own index in private memory and only publishes it, so that a hostile peer can change
//! what is seen of *its* index alone; that one is read once and checked against the ring's size.
//! A frame is copied out before anybody looks into it.
//!
//! Frames begin where cache lines do, so that a short one is in one line, and is written in one
//! piece: bytes in a second line would cost a second trip, one after the other.
//!
//! What the other side writes costs a trip of a cache line from its processor, some 80 ns: the
//! producer looks at the consumer's index only when the room that it knows of is used up, the
//! consumer says how far it has read only when it runs out of bytes or has read a quarter of the
//! ring, and while it waits it fetches the line where the next frame will begin together with the
//! index.
//!
//! Sleeping: a consumer that has polled in vain says so (`sleeping`), looks once more, and sleeps
//! on the bell. A producer that has published looks at `sleeping` and rings. Between the store
//! and the load of each side stands a full fence, so that one of the two sees the other: no
//! wake-up is lost (model-checked by `loom` in this crate's tests). While both sides are busy, a
//! message costs an atomic store, a load and a fence: no system call. Frames that nobody waits for
//! may be kept back until the next one is published: then they cost a copy.

use super::{
    bell::Bell,
    sync::{AtomicU32, Ordering, fence},
};

/// The shared part of a ring besides its bytes. One cache line per writer.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Control {
    /// Bytes ever written, modulo 2^32; written by the producer.
    tail: Line,
    /// Bytes ever read, modulo 2^32; written by the consumer.
    head: Line,
    /// Whether the consumer sleeps or is about to; written by both.
    sleeping: Line,
    /// Whether the producer waits for room; written by both.
    starved: Line,
    /// What the consumer sleeps on.
    pub items: Line,
    /// What the producer sleeps on.
    pub room: Line,
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// A word that has a cache line for itself.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line(pub AtomicU32);

/// The bytes of a ring.
pub trait Bytes {
    /// Frames begin at multiples of this: a power of two, which divides the size.
    const GRAIN: u32 = LINE as u32;

    /// How many there are: a power of two.
    fn size(&self) -> u32;
    /// The shared control words.
    fn control(&self) -> &Control;
    /// Copies bytes out.
    ///
    /// # Safety
    /// `at + into.len()` is at most the size, and the producer does not write there meanwhile
    /// (a hostile one may: the bytes are then arbitrary, and nothing else happens).
    unsafe fn read(&self, at: u32, into: &mut [u8]);
    /// Copies bytes in.
    ///
    /// # Safety
    /// As for `read`, with the consumer in the producer's place.
    unsafe fn write(&self, at: u32, from: &[u8]);
    /// Bytes from `at`, which is below the size, on will be read soon.
    fn expect(&self, _at: u32) {}
}

/// The peer has broken the ring's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's ring index is {claimed} bytes ahead in a ring of {size} bytes")]
pub struct Broken {
    /// What the ring would hold.
    pub claimed: u32,
    /// What it can hold.
    pub size: u32,
}

fn copy_out<B: Bytes>(bytes: &B, index: u32, into: &mut [u8]) {
    let at = index & (bytes.size() - 1);
    // Below 2^32: a slice here is never longer than the ring.
    let first = into.len().min((bytes.size() - at) as usize);
    let (head, rest) = into.split_at_mut(first);
    // SAFETY: `at + first <= size`, and what is left starts at 0 and is shorter than the ring.
    // The indices keep an honest producer out of these bytes until `head` passes them.
    unsafe {
        bytes.read(at, head);
        if !rest.is_empty() {
            bytes.read(0, rest);
        }
    }
}

fn copy_in<B: Bytes>(bytes: &B, index: u32, from: &[u8]) {
    let at = index & (bytes.size() - 1);
    let first = from.len().min((bytes.size() - at) as usize);
    let (head, rest) = from.split_at(first);
    // SAFETY: as in `copy_out`; the indices keep an honest consumer out of free bytes.
    unsafe {
        bytes.write(at, head);
        if !rest.is_empty() {
            bytes.write(0, rest);
        }
    }
}

/// How much of a ring a frame of so many bytes takes.
pub fn span<B: Bytes>(length: usize) -> usize {
    length.next_multiple_of(B::GRAIN as usize)
}

/// The writing end.
#[derive(Debug)]
pub struct Producer<B, L> {
    bytes: B,
    bell: L,
    tail: u32,
    /// What of `tail` the consumer has been told.
    published: u32,
    /// The consumer's index as it was last seen: not further than the consumer is.
    head: u32,
}

impl<B: Bytes, L: Bell> Producer<B, L> {
    /// The writing end of a ring that nobody has written to.
    pub fn new(bytes: B, bell: L) -> Self {
        Self {
            bytes,
            bell,
            tail: 0,
            published: 0,
            head: 0,
        }
    }

    /// How many bytes can be written now.
    pub fn room(&mut self) -> Result<u32, Broken> {
        let (head, room) = self.look()?;
        self.head = head;
        Ok(room)
    }

    /// The consumer's index, and how many bytes can be written now.
    fn look(&self) -> Result<(u32, u32), Broken> {
        let head = self.bytes.control().head.0.load(Ordering::Acquire);
        let held = self.tail.wrapping_sub(head);
        let size = self.bytes.size();
        match size.checked_sub(held) {
            Some(room) => Ok((head, room)),
            None => Err(Broken {
                claimed: held,
                size,
            }),
        }
    }

    /// Writes a frame of two parts if there is room, and wakes a sleeping consumer.
    pub fn push(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let written = self.keep_back(header, body)?;
        if written {
            self.publish();
        }
        Ok(written)
    }

    /// Writes a frame if there is room, but keeps it back until the next one is published.
    pub fn keep_back(&mut self, header: &[u8], body: &[u8]) -> Result<bool, Broken> {
        let length = header.len() + body.len();
        let span = span::<B>(length);
        // Never more than the size: `head` was checked when it was read.
        let known = self.bytes.size() - self.tail.wrapping_sub(self.head);
        if span > known as usize && span > self.room()? as usize {
            return Ok(false);
        }
        if span == LINE {
            let mut line = [0; LINE];
            line[..header.len()].copy_from_slice(header);
            line[header.len()..length].copy_from_slice(body);
            copy_in(&self.bytes, self.tail, &line);
        } else {
            copy_in(&self.bytes, self.tail, header);
            // Cannot overflow in a way that matters: indices wrap.
            let after = self.tail.wrapping_add(header.len() as u32);
            copy_in(&self.bytes, after, body);
        }
        self.tail = self.tail.wrapping_add(span as u32);
        Ok(true)
    }

    /// Tells the consumer of everything that was written, and wakes it if it sleeps.
    pub fn publish(&mut self) {
        if self.published == self.tail {
            return;
        }
        self.published = self.tail;
        let control = self.bytes.control();
        control.tail.0.store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        if control.sleeping.0.load(Ordering::Relaxed) != 0 {
            control.sleeping.0.store(0, Ordering::Relaxed);
            self.bell.ring(&control.items.0);
        }
    }

    /// Sleeps until there may be room for a frame of `length` bytes; at most for the bell's patience.
    pub fn wait_for_room(&mut self, length: usize) -> Result<(), Broken> {
        // The consumer makes room by reading what it has been told of.
        self.publish();
        let control = self.bytes.control();
        let seen = control.room.0.load(Ordering::Acquire);
        control.starved.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if (self.look()?.1 as usize) < span::<B>(length) {
            self.bell.wait(&control.room.0, seen);
        }
        control.starved.0.store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer<B, L> {
    bytes: B,
    bell: L,
    head: u32,
    /// What of `head` the producer has been told.
    published: u32,
    /// The producer's index as it was last seen: not further than the producer is.
    tail: u32,
}

impl<B: Bytes, L: Bell> Consumer<B, L> {
    /// The reading end of a ring that nobody has read from.
    pub fn new(bytes: B, bell: L) -> Self {
        Self {
            bytes,
            bell,
            head: 0,
            published: 0,
            tail: 0,
        }
    }

    /// How many bytes can be read now, at least: one atomic load once what was seen is used up.
    pub fn held(&mut self) -> Result<u32, Broken> {
        // Never more than the size: `tail` was checked when it was read.
        let known = self.tail.wrapping_sub(self.head);
        if known > 0 {
            return Ok(known);
        }
        self.bytes.expect(self.head & (self.bytes.size() - 1));
        let (tail, held) = self.look()?;
        self.tail = tail;
        if held == 0 && self.published != self.head {
            self.publish();
        }
        Ok(held)
    }

    /// The producer's index, and how many bytes can be read now.
    fn look(&self) -> Result<(u32, u32), Broken> {
        let tail = self.bytes.control().tail.0.load(Ordering::Acquire);
        let held = tail.wrapping_sub(self.head);
        let size = self.bytes.size();
        if held > size {
            return Err(Broken {
                claimed: held,
                size,
            });
        }
        Ok((tail, held))
    }

    /// Copies the next bytes out without taking them. The caller has seen that they are there.
    pub fn peek(&self, into: &mut [u8]) {
        debug_assert!(into.len() <= self.bytes.size() as usize);
        copy_out(&self.bytes, self.head, into);
    }

    /// Copies a frame's bytes out, from `skip` bytes on to its end, and takes the frame. The caller
    /// has seen that its [`span`] is there.
    pub fn take(&mut self, skip: usize, into: &mut [u8]) {
        copy_out(&self.bytes, self.head.wrapping_add(skip as u32), into);
        let span = span::<B>(skip + into.len());
        self.head = self.head.wrapping_add(span as u32);
        if self.head.wrapping_sub(self.published) >= self.bytes.size() / 4 {
            self.publish();
        }
    }

    /// Tells the producer how far this side has read, and wakes it if it waits for room.
    fn publish(&mut self) {
        self.published = self.head;
        let control = self.bytes.control();
        control.head.0.store(self.head, Ordering::Release);
        fence(Ordering::SeqCst);
        if control.starved.0.load(Ordering::Relaxed) != 0 {
            control.starved.0.store(0, Ordering::Relaxed);
            self.bell.ring(&control.room.0);
        }
    }

    /// Sleeps until something may be there or `awake` says that there is something else to do;
    /// at most for the bell's patience.
    pub fn sleep(&mut self, awake: impl Fn() -> bool) -> Result<(), Broken> {
        if self.held()? > 0 {
            return Ok(());
        }
        let control = self.bytes.control();
        let seen = control.items.0.load(Ordering::Acquire);
        control.sleeping.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.look()?.1 == 0 && !awake() {
            self.bell.wait(&control.items.0, seen);
        }
        control.sleeping.0.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Goes away: from now on the producer rings when it has published something. Whether nothing
    /// is left to read.
    pub fn leave(&mut self) -> Result<bool, Broken> {
        self.bytes.control().sleeping.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.held()? == 0)
    }

    /// Sleeps, whatever there is, until roused or `awake` says that there is something else to
    /// do; at most for the bell's patience.
    pub fn rest(&self, awake: impl Fn() -> bool) {
        let items = &self.bytes.control().items.0;
        let seen = items.load(Ordering::Acquire);
        if !awake() {
            self.bell.wait(items, seen);
        }
    }

    /// The bell and the word that it rings to end the consumer's sleep from elsewhere.
    pub fn rouse(&self) {
        self.bell.ring(&self.bytes.control().items.0);
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
