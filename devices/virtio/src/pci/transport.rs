//! The registers behind the BAR: negotiation, queues and the device's lifecycle.

use std::{
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use base::Chain;
use device_model::{
    bus::BusDevice,
    doorbell::Doorbells,
    fair_lock::FairLock,
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestMemory,
};
use pci::{LifecycleError, MsixTable};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_queue::Queue;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::EventFd;

use super::{
    interrupt::Interrupt,
    layout::{NOTIFY_MULTIPLIER, NOTIFY_OFFSET, Part, common, status},
    queue::{QueueProgress, QueueRegisters},
};
use crate::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

const VERSION_1: u64 = 1 << 32;
const EVENT_INDEX: u64 = 1 << 29;
/// Features that require transport support that is missing here: packed rings, notification data,
/// SR-IOV, notification data chosen by the device, and reset of single queues.
const UNSUPPORTED_FEATURES: u64 = 1 << 34 | 1 << 37 | 1 << 38 | 1 << 39 | 1 << 40;

/// How long a pause waits for the host to complete a device's requests.
const PAUSE_PATIENCE: Duration = Duration::from_secs(20);

/// How long the first status write that resets a device blocks. After that the driver polls until
/// the reset is complete.
const RESET_PATIENCE: Duration = Duration::from_millis(100);

/// Status bits that a driver may set.
const DRIVER_STATUS: u8 =
    status::ACKNOWLEDGE | status::DRIVER | status::DRIVER_OK | status::FEATURES_OK | status::FAILED;

/// Run state of the device.
enum Run {
    /// The driver is not ready, or the device failed.
    Idle,
    /// The device is running and owns these queues.
    Active(Vec<u16>),
    /// The driver is ready but the device is stopped; the queues are kept here.
    Paused {
        queues: Vec<(u16, Queue)>,
        /// Restored from a snapshot: interrupts may have been lost on the way.
        restored: bool,
    },
    /// Removed from the bus, permanently.
    Gone,
}

/// The transport's saved state.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct TransportState {
    device_type: u16,
    status: u8,
    broken: bool,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    /// Features that a driver may have again although they were not offered where this was saved.
    #[serde(default)]
    kept_features: u64,
    queue_select: u16,
    config_vector: u16,
    isr: u8,
    generation: u8,
    queues: Vec<QueueTransportState>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
struct QueueTransportState {
    vector: u16,
    registers: QueueRegisters,
    progress: QueueProgress,
}

/// What the transport needs from its surroundings.
pub(super) struct TransportParts {
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) memory: GuestMemory,
    pub(super) doorbells: Arc<dyn Doorbells>,
    pub(super) kicks: Vec<EventFd>,
    pub(super) msix: Arc<MsixTable>,
}

/// All state behind the BAR.
pub(super) struct Transport {
    /// Fair: vCPUs that access them again and again, each time for up to [`RESET_PATIENCE`], do not keep the thread
    /// that owns the VM out.
    registers: FairLock<Registers>,
    interrupt: Arc<Interrupt>,
    msix: Arc<MsixTable>,
    kicks: Arc<[EventFd]>,
    had_driver: Arc<AtomicBool>,
}

struct Registers {
    device: Box<dyn VirtioDevice>,
    /// A driver has been ready, whatever it did since.
    had_driver: Arc<AtomicBool>,
    memory: GuestMemory,
    doorbells: Arc<dyn Doorbells>,
    interrupt: Arc<Interrupt>,
    kicks: Arc<[EventFd]>,
    /// Address at which the BAR is decoded.
    bar: Option<u64>,
    /// Queues with a registered doorbell, and its address.
    connected: Vec<(u16, u64)>,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    /// Features that a restored driver has although they are not offered here. It may have them again after a reset,
    /// as one that resumes from a suspension of the guest does without another look at the offer.
    kept_features: u64,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
    run: Run,
    /// The driver has requested a reset, which has to wait for the host. Until it is done the
    /// driver sees the old status, as 2.4.2 requires.
    resetting: bool,
    /// New requests to the host are held back. A device that the driver starts meanwhile starts when that is over.
    held: bool,
    /// The driver has started the device while it was held.
    starts_later: bool,
    /// A misbehaving driver is logged once, and so is a failure of the host: the driver can trigger
    /// both at will.
    warned: AtomicBool,
    host_warned: AtomicBool,
}

impl Transport {
    pub(super) fn new(parts: TransportParts) -> Self {
        let TransportParts {
            device,
            memory,
            doorbells,
            kicks,
            msix,
        } = parts;
        let sizes = device.queue_sizes();
        let interrupt = Arc::new(Interrupt::new(Arc::clone(&msix), sizes.len()));
        let kicks: Arc<[EventFd]> = kicks.into();
        let queues = sizes
            .iter()
            .map(|&size| QueueRegisters::new(size))
            .collect();
        let had_driver = Arc::<AtomicBool>::default();
        Self {
            had_driver: Arc::clone(&had_driver),
            registers: FairLock::new(Registers {
                device,
                had_driver,
                memory,
                doorbells,
                interrupt: Arc::clone(&interrupt),
                kicks: Arc::clone(&kicks),
                bar: None,
                connected: Vec::new(),
                device_feature_select: 0,
                driver_feature_select: 0,
                driver_features: 0,
                kept_features: 0,
                status: 0,
                queue_select: 0,
                queues,
                run: Run::Idle,
                resetting: false,
                held: false,
                starts_later: false,
                warned: AtomicBool::new(false),
                host_warned: AtomicBool::new(false),
            }),
            interrupt,
            msix,
            kicks,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock()
    }

    /// Holds the lock of the registers.
    #[cfg(test)]
    pub(super) fn locked(&self) -> impl Sized + '_ {
        self.lock()
    }

    /// Whether a thread waits for the registers, or is about to acquire them.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.registers.is_awaited()
    }

    /// The BAR is decoded at another address, or no longer.
    pub(super) fn set_bar(&self, address: Option<u64>) {
        let mut registers = self.lock();
        registers.disconnect();
        registers.bar = address;
        registers.connect();
    }

    pub(super) fn pause(&self) -> Result<(), LifecycleError> {
        self.lock().pause()
    }

    pub(super) fn resume(&self) -> Result<(), LifecycleError> {
        self.lock().resume()
    }

    pub(super) fn reset(&self) {
        self.lock().reset();
    }

    pub(super) fn quiesce(&self) -> Result<(), LifecycleError> {
        let mut registers = self.lock();
        registers.held = true;
        registers
            .quiesce(PAUSE_PATIENCE)
            .inspect_err(|_| registers.carry_on())
            .map_err(LifecycleError::from)
    }

    /// Holds back new requests, also if the driver resets the device and starts it again; an error names those that are
    /// in flight, for which the caller has `waited`.
    pub(super) fn hold(&self, waited: Duration) -> Result<(), LifecycleError> {
        let mut registers = self.lock();
        registers.held = true;
        let held = registers.quiesce(Duration::ZERO);
        Ok(held.map_err(|error| Unanswered {
            patience: Duration::from_secs(waited.as_secs()),
            ..error
        })?)
    }

    pub(super) fn carry_on(&self) {
        self.lock().carry_on();
    }

    /// Stops the device for good. Guest memory goes away afterwards, so this waits, without a
    /// timeout, for any host writes still in flight, and logs an error if that takes long. Callers
    /// that cannot wait call [`Transport::quiesce`] first.
    pub(super) fn shut(&self) {
        let mut registers = self.lock();
        if let Err(error) = registers.quiesce(PAUSE_PATIENCE) {
            log::error!("{error}; waiting for it, which only the end of this process cuts short");
        }
        registers.reset();
        registers.device.close();
        registers.run = Run::Gone;
    }

    /// Saves the transport's state and the device's own.
    pub(super) fn save(&self) -> Result<(TransportState, Value), LifecycleError> {
        self.lock().save()
    }

    pub(super) fn restore(
        &self,
        state: &TransportState,
        device: Value,
    ) -> Result<(), LifecycleError> {
        self.lock().restore(state, device)
    }

    /// Whether a driver has ever been ready.
    pub(super) fn had_driver(&self) -> bool {
        self.had_driver.load(Ordering::Relaxed)
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        self.lock().device.counters()
    }

    fn notify(&self, offset: u64) {
        let queue = usize::try_from(offset / u64::from(NOTIFY_MULTIPLIER));
        if let Some(kick) = queue.ok().and_then(|queue| self.kicks.get(queue)) {
            // Fails only if the counter is full, in which case the worker has already been woken.
            let _ = kick.write(1);
        }
    }
}

impl BusDevice for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let (part, offset) = Part::of(offset);
        match part {
            Part::Common => {
                let mut registers = self.lock();
                if registers.resetting {
                    registers.try_reset(Duration::ZERO);
                }
                let common = registers.common();
                drop(registers);
                for (at, byte) in (offset..).zip(data) {
                    let at = usize::try_from(at).ok();
                    *byte = at.and_then(|at| common.get(at).copied()).unwrap_or(0);
                }
            }
            Part::Isr => {
                data.fill(0);
                if let (0, Some(first)) = (offset, data.first_mut()) {
                    *first = self.interrupt.take_isr();
                }
            }
            Part::Device => {
                data.fill(0);
                self.lock().device.read_config(offset, data);
            }
            Part::Notify => data.fill(0),
            Part::Table => self.msix.read_table(offset, data),
            Part::Pending => self.msix.read_pending(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (part, offset) = Part::of(offset);
        match part {
            Part::Common => self.lock().write_common(offset, data),
            Part::Device => self.lock().device.write_config(offset, data),
            Part::Notify => self.notify(offset),
            Part::Table => self.msix.write_table(offset, data),
            Part::Isr | Part::Pending => {}
        }
    }
}

impl Registers {
    fn offered(&self) -> u64 {
        (self.device.features() | VERSION_1) & !UNSUPPORTED_FEATURES
    }

    fn visible_status(&self) -> u8 {
        if self.interrupt.is_broken() {
            self.status | status::NEEDS_RESET
        } else {
            self.status
        }
    }

    /// The common configuration structure. Reading it has no side effects.
    fn common(&self) -> [u8; common::LEN] {
        let mut bytes = [0; common::LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let select = self.device_feature_select;
        put(common::DEVICE_FEATURE_SELECT, &select.to_le_bytes());
        let shown = half(self.offered(), select);
        put(common::DEVICE_FEATURE, &shown.to_le_bytes());
        let select = self.driver_feature_select;
        put(common::DRIVER_FEATURE_SELECT, &select.to_le_bytes());
        let shown = half(self.driver_features, select);
        put(common::DRIVER_FEATURE, &shown.to_le_bytes());
        let vector = self.interrupt.config_vector();
        put(common::CONFIG_VECTOR, &vector.to_le_bytes());
        // At most MAX_QUEUES.
        let queues = self.queues.len() as u16;
        put(common::NUM_QUEUES, &queues.to_le_bytes());
        put(common::STATUS, &[self.visible_status()]);
        put(common::GENERATION, &[self.interrupt.generation()]);
        put(common::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        let at = usize::from(self.queue_select);
        let vector = self.interrupt.queue_vector(at);
        put(common::QUEUE_VECTOR, &vector.to_le_bytes());
        if let Some(queue) = self.queues.get(at) {
            put(common::QUEUE_SIZE, &queue.size.to_le_bytes());
            put(
                common::QUEUE_ENABLE,
                &u16::from(queue.enabled).to_le_bytes(),
            );
            put(common::QUEUE_NOTIFY, &self.queue_select.to_le_bytes());
            put(common::QUEUE_DESC, &queue.descriptors.to_le_bytes());
            put(common::QUEUE_DRIVER, &queue.driver.to_le_bytes());
            put(common::QUEUE_DEVICE, &queue.device.to_le_bytes());
        }
        bytes
    }

    /// Handles a write of a whole field, or of half of a 64-bit one (4.1.3.1). Others are dropped.
    fn write_common(&mut self, offset: u64, data: &[u8]) {
        let Ok(offset) = usize::try_from(offset) else {
            return;
        };
        let at = usize::from(self.queue_select);
        match *data {
            [value] if offset == common::STATUS => self.write_status(value),
            [a, b] => {
                let value = u16::from_le_bytes([a, b]);
                match offset {
                    common::CONFIG_VECTOR => self.interrupt.set_config_vector(value),
                    common::QUEUE_SELECT => self.queue_select = value,
                    common::QUEUE_SIZE => self.write_queue(|queue| queue.size = value),
                    common::QUEUE_VECTOR => self.interrupt.set_queue_vector(at, value),
                    // Only a device reset disables a queue (4.1.4.3.2).
                    common::QUEUE_ENABLE if value == 1 => {
                        self.write_queue(|queue| queue.enabled = true);
                    }
                    _ => {}
                }
            }
            [a, b, c, d] => self.write_u32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] if (common::QUEUE_DESC..common::LEN).contains(&offset) => {
                self.write_u32(offset, u32::from_le_bytes([a, b, c, d]));
                self.write_u32(offset + 4, u32::from_le_bytes([e, f, g, h]));
            }
            _ => {}
        }
    }

    fn write_u32(&mut self, offset: usize, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            common::DEVICE_FEATURE_SELECT => self.device_feature_select = value,
            common::DRIVER_FEATURE_SELECT => self.driver_feature_select = value,
            common::DRIVER_FEATURE if self.status & status::FEATURES_OK == 0 => {
                match self.driver_feature_select {
                    0 => self.driver_features = low(self.driver_features),
                    1 => self.driver_features = high(self.driver_features),
                    _ => {}
                }
            }
            _ => self.write_queue(|queue| {
                let (field, half) = match offset {
                    common::QUEUE_DESC..common::QUEUE_DRIVER => {
                        (&mut queue.descriptors, offset - common::QUEUE_DESC)
                    }
                    common::QUEUE_DRIVER..common::QUEUE_DEVICE => {
                        (&mut queue.driver, offset - common::QUEUE_DRIVER)
                    }
                    common::QUEUE_DEVICE..common::LEN => {
                        (&mut queue.device, offset - common::QUEUE_DEVICE)
                    }
                    _ => return,
                };
                match half {
                    0 => *field = low(*field),
                    4 => *field = high(*field),
                    _ => {}
                }
            }),
        }
    }

    /// Changes the selected queue, unless it is already enabled or the device is live.
    fn write_queue(&mut self, change: impl FnOnce(&mut QueueRegisters)) {
        let live = self.status & status::DRIVER_OK != 0;
        match self.queues.get_mut(usize::from(self.queue_select)) {
            Some(queue) if !queue.enabled && !live => change(queue),
            _ => {}
        }
    }

    /// Implements the status protocol (3.1.1).
    fn write_status(&mut self, value: u8) {
        if value == 0 {
            // A driver that asks once more does not wait again: others wait for the registers meanwhile.
            self.try_reset(match self.resetting {
                true => Duration::ZERO,
                false => RESET_PATIENCE,
            });
            return;
        }
        if matches!(self.run, Run::Gone) || self.resetting {
            return;
        }
        if self.status & !value != 0 {
            self.warn_driver_once("clears bits of the device status without a reset");
            return;
        }
        let mut added = value & DRIVER_STATUS & !self.status;
        if added & status::FEATURES_OK != 0 && !self.accept_features(self.status | added) {
            added &= !(status::FEATURES_OK | status::DRIVER_OK);
        }
        if added & status::DRIVER_OK != 0 && (self.status | added) & status::FEATURES_OK == 0 {
            self.warn_driver_once("sets DRIVER_OK before FEATURES_OK");
            added &= !status::DRIVER_OK;
        }
        self.status |= added;
        if added & status::DRIVER_OK != 0 {
            self.had_driver.store(true, Ordering::Relaxed);
            self.start();
        }
    }

    fn accept_features(&self, status: u8) -> bool {
        let known = status::ACKNOWLEDGE | status::DRIVER;
        if status & known != known {
            self.warn_driver_once("sets FEATURES_OK before ACKNOWLEDGE and DRIVER");
            return false;
        }
        let known = self.offered() | self.kept_features;
        if self.driver_features & VERSION_1 == 0 || self.driver_features & !known != 0 {
            self.warn_driver_once("asks for features that were not offered, or not for VERSION_1");
            return false;
        }
        true
    }

    /// Handles DRIVER_OK: passes the queues to the device as the driver has set them up.
    fn start(&mut self) {
        match self.enabled_queues(|_| QueueProgress::default()) {
            Ok(queues) if self.held => {
                self.run = Run::Paused {
                    queues,
                    restored: false,
                };
                self.starts_later = true;
                self.connect();
            }
            Ok(queues) => {
                // Whatever the failure, the driver sees DEVICE_NEEDS_RESET.
                if let Err(error) = self.activate(queues) {
                    self.warn_host_once(&format!("does not start: {}", Chain(&error)));
                }
            }
            Err(error) => {
                self.warn_driver_once(&error);
                self.interrupt.needs_reset();
            }
        }
    }

    /// Builds the queues that the driver enabled.
    fn enabled_queues(
        &self,
        progress: impl Fn(usize) -> QueueProgress,
    ) -> Result<Vec<(u16, Queue)>, String> {
        let memory = self.memory.memory();
        let event_index = self.driver_features & EVENT_INDEX != 0;
        let sizes = self.device.queue_sizes();
        let mut queues = Vec::new();
        for (at, (registers, &max)) in self.queues.iter().zip(sizes).enumerate() {
            if registers.enabled {
                let queue = registers.build(max, event_index, progress(at), &memory);
                let queue =
                    queue.map_err(|error| format!("sets up queue {at} wrongly: {error}"))?;
                // At most MAX_QUEUES.
                queues.push((at as u16, queue));
            }
        }
        Ok(queues)
    }

    fn activate(&mut self, queues: Vec<(u16, Queue)>) -> Result<(), ActivateError> {
        let indexes: Vec<_> = queues.iter().map(|(index, _)| *index).collect();
        let result = self.hand_over(queues);
        match result {
            Ok(()) => {
                self.run = Run::Active(indexes);
                self.connect();
            }
            Err(_) => {
                self.run = Run::Idle;
                self.disconnect();
                self.interrupt.needs_reset();
            }
        }
        result
    }

    fn hand_over(&mut self, queues: Vec<(u16, Queue)>) -> Result<(), ActivateError> {
        let mut active = Vec::with_capacity(queues.len());
        for (index, queue) in queues {
            let kick = self.kicks[usize::from(index)].try_clone();
            let kick = kick.map_err(|source| ActivateError::Host {
                action: "duplicate a queue's eventfd",
                source,
            })?;
            active.push(ActiveQueue { index, queue, kick });
        }
        self.device.activate(Activation {
            memory: self.memory.clone(),
            interrupt: Arc::clone(&self.interrupt) as Arc<dyn VirtioInterrupt>,
            queues: active,
            features: self.driver_features,
        })
    }

    /// Undoes a hold or a quiesce, unless the driver has requested a reset and waits for it.
    fn carry_on(&mut self) {
        self.held = false;
        if self.starts_later {
            // Whatever the failure, the driver sees DEVICE_NEEDS_RESET.
            if let Err(error) = self.start_paused() {
                self.warn_host_once(&format!("does not start: {}", Chain(&error)));
            }
            return;
        }
        let Run::Active(indexes) = &self.run else {
            return;
        };
        if !self.resetting {
            self.device.carry_on();
            for index in indexes {
                // Fails only if the counter is full, in which case it is readable anyway.
                let _ = self.kicks[usize::from(*index)].write(1);
            }
        }
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        match self.run {
            Run::Active(_) => self.device.quiesce(patience),
            _ => self.device.settle(patience),
        }
    }

    fn pause(&mut self) -> Result<(), LifecycleError> {
        // From now on the device starts when it is resumed.
        self.starts_later = false;
        if let Err(error) = self.quiesce(PAUSE_PATIENCE) {
            self.carry_on();
            return Err(error.into());
        }
        if let Err(source) = self.device.settled() {
            self.carry_on();
            return Err(LifecycleError::Host {
                action: "store what the guest has written",
                source,
            });
        }
        let Run::Active(indexes) = &self.run else {
            return Ok(());
        };
        if self.resetting {
            self.reset();
            return Ok(());
        }
        let queues: Vec<_> = self
            .device
            .deactivate()
            .into_iter()
            .map(|active| (active.index, active.queue))
            .collect();
        if !queues.iter().map(|(index, _)| index).eq(indexes) {
            self.run = Run::Idle;
            self.disconnect();
            self.interrupt.needs_reset();
            return Err(LifecycleError::WrongState(
                "the device's worker died and took the queues along",
            ));
        }
        self.run = Run::Paused {
            queues,
            restored: false,
        };
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        if self.held {
            self.carry_on();
        }
        Ok(self.start_paused()?)
    }

    /// Starts a device whose queues are kept here.
    fn start_paused(&mut self) -> Result<(), ActivateError> {
        self.starts_later = false;
        match std::mem::replace(&mut self.run, Run::Idle) {
            Run::Paused { queues, restored } => {
                let indexes: Vec<_> = queues.iter().map(|(index, _)| *index).collect();
                self.activate(queues)?;
                for index in indexes {
                    // The driver may have notified the queue while nobody listened.
                    let _ = self.kicks[usize::from(index)].write(1);
                    if restored && let Err(error) = self.interrupt.queue(index) {
                        log::warn!("cannot interrupt the driver after a restore: {error}");
                    }
                }
            }
            other => self.run = other,
        }
        Ok(())
    }

    /// Resets the device if the host completes its requests within `patience`. Otherwise the reset
    /// stays pending and the driver must poll.
    fn try_reset(&mut self, patience: Duration) {
        if matches!(self.run, Run::Active(_))
            && let Err(error) = self.device.prepare_reset(patience)
        {
            self.resetting = true;
            self.warn_host_once(&format!("cannot be reset yet: {error}"));
            return;
        }
        self.reset();
    }

    /// Device reset (2.4): discards all state except the configuration, here and in the device.
    fn reset(&mut self) {
        if matches!(self.run, Run::Gone) {
            return;
        }
        if matches!(self.run, Run::Active(_)) {
            self.device.deactivate();
        }
        self.device.reset();
        self.clear();
    }

    /// The transport's part of a reset.
    fn clear(&mut self) {
        self.run = Run::Idle;
        self.resetting = false;
        self.starts_later = false;
        self.disconnect();
        for kick in self.kicks.iter() {
            // Clears the counter; an error means that it is already clear.
            let _ = kick.read();
        }
        self.interrupt.reset();
        self.status = 0;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        for (queue, &size) in self.queues.iter_mut().zip(self.device.queue_sizes()) {
            *queue = QueueRegisters::new(size);
        }
    }

    /// Registers the doorbells of the device's queues, if the BAR is decoded.
    fn connect(&mut self) {
        let queues: Vec<u16> = match &self.run {
            Run::Active(indexes) => indexes.clone(),
            Run::Paused { queues, .. } => queues.iter().map(|(index, _)| *index).collect(),
            Run::Idle | Run::Gone => return,
        };
        let Some(bar) = self.bar.filter(|_| self.connected.is_empty()) else {
            return;
        };
        for index in queues {
            // Within the BAR, which does not wrap.
            let address = bar + NOTIFY_OFFSET + u64::from(index) * u64::from(NOTIFY_MULTIPLIER);
            match self.doorbells.register(self.doorbell(index), address) {
                Ok(()) => self.connected.push((index, address)),
                Err(error) => {
                    let what = format!("is notified of queue {index} through exits: {error}");
                    self.warn_host_once(&what);
                }
            }
        }
    }

    /// The eventfd that the guest's notifications of a queue signal.
    fn doorbell(&self, index: u16) -> &EventFd {
        let own = &self.kicks[usize::from(index)];
        self.device.doorbell(index).unwrap_or(own)
    }

    fn disconnect(&mut self) {
        for (index, address) in std::mem::take(&mut self.connected) {
            if let Err(error) = self.doorbells.unregister(self.doorbell(index), address) {
                self.warn_host_once(&format!("keeps its doorbell at {address:#x}: {error}"));
            }
        }
    }

    fn save(&self) -> Result<(TransportState, Value), LifecycleError> {
        let progress = |at: usize| match &self.run {
            Run::Paused { queues, .. } => queues
                .iter()
                .find(|(index, _)| usize::from(*index) == at)
                .map(|(_, queue)| QueueProgress::of(queue)),
            _ => None,
        };
        if matches!(self.run, Run::Active(_)) {
            return Err(LifecycleError::WrongState(
                "a running device cannot be saved; pause it first",
            ));
        }
        let queues = self.queues.iter().enumerate();
        let queues = queues.map(|(at, registers)| QueueTransportState {
            vector: self.interrupt.queue_vector(at),
            registers: *registers,
            progress: progress(at).unwrap_or_default(),
        });
        let state = TransportState {
            device_type: self.device.device_type().number,
            status: self.status,
            broken: self.interrupt.is_broken(),
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            driver_features: self.driver_features,
            kept_features: self.kept_features,
            queue_select: self.queue_select,
            config_vector: self.interrupt.config_vector(),
            isr: self.interrupt.isr(),
            generation: self.interrupt.generation(),
            queues: queues.collect(),
        };
        Ok((state, self.device.save()?))
    }

    fn restore(&mut self, state: &TransportState, device: Value) -> Result<(), LifecycleError> {
        if matches!(self.run, Run::Active(_) | Run::Gone) {
            return Err(LifecycleError::WrongState(
                "only a device that does not run can be restored",
            ));
        }
        // Restored first, because the features offered may depend on the device's state.
        self.device.restore(device)?;
        self.check(state)?;
        self.clear();
        self.status = state.status;
        self.device_feature_select = state.device_feature_select;
        self.driver_feature_select = state.driver_feature_select;
        self.driver_features = state.driver_features;
        let negotiated = match state.status & status::FEATURES_OK {
            // The driver of a guest that is suspended comes back with what it had, which nobody knows.
            0 => self.device.refused_features(),
            _ => state.driver_features,
        };
        // Those of the driver are checked.
        let had = negotiated | state.kept_features & self.device.refused_features();
        self.kept_features = had & !self.offered();
        self.queue_select = state.queue_select;
        self.interrupt.set_config_vector(state.config_vector);
        self.interrupt.set_isr(state.isr);
        self.interrupt.set_generation(state.generation);
        self.interrupt.set_broken(state.broken);
        for (at, saved) in state.queues.iter().enumerate() {
            self.queues[at] = saved.registers;
            self.interrupt.set_queue_vector(at, saved.vector);
        }
        if state.status & status::DRIVER_OK != 0 && !state.broken {
            let queues = self.enabled_queues(|at| state.queues[at].progress);
            let queues = queues.map_err(StateError::Mismatch)?;
            self.run = Run::Paused {
                queues,
                restored: true,
            };
            self.connect();
        }
        Ok(())
    }

    /// Checks whether a saved state can belong to this device.
    fn check(&self, state: &TransportState) -> Result<(), StateError> {
        let expect = |fits: bool, what: &str| {
            if fits {
                Ok(())
            } else {
                Err(StateError::Mismatch(what.to_owned()))
            }
        };
        let kind = self.device.device_type().number;
        expect(state.device_type == kind, "another type of device")?;
        let queues = state.queues.len() == self.queues.len();
        expect(queues, "another number of queues")?;
        let known = self.offered() | self.device.refused_features();
        let features = state.driver_features & !known == 0;
        let negotiated = state.status & status::FEATURES_OK != 0;
        expect(
            features || !negotiated,
            "features that the device does not have here",
        )?;
        let known = state.status & !DRIVER_STATUS == 0;
        let ordered = negotiated || state.status & status::DRIVER_OK == 0;
        expect(known && ordered, "an impossible device status")
    }

    /// Logs, at most once for this device, what the host failed to do.
    fn warn_host_once(&self, what: &str) {
        if !self.host_warned.swap(true, Ordering::Relaxed) {
            let name = self.device.device_type().name;
            log::error!("virtio device ({name}) {what}");
        }
    }

    /// Logs, at most once for this device, what the driver does wrong.
    fn warn_driver_once(&self, what: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let name = self.device.device_type().name;
            log::warn!("the driver of virtio device ({name}) {what}");
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        if matches!(self.run, Run::Active(_)) {
            self.device.deactivate();
        }
        self.disconnect();
    }
}
