//! The worker of one queue.

use std::{io, sync::Arc, time::Instant};

use device_model::{
    memory::{GuestMemory, GuestRam},
    thread::pin_current_thread,
    throttle::Throttle,
    worker::DeviceWorker,
};
use disk::{AsyncIo, Buffers, Finished, Io, Operation, SECTOR};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::epoll::EventSet;

use super::{
    request::{Command, Parser, Range},
    shared::Shared,
};
use crate::device::{ActiveQueue, VirtioInterrupt};

/// How many times a worker refills a full engine whose requests complete immediately before it
/// looks at other events, such as the one that stops it.
const ROUNDS: u32 = 8;

/// Maximum number of bytes of a device that its engines process at a time, divided among its queues: a guest that uses
/// several does not multiply it, except by ranges on more than 32 queues ([`LEAST_RANGE`]). Together with the steps
/// below, it bounds how long a guest can make whoever pauses or ends the VM wait for its disk: a
/// chain of descriptors can name 4 GiB, by naming the same memory repeatedly.
const MOST_BYTES: u64 = 64 << 20;
/// Maximum size of a transfer that is processed in one piece, in bytes. Longer requests are
/// processed in steps of this size.
const MOST_STEP: u64 = 4 << 20;
/// Minimum size of the steps in which a range is discarded or zeroed, in bytes: the largest cluster
/// of an image, which is only freed as a whole.
const LEAST_RANGE: u64 = 2 << 20;

const KICK: u32 = 0;
const COMPLETION: u32 = 1;
const TIMER: u32 = 2;

/// A request that the engine is processing.
struct Pending {
    head: u16,
    status: GuestAddress,
    /// The memory that contains the status field: the same as for the data.
    memory: Arc<GuestRam>,
    operation: Operation,
    /// Position on the disk and length of the whole request in bytes.
    offset: u64,
    len: u64,
    /// Bytes before the current step, and bytes of it.
    done: u64,
    step: u64,
    since: Instant,
}

impl Pending {
    /// Whether the current step is not the last one.
    fn has_more(&self) -> bool {
        self.done + self.step < self.len
    }
}

/// Result of `prepare`.
enum Prepared {
    /// An operation for the engine.
    Io {
        operation: Operation,
        offset: u64,
        len: u64,
    },
    /// The request is complete; only the reply is left.
    Done {
        /// Number of data bytes written to the guest.
        written: u32,
    },
}

/// Why the worker stopped taking requests.
#[derive(Debug, Eq, PartialEq)]
enum Stop {
    /// The queue is empty.
    Empty,
    /// The limit of requests or bytes is in flight.
    Full,
    /// The rate limit is reached; the timer fires when to continue.
    Throttled,
    /// The device is being quiesced; a kick follows if it is to continue.
    Held,
    /// The budget of this turn is used up, though the driver has more requests.
    Turn,
}

/// Serves one queue, and owns the queue and its engine.
pub struct QueueWorker {
    active: ActiveQueue,
    memory: GuestMemory,
    interrupt: Arc<dyn VirtioInterrupt>,
    engine: Box<dyn AsyncIo>,
    throttle: Option<Throttle>,
    shared: Arc<Shared>,
    /// Host CPUs on which the worker runs; empty for all of them.
    affinity: Vec<usize>,
    /// Every write must be stable before it completes.
    write_through_always: bool,
    /// Indexed by the tag of the `Io`.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    /// Bytes that the engine is processing, and their maximum.
    bytes: u64,
    most_bytes: u64,
    /// A request of several steps is in progress. It is the last one taken from the queue, and
    /// `parser` still describes its memory: between two steps it can be put back, to be processed
    /// again from its start.
    is_long: bool,
    /// The worker is ending, so a request of several steps does not continue.
    is_ending: bool,
    parser: Parser,
    /// Buffer allocations for reuse.
    spare: Vec<Buffers>,
    /// Chains have been returned since the driver was last notified.
    unnotified: bool,
    /// The driver has made the queue unusable. It is ignored until the driver resets the device.
    broken: bool,
}

/// The parts of a worker.
pub struct Setup {
    /// The queue.
    pub active: ActiveQueue,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Interrupts.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Performs the I/O; accepts `depth` requests at a time.
    pub engine: Box<dyn AsyncIo>,
    /// Maximum number of requests in flight.
    pub depth: u16,
    /// Number of queues of the device.
    pub num_queues: u16,
    /// The rate limit.
    pub throttle: Option<Throttle>,
    /// State shared with the device.
    pub shared: Arc<Shared>,
    /// Host CPUs on which the worker runs; empty for all of them.
    pub affinity: Vec<usize>,
    /// The driver did not accept `VIRTIO_BLK_F_FLUSH`.
    pub write_through_always: bool,
}

impl QueueWorker {
    /// Creates a worker that handles everything in the queue as soon as it runs.
    pub fn new(setup: Setup) -> Self {
        let depth = setup.depth as usize;
        Self {
            active: setup.active,
            memory: setup.memory,
            interrupt: setup.interrupt,
            engine: setup.engine,
            throttle: setup.throttle,
            shared: setup.shared,
            affinity: setup.affinity,
            write_through_always: setup.write_through_always,
            pending: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            bytes: 0,
            most_bytes: MOST_BYTES / u64::from(setup.num_queues.max(1)).next_power_of_two(),
            is_long: false,
            is_ending: false,
            parser: Parser::default(),
            spare: Vec::new(),
            unnotified: false,
            broken: false,
        }
    }

    /// Returns the parts that the device keeps.
    pub fn into_parts(mut self) -> (ActiveQueue, Box<dyn AsyncIo>, Option<Throttle>) {
        if let Some(throttle) = &mut self.throttle {
            throttle.reset();
        }
        (self.active, self.engine, self.throttle)
    }

    fn serve(&mut self) {
        for _ in 0..ROUNDS {
            let memory = self.memory.memory().into_inner();
            let stop = self.take_requests(&memory);
            self.engine.submit();
            let finished = self.collect();
            self.notify(&memory);
            match stop {
                Stop::Full if finished => {}
                Stop::Full | Stop::Empty | Stop::Throttled | Stop::Held => return,
                Stop::Turn => break,
            }
        }
        // There is more to do, after other events. Fails only if the counter is full, in which case
        // it is readable anyway.
        let _ = self.active.kick.write(1);
    }

    /// Starts the requests that the driver has queued, at most one queue's worth.
    fn take_requests(&mut self, memory: &Arc<GuestRam>) -> Stop {
        let mut budget = self.active.queue.size();
        while !self.broken {
            if self.free.is_empty() || self.is_long {
                return Stop::Full;
            }
            if budget == 0 {
                return Stop::Turn;
            }
            budget -= 1;
            let chain = match self.active.queue.iter(&**memory) {
                Ok(mut chains) => chains.next(),
                Err(error) => {
                    self.give_up(&error);
                    break;
                }
            };
            if let Some(chain) = chain {
                if !self.shared.requests.begin() {
                    self.active.queue.go_to_previous_position();
                    return Stop::Held;
                }
                let head = chain.head_index();
                match self.parser.parse(chain, memory) {
                    Some((command, _)) if !self.has_room(command) => {
                        self.shared.requests.end();
                        self.active.queue.go_to_previous_position();
                        return Stop::Full;
                    }
                    Some((command, _)) if !self.admit(command) => {
                        // It is read and checked again when its time has come.
                        self.shared.requests.end();
                        self.active.queue.go_to_previous_position();
                        return Stop::Throttled;
                    }
                    Some((command, status)) => self.start(memory, head, command, status),
                    // There is no place for a status.
                    None => self.answer_without_status(memory, head),
                }
                continue;
            }
            match self.active.queue.enable_notification(&**memory) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.give_up(&error),
            }
        }
        Stop::Empty
    }

    /// Whether a request's first step fits what the engine may process at a time. One that is
    /// alone always does, so that a request completes for each that must wait.
    fn has_room(&self, command: Command) -> bool {
        let range = |range: Range| u64::from(range.count) * SECTOR;
        let len = match command {
            Command::Read { .. } => self.parser.writable.len().min(self.most_step()),
            Command::Write { .. } => self.parser.readable.len().min(self.most_step()),
            Command::Discard(its) | Command::WriteZeroes(its) => range(its).min(self.most_range()),
            Command::Flush | Command::GetId | Command::Unknown(_) | Command::Invalid => 0,
        };
        self.bytes == 0 || self.bytes + len <= self.most_bytes
    }

    /// Maximum size of a step of a transfer.
    fn most_step(&self) -> u64 {
        self.most_bytes.min(MOST_STEP)
    }

    /// Maximum size of a step of an operation on a range; a power of two.
    fn most_range(&self) -> u64 {
        self.most_bytes.max(LEAST_RANGE)
    }

    /// Size of the next step of a request, of which `left` bytes at `offset` are left.
    fn step(&self, operation: Operation, offset: u64, left: u64) -> u64 {
        match operation {
            Operation::Read | Operation::Write { .. } => left.min(self.most_step()),
            Operation::Flush => 0,
            // Steps end between clusters.
            Operation::Discard | Operation::WriteZeroes { .. } => {
                left.min(self.most_range() - offset % self.most_range())
            }
        }
    }

    /// Asks the rate limiter; requests without I/O are free.
    fn admit(&mut self, command: Command) -> bool {
        let Some(throttle) = &mut self.throttle else {
            return true;
        };
        match command {
            Command::Read { .. } => throttle.admit(self.parser.writable.len()),
            Command::Write { .. } => throttle.admit(self.parser.readable.len()),
            Command::Flush | Command::Discard(_) | Command::WriteZeroes(_) => throttle.admit(0),
            Command::GetId | Command::Unknown(_) | Command::Invalid => true,
        }
    }

    fn start(&mut self, memory: &Arc<GuestRam>, head: u16, command: Command, status: GuestAddress) {
        match self.prepare(memory, command) {
            Ok(Prepared::Io {
                operation,
                offset,
                len,
            }) => {
                let pending = Pending {
                    head,
                    status,
                    memory: Arc::clone(memory),
                    operation,
                    offset,
                    len,
                    done: 0,
                    step: 0,
                    since: Instant::now(),
                };
                if let Err(code) = self.go_on(pending) {
                    self.answer(memory, head, status, code, 0);
                }
            }
            Ok(Prepared::Done { written }) => {
                self.answer(memory, head, status, VIRTIO_BLK_S_OK, written);
            }
            Err(code) => self.answer(memory, head, status, code, 0),
        }
    }

    /// Starts the next step of a request, whose memory `parser` describes. An error is the status
    /// that ends the request.
    fn go_on(&mut self, mut pending: Pending) -> Result<(), u32> {
        pending.done += pending.step;
        let offset = pending.offset + pending.done;
        pending.step = self.step(pending.operation, offset, pending.len - pending.done);
        let operation = match pending.operation {
            // The last step flushes for all of them.
            Operation::WriteZeroes { may_unmap, .. } if pending.has_more() => {
                let durable = false;
                Operation::WriteZeroes { may_unmap, durable }
            }
            operation => operation,
        };
        let pieces = match operation {
            Operation::Read => Some(&self.parser.writable),
            Operation::Write { .. } => Some(&self.parser.readable),
            _ => None,
        };
        let buffers = match pieces {
            Some(pieces) => {
                let mut buffers = self.spare.pop().unwrap_or_default();
                buffers.reset(Arc::clone(&pending.memory));
                // `all` stops at the first piece that is not RAM.
                let mut pieces = pieces.range(pending.done, pending.step);
                if !pieces.all(|(address, len)| buffers.push(address, len as usize)) {
                    return Err(VIRTIO_BLK_S_IOERR);
                }
                Some(buffers)
            }
            None => None,
        };
        // `take_requests` has checked that there is one, or the previous step has freed it.
        let tag = self.free.pop().ok_or(VIRTIO_BLK_S_IOERR)?;
        let io = match buffers {
            Some(buffers) => Io::transfer(operation, offset, buffers, tag),
            None => Io::range(operation, offset, pending.step, tag),
        };
        self.bytes += pending.step;
        self.is_long |= pending.has_more();
        self.pending[tag] = Some(pending);
        self.engine.start(io);
        Ok(())
    }

    /// Checks a request, and either turns it into an operation or completes it immediately. An
    /// error is the status that refuses the request.
    fn prepare(&mut self, memory: &Arc<GuestRam>, command: Command) -> Result<Prepared, u32> {
        // Without write-back caching or flushes, a write must survive a power failure of the host.
        let durable = self.write_through_always || !self.shared.is_writeback();
        let (operation, sector, len) = match command {
            Command::Read { sector } => (Operation::Read, sector, self.parser.writable.len()),
            Command::Write { sector } => (
                Operation::Write { durable },
                sector,
                self.parser.readable.len(),
            ),
            Command::Flush => (Operation::Flush, 0, 0),
            Command::Discard(_) if !self.shared.can_discard => return Err(VIRTIO_BLK_S_UNSUPP),
            Command::WriteZeroes(_) if !self.shared.can_write_zeroes => {
                return Err(VIRTIO_BLK_S_UNSUPP);
            }
            Command::Discard(range) => {
                let (sector, len) = self.shared.check_range(range, 0)?;
                (Operation::Discard, sector, len)
            }
            Command::WriteZeroes(range) => {
                let unmap = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                let (sector, len) = self.shared.check_range(range, unmap)?;
                let may_unmap = range.flags & unmap != 0 && self.shared.can_discard;
                (Operation::WriteZeroes { may_unmap, durable }, sector, len)
            }
            Command::GetId => {
                let written = self.parser.writable.write(memory, &self.shared.id);
                return written
                    .map(|written| Prepared::Done { written })
                    .ok_or(VIRTIO_BLK_S_IOERR);
            }
            Command::Unknown(kind) => {
                log::debug!("the driver sent an unknown disk request ({kind})");
                return Err(VIRTIO_BLK_S_UNSUPP);
            }
            Command::Invalid => return Err(VIRTIO_BLK_S_IOERR),
        };
        if operation != Operation::Read && operation != Operation::Flush && self.shared.read_only {
            return Err(VIRTIO_BLK_S_IOERR);
        }
        let offset = self.shared.check_extent(sector, len)?;
        if len == 0 && operation != Operation::Flush {
            return Ok(Prepared::Done { written: 0 });
        }
        Ok(Prepared::Io {
            operation,
            offset,
            len,
        })
    }

    /// Replies to the requests that the engine has completed; true if there were any.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(finished) = self.engine.take_finished() {
            any = true;
            self.complete(finished);
        }
        any
    }

    fn complete(&mut self, Finished { mut io, result }: Finished) {
        let Some(pending) = self.pending.get_mut(io.tag).and_then(Option::take) else {
            return;
        };
        self.free.push(io.tag);
        self.bytes -= pending.step;
        if self.spare.len() < self.pending.len() {
            io.buffers.clear();
            self.spare.push(io.buffers);
        }
        let code = match result {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(error) if is_unsupported(&error) => VIRTIO_BLK_S_UNSUPP,
            Err(error) => {
                self.shared.report(pending.operation, io.offset, &error);
                VIRTIO_BLK_S_IOERR
            }
        };
        let has_more = code == VIRTIO_BLK_S_OK && pending.has_more();
        if has_more && (self.is_ending || self.shared.requests.is_held()) {
            self.is_long = false;
            // Nothing was taken from the queue after it.
            self.active.queue.go_to_previous_position();
            self.shared.requests.end();
            return;
        }
        if has_more {
            let (memory, head, status) =
                (Arc::clone(&pending.memory), pending.head, pending.status);
            if let Err(code) = self.go_on(pending) {
                self.is_long = false;
                self.answer(&memory, head, status, code, 0);
            }
            return;
        }
        if pending.len > pending.step {
            self.is_long = false;
        }
        let mut written = 0;
        if code == VIRTIO_BLK_S_OK {
            let counters = &self.shared.counters;
            match pending.operation {
                Operation::Read => {
                    // A chain holds less than 2^32 bytes.
                    written = pending.len as u32;
                    counters.read.count(pending.len, pending.since.elapsed());
                }
                Operation::Write { .. } => {
                    counters.write.count(pending.len, pending.since.elapsed());
                }
                _ => {}
            }
        }
        self.answer(&pending.memory, pending.head, pending.status, code, written);
    }

    /// Writes the status and returns the chain; `written` counts the data before the status.
    fn answer(
        &mut self,
        memory: &GuestRam,
        head: u16,
        status: GuestAddress,
        code: u32,
        written: u32,
    ) {
        // `parse` has checked that the status is in RAM; status codes fit a byte.
        if let Err(error) = memory.write_obj(code as u8, status) {
            log::debug!("cannot write a disk request's status: {error}");
        }
        self.add_used(memory, head, written.saturating_add(1));
        self.shared.requests.end();
    }

    fn answer_without_status(&mut self, memory: &GuestRam, head: u16) {
        self.add_used(memory, head, 0);
        self.shared.requests.end();
    }

    fn add_used(&mut self, memory: &GuestRam, head: u16, len: u32) {
        if self.broken {
            return;
        }
        match self.active.queue.add_used(memory, head, len) {
            Ok(()) => self.unnotified = true,
            Err(error) => self.give_up(&error),
        }
    }

    /// Interrupts the driver if it asks for it, for chains used since the last notification.
    fn notify(&mut self, memory: &GuestRam) {
        if self.broken || !std::mem::take(&mut self.unnotified) {
            return;
        }
        match self.active.queue.needs_notification(memory) {
            Ok(false) => {}
            Ok(true) => {
                if let Err(error) = self.interrupt.queue(self.active.index) {
                    log::error!("cannot interrupt the guest for its disk: {error}");
                }
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn give_up(&mut self, error: &virtio_queue::Error) {
        if !self.broken {
            self.broken = true;
            log::warn!(
                "queue {} of disk {} is unusable: {error}",
                self.active.index,
                self.shared.path.display()
            );
            self.interrupt.needs_reset();
        }
    }
}

impl MutEventSubscriber for QueueWorker {
    fn init(&mut self, ops: &mut EventOps) {
        if !self.affinity.is_empty()
            && let Err(error) = pin_current_thread(&self.affinity)
        {
            log::warn!(
                "a disk queue is not pinned to host CPUs {:?}: {error}",
                self.affinity
            );
        }
        let events = [
            Events::with_data(&self.active.kick, KICK, EventSet::IN),
            Events::with_data(self.engine.completion(), COMPLETION, EventSet::IN),
        ];
        let timer = self
            .throttle
            .as_ref()
            .map(|throttle| Events::with_data(throttle, TIMER, EventSet::IN));
        for event in events.into_iter().chain(timer) {
            if let Err(error) = ops.add(event) {
                log::error!("a disk worker cannot watch its events: {error}");
            }
        }
        // Requests queued earlier (by a restored guest, or before a pause) arrive without a kick.
        let _ = self.active.kick.write(1);
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        // Fails only if another reader has cleared it; there is something to do anyway.
        match (events.data(), &mut self.throttle) {
            (KICK, _) => drop(self.active.kick.read()),
            (COMPLETION, _) => drop(self.engine.completion().read()),
            (TIMER, Some(throttle)) => throttle.wake(),
            _ => return,
        }
        self.serve();
    }
}

impl DeviceWorker for QueueWorker {
    fn drain(&mut self) {
        self.is_ending = true;
        let memory = self.memory.memory().into_inner();
        while self.free.len() < self.pending.len() {
            self.engine.submit();
            self.engine.wait();
            if !self.collect() {
                log::error!("requests to disk {} are lost", self.shared.path.display());
                break;
            }
        }
        self.notify(&memory);
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::EOPNOTSUPP)
}
