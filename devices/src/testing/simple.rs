//! A guest with queues but without a transport: for devices on their own.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::guest_memory;
use crate::{
    memory::GuestMemory,
    virtio::{Activation, ActiveQueue, VirtioInterrupt, served::COMMON_FEATURES},
};

/// Bytes of the guest's memory, from address 0.
pub const MEMORY: usize = 32 << 20;

/// Bytes from the start of one queue's area to the next one's.
const AREA: u64 = 0x10_0000;
/// Within an area: the descriptor table, the rings, and buffers.
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x8000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Longest wait for a device that should answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Counts interrupts.
#[derive(Debug, Default)]
pub struct Interrupts {
    /// For queues.
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

/// A guest's memory and what reaches it.
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
    /// A guest with [`MEMORY`] bytes.
    pub fn new() -> Self {
        Self {
            memory: guest_memory(MEMORY),
            interrupts: Arc::default(),
        }
    }

    /// Queue number `index`, up to 15, with at most 256 entries.
    pub fn queue(&self, index: u16, size: u16) -> GuestQueue {
        GuestQueue {
            memory: self.memory.clone(),
            index,
            size,
            base: 0x10_0000 + u64::from(index) * AREA,
            kick: EventFd::new(EFD_NONBLOCK).unwrap_or_else(|error| panic!("no eventfd: {error}")),
            state: Mutex::default(),
        }
    }

    /// What a device is activated with: all common features but event indices.
    pub fn activation(&self, queues: &[&GuestQueue]) -> Activation {
        self.activation_with(queues, 0)
    }

    /// The same with further features.
    pub fn activation_with(&self, queues: &[&GuestQueue], features: u64) -> Activation {
        Activation {
            memory: self.memory.clone(),
            interrupt: self.interrupts.clone(),
            queues: queues.iter().map(|queue| queue.active()).collect(),
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
    available: u16,
    used: u16,
}

/// The driver's side of a split queue.
pub struct GuestQueue {
    memory: GuestMemory,
    index: u16,
    size: u16,
    base: u64,
    kick: EventFd,
    state: Mutex<Progress>,
}

impl GuestQueue {
    fn active(&self) -> ActiveQueue {
        let mut queue =
            Queue::new(self.size).unwrap_or_else(|error| panic!("size {}: {error}", self.size));
        let low = |address: u64| Some(address as u32);
        queue.set_size(self.size);
        queue.set_desc_table_address(low(self.base), Some(0));
        queue.set_avail_ring_address(low(self.base + AVAILABLE), Some(0));
        queue.set_used_ring_address(low(self.base + USED), Some(0));
        queue.set_ready(true);
        let kick = self
            .kick
            .try_clone()
            .unwrap_or_else(|error| panic!("no eventfd: {error}"));
        ActiveQueue {
            index: self.index,
            queue,
            kick,
        }
    }

    /// Address of the queue's buffers, of which there are about 900 KiB.
    pub fn buffers(&self) -> u64 {
        self.base + BUFFERS
    }

    /// Makes a chain of buffers (address, length, writable by the device) available and kicks.
    pub fn submit(&self, buffers: &[(u64, u32, bool)]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = self.memory.memory();
        let put = |bytes: &[u8], at: u64| {
            memory
                .write_slice(bytes, GuestAddress(at))
                .unwrap_or_else(|error| panic!("{at:#x}: {error}"));
        };
        let head = state.descriptors % self.size;
        for (number, (address, len, writable)) in buffers.iter().enumerate() {
            let slot = state.descriptors % self.size;
            let next = (slot + 1) % self.size;
            let mut flags = if *writable { WRITE } else { 0 };
            if number + 1 < buffers.len() {
                flags |= NEXT;
            }
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend(len.to_le_bytes());
            descriptor.extend(flags.to_le_bytes());
            descriptor.extend(next.to_le_bytes());
            put(&descriptor, self.base + 16 * u64::from(slot));
            state.descriptors = state.descriptors.wrapping_add(1);
        }
        let slot = u64::from(state.available % self.size);
        put(&head.to_le_bytes(), self.base + AVAILABLE + 4 + 2 * slot);
        state.available = state.available.wrapping_add(1);
        std::sync::atomic::fence(Ordering::SeqCst);
        put(&state.available.to_le_bytes(), self.base + AVAILABLE + 2);
        let _ = self.kick.write(1);
    }

    /// The length of the next used chain, if there is one.
    pub fn poll_used(&self) -> Option<u32> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = self.memory.memory();
        let index: u16 = memory
            .read_obj(GuestAddress(self.base + USED + 2))
            .unwrap_or(0);
        std::sync::atomic::fence(Ordering::SeqCst);
        if index == state.used {
            return None;
        }
        let slot = u64::from(state.used % self.size);
        state.used = state.used.wrapping_add(1);
        memory
            .read_obj(GuestAddress(self.base + USED + 4 + 8 * slot + 4))
            .ok()
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

    /// Submits a chain and waits for its length.
    pub fn raw(&self, buffers: &[(u64, u32, bool)]) -> u32 {
        self.submit(buffers);
        self.wait_used()
    }

    /// Submits a request that the device can read and one buffer that it can write; the length
    /// that it reports and what it wrote.
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
