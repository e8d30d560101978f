//! A limit on the run time of a command.
//!
//! A kernel that never ends keeps a device from everybody who does not share it through an arbiter. APIs have no way to
//! end a kernel alone, but ending its process ends it. A thread therefore polls the driver's commands, and ends the
//! worker whose command has run for longer than allowed.
//!
//! It asks the driver about the oldest command of an in-order queue, since no other one runs there, and
//! about each command of any other queue. At most [`MOST`] commands are watched at a time. While the driver
//! has that many, no further calls are taken, or, where it may be up to the client that any of them ends,
//! commands are refused. The thread uses at most a sixteenth of a processor: with many out-of-order
//! commands, or many queues, it polls less often than [`LOOKS`] says.

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

/// Number of polls per limit: a command exceeds its limit by at most this fraction of it.
const LOOKS: u32 = 8;
/// Minimum interval between two polls.
const SHORTEST: Duration = Duration::from_millis(1);
/// Polling takes at most this fraction of the time.
const PART: u32 = 16;
/// Maximum number of commands watched at a time: less than 1 MiB.
pub const MOST: usize = 16 << 10;
/// From this number on, polls are as frequent as allowed, so that there is room for more in time.
const MANY: usize = MOST / 2;

/// The thread that polls commands; ends with this value.
#[derive(Debug)]
pub struct Limit<F> {
    orders: mpsc::Sender<Order<F>>,
    /// The number of watched commands, including those that the thread has not received yet.
    pub count: Arc<AtomicUsize>,
    thread: Thread,
}

/// A command to watch.
#[derive(Debug)]
pub struct Order<F> {
    /// Its fence. The order owns a reference to it.
    pub fence: F,
    /// Its queue.
    pub queue: QueueKey,
}

impl<F> Limit<F> {
    /// Starts the thread. It calls `exceeded` with the time that a command has run, when that is more than `limit`, and
    /// `wake` when there is room again.
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

    /// Whether no further command can be watched: one atomic load.
    pub fn is_full(&self) -> bool {
        self.count.load(Ordering::Acquire) >= MOST
    }

    /// Watches a command.
    pub fn order(&self, order: Order<F>) {
        // Counted before the thread can subtract it.
        let before = self.count.fetch_add(1, Ordering::AcqRel);
        // The thread ends only with this value.
        let _ = self.orders.send(order);
        if before + 1 == MANY {
            self.thread.unpark();
        }
    }
}

/// A command that the driver has, and when it was first seen running.
#[derive(Debug)]
struct Command<F> {
    fence: F,
    since: Option<Instant>,
}

impl<F> Command<F> {
    /// Whether it is unfinished, and how long it has run so far.
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

/// The driver's commands, by queue.
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

    /// Polls all commands that may run. Returns the fences of those that have ended, and the longest time that one has
    /// run.
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

/// The pause after a poll that took this long. It is capped by the limit: a poll can be delayed for long while commands
/// run.
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
            // Sleeps indefinitely while no work is outstanding.
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
mod tests {
    use std::cell::Cell;

    use super::*;

    fn known(commands: std::ops::Range<usize>, in_order: bool) -> Known<usize> {
        let mut known = Known::default();
        for event in commands {
            known.add(&Order {
                fence: event,
                queue: QueueKey { raw: 7, in_order },
            });
        }
        known
    }

    #[test]
    fn the_oldest_of_a_queue_in_order_alone_is_asked_about() {
        let mut known = known(0..1000, true);
        let (asked, done) = (Cell::new(0), Cell::new(0));
        let status = |event: usize| {
            asked.set(asked.get() + 1);
            if event < done.get() {
                Progress::Complete
            } else {
                Progress::Waiting
            }
        };
        let now = Instant::now();
        assert_eq!(known.look(now, status).0.len(), 0);
        assert_eq!(asked.take(), 1);
        done.set(10);
        assert_eq!(known.look(now, status).0, Vec::from_iter(0..10));
        assert_eq!(asked.take(), 11);
        done.set(1000);
        assert_eq!(known.look(now, status).0.len(), 990);
        assert!(known.0.is_empty(), "a queue without commands is forgotten");
    }

    #[test]
    fn a_command_out_of_order_runs_from_when_it_was_first_seen_to() {
        let mut known = known(0..3, false);
        let runs = |runs: usize| {
            move |event| {
                if event == runs {
                    Progress::Running
                } else {
                    Progress::Waiting
                }
            }
        };
        let start = Instant::now();
        assert_eq!(known.look(start, runs(1)).1, Duration::ZERO);
        let later = start + Duration::from_millis(300);
        assert_eq!(known.look(later, runs(1)).1, later - start);
        // One that has ended, by an error as well, counts no longer.
        let (ended, longest) = known.look(later, |event| {
            if event == 1 {
                Progress::Failed
            } else {
                Progress::Waiting
            }
        });
        assert_eq!((ended, longest), (vec![1], Duration::ZERO));
    }

    #[test]
    fn a_look_that_was_held_up_delays_the_next_one_by_the_limit_at_most() {
        let limit = Duration::from_secs(1);
        let short = Duration::from_millis(10);
        assert_eq!(rest(short, limit), short * PART);
        assert_eq!(rest(Duration::from_secs(60), limit), limit);
        assert_eq!(rest(Duration::MAX, limit), limit);
    }
}
