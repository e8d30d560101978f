//! Waking and sleeping across the boundary of a virtual machine, through the [accelerator port](remoting_proto::port).
//!
//! The worker sleeps on the port's doorbell and rings by its interrupt ([`Events`]). The application rings the
//! doorbell. To sleep ([`Doorbell`]), it naps and looks again at first; after a millisecond it sleeps until an
//! interrupt, if its agent has the port's interrupts ([`alarm`](super::alarm)). Each nap takes a sixteenth of the time
//! waited so far, at least 20 us and at most 1 ms; after a quarter of a second, a 256th of it, at most 20 ms. That
//! share bounds the latency that naps add to a wait. A nap costs a system call and a timer interrupt.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{Access, Mapping};

use super::{
    alarm::{self, Alarm},
    bell::{Bell, Futex},
    gate::Gate,
    naps::{USUAL_NAP, nap},
    sync::{AtomicU32, Ordering},
};

/// The two eventfds between a worker and its slice of an accelerator port.
#[derive(Debug)]
pub struct Events {
    /// Signalled by the guest: the worker sleeps on it.
    pub doorbell: OwnedFd,
    /// Signalled by the worker: raises the guest's interrupt.
    pub interrupt: OwnedFd,
    /// Maximum time of one sleep.
    pub patience: Duration,
}

impl Events {
    /// Raises the guest's interrupt.
    pub fn interrupt(&self) {
        signal(&self.interrupt);
    }

    fn sleep(&self) {
        let mut polled = libc::pollfd {
            fd: self.doorbell.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let patience = i32::try_from(self.patience.as_millis()).unwrap_or(i32::MAX);
        let mut count = 0u64;
        // SAFETY: one pollfd; then eight bytes into a local. The read does not block after the poll, since nobody else
        // reads.
        unsafe {
            if libc::poll(&raw mut polled, 1, patience) > 0 {
                libc::read(self.doorbell.as_raw_fd(), (&raw mut count).cast(), 8);
            }
        }
    }
}

fn signal(event: &OwnedFd) {
    let one = 1u64;
    // SAFETY: eight bytes from a local.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// How a worker rings and sleeps, depending on where its application is.
#[derive(Clone, Debug)]
pub enum Waker {
    /// The application is a process of this machine.
    Futex(Futex),
    /// The application is in a guest; ringing raises its interrupt, if the application asks for it.
    Guest(Arc<Events>),
    /// The worker's own threads ring for the serving one.
    Own(Arc<Events>),
    /// Passive mode: the worker runs on the caller's vCPU ([`gate`](super::gate)). Whoever rings runs
    /// on behalf of the side that would be woken, and nothing sleeps here.
    Passive,
}

impl Waker {
    /// Same waker, but for ringing this process's own serving thread.
    #[must_use]
    pub fn own(&self) -> Self {
        match self {
            Self::Guest(events) => Self::Own(Arc::clone(events)),
            other => other.clone(),
        }
    }
}

impl Bell for Waker {
    fn ring(&self, word: &AtomicU32) {
        match self {
            Self::Futex(futex) => futex.ring(word),
            Self::Guest(events) => {
                if alarm::ring(word) {
                    events.interrupt();
                }
            }
            Self::Own(events) => signal(&events.doorbell),
            Self::Passive => {
                word.fetch_add(1, Ordering::Release);
            }
        }
    }

    fn wait(&self, word: &AtomicU32, seen: u32, waited: Duration) {
        match self {
            Self::Futex(futex) => futex.wait(word, seen, waited),
            Self::Guest(events) | Self::Own(events) => events.sleep(),
            Self::Passive => {}
        }
    }
}

/// A page of an accelerator port's doorbells, mapped: a write anywhere in it rings.
#[derive(Debug)]
pub struct DoorbellPage(Mapping);

impl DoorbellPage {
    /// Maps the page at this offset of the doorbells' file.
    pub fn map(file: &OwnedFd, offset: u64) -> std::io::Result<Self> {
        let len = remoting_proto::port::DOORBELL as usize;
        let page = Mapping::shared(file, offset, len, Access::ReadWrite)?;
        // A child that this process forks must not ring for its parent. If it has the page, it does not use it.
        let _ = page.inherit(0, len, false);
        Ok(Self(page))
    }

    /// Rings: a store that exits the guest for as long as signalling an eventfd takes.
    pub fn ring(&self) {
        // SAFETY: the page is mapped as long as the value lives.
        unsafe { self.0.start().cast::<u32>().write_volatile(1) };
    }

    /// Replaces the page by memory that nobody reads: the device may be gone.
    pub fn retire(&self) {
        self.0.detach();
    }
}

/// How an application rings and sleeps, depending on where its worker is.
#[derive(Clone, Debug)]
pub enum Doorbell {
    /// The worker is a process of this machine.
    Futex(Futex),
    /// The worker is outside this virtual machine.
    Port {
        /// The page that wakes it.
        page: Arc<DoorbellPage>,
        /// How the application's threads sleep.
        naps: Arc<Naps>,
        /// Maximum time of one sleep.
        patience: Duration,
    },
    /// The worker runs on the CPU that rings for it.
    Gate(Arc<Gate>),
}

/// Naps of an application's threads. Long ones end when another thread of the application asks the worker for
/// something, since the sleeping thread reads for both. With an alarm there are no long naps.
#[derive(Debug, Default)]
pub struct Naps {
    /// 0 while nobody takes a long nap.
    dozes: AtomicU32,
    /// Rung by the agent on the port's interrupts, if it has them.
    alarm: Option<Alarm>,
}

impl Naps {
    /// With an alarm, naps only until [`alarm::LONG`] has passed.
    pub fn new(alarm: Option<Alarm>) -> Self {
        Self {
            dozes: AtomicU32::new(0),
            alarm,
        }
    }

    /// Sleeps for a while, after having `waited` so long. `most` bounds a sleep until the alarm. Returns whether it was
    /// a sleep until the alarm, which may have ended for another reason than a change of the word.
    fn sleep(&self, word: &AtomicU32, seen: u32, waited: Duration, most: Duration) -> bool {
        match &self.alarm {
            Some(alarm) if waited >= alarm::LONG => {
                alarm.sleep(word, seen, most);
                true
            }
            _ => {
                self.nap(word, seen, nap(waited));
                false
            }
        }
    }

    fn nap(&self, word: &AtomicU32, seen: u32, time: Duration) {
        if time <= USUAL_NAP {
            return std::thread::sleep(time);
        }
        // Either this thread sees the other's change of the word, or the other sees this store.
        self.dozes.store(1, Ordering::SeqCst);
        if word.load(Ordering::SeqCst) == seen {
            let futex = Futex { patience: time };
            futex.wait(&self.dozes, 1, Duration::ZERO);
        }
        self.dozes.store(0, Ordering::Relaxed);
    }

    /// Makes threads that sleep on the word look at it.
    fn end(&self, word: &AtomicU32) {
        if alarm::ring(word)
            && let Some(alarm) = &self.alarm
        {
            alarm.wake();
        }
        if self.dozes.load(Ordering::SeqCst) != 0 {
            let patience = Duration::ZERO;
            Futex { patience }.ring(&self.dozes);
        }
    }
}

impl Doorbell {
    /// If the thread that sleeps on the word naps, makes it stay awake for a while: another thread waits for what it
    /// reads.
    pub fn hurry(&self, word: &AtomicU32) {
        if let Self::Port { naps, .. } = self {
            naps.end(word);
        }
    }

    /// Makes the threads of this application that sleep on the word look at what there is. The word may meanwhile be
    /// another one, in place of the one in which they asked for their alarm.
    pub fn rouse(&self, word: &AtomicU32) {
        match self {
            Self::Port { naps, .. } => {
                naps.end(word);
                naps.alarm.iter().for_each(Alarm::wake);
            }
            other => other.ring(word),
        }
    }
}

impl Bell for Doorbell {
    fn ring(&self, word: &AtomicU32) {
        match self {
            Self::Futex(futex) => futex.ring(word),
            Self::Port { page, .. } => {
                word.fetch_add(1, Ordering::Release);
                page.ring();
            }
            Self::Gate(gate) => {
                word.fetch_add(1, Ordering::Release);
                gate.drain();
            }
        }
    }

    fn wait(&self, word: &AtomicU32, seen: u32, before: Duration) {
        match self {
            Self::Futex(futex) => futex.wait(word, seen, before),
            Self::Port { patience, naps, .. } => {
                let since = Instant::now();
                while word.load(Ordering::Acquire) == seen {
                    let waited = since.elapsed();
                    if waited >= *patience {
                        return;
                    }
                    if naps.sleep(word, seen, before + waited, *patience - waited) {
                        return;
                    }
                }
            }
            Self::Gate(gate) => gate.wait(|| word.load(Ordering::Acquire) != seen),
        }
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;
    use crate::naps::{LONGEST_NAP, SHORTEST_NAP};

    fn event() -> OwnedFd {
        // SAFETY: no pointers; a fresh descriptor without another owner.
        unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) }
    }

    #[test]
    fn a_worker_that_was_rung_for_before_it_sleeps_does_not_sleep() {
        let events = Arc::new(Events {
            doorbell: event(),
            interrupt: event(),
            patience: Duration::MAX,
        });
        let waker = Waker::Guest(events);
        let word = AtomicU32::new(0);
        waker.own().ring(&word);
        // Would last for ever.
        waker.wait(&word, 0, Duration::ZERO);
    }

    #[test]
    fn a_nap_is_a_share_of_the_wait_within_bounds() {
        assert_eq!(nap(Duration::ZERO), SHORTEST_NAP);
        assert_eq!(nap(Duration::from_millis(8)), Duration::from_micros(500));
        assert_eq!(nap(Duration::from_millis(100)), USUAL_NAP);
        assert_eq!(nap(Duration::from_millis(512)), Duration::from_millis(2));
        assert_eq!(nap(Duration::from_secs(8)), LONGEST_NAP);
    }

    #[test]
    fn a_long_nap_ends_when_another_thread_waits_too() {
        let (naps, word) = (Naps::default(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| naps.nap(&word, 0, Duration::from_secs(86_400)));
            while naps.dozes.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            naps.end(&word);
        });
        // Nor does one begin after that.
        naps.nap(&word, 0, Duration::from_secs(86_400));
    }

    #[test]
    fn a_long_sleep_ends_at_an_interrupt_or_when_another_thread_waits_too() {
        const FOR_EVER: Duration = Duration::from_secs(86_400);
        let (alarm, file) = Alarm::create().unwrap();
        let (agents, naps) = (Alarm::map(&file).unwrap(), Naps::new(Some(alarm)));
        let events = Arc::new(Events {
            doorbell: event(),
            interrupt: event(),
            patience: Duration::MAX,
        });
        let waker = Waker::Guest(Arc::clone(&events));
        let interrupted = || {
            let mut polled = libc::pollfd {
                fd: events.interrupt.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one structure, which outlives the call.
            unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
        };
        let word = AtomicU32::new(0);
        // Nobody who sleeps for long: no interrupt.
        waker.ring(&word);
        assert!(!interrupted());
        for rings in [true, false] {
            let seen = word.load(Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| naps.sleep(&word, seen, alarm::LONG, FOR_EVER));
                while word.load(Ordering::SeqCst) == seen {
                    std::thread::yield_now();
                }
                if rings {
                    waker.ring(&word);
                    assert!(interrupted());
                    agents.wake();
                } else {
                    naps.end(&word);
                }
            });
        }
    }

    fn port(naps: Naps) -> Doorbell {
        let file = crate::mapping::create(8192).unwrap();
        Doorbell::Port {
            page: Arc::new(DoorbellPage::map(&file, 4096).unwrap()),
            naps: Arc::new(naps),
            patience: Duration::from_secs(86_400),
        }
    }

    #[test]
    fn who_sleeps_on_a_window_that_has_gone_is_roused() {
        let (alarm, _) = Alarm::create().unwrap();
        let (bell, word) = (port(Naps::new(Some(alarm))), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| bell.wait(&word, 0, alarm::LONG));
            while word.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            bell.rouse(&AtomicU32::new(0));
        });
    }

    #[test]
    fn an_application_that_was_rung_for_before_it_sleeps_does_not_sleep() {
        let bell = port(Naps::default());
        let word = AtomicU32::new(0);
        bell.ring(&word);
        bell.wait(&word, 0, Duration::ZERO);
    }
}
