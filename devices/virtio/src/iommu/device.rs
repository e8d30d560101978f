//! The device and its worker.

use std::{
    io::{self, Write},
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestRam,
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::DescriptorChain;
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    domains::{DOMAINS, PAGE},
    endpoint::INTERRUPTS,
    endpoints::Endpoints,
    request::{PROBE_SIZE, Request, TAIL_SIZE},
    state::State,
    status::Status,
};
use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    in_flight::InFlight,
    served::{COMMON_FEATURES, Chain, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 23,
    name: "iommu",
    // Class 8, subclass 6: an IOMMU.
    class: 0x08_0600,
};

/// The request queue and the event queue.
const QUEUE_SIZES: [u16; 2] = [256, 64];

/// Feature bits (5.13.3).
const VIRTIO_IOMMU_F_INPUT_RANGE: u32 = 0;
const VIRTIO_IOMMU_F_DOMAIN_RANGE: u32 = 1;
const VIRTIO_IOMMU_F_MAP_UNMAP: u32 = 2;
const VIRTIO_IOMMU_F_PROBE: u32 = 4;
const VIRTIO_IOMMU_F_BYPASS_CONFIG: u32 = 6;

/// Size of the configuration in bytes, and offset of `bypass` in it.
const CONFIG_SIZE: usize = 40;
const BYPASS: usize = 36;

const KICK: u32 = 0;
const CHANGED: u32 = 1;

/// A virtual IOMMU's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_iommu`.
    pub thread_name: String,
    /// Width of I/O addresses in bits: 32 to 64. It may exceed the host's width: PROBE tells the
    /// guest what the host does not translate.
    pub address_width: u8,
    /// Ranges, in addition to [`INTERRUPTS`], that no device of this host can map: a saved guest
    /// with mappings there is refused.
    pub reserved: Vec<RangeInclusive<u64>>,
}

/// Valid widths of I/O addresses in bits.
pub const ADDRESS_WIDTHS: RangeInclusive<u8> = 32..=64;

/// Why a virtual IOMMU cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address width is out of range.
    #[error(
        "I/O addresses of {0} bits are not {min} to {max} bits wide",
        min = ADDRESS_WIDTHS.start(), max = ADDRESS_WIDTHS.end()
    )]
    AddressWidth(u8),
    /// An eventfd could not be created.
    #[error("cannot make an eventfd for the virtual IOMMU")]
    Event(#[source] io::Error),
}

/// Progress of unmapping the driver's mappings for a reset.
mod ending {
    /// Not requested.
    pub const NONE: u8 = 0;
    /// Requested; the worker has not started.
    pub const WANTED: u8 = 1;
    /// The worker is unmapping, and takes RAM away unless the driver chose bypass.
    pub const BEGUN: u8 = 2;
    /// Complete.
    pub const DONE: u8 = 3;
}

/// Progress of closing bypass while there is no worker.
mod closing {
    /// Not requested.
    pub const NONE: u8 = 0;
    /// Requested; the thread has not read the driver's choice yet.
    pub const WANTED: u8 = 1;
    /// The thread has read it, and takes RAM away.
    pub const BEGUN: u8 = 2;
}

/// State shared by the device and its worker.
struct Shared {
    /// The driver's setting; the worker applies it.
    bypass: AtomicBool,
    /// One of [`ending`], for a reset.
    ending: AtomicU8,
    /// One of [`closing`].
    closing: AtomicU8,
    /// Wakes the worker for changes of `bypass` and `ending`.
    changed: EventFd,
    requests: InFlight,
    answered: AtomicU64,
    refused: AtomicU64,
    mappings: AtomicU64,
}

/// A virtual IOMMU.
pub struct VirtioIommu {
    endpoints: Endpoints,
    options: Options,
    shared: Arc<Shared>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<IommuWorker>>,
    /// Since the last reset there was a worker or a restore.
    used: bool,
}

impl VirtioIommu {
    /// Creates an IOMMU for the devices of a registry.
    pub fn new(
        endpoints: Endpoints,
        options: Options,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        if !ADDRESS_WIDTHS.contains(&options.address_width) {
            return Err(Error::AddressWidth(options.address_width));
        }
        let shared = Arc::new(Shared {
            bypass: AtomicBool::new(false),
            ending: AtomicU8::new(ending::NONE),
            closing: AtomicU8::new(closing::NONE),
            changed: EventFd::new(EFD_NONBLOCK).map_err(Error::Event)?,
            requests: InFlight::default(),
            answered: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
        });
        let iommu = Self {
            endpoints,
            options,
            shared,
            spawner,
            worker: None,
            used: false,
        };
        let mut domains = iommu.endpoints.lock();
        domains.set_last_address(iommu.last_address());
        let shared = Arc::clone(&iommu.shared);
        domains.set_hurried(Box::new(move || shared.requests.is_held()));
        drop(domains);
        Ok(iommu)
    }

    fn last_address(&self) -> u64 {
        // The width is 32 to 64 bits.
        u64::MAX >> (64 - self.options.address_width)
    }

    fn config(&self) -> [u8; CONFIG_SIZE] {
        let mut config = [0; CONFIG_SIZE];
        // All page sizes: a mapping is passed to the host as a whole.
        config[..8].copy_from_slice(&(!(PAGE - 1)).to_le_bytes());
        config[16..24].copy_from_slice(&self.last_address().to_le_bytes());
        config[28..32].copy_from_slice(&(DOMAINS - 1).to_le_bytes());
        config[32..BYPASS].copy_from_slice(&(PROBE_SIZE as u32).to_le_bytes());
        // Without a worker, bypass reads as open until it is closed.
        let closing = self.shared.closing.load(Ordering::SeqCst) != closing::NONE;
        config[BYPASS] = (closing || self.shared.bypass.load(Ordering::SeqCst)).into();
        config
    }

    /// Closes bypass while there is no worker, on a short-lived thread: to take all of RAM away
    /// from devices takes the host longer than a vCPU may wait.
    fn close_bypass(&self) {
        // A thread that has not read the driver's choice yet will do it.
        if self.shared.closing.swap(closing::WANTED, Ordering::SeqCst) == closing::WANTED {
            return;
        }
        let (endpoints, shared) = (self.endpoints.clone(), Arc::clone(&self.shared));
        let body = Box::new(move || close_bypass(&endpoints, &shared));
        let name = &self.options.thread_name;
        if let Err(error) = self.spawner.spawn(ThreadRole::Iommu, name, body) {
            log::warn!(
                "a vCPU waits while the virtual IOMMU's bypass is closed: no thread: {error}"
            );
            close_bypass(&self.endpoints, &self.shared);
        }
    }
}

impl VirtioDevice for VirtioIommu {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
            | 1 << VIRTIO_IOMMU_F_INPUT_RANGE
            | 1 << VIRTIO_IOMMU_F_DOMAIN_RANGE
            | 1 << VIRTIO_IOMMU_F_MAP_UNMAP
            | 1 << VIRTIO_IOMMU_F_PROBE
            | 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        // Applied before the next request is processed. Without a worker, opening is deferred until
        // there is one. Closing is not: there may never be another driver.
        if let (Ok(BYPASS), [value @ (0 | 1)]) = (usize::try_from(offset), data) {
            self.shared.bypass.store(*value == 1, Ordering::SeqCst);
            if *value == 0 && self.worker.is_none() {
                self.close_bypass();
            } else if *value == 0 {
                // A worker that is at a reset, or done with it, may have read the old value.
                let again =
                    |at| matches!(at, ending::BEGUN | ending::DONE).then_some(ending::WANTED);
                let order = Ordering::SeqCst;
                // Fails if there is no reset, or if it has not started.
                let _ = self.shared.ending.fetch_update(order, order, again);
            }
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.shared.changed.write(1);
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
        let mut queues = queues.into_iter();
        let first = queues.next().filter(|queue| queue.index == 0);
        let Some(active) = first else {
            return Err(ActivateError::MissingQueues { got, needed: 1 });
        };
        self.shared.requests.start_over();
        self.shared.ending.store(ending::NONE, Ordering::SeqCst);
        self.used = true;
        let name = &self.options.thread_name;
        let worker = IommuWorker {
            queue: ServedQueue::new(active, memory, interrupt, features, name),
            // The event queue is not used, because this process does not see the faults of
            // passthrough devices.
            events: queues.next(),
            knows_bypass: features & 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG != 0,
            followed: None,
            endpoints: self.endpoints.clone(),
            shared: Arc::clone(&self.shared),
        };
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Iommu, name, worker);
        self.worker = Some(worker.map_err(|source| ActivateError::Host {
            action: "start the virtual IOMMU's thread",
            source,
        })?);
        Ok(())
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let what = || "the host's IOMMU, which is mapping memory for devices,".to_owned();
        self.shared.requests.quiesce(what, patience)
    }

    /// The worker removes the driver's mappings: for the maximum that a guest can map, this takes
    /// the host longer than a vCPU may wait.
    fn prepare_reset(&mut self, patience: Duration) -> Result<(), Unanswered> {
        const LOOK: Duration = Duration::from_millis(1);
        let deadline = Instant::now() + patience;
        self.quiesce(patience)?;
        let shared = &self.shared;
        let of_nobody = |worker: &Worker<_>| worker.is_dead();
        if self.worker.as_ref().is_none_or(of_nobody) {
            return Ok(());
        }
        let (none, wanted) = (ending::NONE, ending::WANTED);
        let order = Ordering::SeqCst;
        if shared
            .ending
            .compare_exchange(none, wanted, order, order)
            .is_ok()
        {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = shared.changed.write(1);
        }
        while shared.ending.load(Ordering::SeqCst) != ending::DONE {
            if Instant::now() >= deadline {
                return Err(Unanswered {
                    what: "the host's IOMMU, which is unmapping the memory of devices,".to_owned(),
                    requests: 1,
                    patience,
                });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn carry_on(&mut self) {
        self.shared.requests.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        let requests = worker.queue.active;
        std::iter::once(requests).chain(worker.events).collect()
    }

    fn reset(&mut self) {
        // Little is left to do if the worker did it. Without a worker there is nothing to wait for;
        // bypass may be about to be closed.
        if std::mem::take(&mut self.used) {
            forget(&self.endpoints, &self.shared);
        }
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        let bypass = self.shared.bypass.load(Ordering::SeqCst);
        let state = State::save(&self.endpoints.lock(), bypass);
        Ok(serde_json::to_value(state)?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        self.used = true;
        self.shared.bypass.store(state.bypass, Ordering::SeqCst);
        let last = self.last_address();
        let mut domains = self.endpoints.lock();
        let reserved = [INTERRUPTS]
            .into_iter()
            .chain(self.options.reserved.clone());
        state.restore(&mut domains, last, &reserved.collect::<Vec<_>>())?;
        let mappings = domains.mappings() as u64;
        self.shared.mappings.store(mappings, Ordering::Relaxed);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let shared = &self.shared;
        vec![
            ("requests", shared.answered.load(Ordering::Relaxed)),
            ("refused_requests", shared.refused.load(Ordering::Relaxed)),
            ("mappings", shared.mappings.load(Ordering::Relaxed)),
        ]
    }
}

struct IommuWorker {
    queue: ServedQueue,
    events: Option<ActiveQueue>,
    /// The driver supports bypass domains.
    knows_bypass: bool,
    /// The driver's setting that has been applied to the endpoints.
    followed: Option<bool>,
    endpoints: Endpoints,
    shared: Arc<Shared>,
}

impl IommuWorker {
    fn serve(&mut self) {
        let Self {
            queue,
            knows_bypass,
            endpoints,
            shared,
            ..
        } = self;
        queue.serve(|chain, ram| {
            // Held-back requests stay in the queue, which is kicked when they may continue.
            if !shared.requests.begin() {
                return Chain::Later;
            }
            let used = answer(chain, ram, endpoints, *knows_bypass, shared);
            shared.requests.end();
            Chain::Used(used)
        });
    }

    /// Applies the driver's bypass setting; if requests are held back, this is deferred to the next
    /// kick.
    fn follow_bypass(&mut self) {
        let bypass = self.shared.bypass.load(Ordering::SeqCst);
        if self.followed == Some(bypass) || !self.shared.requests.begin() {
            return;
        }
        self.endpoints.lock().set_bypass(bypass);
        self.followed = Some(bypass);
        self.shared.requests.end();
    }
}

/// Closes bypass, unless the driver has opened it again.
fn close_bypass(endpoints: &Endpoints, shared: &Shared) {
    let order = Ordering::SeqCst;
    let mut domains = endpoints.lock();
    // In this order: a later request to close is not seen here, and has to start another thread.
    shared.closing.store(closing::BEGUN, order);
    if !shared.bypass.load(order) {
        domains.set_bypass(false);
    }
    let (begun, none) = (closing::BEGUN, closing::NONE);
    // Fails if another thread has been requested.
    let _ = shared.closing.compare_exchange(begun, none, order, order);
}

/// Removes the driver's mappings. Bypass keeps the driver's last setting (5.13.4.2).
fn forget(endpoints: &Endpoints, shared: &Shared) {
    let mut domains = endpoints.lock();
    domains.reset();
    if !shared.bypass.load(Ordering::SeqCst) {
        domains.set_bypass(false);
    }
    drop(domains);
    shared.mappings.store(0, Ordering::Relaxed);
}

/// Executes a request and writes the reply. Returns the number of bytes written: 0 if the request
/// cannot be read, or the reply cannot be written.
fn answer(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    endpoints: &Endpoints,
    knows_bypass: bool,
    shared: &Shared,
) -> u32 {
    let Some(request) = Request::read(chain.clone(), ram) else {
        return 0;
    };
    let Ok(mut writer) = chain.writer(ram) else {
        return 0;
    };
    let Some(room) = writer.available_bytes().checked_sub(TAIL_SIZE) else {
        return 0;
    };
    let mut answer = [0; PROBE_SIZE + TAIL_SIZE];
    let size = request.answer_size().min(room);
    let result = if size < request.answer_size() {
        Err(Status::Invalid)
    } else {
        let mut domains = endpoints.lock();
        let result = request.carry_out(&mut domains, knows_bypass, &mut answer[..size]);
        let mappings = domains.mappings() as u64;
        shared.mappings.store(mappings, Ordering::Relaxed);
        result
    };
    shared.answered.fetch_add(1, Ordering::Relaxed);
    if result.is_err() {
        shared.refused.fetch_add(1, Ordering::Relaxed);
    }
    answer[size] = result.err().unwrap_or(Status::Ok) as u8;
    let len = size + TAIL_SIZE;
    match writer.write_all(&answer[..len]) {
        // At most 516.
        Ok(()) => len as u32,
        Err(_) => 0,
    }
}

impl MutEventSubscriber for IommuWorker {
    fn init(&mut self, ops: &mut EventOps) {
        self.follow_bypass();
        let sources = [
            Events::with_data(&self.queue.active.kick, KICK, EventSet::IN),
            Events::with_data(&self.shared.changed, CHANGED, EventSet::IN),
        ];
        for events in sources {
            if let Err(error) = ops.add(events) {
                log::error!("the virtual IOMMU cannot watch its events: {error}");
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        // Fails if nothing has changed.
        let _ = self.shared.changed.read();
        let (order, ending) = (Ordering::SeqCst, &self.shared.ending);
        if ending.load(order) == ending::WANTED {
            // In this order: bypass closed from here on is either seen below, or requests this
            // again.
            ending.store(ending::BEGUN, order);
            forget(&self.endpoints, &self.shared);
            // Fails if it was requested again, which has woken this thread again.
            let _ = ending.compare_exchange(ending::BEGUN, ending::DONE, order, order);
        }
        // Before the requests, which may have been queued after the change.
        self.follow_bypass();
        if events.data() == KICK {
            self.queue.acknowledge_kick();
            self.serve();
        }
    }
}

impl DeviceWorker for IommuWorker {}
