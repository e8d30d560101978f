//! The loop around `KVM_RUN`.
//!
//! A vCPU's thread owns its [`Vcpu`] while it is in the guest. Others ask for something by
//! setting a wish and kicking the vCPU; the thread notices after the next exit:
//!
//! ```text
//!          wish = Run          wish = Stop
//!   parked ───────────> guest ───────────> thread ends and gives its `Vcpu` back
//!      ^                  │
//!      └──────────────────┘
//!          wish = Park      (requests are carried out while parked)
//! ```
//!
//! Besides, a device can freeze the vCPU that is just accessing it: it parks, whatever the wish is,
//! until somebody thaws it.

use std::{
    cell::RefCell,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use devices::thread::{ThreadRole, ThreadSpawner, pin_current_thread};
use hypervisor::{Exit, Exits, Kicker, Vcpu};

use super::memory_faults::{DeviceMemory, MemoryFaults};

/// What a vCPU reports to the machine's control loop.
#[derive(Debug)]
pub enum CpuEvent {
    /// The guest reset itself with a triple fault.
    Reset,
    /// The vCPU cannot go on; the guest is lost.
    Failed(hypervisor::Error),
}

/// Where vCPU threads report to; called on their threads.
pub type ReportCpuEvent = Arc<dyn Fn(CpuEvent) + Send + Sync>;

const PARK: u8 = 0;
const RUN: u8 = 1;
const STOP: u8 = 2;

/// Work that a parked vCPU's thread does on its vCPU.
type Request = Box<dyn FnOnce(&mut Vcpu) + Send>;

#[derive(Default)]
struct Parking {
    parked: bool,
    request: Option<Request>,
}

struct Shared {
    /// One of PARK, RUN, STOP: read after every exit without a lock.
    wish: AtomicU8,
    /// Parked whatever the wish is, unless that is to stop.
    frozen: AtomicBool,
    /// Microseconds for which the vCPU is to stay out of the guest: one relaxed load after every
    /// exit.
    nap: AtomicU32,
    parking: Mutex<Parking>,
    changed: Condvar,
}

impl Shared {
    fn parking(&self) -> MutexGuard<'_, Parking> {
        self.parking.lock_unpoisoned()
    }

    /// Stays out of the guest for as long as a [`Napper`] has asked for.
    fn nap(&self) {
        let nap = self.nap.swap(0, Ordering::Relaxed);
        self.stay_out(Duration::from_micros(nap.into()));
    }

    /// Stays out of the guest for so long, unless something else is wished.
    fn stay_out(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut parking = self.parking();
        while self.wish.load(Ordering::SeqCst) == RUN {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(parking, left);
            parking = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn wait<'a>(&self, guard: MutexGuard<'a, Parking>) -> MutexGuard<'a, Parking> {
        self.changed
            .wait(guard)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A vCPU on its thread.
pub struct VcpuThread {
    shared: Arc<Shared>,
    kicker: Kicker,
    thread: JoinHandle<()>,
    returned: mpsc::Receiver<Vcpu>,
}

impl VcpuThread {
    /// Starts a thread for `vcpu`, parked.
    pub fn spawn<E: Exits + Send + Sync + 'static>(
        vcpu: Vcpu,
        exits: Arc<E>,
        report: ReportCpuEvent,
        devices: Arc<dyn DeviceMemory>,
        affinity: Option<Vec<usize>>,
        spawner: &dyn ThreadSpawner,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            wish: AtomicU8::new(PARK),
            frozen: AtomicBool::new(false),
            nap: AtomicU32::new(0),
            parking: Mutex::default(),
            changed: Condvar::new(),
        });
        let kicker = vcpu.kicker();
        let (sender, returned) = mpsc::sync_channel(1);
        let name = format!("vcpu{}", vcpu.id());
        let of_thread = Arc::clone(&shared);
        let body = move || {
            let mut vcpu = vcpu;
            vcpu.enter_thread();
            CURRENT.set(Some(Arc::clone(&of_thread)));
            // A failure costs only speed.
            if let Some(cpus) = affinity
                && let Err(error) = pin_current_thread(&cpus)
            {
                let id = vcpu.id();
                log::warn!("vCPU {id} is not pinned to host CPUs {cpus:?}: {error}");
            }
            let faults = MemoryFaults::new(devices);
            run(&mut vcpu, &*exits, &report, faults, &of_thread);
            // A send fails only when nobody waits for the vCPU any more.
            let _ = sender.send(vcpu);
        };
        let thread = spawner.spawn(ThreadRole::Vcpu, &name, Box::new(body))?;
        Ok(Self {
            shared,
            kicker,
            thread,
            returned,
        })
    }

    /// Lets the vCPU enter the guest.
    pub fn resume(&self) {
        self.wish(RUN);
    }

    /// Whether a device has frozen the vCPU.
    pub fn is_frozen(&self) -> bool {
        self.shared.frozen.load(Ordering::SeqCst)
    }

    /// Lets a vCPU that is frozen do again what is wished.
    pub fn thaw(&self) {
        set_frozen(&self.shared, false);
    }

    /// Has the vCPU stay out of the guest for a while, from any thread.
    pub fn napper(&self) -> Napper {
        Napper {
            shared: Arc::clone(&self.shared),
            kicker: self.kicker.clone(),
        }
    }

    /// Asks the vCPU to leave the guest; [`VcpuThread::wait_parked`] waits until it has.
    pub fn request_park(&self) {
        self.wish(PARK);
        self.kicker.kick();
    }

    /// Waits until the vCPU is out of the guest and its last access is complete.
    pub fn wait_parked(&self) {
        let mut parking = self.shared.parking();
        while !parking.parked {
            parking = self.shared.wait(parking);
        }
    }

    /// The same, at most until then; false if it still is not.
    pub fn wait_parked_until(&self, deadline: Instant) -> bool {
        let mut parking = self.shared.parking();
        while !parking.parked {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(parking, left);
            parking = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the vCPU is on its way into the guest; false if it still is not by then.
    pub fn wait_running(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut parking = self.shared.parking();
        while parking.parked {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.thread.is_finished() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(parking, left);
            parking = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Does `work` on the parked vCPU, on its own thread, and returns what it returns.
    ///
    /// KVM expects ioctls on a vCPU from the thread that runs it: others are slow, and the
    /// thread's seccomp filter is the one that allows them.
    pub fn with<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Vcpu) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, result) = mpsc::sync_channel(1);
        let mut parking = self.shared.parking();
        if !parking.parked {
            return None;
        }
        parking.request = Some(Box::new(move |vcpu: &mut Vcpu| {
            // The receiver waits below.
            let _ = sender.send(work(vcpu));
        }));
        drop(parking);
        self.shared.changed.notify_all();
        result.recv().ok()
    }

    /// Asks the thread to end, which it does when the vCPU's last access is complete.
    pub fn request_stop(&self) {
        self.wish(STOP);
        self.kicker.kick();
    }

    /// Waits until a thread that was asked to end gives the vCPU back (`None` if it died), at most until then.
    ///
    /// # Errors
    /// The vCPU is in an access.
    pub fn stopped_until(self, deadline: Instant) -> Result<Option<Vcpu>, Self> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.returned.recv_timeout(left) {
            Ok(vcpu) => {
                self.join();
                Ok(Some(vcpu))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                self.join();
                Ok(None)
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self),
        }
    }

    /// Ends the thread and gives the vCPU back; `None` if the thread died. Waits for the vCPU's last access.
    pub fn stop(self) -> Option<Vcpu> {
        self.request_stop();
        let vcpu = self.returned.recv().ok();
        self.join();
        vcpu
    }

    /// Waits for a thread that has given its vCPU back, or died.
    fn join(self) {
        if self.thread.join().is_err() {
            log::error!("a vCPU thread panicked");
        }
    }

    fn wish(&self, wish: u8) {
        let _parking = self.shared.parking();
        self.shared.wish.store(wish, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }
}

/// See [`VcpuThread::napper`].
pub struct Napper {
    shared: Arc<Shared>,
    kicker: Kicker,
}

impl Napper {
    /// The vCPU leaves the guest and comes back after so long.
    pub fn nap(&self, time: Duration) {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        self.shared.nap.store(micros, Ordering::Relaxed);
        self.kicker.kick();
    }
}

thread_local! {
    /// Of the vCPU that this thread runs.
    static CURRENT: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// Freezes or thaws the vCPU whose access is just handled, on its own thread; false if the calling
/// thread has none.
pub fn freeze_current(frozen: bool) -> bool {
    CURRENT.with_borrow(|current| {
        if let Some(shared) = current {
            set_frozen(shared, frozen);
        }
        current.is_some()
    })
}

fn set_frozen(shared: &Shared, frozen: bool) {
    let _parking = shared.parking();
    shared.frozen.store(frozen, Ordering::SeqCst);
    shared.changed.notify_all();
}

/// The thread's body.
fn run(
    vcpu: &mut Vcpu,
    exits: &impl Exits,
    report: &ReportCpuEvent,
    mut faults: MemoryFaults,
    shared: &Shared,
) {
    let mut ran = false;
    loop {
        match shared.wish.load(Ordering::SeqCst) {
            STOP => return,
            RUN if !shared.frozen.load(Ordering::SeqCst) => {}
            _ => {
                // What KVM still has to hand to the guest for the last access: without it a saved
                // state would miss the result of a read.
                if ran && let Err(error) = vcpu.complete_access(exits) {
                    report(CpuEvent::Failed(error));
                }
                park(vcpu, shared);
                continue;
            }
        }
        if shared.nap.load(Ordering::Relaxed) != 0 {
            shared.nap();
            continue;
        }
        ran = true;
        match vcpu.run(exits) {
            Ok(Exit::Handled) => {}
            Ok(Exit::Interrupted) => vcpu.clear_kick(),
            Ok(Exit::Shutdown) => {
                report(CpuEvent::Reset);
                give_up(shared);
            }
            // With the in-kernel local APIC a halted vCPU waits inside of KVM_RUN.
            Ok(Exit::Halted | Exit::Debug) => {}
            Ok(Exit::MemoryFault { address }) => match faults.pause(vcpu.id(), address) {
                Ok(pause) => shared.stay_out(pause),
                Err(error) => {
                    report(CpuEvent::Failed(error));
                    give_up(shared);
                }
            },
            Err(error) => {
                report(CpuEvent::Failed(error));
                give_up(shared);
            }
        }
    }
}

/// Waits until the vCPU may run again, and does what it is asked meanwhile.
fn park(vcpu: &mut Vcpu, shared: &Shared) {
    let mut parking = shared.parking();
    parking.parked = true;
    shared.changed.notify_all();
    while match shared.wish.load(Ordering::SeqCst) {
        STOP => false,
        RUN => shared.frozen.load(Ordering::SeqCst),
        _ => true,
    } {
        if let Some(request) = parking.request.take() {
            drop(parking);
            request(vcpu);
            parking = shared.parking();
        } else {
            parking = shared.wait(parking);
        }
    }
    parking.parked = false;
    drop(parking);
    shared.changed.notify_all();
}

/// Out of the guest until the machine decides what to do with it.
fn give_up(shared: &Shared) {
    let _parking = shared.parking();
    // A wish to stop that came in between stays.
    let _ = shared
        .wish
        .compare_exchange(RUN, PARK, Ordering::SeqCst, Ordering::SeqCst);
}
