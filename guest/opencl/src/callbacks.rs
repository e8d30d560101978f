//! Callbacks that are waited for, and how often they are looked for where nobody tells of them.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use gantry_remoting::transport::port_bell::{USUAL_NAP, nap};

/// What is called, with a status.
pub type Callback = Box<dyn FnOnce(i32) + Send>;

/// Callbacks that are waited for.
#[derive(Default)]
pub struct Callbacks {
    /// How many there have ever been: the newest one's number.
    ever: u64,
    pending: HashMap<u64, Callback>,
    /// Whether who looks for them is to be woken for another one.
    dozes: bool,
}

impl Callbacks {
    /// Keeps one. Its number, and whether to wake who looks for it.
    pub fn keep(&mut self, callback: Callback) -> (u64, bool) {
        self.ever += 1;
        self.pending.insert(self.ever, callback);
        (self.ever, std::mem::take(&mut self.dozes))
    }

    /// Takes one that is due, or not needed any more.
    pub fn take(&mut self, number: u64) -> Option<Callback> {
        self.pending.remove(&number)
    }

    /// Takes all.
    pub fn take_all(&mut self) -> impl Iterator<Item = Callback> + use<> {
        std::mem::take(&mut self.pending).into_values()
    }
}

/// Who looks for them.
pub struct Look {
    /// How many there have been, and how many were left.
    seen: (u64, usize),
    /// Since when this has not changed: for the sake of an old one, others do not wait.
    since: Instant,
}

impl Look {
    pub fn new() -> Self {
        Self {
            seen: (0, 0),
            since: Instant::now(),
        }
    }

    /// For how long to sleep before the next look; none if there is nothing to look for.
    pub fn patience(&mut self, callbacks: &mut Callbacks) -> Option<Duration> {
        let now = (callbacks.ever, callbacks.pending.len());
        if now != self.seen {
            (self.seen, self.since) = (now, Instant::now());
        }
        let patience = (now.1 > 0).then(|| nap(self.since.elapsed()));
        callbacks.dozes = patience.is_none_or(|nap| nap > USUAL_NAP);
        patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_callback_is_looked_for_as_soon_as_the_first() {
        let callback = || -> Callback { Box::new(|_| {}) };
        let (mut callbacks, mut look) = (Callbacks::default(), Look::new());
        assert_eq!(look.patience(&mut callbacks), None);
        let (first, wakes) = callbacks.keep(callback());
        assert!(wakes);
        look.patience(&mut callbacks);
        // As if it had been looked for for long.
        look.since -= Duration::from_secs(10);
        assert!(look.patience(&mut callbacks).unwrap() > USUAL_NAP);
        let (_, wakes) = callbacks.keep(callback());
        assert!(wakes);
        look.patience(&mut callbacks);
        let began = look.since;
        // One goes and another comes between two looks, as in a chain of commands.
        assert!(callbacks.take(first).is_some());
        callbacks.keep(callback());
        look.patience(&mut callbacks);
        assert!(look.since > began);
        assert_eq!(callbacks.take_all().count(), 2);
        assert_eq!(look.patience(&mut callbacks), None);
    }
}
