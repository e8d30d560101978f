//! Saves snapshots with accelerators' applications. A separate thread waits for the workers. Meanwhile the control
//! thread serves requests, but refuses those that would change the machine.
//!
//! ```text
//!   control thread                     thread
//!   the directory is locked     ──>    workers stop, and save
//!   the machine is written      <──
//! ```
//!
//! Programs with native contexts are suspended by their guest, which has to run for that. So a VM with a port for them
//! is saved while it runs: it is paused when they are suspended, and resumed when it is written.

use std::mem;

use base::Cancel;
use devices::accel::saved::{Standing, Stopped};
use vmm_api::{ApiError, Handler, Reply, Request, Response, VmSnapshotConfig};
use vmm_machine::{applications, error::MachineError, save::Saving};

use super::{
    Control,
    life::{Life, RunState},
    migration::{Job, OVER, host_error},
    requests::failed,
};

/// A snapshot that waits for workers.
pub(super) struct Workers {
    /// Number of the wait.
    pub(super) number: u64,
    cancel: Cancel,
    reply: Reply,
    then: Then,
}

/// What follows when they have stopped.
enum Then {
    /// The machine is written.
    Write(Saving),
    /// The running machine is paused, and then saved.
    Pause(VmSnapshotConfig),
}

impl Control {
    /// `vm.snapshot` with `accel=save`: replies when everything is written.
    pub(super) fn save_with_applications(&mut self, snapshot: &VmSnapshotConfig, reply: Reply) {
        let suspends = self.refuse_if_moving().and_then(|()| {
            let suspends = self.suspends_programs()?;
            if !suspends {
                self.on_paused("saved", |_, _| Ok(()))?;
            }
            Ok(suspends)
        });
        let suspends = match suspends {
            Ok(suspends) => suspends,
            Err(error) => return reply.send(Err(error)),
        };
        let of_then = snapshot.clone();
        let then = move |control: &mut Self, saving: Option<Saving>, reply: Reply| {
            let then = match saving {
                None => Ok(Then::Pause(of_then)),
                Some(saving) => {
                    let begun = control.begin_snapshot(of_then.detach);
                    begun.map(|()| Then::Write(saving))
                }
            };
            match then {
                Ok(then) => control.wait_for_workers(then, reply),
                Err(error) => reply.send(Err(error)),
            }
        };
        self.with_folder(snapshot, !suspends, then, reply);
    }

    /// Whether the guest, which runs, is to suspend programs first.
    fn suspends_programs(&self) -> Result<bool, ApiError> {
        let Life::Live { machine, run, .. } = &self.life else {
            return Ok(false);
        };
        let ports = machine.devices().ports();
        match run {
            RunState::Running => Ok(ports.iter().any(|(_, port)| port.is_native())),
            RunState::Paused if ports.iter().any(|(_, port)| port.has_native_programs()) => {
                Err(ApiError::wrong_state(
                    "programs of the guest use native contexts, and a guest that is paused cannot suspend them: resume \
                     the VM, and save it while it runs",
                ))
            }
            RunState::Paused => Ok(false),
        }
    }

    fn wait_for_workers(&mut self, then: Then, reply: Reply) {
        let number = self.migrations.number();
        let cancel = Cancel::default();
        match self.start_wait(number, &then, cancel.clone()) {
            Ok(()) => {
                self.migrations.job = Job::Workers(Workers {
                    number,
                    cancel,
                    reply,
                    then,
                });
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Starts the waiting thread.
    fn start_wait(&mut self, number: u64, then: &Then, cancel: Cancel) -> Result<(), ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let host = |error| host_error("wait for workers", &error);
        let control = self.migrations.on_control().map_err(host)?;
        let mut ports = machine.devices().ports();
        match then {
            Then::Write(saving) => {
                let archive = saving.archive();
                self.start_thread(move || {
                    let saved = archive().and_then(|mut archive| {
                        let standing = applications::stop(ports, cancel);
                        standing.and_then(|all| Ok(all.save(&mut archive)?))
                    });
                    control.ask(move |control| control.workers_are_ready(number, saved));
                })
            }
            Then::Pause(_) => {
                let others = ports.extract_if(.., |(_, port)| !port.is_native());
                let others: Vec<_> = others.collect();
                self.start_thread(move || {
                    // An obstacle of others is known before anything stops.
                    let movable = applications::check_movable(&others, cancel.clone());
                    let suspended = movable.and_then(|()| applications::stop(ports, cancel));
                    control.ask(move |control| control.programs_are_suspended(number, suspended));
                })
            }
        }
    }

    /// Handles the end of a wait for workers.
    fn workers_are_ready(&mut self, number: u64, ready: Result<Stopped, MachineError>) {
        if let Some((Then::Write(saving), reply, _)) = self.end_wait(number) {
            // The applications continue when everything is written.
            match ready {
                Ok(stopped) => self.write_snapshot(saving, Some(stopped), reply),
                Err(error) => reply.send(Err(failed(&error))),
            }
        }
    }

    /// Handles the end of a wait for the guest: its programs are suspended until it is saved.
    fn programs_are_suspended(&mut self, number: u64, suspended: Result<Standing, MachineError>) {
        let Some((Then::Pause(snapshot), reply, cancel)) = self.end_wait(number) else {
            return;
        };
        let suspended = match suspended {
            Ok(_) if cancel.is_cancelled() => {
                let why = "the VM is not saved: it was cancelled";
                return reply.send(Err(ApiError::wrong_state(why)));
            }
            Ok(suspended) => suspended,
            Err(error) => return reply.send(Err(failed(&error))),
        };
        self.follow(Request::VmPause, |control, paused| {
            if let Err(error) = paused {
                return reply.send(Err(error));
            }
            control.follow(Request::VmSnapshot(snapshot), |control, saved| {
                // Programs are resumed when the guest runs.
                drop(suspended);
                control.follow(Request::VmResume, |_, resumed| {
                    reply.send(saved.and_then(|answer| resumed.map(|_| answer)));
                });
            });
        });
    }

    /// Carries out a request as if a client had sent it, and then something else.
    fn follow(
        &mut self,
        request: Request,
        then: impl FnOnce(&mut Self, Result<Response, ApiError>) + Send + 'static,
    ) {
        match self.migrations.on_control() {
            Ok(own) => {
                let reply =
                    Reply::new(move |answer| own.tell(move |control| then(control, answer)));
                self.take(request, reply);
            }
            Err(error) => then(self, Err(host_error("save the VM", &error))),
        }
    }

    /// What follows a wait, whom to answer, and whether it was cancelled, unless the wait is over already.
    fn end_wait(&mut self, number: u64) -> Option<(Then, Reply, Cancel)> {
        if !self.migrations.is_current(number) {
            return None;
        }
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Workers(Workers {
                then,
                reply,
                cancel,
                ..
            }) => Some((then, reply, cancel)),
            other => {
                self.migrations.job = other;
                None
            }
        }
    }

    /// Abandons the wait, because the machine is replaced.
    pub(super) fn abandon_workers(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Workers(Workers { cancel, reply, .. }) => {
                cancel.cancel();
                reply.send(Err(ApiError::wrong_state(OVER)));
            }
            other => self.migrations.job = other,
        }
    }

    /// Cancels all waits for workers, and other jobs in progress except migrations.
    pub(super) fn cancel_waits(&mut self) -> Result<Response, ApiError> {
        let job = match &self.migrations.job {
            Job::Workers(workers) => Some(&workers.cancel),
            Job::Writing(written) if self.moves.is_empty() => {
                return written.cancel().map(|()| Response::Empty);
            }
            Job::Booting(_) => {
                self.cancel_boot();
                return Ok(Response::Empty);
            }
            Job::Restoring(_) => {
                self.cancel_restore();
                return Ok(Response::Empty);
            }
            _ => None,
        };
        let moves = self.moves.values().filter(|moving| !moving.has_gone());
        let moves = moves.map(|moving| &moving.cancel);
        let all: Vec<_> = job.into_iter().chain(moves).collect();
        if all.is_empty() {
            if let Job::Writing(written) = &self.migrations.job {
                return written.cancel().map(|()| Response::Empty);
            }
            if self.forget_disks("the disk is not added: it was cancelled") {
                return Ok(Response::Empty);
            }
            return Err(ApiError::wrong_state(match self.moves.is_empty() {
                true => "no migration is going on",
                false => {
                    "the applications have moved, and contents of their memory follow (vm.move-accel answers when all \
                     have come): it is too late to cancel that; ending their old workers costs them an error"
                }
            }));
        }
        all.iter().for_each(|cancel| cancel.cancel());
        Ok(Response::Empty)
    }
}
