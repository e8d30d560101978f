//! The device and its worker.

use std::{
    io::{Read, Write},
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use device_model::{
    lifecycle::{ActivateError, StateError},
    named_socket::{NameError, NamedSocket, SharedSocket, SocketFile},
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, NotStarted, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use vmm_sys_util::{epoll::EventSet, timerfd::TimerFd};

use super::{
    muxer::{Muxer, Watch},
    packet::{HEADER, Header},
};
use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    served::{COMMON_FEATURES, Chain, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 19,
    name: "socket device",
    class: 0x02_8000,
};

/// The receive, transmit and event queues.
const QUEUE_SIZES: [u16; 3] = [256, 256, 32];

/// Maximum payload of one packet from the guest (Linux sends 64 KiB).
const MAX_PAYLOAD: u64 = 64 << 10;

/// Minimum and maximum context ID of a guest (5.10.4).
const MIN_CID: u64 = 3;
const MAX_CID: u64 = u32::MAX as u64 - 1;

/// Interval of the checks for expired connections, while there may be any.
const TICK: Duration = Duration::from_secs(1);

const RECEIVE: u32 = 0;
const TRANSMIT: u32 = 1;
const EVENT: u32 = 2;
const LISTENER: u32 = 3;
const TIMER: u32 = 4;
/// First token for streams in the event loop.
const STREAMS: u32 = 16;

/// A socket device's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_vsock0`.
    pub thread_name: String,
    /// The guest's context ID.
    pub cid: u64,
    /// Path of the Unix socket through which the host reaches the guest.
    pub socket: PathBuf,
}

/// Why a socket device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A context ID that a guest cannot have.
    #[error("{0} is no context id of a guest: use {MIN_CID} to {MAX_CID}")]
    Cid(u64),
    /// The socket cannot be created under this name.
    #[error(transparent)]
    Name(#[from] NameError),
}

/// Saved state of a socket device. Connections are not saved.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The guest's context ID.
    pub cid: u64,
}

/// A socket device.
pub struct Vsock {
    options: Options,
    /// The socket's file, which is removed on close.
    file: Option<SocketFile>,
    shared: SharedSocket,
    /// Owned by the worker while the device is active.
    muxer: Option<Muxer>,
    /// The guest must be told that its connections are gone.
    reset_guest: bool,
    counters: Arc<Counters>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<VsockWorker>>,
}

#[derive(Default)]
struct Counters {
    to_guest: AtomicU64,
    from_guest: AtomicU64,
    connections: AtomicU64,
}

impl Vsock {
    /// Listens on the socket. A stale socket file, on which no process listens, is replaced.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        check_cid(&options)?;
        let socket = NamedSocket::listen(&options.socket)?;
        Self::on_socket(options, socket, spawner)
    }

    /// Like [`Vsock::new`], on a socket that is already listening.
    pub fn on_socket(
        options: Options,
        socket: NamedSocket,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        check_cid(&options)?;
        let shared = socket.share();
        let NamedSocket { listener, file } = socket;
        let muxer = Muxer::new(options.cid, options.socket.clone(), listener);
        Ok(Self {
            file: Some(file),
            shared,
            options,
            muxer: Some(muxer),
            reset_guest: false,
            counters: Arc::default(),
            spawner,
            worker: None,
        })
    }

    /// Its socket, for another process.
    pub fn shared_socket(&self) -> SharedSocket {
        self.shared.clone()
    }
}

fn check_cid(options: &Options) -> Result<(), Error> {
    match (MIN_CID..=MAX_CID).contains(&options.cid) {
        true => Ok(()),
        false => Err(Error::Cid(options.cid)),
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn close(&mut self) {
        self.file = None;
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.options.cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let got = queues.len();
        let Ok([receive, transmit, event]) = <[ActiveQueue; 3]>::try_from(queues) else {
            return Err(ActivateError::MissingQueues { got, needed: 3 });
        };
        let host = |source| ActivateError::Host {
            action: "start a socket device",
            source,
        };
        let timer = TimerFd::new().map_err(|error| host(error.into()))?;
        let Some(muxer) = self.muxer.take() else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 3 });
        };
        let name = &self.options.thread_name;
        let queue =
            |active| ServedQueue::new(active, memory.clone(), interrupt.clone(), features, name);
        let worker = VsockWorker {
            receive: queue(receive),
            transmit: queue(transmit),
            event: queue(event),
            muxer,
            timer,
            ticking: false,
            reset_guest: std::mem::take(&mut self.reset_guest),
            counters: Arc::clone(&self.counters),
        };
        match Worker::start(&*self.spawner, ThreadRole::Vsock, name, worker) {
            Ok(worker) => {
                self.worker = Some(worker);
                Ok(())
            }
            Err(NotStarted { source, inner }) => {
                self.muxer = Some(inner.muxer);
                self.reset_guest = inner.reset_guest;
                Err(host(source))
            }
        }
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.muxer = Some(worker.muxer);
        self.reset_guest = worker.reset_guest;
        [worker.receive, worker.transmit, worker.event]
            .map(|queue| queue.active)
            .into()
    }

    fn reset(&mut self) {
        // Streams end with the driver that they belong to. It knows this, so it needs no event.
        if let Some(muxer) = &mut self.muxer {
            muxer.forget_streams();
        }
        self.reset_guest = false;
        self.counters.connections.store(0, Ordering::Relaxed);
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            cid: self.options.cid,
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        if state.cid != self.options.cid {
            return Err(StateError::Mismatch(format!(
                "the guest had context id {}, the configuration says {}",
                state.cid, self.options.cid
            )));
        }
        self.reset_guest = true;
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("to_guest_bytes", load(&self.counters.to_guest)),
            ("from_guest_bytes", load(&self.counters.from_guest)),
            ("connections", load(&self.counters.connections)),
        ]
    }
}

struct VsockWorker {
    receive: ServedQueue,
    transmit: ServedQueue,
    event: ServedQueue,
    muxer: Muxer,
    timer: TimerFd,
    /// The timer is running.
    ticking: bool,
    reset_guest: bool,
    counters: Arc<Counters>,
}

impl VsockWorker {
    /// Serves both directions until neither can continue: each makes room for the other.
    fn serve(&mut self) {
        self.transmit();
        let was_full = !self.muxer.has_room();
        self.receive();
        if was_full && self.muxer.has_room() {
            self.transmit.wake();
        }
        let connections = self.muxer.connections() as u64;
        self.counters
            .connections
            .store(connections, Ordering::Relaxed);
    }

    fn receive(&mut self) {
        let (muxer, counters) = (&mut self.muxer, &self.counters);
        self.receive.serve(|chain, ram| {
            if !muxer.has_output() {
                return Chain::Later;
            }
            let Ok(mut writer) = chain.writer(ram) else {
                return Chain::Used(0);
            };
            if writer.available_bytes() < HEADER {
                return Chain::Used(0);
            }
            let Some((header, payload)) = muxer.next_packet(writer.available_bytes()) else {
                return Chain::Later;
            };
            counters
                .to_guest
                .fetch_add(payload.len() as u64, Ordering::Relaxed);
            let written = writer
                .write_all(&header.bytes())
                .and_then(|()| writer.write_all(payload));
            match written {
                // A header and at most 64 KiB.
                Ok(()) => Chain::Used((HEADER + payload.len()) as u32),
                Err(_) => Chain::Used(0),
            }
        });
    }

    fn transmit(&mut self) {
        let (muxer, counters) = (&mut self.muxer, &self.counters);
        self.transmit.serve(|chain, ram| {
            if !muxer.has_room() {
                return Chain::Later;
            }
            let Ok(mut reader) = chain.reader(ram) else {
                return Chain::Used(0);
            };
            let mut header = [0; HEADER];
            if reader.read_exact(&mut header).is_err() {
                return Chain::Used(0);
            }
            let header = Header::parse(&header);
            let mut payload = Vec::new();
            let len = u64::from(header.len);
            let whole = len <= MAX_PAYLOAD
                && reader.take(len).read_to_end(&mut payload).is_ok()
                && payload.len() as u64 == len;
            if whole {
                counters.from_guest.fetch_add(len, Ordering::Relaxed);
                muxer.receive(&header, &payload);
            } else {
                muxer.refuse(&header);
            }
            Chain::Used(0)
        });
    }

    /// Tells the guest that its connections are gone (5.10.6.7).
    fn event(&mut self) {
        let reset_guest = &mut self.reset_guest;
        self.event.serve(|chain, ram| {
            if !*reset_guest {
                return Chain::Later;
            }
            // VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.
            let written = chain
                .writer(ram)
                .map(|mut writer| writer.write_all(&[0; 4]));
            if matches!(written, Ok(Ok(()))) {
                *reset_guest = false;
                return Chain::Used(4);
            }
            Chain::Used(0)
        });
    }

    /// Starts the timer if anything can expire. An idle device causes no wakeups on the host.
    fn set_clock(&mut self) {
        if self.ticking || !self.muxer.needs_clock() {
            return;
        }
        match self.timer.reset(TICK, None) {
            Ok(()) => self.ticking = true,
            Err(error) => log::error!("vsock: no timer: {error}"),
        }
    }

    fn apply_watches(&mut self, ops: &mut EventOps) {
        for watch in std::mem::take(&mut self.muxer.watches) {
            let set = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
            match watch {
                Watch::Add(fd, token) => {
                    let events = Events::with_data_raw(fd, STREAMS + token, set);
                    if let Err(error) = ops.add(events) {
                        log::error!("vsock: a connection cannot be watched: {error}");
                    }
                }
                Watch::Remove(stream, token) => {
                    let events = Events::with_data(&stream, STREAMS + token, set);
                    // It may have been added and removed within one batch, or never added.
                    let _ = ops.remove(events);
                }
            }
        }
    }
}

impl MutEventSubscriber for VsockWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let sources = [
            (self.receive.active.kick.as_raw_fd(), RECEIVE),
            (self.transmit.active.kick.as_raw_fd(), TRANSMIT),
            (self.event.active.kick.as_raw_fd(), EVENT),
            (self.muxer.listener().as_raw_fd(), LISTENER),
            (self.timer.as_raw_fd(), TIMER),
        ];
        for (fd, token) in sources {
            let mut set = EventSet::IN;
            if token == LISTENER {
                // Edge-triggered: a client that cannot be accepted must not keep the loop awake.
                set |= EventSet::EDGE_TRIGGERED;
            }
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, set)) {
                log::error!("a socket device cannot watch its events: {error}");
            }
        }
        self.muxer.watches = self
            .muxer
            .watched()
            .into_iter()
            .map(|(fd, token)| Watch::Add(fd, token))
            .collect();
        self.apply_watches(ops);
        self.set_clock();
        self.event.wake();
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            RECEIVE => self.receive.acknowledge_kick(),
            TRANSMIT => self.transmit.acknowledge_kick(),
            EVENT => {
                self.event.acknowledge_kick();
                self.event();
            }
            LISTENER => self.muxer.accept(),
            TIMER => {
                // Fails only if another reader has cleared it.
                let _ = self.timer.wait();
                self.ticking = false;
                self.muxer.expire(Instant::now());
                // Clients may have been waiting for a file descriptor.
                self.muxer.accept();
            }
            token => {
                let hung_up = events
                    .event_set()
                    .intersects(EventSet::HANG_UP | EventSet::ERROR);
                self.muxer.ready(token - STREAMS, hung_up);
            }
        }
        self.serve();
        self.apply_watches(ops);
        self.set_clock();
    }
}

impl DeviceWorker for VsockWorker {}
