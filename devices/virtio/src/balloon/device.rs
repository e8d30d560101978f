//! The device: size, features and activation.

use std::sync::{Arc, atomic::Ordering};

use device_model::{
    lifecycle::{ActivateError, StateError},
    thread::{ThreadRole, ThreadSpawner},
    worker::Worker,
};
use serde::{Deserialize, Serialize};

use super::{queues::BalloonWorker, shared::Shared};
use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    discard::Discards,
    served::{COMMON_FEATURES, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 5,
    name: "balloon",
    class: DeviceType::UNCLASSIFIED,
};

/// Inflate, deflate, and free page reporting. Queues of features that are not negotiated do not
/// exist. The reporting queue therefore has index 2: statistics and hinting are not offered.
const QUEUE_SIZES: [u16; 3] = [128, 128, 32];

/// Feature bits (5.5.3).
const VIRTIO_BALLOON_F_DEFLATE_ON_OOM: u32 = 2;
const VIRTIO_BALLOON_F_REPORTING: u32 = 5;

/// The unit of sizes in the configuration, in bytes.
const PAGE: u64 = 4096;

/// Offset of `actual` in the configuration, the only field that the driver writes.
const ACTUAL: u64 = 4;

/// A balloon's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_balloon0`.
    pub thread_name: String,
    /// Initial balloon size: bytes that the guest is asked to give up.
    pub size: u64,
    /// The guest deflates the balloon before it runs out of memory.
    pub deflate_on_oom: bool,
    /// The guest reports free pages to the host.
    pub free_page_reporting: bool,
    /// Returns the memory to the host.
    pub discards: Arc<Discards>,
}

/// Saved state of a balloon.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Pages that the guest is asked to give up.
    pub wanted: u32,
    /// Pages that the guest has given up.
    pub actual: u32,
}

/// Controls a balloon while it is plugged in.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// Asks the guest to give up `bytes` in total, rounded down to pages of 4 KiB.
    pub fn set_size(&self, bytes: u64) {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        self.0.wanted.store(pages, Ordering::SeqCst);
        self.0.change.announce();
    }

    /// Bytes that the guest has given up.
    pub fn actual(&self) -> u64 {
        u64::from(self.0.actual.load(Ordering::SeqCst)) * PAGE
    }
}

/// A memory balloon.
pub struct Balloon {
    options: Options,
    shared: Arc<Shared>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<BalloonWorker>>,
}

impl Balloon {
    /// Creates a balloon with a target of `options.size` bytes.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Self {
        let shared = Arc::new(Shared {
            discards: Arc::clone(&options.discards),
            ..Shared::default()
        });
        Handle(Arc::clone(&shared)).set_size(options.size);
        // No notification is needed: the first driver reads the size anyway.
        shared.change.forget();
        Self {
            options,
            shared,
            spawner,
            worker: None,
        }
    }

    /// A handle to control the device once it is plugged in.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.shared))
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        if self.options.free_page_reporting {
            &QUEUE_SIZES
        } else {
            &QUEUE_SIZES[..2]
        }
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
            | u64::from(self.options.deflate_on_oom) << VIRTIO_BALLOON_F_DEFLATE_ON_OOM
            | u64::from(self.options.free_page_reporting) << VIRTIO_BALLOON_F_REPORTING
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 16];
        config[..4].copy_from_slice(&self.shared.wanted.load(Ordering::SeqCst).to_le_bytes());
        config[4..8].copy_from_slice(&self.shared.actual.load(Ordering::SeqCst).to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL, Ok(bytes)) = (offset, <[u8; 4]>::try_from(data)) {
            self.shared
                .actual
                .store(u32::from_le_bytes(bytes), Ordering::SeqCst);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let got = queues.len();
        let name = &self.options.thread_name;
        let mut queues = queues.into_iter().map(|active| {
            ServedQueue::new(active, memory.clone(), interrupt.clone(), features, name)
        });
        let (Some(inflate), Some(deflate)) = (queues.next(), queues.next()) else {
            return Err(ActivateError::MissingQueues { got, needed: 2 });
        };
        let reporting = features & 1 << VIRTIO_BALLOON_F_REPORTING != 0;
        // A queue that the driver set up without the feature is not served, but returned later.
        let report = queues.next();
        drop(queues);
        self.shared.change.connect(Some(interrupt));
        let shared = Arc::clone(&self.shared);
        let worker = BalloonWorker {
            inflate,
            deflate,
            report,
            reporting,
            shared,
            failing: false,
        };
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Memory, name, worker);
        self.worker = Some(worker.map_err(|source| ActivateError::Host {
            action: "start a balloon's thread",
            source,
        })?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.shared.change.connect(None);
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        let report = worker.report.map(|queue| queue.active);
        [worker.inflate.active, worker.deflate.active]
            .into_iter()
            .chain(report)
            .collect()
    }

    fn reset(&mut self) {
        // A new driver has all of its memory; the requested size stays.
        self.shared.actual.store(0, Ordering::SeqCst);
        self.shared.change.forget();
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            wanted: self.shared.wanted.load(Ordering::SeqCst),
            actual: self.shared.actual.load(Ordering::SeqCst),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        self.shared.wanted.store(state.wanted, Ordering::SeqCst);
        self.shared.actual.store(state.actual, Ordering::SeqCst);
        // The size may have been set after the guest was paused for the snapshot.
        self.shared.change.announce();
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![(
            "discarded_bytes",
            self.shared.discarded.load(Ordering::Relaxed),
        )]
    }
}
