//! Saves snapshots with accelerators' applications. A separate thread waits for the workers. Meanwhile the control
//! thread serves requests, but refuses those that would change the machine.
//!
//! ```text
//!   control thread                     thread
//!   the directory is locked     ──>    workers stop, and save
//!   the machine is written      <──
//! ```

use std::mem;

use base::Cancel;
use devices::accel::saved::Stopped;
use vmm_api::{ApiError, Reply, Response, VmSnapshotConfig};
use vmm_machine::{applications, error::MachineError, save::Saving};

use super::{
    Control,
    life::Life,
    migration::{Job, OVER, host_error},
    requests::failed,
};

/// A snapshot that waits for workers.
pub(super) struct Workers {
    /// Number of the wait.
    pub(super) number: u64,
    cancel: Cancel,
    reply: Reply,
    saving: Saving,
}

impl Control {
    /// `vm.snapshot` with `accel=save`: replies when everything is written.
    pub(super) fn save_with_applications(&mut self, snapshot: &VmSnapshotConfig, reply: Reply) {
        let begun = self.refuse_if_moving();
        let begun = begun.and_then(|()| self.begin_snapshot(snapshot));
        match begun {
            Ok(saving) => self.wait_for_workers(saving, reply),
            Err(error) => reply.send(Err(error)),
        }
    }

    fn wait_for_workers(&mut self, saving: Saving, reply: Reply) {
        let number = self.migrations.number();
        let cancel = Cancel::default();
        match self.start_wait(number, &saving, cancel.clone()) {
            Ok(()) => {
                self.migrations.job = Job::Workers(Workers {
                    number,
                    cancel,
                    reply,
                    saving,
                });
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Starts the waiting thread.
    fn start_wait(&mut self, number: u64, saving: &Saving, cancel: Cancel) -> Result<(), ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let host = |error| host_error("wait for workers", &error);
        let control = self.migrations.on_control().map_err(host)?;
        let ports = machine.devices().ports();
        let mut archive = saving.archive().map_err(|error| failed(&error))?;
        self.start_thread(move || {
            let standing = applications::stop(ports, cancel);
            let saved = standing.and_then(|all| Ok(all.save(&mut archive)?));
            control.ask(move |control| control.workers_are_ready(number, saved));
        })
    }

    /// Handles the end of a wait.
    fn workers_are_ready(&mut self, number: u64, ready: Result<Stopped, MachineError>) {
        if !self.migrations.is_current(number) {
            return;
        }
        match mem::replace(&mut self.migrations.job, Job::None) {
            // The applications continue when everything is written.
            Job::Workers(Workers { saving, reply, .. }) => match ready {
                Ok(stopped) => self.write_snapshot(saving, Some(stopped), reply),
                Err(error) => reply.send(Err(failed(&error))),
            },
            other => self.migrations.job = other,
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

    /// Cancels all waits for workers, or what else is under way and is no migration.
    pub(super) fn cancel_waits(&mut self) -> Result<Response, ApiError> {
        let job = match &self.migrations.job {
            Job::Workers(workers) => Some(&workers.cancel),
            Job::Writing(written) => return written.cancel().map(|()| Response::Empty),
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
