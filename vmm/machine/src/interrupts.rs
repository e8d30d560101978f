//! Interrupts and doorbells of devices, implemented with KVM's irqfds and ioeventfds.

use std::{
    io,
    sync::{Arc, Mutex, OnceLock},
};

use arch::layout::PCI_INTX_GSI;
use base::Unpoisoned;
use devices::{
    doorbell::Doorbells,
    msi::{MsiController, MsiMessage, MsiVectors},
    pci::{LINES, Line, Lines},
};
use hypervisor::{MsiRoute, Vm};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Allocates interrupt vectors of a VM.
pub struct KvmMsis(Arc<Vm>);

/// A vector that the guest has used. It occupies a descriptor and one of KVM's 4,096 GSIs.
struct Vector {
    gsi: u32,
    irqfd: EventFd,
    /// While attached, writes to `irqfd` reach the guest. While the vector is masked they stay in
    /// the eventfd, and KVM delivers them when it is attached again.
    attached: Mutex<bool>,
}

struct Vectors {
    vm: Arc<Vm>,
    /// Created when first routed: a device may have 2,048 vectors, but guests use only a few.
    vectors: Vec<OnceLock<Vector>>,
}

impl KvmMsis {
    /// For the devices of `vm`.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self(vm)
    }
}

impl MsiController for KvmMsis {
    fn allocate(&self, count: u16, _source: u16) -> io::Result<Box<dyn MsiVectors>> {
        Ok(Box::new(Vectors {
            vm: Arc::clone(&self.0),
            vectors: (0..count).map(|_| OnceLock::new()).collect(),
        }))
    }
}

impl Vector {
    fn new(vm: &Vm) -> io::Result<Self> {
        Ok(Self {
            irqfd: EventFd::new(EFD_NONBLOCK)?,
            gsi: vm.gsis().allocate().map_err(io::Error::other)?,
            attached: Mutex::new(false),
        })
    }

    fn attach(&self, vm: &Vm, attach: bool) -> hypervisor::Result<()> {
        let mut attached = self.attached.lock_unpoisoned();
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

    /// Releases its GSI.
    fn release(&self, vm: &Vm) {
        let released = self
            .attach(vm, false)
            .and_then(|()| vm.gsis().release(self.gsi));
        if let Err(error) = released {
            log::warn!("interrupt {} stays routed: {error}", self.gsi);
        }
    }
}

impl Vectors {
    fn place(&self, vector: u16) -> io::Result<&OnceLock<Vector>> {
        let place = self.vectors.get(usize::from(vector));
        place.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Returns the vector, creating it on first use.
    fn vector(&self, vector: u16) -> io::Result<&Vector> {
        let place = self.place(vector)?;
        if let Some(vector) = place.get() {
            return Ok(vector);
        }
        if let Err(second) = place.set(Vector::new(&self.vm)?) {
            // Another thread created it first.
            second.release(&self.vm);
        }
        place.get().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl MsiVectors for Vectors {
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        let changed = if let Some(MsiMessage { address, data }) = message {
            let vector = self.vector(vector)?;
            let route = Some(MsiRoute { address, data });
            let routed = self.vm.gsis().route(vector.gsi, route);
            routed.and_then(|()| vector.attach(&self.vm, true))
        } else if let Some(vector) = self.place(vector)?.get() {
            let detached = vector.attach(&self.vm, false);
            detached.and_then(|()| self.vm.gsis().route(vector.gsi, None))
        } else {
            Ok(())
        };
        changed.map_err(io::Error::other)
    }

    fn raise(&self, _vector: u16, message: MsiMessage) -> io::Result<()> {
        let MsiMessage { address, data } = message;
        let route = MsiRoute { address, data };
        self.vm.signal_msi(route).map_err(io::Error::other)
    }

    fn irqfd(&self, vector: u16) -> io::Result<&EventFd> {
        Ok(&self.vector(vector)?.irqfd)
    }

    fn made_irqfd(&self, vector: u16) -> Option<&EventFd> {
        let vector = self.place(vector).ok()?.get()?;
        Some(&vector.irqfd)
    }
}

impl Drop for Vectors {
    fn drop(&mut self) {
        for vector in self.vectors.iter().filter_map(OnceLock::get) {
            vector.release(&self.vm);
        }
    }
}

/// Allocates interrupt lines of PCI slots.
pub struct KvmLines(Arc<Vm>);

impl KvmLines {
    /// For the devices of `vm`.
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
    fn join(&self, line: u8) -> io::Result<Box<dyn Line>> {
        let gsi = PCI_INTX_GSI + u32::from(line % LINES);
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
    /// For the devices of `vm`.
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

/// Creates an eventfd that raises an edge on the interrupt line `gsi`.
pub fn line(vm: &Vm, gsi: u32) -> io::Result<EventFd> {
    let irqfd = EventFd::new(EFD_NONBLOCK)?;
    vm.register_irqfd(&irqfd, gsi).map_err(io::Error::other)?;
    Ok(irqfd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_that_no_guest_uses_cost_nothing() {
        let kvm = match hypervisor::Kvm::open() {
            Ok(kvm) => kvm,
            Err(error) => return eprintln!("not tested: {error}"),
        };
        let vm = kvm
            .create_vm(
                arch::layout::KVM_TSS_START,
                arch::layout::KVM_IDENTITY_MAP_START,
            )
            .unwrap();
        let controller = KvmMsis::new(Arc::new(vm));
        // Twice as many vectors as KVM has GSIs and as a process may have open files.
        let devices: Vec<_> = (0..4)
            .map(|_| controller.allocate(2048, 0).unwrap())
            .collect();
        let message = MsiMessage {
            address: 0xfee0_0000,
            data: 0x40,
        };
        for device in &devices {
            device.route(9, None).unwrap();
            assert!(device.made_irqfd(9).is_none());
            device.route(2047, Some(message)).unwrap();
            assert!(device.made_irqfd(2047).is_some());
            device.route(2047, None).unwrap();
            let made: Vec<_> = (0..2048).filter_map(|at| device.made_irqfd(at)).collect();
            assert_eq!(made.len(), 1);
            assert!(device.irqfd(2048).is_err());
        }
    }
}
