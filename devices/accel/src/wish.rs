//! The host's requests to the guest's agent about where its applications are to be served.
//!
//! ```text
//!   caller ── request ──> register, interrupt ──> agent ── outcome ──> register ──> caller
//! ```
//!
//! An agent that does not notice a request, or replies to another one, does nothing: the wait is
//! bounded. The guest writes only a number, which is checked.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use remoting_proto::port::{
    Outcome, OutcomeKind, Server, Wish,
    registers::{ADDRESS_SIZE, REASON_SIZE},
};

use super::slices::Slices;

/// Timeout for an agent to report that it has begun.
const SOON: Duration = Duration::from_secs(30);

/// The address of a server: a text that fits the registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(String);

/// Why a text is not an address for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address has 1 to {ADDRESS_SIZE} bytes, none of which is a control character")]
pub struct NoAddress;

impl Address {
    /// Checks that a text is an address.
    ///
    /// # Errors
    /// It is empty or too long, or contains control characters.
    pub fn new(text: String) -> Result<Self, NoAddress> {
        let fits = (1..=ADDRESS_SIZE).contains(&(text.len() as u64));
        match fits && !text.contains(char::is_control) {
            true => Ok(Self(text)),
            false => Err(NoAddress),
        }
    }
}

/// The server that is to serve the guest's applications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seat {
    /// The guest's own pool.
    Local,
    /// The host's pool, through the port.
    Host,
    /// The server that the guest's applications reach at this address.
    At(Address),
    /// The host's pool, through the port, until these devices are back in the guest: their PCI
    /// addresses in the guest, separated by commas.
    Away(Address),
    /// None: applications of the guest's own pool wait until these devices are back, or, without
    /// devices, until another request. Programs with native contexts are suspended.
    Parked(Option<Address>),
    /// No change: the agent only says whether programs with native contexts could be suspended in the guest's memory.
    Examined,
}

impl Seat {
    fn server(&self) -> Server {
        match self {
            Self::Local => Server::Local,
            Self::Host => Server::Host,
            Self::At(_) => Server::Elsewhere,
            Self::Away(_) => Server::Away,
            Self::Parked(_) => Server::Parked,
            Self::Examined => Server::Examined,
        }
    }
}

impl Seat {
    fn address(&self) -> Option<&Address> {
        match self {
            Self::Local | Self::Host | Self::Examined => None,
            Self::At(address) | Self::Away(address) => Some(address),
            Self::Parked(devices) => devices.as_ref(),
        }
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("the guest's own pool"),
            Self::Host | Self::Away(_) => f.write_str("the port"),
            Self::At(Address(address)) => f.write_str(address),
            Self::Parked(_) | Self::Examined => f.write_str("the guest's memory"),
        }
    }
}

/// The agent's reply to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The outcome.
    pub outcome: Outcome,
    /// The reason in the guest's words: one line, empty if it gives none.
    pub reason: String,
}

/// Why the outcome of a request is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// No agent has noticed it.
    #[error("the guest says nothing of it: is its gantry-agent running, and of this build?")]
    Unheard,
    /// It was not carried out in time.
    #[error("the guest's agent has begun, and does not come to an end: its log may say why")]
    Unfinished,
    /// It was replaced by another one.
    #[error("another request has replaced this one")]
    Replaced,
    /// The caller has cancelled the wait.
    #[error("it was cancelled: applications that were told to go may go on doing so")]
    Cancelled,
    /// The port was removed, or the guest was reset.
    #[error("the guest was reset, or the port was taken from it")]
    Gone,
}

#[derive(Debug)]
struct State {
    /// Number of the last request. The first is random, because an agent may know one of an earlier
    /// port.
    number: u8,
    wish: Option<Wish>,
    /// The address that belongs to it; empty if there is none.
    address: String,
    /// Whether the agent has begun.
    begun: bool,
    /// The reason for an outcome that has yet to arrive.
    reason: [u8; REASON_SIZE as usize],
    answer: Option<Answer>,
}

/// The current request and its outcome.
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
            reason: [0; _],
            answer: None,
        };
        Self {
            state: Mutex::new(state),
            told: Condvar::new(),
        }
    }
}

impl Mailbox {
    /// The request, as the register's value.
    pub fn wish(&self) -> u32 {
        self.state.lock_unpoisoned().wish.map_or(0, Wish::to_number)
    }

    /// Four bytes of the address that belongs to it, starting at `from`, as the register's value.
    pub fn address(&self, from: u64) -> u32 {
        let state = self.state.lock_unpoisoned();
        let bytes = state.address.as_bytes().iter().skip(from as usize);
        let mut word = [0; 4];
        word.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        u32::from_le_bytes(word)
    }

    /// Withdraws the request: from now on the guest is a different one.
    pub fn withdraw(&self) {
        self.state.lock_unpoisoned().wish = None;
        self.told.notify_all();
    }

    /// Withdraws the request with this number, unless another one has taken its place.
    pub fn withdraw_own(&self, number: u8) {
        let mut state = self.state.lock_unpoisoned();
        if state.wish.is_some_and(|wish| wish.number == number) {
            state.wish = None;
            self.told.notify_all();
        }
    }

    /// Receives four bytes of the reason for the outcome that follows, starting at `from`. Writes
    /// outside the register's words are ignored.
    pub fn explain(&self, from: u64, bytes: [u8; 4]) {
        let mut state = self.state.lock_unpoisoned();
        let (words, _) = state.reason.as_chunks_mut();
        if let Some(word) = words.get_mut((from / 4) as usize)
            && from.is_multiple_of(4)
        {
            *word = bytes;
        }
    }

    /// Receives the guest's outcome of a request.
    pub fn tell(&self, number: u32) {
        let Some(outcome) = Outcome::from_number(number) else {
            return;
        };
        let mut state = self.state.lock_unpoisoned();
        // For another request, or repeated: nobody waits for it.
        if state.answer.is_some() || state.wish.is_none_or(|wish| wish.number != outcome.number) {
            // Nor are its words those of the next one.
            state.reason = [0; _];
            return;
        }
        match outcome.kind {
            OutcomeKind::Begun => state.begun = true,
            _ => {
                let reason = line(&std::mem::replace(&mut state.reason, [0; _]));
                state.answer = Some(Answer { outcome, reason });
            }
        }
        self.told.notify_all();
    }

    /// Asks the agent to let `seat` serve applications, and waits for the outcome. A request that
    /// is carried out stays in place for an agent that starts later; any other is withdrawn.
    ///
    /// # Errors
    /// The agent has not replied in this time, has not reported soon that it has begun, or the wait
    /// was cancelled.
    pub fn ask(
        &self,
        slices: &Slices,
        seat: &Seat,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Answer, Unknown> {
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
        if let Some(Address(address)) = seat.address() {
            state.address.clone_from(address);
        }
        (state.begun, state.reason, state.answer) = (false, [0; _], None);
        // Wakes callers that wait for an earlier request.
        self.told.notify_all();
        slices.tell();
        loop {
            match state.wish {
                Some(now) if now == wish => {}
                Some(_) => return Err(Unknown::Replaced),
                None => return Err(Unknown::Gone),
            }
            if let Some(answer) = state.answer.clone() {
                if answer.outcome.kind != OutcomeKind::Done {
                    state.wish = None;
                }
                return Ok(answer);
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
            // Wakes regularly to notice the end of the port or a cancellation.
            let left = left.min(Duration::from_millis(500));
            let waited = self.told.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Converts text that a guest has written to one line, up to the first zero.
fn line(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.collect::<String>().trim().to_owned()
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

    fn said(outcome: Outcome, reason: &str) -> Answer {
        let reason = reason.to_owned();
        Answer { outcome, reason }
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
            // For an agent that starts later.
            assert_eq!(Wish::from_number(mailbox.wish()), Some(wish));
            assert_eq!(asking.join().unwrap(), Ok(said(outcome(number), "")));
        }
    }

    #[test]
    fn a_reason_is_a_line_of_text_whatever_the_guest_writes() {
        let mailbox = Arc::new(Mailbox::default());
        let slices = Arc::new(Slices::new(1).unwrap());
        let cancel = Cancel::default();
        let devices = Address::new("0000:00:09.0".to_owned()).unwrap();
        let ask = |number: &mut u8| {
            let seat = Seat::Away(devices.clone());
            let (asking, now) = asking(&mailbox, &slices, &cancel, seat);
            *number = now;
            asking
        };
        let in_use = |number| Outcome {
            kind: OutcomeKind::InUse,
            ..outcome(number)
        };
        let mut number = 0;
        let first = ask(&mut number);
        assert_eq!(mailbox.address(8), u32::from_le_bytes(*b"09.0"));
        for (at, word) in [
            (0, *b"a\nb\xff"),
            (4, *b" \0cd"),
            (256, *b"efgh"),
            (2, *b"ijkl"),
        ] {
            mailbox.explain(at, word);
        }
        mailbox.tell(in_use(number).to_number());
        assert_eq!(
            first.join().unwrap(),
            Ok(said(in_use(number), "a b\u{fffd}"))
        );
        // Fill the whole register; none of it must appear in the next reason.
        let second = ask(&mut number);
        (0..u64::from(u16::MAX)).for_each(|at| mailbox.explain(at, *b"xxxx"));
        mailbox.tell(in_use(number).to_number());
        let reason = second.join().unwrap().unwrap().reason;
        assert_eq!(reason, "x".repeat(REASON_SIZE as usize));
        // Nor those of an outcome for which nobody waits.
        mailbox.explain(0, *b"late");
        mailbox.tell(in_use(number).to_number());
        let third = ask(&mut number);
        mailbox.explain(0, *b"over");
        mailbox.tell(in_use(number.wrapping_sub(1)).to_number());
        mailbox.tell(in_use(number).to_number());
        assert_eq!(third.join().unwrap(), Ok(said(in_use(number), "")));
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

    /// Asks on a thread, until the guest can see the request.
    fn asking(
        mailbox: &Arc<Mailbox>,
        slices: &Arc<Slices>,
        cancel: &Cancel,
        seat: Seat,
    ) -> (thread::JoinHandle<Result<Answer, Unknown>>, u8) {
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
        assert_eq!(second.join().unwrap(), Ok(said(stay, "")));
        assert_eq!(mailbox.wish(), 0);
        let (third, _) = asking(&mailbox, &slices, &cancel, Seat::Local);
        mailbox.withdraw();
        assert_eq!(third.join().unwrap(), Err(Unknown::Gone));
        // The wait for an agent that has begun can be cancelled at any time.
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
