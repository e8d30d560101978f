//! Terminal input that the guest has not read yet.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use console::InputSink;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum number of bytes buffered for the guest. The sender keeps the rest.
pub const CAPACITY: usize = 4096;

/// A bounded buffer between the console thread and the device's worker.
pub struct Input {
    bytes: Mutex<VecDeque<u8>>,
    /// Readable when there is input for the worker.
    arrived: EventFd,
    room: EventFd,
    turned_away: AtomicBool,
}

impl Input {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            bytes: Mutex::default(),
            arrived: EventFd::new(EFD_NONBLOCK)?,
            room: EventFd::new(EFD_NONBLOCK)?,
            turned_away: AtomicBool::new(false),
        })
    }

    /// An event that is readable when there is input for the worker.
    pub fn arrived(&self) -> &EventFd {
        &self.arrived
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Takes at most `max` bytes.
    pub fn take(&self, max: usize) -> Vec<u8> {
        let mut bytes = self.lock();
        let count = max.min(bytes.len());
        let taken = bytes.drain(..count).collect();
        drop(bytes);
        if count > 0 && self.turned_away.swap(false, Ordering::SeqCst) {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.room.write(1);
        }
        taken
    }

    /// A copy of all buffered input, for a snapshot.
    pub fn waiting(&self) -> Vec<u8> {
        self.lock().iter().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.bytes.lock_unpoisoned()
    }
}

impl InputSink for Input {
    fn enqueue(&self, data: &[u8]) -> usize {
        let mut bytes = self.lock();
        let count = data.len().min(CAPACITY - bytes.len());
        bytes.extend(&data[..count]);
        if count < data.len() {
            // Set under the lock, so that no `take` in between is missed.
            self.turned_away.store(true, Ordering::SeqCst);
        }
        drop(bytes);
        if count > 0 {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.arrived.write(1);
        }
        count
    }

    fn room_event(&self) -> &EventFd {
        &self.room
    }
}
