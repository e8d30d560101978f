//! Messages over a ring: fragments of long ones, and the time that is polled before sleeping.

use alloc::vec::Vec;
use core::time::Duration;
#[cfg(feature = "std")]
use std::time::Instant;

use super::{
    bell::Bell,
    ring::{Broken, Consumer, Lines, Producer},
};
use crate::wire::frame::{Flags, HEADER, Header, LARGEST};

/// Why no message can be exchanged any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Gone {
    /// The peer has ended.
    #[error("the other side has ended")]
    Peer,
    /// The peer has broken the ring's rules.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The peer announced a longer frame or message than there may be.
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
    /// Sends over `ring`, and polls for room for so long.
    pub fn new(ring: Producer<R, L>, spin: Duration) -> Self {
        Self {
            // The peer can read one while the next is written.
            fragment: ring.longest() / 2,
            ring,
            spin,
        }
    }

    /// Lines ever written: where another process may [go on](Self::go_on).
    pub fn written(&self) -> u64 {
        self.ring.written()
    }

    /// Goes on where another process has stopped.
    ///
    /// # Errors
    /// The ring cannot be used.
    pub fn go_on(&mut self, written: u64) -> Result<(), Gone> {
        Ok(self.ring.go_on(written)?)
    }

    /// Says that this side stays awake until it has the answer that the peer waits for, or no
    /// longer: the peer may poll for it meanwhile, for at most [`STAY`].
    pub fn attend(&self, attends: bool) {
        self.ring.attend(attends);
    }

    /// Sends a message, waiting for room while `alive`. If the ring has room: no system call
    /// unless the peer sleeps.
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

    /// Writes a message for which a sleeping peer is woken only with the next one that is sent: one
    /// on which nothing depends before that.
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

    /// Sends as much of a message as there is room for; `rest` is what is left. Whether nothing is.
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
            // Who sleeps makes no room.
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

    /// Writes fragments while there is room; `rest` is what is left. Whether all are written.
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

    /// Lines ever read, and what has been read of a message whose end has not come: where another
    /// process may [go on](Self::go_on).
    pub fn read(&self) -> (u64, &[u8]) {
        (self.ring.read(), &self.partial)
    }

    /// Goes on where another process has stopped.
    pub fn go_on(&mut self, read: u64, partial: Vec<u8>) {
        self.ring.go_on(read);
        self.partial = partial;
    }

    /// The next message if it is there; its body replaces what `body` held. No system call unless
    /// the peer waits for room.
    pub fn poll(&mut self, body: &mut Vec<u8>) -> Result<Option<Header>, Gone> {
        loop {
            if !self.ring.is_ready() {
                return Ok(None);
            }
            let mut bytes = [0; HEADER];
            self.ring.peek(&mut bytes);
            // From here on the header is private: the peer cannot change it after the check.
            let header = Header::from_bytes(&bytes);
            let length = header.length as usize;
            let so_far = self.partial.len();
            if length > LARGEST - so_far || HEADER + length > self.ring.longest() {
                return Err(Gone::Length(length));
            }
            if header.flags.has(Flags::MORE) {
                // Every fragment brings the message nearer to its end.
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

    /// Has the processor fetch the next message while this one is carried out.
    #[inline]
    pub fn fetch_next(&self) {
        self.ring.fetch_next();
    }

    /// Sleeps until a message may be there or `awake` says that there is something else to do;
    /// at most for the bell's patience.
    pub fn sleep(&self, awake: impl Fn() -> bool) {
        self.ring.sleep(Duration::ZERO, awake);
    }

    /// Waits for a moment: polls while `spin`'s time is not over (another, if the peer attends),
    /// and sleeps then. Who is woken before there is a message is to be awake when it comes: `spin`
    /// begins anew.
    pub fn wait(&self, spin: &mut Spin, awake: impl Fn() -> bool) {
        let polls = spin.again_beside(|| self.ring.is_attended());
        if !polls && self.ring.sleep(spin.waited(), awake) {
            spin.reset();
        }
    }
}

impl<R: Lines, L: Bell> Receiver<R, L> {
    /// Goes away until the peer rings, whatever it sends. Whether nothing is left to read.
    pub fn leave(&self) -> bool {
        self.ring.leave()
    }

    /// Sleeps although there may be messages, which cannot be served yet, until `awake` says that
    /// there is something else to do; at most for the bell's patience.
    pub fn rest(&self, awake: impl Fn() -> bool) {
        self.ring.rest(awake);
    }
}

/// For so long polling is without the processor's pause, which takes up to 140 cycles (Intel's
/// optimization manual, on Skylake and later): most answers come in this time.
const EAGER: Duration = Duration::from_micros(20);

/// For so long a worker stays awake in its driver's waits, and the client beside it.
pub const STAY: Duration = Duration::from_millis(30);

/// Polls for a bounded time.
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
    /// Polls for `bound`.
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

    /// For as long as this, if it is longer, while the peer stays awake for the answer.
    #[must_use]
    pub fn or_attended(self, attended: Duration) -> Self {
        Self { attended, ..self }
    }

    /// Starts again.
    pub fn reset(&mut self) {
        *self = Self::new(self.bound).or_attended(self.attended);
    }

    #[cfg(feature = "std")]
    fn waited(&mut self) -> Duration {
        self.since.get_or_insert_with(Instant::now).elapsed()
    }

    /// Without an operating system there is nothing else to do than to poll.
    #[cfg(not(feature = "std"))]
    fn waited(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Spends a moment; whether the time is not over. The clock is read every 32 rounds.
    pub fn again(&mut self) -> bool {
        self.again_beside(|| false)
    }

    /// The same, beside a peer that may be attending.
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
