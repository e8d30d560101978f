//! Pending callbacks, and how often the listener polls for them when no message wakes it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use remoting_transport::naps::{USUAL_NAP, nap};

/// A callback that takes a status of the API.
pub type Callback<S> = Box<dyn FnOnce(S) + Send>;

/// A callback that takes a status of the API, and is called repeatedly for as long as it returns
/// true.
pub type LastingCallback<S> = Arc<dyn Fn(S) -> bool + Send + Sync>;

/// The maximum number of calls of one callback that are due at a time. A worker has it called again when it has returned,
/// or when nothing will call it any more.
const MOST_DUE: usize = 16;

/// A callback that is called repeatedly.
struct Lasting<S> {
    callback: LastingCallback<S>,
    /// How many calls of it are due.
    due: Arc<AtomicUsize>,
}

/// Pending callbacks.
pub struct Callbacks<S> {
    /// How many were ever registered, which is also the newest one's number.
    registered: u64,
    pending: HashMap<u64, Callback<S>>,
    /// Callbacks that only copy memory.
    copies: HashMap<u64, Callback<S>>,
    /// Callbacks that are called repeatedly.
    lasting: HashMap<u64, Lasting<S>>,
    /// Callbacks that are called at some time, and that nothing waits for.
    unawaited: HashMap<u64, Callback<S>>,
    /// Whether the polling thread has to be woken for a new callback.
    poller_sleeps: bool,
}

impl<S> Default for Callbacks<S> {
    fn default() -> Self {
        Self {
            registered: 0,
            pending: HashMap::new(),
            copies: HashMap::new(),
            lasting: HashMap::new(),
            unawaited: HashMap::new(),
            poller_sleeps: false,
        }
    }
}

impl<S> Callbacks<S> {
    /// Adds a callback. Returns its number, and whether the polling thread has to be woken.
    pub fn register(&mut self, callback: Callback<S>) -> (u64, bool) {
        self.registered += 1;
        self.pending.insert(self.registered, callback);
        (self.registered, std::mem::take(&mut self.poller_sleeps))
    }

    /// Adds a callback that only copies memory. Returns its number, and whether the polling thread has to be woken.
    pub fn register_copy(&mut self, callback: Callback<S>) -> (u64, bool) {
        self.registered += 1;
        self.copies.insert(self.registered, callback);
        (self.registered, std::mem::take(&mut self.poller_sleeps))
    }

    /// Adds a callback that is called repeatedly. Returns its number, and whether the polling
    /// thread has to be woken.
    pub fn register_lasting(&mut self, callback: LastingCallback<S>) -> (u64, bool) {
        self.registered += 1;
        let due = Arc::default();
        let lasting = Lasting { callback, due };
        self.lasting.insert(self.registered, lasting);
        (self.registered, std::mem::take(&mut self.poller_sleeps))
    }

    /// Adds a callback that nothing waits for. Returns its number, and whether the polling thread
    /// has to be woken.
    pub fn register_unawaited(&mut self, callback: Callback<S>) -> (u64, bool) {
        self.registered += 1;
        self.unawaited.insert(self.registered, callback);
        (self.registered, std::mem::take(&mut self.poller_sleeps))
    }

    /// Removes a callback that is due or no longer needed.
    pub fn take(&mut self, number: u64) -> Option<Callback<S>> {
        let pending = self.pending.remove(&number);
        pending.or_else(|| self.unawaited.remove(&number))
    }

    /// Removes a callback that only copies memory and is due or no longer needed.
    pub fn take_copy(&mut self, number: u64) -> Option<Callback<S>> {
        self.copies.remove(&number)
    }

    /// Returns a call of a callback that is called repeatedly. None as well if too many calls of it are due.
    pub fn lasting(&self, number: u64) -> Option<impl FnOnce(S) -> bool + Send + use<S>>
    where
        S: 'static,
    {
        let Lasting { callback, due } = self.lasting.get(&number)?;
        if due.load(Ordering::Relaxed) >= MOST_DUE {
            return None;
        }
        due.fetch_add(1, Ordering::Relaxed);
        let (callback, due) = (Arc::clone(callback), Arc::clone(due));
        Some(move |status| {
            due.fetch_sub(1, Ordering::Relaxed);
            callback(status)
        })
    }

    /// Removes a callback that was called repeatedly.
    pub fn end_lasting(&mut self, number: u64) {
        self.lasting.remove(&number);
    }

    /// Whether there are callbacks that something waits for.
    pub fn is_awaited(&self) -> bool {
        !self.pending.is_empty() || !self.copies.is_empty() || !self.lasting.is_empty()
    }

    /// The number of callbacks.
    fn count(&self) -> usize {
        self.pending.len() + self.copies.len() + self.lasting.len() + self.unawaited.len()
    }

    /// Removes all callbacks that only copy memory.
    pub fn take_copies(&mut self) -> impl Iterator<Item = Callback<S>> + use<S> {
        std::mem::take(&mut self.copies).into_values()
    }

    /// Removes all other callbacks.
    pub fn take_all(&mut self) -> impl Iterator<Item = Callback<S>> + use<S> {
        let unawaited = std::mem::take(&mut self.unawaited).into_values();
        let pending = std::mem::take(&mut self.pending).into_values();
        pending.chain(unawaited)
    }
}

/// How often to poll for callbacks.
pub struct PollInterval {
    /// How many callbacks were registered and how many pending at the last poll.
    seen: (u64, usize),
    /// When that last changed. A callback that has been pending for long makes polls rare, a newer
    /// one makes them frequent again.
    since: Instant,
}

impl Default for PollInterval {
    fn default() -> Self {
        Self {
            seen: (0, 0),
            since: Instant::now(),
        }
    }
}

impl PollInterval {
    /// Returns how long to sleep before the next poll. None if no callback is pending.
    pub fn next<S>(&mut self, callbacks: &mut Callbacks<S>) -> Option<Duration> {
        let now = (callbacks.registered, callbacks.count());
        if now != self.seen {
            (self.seen, self.since) = (now, Instant::now());
        }
        let timeout = (now.1 > 0).then(|| nap(self.since.elapsed()));
        callbacks.poller_sleeps = timeout.is_none_or(|nap| nap > USUAL_NAP);
        timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_calls_of_one_callback_are_due_than_it_may_have() {
        let mut callbacks = Callbacks::<i32>::default();
        let (number, _) = callbacks.register_lasting(Arc::new(|status| status == 0));
        let mut due: Vec<_> = (0..MOST_DUE)
            .map(|_| callbacks.lasting(number).unwrap())
            .collect();
        assert!(callbacks.lasting(number).is_none());
        // One that is called makes room for the next.
        assert!(due.pop().unwrap()(0));
        assert!(callbacks.lasting(number).is_some_and(|call| !call(1)));
    }

    #[test]
    fn another_callback_is_polled_for_as_soon_as_the_first() {
        let callback = || -> Callback<i32> { Box::new(|_| {}) };
        let (mut callbacks, mut interval) = (Callbacks::default(), PollInterval::default());
        assert_eq!(interval.next(&mut callbacks), None);
        let (first, wakes) = callbacks.register(callback());
        assert!(wakes);
        interval.next(&mut callbacks);
        // As if it had been pending for a long time.
        interval.since -= Duration::from_secs(10);
        assert!(interval.next(&mut callbacks).unwrap() > USUAL_NAP);
        let (_, wakes) = callbacks.register(callback());
        assert!(wakes);
        interval.next(&mut callbacks);
        let began = interval.since;
        // One is removed and another added between two polls, as in a chain of commands.
        assert!(callbacks.take(first).is_some());
        callbacks.register(callback());
        interval.next(&mut callbacks);
        assert!(interval.since > began);
        assert_eq!(callbacks.take_all().count(), 2);
        assert_eq!(interval.next(&mut callbacks), None);
    }
}
