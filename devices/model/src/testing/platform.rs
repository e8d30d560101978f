//! Interrupts, doorbells and memory of a fake VM.

use std::{
    collections::BTreeMap,
    io, mem,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    doorbell::Doorbells,
    memory::{AddressSpace, GuestMemory, GuestRam, HostMemory, Mapping},
    msi::{MsiController, MsiMessage, MsiVectors},
    shared_event,
};

/// Creates `len` bytes of guest RAM from address 0.
///
/// # Panics
/// If the host has not enough memory.
#[allow(clippy::unwrap_used, reason = "a test without memory can only fail")]
pub fn guest_memory(len: usize) -> GuestMemory {
    GuestMemory::new(GuestRam::from_ranges(&[(GuestAddress(0), len)]).unwrap())
}

struct FakeVector {
    irqfd: EventFd,
    route: Option<MsiMessage>,
    /// Interrupts that did not arrive through the eventfd.
    raised: u64,
}

/// An interrupt controller that counts interrupts. Clones share their vectors.
#[derive(Clone, Default)]
pub struct FakeMsi {
    vectors: Arc<Mutex<Vec<FakeVector>>>,
}

impl FakeMsi {
    /// Number of interrupts on `vector` since the last call.
    pub fn take(&self, vector: u16) -> u64 {
        let mut vectors = self.vectors.lock_unpoisoned();
        let vector = vectors.get_mut(usize::from(vector));
        vector.map_or(0, |vector| {
            let signalled = shared_event::take(&vector.irqfd).unwrap_or(0);
            signalled.saturating_add(mem::take(&mut vector.raised))
        })
    }

    /// The message to which `vector` is routed.
    pub fn route(&self, vector: u16) -> Option<MsiMessage> {
        self.vectors
            .lock_unpoisoned()
            .get(usize::from(vector))?
            .route
    }
}

impl MsiController for FakeMsi {
    /// All functions share the vectors of the first one: a rig tests one function at a time.
    fn allocate(&self, count: u16, _source: u16) -> io::Result<Box<dyn MsiVectors>> {
        let mut fds = Vec::new();
        let mut vectors = self.vectors.lock_unpoisoned();
        for at in 0..usize::from(count) {
            if at >= vectors.len() {
                vectors.push(FakeVector {
                    irqfd: EventFd::new(EFD_NONBLOCK)?,
                    route: None,
                    raised: 0,
                });
            }
            fds.push(vectors[at].irqfd.try_clone()?);
        }
        Ok(Box::new(FakeVectors {
            vectors: Arc::clone(&self.vectors),
            fds,
        }))
    }
}

struct FakeVectors {
    vectors: Arc<Mutex<Vec<FakeVector>>>,
    fds: Vec<EventFd>,
}

impl MsiVectors for FakeVectors {
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        match self.vectors.lock_unpoisoned().get_mut(usize::from(vector)) {
            Some(at) => at.route = message,
            None => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn raise(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        match self.vectors.lock_unpoisoned().get_mut(usize::from(vector)) {
            Some(at) if at.route == Some(message) => at.raised += 1,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn irqfd(&self, vector: u16) -> io::Result<&EventFd> {
        let made = self.made_irqfd(vector);
        made.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn made_irqfd(&self, vector: u16) -> Option<&EventFd> {
        self.fds.get(usize::from(vector))
    }
}

/// Registered doorbells, by address. Clones share them.
#[derive(Clone, Default)]
pub struct FakeDoorbells {
    registered: Arc<Mutex<BTreeMap<u64, EventFd>>>,
}

impl FakeDoorbells {
    /// The addresses, in ascending order.
    pub fn addresses(&self) -> Vec<u64> {
        self.registered.lock_unpoisoned().keys().copied().collect()
    }

    /// Does what KVM does on a write: true if there is a doorbell at `address`.
    pub fn ring(&self, address: u64) -> bool {
        self.registered
            .lock_unpoisoned()
            .get(&address)
            .is_some_and(|fd| fd.write(1).is_ok())
    }
}

impl Doorbells for FakeDoorbells {
    fn register(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        let fd = fd.try_clone()?;
        match self.registered.lock_unpoisoned().insert(address, fd) {
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
            None => Ok(()),
        }
    }

    fn unregister(&self, _fd: &EventFd, address: u64) -> io::Result<()> {
        let removed = self.registered.lock_unpoisoned().remove(&address);
        removed.map(drop).ok_or(io::ErrorKind::NotFound.into())
    }
}

/// An address space that accepts every mapping.
pub struct FakeSpace;

struct Placed(GuestAddress);

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        self.0
    }
}

impl AddressSpace for FakeSpace {
    fn map(
        &self,
        _memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        Ok(Box::new(Placed(at.unwrap_or(GuestAddress(align)))))
    }
}
