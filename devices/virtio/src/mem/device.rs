//! The device and its worker.

use std::{
    io::{self, Read, Write},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use base::Unpoisoned;
use device_model::{
    lifecycle::{ActivateError, StateError},
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
}

struct Shared {
    start: u64,
    block: u64,
    populate: bool,
    requested: AtomicU64,
    /// Only the worker changes the blocks while there is one. The lock is held only briefly: vCPUs
    /// and the control thread ask how much is plugged, and the host may take long to provide
    /// memory.
    blocks: Mutex<Blocks>,
    change: ConfigChange,
    discards: Arc<Discards>,
    /// The host has refused to provide or take back memory, and this was logged.
    failing: AtomicBool,
}

impl Shared {
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock_unpoisoned()
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
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            requested: self.shared.requested.load(Ordering::SeqCst),
            blocks: self.shared.blocks().clone(),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let State { requested, blocks } = serde_json::from_value(state)?;
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
            let (result, state) = request(chain.clone(), ram, shared);
            let mut response = [0; 10];
            response[..2].copy_from_slice(&result.to_le_bytes());
            response[8..].copy_from_slice(&state.to_le_bytes());
            match chain
                .writer(ram)
                .map(|mut writer| writer.write_all(&response))
            {
                Ok(Ok(())) => Chain::Used(response.len() as u32),
                _ => Chain::Used(0),
            }
        });
    }
}

/// Executes a request. Returns the response type, and the state for requests that ask for it.
fn request(chain: DescriptorChain<&GuestRam>, ram: &GuestRam, shared: &Shared) -> (u16, u16) {
    let mut bytes = [0; REQUEST];
    let read = chain
        .reader(ram)
        .map(|mut reader| reader.read_exact(&mut bytes));
    if !matches!(read, Ok(Ok(()))) {
        return (ERROR, 0);
    }
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let mut address = [0; 8];
    address.copy_from_slice(&bytes[8..16]);
    let address = u64::from_le_bytes(address);
    let count = shared.blocks().count();
    if half(0) == UNPLUG_ALL {
        return (unplug(shared, ram, 0..count), 0);
    }
    let Some(range) = shared.range(count, address, half(16)) else {
        return (ERROR, 0);
    };
    // No other thread changes them before this request is complete.
    let (state, plugged) = {
        let blocks = shared.blocks();
        (blocks.state(range.clone()), blocks.plugged())
    };
    match half(0) {
        PLUG => {
            if state != Plugged::None {
                return (ERROR, 0);
            }
            // The guest may not plug more than was requested of it.
            let wanted = (plugged + range.len() as u64) * shared.block;
            if wanted > shared.requested.load(Ordering::SeqCst) {
                return (NACK, 0);
            }
            (plug(shared, ram, range), 0)
        }
        UNPLUG if state == Plugged::All => (unplug(shared, ram, range), 0),
        STATE => (
            ACK,
            match state {
                Plugged::All => 0,
                Plugged::None => 1,
                Plugged::Some => 2,
            },
        ),
        _ => (ERROR, 0),
    }
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

fn plug(shared: &Shared, ram: &GuestRam, range: Range<usize>) -> u16 {
    let (address, len) = shared.place(&range);
    let populated = if shared.populate {
        populate(ram, address, len)
    } else {
        Ok(())
    };
    let plugged = populated.and_then(|()| {
        let end = address.0 + len;
        let blocks = shared.discards.blocks();
        blocks.plug(address.0..end, shared.block)
    });
    let answer = shared.answer(plugged, "the host has no memory for a guest to plug");
    if answer == ACK {
        shared.blocks().set(range, true);
    } else if let Err(error) = discard_blocks(ram, address, len) {
        log::warn!("the host keeps memory that the guest did not get: {error}");
    }
    answer
}

fn unplug(shared: &Shared, ram: &GuestRam, range: Range<usize>) -> u16 {
    let (address, len) = shared.place(&range);
    let unplugged = shared
        .discards
        .blocks()
        .unplug(address.0..address.0 + len, shared.block);
    let given = unplugged.and_then(|()| discard_blocks(ram, address, len));
    let answer = shared.answer(given.map(drop), "unplugged memory stays with the guest");
    if answer == ACK {
        shared.blocks().set(range, false);
    }
    answer
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
        assert_eq!(plug(libc::PROT_READ), (NACK, 0));
        assert_eq!(plug(libc::PROT_READ | libc::PROT_WRITE), (ACK, BLOCK));
    }
}
