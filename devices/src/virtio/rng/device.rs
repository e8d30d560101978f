//! The device and its worker.

use std::{
    fs::File,
    io::{self, Read},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::DescriptorChain;
use vmm_sys_util::epoll::EventSet;

use crate::{
    memory::GuestRam,
    thread::{ThreadRole, ThreadSpawner},
    virtio::{
        device::{ActivateError, Activation, ActiveQueue, DeviceType, StateError, VirtioDevice},
        served::{COMMON_FEATURES, Chain, ServedQueue},
        worker::{DeviceWorker, Worker},
    },
};

const QUEUE_SIZES: [u16; 1] = [256];

/// Bytes that one request gets at most. A driver may ask for gigabytes with one indirect chain
/// whose buffers overlap; it has to be content with less (the specification allows it) and ask
/// again.
const MAX_REQUEST: usize = 64 << 10;

/// An entropy source's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker: `_rng0`.
    pub thread_name: String,
    /// Where the bytes come from.
    pub source: PathBuf,
}

/// An entropy source cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the entropy source {}: give a readable file such as /dev/urandom", path.display())]
pub struct Error {
    path: PathBuf,
    source: io::Error,
}

/// An entropy source.
pub struct Rng {
    options: Options,
    /// With the worker while the device is active.
    source: Option<File>,
    served: Arc<AtomicU64>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<RngWorker>>,
}

impl Rng {
    /// Opens the source.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        let source = File::open(&options.source).map_err(|source| Error {
            path: options.source.clone(),
            source,
        })?;
        Ok(Self {
            options,
            source: Some(source),
            served: Arc::default(),
            spawner,
            worker: None,
        })
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> DeviceType {
        DeviceType::Rng
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let (Some(active), Some(source)) = (queues.into_iter().next(), self.source.take()) else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 1 });
        };
        let name = &self.options.thread_name;
        let queue = ServedQueue::new(active, memory, interrupt, features, name);
        let worker = RngWorker {
            queue,
            source,
            buffer: Vec::new(),
            served: Arc::clone(&self.served),
            failing: false,
        };
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Rng, name, worker);
        self.worker = Some(worker.map_err(|source| ActivateError::Host {
            action: "start an entropy source's thread",
            source,
        })?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.source = Some(worker.source);
        vec![worker.queue.active]
    }

    fn reset(&mut self) {
        // Entropy has no memory.
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::Value::Null)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        if state.is_null() {
            return Ok(());
        }
        Err(StateError::Mismatch(
            "an entropy source has no state".to_owned(),
        ))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("served_bytes", self.served.load(Ordering::Relaxed))]
    }
}

struct RngWorker {
    queue: ServedQueue,
    source: File,
    /// Reused for every request.
    buffer: Vec<u8>,
    served: Arc<AtomicU64>,
    /// The source failed; said once, or a guest could fill the log.
    failing: bool,
}

impl RngWorker {
    fn serve(&mut self) {
        let Self {
            queue,
            source,
            buffer,
            served,
            failing,
        } = self;
        queue.serve(|chain, ram| {
            let len = fill(chain, ram, source, buffer, failing);
            served.fetch_add(len.into(), Ordering::Relaxed);
            Chain::Used(len)
        });
    }
}

/// Fills the writable part of a chain and returns how many bytes it got.
fn fill(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    source: &mut File,
    buffer: &mut Vec<u8>,
    failing: &mut bool,
) -> u32 {
    let Ok(mut writer) = chain.writer(ram) else {
        return 0;
    };
    buffer.resize(writer.available_bytes().min(MAX_REQUEST), 0);
    let read = match source.read(buffer) {
        Ok(read) => {
            *failing = false;
            read
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                log::warn!("an entropy source fails: {error}");
            }
            0
        }
    };
    match io::Write::write_all(&mut writer, &buffer[..read]) {
        // At most `MAX_REQUEST`.
        Ok(()) => read as u32,
        Err(_) => 0,
    }
}

impl MutEventSubscriber for RngWorker {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.queue.active.kick, EventSet::IN)) {
            log::error!("an entropy source cannot watch its queue: {error}");
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.queue.acknowledge_kick();
        self.serve();
    }
}

impl DeviceWorker for RngWorker {}
