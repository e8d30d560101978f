//! What the host wishes of the guest's agent: where its applications are to be served.
//!
//! ```text
//!   whoever moves ── wish ──> register, interrupt ──> agent ── outcome ──> register ──> whoever moves
//! ```
//!
//! An agent that does not hear, or answers another wish, is one that does nothing: who waits does so for
//! a bounded time. What the guest writes is a number that means something or nothing.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use gantry_remoting::port::{Outcome, OutcomeKind, Server, Wish};

use super::slices::Slices;

/// How long an agent may take to say that it has begun.
const SOON: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct State {
    number: u8,
    wish: Option<Wish>,
    /// Whether the agent has heard it.
    begun: bool,
    outcome: Option<Outcome>,
}

/// Wish and outcome.
#[derive(Debug, Default)]
pub struct Mailbox {
    state: Mutex<State>,
    told: Condvar,
}

impl Mailbox {
    /// The wish, as the register has it.
    pub fn wish(&self) -> u32 {
        self.state.lock_unpoisoned().wish.map_or(0, Wish::to_number)
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

    /// Has the agent see to it that applications are served so, and waits for what has come of it; none
    /// if it has said nothing in this time, or soon that it has begun.
    pub fn ask(
        &self,
        slices: &Slices,
        by: Server,
        patience: Duration,
        cancel: &Cancel,
    ) -> Option<Outcome> {
        let until = Instant::now() + patience;
        let soon = Instant::now() + patience.min(SOON);
        let mut state = self.state.lock_unpoisoned();
        state.number = state.number.wrapping_add(1);
        state.wish = Some(Wish {
            number: state.number,
            by,
        });
        (state.begun, state.outcome) = (false, None);
        slices.tell();
        loop {
            if let Some(outcome) = state.outcome {
                return Some(outcome);
            }
            let until = if state.begun { until } else { soon };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || slices.stopping() || cancel.is_cancelled() {
                return None;
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
        mailbox.tell(outcome(1).to_number());
        assert_eq!(mailbox.wish(), 0);
        for number in 1..3u8 {
            let asking = thread::spawn({
                let (mailbox, slices) = (Arc::clone(&mailbox), Arc::clone(&slices));
                move || mailbox.ask(&slices, Server::Host, PATIENCE, &Cancel::default())
            });
            while !slices.take_news() {
                thread::yield_now();
            }
            let wish = Wish::from_number(mailbox.wish()).unwrap();
            assert_eq!((wish.number, wish.by), (number, Server::Host));
            for other in [0, u32::MAX, outcome(number + 1).to_number()] {
                mailbox.tell(other);
            }
            let begun = Outcome {
                kind: OutcomeKind::Begun,
                ..outcome(number)
            };
            mailbox.tell(begun.to_number());
            assert!(!asking.is_finished());
            mailbox.tell(outcome(number).to_number());
            assert_eq!(asking.join().unwrap(), Some(outcome(number)));
        }
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (mailbox, slices) = (Mailbox::default(), Slices::new(1).unwrap());
        let cancel = Cancel::default();
        let ask = |patience| mailbox.ask(&slices, Server::Local, patience, &cancel);
        assert_eq!(ask(Duration::ZERO), None);
        cancel.cancel();
        assert_eq!(ask(PATIENCE), None);
        slices.stop();
        let other = Cancel::default();
        assert_eq!(mailbox.ask(&slices, Server::Local, PATIENCE, &other), None);
    }
}
