//! Operations that wait until storage has answered: what is in flight writes to the guest's memory, so the machine is
//! neither stopped nor dropped before. The control thread looks at a timer, and serves requests meanwhile.
//!
//! ```text
//!   vm.pause, vm.shutdown, ...  ──>  nothing new begins  ──nothing is in flight──>  it is carried out
//!   the guest's own end                └──after 20 s──> refused, and the guest goes on (not if it has asked for its end)
//! ```

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    time::{Duration, Instant},
};

use devices::pci::Bdf;
use vmm_api::{ApiError, Handler, InProgress, Operation, Reply, Request, Response};
use vmm_machine::error::MachineError;
use vmm_snapshot::lazy::Question;
use vmm_sys_util::timerfd::TimerFd;

use super::{
    Control,
    booting::Booter,
    life::{Life, RunState},
    migration::OVER,
    requests::failed,
};

/// Time limit for storage to answer before a client's request is refused.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Interval for looking at what is in flight, at first and later: storage that works answers within milliseconds.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(20);

/// Operations that wait for storage.
pub(super) struct StorageWaits {
    timer: TimerFd,
    /// When the timer expires, if it is armed.
    due: Option<Instant>,
    /// The operation on the machine.
    wait: Option<Wait>,
    /// Slots that the guest has given up, with devices whose requests are in flight.
    ejected: Vec<(Bdf, Question)>,
    /// Requests that have ended a machine, and since when they wait until it is gone.
    ended: Vec<(Instant, Reply)>,
}

/// What a guest has asked for, which ends its machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum GuestWish {
    /// To start anew.
    Reset,
    /// To be powered off.
    PowerOff,
}

struct Wait {
    /// The client's request; `None` if only the guest has asked.
    request: Option<(Request, Reply)>,
    /// What the guest has asked for, which follows if the request is refused.
    wish: Option<GuestWish>,
    /// The vCPUs were stopped for the request, and go on if it is refused.
    stopped: bool,
    since: Instant,
    /// What has not answered.
    for_what: String,
    /// Whether memory that is restored on demand comes.
    question: Question,
}

impl StorageWaits {
    /// Nothing waits.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            timer: TimerFd::new()?,
            due: None,
            wait: None,
            ejected: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Becomes readable when it is time to look.
    pub(super) fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// What `vm.info` says about the operation.
    pub(super) fn progress(&self) -> Option<InProgress> {
        let wait = self.wait.as_ref()?;
        Some(InProgress {
            operation: wait.operation(),
            done_bytes: None,
            total_bytes: None,
            waits_for: Some(wait.for_what.clone()),
        })
    }

    /// Keeps a slot until its storage has answered.
    fn leaves_later(&mut self, slot: Bdf, question: Question) {
        if !self.ejected.iter().any(|(other, _)| *other == slot) {
            self.ejected.push((slot, question));
        }
        self.arm();
    }

    /// Arms the timer. Never postpones it: the guest causes this as often as it likes.
    fn arm(&mut self) {
        let interval = match &self.wait {
            Some(wait) if wait.since.elapsed() < LATER => SOON,
            _ => LATER,
        };
        let at = Instant::now() + interval;
        if self.due.is_some_and(|due| due <= at) {
            return;
        }
        match self.timer.reset(interval, None) {
            Ok(()) => self.due = Some(at),
            Err(error) => log::error!("waiting for storage does not work: {error}"),
        }
    }
}

impl Wait {
    fn operation(&self) -> Operation {
        match &self.request {
            None if self.wish == Some(GuestWish::PowerOff) => Operation::Shutdown,
            None => Operation::Reset,
            Some((Request::VmPause, _)) => Operation::Pause,
            Some((Request::VmShutdown, _)) => Operation::Shutdown,
            Some((Request::VmReboot, _)) => Operation::Reboot,
            Some((Request::VmDelete, _)) => Operation::Delete,
            Some(_) => Operation::RemoveDevice,
        }
    }
}

/// Whether a request ends the machine.
fn ends(request: &Request) -> bool {
    matches!(
        request,
        Request::VmShutdown | Request::VmReboot | Request::VmDelete
    )
}

/// Whether a request stops the machine or one of its devices, and so waits for storage.
pub(super) fn waits(request: &Request) -> bool {
    match request {
        Request::VmPause => true,
        Request::VmRemoveDevice(device) => device.force && !device.cancel,
        request => ends(request),
    }
}

impl Control {
    /// Refuses requests that would change the machine, except its end, while it waits for storage.
    pub(super) fn refuse_if_waiting(&self, request: &Request) -> Result<(), ApiError> {
        let Some(wait) = &self.storage.wait else {
            return Ok(());
        };
        let takes_over = wait.request.is_none() && ends(request);
        if takes_over || super::migration::is_allowed(request) {
            return Ok(());
        }
        let what = match wait.operation() {
            Operation::Pause => "is being paused",
            Operation::RemoveDevice => "has a device that is being removed",
            _ => "is being reset or powered off",
        };
        Err(ApiError::wrong_state(format!(
            "the VM {what}, and waits for storage: {} (vm.info shows when that is over)",
            wait.for_what
        )))
    }

    /// Carries out a request that stops the machine or one of its devices, when storage has answered.
    pub(super) fn when_quiet(&mut self, request: Request, reply: Reply) {
        let allowed = self.refuse_if_frozen(&request);
        let wish = self.storage.wait.take().and_then(|wait| wait.wish);
        let stopped = match (&mut self.life, allowed) {
            (Life::Live { machine, run, .. }, Ok(())) => {
                let is_running = *run == RunState::Running;
                let pauses = matches!(request, Request::VmPause);
                // A paused VM is refused another pause.
                (is_running || !pauses).then(|| {
                    if pauses {
                        self.monitor.emit("vm", "pausing", &[]);
                    }
                    // The other devices of a VM that only loses one stay in use.
                    let stops = is_running && (pauses || ends(&request));
                    if stops {
                        machine.stop();
                    }
                    stops
                })
            }
            _ => None,
        };
        match stopped {
            Some(stopped) => self.wait_for_storage(Some((request, reply)), wish, stopped),
            // Refused, or done at once.
            None => {
                let is_end = ends(&request);
                let answer = self.handle(request);
                self.reply_when_gone(is_end, reply, answer);
            }
        }
    }

    /// Replies, to a request that ends a machine when that is gone, so that others can use its files.
    fn reply_when_gone(&mut self, is_end: bool, reply: Reply, answer: Result<Response, ApiError>) {
        if answer.is_ok() && is_end && !self.ends.is_empty_within(Duration::ZERO) {
            self.storage.ended.push((Instant::now(), reply));
            self.storage.arm();
        } else {
            reply.send(answer);
        }
    }

    /// Replies to requests whose machines are gone, or whose storage does not answer.
    fn reply_to_ended(&mut self) {
        let is_gone = self.ends.is_empty_within(Duration::ZERO);
        for (since, reply) in std::mem::take(&mut self.storage.ended) {
            if is_gone || since.elapsed() >= PATIENCE {
                if !is_gone {
                    log::warn!("files of the VM stay in use until their storage answers");
                }
                reply.send(Ok(Response::Empty));
            } else {
                self.storage.ended.push((since, reply));
                self.storage.arm();
            }
        }
    }

    /// Ends the machine, as its guest has asked for, when storage has answered. The guest goes no further.
    pub(super) fn end_when_quiet(&mut self, wish: GuestWish) {
        if let Some(machine) = self.life.machine_mut() {
            machine.stop();
        }
        if let Some(wait) = &mut self.storage.wait {
            // Nothing is left of a VM that is to be paused.
            if !wait
                .request
                .as_ref()
                .is_some_and(|(request, _)| ends(request))
                && let Some((_, reply)) = wait.request.take()
            {
                reply.send(Err(ApiError::wrong_state(OVER)));
            }
            wait.wish = Some(wish);
            return;
        }
        self.wait_for_storage(None, Some(wish), false);
    }

    fn wait_for_storage(
        &mut self,
        request: Option<(Request, Reply)>,
        wish: Option<GuestWish>,
        stopped: bool,
    ) {
        self.storage.wait = Some(Wait {
            request,
            wish,
            stopped,
            since: Instant::now(),
            for_what: String::new(),
            question: Question::default(),
        });
        self.look_at_storage();
    }

    /// Carries out what waits for storage that has answered.
    pub(super) fn storage_work(&mut self) {
        // Clears the timer; it is armed again if anything still waits.
        let _ = self.storage.timer.wait();
        self.storage.due = None;
        for (slot, question) in std::mem::take(&mut self.storage.ejected) {
            self.ejected_when_quiet(slot, question);
        }
        self.cpus_leave();
        self.reply_to_ended();
        self.look_at_storage();
    }

    fn look_at_storage(&mut self) {
        let Some(mut wait) = self.storage.wait.take() else {
            return;
        };
        let waited = wait.since.elapsed();
        match self.hold(&mut wait, waited) {
            Ok(()) if wait.stopped && matches!(wait.request, Some((Request::VmPause, _))) => {
                // What the guest has asked for until now comes first: a VM that is paused is not reset any more.
                self.storage.wait = Some(wait);
                self.machine_events();
                if self.exit.is_some() {
                    self.abandon_storage_waits();
                } else if let Some(wait) = self.storage.wait.take() {
                    self.go_on(wait);
                }
            }
            Ok(()) => self.go_on(wait),
            Err(error) if wait.request.is_some() && waited >= PATIENCE => {
                self.give_up_waiting(wait, &error);
            }
            Err(error) => {
                if wait.for_what.is_empty() {
                    log::info!("waiting for storage: {}", base::Chain(&error));
                }
                wait.for_what = base::Chain(&error).to_string();
                self.storage.wait = Some(wait);
                self.storage.arm();
            }
        }
    }

    /// Holds back new requests to storage; fails as long as some are in flight.
    fn hold(&mut self, wait: &mut Wait, waited: Duration) -> Result<(), MachineError> {
        let Some(machine) = self.life.machine_mut() else {
            return Ok(());
        };
        match &wait.request {
            Some((Request::VmRemoveDevice(device), _)) => {
                // Whatever is wrong with the request is found out when it is carried out.
                match machine.devices().removable(&device.id) {
                    Ok(slot) => {
                        machine.devices().hold_in(slot, waited)?;
                        machine.check_memory_comes(&mut wait.question)
                    }
                    Err(_) => Ok(()),
                }
            }
            Some((Request::VmPause, _)) => {
                machine.hold(waited)?;
                machine.check_memory_comes(&mut wait.question)
            }
            _ => machine.hold(waited),
        }
    }

    fn go_on(&mut self, wait: Wait) {
        match wait.request {
            Some((Request::VmReboot, reply)) => match self.end_for_reboot() {
                Ok(()) => self.boot_later(Booter::Reboot(reply)),
                Err(error) => {
                    self.let_go(wait.wish, wait.stopped);
                    reply.send(Err(error));
                }
            },
            Some((request, reply)) => {
                let is_end = ends(&request);
                let answer = self.handle(request);
                if answer.is_err() {
                    self.let_go(wait.wish, wait.stopped);
                }
                self.reply_when_gone(is_end, reply, answer);
            }
            None => {
                let ended = match wait.wish {
                    Some(GuestWish::PowerOff) => {
                        // A disk that has grown may not have been answered for.
                        self.end_writing();
                        self.handle(Request::VmShutdown).map(drop)
                    }
                    _ => self.end_for_reboot(),
                };
                match ended {
                    Ok(()) if wait.wish != Some(GuestWish::PowerOff) => {
                        self.boot_later(Booter::Guest);
                    }
                    Ok(()) => {}
                    Err(error) => self.guest_has_no_machine(&error),
                }
            }
        }
    }

    /// Refuses a request whose storage does not answer; the guest goes on, unless it has asked for its end.
    fn give_up_waiting(&mut self, wait: Wait, error: &MachineError) {
        let Some((_, reply)) = wait.request else {
            return;
        };
        self.let_go(wait.wish, wait.stopped);
        reply.send(Err(failed(error)));
    }

    /// Lets go what was held for a request that is refused, unless the guest has asked for its end.
    fn let_go(&mut self, wish: Option<GuestWish>, stopped: bool) {
        if wish.is_some() {
            return self.wait_for_storage(None, wish, false);
        }
        let Some(machine) = self.life.machine_mut() else {
            return;
        };
        machine.devices().carry_on();
        if stopped && let Err(error) = machine.resume() {
            log::error!(
                "after a request that was refused, the guest does not go on: {}",
                base::Chain(&error)
            );
        }
    }

    /// Handles that the guest has given up a slot, when the requests of the devices there have been answered.
    pub(super) fn ejected_when_quiet(&mut self, slot: Bdf, mut question: Question) {
        let held = self.life.machine_mut().map(|machine| {
            machine.devices().hold_in(slot, Duration::ZERO)?;
            machine.check_memory_comes(&mut question)
        });
        match held {
            Some(Err(error)) => {
                log::debug!("{slot} leaves later: {}", base::Chain(&error));
                self.storage.leaves_later(slot, question);
            }
            _ => {
                self.ejected(slot);
                // Of a slot that stays, or that has another device by now.
                if let Some(machine) = self.life.machine_mut() {
                    machine.devices().carry_on_in(slot);
                }
            }
        }
    }

    /// Reports vCPUs that the guest has given up and that are gone, and looks again later if others are in an access.
    pub(super) fn cpus_leave(&mut self) {
        let Some(machine) = self.life.machine_mut() else {
            return;
        };
        let (left, are_others) = machine.left_cpus();
        for vcpu in left {
            log::info!("the guest has given up vCPU {vcpu}");
            self.monitor
                .emit("vm", "vcpu-removed", &[("vcpu", &vcpu.to_string())]);
        }
        if are_others {
            self.storage.arm();
        }
    }

    /// Forgets what has waited for the storage of a machine that is gone.
    pub(super) fn abandon_storage_waits(&mut self) {
        self.storage.ejected.clear();
        if let Some(Wait {
            request: Some((_, reply)),
            ..
        }) = self.storage.wait.take()
        {
            reply.send(Err(ApiError::wrong_state(OVER)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_ejects_all_the_time_keeps_nobody_waiting() {
        let mut waits = StorageWaits::new().unwrap();
        let mut timer = libc::pollfd {
            fd: waits.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let slots = [1, 2].map(|device| Bdf {
            segment: 0,
            bus: 0,
            device,
            function: 0,
        });
        for slot in slots.iter().cycle().take(10_000) {
            waits.leaves_later(*slot, Question::default());
            // SAFETY: the array of one outlives the call.
            if unsafe { libc::poll(&raw mut timer, 1, 1) } == 1 {
                assert_eq!(waits.ejected, slots.map(|slot| (slot, Question::default())));
                return;
            }
        }
        panic!("it is never time to look");
    }
}
