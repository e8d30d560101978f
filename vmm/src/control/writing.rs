//! Snapshots and core dumps. A thread of their own writes them, at the speed of the disk. Meanwhile the control thread
//! serves requests, but refuses those that would change the machine.
//!
//! ```text
//!   control thread                          thread
//!   the state of the paused machine  ──>    memory, configuration and state are written
//!   the client is answered           <──    and replace an older snapshot
//! ```

use std::{mem, path::PathBuf, sync::mpsc, time::Duration};

use base::Chain;
use devices::{accel::saved::Stopped, thread::ThreadRole};

use super::{
    Control,
    migration::{Job, OVER, host_error},
    requests::failed,
};
use crate::{
    api::{ApiError, InProgress, Operation, Reply, Response, VmSnapshotConfig},
    machine::{error::MachineError, save::Saving},
    snapshot::writing::Writing,
};

/// Name of the thread.
const THREAD: &str = "_snapshot";

/// How long the end of the process waits for a thread that was told to stop. It stops after its next write, which takes
/// about a second on a disk of 6 MB/s; a thread that hangs in the kernel leaves files that the next snapshot removes.
const LAST_WRITE: Duration = Duration::from_secs(3);

/// A snapshot or a core dump that is being written.
pub(super) struct Written {
    /// Its number.
    pub(super) number: u64,
    operation: Operation,
    writing: Writing,
    reply: Reply,
    /// Applications of accelerators, which continue when this is dropped.
    stopped: Option<Stopped>,
    /// Ends with the thread.
    ended: mpsc::Receiver<()>,
}

impl Written {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what(&self) -> &'static str {
        match self.operation {
            Operation::Coredump => "a core dump of the VM is being written",
            _ => "a snapshot of the VM is being written",
        }
    }

    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> InProgress {
        let (done, total) = self.writing.bytes();
        InProgress {
            operation: self.operation,
            done_bytes: Some(done),
            total_bytes: Some(total),
            waits_for: None,
        }
    }

    /// Cancels it, unless it is complete but for its names.
    pub(super) fn cancel(&self) -> Result<(), ApiError> {
        match self.writing.cancel() {
            true => Ok(()),
            false => Err(ApiError::wrong_state(
                "everything is written, and takes its place: it is too late to cancel that",
            )),
        }
    }
}

impl Control {
    /// `vm.snapshot` without applications: replies when everything is written.
    pub(super) fn snapshot_later(&mut self, snapshot: &VmSnapshotConfig, reply: Reply) {
        match self.begin_snapshot(snapshot) {
            Ok(saving) => self.write_snapshot(saving, None, reply),
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Writes the snapshot of a machine whose applications, if there are any, are saved.
    pub(super) fn write_snapshot(
        &mut self,
        saving: Saving,
        stopped: Option<Stopped>,
        reply: Reply,
    ) {
        let image = self.on_paused("saved", |machine, config| machine.image(config));
        match image {
            Ok(image) => {
                let total = image.memory();
                let work = move |writing: &Writing| image.write(saving, writing);
                self.write(Operation::Snapshot, total, stopped, work, reply);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// `vm.coredump`: replies when everything is written.
    pub(super) fn coredump_later(&mut self, file: Result<PathBuf, ApiError>, reply: Reply) {
        let dump = file.and_then(|file| self.on_paused("dumped", |machine, _| machine.core(&file)));
        match dump {
            Ok(core) => {
                let total = core.memory();
                let work = move |writing: &Writing| core.write(writing);
                self.write(Operation::Coredump, total, None, work, reply);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    fn write(
        &mut self,
        operation: Operation,
        total: u64,
        stopped: Option<Stopped>,
        work: impl FnOnce(&Writing) -> Result<(), MachineError> + Send + 'static,
        reply: Reply,
    ) {
        let number = self.migrations.number();
        let (alive, ended) = mpsc::channel::<()>();
        let writing = Writing::new(total);
        let of_thread = writing.clone();
        let control = match self.migrations.on_control() {
            Ok(control) => control,
            Err(error) => return reply.send(Err(host_error("write a file", &error))),
        };
        let started = self.start_thread_as(
            ThreadRole::Snapshot,
            THREAD,
            Box::new(move || {
                let written = work(&of_thread);
                control.tell(move |control| control.is_written(number, written));
                drop(alive);
            }),
        );
        if let Err(error) = started {
            return reply.send(Err(error));
        }
        self.migrations.job = Job::Writing(Written {
            number,
            operation,
            writing,
            reply,
            stopped,
            ended,
        });
    }

    /// Handles the end of the thread.
    fn is_written(&mut self, number: u64, written: Result<(), MachineError>) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Writing(job) = mem::replace(&mut self.migrations.job, Job::None) else {
            return;
        };
        let is_cancelled = job.writing.is_cancelled();
        let answer = match (written, job.operation) {
            (Ok(()), Operation::Snapshot) => {
                self.monitor.emit("vm", "snapshotted", &[]);
                Ok(Response::Empty)
            }
            (Ok(()), _) => Ok(Response::Empty),
            (Err(error), operation) => {
                let reason = Chain(&error).to_string();
                log::warn!("{}, and has failed: {reason}", job.what());
                if operation == Operation::Snapshot {
                    let properties = [("reason", reason.as_str())];
                    self.monitor.emit("vm", "snapshot-failed", &properties);
                }
                Err(match is_cancelled {
                    true => ApiError::wrong_state(reason),
                    false => failed(&error),
                })
            }
        };
        let Written { reply, stopped, .. } = job;
        // The client may resume the VM as soon as it has the answer.
        drop(stopped);
        reply.send(answer);
    }

    /// Cancels writing, because the machine is replaced.
    pub(super) fn abandon_writing(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Writing(job) => {
                job.writing.cancel();
                job.reply.send(Err(ApiError::wrong_state(OVER)));
            }
            other => self.migrations.job = other,
        }
    }

    /// Cancels writing, because the process ends, and waits until the thread has removed what it wrote; or, if it is
    /// about to replace an older snapshot, until it has.
    pub(super) fn end_writing(&mut self) {
        let Job::Writing(job) = &self.migrations.job else {
            return;
        };
        match job.writing.cancel() {
            // A timeout is as good as the end: a cancelled snapshot never takes another one's place.
            true => drop(job.ended.recv_timeout(LAST_WRITE)),
            false => drop(job.ended.recv()),
        }
        self.abandon_writing();
    }
}
