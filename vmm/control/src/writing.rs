//! Snapshots and core dumps, and disks that are resized. A thread of their own does this, at the speed of the disk.
//! Meanwhile the control thread serves requests, but refuses those that would change the machine.
//!
//! ```text
//!   control thread                          thread
//!   the state of the paused machine  ──>    memory, configuration and state are written
//!   the client is answered           <──    and replace an older snapshot
//! ```

use std::{mem, path::PathBuf, sync::mpsc, time::Duration};

use base::Chain;
use devices::{accel::saved::Stopped, thread::ThreadRole};
use vmm_api::{ApiError, InProgress, Operation, Reply, Response, VmResizeDisk, VmSnapshotConfig};
use vmm_machine::{error::MachineError, save::Saving};
use vmm_snapshot::writing::Writing;

use super::{
    Control,
    life::Life,
    migration::{Job, OVER, host_error},
    requests::{failed, place},
};

/// How long the end of the process waits for a thread that was told to stop. It stops after its next write, which takes
/// about a second on a disk of 6 MB/s; a thread that hangs in the kernel leaves files that the next snapshot removes.
const LAST_WRITE: Duration = Duration::from_secs(3);

/// A snapshot or a core dump that is being written, or a disk that is being resized.
pub(super) struct Written {
    /// Its number.
    pub(super) number: u64,
    operation: Operation,
    writing: Writing,
    reply: Reply,
    /// Applications of accelerators, which continue when this is dropped.
    stopped: Option<Stopped>,
    /// How it ended. The control thread is told afterwards that it did.
    ended: mpsc::Receiver<Result<Option<Saving>, MachineError>>,
    /// What follows if it brings a folder for the snapshot.
    then: Option<Then>,
}

/// What follows when the folder of a snapshot is ready, and locked if it is brought.
type Then = Box<dyn FnOnce(&mut Control, Option<Saving>, Reply) + Send>;

impl Written {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what(&self) -> &'static str {
        match self.operation {
            Operation::Coredump => "a core dump of the VM is being written",
            Operation::ResizeDisk => "a disk of the VM is being resized",
            _ => "a snapshot of the VM is being written",
        }
    }

    /// How to learn of its end, or to bring that about.
    pub(super) fn advice(&self) -> &'static str {
        match self.operation {
            Operation::ResizeDisk => "vm.info shows when that is over",
            _ => "vm.cancel-migration ends that, vm.info shows how far it is",
        }
    }

    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> InProgress {
        let bytes = (self.operation != Operation::ResizeDisk).then(|| self.writing.bytes());
        InProgress {
            operation: self.operation,
            done_bytes: bytes.map(|(done, _)| done),
            total_bytes: bytes.map(|(_, total)| total),
            waits_for: None,
        }
    }

    /// Cancels it, unless it is complete but for its names.
    pub(super) fn cancel(&self) -> Result<(), ApiError> {
        if self.operation == Operation::ResizeDisk {
            return Err(ApiError::wrong_state(
                "a disk is being resized, which cannot be cancelled",
            ));
        }
        match self.writing.cancel() {
            true => Ok(()),
            false => Err(ApiError::wrong_state(
                "everything is written, and takes its place: it is too late to cancel that",
            )),
        }
    }
}

impl Control {
    /// Refuses to save a VM with devices whose state nobody saves, before anything stops.
    pub(super) fn check_can_be_saved(&self) -> Result<(), ApiError> {
        let Life::Live { config, .. } = &self.life else {
            return Ok(());
        };
        let devices = config.all_devices().into_iter();
        let mut stuck = devices.filter(|(_, device)| device.cannot_be_saved());
        match stuck.next() {
            None => Ok(()),
            Some((_, device)) => Err(ApiError::wrong_state(format!(
                "the VM cannot be saved: the state of {:?} is in another process; remove it first (vm.remove-device)",
                device.common().id.as_deref().unwrap_or_default()
            ))),
        }
    }

    /// `vm.snapshot` without applications: replies when everything is written.
    pub(super) fn snapshot_later(&mut self, snapshot: &VmSnapshotConfig, reply: Reply) {
        if snapshot.detach {
            let paused = self.on_paused("saved", |_, _| Ok(()));
            return match paused {
                Ok(()) => self.with_folder(
                    snapshot,
                    true,
                    |control, saving, reply| match (saving, control.begin_snapshot(true)) {
                        (Some(saving), Ok(())) => control.write_snapshot(saving, None, reply),
                        (saving, begun) => {
                            control.forget(saving);
                            reply.send(begun.map(|()| Response::Empty));
                        }
                    },
                    reply,
                ),
                Err(error) => reply.send(Err(error)),
            };
        }
        let directory = place(snapshot.directory(), &snapshot.destination_url);
        let begun = directory.and_then(|directory| {
            let image = self.on_paused("saved", |machine, config| machine.image(config))?;
            Ok((directory.to_owned(), image))
        });
        match begun {
            Ok((directory, image)) => {
                self.monitor.emit("vm", "snapshotting", &[]);
                let total = image.memory();
                let work = move |writing: &Writing| {
                    let saving = wanted_folder(directory, writing)?;
                    image.write(saving, writing)
                };
                self.write(Operation::Snapshot, total, None, work, reply);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Makes the folder of a snapshot, locks it, and tries whether files can be made there, at the speed of its storage. Then
    /// the snapshot begins; unless the folder is to be `kept`, others may have it until it is written.
    pub(super) fn with_folder(
        &mut self,
        snapshot: &VmSnapshotConfig,
        kept: bool,
        then: impl FnOnce(&mut Self, Option<Saving>, Reply) + Send + 'static,
        reply: Reply,
    ) {
        let directory = match place(snapshot.directory(), &snapshot.destination_url) {
            Ok(directory) => directory.to_owned(),
            Err(error) => return reply.send(Err(error)),
        };
        let work = move |writing: &Writing| {
            let saving = wanted_folder(directory, writing)?;
            saving.try_out()?;
            Ok(kept.then_some(saving))
        };
        let then = Some(Box::new(then) as Then);
        self.write_and(Operation::Snapshot, 0, None, work, reply, then);
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

    /// `vm.resize-disk`: replies when the disk has its new size.
    pub(super) fn resize_disk_later(&mut self, resize: &VmResizeDisk, reply: Reply) {
        let growth =
            self.of_live(|machine, _| machine.disk_growth(&resize.id, resize.desired_size));
        match growth {
            Ok(grow) => self.write(Operation::ResizeDisk, 0, None, |_| grow(), reply),
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
        let work = |writing: &Writing| work(writing).map(|()| None);
        self.write_and(operation, total, stopped, work, reply, None);
    }

    fn write_and(
        &mut self,
        operation: Operation,
        total: u64,
        stopped: Option<Stopped>,
        work: impl FnOnce(&Writing) -> Result<Option<Saving>, MachineError> + Send + 'static,
        reply: Reply,
        then: Option<Then>,
    ) {
        let number = self.migrations.number();
        let (end, ended) = mpsc::channel();
        let writing = Writing::new(total);
        let of_thread = writing.clone();
        let control = match self.migrations.on_control() {
            Ok(control) => control,
            Err(error) => return reply.send(Err(host_error("write a file", &error))),
        };
        let (role, name) = match operation {
            Operation::ResizeDisk => (ThreadRole::Disk, "_resize"),
            _ => (ThreadRole::Snapshot, "_snapshot"),
        };
        let started = self.start_thread_as(
            role,
            name,
            Box::new(move || {
                // Fails only if nobody waits for it any more.
                let _ = end.send(work(&of_thread));
                control.tell(move |control| control.is_written(number));
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
            then,
        });
    }

    /// Handles the end of the thread.
    fn is_written(&mut self, number: u64) {
        if !self.migrations.is_current(number) {
            return;
        }
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Writing(mut job) => {
                // It was sent before this was.
                let Ok(written) = job.ended.recv() else {
                    return;
                };
                match (written, job.then.take()) {
                    (Ok(saving), Some(_)) if job.writing.is_cancelled() => {
                        self.forget(saving);
                        let why = "the VM is not saved: it was cancelled";
                        job.reply.send(Err(ApiError::wrong_state(why)));
                    }
                    (Ok(saving), Some(then)) => then(self, saving, job.reply),
                    (written, _) => self.answer(job, written.map(drop)),
                }
            }
            other => self.migrations.job = other,
        }
    }

    /// Tells the client how it ended.
    fn answer(&mut self, job: Written, written: Result<(), MachineError>) {
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

    /// Cancels writing, because the machine is replaced. If the files are about to replace older ones, waits until they
    /// have: the client is told that they did. A disk that is resized goes on, and the end of the machine waits for it.
    pub(super) fn abandon_writing(&mut self) {
        if !matches!(&self.migrations.job, Job::Writing(job) if job.operation == Operation::ResizeDisk)
        {
            self.give_up_writing(Duration::ZERO);
        }
    }

    /// Cancels writing, because the process ends, and waits until the thread has removed what it wrote; or, if it is
    /// about to replace an older snapshot, until it has.
    pub(super) fn end_writing(&mut self) {
        self.give_up_writing(LAST_WRITE);
    }

    /// Cancels writing, and waits this long for the thread; as long as it takes if it is too late to cancel that.
    fn give_up_writing(&mut self, patience: Duration) {
        let job = match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Writing(job) => job,
            other => {
                self.migrations.job = other;
                return;
            }
        };
        let written = match job.operation {
            Operation::ResizeDisk => job.ended.recv_timeout(patience).ok(),
            // A timeout is as good as the end: a cancelled snapshot never takes another one's place.
            _ if job.writing.cancel() => {
                // If it is a folder, its storage may hang.
                self.forget(job.ended.recv_timeout(patience));
                None
            }
            _ => job.ended.recv().ok(),
        };
        match written {
            Some(written) => self.answer(job, written.map(drop)),
            None => job.reply.send(Err(ApiError::wrong_state(OVER))),
        }
    }
}

/// The folder of a snapshot, unless that was cancelled: the folder may have hung for long.
fn wanted_folder(directory: PathBuf, writing: &Writing) -> Result<Saving, MachineError> {
    let saving = Saving::new(&directory)?;
    let wanted = writing.advance(0);
    wanted.map_err(|source| MachineError::ConfigFile {
        path: directory,
        source,
    })?;
    Ok(saving)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::control, *};

    /// What the client hears of writing that the control thread gives up when it can no longer be cancelled.
    fn answer_to_sealed(
        give_up: impl FnOnce(&mut Control),
        has_failed: bool,
    ) -> Result<Response, ApiError> {
        let mut control = control();
        let (sender, answer) = mpsc::channel();
        let reply = Reply::new(move |answer| sender.send(answer).unwrap());
        let (sealed, is_sealed) = mpsc::channel();
        let work = move |writing: &Writing| {
            let _seal = writing.seal().unwrap();
            sealed.send(()).unwrap();
            match has_failed {
                true => Err(MachineError::SnapshotMismatch("disk is full".to_owned())),
                false => Ok(()),
            }
        };
        control.write(Operation::Snapshot, 0, None, work, reply);
        is_sealed.recv().unwrap();
        give_up(&mut control);
        answer.try_recv().unwrap()
    }

    #[test]
    fn what_took_its_place_is_not_said_to_be_cancelled() {
        for give_up in [Control::abandon_writing, Control::end_writing] {
            answer_to_sealed(give_up, false).unwrap();
            let error = answer_to_sealed(give_up, true).unwrap_err().to_string();
            assert!(error.contains("disk is full"), "{error}");
        }
    }

    #[test]
    fn a_disk_that_grows_is_answered_for_though_its_machine_is_reset_or_the_process_ends() {
        for ends in [false, true] {
            let mut control = control();
            let (sender, answer) = mpsc::channel();
            let reply = Reply::new(move |answer| sender.send(answer).unwrap());
            let (go, goes) = mpsc::channel();
            let work = move |_: &Writing| {
                goes.recv().unwrap();
                Ok(())
            };
            control.write(Operation::ResizeDisk, 0, None, work, reply);
            control.abandon_writing();
            assert!(answer.try_recv().is_err(), "it is not over");
            go.send(()).unwrap();
            if ends {
                control.end_writing();
            }
            loop {
                match answer.recv_timeout(Duration::from_millis(1)) {
                    Ok(answer) => break drop(answer.unwrap()),
                    Err(_) => control.migration_work(),
                }
            }
        }
    }

    #[test]
    fn what_is_cancelled_is_answered_at_once_and_takes_no_place() {
        let mut control = control();
        let (sender, answer) = mpsc::channel();
        let reply = Reply::new(move |answer| sender.send(answer).unwrap());
        let (go, goes) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let work = move |writing: &Writing| {
            goes.recv().unwrap();
            end.send(writing.seal().is_err()).unwrap();
            Ok(())
        };
        control.write(Operation::Snapshot, 0, None, work, reply);
        control.abandon_writing();
        answer.try_recv().unwrap().unwrap_err();
        go.send(()).unwrap();
        assert!(ended.recv().unwrap());
    }
}
