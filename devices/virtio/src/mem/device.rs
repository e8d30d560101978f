//! The device and its worker.

use std::{
    io::{self, Read, Write},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use base::Unpoisoned;
use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestRam,
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_queue::DescriptorChain;
use vm_memory::GuestAddress;
use vmm_sys_util::epoll::EventSet;

use super::blocks::{Blocks, Plugged};
use crate::{
    config_change::ConfigChange,
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    discard::{Discards, discard_blocks, populate},
    in_flight::InFlight,
    served::{COMMON_FEATURES, Chain, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 24,
    name: "memory",
    class: DeviceType::UNCLASSIFIED,
};

const QUEUE_SIZES: [u16; 1] = [64];

/// Minimum block size in bytes: the size of a transparent huge page.
pub const BLOCK: u64 = 2 << 20;

/// Number of bytes that a request plugs or unplugs, at least a block, before it looks whether it has to stop: the host may
/// take seconds per gigabyte.
const STEP: u64 = 256 << 20;

/// Feature bit (5.15.3): the driver must not access unplugged memory, not even for reading. A read
/// would allocate a page on the host.
const VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE: u32 = 1;

/// Requests (5.15.6).
const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;
const REQUEST: usize = 24;

/// Responses.
const ACK: u16 = 0;
const NACK: u16 = 1;
const ERROR: u16 = 3;

/// A memory device's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_mem0`.
    pub thread_name: String,
    /// Guest address of the region.
    pub address: GuestAddress,
    /// Length of the region in bytes.
    pub len: u64,
    /// Block size in bytes: [`BLOCK`], or the size of the host pages behind the region if that is
    /// larger.
    pub block: u64,
    /// Bytes that the guest is asked to plug initially.
    pub requested: u64,
    /// Allocates host memory when a block is plugged, not when it is touched, at which time it
    /// would be too late to refuse it.
    pub populate: bool,
    /// Returns unplugged memory to the host.
    pub discards: Arc<Discards>,
}

/// Why a memory device cannot be created.
#[derive(Debug, thiserror::Error)]
#[error(
    "memory that is plugged by virtio-mem comes in blocks of {block} bytes: \
     {len} at {address:#x}, {requested} of them plugged, do not fit"
)]
pub struct Error {
    block: u64,
    address: u64,
    len: u64,
    requested: u64,
}

/// Saved state of a memory device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Bytes that the guest is asked to plug.
    pub requested: u64,
    /// Which blocks are plugged.
    pub blocks: Blocks,
    /// The request that has changed a part of its blocks and goes on when it comes again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun: Option<Begun>,
}

/// The kind of a request, and its blocks.
type Begun = (u16, Range<usize>);

struct Shared {
    start: u64,
    block: u64,
    populate: bool,
    requested: AtomicU64,
    /// Only the worker changes the blocks while there is one. The lock is held only briefly: vCPUs
    /// and the control thread ask how much is plugged, and the host may take long to provide
    /// memory.
    blocks: Mutex<Blocks>,
    /// See [`State::begun`].
    begun: Mutex<Option<Begun>>,
    requests: InFlight,
    change: ConfigChange,
    discards: Arc<Discards>,
    /// The host has refused to provide or take back memory, and this was logged.
    failing: AtomicBool,
}

impl Shared {
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock_unpoisoned()
    }

    fn begun(&self) -> MutexGuard<'_, Option<Begun>> {
        self.begun.lock_unpoisoned()
    }
}

/// Controls a memory device while it is plugged in.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// Block size in bytes.
    pub fn block(&self) -> u64 {
        self.0.block
    }

    /// Asks the guest to have `bytes` plugged in total, rounded down to whole blocks.
    pub fn resize(&self, bytes: u64) {
        let whole = bytes / self.0.block * self.0.block;
        self.0.requested.store(whole, Ordering::SeqCst);
        self.0.change.announce();
    }

    /// Bytes that the guest has plugged.
    pub fn plugged(&self) -> u64 {
        self.0.blocks().plugged() * self.0.block
    }
}

/// A memory device.
pub struct Mem {
    options: Options,
    shared: Arc<Shared>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<MemWorker>>,
}

impl Mem {
    /// Creates a device for a region of the VM's RAM.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        let Options {
            address,
            len,
            block,
            requested,
            populate,
            ..
        } = options;
        let whole = [address.0, len, requested]
            .iter()
            .all(|bytes| bytes.is_multiple_of(block));
        let blocks = len.checked_div(block).unwrap_or(0);
        let blocks = usize::try_from(blocks).unwrap_or(0);
        if !block.is_power_of_two() || block < BLOCK || !whole || blocks == 0 || requested > len {
            return Err(Error {
                block,
                address: address.0,
                len,
                requested,
            });
        }
        let shared = Shared {
            start: address.0,
            block,
            populate,
            requested: AtomicU64::new(requested),
            blocks: Mutex::new(Blocks::new(blocks)),
            begun: Mutex::default(),
            requests: InFlight::default(),
            change: ConfigChange::default(),
            discards: Arc::clone(&options.discards),
            failing: AtomicBool::new(false),
        };
        Ok(Self {
            options,
            shared: Arc::new(shared),
            spawner,
            worker: None,
        })
    }

    /// A handle to control the device once it is plugged in.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.shared))
    }
}

impl VirtioDevice for Mem {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES | 1 << VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let block = self.shared.block;
        let plugged = self.shared.blocks().plugged() * block;
        let requested = self.shared.requested.load(Ordering::SeqCst);
        // Block size, node (not offered), address, region size, usable size, plugged, requested.
        let (address, len) = (self.options.address.0, self.options.len);
        let fields = [block, 0, address, len, len, plugged, requested];
        let config: Vec<u8> = fields
            .iter()
            .flat_map(|field| field.to_le_bytes())
            .collect();
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let Some(active) = queues.into_iter().next() else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 1 });
        };
        self.shared.requests.start_over();
        let name = &self.options.thread_name;
        let queue = ServedQueue::new(active, memory, interrupt.clone(), features, name);
        self.shared.change.connect(Some(interrupt));
        let worker = MemWorker {
            queue,
            shared: Arc::clone(&self.shared),
        };
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Memory, name, worker);
        self.worker = Some(worker.map_err(|source| ActivateError::Host {
            action: "start a memory device's thread",
            source,
        })?);
        Ok(())
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let what = || format!("memory device at {:#x}", self.options.address.0);
        self.shared.requests.quiesce(what, patience)
    }

    fn carry_on(&mut self) {
        self.shared.requests.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.shared.change.connect(None);
        let worker = self.worker.take().and_then(Worker::stop);
        worker
            .map(|worker| worker.queue.active)
            .into_iter()
            .collect()
    }

    fn reset(&mut self) {
        // Plugged blocks stay plugged: the guest's memory outlives its driver.
        self.shared.change.forget();
        *self.shared.begun() = None;
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            requested: self.shared.requested.load(Ordering::SeqCst),
            blocks: self.shared.blocks().clone(),
            begun: self.shared.begun().clone(),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let State {
            requested,
            blocks,
            begun,
        } = serde_json::from_value(state)?;
        let count = self.shared.blocks().count();
        let whole = requested.is_multiple_of(self.shared.block);
        let fits = blocks.count() == count && blocks.is_consistent();
        if !fits || !whole || requested > self.options.len {
            return Err(StateError::Mismatch(format!(
                "memory of {} blocks was saved, the device has {count}",
                blocks.count()
            )));
        }
        for block in blocks.plugged_blocks() {
            let (address, len) = self.shared.place(&(block..block + 1));
            let range = address.0..address.0 + len;
            let plugged = self.shared.discards.blocks().plug(range, len);
            plugged.map_err(|error| {
                StateError::Mismatch(format!("physical devices cannot reach memory: {error}"))
            })?;
        }
        *self.shared.blocks() = blocks;
        // Compared with requests, never used.
        *self.shared.begun() = begun;
        self.shared.requested.store(requested, Ordering::SeqCst);
        // The size may have been set after the guest was paused for the snapshot.
        self.shared.change.announce();
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("plugged_bytes", self.handle().plugged()),
            (
                "requested_bytes",
                self.shared.requested.load(Ordering::Relaxed),
            ),
        ]
    }
}

struct MemWorker {
    queue: ServedQueue,
    shared: Arc<Shared>,
}

impl MemWorker {
    fn serve(&mut self) {
        let shared = &self.shared;
        self.queue.serve(|chain, ram| {
            // Requests that are held back stay in the queue, which is kicked when they may continue.
            if !shared.requests.begin() {
                return Chain::Later;
            }
            let used = match request(chain.clone(), ram, shared) {
                Some((result, state)) => {
                    let mut response = [0; 10];
                    response[..2].copy_from_slice(&result.to_le_bytes());
                    response[8..].copy_from_slice(&state.to_le_bytes());
                    let written = chain
                        .writer(ram)
                        .map(|mut writer| writer.write_all(&response));
                    Chain::Used(match written {
                        Ok(Ok(())) => response.len() as u32,
                        _ => 0,
                    })
                }
                None => Chain::Later,
            };
            shared.requests.end();
            used
        });
    }
}

/// Executes a request. Returns the response type, and the state for requests that ask for it; `None` if the request had to
/// stop, and goes on when it comes again.
fn request(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    shared: &Shared,
) -> Option<(u16, u16)> {
    let mut bytes = [0; REQUEST];
    let read = chain
        .reader(ram)
        .map(|mut reader| reader.read_exact(&mut bytes));
    if !matches!(read, Ok(Ok(()))) {
        return Some((ERROR, 0));
    }
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let mut address = [0; 8];
    address.copy_from_slice(&bytes[8..16]);
    let address = u64::from_le_bytes(address);
    let count = shared.blocks().count();
    let begun = shared.begun().take();
    let kind = half(0);
    if kind == UNPLUG_ALL {
        return Some((unplug(shared, ram, 0..count)?, 0));
    }
    let Some(range) = shared.range(count, address, half(16)) else {
        return Some((ERROR, 0));
    };
    let this = Some((kind, range.clone()));
    let goes_on = begun == this;
    // No other thread changes them before this request is complete.
    let (state, plugged) = {
        let blocks = shared.blocks();
        (blocks.state(range.clone()), blocks.plugged())
    };
    let answer = match kind {
        PLUG if goes_on => plug(shared, ram, range),
        PLUG if state == Plugged::None => {
            // The guest may not plug more than was requested of it.
            let wanted = (plugged + range.len() as u64) * shared.block;
            if wanted > shared.requested.load(Ordering::SeqCst) {
                return Some((NACK, 0));
            }
            plug(shared, ram, range)
        }
        UNPLUG if goes_on || state == Plugged::All => unplug(shared, ram, range),
        STATE => {
            let state = match state {
                Plugged::All => 0,
                Plugged::None => 1,
                Plugged::Some => 2,
            };
            return Some((ACK, state));
        }
        _ => return Some((ERROR, 0)),
    };
    // A part of what could not be unplugged may be.
    if answer.is_none() || answer == Some(NACK) && kind == UNPLUG {
        *shared.begun() = this;
    }
    Some((answer?, 0))
}

impl Shared {
    /// The blocks that a request names; `None` if they are not all in the region.
    fn range(&self, count: usize, address: u64, blocks: u16) -> Option<Range<usize>> {
        let offset = address.checked_sub(self.start)?;
        let first = usize::try_from(offset / self.block).ok()?;
        let end = first.checked_add(blocks.into())?;
        let whole = offset.is_multiple_of(self.block);
        (whole && blocks > 0 && end <= count).then_some(first..end)
    }

    /// Guest address of the blocks, and their length in bytes.
    fn place(&self, range: &Range<usize>) -> (GuestAddress, u64) {
        let address = self.start + range.start as u64 * self.block;
        (GuestAddress(address), range.len() as u64 * self.block)
    }

    /// The blocks in steps; `None` in place of the rest if the device is held.
    fn steps(&self, range: Range<usize>) -> impl Iterator<Item = Option<Range<usize>>> {
        let size = usize::try_from(STEP / self.block).unwrap_or(1).max(1);
        let starts = range.clone().step_by(size);
        starts.map(move |start| {
            let step = start..range.end.min(start + size);
            (!self.requests.is_held()).then_some(step)
        })
    }

    /// Response to a request, given the host's result. A refusal is logged once, or a guest could
    /// flood the log.
    fn answer(&self, result: io::Result<()>, refused: &str) -> u16 {
        let Err(error) = result else {
            self.failing.store(false, Ordering::Relaxed);
            return ACK;
        };
        if !self.failing.swap(true, Ordering::Relaxed) {
            log::warn!("{refused}: {error}");
        }
        NACK
    }
}

/// Plugs all blocks or none; `None` if this had to stop.
fn plug(shared: &Shared, ram: &GuestRam, range: Range<usize>) -> Option<u16> {
    const REFUSED: &str = "the host has no memory for a guest to plug";
    for step in shared.steps(range.clone()) {
        let step = step?;
        if shared.blocks().state(step.clone()) == Plugged::All {
            // Before the request had to stop.
            continue;
        }
        if let Err(error) = plug_step(shared, ram, &step) {
            let answer = shared.answer(Err(error), REFUSED);
            let (address, len) = shared.place(&step);
            let kept = discard_blocks(ram, address, len).map(drop);
            if let Err(error) = kept.and(take_back(shared, ram, range)?) {
                log::warn!("the host keeps memory that the guest did not get: {error}");
            }
            return Some(answer);
        }
        shared.blocks().set(step, true);
    }
    Some(shared.answer(Ok(()), REFUSED))
}

fn plug_step(shared: &Shared, ram: &GuestRam, step: &Range<usize>) -> io::Result<()> {
    let (address, len) = shared.place(step);
    if shared.populate {
        populate(ram, address, len)?;
    }
    let blocks = shared.discards.blocks();
    blocks.plug(address.0..address.0 + len, shared.block)
}

/// Unplugs blocks; `None` if this had to stop.
fn unplug(shared: &Shared, ram: &GuestRam, range: Range<usize>) -> Option<u16> {
    let result = take_back(shared, ram, range)?;
    Some(shared.answer(result, "unplugged memory stays with the guest"))
}

/// Unplugs those blocks that are plugged, and returns the memory of all to the host; `None` if this had to stop.
fn take_back(shared: &Shared, ram: &GuestRam, range: Range<usize>) -> Option<io::Result<()>> {
    for step in shared.steps(range) {
        let step = step?;
        let (address, len) = shared.place(&step);
        let blocks = shared.discards.blocks();
        let unplugged = blocks.unplug(address.0..address.0 + len, shared.block);
        if let Err(error) = unplugged.and_then(|()| discard_blocks(ram, address, len)) {
            return Some(Err(error));
        }
        shared.blocks().set(step, false);
    }
    Some(Ok(()))
}

impl MutEventSubscriber for MemWorker {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.queue.active.kick, EventSet::IN)) {
            log::error!("a memory device cannot watch its queue: {error}");
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.queue.acknowledge_kick();
        self.serve();
    }
}

impl DeviceWorker for MemWorker {}

#[cfg(test)]
mod tests {
    use device_model::thread::Unconfined;
    use vm_memory::mmap::MmapRegionBuilder;

    use super::*;

    #[test]
    fn memory_that_the_host_cannot_give_is_not_plugged() {
        let options = Options {
            thread_name: "_mem0".to_owned(),
            address: GuestAddress(0),
            len: BLOCK,
            block: BLOCK,
            requested: BLOCK,
            populate: true,
            discards: Arc::default(),
        };
        let mem = Mem::new(options, Arc::new(Unconfined)).unwrap();
        let plug = |access| {
            let region = MmapRegionBuilder::new(BLOCK as usize)
                .with_mmap_prot(access)
                .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE)
                .build()
                .unwrap();
            let region = vm_memory::GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
            let ram = GuestRam::from_regions(vec![region]).unwrap();
            let answer = plug(&mem.shared, &ram, 0..1);
            (answer, mem.handle().plugged())
        };
        // Memory that is not writable cannot be populated either.
        assert_eq!(plug(libc::PROT_READ), (Some(NACK), 0));
        assert_eq!(plug(libc::PROT_READ | libc::PROT_WRITE), (Some(ACK), BLOCK));
    }
}
