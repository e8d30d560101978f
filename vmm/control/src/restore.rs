//! Restores a VM from a snapshot. A separate thread does what waits for storage or for workers of accelerators.
//! Meanwhile the control thread serves requests. Those that need what the VM lacks wait for it.
//!
//! ```text
//!   control thread                     thread
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
use vmm_api::{ApiError, Handler, InProgress, Operation, Reply, Request, RestoreConfig};
use vmm_machine::{applications, error::MachineError, save::Rest};
use vmm_snapshot::lock::DirectoryLock;

use super::{
    Control,
    life::Life,
    migration::{Job, OVER, host_error, is_allowed},
    requests::failed,
};

/// A VM that is being restored.
pub(super) struct Restoring {
    /// Number of the present wait.
    pub(super) number: u64,
    cancel: Cancel,
    stage: Stage,
    asked: Asked,
}

/// What a restore waits for.
enum Stage {
    /// Memory.
    Memory {
        /// What the machine lacks but for its applications, and what keeps others from writing the snapshot.
        lacks: Box<(Rest, DirectoryLock)>,
        /// How much has been read, in bytes, and how much there is.
        read: (Arc<AtomicU64>, u64),
    },
    /// Workers of its accelerators.
    Applications,
}

/// What a client has asked for.
struct Asked {
    resume: bool,
    at: Instant,
    reply: Reply,
    /// Requests that need what the machine lacks.
    waiting: Vec<(Request, Reply)>,
}

impl Restoring {
    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> Option<InProgress> {
        let Stage::Memory {
            read: (done, total),
            ..
        } = &self.stage
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

    /// Whether the machine lacks more than its applications.
    fn is_incomplete(&self) -> bool {
        !matches!(self.stage, Stage::Applications)
    }
}

impl Control {
    /// `vm.restore`: replies when the machine has everything that it needs.
    pub(super) fn restore_later(
        &mut self,
        request: &RestoreConfig,
        fds: Vec<OwnedFd>,
        reply: Reply,
    ) {
        let asked = Asked {
            resume: request.resume,
            at: Instant::now(),
            reply,
            waiting: Vec::new(),
        };
        match self.restore(request, fds) {
            Ok(lacks) => {
                let stage = Stage::Memory {
                    lacks: Box::new(lacks),
                    read: (Arc::default(), 0),
                };
                self.wait_for_stage(stage, asked);
            }
            Err(error) => asked.reply.send(Err(error)),
        }
    }

    fn wait_for_stage(&mut self, mut stage: Stage, asked: Asked) {
        let number = self.migrations.number();
        let cancel = Cancel::default();
        let started = self.start_stage(number, &mut stage, cancel.clone());
        self.migrations.job = Job::Restoring(Restoring {
            number,
            cancel,
            stage,
            asked,
        });
        match started {
            Ok(true) => {}
            Ok(false) => self.stage_is_over(number, Ok(())),
            Err(error) => self.stage_is_over(number, Err(error)),
        }
    }

    /// Starts the waiting thread. Returns false if there is nothing to wait for.
    fn start_stage(
        &mut self,
        number: u64,
        stage: &mut Stage,
        cancel: Cancel,
    ) -> Result<bool, ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let host = |error| host_error("wait for what a VM lacks", &error);
        let control = self.migrations.on_control().map_err(host)?;
        let over = move |ended: Result<(), MachineError>| {
            control.ask(move |control| {
                control.stage_is_over(number, ended.map_err(|error| failed(&error)));
            });
        };
        match stage {
            Stage::Memory { lacks, read } => {
                let Some(contents) = lacks.0.contents.take() else {
                    return Ok(false);
                };
                read.1 = contents.memory();
                let read = Arc::clone(&read.0);
                self.start_thread(move || {
                    let advance = |bytes| {
                        read.fetch_add(bytes, Ordering::Relaxed);
                    };
                    over(contents.read(&cancel, advance));
                })?;
            }
            Stage::Applications => {
                let ports = machine.ports_to_take_up();
                if ports.is_empty() {
                    return Ok(false);
                }
                self.start_thread(move || over(applications::take_up(&ports, cancel)))?;
            }
        }
        Ok(true)
    }

    /// Handles the end of a wait.
    fn stage_is_over(&mut self, number: u64, ended: Result<(), ApiError>) {
        if !self.migrations.is_current(number) {
            return;
        }
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Restoring(Restoring {
                stage, mut asked, ..
            }) => {
                let waiting = mem::take(&mut asked.waiting);
                self.go_on_with(stage, ended, asked);
                // In their order, each in the state that the one before has left.
                for (request, reply) in waiting {
                    self.take(request, reply);
                }
            }
            other => self.migrations.job = other,
        }
    }

    /// Goes on with a restore whose wait is over.
    fn go_on_with(&mut self, stage: Stage, ended: Result<(), ApiError>, asked: Asked) {
        let finished = match (ended, stage) {
            (Ok(()), Stage::Memory { lacks, .. }) => {
                let (rest, _reading) = *lacks;
                match self.complete(rest) {
                    Ok(()) => return self.wait_for_stage(Stage::Applications, asked),
                    Err(error) => Err(error),
                }
            }
            (Ok(()), Stage::Applications) => self.finish_restore(asked.resume, asked.at),
            (Err(error), _) => Err(error),
        };
        asked.reply.send(finished.inspect_err(|_| {
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
            Job::Restoring(restoring)
                if restoring.is_incomplete() && (needs_vcpus || !is_allowed(&request)) =>
            {
                restoring.asked.waiting.push((request, reply));
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

    /// Cancels the restore. The thread may hang in storage: nobody waits for it. Workers notice the cancellation and
    /// answer.
    pub(super) fn cancel_restore(&mut self) {
        let Job::Restoring(restoring) = &self.migrations.job else {
            return;
        };
        restoring.cancel.cancel();
        if restoring.is_incomplete() {
            let error = ApiError::wrong_state("the VM is not restored: it was cancelled");
            self.stage_is_over(restoring.number, Err(error));
        }
    }

    /// Abandons the restore, because the machine is replaced.
    pub(super) fn abandon_restore(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Restoring(Restoring { cancel, asked, .. }) => {
                cancel.cancel();
                let waiting = asked.waiting.into_iter().map(|(_, reply)| reply);
                for reply in [asked.reply].into_iter().chain(waiting) {
                    reply.send(Err(ApiError::wrong_state(OVER)));
                }
            }
            other => self.migrations.job = other,
        }
    }
}
