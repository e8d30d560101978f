//! The device: options, placement and saved state.

use std::{fs::File, io, path::PathBuf, sync::Arc, time::Duration};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::{AddressSpace, Mapping},
    thread::{ThreadRole, ThreadSpawner},
    worker::Worker,
};
use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;
use vm_memory::GuestAddress;

use super::{
    backing::{ALIGNMENT, Backing, Error},
    worker::FlushWorker,
};
use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice},
    in_flight::InFlight,
};

const TYPE: DeviceType = DeviceType {
    number: 27,
    name: "persistent memory",
    class: DeviceType::UNCLASSIFIED,
};

const QUEUE_SIZES: [u16; 1] = [256];

/// A persistent memory device's configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the worker thread: `_pmem0`.
    pub thread_name: String,
    /// A file, a block device, or a directory in which an unnamed file is created.
    pub file: PathBuf,
    /// Size in bytes, a multiple of 2 MiB. Required for a directory; otherwise at most the file's
    /// size, which is the default.
    pub size: Option<u64>,
    /// The guest's writes do not reach the file.
    pub discard_writes: bool,
}

/// Saved state of a persistent memory device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Guest address of the memory.
    pub address: u64,
    /// Its size in bytes.
    pub size: u64,
}

/// A persistent memory device.
pub struct Pmem {
    /// Declared before `backing`, so that the guest's mapping is removed before the memory is
    /// unmapped. `None` only after a failed restore.
    mapping: Option<Box<dyn Mapping>>,
    backing: Backing,
    discard_writes: bool,
    pub(super) flushes: Arc<InFlight>,
    thread_name: String,
    space: Arc<dyn AddressSpace>,
    spawner: Arc<dyn ThreadSpawner>,
    worker: Option<Worker<FlushWorker>>,
}

impl Pmem {
    /// Opens, locks and maps the file, and places it in the guest's address space.
    pub fn new(
        options: Options,
        space: Arc<dyn AddressSpace>,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        let Options { file, size, .. } = &options;
        let backing = Backing::open(file.clone(), *size, options.discard_writes)?;
        Self::with(backing, options, space, spawner)
    }

    /// [`Pmem::new`] for a file that was opened as the options say.
    pub fn with(
        backing: Backing,
        options: Options,
        space: Arc<dyn AddressSpace>,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        let mapping = space
            .map(backing.memory(), ALIGNMENT, None)
            .map_err(|source| Error::Host {
                action: "place in the guest's address space",
                path: backing.path().clone(),
                source,
            })?;
        Ok(Self {
            mapping: Some(mapping),
            backing,
            discard_writes: options.discard_writes,
            flushes: Arc::default(),
            thread_name: options.thread_name,
            space,
            spawner,
            worker: None,
        })
    }

    /// The file with what the guest writes, unless that is discarded.
    pub fn contents(&self) -> Option<Arc<File>> {
        (!self.discard_writes).then(|| self.backing.file())
    }

    /// Guest address of the memory.
    fn address(&self) -> u64 {
        self.mapping
            .as_ref()
            .map_or(0, |mapping| mapping.guest_address().0)
    }
}

impl VirtioDevice for Pmem {
    fn device_type(&self) -> DeviceType {
        TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 16];
        config[..8].copy_from_slice(&self.address().to_le_bytes());
        config[8..].copy_from_slice(&self.backing.size().to_le_bytes());
        data.fill(0);
        let tail = usize::try_from(offset)
            .ok()
            .and_then(|offset| config.get(offset..))
            .unwrap_or_default();
        let count = tail.len().min(data.len());
        data[..count].copy_from_slice(&tail[..count]);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Some(mut active) = activation.queues.into_iter().next() else {
            return Err(ActivateError::MissingQueues { got: 0, needed: 1 });
        };
        active
            .queue
            .set_event_idx(activation.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        self.flushes.start_over();
        let worker = FlushWorker {
            active,
            memory: activation.memory,
            interrupt: activation.interrupt,
            flushes: Arc::clone(&self.flushes),
            file: (!self.discard_writes).then(|| self.backing.file()),
            name: self.backing.path().display().to_string(),
            failing: false,
            broken: false,
        };
        let worker = Worker::spawn(&*self.spawner, ThreadRole::Pmem, &self.thread_name, worker);
        self.worker = Some(worker.map_err(|source| ActivateError::Host {
            action: "start a persistent memory device's thread",
            source,
        })?);
        Ok(())
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let what = || format!("persistent memory {}", self.backing.path().display());
        self.flushes.quiesce(what, patience)
    }

    fn carry_on(&mut self) {
        self.flushes.carry_on();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let worker = self.worker.take().and_then(Worker::stop);
        worker.map(|worker| worker.active).into_iter().collect()
    }

    fn reset(&mut self) {
        // Neither the location of the memory nor its content depends on a driver.
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            address: self.address(),
            size: self.backing.size(),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        if state.size != self.backing.size() || !state.address.is_multiple_of(ALIGNMENT) {
            return Err(StateError::Mismatch(format!(
                "persistent memory had {} bytes at {:#x}, {} has {}",
                state.size,
                state.address,
                self.backing.path().display(),
                self.backing.size()
            )));
        }
        if state.address == self.address() {
            return Ok(());
        }
        // Unmapped first from where `new` placed it: the two ranges may overlap.
        self.mapping = None;
        let place = |at| self.space.map(self.backing.memory(), ALIGNMENT, at);
        let moved: io::Result<_> = place(Some(GuestAddress(state.address)));
        self.mapping = Some(moved.map_err(|source| StateError::Host {
            action: "place persistent memory where the guest had it",
            source,
        })?);
        Ok(())
    }
}
