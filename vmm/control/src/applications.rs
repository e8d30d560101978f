//! Saves and restores snapshots with accelerators' applications. A separate thread waits for the
//! workers. Meanwhile the control thread serves requests, but refuses those that would change the
//! machine.
//!
//! ```text
//!   control thread                     thread
//!   the directory is locked     ──>    workers stop, and save
//!   the machine is written      <──
//!
//!   the machine is made         ──>    its memory is read
//!   its vCPUs are made          <──
//!                               ──>    workers take its applications up
//!   the machine goes on         <──
//! ```

use std::{
    mem,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use base::Cancel;
use devices::accel::saved::Stopped;
use vmm_api::{
    ApiError, Handler, InProgress, Operation, Reply, Request, Response, RestoreConfig,
    VmSnapshotConfig,
};
use vmm_machine::{
    applications,
    error::MachineError,
    save::{Rest, Saving},
};
use vmm_snapshot::lock::DirectoryLock;

use super::{
    Control,
    life::Life,
    migration::{Job, OVER, host_error, is_allowed},
    requests::failed,
};

/// A wait for workers.
pub(super) struct Workers {
    /// Number of the wait.
    pub(super) number: u64,
    cancel: Cancel,
    reply: Reply,
    then: Then,
}

/// What to do after the wait.
enum Then {
    Save(Saving),
    Restore(Restore),
}

/// A machine that is being restored.
struct Restore {
    /// What it lacks but for its applications, and what keeps others from writing the snapshot.
    lacks: Option<Box<(Rest, DirectoryLock)>>,
    /// How much of its memory has been read, in bytes, and how much it has.
    read: (Arc<AtomicU64>, u64),
    /// Requests that need what it lacks.
    waiting: Vec<(Request, Reply)>,
    resume: bool,
    asked: Instant,
}

impl Workers {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what(&self) -> &'static str {
        match self.then {
            Then::Save(_) => {
                "a snapshot of the VM is being written, and waits for workers of accelerators"
            }
            Then::Restore(_) => "the VM is being restored, and waits for workers of accelerators",
        }
    }

    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> Option<InProgress> {
        let Then::Restore(Restore {
            lacks: Some(_),
            read: (done, total),
            ..
        }) = &self.then
        else {
            return None;
        };
        Some(InProgress {
            operation: Operation::Restore,
            done_bytes: Some(done.load(Ordering::Relaxed)),
            total_bytes: Some(*total),
            waits_for: None,
        })
    }

    /// Whether memory of a machine that is being restored is being read.
    fn is_reading(&self) -> bool {
        matches!(&self.then, Then::Restore(restore) if restore.lacks.is_some())
    }
}

impl Control {
    /// `vm.snapshot` with `accel=save`: replies when everything is written.
    pub(super) fn save_with_applications(&mut self, snapshot: &VmSnapshotConfig, reply: Reply) {
        let begun = self.refuse_if_moving();
        let begun = begun.and_then(|()| self.begin_snapshot(snapshot));
        match begun {
            Ok(saving) => self.wait_for_workers(Then::Save(saving), reply),
            Err(error) => reply.send(Err(error)),
        }
    }

    /// `vm.restore`: replies when the machine has everything that it needs.
    pub(super) fn restore_later(
        &mut self,
        request: &RestoreConfig,
        fds: Vec<OwnedFd>,
        reply: Reply,
    ) {
        let resume = request.resume;
        let asked = Instant::now();
        match self.restore(request, fds) {
            Ok(lacks) => {
                let restore = Restore {
                    lacks: Some(Box::new(lacks)),
                    read: (Arc::default(), 0),
                    waiting: Vec::new(),
                    resume,
                    asked,
                };
                self.wait_for_workers(Then::Restore(restore), reply);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    fn wait_for_workers(&mut self, mut then: Then, reply: Reply) {
        let number = self.migrations.number();
        let cancel = Cancel::default();
        let started = self.start_wait(number, &mut then, cancel.clone());
        self.migrations.job = Job::Workers(Workers {
            number,
            cancel,
            reply,
            then,
        });
        match started {
            Ok(true) => {}
            Ok(false) => self.workers_are_ready(number, Ok(None)),
            Err(error) => self.workers_are_ready(number, Err(error)),
        }
    }

    /// Starts the waiting thread. Returns false if there is nothing to wait for.
    fn start_wait(
        &mut self,
        number: u64,
        then: &mut Then,
        cancel: Cancel,
    ) -> Result<bool, ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let host = |error| host_error("wait for workers", &error);
        let control = self.migrations.on_control().map_err(host)?;
        let ready = move |ready: Result<Option<Stopped>, MachineError>| {
            control.ask(move |control| {
                control.workers_are_ready(number, ready.map_err(|error| failed(&error)));
            });
        };
        match then {
            Then::Save(saving) => {
                let ports = machine.devices().ports();
                let mut archive = saving.archive().map_err(|error| failed(&error))?;
                self.start_thread(move || {
                    let standing = applications::stop(ports, cancel);
                    let saved = standing.and_then(|all| Ok(all.save(&mut archive)?));
                    ready(saved.map(Some));
                })?;
            }
            Then::Restore(Restore {
                lacks: Some(lacks),
                read,
                ..
            }) => {
                let Some(contents) = lacks.0.contents.take() else {
                    return Ok(false);
                };
                read.1 = contents.memory();
                let read = Arc::clone(&read.0);
                self.start_thread(move || {
                    let advance = |bytes| {
                        read.fetch_add(bytes, Ordering::Relaxed);
                    };
                    ready(contents.read(&cancel, advance).map(|()| None));
                })?;
            }
            Then::Restore(Restore { lacks: None, .. }) => {
                let ports = machine.ports_to_take_up();
                if ports.is_empty() {
                    return Ok(false);
                }
                self.start_thread(move || {
                    ready(applications::take_up(&ports, cancel).map(|()| None));
                })?;
            }
        }
        Ok(true)
    }

    /// Handles the end of a wait.
    fn workers_are_ready(&mut self, number: u64, ready: Result<Option<Stopped>, ApiError>) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Workers(Workers { reply, then, .. }) =
            mem::replace(&mut self.migrations.job, Job::None)
        else {
            return;
        };
        let answer = match then {
            // The applications continue when everything is written.
            Then::Save(saving) => match ready {
                Ok(stopped) => return self.write_snapshot(saving, stopped, reply),
                Err(error) => Err(error),
            },
            Then::Restore(mut restore) => {
                let waiting = mem::take(&mut restore.waiting);
                self.go_on_with(restore, ready, reply);
                // In their order, each in the state that the one before has left.
                for (request, reply) in waiting {
                    self.take(request, reply);
                }
                return;
            }
        };
        reply.send(answer);
    }

    /// Goes on with a restore whose wait is over.
    fn go_on_with(
        &mut self,
        mut restore: Restore,
        ready: Result<Option<Stopped>, ApiError>,
        reply: Reply,
    ) {
        let lacks = restore.lacks.take();
        let finished = match (ready, lacks) {
            // The next wait is that for its applications.
            (Ok(_), Some(lacks)) => {
                let (rest, _reading) = *lacks;
                match self.complete(rest) {
                    Ok(()) => return self.wait_for_workers(Then::Restore(restore), reply),
                    Err(error) => Err(error),
                }
            }
            (Ok(_), None) => self.finish_restore(restore.resume, restore.asked),
            (Err(error), _) => Err(error),
        };
        reply.send(finished.inspect_err(|_| {
            self.life = Life::None;
            self.receiver.clear();
        }));
    }

    /// Keeps a request that comes before a machine that is being restored has its memory and its vCPUs; returns others.
    pub(super) fn wait_for_memory(
        &mut self,
        request: Request,
        reply: Reply,
    ) -> Option<(Request, Reply)> {
        let needs_vcpus = matches!(request, Request::VmPowerButton | Request::VmNmi);
        match &mut self.migrations.job {
            Job::Workers(Workers {
                then: Then::Restore(restore),
                ..
            }) if restore.lacks.is_some() && (needs_vcpus || !is_allowed(&request)) => {
                restore.waiting.push((request, reply));
                None
            }
            _ => Some((request, reply)),
        }
    }

    /// Restores what a machine lacks whose memory has been read.
    fn complete(&mut self, rest: Rest) -> Result<(), ApiError> {
        let Life::Live { machine, .. } = &mut self.life else {
            return Err(self.not_live());
        };
        machine.complete(rest).map_err(|error| failed(&error))
    }

    /// Abandons the wait, because the machine is replaced.
    pub(super) fn abandon_workers(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Workers(Workers {
                cancel,
                reply,
                then,
                ..
            }) => {
                cancel.cancel();
                let waiting = match then {
                    Then::Restore(restore) => restore.waiting,
                    Then::Save(_) => Vec::new(),
                };
                let waiting = waiting.into_iter().map(|(_, reply)| reply);
                for reply in [reply].into_iter().chain(waiting) {
                    reply.send(Err(ApiError::wrong_state(OVER)));
                }
            }
            other => self.migrations.job = other,
        }
    }

    /// Cancels all waits for workers.
    pub(super) fn cancel_waits(&mut self) -> Result<Response, ApiError> {
        let job = match &self.migrations.job {
            Job::Workers(workers) => Some(&workers.cancel),
            Job::Writing(written) => return written.cancel().map(|()| Response::Empty),
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
        if let Job::Workers(workers) = &self.migrations.job
            && workers.is_reading()
        {
            // The thread may hang in storage. It has the memory alone, and nobody waits for it.
            let error = ApiError::wrong_state("the VM is not restored: it was cancelled");
            self.workers_are_ready(workers.number, Err(error));
        }
        Ok(Response::Empty)
    }
}
