//! Message-signalled interrupts and doorbells of devices, over KVM's irqfds and ioeventfds.

use std::{io, sync::Arc};

use devices::msi::{MsiController, MsiMessage, MsiVectors};
use hypervisor::{MsiRoute, Vm};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Hands out interrupt vectors of a VM.
pub struct KvmMsis(Arc<Vm>);

struct Vector {
    gsi: u32,
    irqfd: EventFd,
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
            // An unrouted GSI swallows what is signalled, so the irqfd can be there from the
            // start; masking a vector then only changes the route.
            if let Err(error) = self.0.register_irqfd(&irqfd, gsi) {
                release(&self.0, gsi);
                return Err(io::Error::other(error));
            }
            vectors.vectors.push(Vector { gsi, irqfd });
        }
        Ok(Box::new(vectors))
    }
}

impl MsiVectors for Vectors {
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let route = message.map(|MsiMessage { address, data }| MsiRoute { address, data });
        self.vm
            .gsis()
            .route(vector.gsi, route)
            .map_err(io::Error::other)
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
            if let Err(error) = self.vm.unregister_irqfd(&vector.irqfd, vector.gsi) {
                log::warn!("interrupt {} stays attached: {error}", vector.gsi);
            }
            release(&self.vm, vector.gsi);
        }
    }
}

fn release(vm: &Vm, gsi: u32) {
    if let Err(error) = vm.gsis().release(gsi) {
        log::warn!("interrupt {gsi} stays routed: {error}");
    }
}
