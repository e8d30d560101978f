//! A guest with queues but without a transport, to test devices on their own.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::{memory::GuestMemory, testing::guest_memory};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::raw::{NEXT, RawQueue, WRITE};
use crate::{Activation, VirtioInterrupt, served::COMMON_FEATURES};

/// Size of guest memory in bytes, from address 0.
pub const MEMORY: usize = 32 << 20;

/// Maximum time to wait for a device that should respond.
const PATIENCE: Duration = Duration::from_secs(20);

/// Counts interrupts.
#[derive(Debug, Default)]
pub struct Interrupts {
    /// For used buffers.
    pub queue: AtomicUsize,
    /// For changes of the configuration.
    pub config: AtomicUsize,
    /// Requests for a reset.
    pub resets: AtomicUsize,
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, _index: u16) -> io::Result<()> {
        self.queue.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn config(&self) -> io::Result<()> {
        self.config.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn needs_reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

/// Guest memory and interrupts.
pub struct Guest {
    /// Its RAM.
    pub memory: GuestMemory,
    /// Its interrupts.
    pub interrupts: Arc<Interrupts>,
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    /// Creates a guest with [`MEMORY`] bytes of RAM.
    pub fn new() -> Self {
        Self {
            memory: guest_memory(MEMORY),
            interrupts: Arc::default(),
        }
    }

    /// Queue `index`, up to 15, with at most 256 entries.
    pub fn queue(&self, index: u16, size: u16) -> GuestQueue {
        GuestQueue {
            memory: self.memory.clone(),
            size,
            raw: RawQueue::new(self, index, size),
            state: Mutex::default(),
        }
    }

    /// Arguments to activate a device, with all common features except event indices.
    pub fn activation(&self, queues: &[&GuestQueue]) -> Activation {
        self.activation_with(queues, 0)
    }

    /// As [`Guest::activation`], with additional features.
    pub fn activation_with(&self, queues: &[&GuestQueue], features: u64) -> Activation {
        Activation {
            memory: self.memory.clone(),
            interrupt: self.interrupts.clone(),
            queues: queues.iter().map(|queue| queue.raw.active()).collect(),
            features: features | COMMON_FEATURES & !(1 << 29),
        }
    }

    /// Waits until `is` holds; panics if it never does.
    pub fn wait_until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is() {
            assert!(start.elapsed() < PATIENCE, "it never happened that {what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

#[derive(Debug, Default)]
struct Progress {
    descriptors: u16,
    used: u16,
}

/// The driver's side of a split queue.
pub struct GuestQueue {
    memory: GuestMemory,
    size: u16,
    raw: RawQueue,
    state: Mutex<Progress>,
}

impl GuestQueue {
    /// Address of the queue's buffers, of which there are about 900 KiB.
    pub fn buffers(&self) -> u64 {
        self.raw.free()
    }

    /// Makes a chain of buffers (address, length, writable by the device) available and kicks.
    pub fn submit(&self, buffers: &[(u64, u32, bool)]) {
        let mut state = self.state.lock_unpoisoned();
        let head = state.descriptors % self.size;
        for (number, &(address, len, writable)) in buffers.iter().enumerate() {
            let slot = state.descriptors % self.size;
            let mut flags = if writable { WRITE } else { 0 };
            if number + 1 < buffers.len() {
                flags |= NEXT;
            }
            let next = (slot + 1) % self.size;
            let table = self.raw.table();
            self.raw.describe(table, slot, (address, len), flags, next);
            state.descriptors = state.descriptors.wrapping_add(1);
        }
        self.raw.offer(head);
        self.raw.kick();
    }

    /// The length of the next used chain, if there is one.
    pub fn poll_used(&self) -> Option<u32> {
        let mut state = self.state.lock_unpoisoned();
        let number = state.used;
        if self.raw.used() == number {
            return None;
        }
        state.used = number.wrapping_add(1);
        Some(self.raw.used_len(number))
    }

    /// Waits for the next used chain and returns its length.
    pub fn wait_used(&self) -> u32 {
        let start = Instant::now();
        loop {
            if let Some(len) = self.poll_used() {
                return len;
            }
            assert!(start.elapsed() < PATIENCE, "the device does not answer");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Submits a chain and returns its used length.
    pub fn raw(&self, buffers: &[(u64, u32, bool)]) -> u32 {
        self.submit(buffers);
        self.wait_used()
    }

    /// Submits a request with one readable and one writable buffer; returns the used length, and
    /// what the device wrote.
    pub fn request(&self, readable: &[u8], writable: u32) -> (u32, Vec<u8>) {
        let memory = self.memory.memory();
        let at = self.buffers();
        let back = at + 0x4_0000;
        let put = memory.write_slice(readable, GuestAddress(at));
        put.unwrap_or_else(|error| panic!("{at:#x}: {error}"));
        let mut buffers = Vec::new();
        if !readable.is_empty() {
            buffers.push((at, readable.len() as u32, false));
        }
        if writable > 0 {
            buffers.push((back, writable, true));
        }
        let len = self.raw(&buffers);
        let mut bytes = vec![0; writable as usize];
        let get = memory.read_slice(&mut bytes, GuestAddress(back));
        get.unwrap_or_else(|error| panic!("{back:#x}: {error}"));
        (len, bytes)
    }
}
