//! The virtio device.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Weak,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestMemory,
    thread::{ThreadRole, ThreadSpawner},
};
use virtio::{Activation, ActiveQueue, DeviceType, VirtioDevice, served::read_config_bytes};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    backend::{Backend, check_regions},
    error::Error,
    layout::Layout,
    memory::regions,
    model::Model,
    rings::{Memory, Rings},
    thread::{Command, Parts, Shared, Thread},
};

/// Time limit for a back end to start, stop or change queues.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How many times the patience a device may take to stop: that is more than all that its thread may have to do before. A
/// thread that has not done it then hangs, as a back end may make it do with the eventfds that both have.
const STUCK: u32 = 4;

/// How long a device that is dropped waits for its back end.
const LAST_PATIENCE: Duration = Duration::from_secs(2);

const NOT_SAVED: &str = "its state is its back end's; remove it first (vm.remove-device)";

/// How long whoever changes the guest's memory waits for back ends to map it, all of them together.
pub const REMAP_PATIENCE: Duration = Duration::from_secs(2);

/// A device's configuration.
pub struct Options {
    /// Name of its thread: `_vu_disk0`.
    pub thread_name: String,
    /// The back end's socket.
    pub socket: PathBuf,
    /// The type of device.
    pub model: Model,
    /// Called when the back end is lost, with the reason.
    pub lost: Box<dyn Fn(String) + Send>,
    /// Time limit for the back end, usually [`PATIENCE`].
    pub patience: Duration,
}

/// What the driver's queues are doing.
enum State {
    /// There are none.
    Inactive,
    /// The back end serves them, or is to.
    Running(Started),
    /// The thread has been told to stop them.
    Stopping {
        started: Started,
        since: Instant,
        bases: Receiver<Vec<u16>>,
    },
    /// Nobody serves them.
    Stopped(Started),
}

struct Started {
    queues: Vec<ActiveQueue>,
    guest: GuestMemory,
    /// What the thread has of it.
    memory: Memory,
}

/// A virtio device that another process serves.
pub struct VhostUser {
    model: Model,
    socket: PathBuf,
    features: u64,
    patience: Duration,
    state: State,
    thread: Link,
    /// The eventfds by which the kernel tells the back end of requests.
    kicks: Arc<[EventFd]>,
}

/// The device's end of its thread, which ends when this is dropped.
struct Link {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    shared: Arc<Shared>,
}

impl Link {
    /// Tells the thread what to do; false if it has ended.
    fn send(&self, command: Command) -> bool {
        let is_sent = self.commands.send(command).is_ok();
        // Fails only if the counter is full, in which case it is readable anyway.
        let _ = self.wake.write(1);
        is_sent
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.send(Command::End);
        self.shared.cut();
    }
}

/// A device, for others than its driver.
#[derive(Clone)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Weak<EventFd>,
    shared: Weak<Shared>,
}

impl Handle {
    /// Whether there is no back end.
    pub fn is_lost(&self) -> bool {
        self.shared.upgrade().is_some_and(|shared| shared.is_lost())
    }

    /// Number of regions of the guest's memory that the back end can map.
    pub fn slots(&self) -> usize {
        self.shared
            .upgrade()
            .map_or(usize::MAX, |shared| shared.slots())
    }

    /// Tells the back end that the guest's memory has changed. The result says when it knows.
    pub fn memory_changed(&self) -> Option<Change> {
        let (wake, shared) = (self.wake.upgrade()?, self.shared.upgrade()?);
        let (sender, done) = mpsc::sync_channel(1);
        self.commands.send(Command::Remap(sender)).ok()?;
        // Fails only if the counter is full, in which case it is readable anyway.
        let _ = wake.write(1);
        Some(Change { done, shared })
    }
}

/// A change of the guest's memory of which a back end is being told.
pub struct Change {
    done: Receiver<()>,
    shared: Arc<Shared>,
}

impl Change {
    /// Waits until the back end knows, or cuts it off.
    pub fn wait(self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        if let Err(RecvTimeoutError::Timeout) = self.done.recv_timeout(left) {
            self.shared.cut();
        }
    }
}

impl VhostUser {
    /// The device of a back end.
    ///
    /// # Errors
    /// The back end cannot map the guest's memory, or the host has no eventfds or threads.
    pub fn new(
        backend: Backend,
        options: Options,
        memory: &GuestMemory,
        spawner: &dyn ThreadSpawner,
    ) -> Result<(Self, Handle), Error> {
        let Options {
            thread_name,
            socket,
            model,
            lost,
            patience,
        } = options;
        let memory = memory.memory();
        regions(&memory)?;
        check_regions(backend.slots, memory.num_regions())?;
        let host = |action| move |source| Error::Host { action, source };
        let events = || -> io::Result<Vec<EventFd>> {
            let sizes = model.queue_sizes.iter();
            sizes.map(|_| EventFd::new(EFD_NONBLOCK)).collect()
        };
        let made = host("create eventfds");
        let kicks: Arc<[EventFd]> = events().map_err(made)?.into();
        let calls = events().map_err(made)?;
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(made)?);
        let its_wake = wake.try_clone().map_err(made)?;
        let shared = Shared::new(&backend).map_err(host("keep a connection"))?;
        let shared = Arc::new(shared);
        let (commands, receiver) = mpsc::channel();
        let features = backend.offered(&model);
        let thread = Thread::new(Parts {
            socket: socket.clone(),
            model: model.clone(),
            backend,
            commands: receiver,
            wake: its_wake,
            kicks: Arc::clone(&kicks),
            calls,
            shared: Arc::clone(&shared),
            lost,
            patience,
        });
        spawner
            .spawn(
                ThreadRole::VhostUser,
                &thread_name,
                Box::new(move || thread.run()),
            )
            .map_err(host("start a thread"))?;
        let handle = Handle {
            commands: commands.clone(),
            wake: Arc::downgrade(&wake),
            shared: Arc::downgrade(&shared),
        };
        let device = Self {
            model,
            socket,
            features,
            patience,
            state: State::Inactive,
            thread: Link {
                commands,
                wake,
                shared,
            },
            kicks,
        };
        Ok((device, handle))
    }

    /// Tells the thread to stop the queues that the back end serves.
    fn begin_to_stop(&mut self) {
        match std::mem::replace(&mut self.state, State::Inactive) {
            State::Running(started) => {
                let (sender, bases) = mpsc::sync_channel(1);
                // `bases` says so if the thread has ended.
                self.thread.send(Command::Stop(sender));
                self.state = State::Stopping {
                    started,
                    since: Instant::now(),
                    bases,
                };
            }
            state => self.state = state,
        }
    }

    /// Stops the queues, and waits for that up to `patience`.
    fn stop(&mut self, patience: Duration) -> Result<(), Unanswered> {
        self.begin_to_stop();
        let State::Stopping { since, bases, .. } = &self.state else {
            return Ok(());
        };
        match bases.recv_timeout(patience) {
            Ok(bases) => self.has_stopped(&bases),
            Err(RecvTimeoutError::Timeout) if since.elapsed() < self.patience * STUCK => {
                return Err(Unanswered {
                    what: format!("the back end at {}", self.socket.display()),
                    requests: 1,
                    patience,
                });
            }
            Err(_) => self.abandon(),
        }
        Ok(())
    }

    /// Goes on without the thread's answer.
    fn abandon(&mut self) {
        self.thread.shared.cut();
        self.has_stopped(&[]);
    }

    /// Notes how far the back end has come in each queue; if that is unknown, as far as it has returned buffers.
    fn has_stopped(&mut self, bases: &[u16]) {
        let state = std::mem::replace(&mut self.state, State::Inactive);
        let State::Stopping { mut started, .. } = state else {
            self.state = state;
            return;
        };
        for (at, active) in started.queues.iter_mut().enumerate() {
            let queue = &mut active.queue;
            let used = Layout::of(queue).used_index(&started.guest);
            if let Some(used) = used {
                queue.set_next_used(used);
            }
            if let Some(base) = bases.get(at).copied().or(used) {
                queue.set_next_avail(base);
            }
        }
        self.state = State::Stopped(started);
    }
}

impl VirtioDevice for VhostUser {
    fn device_type(&self) -> DeviceType {
        self.model.device_type
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.model.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let shared = &self.thread.shared;
        shared.with_config(|config| read_config_bytes(config, offset, data));
    }

    fn doorbell(&self, index: u16) -> Option<&EventFd> {
        self.kicks.get(usize::from(index))
    }

    /// Returns at once: the thread tells the back end, and the driver if that fails.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory: guest,
            interrupt,
            queues,
            features,
        } = activation;
        let memory = Memory::new(guest.clone());
        let rings = Rings::new(memory.clone(), interrupt, &queues, features);
        let rings = rings.map_err(|source| ActivateError::Host {
            action: "duplicate a queue's eventfd",
            source,
        })?;
        if !self.thread.send(Command::Start(rings)) {
            return Err(ActivateError::Host {
                action: "reach the device's thread",
                source: io::ErrorKind::BrokenPipe.into(),
            });
        }
        self.state = State::Running(Started {
            queues,
            guest,
            memory,
        });
        Ok(())
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        self.stop(patience)
    }

    fn carry_on(&mut self) {
        match std::mem::replace(&mut self.state, State::Inactive) {
            State::Stopping { started, .. } | State::Stopped(started) => {
                self.thread.send(Command::Continue);
                self.state = State::Running(started);
            }
            state => self.state = state,
        }
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        if self.stop(LAST_PATIENCE).is_err() {
            self.abandon();
        }
        match std::mem::replace(&mut self.state, State::Inactive) {
            State::Stopped(started) => {
                started.memory.close();
                started.queues
            }
            _ => Vec::new(),
        }
    }

    fn reset(&mut self) {
        self.thread.send(Command::Forget);
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Err(StateError::Mismatch(NOT_SAVED.to_owned()))
    }

    fn restore(&mut self, _state: serde_json::Value) -> Result<(), StateError> {
        Err(StateError::Mismatch(NOT_SAVED.to_owned()))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("reconnects", self.thread.shared.reconnects())]
    }
}
