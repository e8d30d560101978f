//! The device and its worker.

use std::{
    io::{self, Read, Write},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use base::Unpoisoned;
use console::InputSink;
use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, NotStarted, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use vmm_sys_util::epoll::EventSet;

use super::input::{CAPACITY, Input};
use crate::{
    config_change::ConfigChange,
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    in_flight::InFlight,
    served::{COMMON_FEATURES, Chain, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 3,
    name: "console",
    class: 0x07_8000,
};

/// The receive queue and the transmit queue.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// Feature bit (5.3.3): columns and rows are valid.
const VIRTIO_CONSOLE_F_SIZE: u32 = 0;

/// Maximum number of bytes printed from one transmitted chain. Drivers send single pages; a chain
/// that exceeds this through overlapping buffers is truncated.
const MAX_OUTPUT: usize = 256 << 10;

const KICK_RECEIVE: u32 = 0;
const KICK_TRANSMIT: u32 = 1;
const ARRIVED: u32 = 2;

/// A console's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_console0`.
    pub thread_name: String,
    /// Columns and rows, if known; [`Handle::resize`] changes them.
    pub size: Option<(u16, u16)>,
}

/// Saved state of a console.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Input that the guest has not read.
    pub input: Vec<u8>,
    /// Columns and rows as the guest knows them; zero if unknown.
    #[serde(default)]
    pub size: (u16, u16),
}

/// The terminal size, and the notification of its changes.
#[derive(Default)]
struct Window {
    /// Columns and rows; zero if unknown.
    size: Mutex<(u16, u16)>,
    change: ConfigChange,
}

impl Window {
    fn size(&self) -> MutexGuard<'_, (u16, u16)> {
        self.size.lock_unpoisoned()
    }
}

/// Controls a console while it is plugged in.
#[derive(Clone)]
pub struct Handle(Arc<Window>);

impl Handle {
    /// Sets the terminal size to (columns, rows), and notifies the guest of a change.
    pub fn resize(&self, size: (u16, u16)) {
        if std::mem::replace(&mut *self.0.size(), size) != size {
            self.0.change.announce();
        }
    }
}

/// A console.
pub struct Console {
    thread_name: String,
    window: Arc<Window>,
    input: Arc<Input>,
    /// Owned by the worker while the device is active.
    output: Option<Box<dyn Write + Send>>,
    /// Output that the host has not taken yet: a file's storage may not answer.
    writes: Arc<InFlight>,
    sent: Arc<AtomicU64>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<ConsoleWorker>>,
}

impl Console {
    /// Creates a console that prints to `output`, which must not block longer than the storage of a file.
    pub fn new(
        options: Options,
        output: Box<dyn Write + Send>,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> io::Result<Self> {
        let window = Window {
            size: Mutex::new(options.size.unwrap_or_default()),
            change: ConfigChange::default(),
        };
        Ok(Self {
            thread_name: options.thread_name,
            window: Arc::new(window),
            input: Arc::new(Input::new()?),
            output: Some(output),
            writes: Arc::default(),
            sent: Arc::default(),
            spawner,
            worker: None,
        })
    }

    /// The sink for terminal input.
    pub fn input(&self) -> Arc<dyn InputSink> {
        self.input.clone()
    }

    /// A handle to control the device once it is plugged in.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.window))
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        // Offered even if the size is unknown: it may be known after a restore elsewhere.
        COMMON_FEATURES | 1 << VIRTIO_CONSOLE_F_SIZE
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let (columns, rows) = *self.window.size();
        let mut config = [0; 12];
        config[..2].copy_from_slice(&columns.to_le_bytes());
        config[2..4].copy_from_slice(&rows.to_le_bytes());
        // One port.
        config[4..8].copy_from_slice(&1_u32.to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let got = queues.len();
        let Ok([receive, transmit]) = <[ActiveQueue; 2]>::try_from(queues) else {
            return Err(ActivateError::MissingQueues { got, needed: 2 });
        };
        let Some(output) = self.output.take() else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 2 });
        };
        self.writes.start_over();
        let name = &self.thread_name;
        let queue =
            |active| ServedQueue::new(active, memory.clone(), interrupt.clone(), features, name);
        let worker = ConsoleWorker {
            receive: queue(receive),
            transmit: queue(transmit),
            input: Arc::clone(&self.input),
            output,
            writes: Arc::clone(&self.writes),
            sent: Arc::clone(&self.sent),
        };
        match Worker::start(&*self.spawner, ThreadRole::Console, name, worker) {
            Ok(worker) => {
                self.worker = Some(worker);
                self.window.change.connect(Some(interrupt));
                Ok(())
            }
            Err(NotStarted { source, inner }) => {
                self.output = Some(inner.output);
                Err(ActivateError::Host {
                    action: "start a console's thread",
                    source,
                })
            }
        }
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let what = || format!("console {:?}", self.thread_name);
        self.writes.quiesce(what, patience)
    }

    fn carry_on(&mut self) {
        self.writes.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.window.change.connect(None);
        let Some(worker) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.output = Some(worker.output);
        vec![worker.receive.active, worker.transmit.active]
    }

    fn reset(&mut self) {
        // Input belongs to the user, not to the driver: the guest's next program reads it, as with
        // a serial port. The next driver reads the size from the configuration.
        self.window.change.forget();
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            input: self.input.waiting(),
            size: *self.window.size(),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        if self.input.enqueue(&state.input) < state.input.len() {
            return Err(StateError::Mismatch(format!(
                "a console holds {CAPACITY} bytes of input, not {}",
                state.input.len()
            )));
        }
        if *self.window.size() == state.size {
            self.window.change.forget();
        } else {
            self.window.change.announce();
        }
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("output_bytes", self.sent.load(Ordering::Relaxed))]
    }
}

struct ConsoleWorker {
    receive: ServedQueue,
    transmit: ServedQueue,
    input: Arc<Input>,
    output: Box<dyn Write + Send>,
    writes: Arc<InFlight>,
    sent: Arc<AtomicU64>,
}

impl ConsoleWorker {
    /// Passes input to the guest, while there are both input and buffers.
    fn receive(&mut self) {
        let input = &self.input;
        self.receive.serve(|chain, ram| {
            if input.is_empty() {
                return Chain::Later;
            }
            let Ok(mut writer) = chain.writer(ram) else {
                return Chain::Used(0);
            };
            let bytes = input.take(writer.available_bytes());
            match writer.write_all(&bytes) {
                // At most `CAPACITY`.
                Ok(()) => Chain::Used(bytes.len() as u32),
                Err(_) => Chain::Used(0),
            }
        });
    }

    /// Prints the guest's output.
    fn transmit(&mut self) {
        let (output, writes, sent) = (&mut self.output, &self.writes, &self.sent);
        self.transmit.serve(|chain, ram| {
            let Ok(reader) = chain.reader(ram) else {
                return Chain::Used(0);
            };
            // Output that is held back stays in the queue, which is kicked when it may continue.
            if !writes.begin() {
                return Chain::Later;
            }
            let mut bytes = Vec::new();
            if reader
                .take(MAX_OUTPUT as u64)
                .read_to_end(&mut bytes)
                .is_ok()
            {
                sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                // The output counts the bytes for which it has no room.
                let _ = output.write_all(&bytes);
            }
            writes.end();
            Chain::Used(0)
        });
        let _ = self.output.flush();
    }
}

impl MutEventSubscriber for ConsoleWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let sources = [
            (&self.receive.active.kick, KICK_RECEIVE),
            (&self.transmit.active.kick, KICK_TRANSMIT),
            (self.input.arrived(), ARRIVED),
        ];
        for (event, token) in sources {
            if let Err(error) = ops.add(Events::with_data(event, token, EventSet::IN)) {
                log::error!("a console cannot watch its events: {error}");
            }
        }
        // Input may have arrived while no worker ran.
        self.receive.wake();
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match events.data() {
            KICK_TRANSMIT => {
                self.transmit.acknowledge_kick();
                self.transmit();
            }
            KICK_RECEIVE => {
                self.receive.acknowledge_kick();
                self.receive();
            }
            _ => {
                // Empty if the event was spurious.
                let _ = self.input.arrived().read();
                self.receive();
            }
        }
    }
}

impl DeviceWorker for ConsoleWorker {}
