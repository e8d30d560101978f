//! The watchdog: resets a machine whose guest no longer writes to it.
//!
//! Its registers are those that the ACPI table WDAT describes ([`arch::acpi::wdat`]). Its time runs
//! only while the machine does.
//!
//! ```text
//!   guest: start, begin anew ──> Watchdog ──> WatchdogTimer (timerfd) ──> control loop
//!                                    ^                                        │
//!                                    └──────────── take_expiry ───────────────┘
//! ```

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arch::acpi::wdat::{MIN_COUNT, PERIOD_MS, registers};
use base::Unpoisoned;
use device_model::bus::BusDevice;
use serde::{Deserialize, Serialize};
use vmm_sys_util::timerfd::TimerFd;

/// The time to which it is set at power-on, in periods: 30 seconds.
const DEFAULT_COUNT: u16 = 300;

const CONTROL: u64 = registers::CONTROL as u64;
const STATUS: u64 = registers::STATUS as u64;
const COUNTDOWN: u64 = registers::COUNTDOWN as u64;
const LEFT: u64 = registers::LEFT as u64;

/// The timer of a process's watchdog. It outlives the machine that the watchdog resets.
#[derive(Debug)]
pub struct WatchdogTimer {
    timer: Mutex<TimerFd>,
    /// The watchdog has reset the machine, and the next one has not been told yet.
    has_reset: AtomicBool,
}

impl WatchdogTimer {
    /// Creates a timer that does not run.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            timer: Mutex::new(TimerFd::new()?),
            has_reset: AtomicBool::new(false),
        })
    }

    /// Forgets that the watchdog has reset a machine: the next one is not started by that.
    pub fn forget_reset(&self) {
        self.has_reset.store(false, Ordering::Relaxed);
    }

    /// A descriptor that is readable from the end of the time until the timer is set again, which
    /// [`Watchdog::take_expiry`] does. Nobody reads it.
    pub fn fd(&self) -> RawFd {
        self.timer.lock_unpoisoned().as_raw_fd()
    }

    /// Starts it anew, or stops it.
    pub fn set(&self, left: Option<Duration>) {
        let mut timer = self.timer.lock_unpoisoned();
        let set = match left {
            // Zero would stop it.
            Some(left) => timer.reset(left.max(Duration::from_nanos(1)), None),
            None => timer.clear(),
        };
        if let Err(error) = set {
            log::error!("the watchdog's timer cannot be set: {error}");
        }
    }
}

/// Saved state of the watchdog.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct WatchdogState {
    /// The time to which it is set, in periods.
    countdown: u16,
    /// The time that is left, in milliseconds, if it runs.
    left_ms: Option<u64>,
    /// It has reset the machine, and the guest has not acknowledged that.
    has_reset: bool,
}

/// The watchdog's registers ([`arch::layout::ACPI_WATCHDOG_PORT_COUNT`] bytes).
#[derive(Debug)]
pub struct Watchdog {
    timer: Arc<WatchdogTimer>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    countdown: u16,
    has_reset: bool,
    /// If it runs, the time that was left at `since`.
    left: Option<Duration>,
    since: Instant,
    /// The machine is paused, as it is at first.
    held: bool,
}

impl State {
    fn left(&self) -> Option<Duration> {
        let passed = match self.held {
            true => Duration::ZERO,
            false => self.since.elapsed(),
        };
        Some(self.left?.saturating_sub(passed))
    }

    fn set_left(&mut self, left: Option<Duration>) {
        self.left = left;
        self.since = Instant::now();
    }

    fn whole(&self) -> Duration {
        Duration::from_millis(u64::from(self.countdown) * u64::from(PERIOD_MS))
    }
}

impl Watchdog {
    /// Creates a watchdog that does not run, of a paused machine.
    pub fn new(timer: Arc<WatchdogTimer>) -> Self {
        let has_reset = timer.has_reset.swap(false, Ordering::Relaxed);
        Self {
            timer,
            state: Mutex::new(State {
                countdown: DEFAULT_COUNT,
                has_reset,
                left: None,
                since: Instant::now(),
                held: true,
            }),
        }
    }

    /// Stops its time, because the machine is paused. At least the minimum is left when it goes on:
    /// a time that ended at this moment must not reset the machine then, nor each of its copies.
    pub fn pause(&self) {
        let mut state = self.lock();
        let minimum = Duration::from_millis(u64::from(MIN_COUNT) * u64::from(PERIOD_MS));
        let left = state.left().map(|left| left.max(minimum));
        state.set_left(left);
        state.held = true;
        self.timer.set(None);
    }

    /// Lets its time go on.
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.held {
            state.held = false;
            let left = state.left;
            self.start(&mut state, left);
        }
    }

    /// To be called when the timer's descriptor is readable. Returns whether the machine has to be
    /// reset: once for each time that the guest was late.
    pub fn take_expiry(&self) -> bool {
        let mut state = self.lock();
        if state.held {
            // It was paused in the meantime.
            self.timer.set(None);
            return false;
        }
        // The guest may have begun the time anew since.
        let left = state.left();
        let expired = left == Some(Duration::ZERO);
        if expired {
            self.timer.has_reset.store(true, Ordering::Relaxed);
        }
        self.start(&mut state, left.filter(|_| !expired));
        expired
    }

    /// Saves the state.
    pub fn save(&self) -> WatchdogState {
        let state = self.lock();
        let left = state.left();
        WatchdogState {
            countdown: state.countdown,
            // At most 6,553,500.
            left_ms: left.map(|left| left.as_millis() as u64),
            has_reset: state.has_reset,
        }
    }

    /// Loads a saved state, which is untrusted, into a watchdog of a paused machine.
    pub fn restore(&self, saved: WatchdogState) {
        let mut state = self.lock();
        state.countdown = saved.countdown.max(MIN_COUNT);
        state.has_reset = saved.has_reset;
        let left = saved.left_ms.map(Duration::from_millis);
        let left = left.map(|left| left.min(state.whole()));
        self.start(&mut state, left);
    }

    fn start(&self, state: &mut State, left: Option<Duration>) {
        state.set_left(left);
        self.timer.set(left.filter(|_| !state.held));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.timer.set(None);
    }
}

impl BusDevice for Watchdog {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.lock();
        let value = match offset {
            CONTROL => u16::from(registers::RUNNING) * u16::from(state.left.is_some()),
            STATUS => u16::from(registers::EXPIRED) * u16::from(state.has_reset),
            COUNTDOWN => state.countdown,
            LEFT => {
                let left = state.left().unwrap_or(Duration::ZERO).as_millis();
                // At most 65,535 periods.
                left.div_ceil(u128::from(PERIOD_MS)) as u16
            }
            _ => 0,
        };
        super::registers::read(&value.to_le_bytes(), 0, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.lock();
        match (offset, data) {
            (CONTROL, [value]) => {
                let runs = *value & registers::RUNNING != 0;
                let left = runs.then(|| state.whole());
                self.start(&mut state, left);
            }
            (STATUS, [_]) => state.has_reset = false,
            (COUNTDOWN, [low, high]) => {
                state.countdown = u16::from_le_bytes([*low, *high]).max(MIN_COUNT);
                let left = state.left.map(|_| state.whole());
                self.start(&mut state, left);
            }
            (LEFT, [_, _]) => {
                let left = state.left.map(|_| state.whole());
                self.start(&mut state, left);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    use super::*;

    fn timer() -> Arc<WatchdogTimer> {
        Arc::new(WatchdogTimer::new().unwrap())
    }

    /// Whether the time ends within `wait`.
    fn ends(timer: &WatchdogTimer, wait: Duration) -> bool {
        let epoll = Epoll::new().unwrap();
        let event = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, timer.fd(), event).unwrap();
        epoll.wait(wait.as_millis() as i32, &mut [event]).unwrap() == 1
    }

    fn read(watchdog: &Watchdog, offset: u64) -> u16 {
        let mut data = [0; 2];
        watchdog.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// A watchdog of a running machine that has `left` to go.
    fn running(timer: &Arc<WatchdogTimer>, left: Duration) -> Watchdog {
        let watchdog = Watchdog::new(Arc::clone(timer));
        watchdog.restore(WatchdogState {
            countdown: DEFAULT_COUNT,
            left_ms: Some(left.as_millis() as u64),
            has_reset: false,
        });
        watchdog.resume();
        watchdog
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_silent_guest_is_reset_once_and_the_next_one_is_told() {
        let timer = timer();
        let watchdog = running(&timer, Duration::from_millis(1));
        assert!(ends(&timer, LONG));
        assert!(watchdog.take_expiry());
        assert!(!ends(&timer, Duration::ZERO));
        assert!(!watchdog.take_expiry());
        assert_eq!(read(&watchdog, CONTROL), 0);
        drop(watchdog);
        let watchdog = Watchdog::new(Arc::clone(&timer));
        assert_eq!(read(&watchdog, STATUS), 1);
        watchdog.write(STATUS, &[0]);
        assert_eq!(read(&watchdog, STATUS), 0);
        drop(watchdog);
        assert_eq!(read(&Watchdog::new(timer), STATUS), 0);
    }

    #[test]
    fn a_guest_that_comes_just_in_time_is_not_reset() {
        let timer = timer();
        let watchdog = running(&timer, Duration::from_millis(1));
        assert!(ends(&timer, LONG));
        watchdog.write(LEFT, &[1, 0]);
        assert!(!watchdog.take_expiry());
        assert_eq!(read(&watchdog, CONTROL), 1);
        watchdog.write(CONTROL, &[0]);
        assert_eq!(read(&watchdog, LEFT), 0);
        watchdog.write(LEFT, &[1, 0]);
        assert_eq!(read(&watchdog, CONTROL), 0);
    }

    #[test]
    fn its_time_stands_still_while_the_machine_does() {
        let timer = timer();
        let watchdog = running(&timer, Duration::from_millis(300));
        watchdog.pause();
        let state = watchdog.save();
        assert_eq!(state.left_ms, Some(1000));
        assert!(!ends(&timer, Duration::from_millis(400)));
        assert!(!watchdog.take_expiry());
        assert_eq!(watchdog.save(), state);
        watchdog.resume();
        assert!(ends(&timer, LONG));
        assert!(watchdog.take_expiry());
    }

    #[test]
    fn a_saved_time_is_never_longer_than_what_it_was_set_to() {
        let watchdog = Watchdog::new(timer());
        let saved = WatchdogState {
            countdown: 0,
            left_ms: Some(u64::MAX),
            has_reset: true,
        };
        watchdog.restore(saved);
        let state = watchdog.save();
        assert_eq!(state.countdown, MIN_COUNT);
        assert_eq!(state.left_ms, Some(1000));
        assert!(state.has_reset);
    }

    proptest! {
        #[test]
        fn no_accesses_make_its_time_longer_than_what_it_is_set_to(
            accesses in prop::collection::vec(
                (0_u64..9, prop::collection::vec(any::<u8>(), 0..5)),
                0..64,
            )
        ) {
            let watchdog = Watchdog::new(timer());
            watchdog.resume();
            for (offset, mut data) in accesses {
                watchdog.write(offset, &data);
                watchdog.read(offset, &mut data);
                let state = watchdog.save();
                prop_assert!(state.countdown >= MIN_COUNT);
                let whole = u64::from(state.countdown) * u64::from(PERIOD_MS);
                prop_assert!(state.left_ms.is_none_or(|left| left <= whole));
            }
        }
    }

    #[test]
    fn odd_accesses_change_nothing() {
        let watchdog = Watchdog::new(timer());
        watchdog.resume();
        watchdog.write(COUNTDOWN, &[0x2c, 1]);
        for (offset, data) in [
            (CONTROL, &[1, 0][..]),
            (CONTROL, &[]),
            (COUNTDOWN, &[1]),
            (COUNTDOWN, &[1, 0, 0, 0]),
            (LEFT, &[1]),
            (7, &[1]),
            (u64::MAX, &[1]),
        ] {
            watchdog.write(offset, data);
        }
        assert_eq!(read(&watchdog, CONTROL), 0);
        assert_eq!(read(&watchdog, COUNTDOWN), 300);
        watchdog.write(COUNTDOWN, &[0, 0]);
        assert_eq!(read(&watchdog, COUNTDOWN), MIN_COUNT);
        let mut data = [0xff; 8];
        watchdog.read(u64::MAX, &mut data);
        watchdog.read(0, &mut []);
        assert_eq!(data, [0; 8]);
        watchdog.write(CONTROL, &[0xff]);
        assert!(read(&watchdog, LEFT) <= MIN_COUNT);
        assert_eq!(read(&watchdog, CONTROL), 1);
    }
}
