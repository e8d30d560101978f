//! Interrupts and doorbells of devices, over KVM's irqfds and ioeventfds.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use arch::layout::PCI_INTX_GSI;
use devices::{
    doorbell::Doorbells,
    msi::{MsiController, MsiMessage, MsiVectors},
    pci::{Line, Lines, line_of},
};
use hypervisor::{MsiRoute, Vm};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Hands out interrupt vectors of a VM.
pub struct KvmMsis(Arc<Vm>);

struct Vector {
    gsi: u32,
    irqfd: EventFd,
    /// Writes to `irqfd` reach the guest. While a vector is masked they stay in the eventfd, and
    /// KVM delivers them when it is attached again.
    attached: Mutex<bool>,
}

struct Vectors {
    vm: Arc<Vm>,
    vectors: Vec<Vector>,
}

impl KvmMsis {
    /// For devices of `vm`.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self(vm)
    }
}

impl MsiController for KvmMsis {
    fn allocate(&self, count: u16, _source: u16) -> io::Result<Box<dyn MsiVectors>> {
        let mut vectors = Vectors {
            vm: Arc::clone(&self.0),
            vectors: Vec::with_capacity(count.into()),
        };
        for _ in 0..count {
            let irqfd = EventFd::new(EFD_NONBLOCK)?;
            let gsi = self.0.gsis().allocate().map_err(io::Error::other)?;
            vectors.vectors.push(Vector {
                gsi,
                irqfd,
                attached: Mutex::new(false),
            });
        }
        Ok(Box::new(vectors))
    }
}

impl Vector {
    fn attach(&self, vm: &Vm, attach: bool) -> hypervisor::Result<()> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if *attached != attach {
            if attach {
                vm.register_irqfd(&self.irqfd, self.gsi)?;
            } else {
                vm.unregister_irqfd(&self.irqfd, self.gsi)?;
            }
            *attached = attach;
        }
        Ok(())
    }
}

impl MsiVectors for Vectors {
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let route = message.map(|MsiMessage { address, data }| MsiRoute { address, data });
        let changed = if route.is_some() {
            let routed = self.vm.gsis().route(vector.gsi, route);
            routed.and_then(|()| vector.attach(&self.vm, true))
        } else {
            let detached = vector.attach(&self.vm, false);
            detached.and_then(|()| self.vm.gsis().route(vector.gsi, None))
        };
        changed.map_err(io::Error::other)
    }

    fn irqfd(&self, vector: u16) -> Option<&EventFd> {
        self.vectors
            .get(usize::from(vector))
            .map(|vector| &vector.irqfd)
    }
}

impl Drop for Vectors {
    fn drop(&mut self) {
        for vector in &self.vectors {
            let released = vector
                .attach(&self.vm, false)
                .and_then(|()| self.vm.gsis().release(vector.gsi));
            if let Err(error) = released {
                log::warn!("interrupt {} stays routed: {error}", vector.gsi);
            }
        }
    }
}

/// Hands out interrupt lines of PCI slots.
pub struct KvmLines(Arc<Vm>);

impl KvmLines {
    /// For devices of `vm`.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self(vm)
    }
}

struct SharedLine {
    vm: Arc<Vm>,
    gsi: u32,
    assert: EventFd,
    served: EventFd,
}

impl Lines for KvmLines {
    fn join(&self, slot: u8) -> io::Result<Box<dyn Line>> {
        let gsi = PCI_INTX_GSI + u32::from(line_of(slot));
        let [assert, served] = [EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?];
        self.0
            .register_level_irqfd(&assert, &served, gsi)
            .map_err(io::Error::other)?;
        Ok(Box::new(SharedLine {
            vm: Arc::clone(&self.0),
            gsi,
            assert,
            served,
        }))
    }
}

impl Line for SharedLine {
    fn assert(&self) -> &EventFd {
        &self.assert
    }

    fn served(&self) -> &EventFd {
        &self.served
    }
}

impl Drop for SharedLine {
    fn drop(&mut self) {
        if let Err(error) = self.vm.unregister_irqfd(&self.assert, self.gsi) {
            log::warn!("interrupt line {} stays connected: {error}", self.gsi);
        }
    }
}

/// Connects guest addresses to eventfds of devices.
pub struct KvmDoorbells(Arc<Vm>);

impl KvmDoorbells {
    /// For devices of `vm`.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self(vm)
    }
}

impl Doorbells for KvmDoorbells {
    fn register(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        self.0
            .register_doorbell(fd, address)
            .map_err(io::Error::other)
    }

    fn unregister(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        self.0
            .unregister_doorbell(fd, address)
            .map_err(io::Error::other)
    }
}

/// An eventfd that raises an edge on the interrupt line `gsi`.
pub fn line(vm: &Vm, gsi: u32) -> io::Result<EventFd> {
    let irqfd = EventFd::new(EFD_NONBLOCK)?;
    vm.register_irqfd(&irqfd, gsi).map_err(io::Error::other)?;
    Ok(irqfd)
}
