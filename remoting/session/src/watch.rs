//! Looks after commands that the driver has, on behalf of a serving thread that sleeps.
//!
//! A driver can call back when a command completes, but not every driver does so at once: with
//! NVIDIA's (580.159, on an H200) kernels of 400 us whose end was learnt that way took 2 ms each
//! (`examples/opencl_turns 400 64 6` under gantry-arbiter: 3,059 of them in 6 s, 14,871 natively).
//! So a thread looks at them again and again, and wakes the serving thread. It sleeps in between for
//! a small part of the time that it has waited so far: that is what the device idles at most, while
//! who waits for long hardly uses the processor.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::backend::Fences;

/// It sleeps for so small a part of the time that it has waited.
const PART: u32 = 128;
/// The same for what takes long: a kernel of 100 ms whose end is seen 3 ms late is 3 % of a device.
const SMALL_PART: u32 = 512;
/// The shortest sleep: about what falling asleep and waking up take.
const SHORTEST: Duration = Duration::from_micros(20);
/// Sleeps grow more slowly from here on: falling asleep and waking up are 2 % of it.
const USUAL: Duration = Duration::from_micros(500);
/// The longest sleep: who waits for what never ends uses 50 of these a second.
const LONGEST: Duration = Duration::from_millis(20);
/// How much later than asked for the system may end a sleep, in nanoseconds; 50 us by itself.
const SLACK: libc::c_ulong = 1_000;

/// The thread that looks after commands; ends with this value.
#[derive(Debug)]
pub struct Watch<F>(mpsc::Sender<Order<F>>);

/// A fence to look after.
#[derive(Debug)]
struct Order<F> {
    fence: F,
    /// When to wake the serving thread in any case.
    deadline: Option<Instant>,
}

impl<F> Watch<F> {
    /// Starts the thread, which wakes the serving thread by `wake`.
    pub fn start<D: Fences<Fence = F>>(
        driver: Arc<D>,
        wake: impl Fn() + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Send + 'static,
    {
        let (sender, orders) = mpsc::channel();
        thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || watch(&*driver, wake, &orders))?;
        Ok(Self(sender))
    }

    /// Has the serving thread woken when a fence is over, and after some time if it is not. Takes
    /// over a reference to it.
    pub fn order(&self, fence: F, after: Option<Duration>) {
        let deadline = after.map(|after| Instant::now() + after);
        // The thread ends only with this value.
        let _ = self.0.send(Order { fence, deadline });
    }
}

/// How long to sleep after so long a wait.
fn nap(waited: Duration) -> Duration {
    (waited / PART)
        .min(USUAL)
        .max(waited / SMALL_PART)
        .clamp(SHORTEST, LONGEST)
}

fn watch<D: Fences>(driver: &D, wake: impl Fn(), orders: &mpsc::Receiver<Order<D::Fence>>) {
    // SAFETY: a plain call. Without it sleeps are somewhat longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, SLACK) };
    let mut watched: Vec<Order<D::Fence>> = Vec::new();
    // Since the newest was ordered: for the sake of an old one that never ends, others do not wait.
    let mut since = Instant::now();
    loop {
        let ordered = if watched.is_empty() {
            orders
                .recv()
                .map_err(|_| mpsc::RecvTimeoutError::Disconnected)
        } else {
            let nap = nap(since.elapsed());
            let deadlines = watched.iter().filter_map(|order| order.deadline);
            let left = deadlines
                .min()
                .map_or(nap, |first| first.saturating_duration_since(Instant::now()));
            orders.recv_timeout(nap.min(left))
        };
        match ordered {
            Ok(order) => {
                watched.push(order);
                watched.extend(orders.try_iter());
                since = Instant::now();
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
        let now = Instant::now();
        let mut is_due = false;
        watched.retain_mut(|order| {
            is_due |= order
                .deadline
                .take_if(|deadline| *deadline <= now)
                .is_some();
            let is_over = driver.poll(order.fence).is_over();
            if is_over {
                is_due = true;
                driver.release(order.fence);
            }
            !is_over
        });
        if is_due {
            wake();
        }
    }
    for order in watched {
        driver.release(order.fence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How late the end of a command is seen at most that takes so long, and after how many looks.
    fn seen(took: Duration) -> (Duration, u32) {
        let (mut now, mut looks) = (Duration::ZERO, 0);
        while now < took {
            now += nap(now);
            looks += 1;
        }
        (nap(took), looks)
    }

    #[test]
    fn the_end_of_a_long_command_is_seen_soon_and_with_few_looks() {
        for millis in [10, 100, 1_000, 10_000] {
            let took = Duration::from_millis(millis);
            let (late, looks) = seen(took);
            assert!(late <= took / 128, "{took:?}: {late:?}");
            assert!(looks < 3_000, "{took:?}: {looks}");
        }
        assert_eq!(seen(Duration::from_millis(100)).0, USUAL);
        assert_eq!(nap(Duration::from_secs(3_600)), LONGEST);
        assert_eq!(nap(Duration::ZERO), SHORTEST);
    }
}
