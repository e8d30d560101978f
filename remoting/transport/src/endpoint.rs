//! Messages over a ring: fragmentation of long messages, and polling before sleeping.

use alloc::vec::Vec;
use core::time::Duration;
#[cfg(feature = "std")]
use std::time::Instant;

use super::{
    bell::Bell,
    ring::{Broken, Consumer, Lines, Producer},
};
use remoting_proto::wire::frame::{Flags, HEADER, Header, LARGEST};

/// Why no further message can be exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Gone {
    /// The peer has ended.
    #[error("the other side has ended")]
    Peer,
    /// The peer has broken the ring's rules.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The peer announced a frame or message above the maximum length.
    #[error("the peer announced a message of {0} bytes, longer than there may be")]
    Length(usize),
}

/// Sends messages.
#[derive(Debug)]
pub struct Sender<R, L> {
    ring: Producer<R, L>,
    fragment: usize,
    /// How long to poll for room before sleeping.
    pub spin: Duration,
}

impl<R: Lines, L: Bell> Sender<R, L> {
    /// Sends over `ring`, polling for room for `spin` before sleeping.
    pub fn new(ring: Producer<R, L>, spin: Duration) -> Self {
        Self {
            // The peer can read one fragment while the next is written.
            fragment: ring.longest() / 2,
            ring,
            spin,
        }
    }

    /// Total lines written: where another process may [resume](Self::go_on).
    pub fn written(&self) -> u64 {
        self.ring.written()
    }

    /// Resumes where another process stopped.
    ///
    /// # Errors
    /// The ring cannot be used.
    pub fn go_on(&mut self, written: u64) -> Result<(), Gone> {
        Ok(self.ring.go_on(written)?)
    }

    /// Announces whether this side stays awake until it has the answer that the peer waits for.
    /// Meanwhile the peer may poll for the answer, for at most [`STAY`].
    pub fn attend(&self, attends: bool) {
        self.ring.attend(attends);
    }

    /// Sends a message, waiting for room while `alive` returns true. If the ring has room, this
    /// makes a system call only if the peer sleeps.
    pub fn send(
        &mut self,
        header: Header,
        body: &[u8],
        alive: impl Fn() -> bool,
    ) -> Result<(), Gone> {
        if body.len() > LARGEST {
            return Err(Gone::Length(body.len()));
        }
        self.put(header, body, alive)?;
        self.ring.announce();
        Ok(())
    }

    /// Writes a message without waking a sleeping peer, which is woken by the next message that is
    /// sent. Nothing may depend on the message before that.
    pub fn write(
        &mut self,
        header: Header,
        body: &[u8],
        alive: impl Fn() -> bool,
    ) -> Result<(), Gone> {
        if body.len() > LARGEST {
            return Err(Gone::Length(body.len()));
        }
        self.put(header, body, alive)
    }

    /// Sends as much of a message as there is room for, and leaves the remainder in `rest`. Returns
    /// whether nothing is left.
    pub fn offer(&mut self, header: Header, rest: &mut &[u8]) -> Result<bool, Gone> {
        if rest.len() > LARGEST {
            return Err(Gone::Length(rest.len()));
        }
        let whole = self.fill(header, rest)?;
        self.ring.announce();
        Ok(whole)
    }

    fn put(&mut self, header: Header, body: &[u8], alive: impl Fn() -> bool) -> Result<(), Gone> {
        let mut rest = body;
        let mut spin = Spin::new(self.spin);
        loop {
            let before = rest.len();
            if self.fill(header, &mut rest)? {
                return Ok(());
            }
            if rest.len() < before {
                spin.reset();
            }
            // A sleeping peer makes no room.
            self.ring.announce();
            if !alive() {
                return Err(Gone::Peer);
            }
            if !spin.again() {
                let part = rest.len().min(self.fragment);
                self.ring.wait_for_room(HEADER + part)?;
            }
        }
    }

    /// Writes fragments while there is room, and leaves the remainder in `rest`. Returns whether
    /// all are written.
    #[inline]
    fn fill(&mut self, header: Header, rest: &mut &[u8]) -> Result<bool, Gone> {
        loop {
            let (part, later) = rest.split_at(rest.len().min(self.fragment));
            let flags = if later.is_empty() {
                header.flags
            } else {
                header.flags.with(Flags::MORE)
            };
            let frame = Header {
                length: part.len() as u32,
                flags,
                ..header
            };
            if !self.ring.write(&frame.to_bytes(), part)? {
                return Ok(false);
            }
            if later.is_empty() {
                return Ok(true);
            }
            *rest = later;
        }
    }
}

/// Receives messages.
#[derive(Debug)]
pub struct Receiver<R, L> {
    ring: Consumer<R, L>,
    partial: Vec<u8>,
}

impl<R: Lines, L: Bell> Receiver<R, L> {
    /// Receives from `ring`.
    pub fn new(ring: Consumer<R, L>) -> Self {
        Self {
            ring,
            partial: Vec::new(),
        }
    }

    /// Total lines read, and the part read so far of an incomplete message: where another process
    /// may [resume](Self::go_on).
    pub fn read(&self) -> (u64, &[u8]) {
        (self.ring.read(), &self.partial)
    }

    /// Resumes where another process stopped.
    pub fn go_on(&mut self, read: u64, partial: Vec<u8>) {
        self.ring.go_on(read);
        self.partial = partial;
    }

    /// Returns the next message if it is available; its body replaces the contents of `body`. Makes
    /// a system call only if the peer waits for room.
    pub fn poll(&mut self, body: &mut Vec<u8>) -> Result<Option<Header>, Gone> {
        loop {
            if !self.ring.is_ready() {
                return Ok(None);
            }
            let mut bytes = [0; HEADER];
            self.ring.peek(&mut bytes);
            // From here on, the header is private: the peer cannot change it after the check.
            let header = Header::from_bytes(&bytes);
            let length = header.length as usize;
            let so_far = self.partial.len();
            if length > LARGEST - so_far || HEADER + length > self.ring.longest() {
                return Err(Gone::Length(length));
            }
            if header.flags.has(Flags::MORE) {
                // Every fragment must make progress.
                if length == 0 {
                    return Err(Gone::Length(length));
                }
                self.partial.resize(so_far + length, 0);
                self.ring.take(HEADER, &mut self.partial[so_far..]);
                continue;
            }
            body.clear();
            body.append(&mut self.partial);
            body.resize(so_far + length, 0);
            self.ring.take(HEADER, &mut body[so_far..]);
            return Ok(Some(header));
        }
    }

    /// Makes the processor prefetch the next message while the current one is executed.
    #[inline]
    pub fn fetch_next(&self) {
        self.ring.fetch_next();
    }

    /// Sleeps until a message may be available or `awake` reports other work, at most for the
    /// bell's patience.
    pub fn sleep(&self, awake: impl Fn() -> bool) {
        self.ring.sleep(Duration::ZERO, awake);
    }

    /// Waits for a moment: polls until `spin`'s time is over (a different time if the peer
    /// attends), then sleeps. A sleeper that is rung for before there is a message should be awake
    /// when the message comes, so `spin` is reset.
    pub fn wait(&self, spin: &mut Spin, awake: impl Fn() -> bool) {
        let polls = spin.again_beside(|| self.ring.is_attended());
        if !polls && self.ring.sleep(spin.waited(), awake) {
            spin.reset();
        }
    }
}

impl<R: Lines, L: Bell> Receiver<R, L> {
    /// Stops receiving until the peer rings, whatever it sends. Returns whether nothing is left to
    /// read.
    pub fn leave(&self) -> bool {
        self.ring.leave()
    }

    /// Sleeps even if there are messages, which cannot be served yet, until `awake` reports other
    /// work; at most for the bell's patience.
    pub fn rest(&self, awake: impl Fn() -> bool) {
        self.ring.rest(awake);
    }
}

/// How long to poll without the processor's pause instruction, which takes up to 140 cycles
/// (Intel's optimization manual, on Skylake and later). Most answers come within this time.
const EAGER: Duration = Duration::from_micros(20);

/// How long a worker stays awake while its driver waits, and its client with it.
pub const STAY: Duration = Duration::from_millis(30);

/// Bounds a time of polling.
#[derive(Debug)]
pub struct Spin {
    bound: Duration,
    /// The bound while the peer attends, if that is longer.
    attended: Duration,
    #[cfg(feature = "std")]
    since: Option<Instant>,
    rounds: u32,
    calm: bool,
}

impl Spin {
    /// Polls for at most `bound`.
    pub fn new(bound: Duration) -> Self {
        Self {
            bound,
            attended: bound,
            #[cfg(feature = "std")]
            since: None,
            rounds: 0,
            calm: false,
        }
    }

    /// Extends the bound to `attended`, if that is longer, while the peer stays awake for the
    /// answer.
    #[must_use]
    pub fn or_attended(self, attended: Duration) -> Self {
        Self { attended, ..self }
    }

    /// Restarts the time.
    pub fn reset(&mut self) {
        *self = Self::new(self.bound).or_attended(self.attended);
    }

    #[cfg(feature = "std")]
    fn waited(&mut self) -> Duration {
        self.since.get_or_insert_with(Instant::now).elapsed()
    }

    /// Without an operating system, polling is the only choice.
    #[cfg(not(feature = "std"))]
    fn waited(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Spends a moment, and returns whether time is left. Reads the clock every 32 rounds.
    pub fn again(&mut self) -> bool {
        self.again_beside(|| false)
    }

    /// Same as [`again`](Self::again), for a peer that may be attending.
    fn again_beside(&mut self, is_attended: impl Fn() -> bool) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        if self.calm {
            core::hint::spin_loop();
        }
        if !self.rounds.is_multiple_of(32) {
            return true;
        }
        let waited = self.waited();
        self.calm = waited > EAGER;
        waited < self.bound || waited < self.attended && is_attended()
    }
}
