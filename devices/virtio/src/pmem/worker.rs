//! Flush requests.

use std::{fs::File, io, os::fd::AsRawFd, sync::Arc};

use device_model::{
    memory::{GuestMemory, GuestRam},
    worker::DeviceWorker,
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, Le32};
use vmm_sys_util::epoll::EventSet;

use crate::{
    device::{ActiveQueue, VirtioInterrupt},
    in_flight::InFlight,
};

/// `VIRTIO_PMEM_REQ_TYPE_FLUSH` (virtio 1.2, 5.19.6).
const FLUSH: u32 = 0;

/// Results of a request: success and failure.
const OK: u32 = 0;
const FAILED: u32 = 1;

/// Size of the steps in which a file is flushed, in bytes: whoever pauses or ends the VM waits for
/// one of them, not for all that the guest has written.
const STEP: u64 = 64 << 20;

const KICK: u32 = 0;

/// Serves the queue of a persistent memory device.
pub struct FlushWorker {
    /// The queue.
    pub active: ActiveQueue,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Interrupts.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Flushes that the storage has not completed yet.
    pub flushes: Arc<InFlight>,
    /// The file to flush; `None` if writes are discarded anyway.
    pub file: Option<Arc<File>>,
    /// Name for log messages.
    pub name: String,
    /// The last flush failed. Logged once, or a guest could flood the log.
    pub failing: bool,
    /// The driver has made the queue unusable.
    pub broken: bool,
}

impl FlushWorker {
    /// Completes the requests in the queue. All requests that are there at the start share one
    /// flush: each requires the writes before it to be stable, and one flush achieves that.
    fn serve(&mut self) -> Result<(), virtio_queue::Error> {
        // Requests that are held back stay in the queue, which is kicked when they may continue.
        let flushes = Arc::clone(&self.flushes);
        if !flushes.begin() {
            return Ok(());
        }
        let result = self.try_serve();
        flushes.end();
        result
    }

    fn try_serve(&mut self) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.memory();
        let memory: &GuestRam = &memory;
        let size = self.active.queue.size() as usize;
        let mut waiting = Vec::new();
        let mut empty = false;
        // At most one queue's worth at a time: a driver cannot have more in flight. It can keep
        // moving its index, so polls of the index are counted as well.
        for _ in 0..=size {
            let mut chains = self.active.queue.iter(memory)?;
            waiting.extend(chains.by_ref().take(size - waiting.len()));
            if waiting.len() == size {
                break;
            }
            if !self.active.queue.enable_notification(memory)? {
                empty = true;
                break;
            }
        }
        if !empty {
            // There may be more. Fails only if the counter is full, in which case it is readable
            // anyway.
            let _ = self.active.kick.write(1);
        }
        if waiting.is_empty() {
            return Ok(());
        }
        let Some(flushed) = self.flush() else {
            // Held back: they stay in the queue, which is kicked when they may continue.
            for _ in waiting {
                self.active.queue.go_to_previous_position();
            }
            return Ok(());
        };
        for chain in waiting {
            let head = chain.head_index();
            let len = answer(chain, memory, flushed);
            self.active.queue.add_used(memory, head, len)?;
        }
        if self.active.queue.needs_notification(memory)?
            && let Err(error) = self.interrupt.queue(self.active.index)
        {
            log::error!("cannot interrupt the guest for {}: {error}", self.name);
        }
        Ok(())
    }

    /// Flushes the file, and returns the result of the requests; `None` if they are held back.
    fn flush(&mut self) -> Option<u32> {
        let result = match &self.file {
            Some(file) => flush_in_steps(file, || self.flushes.is_held()).transpose()?,
            None => Ok(()),
        };
        let failed_before = std::mem::replace(&mut self.failing, result.is_err());
        let Err(error) = result else { return Some(OK) };
        if !failed_before {
            log::warn!("cannot flush persistent memory {}: {error}", self.name);
        }
        Some(FAILED)
    }
}

/// Flushes a file in steps; `None` if a caller waits for the request to end.
pub(super) fn flush_in_steps(file: &File, is_held: impl Fn() -> bool) -> io::Result<Option<()>> {
    let len = file.metadata()?.len();
    for at in (0..len).step_by(STEP as usize) {
        // The file's data is written out, but not its metadata, and the storage is not flushed.
        // SAFETY: the call has no pointers. `at` and `STEP` are within an i64, as is a file's
        // length.
        let written = unsafe {
            libc::sync_file_range(
                file.as_raw_fd(),
                at as i64,
                STEP as i64,
                libc::SYNC_FILE_RANGE_WAIT_BEFORE
                    | libc::SYNC_FILE_RANGE_WRITE
                    | libc::SYNC_FILE_RANGE_WAIT_AFTER,
            )
        };
        if written < 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // Devices and some file systems have no ranges: `sync_all` does everything.
                Some(libc::ESPIPE | libc::EINVAL | libc::EOPNOTSUPP) => break,
                _ => return Err(error),
            }
        }
        if is_held() {
            return Ok(None);
        }
    }
    file.sync_all().map(Some)
}

/// Writes the result of a request; returns the number of bytes written.
fn answer(chain: DescriptorChain<&GuestRam>, memory: &GuestRam, flushed: u32) -> u32 {
    let kind = chain
        .clone()
        .reader(memory)
        .ok()
        .and_then(|mut reader| reader.read_obj::<Le32>().ok());
    let result = match kind.map(u32::from) {
        Some(FLUSH) => flushed,
        _ => FAILED,
    };
    let Ok(mut writer) = chain.writer(memory) else {
        return 0;
    };
    match writer.write_obj(Le32::from(result)) {
        Ok(()) => size_of::<Le32>() as u32,
        Err(_) => 0,
    }
}

impl MutEventSubscriber for FlushWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let kick = Events::with_data(&self.active.kick, KICK, EventSet::IN);
        if let Err(error) = ops.add(kick) {
            log::error!("a persistent memory worker cannot watch its queue: {error}");
        }
        // Requests that the driver queued earlier arrive without a kick.
        let _ = self.active.kick.write(1);
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        // Fails only if another reader has cleared it.
        let _ = self.active.kick.read();
        if self.broken {
            return;
        }
        if let Err(error) = self.serve() {
            self.broken = true;
            log::warn!(
                "the queue of persistent memory {} is unusable: {error}",
                self.name
            );
            self.interrupt.needs_reset();
        }
    }
}

impl DeviceWorker for FlushWorker {}
