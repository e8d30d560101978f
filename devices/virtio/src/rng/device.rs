//! The device and its worker.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestRam,
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, NotStarted, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::DescriptorChain;
use vmm_sys_util::{epoll::EventSet, timerfd::TimerFd};

use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    in_flight::InFlight,
    served::{COMMON_FEATURES, Chain, ServedQueue},
};

const TYPE: DeviceType = DeviceType {
    number: 4,
    name: "entropy source",
    class: DeviceType::UNCLASSIFIED,
};

const QUEUE_SIZES: [u16; 1] = [256];

/// Maximum number of bytes that one request receives. A driver may ask for gigabytes with one
/// indirect chain of overlapping buffers. It receives less, as the specification allows, and has to
/// ask again.
const MAX_REQUEST: usize = 64 << 10;

/// Delay before retrying a source that currently has no data, while a request waits.
const NOT_YET: Duration = Duration::from_millis(50);

/// Delay before retrying a source that has ended or failed, while a request waits.
const FAILED: Duration = Duration::from_secs(10);

const KICK: u32 = 0;
const TIMER: u32 = 1;

/// An entropy source's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_rng0`.
    pub thread_name: String,
    /// Source of the bytes: a file or a character device.
    pub source: PathBuf,
}

/// Why an entropy source cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source cannot be opened.
    #[error(
        "cannot open the entropy source {}: give a readable file such as /dev/urandom",
        path.display()
    )]
    Open {
        /// Path of the source.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither a file nor a character device: the guest would have to wait for the writer.
    #[error(
        "the entropy source {} is neither a file nor a character device: use one, such as \
         /dev/urandom or /dev/hwrng",
        .0.display()
    )]
    Kind(PathBuf),
}

/// An entropy source.
pub struct Rng {
    options: Options,
    /// Owned by the worker while the device is active.
    source: Option<File>,
    pub(super) reads: Arc<InFlight>,
    served: Arc<AtomicU64>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<RngWorker>>,
}

impl Rng {
    /// Opens the source.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        let failed = |source| Error::Open {
            path: options.source.clone(),
            source,
        };
        // Non-blocking, so that neither opening it nor a slow device stalls a thread.
        let source = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(&options.source)
            .map_err(failed)?;
        let kind = source.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_char_device() {
            return Err(Error::Kind(options.source));
        }
        Ok(Self {
            options,
            source: Some(source),
            reads: Arc::default(),
            served: Arc::default(),
            spawner,
            worker: None,
        })
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> DeviceType {
        TYPE
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
        let host = |source| ActivateError::Host {
            action: "start an entropy source's thread",
            source,
        };
        let timer = TimerFd::new().map_err(|error| host(error.into()))?;
        let (Some(active), Some(source)) = (queues.into_iter().next(), self.source.take()) else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 1 });
        };
        self.reads.start_over();
        let name = &self.options.thread_name;
        let queue = ServedQueue::new(active, memory, interrupt, features, name);
        let worker = RngWorker {
            queue,
            source,
            reads: Arc::clone(&self.reads),
            timer,
            buffer: Vec::new(),
            served: Arc::clone(&self.served),
            failing: false,
        };
        match Worker::start(&*self.spawner, ThreadRole::Rng, name, worker) {
            Ok(worker) => {
                self.worker = Some(worker);
                Ok(())
            }
            Err(NotStarted { source, inner }) => {
                self.source = Some(inner.source);
                Err(host(source))
            }
        }
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let what = || format!("entropy source {}", self.options.source.display());
        self.reads.quiesce(what, patience)
    }

    fn carry_on(&mut self) {
        self.reads.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.source = Some(worker.source);
        vec![worker.queue.active]
    }

    fn reset(&mut self) {
        // The device has no state.
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
    /// Reads that the source has not completed yet.
    reads: Arc<InFlight>,
    /// Set while a request waits for the source.
    timer: TimerFd,
    /// Reused for every request.
    buffer: Vec<u8>,
    served: Arc<AtomicU64>,
    /// The source has ended or failed. Logged once, or a guest could flood the log.
    failing: bool,
}

/// Outcome of a request.
enum Filled {
    /// It received this many bytes; 0 if it has no room.
    Bytes(u32),
    /// The source currently has no data.
    NotYet,
    /// The source has ended or failed.
    Failed,
}

impl RngWorker {
    fn serve(&mut self) {
        let Self {
            queue,
            source,
            buffer,
            served,
            failing,
            reads,
            ..
        } = self;
        // Requests that are held back stay in the queue, which is kicked when they may continue.
        if !reads.begin() {
            return;
        }
        let mut retry = None;
        queue.serve(
            |chain, ram| match fill(chain, ram, source, buffer, failing) {
                Filled::Bytes(len) => {
                    served.fetch_add(len.into(), Ordering::Relaxed);
                    Chain::Used(len)
                }
                // A request must receive at least one byte (virtio 1.2, 5.4.6.2), so it stays
                // queued.
                Filled::NotYet => {
                    retry = Some(NOT_YET);
                    Chain::Later
                }
                Filled::Failed => {
                    retry = Some(FAILED);
                    Chain::Later
                }
            },
        );
        reads.end();
        if let Some(after) = retry
            && let Err(error) = self.timer.reset(after, None)
        {
            log::error!("an entropy source has no timer: {error}");
        }
    }
}

/// Fills the writable part of a chain.
fn fill(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    source: &mut File,
    buffer: &mut Vec<u8>,
    failing: &mut bool,
) -> Filled {
    let Ok(mut writer) = chain.writer(ram) else {
        return Filled::Bytes(0);
    };
    buffer.resize(writer.available_bytes().min(MAX_REQUEST), 0);
    if buffer.is_empty() {
        return Filled::Bytes(0);
    }
    let problem = match source.read(buffer) {
        Ok(0) => "it has ended".to_owned(),
        Ok(read) => {
            *failing = false;
            return match io::Write::write_all(&mut writer, &buffer[..read]) {
                // At most `MAX_REQUEST`.
                Ok(()) => Filled::Bytes(read as u32),
                Err(_) => Filled::Bytes(0),
            };
        }
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            return Filled::NotYet;
        }
        Err(error) => error.to_string(),
    };
    if !std::mem::replace(failing, true) {
        log::warn!("an entropy source fails, its guest waits: {problem}");
    }
    Filled::Failed
}

impl MutEventSubscriber for RngWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let sources = [
            Events::with_data(&self.queue.active.kick, KICK, EventSet::IN),
            Events::with_data(&self.timer, TIMER, EventSet::IN),
        ];
        for events in sources {
            if let Err(error) = ops.add(events) {
                log::error!("an entropy source cannot watch its events: {error}");
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        if events.data() == TIMER {
            // Fails only if another reader has cleared it.
            let _ = self.timer.wait();
        } else {
            self.queue.acknowledge_kick();
        }
        self.serve();
    }
}

impl DeviceWorker for RngWorker {}
