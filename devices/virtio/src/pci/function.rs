//! The PCI function around a virtio device.

use std::{io, sync::Arc, time::Duration};

use device_model::{bus::BusDevice, doorbell::Doorbells, memory::GuestMemory, msi::MsiController};
use pci::{
    BarIndex, BarKind, BarRequest, Bdf, ConfigError, ConfigSpace, ConfigSpaceState, Identity,
    LifecycleError, MsixCapability, MsixState, MsixTable, PciFunction,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    layout::{
        BAR, BAR_SIZE, MAX_QUEUES, PENDING_OFFSET, PciAccess, TABLE_OFFSET, add_capabilities,
    },
    transport::{Transport, TransportParts, TransportState},
};
use crate::VirtioDevice;

/// Vendor ID of virtio devices (4.1.2).
const VENDOR: u16 = 0x1af4;
/// Base of the modern PCI device IDs, to which the virtio device ID is added.
const FIRST_DEVICE: u16 = 0x1040;

/// Why a device cannot be wrapped as a PCI function.
#[derive(Debug, thiserror::Error)]
pub enum VirtioPciError {
    /// The device has more queues than notification addresses, or a queue size that is not a power
    /// of two.
    #[error("a virtio device cannot have {0} queues of these sizes")]
    Queues(usize),
    /// The capabilities or the BAR do not fit into configuration space.
    #[error("cannot lay out the configuration space")]
    Config(#[from] ConfigError),
    /// An eventfd could not be created.
    #[error("cannot create an eventfd for a queue")]
    EventFd(#[source] io::Error),
}

/// What a virtio function needs from the VM.
#[derive(Clone)]
pub struct VirtioPciResources {
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Allocates interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Delivers queue notifications without exits to userspace.
    pub doorbells: Arc<dyn Doorbells>,
}

/// The saved state of a function and its device.
#[derive(Debug, Serialize, Deserialize)]
pub struct VirtioPciState {
    config: ConfigSpaceState,
    msix: MsixState,
    transport: TransportState,
    device: Value,
}

/// A virtio device on a PCI bus.
pub struct VirtioPciFunction {
    config: ConfigSpace,
    msix_capability: MsixCapability,
    /// Offset of the capability through which firmware reaches the BAR.
    access_capability: usize,
    msix: Arc<MsixTable>,
    msi: Arc<dyn MsiController>,
    transport: Arc<Transport>,
}

impl VirtioPciFunction {
    /// Wraps an inactive device.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        resources: VirtioPciResources,
    ) -> Result<Self, VirtioPciError> {
        let sizes = device.queue_sizes();
        let count = sizes.len();
        // virtio 1.2, 2.7: at most 32768 entries.
        let possible = |size: &u16| size.is_power_of_two();
        if count > MAX_QUEUES || !sizes.iter().all(possible) {
            return Err(VirtioPciError::Queues(count));
        }
        let kicks: Result<Vec<_>, _> = sizes.iter().map(|_| EventFd::new(EFD_NONBLOCK)).collect();
        let kicks = kicks.map_err(VirtioPciError::EventFd)?;
        let id = FIRST_DEVICE + device.device_type().number;
        let mut config = ConfigSpace::new(Identity {
            vendor: VENDOR,
            device: id,
            subsystem_vendor: VENDOR,
            subsystem: id,
            revision: 1,
            class: device.device_type().class,
        });
        config.add_bar(BarRequest {
            index: BAR,
            kind: BarKind::Memory64 {
                prefetchable: false,
            },
            size: BAR_SIZE,
        })?;
        // One vector per queue and one for configuration changes; at most MAX_QUEUES + 1.
        let vectors = count as u16 + 1;
        let msix = Arc::new(MsixTable::new(vectors));
        let msix_capability = MsixCapability::add(
            &mut config,
            vectors,
            (BAR, TABLE_OFFSET as u32),
            (BAR, PENDING_OFFSET as u32),
        )?;
        let access_capability = add_capabilities(&mut config)?;
        let VirtioPciResources {
            memory,
            msi,
            doorbells,
        } = resources;
        let transport = Transport::new(TransportParts {
            device,
            memory,
            doorbells,
            kicks,
            msix: Arc::clone(&msix),
        });
        Ok(Self {
            config,
            msix_capability,
            access_capability,
            msix,
            msi,
            transport: Arc::new(transport),
        })
    }

    #[cfg(test)]
    pub(super) fn transport(&self) -> Arc<Transport> {
        Arc::clone(&self.transport)
    }

    /// Whether a configuration access touches the data window into the BAR.
    fn touches_window(&self, offset: usize, len: usize) -> bool {
        let window = self.access_capability + PciAccess::DATA;
        offset < window + 4 && window < offset.saturating_add(len)
    }

    /// The BAR offset and length that the window shows, if the guest has set it up as 4.1.4.9.1
    /// requires.
    fn window(&self) -> Option<(u64, usize)> {
        let at = self.access_capability;
        let mut bar = [0];
        self.config.read(at + PciAccess::BAR, &mut bar);
        let offset = u64::from(self.config.read_u32(at + PciAccess::OFFSET));
        let len = self.config.read_u32(at + PciAccess::LEN);
        let aligned = matches!(len, 1 | 2 | 4) && offset % u64::from(len) == 0;
        let inside = bar[0] == BAR.get() && offset + u64::from(len) <= BAR_SIZE;
        (aligned && inside).then_some((offset, len as usize))
    }
}

impl PciFunction for VirtioPciFunction {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        if self.touches_window(offset, data.len())
            && let Some((at, len)) = self.window()
        {
            let mut value = [0; 4];
            self.transport.read(at, &mut value[..len]);
            self.config
                .set(self.access_capability + PciAccess::DATA, &value);
        }
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.msix_capability.update(&self.config, &self.msix);
        if self.touches_window(offset, data.len())
            && let Some((at, len)) = self.window()
        {
            let mut value = [0; 4];
            self.config
                .read(self.access_capability + PciAccess::DATA, &mut value);
            self.transport.write(at, &value[..len]);
        }
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        (index == BAR).then(|| Arc::clone(&self.transport) as Arc<dyn BusDevice>)
    }

    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        if index == BAR {
            self.transport.set_bar(address);
        }
    }

    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        let vectors = self.msi.allocate(self.msix.count(), bdf.requester_id())?;
        self.msix.attach(vectors);
        Ok(())
    }

    fn quiesce(&mut self) -> Result<(), LifecycleError> {
        self.transport.quiesce()
    }

    fn hold(&mut self, waited: Duration) -> Result<(), LifecycleError> {
        self.transport.hold(waited)
    }

    fn carry_on(&mut self) {
        self.transport.carry_on();
    }

    fn unplugged(&mut self) {
        self.transport.shut();
        self.msix.reset();
    }

    fn pause(&mut self) -> Result<(), LifecycleError> {
        self.transport.pause()
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        self.transport.resume()
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        let (transport, device) = self.transport.save()?;
        Ok(serde_json::to_value(VirtioPciState {
            config: self.config.save(),
            msix: self.msix.save(),
            transport,
            device,
        })?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let state: VirtioPciState = serde_json::from_value(state)?;
        self.config.restore(&state.config)?;
        self.transport.restore(&state.transport, state.device)?;
        self.msix.restore(&state.msix)?;
        // The capability is what the guest reads, so it takes precedence.
        self.msix_capability.update(&self.config, &self.msix);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.transport.reset();
        self.msix.reset();
        self.config.reset();
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.transport.counters()
    }
}
