//! A limit to the time that a command runs.
//!
//! A kernel that never ends keeps a device from everybody who does not share it by an arbiter. APIs
//! have no way to end a kernel alone; the end of its process does. So a thread looks at what the
//! driver has, and ends the worker whose command has been running for longer than it may.
//!
//! It asks the driver about the oldest command of a queue that is in order, as no other one runs
//! there, and about each of another queue. [`MOST`] commands are looked after at a time. While the
//! driver has so many, no further calls are taken, or, where it may be up to the client that any of
//! them ends, commands are refused. And the thread uses a sixteenth of a processor at most: with many
//! commands out of order, or many queues, it looks less often than [`LOOKS`] says.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use super::backend::{Fences, Progress, QueueKey};

/// Commands are looked at so often within the limit: one that exceeds it has at most so small a part
/// of it more.
const LOOKS: u32 = 8;
/// The shortest time between two looks.
const SHORTEST: Duration = Duration::from_millis(1);
/// Looking takes so small a part of the time at most.
const PART: u32 = 16;
/// How many commands are looked after at a time: less than 1 MiB.
const MOST: usize = 16 << 10;
/// From so many on it is looked at them as often as may be, so that there is room for more in time.
const MANY: usize = MOST / 2;

/// The thread that looks at commands; ends with this value.
#[derive(Debug)]
pub(crate) struct Limit<F> {
    orders: mpsc::Sender<Order<F>>,
    /// How many commands are looked after, those included that the thread has not heard of.
    count: Arc<AtomicUsize>,
    thread: Thread,
}

/// A command to look after.
#[derive(Debug)]
pub(crate) struct Order<F> {
    /// Its fence, a reference to which this takes over.
    pub fence: F,
    /// Its queue.
    pub queue: QueueKey,
}

impl<F> Limit<F> {
    /// Starts the thread, which calls `exceeded` with the time that a command has run when that is
    /// more than `limit`, and `wake` when there is room again.
    pub fn start<D: Fences<Fence = F>>(
        driver: Arc<D>,
        wake: impl Fn() + Send + 'static,
        limit: Duration,
        exceeded: impl Fn(Duration) + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Send + 'static,
    {
        let (sender, orders) = mpsc::channel();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let thread = thread::Builder::new()
            .name("limit".to_owned())
            .spawn(move || look_after(&*driver, wake, limit, &orders, &counted, exceeded))?;
        Ok(Self {
            orders: sender,
            count,
            thread: thread.thread().clone(),
        })
    }

    /// Whether no other command can be looked after: one atomic load.
    pub fn is_full(&self) -> bool {
        self.count.load(Ordering::Acquire) >= MOST
    }

    /// Has a command looked after.
    pub fn order(&self, order: Order<F>) {
        // Before the thread can count it out again.
        let before = self.count.fetch_add(1, Ordering::AcqRel);
        // The thread ends only with this value.
        let _ = self.orders.send(order);
        if before + 1 == MANY {
            self.thread.unpark();
        }
    }
}

/// A command that the driver has, and when it was first seen to run.
#[derive(Debug)]
struct Command<F> {
    fence: F,
    since: Option<Instant>,
}

impl<F> Command<F> {
    /// Whether it goes on, and how long it has run, by now.
    fn goes_on(&mut self, progress: Progress, now: Instant) -> (bool, Duration) {
        match progress {
            Progress::Running => {
                let since = *self.since.get_or_insert(now);
                (true, now.saturating_duration_since(since))
            }
            Progress::Waiting => (true, Duration::ZERO),
            Progress::Complete | Progress::Failed => (false, Duration::ZERO),
        }
    }
}

/// What the driver has, by queue.
#[derive(Debug)]
struct Known<F>(HashMap<QueueKey, VecDeque<Command<F>>>);

impl<F> Default for Known<F> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<F: Copy> Known<F> {
    fn add(&mut self, order: &Order<F>) {
        let queue = self.0.entry(order.queue).or_default();
        queue.push_back(Command {
            fence: order.fence,
            since: None,
        });
    }

    /// Looks at all that may run: the fences of those that have ended, and how long the one has
    /// run that runs for longest.
    fn look(&mut self, now: Instant, poll: impl Fn(F) -> Progress) -> (Vec<F>, Duration) {
        let mut ended = Vec::new();
        let mut longest = Duration::ZERO;
        let mut goes_on = |command: &mut Command<F>| {
            let (goes_on, ran) = command.goes_on(poll(command.fence), now);
            longest = longest.max(ran);
            if !goes_on {
                ended.push(command.fence);
            }
            goes_on
        };
        self.0.retain(|queue, commands| {
            if queue.in_order {
                while let Some(oldest) = commands.front_mut()
                    && !goes_on(oldest)
                {
                    commands.pop_front();
                }
            } else {
                commands.retain_mut(&mut goes_on);
            }
            !commands.is_empty()
        });
        (ended, longest)
    }
}

/// How long nobody looks after a look that took so long. Not by that alone: a look can be held up
/// for long, while commands run.
fn rest(took: Duration, limit: Duration) -> Duration {
    took.saturating_mul(PART).min(limit)
}

fn look_after<D: Fences>(
    driver: &D,
    wake: impl Fn(),
    limit: Duration,
    orders: &mpsc::Receiver<Order<D::Fence>>,
    count: &AtomicUsize,
    exceeded: impl Fn(Duration),
) {
    let usual = (limit / LOOKS).max(SHORTEST);
    let mut known = Known::default();
    let mut took = Duration::ZERO;
    loop {
        if known.0.is_empty() {
            // Sleeps for good while nothing is under way.
            let Ok(order) = orders.recv() else {
                return;
            };
            known.add(&order);
        }
        let many = count.load(Ordering::Acquire) >= MANY;
        thread::park_timeout(if many { SHORTEST } else { usual });
        thread::sleep(rest(took, limit));
        orders.try_iter().for_each(|order| known.add(&order));
        let start = Instant::now();
        let (ended, longest) = known.look(start, |fence| driver.poll(fence));
        if longest > limit {
            exceeded(longest);
        }
        for fence in &ended {
            driver.release(*fence);
        }
        took = start.elapsed();
        let before = count.fetch_sub(ended.len(), Ordering::AcqRel);
        if before >= MOST && before - ended.len() < MOST {
            wake();
        }
    }
}

#[cfg(test)]
#[path = "limit_tests.rs"]
mod tests;
