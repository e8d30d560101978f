//! Asynchronous I/O on a raw image with io_uring.
//!
//! A ring bypasses seccomp: its operations are not system calls of the thread. Before the guest's
//! first request, the ring is therefore restricted to four operations on the one file that it was
//! created for (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10).

use std::{fs::File, io, os::fd::AsRawFd, sync::Arc};

use io_uring::{IoUring, opcode, register::Restriction, squeue, types};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    io::{AsyncIo, Finished, FinishedQueue, Io, Operation, Path, Step, step},
    raw::{discard_mode, zero_mode},
};

const FILE: types::Fixed = types::Fixed(0);

/// A ring for one queue.
pub struct Uring {
    ring: IoUring,
    completion: EventFd,
    path: Path,
    /// Requests in flight, indexed by the user data of their entries.
    slots: Vec<Option<Io>>,
    free: Vec<usize>,
    /// Completed without the kernel, or collected while waiting.
    finished: FinishedQueue,
    /// The ring holds its own reference; this one prevents reuse of the descriptor number.
    _file: Arc<File>,
}

impl Uring {
    /// Creates a ring for up to `depth` requests in flight.
    pub fn new(file: Arc<File>, path: Path, depth: u16) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_clamp()
            .setup_r_disabled()
            .dontfork()
            .build(u32::from(depth))?;
        let completion = EventFd::new(EFD_NONBLOCK)?;
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        submitter.register_eventfd(completion.as_raw_fd())?;
        let fixed_file = squeue::Flags::FIXED_FILE.bits();
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_op(opcode::Fallocate::CODE),
            Restriction::sqe_flags_allowed(fixed_file),
            Restriction::sqe_flags_required(fixed_file),
        ])?;
        submitter.register_enable_rings()?;
        // The ring may have been clamped to fewer entries; the slots never exceed its capacity.
        let depth = (depth as usize).min(ring.params().sq_entries() as usize);
        Ok(Self {
            ring,
            completion,
            path,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            finished: FinishedQueue::with_capacity(depth),
            _file: file,
        })
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Queues the next step of the request in `slot`.
    fn push(&mut self, slot: usize) {
        let Some(io) = self.slots.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        let entry = match entry(io, &self.path) {
            Ok(entry) => entry.user_data(slot as u64),
            Err(error) => return self.finish(slot, Err(error)),
        };
        // SAFETY: the entry points to vectors and memory that the `Io` in `slots` owns; it stays
        // there, untouched, until the kernel has reported the entry's completion.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            // There are as many entries as slots, and each slot has at most one entry.
            self.finish(slot, Err(io::ErrorKind::ResourceBusy.into()));
        }
    }

    fn finish(&mut self, slot: usize, result: io::Result<()>) {
        if let Some(io) = self.slots.get_mut(slot).and_then(Option::take) {
            self.free.push(slot);
            self.finished.push_back(Finished { io, result });
        }
    }

    /// Collects the requests that the kernel has completed.
    fn reap(&mut self) {
        let mut resubmit = false;
        loop {
            // Bound outside the `match`, so that the ring is not borrowed in its arms.
            let next = self.ring.completion().next();
            let Some(entry) = next else { break };
            let slot = entry.user_data() as usize;
            let Some(io) = self.slots.get_mut(slot).and_then(Option::as_mut) else {
                continue;
            };
            let outcome = match usize::try_from(entry.result()) {
                Ok(count) => Ok(count),
                Err(_) => Err(match entry.result() {
                    // The kernel could not wait in this context; a retry of the same request may.
                    code if code == -libc::EAGAIN => io::ErrorKind::Interrupted.into(),
                    code => io::Error::from_raw_os_error(code.saturating_neg()),
                }),
            };
            match step(io, outcome) {
                Step::Done(result) => self.finish(slot, result),
                Step::Again => {
                    self.push(slot);
                    resubmit = true;
                }
            }
        }
        if resubmit {
            self.submit();
        }
    }

    /// Waits for at least one completion; an error means that the ring is unusable.
    fn wait_for_kernel(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
    )
}

/// The submission entry for the next step of `io`.
fn entry(io: &mut Io, path: &Path) -> io::Result<squeue::Entry> {
    let (operation, len) = (io.operation, io.len);
    Ok(match operation {
        Operation::Read => {
            let offset = io.offset;
            let vectors = io.vectors(path)?;
            // At most MAX_VECTORS.
            opcode::Readv::new(FILE, vectors.as_ptr(), vectors.len() as u32)
                .offset(offset)
                .build()
        }
        Operation::Write { durable } => {
            let offset = io.offset;
            let vectors = io.vectors(path)?;
            opcode::Writev::new(FILE, vectors.as_ptr(), vectors.len() as u32)
                .offset(offset)
                .rw_flags(if durable { libc::RWF_DSYNC } else { 0 })
                .build()
        }
        Operation::Flush => opcode::Fsync::new(FILE)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Operation::Discard => opcode::Fallocate::new(FILE, len)
            .offset(io.offset)
            .mode(discard_mode())
            .build(),
        Operation::WriteZeroes { may_unmap, .. } => opcode::Fallocate::new(FILE, len)
            .offset(io.offset)
            .mode(zero_mode(may_unmap))
            .build(),
    })
}

impl AsyncIo for Uring {
    fn completion(&self) -> &EventFd {
        &self.completion
    }

    fn start(&mut self, io: Io) {
        let Some(slot) = self.free.pop() else {
            let result = Err(io::ErrorKind::ResourceBusy.into());
            self.finished.push_back(Finished { io, result });
            return;
        };
        self.slots[slot] = Some(io);
        self.push(slot);
    }

    fn submit(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        if let Err(error) = self.ring.submit() {
            if !is_transient(&error) {
                log::error!("io_uring does not take requests: {error}");
            }
            // The entries are still queued: try again soon.
            let _ = self.completion.write(1);
        }
    }

    fn take_finished(&mut self) -> Option<Finished> {
        if self.finished.is_empty() {
            self.reap();
        }
        self.finished.pop_front()
    }

    fn wait(&mut self) {
        self.reap();
        while self.finished.is_empty() && self.in_flight() > 0 {
            if let Err(error) = self.wait_for_kernel() {
                log::error!("cannot wait for io_uring: {error}");
                return;
            }
            self.reap();
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if let Err(error) = self.wait_for_kernel() {
                // The kernel may still write to the buffers, so they must not be freed.
                log::error!("cannot wait for io_uring, leaking its buffers: {error}");
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
            self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_does_nothing_but_disk_io_on_its_file() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let path = Path {
            alignment: 1,
            guard: None,
        };
        let mut uring = match Uring::new(Arc::clone(&file), path, 8) {
            Ok(uring) => uring,
            Err(error) => {
                println!("skipped: this host has no io_uring: {error}");
                return;
            }
        };
        let forbidden = [
            opcode::Nop::new().build(),
            opcode::Close::new(types::Fd(file.as_raw_fd())).build(),
            opcode::Fsync::new(types::Fd(file.as_raw_fd())).build(),
        ];
        for entry in forbidden {
            // SAFETY: the entries refer to no memory.
            unsafe { uring.ring.submission().push(&entry).unwrap() };
            uring.ring.submit_and_wait(1).unwrap();
            let result = uring.ring.completion().next().unwrap().result();
            assert_eq!(result, -libc::EACCES);
        }
        uring.start(Io::range(Operation::Flush, 0, 0, 5));
        uring.submit();
        uring.wait();
        let finished = uring.take_finished().unwrap();
        assert_eq!(finished.io.tag, 5);
        finished.result.unwrap();
    }
}
