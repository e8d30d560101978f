//! Time slices of a worker's contexts, as the arbiter says.

use std::{sync::atomic::Ordering, time::Duration};

use super::{Moment, session::Session};

/// The length of slices that the driver sets by itself.
pub const DRIVERS_SLICE: Duration = Duration::from_micros(2048);
/// How often to look while stopped: whether the stop is to go on, and whether it has ended by itself.
const STOPPED: Duration = Duration::from_millis(20);
/// How often if contexts could not be stopped: a call that waits for them is in progress, or one was just made.
const UNSTOPPED: Duration = Duration::from_millis(2);
/// How often to look otherwise: whether there are new contexts.
const RUNNING: Duration = Duration::from_millis(50);
/// How often to report use where it is read from a record of the device's, while this client and others use it.
const METERED: Duration = Duration::from_millis(10);

/// What this process's contexts have had of the device, by a record of the device's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// In all, without what they have had while nobody else used the device.
    pub total: Duration,
    /// Whether nobody else uses it now.
    pub alone: bool,
}

/// Sets the time slices of this process's contexts, and stops them.
pub trait Slices: Send {
    /// Slices last so long from now on, those of contexts that were made since the last call, too. Nothing is done for
    /// contexts whose slices are right.
    fn set(&mut self, slice: Duration);
    /// Takes all contexts off the device. Returns whether all are.
    fn stop(&mut self) -> bool;
    /// They stay stopped. Returns whether all still are; otherwise none is.
    fn keep(&mut self) -> bool;
    /// They continue.
    fn start(&mut self);
    /// What they have used; `None` if the device keeps no record of that.
    fn used(&mut self) -> Option<Use>;
    /// Nobody asks for that for now.
    fn end_use(&mut self);
    /// The GPUs on which there are contexts, as bits, by the driver's number.
    fn gpus(&self) -> u64;
}

/// The slices of this process, and what they are.
pub(super) struct Sliced {
    slices: Box<dyn Slices>,
    stopped: bool,
    /// Whether slices were set that are not the driver's.
    set: bool,
    /// The number of completed requests at the last look.
    completions: u64,
}

impl Sliced {
    pub(super) fn new(slices: Box<dyn Slices>) -> Self {
        Self {
            slices,
            stopped: false,
            set: false,
            completions: 0,
        }
    }

    /// Does what the arbiter says now, and reports it. Returns after which time to look again; `None`: when the arbiter
    /// says something.
    pub(super) fn obey(&mut self, session: &Session) -> Option<Duration> {
        let (grant, account) = (session.grant(), session.account());
        if !grant.mode().is_slices() {
            self.release();
            account.stopped.store(0, Ordering::Relaxed);
            account.is_metered.store(0, Ordering::Relaxed);
            let gpus = self.slices.gpus();
            account.gpus.store(gpus, Ordering::Relaxed);
            // Those with contexts on several GPUs keep everybody in turns.
            return (gpus.count_ones() > 1).then_some(RUNNING);
        }
        let begin = Moment::now();
        let until = Moment::from_nanos(grant.stopped_until.load(Ordering::Acquire));
        match (until > begin, self.stopped) {
            (true, true) => self.stopped = self.slices.keep(),
            (true, false) => self.stopped = self.slices.stop(),
            (false, _) => self.start(),
        }
        let micros = grant.time_slice.load(Ordering::Relaxed);
        if micros != 0 {
            self.set = true;
            self.slices.set(Duration::from_micros(micros.into()));
        }
        let took = Moment::now().since(begin).as_nanos() as u64;
        account.switching.fetch_add(took, Ordering::Relaxed);
        account
            .stopped
            .store(self.stopped.into(), Ordering::Relaxed);
        account.gpus.store(self.slices.gpus(), Ordering::Relaxed);
        let is_metered = match self.slices.used() {
            Some(used) => {
                let total = used.total.as_nanos() as u64;
                account.metered.store(total, Ordering::Relaxed);
                !used.alone
            }
            None => false,
        };
        account
            .is_metered
            .store(is_metered.into(), Ordering::Release);
        let completions = account.completions.load(Ordering::Relaxed);
        let before = std::mem::replace(&mut self.completions, completions);
        let has_work = before != completions || account.oldest_since.load(Ordering::Relaxed) != 0;
        Some(match until > begin {
            true if self.stopped => STOPPED,
            true => UNSTOPPED,
            false if is_metered && has_work => METERED,
            false => RUNNING,
        })
    }

    fn start(&mut self) {
        if std::mem::take(&mut self.stopped) {
            self.slices.start();
        }
    }

    /// Starts what is stopped, gives slices the driver's length, and reads no record.
    pub(super) fn release(&mut self) {
        self.slices.end_use();
        self.start();
        if std::mem::take(&mut self.set) {
            self.slices.set(DRIVERS_SLICE);
        }
    }
}
