//! How a device's workers signal the driver: through atomics only.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering},
    },
};

use pci::{Delivery, MsixTable};

use super::layout::NO_VECTOR;
use crate::VirtioInterrupt;

/// ISR status: a queue was used.
const ISR_QUEUE: u8 = 1;
/// ISR status: the device configuration changed.
const ISR_CONFIG: u8 = 2;

/// Vectors, ISR status and the other state that a worker may change.
pub(super) struct Interrupt {
    msix: Arc<MsixTable>,
    config_vector: AtomicU16,
    queue_vectors: Box<[AtomicU16]>,
    isr: AtomicU8,
    generation: AtomicU8,
    needs_reset: AtomicBool,
}

impl Interrupt {
    pub(super) fn new(msix: Arc<MsixTable>, queues: usize) -> Self {
        Self {
            msix,
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    /// Returns to the state after a device reset. No worker may be running.
    pub(super) fn reset(&self) {
        self.config_vector.store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Relaxed);
        self.needs_reset.store(false, Ordering::Relaxed);
    }

    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Relaxed)
    }

    /// Sets the vector; a vector that does not exist becomes `NO_VECTOR` (4.1.5.1.2.1).
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config_vector
            .store(self.existing(vector), Ordering::Relaxed);
    }

    /// Vector of a queue; `NO_VECTOR` if there is no such queue.
    pub(super) fn queue_vector(&self, queue: usize) -> u16 {
        self.queue_vectors
            .get(queue)
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    pub(super) fn set_queue_vector(&self, queue: usize, vector: u16) {
        if let Some(at) = self.queue_vectors.get(queue) {
            at.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.msix.count() {
            vector
        } else {
            NO_VECTOR
        }
    }

    /// Reads the ISR status, which clears it (4.1.4.5).
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    pub(super) fn isr(&self) -> u8 {
        self.isr.load(Ordering::Acquire)
    }

    pub(super) fn set_isr(&self, isr: u8) {
        self.isr
            .store(isr & (ISR_QUEUE | ISR_CONFIG), Ordering::Release);
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn set_generation(&self, generation: u8) {
        self.generation.store(generation, Ordering::Release);
    }

    /// Whether the device needs a reset.
    pub(super) fn is_broken(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    pub(super) fn set_broken(&self, broken: bool) {
        self.needs_reset.store(broken, Ordering::Release);
    }

    /// Raises a vector, or sets a bit in the ISR status if MSI-X is disabled.
    fn raise(&self, vector: u16, isr: u8) -> io::Result<()> {
        if self.msix.trigger(vector)? == Delivery::Disabled {
            self.isr.fetch_or(isr, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl VirtioInterrupt for Interrupt {
    fn queue(&self, index: u16) -> io::Result<()> {
        self.raise(self.queue_vector(usize::from(index)), ISR_QUEUE)
    }

    fn config(&self) -> io::Result<()> {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(self.config_vector(), ISR_CONFIG)
    }

    fn needs_reset(&self) {
        if !self.needs_reset.swap(true, Ordering::AcqRel)
            && let Err(error) = self.config()
        {
            log::warn!("cannot tell the driver that its device needs a reset: {error}");
        }
    }
}
