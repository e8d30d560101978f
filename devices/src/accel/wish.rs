//! What the host wishes of the guest's agent: where its applications are to be served.
//!
//! ```text
//!   whoever moves ── wish ──> register, interrupt ──> agent ── outcome ──> register ──> whoever moves
//! ```
//!
//! An agent that does not hear, or answers another wish, is one that does nothing: who waits does so for
//! a bounded time. What the guest writes is a number that means something or nothing.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use gantry_remoting::port::{Outcome, OutcomeKind, Server, Wish, registers::ADDRESS_SIZE};

use super::slices::Slices;

/// How long an agent may take to say that it has begun.
const SOON: Duration = Duration::from_secs(30);

/// The address of whoever is to serve: a text that has room in the registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(String);

/// A text that is no address for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address has 1 to {ADDRESS_SIZE} bytes, none of which is a control character")]
pub struct NoAddress;

impl Address {
    /// The address that this text is.
    ///
    /// # Errors
    /// It is empty or too long, or has characters that end a line.
    pub fn new(text: String) -> Result<Self, NoAddress> {
        let fits = (1..=ADDRESS_SIZE).contains(&(text.len() as u64));
        match fits && !text.contains(char::is_control) {
            true => Ok(Self(text)),
            false => Err(NoAddress),
        }
    }
}

/// Who is to serve the guest's applications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seat {
    /// The guest's own pool.
    Local,
    /// The host's, by the port.
    Host,
    /// Whoever the guest's applications reach at this address.
    At(Address),
}

impl Seat {
    fn server(&self) -> Server {
        match self {
            Self::Local => Server::Local,
            Self::Host => Server::Host,
            Self::At(_) => Server::Elsewhere,
        }
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("the guest's own pool"),
            Self::Host => f.write_str("the port"),
            Self::At(Address(address)) => f.write_str(address),
        }
    }
}

/// Why nobody knows what has come of a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// Nobody has heard it.
    #[error("the guest says nothing of it: is its gantry-agent running, and of this build?")]
    Unheard,
    /// It is not carried out in time.
    #[error("the guest's agent has begun, and does not come to an end: its log may say why")]
    Unfinished,
    /// There is another one.
    #[error("another request has replaced this one")]
    Replaced,
    /// Who has asked does not wait for it.
    #[error("it was cancelled: applications that were told to go may go on doing so")]
    Cancelled,
    /// The port is gone, or the guest has been reset.
    #[error("the guest was reset, or the port was taken from it")]
    Gone,
}

#[derive(Debug)]
struct State {
    /// Of the last wish. The first is random: an agent may know one of a port before this one.
    number: u8,
    wish: Option<Wish>,
    /// The address that goes with it; empty if none does.
    address: String,
    /// Whether the agent has heard it.
    begun: bool,
    outcome: Option<Outcome>,
}

/// Wish and outcome.
#[derive(Debug)]
pub struct Mailbox {
    state: Mutex<State>,
    told: Condvar,
}

impl Default for Mailbox {
    fn default() -> Self {
        let state = State {
            number: RandomState::new().build_hasher().finish() as u8,
            wish: None,
            address: String::new(),
            begun: false,
            outcome: None,
        };
        Self {
            state: Mutex::new(state),
            told: Condvar::new(),
        }
    }
}

impl Mailbox {
    /// The wish, as the register has it.
    pub fn wish(&self) -> u32 {
        self.state.lock_unpoisoned().wish.map_or(0, Wish::to_number)
    }

    /// Four bytes of the address that goes with it, from this one on, as the register has them.
    pub fn address(&self, from: u64) -> u32 {
        let state = self.state.lock_unpoisoned();
        let bytes = state.address.as_bytes().iter().skip(from as usize);
        let mut word = [0; 4];
        word.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        u32::from_le_bytes(word)
    }

    /// Takes the wish back: the guest is another one from now on.
    pub fn withdraw(&self) {
        self.state.lock_unpoisoned().wish = None;
        self.told.notify_all();
    }

    /// What the guest says has come of a wish.
    pub fn tell(&self, number: u32) {
        let Some(outcome) = Outcome::from_number(number) else {
            return;
        };
        let mut state = self.state.lock_unpoisoned();
        // Of another one, or once more: nobody waits for it.
        if state.outcome.is_some() || state.wish.is_none_or(|wish| wish.number != outcome.number) {
            return;
        }
        match outcome.kind {
            OutcomeKind::Begun => state.begun = true,
            _ => state.outcome = Some(outcome),
        }
        self.told.notify_all();
    }

    /// Has the agent see to it that applications are served so, and waits for what has come of it. A
    /// wish that is carried out stays, for an agent that starts later; another one is taken back.
    ///
    /// # Errors
    /// The agent has said nothing in this time, or not soon that it has begun, or somebody else does not
    /// wait any more.
    pub fn ask(
        &self,
        slices: &Slices,
        seat: &Seat,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Outcome, Unknown> {
        let until = Instant::now() + patience;
        let soon = Instant::now() + patience.min(SOON);
        let mut state = self.state.lock_unpoisoned();
        state.number = state.number.wrapping_add(1);
        let wish = Wish {
            number: state.number,
            by: seat.server(),
        };
        state.wish = Some(wish);
        state.address.clear();
        if let Seat::At(Address(address)) = seat {
            state.address.clone_from(address);
        }
        (state.begun, state.outcome) = (false, None);
        // Who waits for an earlier one.
        self.told.notify_all();
        slices.tell();
        loop {
            match state.wish {
                Some(now) if now == wish => {}
                Some(_) => return Err(Unknown::Replaced),
                None => return Err(Unknown::Gone),
            }
            if let Some(outcome) = state.outcome {
                if outcome.kind != OutcomeKind::Done {
                    state.wish = None;
                }
                return Ok(outcome);
            }
            let until = if state.begun { until } else { soon };
            let left = until.saturating_duration_since(Instant::now());
            let failed = if cancel.is_cancelled() {
                Some(Unknown::Cancelled)
            } else if slices.stopping() {
                Some(Unknown::Gone)
            } else if !left.is_zero() {
                None
            } else if state.begun {
                Some(Unknown::Unfinished)
            } else {
                Some(Unknown::Unheard)
            };
            if let Some(failed) = failed {
                state.wish = None;
                return Err(failed);
            }
            // It may be the port's end that is waited for.
            let left = left.min(Duration::from_millis(500));
            let waited = self.told.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn outcome(number: u8) -> Outcome {
        Outcome {
            number,
            kind: OutcomeKind::Done,
            applications: 2,
        }
    }

    #[test]
    fn only_what_comes_of_the_last_wish_is_heard() {
        let mailbox = Arc::new(Mailbox::default());
        let slices = Arc::new(Slices::new(1).unwrap());
        for number in 0..=255 {
            mailbox.tell(outcome(number).to_number());
        }
        assert_eq!(mailbox.wish(), 0);
        for _ in 0..2 {
            let asking = thread::spawn({
                let (mailbox, slices) = (Arc::clone(&mailbox), Arc::clone(&slices));
                move || mailbox.ask(&slices, &Seat::Host, PATIENCE, &Cancel::default())
            });
            while !slices.take_news() {
                thread::yield_now();
            }
            let wish = Wish::from_number(mailbox.wish()).unwrap();
            let number = wish.number;
            assert_eq!(wish.by, Server::Host);
            for other in [0, u32::MAX, outcome(number.wrapping_add(1)).to_number()] {
                mailbox.tell(other);
            }
            let begun = Outcome {
                kind: OutcomeKind::Begun,
                ..outcome(number)
            };
            mailbox.tell(begun.to_number());
            assert!(!asking.is_finished());
            mailbox.tell(outcome(number).to_number());
            // For an agent that comes later.
            assert_eq!(Wish::from_number(mailbox.wish()), Some(wish));
            assert_eq!(asking.join().unwrap(), Ok(outcome(number)));
        }
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (mailbox, slices) = (Mailbox::default(), Slices::new(1).unwrap());
        let cancel = Cancel::default();
        let ask = |patience| mailbox.ask(&slices, &Seat::Local, patience, &cancel);
        assert_eq!(ask(Duration::ZERO), Err(Unknown::Unheard));
        assert_eq!(mailbox.wish(), 0);
        cancel.cancel();
        assert_eq!(ask(PATIENCE), Err(Unknown::Cancelled));
        assert_eq!(mailbox.wish(), 0);
        slices.stop();
        let other = Cancel::default();
        let asked = mailbox.ask(&slices, &Seat::Local, PATIENCE, &other);
        assert_eq!(asked, Err(Unknown::Gone));
        assert_eq!(mailbox.wish(), 0);
    }

    /// Asks in a thread, until the guest has heard of it.
    fn asking(
        mailbox: &Arc<Mailbox>,
        slices: &Arc<Slices>,
        cancel: &Cancel,
        seat: Seat,
    ) -> (thread::JoinHandle<Result<Outcome, Unknown>>, u8) {
        let asking = thread::spawn({
            let (mailbox, slices) = (Arc::clone(mailbox), Arc::clone(slices));
            let cancel = cancel.clone();
            move || mailbox.ask(&slices, &seat, PATIENCE, &cancel)
        });
        while !slices.take_news() {
            thread::yield_now();
        }
        let wish = Wish::from_number(mailbox.wish()).unwrap();
        (asking, wish.number)
    }

    #[test]
    fn an_address_is_read_from_the_registers_until_another_wish_comes() {
        let mailbox = Arc::new(Mailbox::default());
        let slices = Arc::new(Slices::new(1).unwrap());
        let cancel = Cancel::default();
        let text = "x".repeat(ADDRESS_SIZE as usize - 1) + "y";
        let read = || -> Vec<u8> {
            let words = (0..ADDRESS_SIZE).step_by(4);
            words
                .flat_map(|at| mailbox.address(at).to_le_bytes())
                .collect()
        };
        let seat = Seat::At(Address::new(text.clone()).unwrap());
        let (first, _) = asking(&mailbox, &slices, &cancel, seat);
        let wish = Wish::from_number(mailbox.wish()).unwrap();
        assert_eq!(wish.by, Server::Elsewhere);
        assert_eq!(read(), text.as_bytes());
        let (second, _) = asking(&mailbox, &slices, &cancel, Seat::Host);
        assert_eq!(first.join().unwrap(), Err(Unknown::Replaced));
        assert_eq!(read(), [0; ADDRESS_SIZE as usize]);
        cancel.cancel();
        assert_eq!(second.join().unwrap(), Err(Unknown::Cancelled));
        for bad in [String::new(), text + "z", "a\nb".to_owned()] {
            assert_eq!(Address::new(bad), Err(NoAddress));
        }
    }

    #[test]
    fn what_fails_is_taken_back_and_who_has_asked_learns_why() {
        let mailbox = Arc::new(Mailbox::default());
        let slices = Arc::new(Slices::new(1).unwrap());
        let cancel = Cancel::default();
        let (first, _) = asking(&mailbox, &slices, &cancel, Seat::Local);
        let (second, number) = asking(&mailbox, &slices, &cancel, Seat::Local);
        assert_eq!(first.join().unwrap(), Err(Unknown::Replaced));
        assert_ne!(mailbox.wish(), 0);
        let stay = Outcome {
            kind: OutcomeKind::Stay,
            ..outcome(number)
        };
        mailbox.tell(stay.to_number());
        assert_eq!(second.join().unwrap(), Ok(stay));
        assert_eq!(mailbox.wish(), 0);
        let (third, _) = asking(&mailbox, &slices, &cancel, Seat::Local);
        mailbox.withdraw();
        assert_eq!(third.join().unwrap(), Err(Unknown::Gone));
        // An agent that has begun is waited for no longer than anybody likes.
        let (fourth, number) = asking(&mailbox, &slices, &cancel, Seat::Local);
        let begun = Outcome {
            kind: OutcomeKind::Begun,
            ..outcome(number)
        };
        mailbox.tell(begun.to_number());
        cancel.cancel();
        assert_eq!(fourth.join().unwrap(), Err(Unknown::Cancelled));
        assert_eq!(mailbox.wish(), 0);
    }
}
