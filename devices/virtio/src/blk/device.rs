//! The device: options, errors, activation and saved state.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestMemory,
    thread::{ThreadRole, ThreadSpawner},
    throttle::{SharedRateLimiter, Throttle},
    worker::Worker,
};
use disk::{AsyncIo, Disk, DiskError, DiskOptions, SECTOR, Scope};
use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_WRITE_ZEROES,
    },
    virtio_ring::VIRTIO_RING_F_EVENT_IDX,
};
use virtio_queue::QueueT;

use super::{
    config::{self, Config, WRITEBACK, has},
    queue::{QueueWorker, Setup},
    shared::{ID_LEN, Shared},
};
use crate::device::{Activation, ActiveQueue, DeviceType, VirtioDevice, VirtioInterrupt};

const TYPE: DeviceType = DeviceType {
    number: 2,
    name: "disk",
    class: 0x01_8000,
};

/// Largest size of a block in bytes.
const MAX_BLOCK: u32 = 65536;

/// Maximum number of requests in flight per queue, however long the queue is.
const MAX_DEPTH: u16 = 1024;

/// A block device's configuration.
#[derive(Clone)]
pub struct Options {
    /// Prefix of the thread names: `_disk0` results in `_disk0_q0`, `_disk0_q1` ...
    pub thread_name: String,
    /// The image.
    pub disk: DiskOptions,
    /// Number of queues, 1 to 256. Each has its own thread while the driver uses it.
    pub num_queues: u16,
    /// Size of each queue in descriptors: a power of two from 4 to 32768.
    pub queue_size: u16,
    /// Serial number, of which the guest sees the first 20 bytes. The default is derived from the
    /// image's device and inode numbers.
    pub serial: Option<String>,
    /// Limits of bytes and operations. Devices that share one limiter are limited together.
    pub rate_limiter: Option<SharedRateLimiter>,
    /// Host CPUs for the workers of certain queues, as (queue index, CPUs).
    pub affinity: Vec<(u16, Vec<usize>)>,
}

/// Why a block device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Unsupported number of queues.
    #[error("a disk has 1 to 256 queues, not {0}")]
    NumQueues(u16),
    /// Unsupported queue size.
    #[error("the size of a disk's queues is a power of two from 4 to 32768, not {0}")]
    QueueSize(u16),
    /// Affinity for a queue that does not exist.
    #[error("the affinity for queue {queue} cannot apply: the disk has {num_queues} queues")]
    Affinity {
        /// Index of the queue named.
        queue: u16,
        /// Number of queues of the device.
        num_queues: u16,
    },
    /// A host resource is unavailable.
    #[error("cannot prepare asynchronous I/O for a disk")]
    Engine(#[source] io::Error),
}

/// Saved state of a block device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Size in bytes as the guest knows it.
    pub capacity: u64,
    /// Write-back caching is enabled.
    pub writeback: bool,
    /// Size in bytes of a block as the guest knows it. States that were saved before it was told do not have it.
    #[serde(default)]
    pub block: Option<u32>,
}

/// Work of another thread on the image: it grows, or its tables are written.
struct Work {
    shared: Arc<Shared>,
    /// Dropped last: whoever waits for this opens the image again at once, and it must not be locked here.
    _count: WorkCount,
}

impl Work {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.working.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(shared),
            _count: WorkCount(Arc::clone(&shared.working)),
        }
    }
}

struct WorkCount(Arc<AtomicUsize>);

impl Drop for WorkCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Flushes a disk. Blocks.
pub type Flush = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Controls a device while it is plugged in. The handle keeps the image open and locked: drop it
/// together with the device.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// What grows the disk to `bytes` and notifies the guest, and takes as long as the storage likes. Until then, or
    /// until it is dropped, the device is not [quiesced](VirtioDevice::quiesce).
    pub fn growth(
        &self,
        bytes: u64,
    ) -> Result<impl FnOnce() -> Result<(), DiskError> + Send + use<>, DiskError> {
        let grow = self.shared.growth(bytes)?;
        let work = Work::new(&self.shared);
        Ok(move || {
            let work = work;
            grow(&work.shared)
        })
    }

    /// Locks the image: see [`Disk::lock`].
    pub fn lock(&self) -> Result<(), DiskError> {
        self.shared.with_disk(|disk| disk.lock())
    }

    /// Unlocks the image: see [`Disk::unlock`].
    pub fn unlock(&self) -> Result<(), DiskError> {
        self.shared.with_disk(|disk| disk.unlock())
    }

    /// What flushes all completed writes to stable storage, which may take for ever: it keeps neither the image's lock
    /// nor the device's.
    pub fn flush(&self) -> Flush {
        Box::new(self.shared.with_disk(|disk| disk.flush()))
    }

    /// Whether the image is locked exclusively while it is in use, with a lock that is visible at
    /// least within `among`: then the lock's holder is the only user of the disk there.
    pub fn is_exclusive(&self, among: Scope) -> bool {
        !self.shared.read_only && self.shared.with_disk(|disk| disk.lock_scope()) >= among
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.shared.capacity()
    }

    /// Counters as in [`VirtioDevice::counters`], from any thread.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.list()
    }
}

/// The resources of a queue that do not depend on the driver, created in advance.
struct Engine {
    io: Box<dyn AsyncIo>,
    throttle: Option<Throttle>,
}

/// A block device.
pub struct Blk {
    shared: Arc<Shared>,
    config: Config,
    features: u64,
    queue_sizes: Vec<u16>,
    affinity: Vec<Vec<usize>>,
    thread_name: String,
    spawner: Arc<dyn ThreadSpawner>,
    rate_limiter: Option<SharedRateLimiter>,
    /// One per queue; `None` while the queue's worker owns it, and after that worker has died.
    engines: Vec<Option<Engine>>,
    workers: Vec<Worker<QueueWorker>>,
    /// The tables of the image were written, or could not be, since the last request.
    is_settled: bool,
}

impl Blk {
    /// Opens and locks the image, and prepares I/O on it.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        Self::with(Disk::open(&options.disk)?, options, spawner)
    }

    /// Prepares I/O on an image that was opened as the options say.
    pub fn with(
        disk: Disk,
        options: Options,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        let (num_queues, queue_size) = (options.num_queues, options.queue_size);
        if !(1..=256).contains(&num_queues) {
            return Err(Error::NumQueues(num_queues));
        }
        if !queue_size.is_power_of_two() || queue_size < 4 {
            return Err(Error::QueueSize(queue_size));
        }
        let mut affinity = vec![Vec::new(); num_queues as usize];
        for (queue, cpus) in options.affinity {
            *affinity
                .get_mut(queue as usize)
                .ok_or(Error::Affinity { queue, num_queues })? = cpus;
        }
        let id = match &options.serial {
            Some(serial) => padded(serial),
            None => padded(disk.default_serial()),
        };
        let read_only = options.disk.read_only;
        let mut blk = Self {
            config: Config::new(&disk, num_queues, queue_size),
            features: config::features(&disk, read_only, num_queues),
            shared: Arc::new(Shared::new(disk, read_only, id)),
            queue_sizes: vec![queue_size; num_queues as usize],
            affinity,
            thread_name: options.thread_name,
            spawner,
            rate_limiter: options.rate_limiter,
            engines: Vec::new(),
            workers: Vec::new(),
            is_settled: false,
        };
        for index in 0..num_queues {
            let engine = blk.engine(index).map_err(Error::Engine)?;
            blk.engines.push(Some(engine));
        }
        Ok(blk)
    }

    /// A handle that is usable while the device is plugged in.
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Replaces a queue's engine, while the device is inactive.
    #[cfg(test)]
    pub(super) fn replace_engine(&mut self, index: usize, io: Box<dyn AsyncIo>) {
        self.engines[index] = Some(Engine { io, throttle: None });
    }

    fn engine(&self, index: u16) -> io::Result<Engine> {
        let name = self.queue_name(index);
        let limiter = self.rate_limiter.clone();
        Ok(Engine {
            io: self
                .shared
                .with_disk(|disk| disk.async_io(self.depth(), &*self.spawner, &name))?,
            throttle: limiter.map(Throttle::new).transpose()?,
        })
    }

    /// Maximum number of requests in flight per queue.
    fn depth(&self) -> u16 {
        self.queue_sizes
            .first()
            .map_or(1, |size| *size.min(&MAX_DEPTH))
    }

    fn queue_name(&self, index: u16) -> String {
        format!("{}_q{index}", self.thread_name)
    }

    fn start(&mut self, active: ActiveQueue, common: &Common) -> Result<(), ActivateError> {
        let index = active.index;
        let engine = self.engines.get_mut(index as usize).and_then(Option::take);
        // This runs on a vCPU's thread, which must not be able to create rings of io_uring.
        let engine = engine.ok_or_else(|| ActivateError::Host {
            action: "use the disk again",
            source: io::Error::other(
                "its I/O engine was lost with a thread that died or did not start: remove the disk, and add it again",
            ),
        })?;
        let worker = QueueWorker::new(Setup {
            depth: self.depth(),
            num_queues: self.queue_sizes.len() as u16,
            active,
            memory: common.memory.clone(),
            interrupt: Arc::clone(&common.interrupt),
            engine: engine.io,
            throttle: engine.throttle,
            shared: Arc::clone(&self.shared),
            affinity: self
                .affinity
                .get(index as usize)
                .cloned()
                .unwrap_or_default(),
            write_through_always: common.write_through_always,
        });
        let name = self.queue_name(index);
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Disk, &name, worker);
        self.workers
            .push(worker.map_err(|source| ActivateError::Host {
                action: "start a disk's thread",
                source,
            })?);
        Ok(())
    }
}

/// What all queues of one activation share.
struct Common {
    memory: GuestMemory,
    interrupt: Arc<dyn VirtioInterrupt>,
    write_through_always: bool,
}

impl Blk {
    /// Has a thread write tables of the image that are kept in memory, if there are any. Whoever copies the image of a
    /// device that is quiet finds all that was written, and so does who opens it when this process was killed.
    fn write_tables(&self) {
        let Some(write) = self.shared.with_disk(|disk| disk.unwritten()) else {
            return;
        };
        let work = Work::new(&self.shared);
        let write = Box::new(move || {
            let work = work;
            if let Err(error) = write() {
                let path = work.shared.path.display();
                log::error!("disk {path}: its tables cannot be written: {error}");
            }
        });
        let name = format!("{}_w", self.thread_name);
        if let Err(error) = self.spawner.spawn(ThreadRole::Disk, &name, write) {
            let path = self.shared.path.display();
            log::error!("disk {path}: no thread writes its tables: {error}");
        }
    }
}

impl VirtioDevice for Blk {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn refused_features(&self) -> u64 {
        1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let (capacity, writeback) = (self.shared.capacity(), self.shared.is_writeback());
        self.config.read(capacity, writeback, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if offset == WRITEBACK
            && let [on] = data
        {
            self.shared.set_writeback(*on != 0);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        if queues.is_empty() {
            return Err(ActivateError::MissingQueues { got: 0, needed: 1 });
        }
        if !has(features, VIRTIO_BLK_F_CONFIG_WCE) {
            self.shared.set_writeback(true);
        }
        self.shared.requests.start_over();
        self.is_settled = false;
        let common = Common {
            memory,
            interrupt,
            // Without a flush command, every write must be stable (virtio 1.2, 5.2.6.2).
            write_through_always: !has(features, VIRTIO_BLK_F_FLUSH),
        };
        for mut active in queues {
            active
                .queue
                .set_event_idx(has(features, VIRTIO_RING_F_EVENT_IDX));
            if let Err(error) = self.start(active, &common) {
                self.deactivate();
                return Err(error);
            }
        }
        self.shared.change.connect(Some(common.interrupt));
        Ok(())
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let start = Instant::now();
        let what = || format!("disk {}", self.shared.path.display());
        self.shared.requests.quiesce(what, patience)?;
        self.settle(patience.saturating_sub(start.elapsed()))
    }

    fn settle(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let start = Instant::now();
        let what = || format!("disk {}", self.shared.path.display());
        if self.shared.working.load(Ordering::Acquire) == 0 && !self.is_settled {
            // Once: the end of the device does not fail because its storage does.
            self.is_settled = true;
            self.write_tables();
        }
        while self.shared.working.load(Ordering::Acquire) > 0 {
            if start.elapsed() >= patience {
                return Err(Unanswered {
                    what: what(),
                    requests: 1,
                    patience,
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn settled(&self) -> io::Result<()> {
        match self.shared.with_disk(|disk| disk.unwritten().is_some()) {
            true => Err(io::Error::other(format!(
                "the tables of the disk image {} could not be written: the log says why",
                self.shared.path.display()
            ))),
            false => Ok(()),
        }
    }

    fn carry_on(&mut self) {
        self.is_settled = false;
        self.shared.requests.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.shared.change.connect(None);
        let mut queues = Vec::with_capacity(self.workers.len());
        for worker in std::mem::take(&mut self.workers) {
            let Some(worker) = worker.stop() else {
                continue;
            };
            let (active, io, throttle) = worker.into_parts();
            if let Some(slot) = self.engines.get_mut(active.index as usize) {
                *slot = Some(Engine { io, throttle });
            }
            queues.push(active);
        }
        queues
    }

    fn reset(&mut self) {
        // Restores the initial state: the cache mode, and no pending announcement of a size, which
        // the next driver reads anyway.
        self.shared.set_writeback(true);
        self.shared.change.forget();
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            capacity: self.shared.capacity(),
            writeback: self.shared.is_writeback(),
            block: Some(self.config.block()),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        let size = self.shared.with_disk(|disk| disk.size());
        if state.capacity > size || state.capacity == 0 || !state.capacity.is_multiple_of(SECTOR) {
            return Err(StateError::Mismatch(format!(
                "the disk had {} bytes, its image {} has {size}",
                state.capacity,
                self.shared.path.display()
            )));
        }
        if let Some(block) = state.block {
            let here = self.config.block();
            if !block.is_power_of_two() || !(SECTOR..=MAX_BLOCK.into()).contains(&block.into()) {
                return Err(StateError::Mismatch(format!(
                    "invalid block size {block} in the saved state: a disk has a power of two from {SECTOR} to \
                     {MAX_BLOCK} bytes; save the VM again"
                )));
            }
            // Larger ones consist of whole ones of this image.
            if block < here {
                return Err(StateError::Mismatch(format!(
                    "the guest uses blocks of {block} bytes, and the image {} has blocks of {here}: use \
                     logical_block_size={block}, without direct=on if its storage needs larger ones",
                    self.shared.path.display()
                )));
            }
            self.config.set_block(block);
        }
        self.shared.set_capacity(state.capacity);
        self.shared.set_writeback(state.writeback);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.list()
    }
}

/// The first bytes of `serial`, padded with zeroes.
fn padded(serial: &str) -> [u8; ID_LEN] {
    let mut id = [0; ID_LEN];
    let count = serial.len().min(ID_LEN);
    id[..count].copy_from_slice(&serial.as_bytes()[..count]);
    id
}
