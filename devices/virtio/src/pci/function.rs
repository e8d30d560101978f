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

/// Where the BAR of a function may be.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum BarPlace {
    /// Anywhere: the BAR has 64 bits.
    #[default]
    Anywhere,
    /// Below 4 GiB: the BAR has 32 bits.
    Below4G,
}

impl BarPlace {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    fn kind(self) -> BarKind {
        let prefetchable = false;
        match self {
            Self::Anywhere => BarKind::Memory64 { prefetchable },
            Self::Below4G => BarKind::Memory32 { prefetchable },
        }
    }
}

/// The saved state of a function and its device.
#[derive(Debug, Serialize, Deserialize)]
pub struct VirtioPciState {
    #[serde(default, skip_serializing_if = "BarPlace::is_default")]
    bar: BarPlace,
    config: ConfigSpaceState,
    msix: MsixState,
    transport: TransportState,
    device: Value,
}

/// Configuration space and what the function has to find in it.
struct Registers {
    config: ConfigSpace,
    msix: MsixCapability,
    /// Offset of the capability through which firmware reaches the BAR.
    access: usize,
}

impl Registers {
    /// Those of a device with this many interrupt vectors.
    fn new(identity: Identity, vectors: u16, bar: BarPlace) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::new(identity);
        config.add_bar(BarRequest {
            index: BAR,
            kind: bar.kind(),
            size: BAR_SIZE,
        })?;
        let msix = MsixCapability::add(
            &mut config,
            vectors,
            (BAR, TABLE_OFFSET as u32),
            (BAR, PENDING_OFFSET as u32),
        )?;
        let access = add_capabilities(&mut config)?;
        Ok(Self {
            config,
            msix,
            access,
        })
    }
}

/// A virtio device on a PCI bus.
pub struct VirtioPciFunction {
    identity: Identity,
    bar: BarPlace,
    registers: Registers,
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
        let identity = Identity {
            vendor: VENDOR,
            device: id,
            subsystem_vendor: VENDOR,
            subsystem: id,
            revision: 1,
            class: device.device_type().class,
        };
        // One vector per queue and one for configuration changes; at most MAX_QUEUES + 1.
        let vectors = count as u16 + 1;
        let bar = BarPlace::default();
        let registers = Registers::new(identity, vectors, bar)?;
        let msix = Arc::new(MsixTable::new(vectors));
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
            identity,
            bar,
            registers,
            msix,
            msi,
            transport: Arc::new(transport),
        })
    }

    /// Sets where the BAR may be, before the function is plugged in. A restored function has the kind
    /// of BAR with which it was saved.
    ///
    /// # Errors
    ///
    /// As for a new function, whose configuration space this lays out again.
    pub fn place_bar(&mut self, bar: BarPlace) -> Result<(), ConfigError> {
        if bar != self.bar {
            self.registers = Registers::new(self.identity, self.msix.count(), bar)?;
            self.bar = bar;
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn transport(&self) -> Arc<Transport> {
        Arc::clone(&self.transport)
    }

    /// Offset of the data window into the BAR.
    fn window_data(&self) -> usize {
        self.registers.access + PciAccess::DATA
    }

    /// Whether a configuration access touches the data window into the BAR.
    fn touches_window(&self, offset: usize, len: usize) -> bool {
        let window = self.window_data();
        offset < window + 4 && window < offset.saturating_add(len)
    }

    /// The BAR offset and length that the window shows, if the guest has set it up as 4.1.4.9.1
    /// requires.
    fn window(&self) -> Option<(u64, usize)> {
        let Registers {
            config, access: at, ..
        } = &self.registers;
        let mut bar = [0];
        config.read(at + PciAccess::BAR, &mut bar);
        let offset = u64::from(config.read_u32(at + PciAccess::OFFSET));
        let len = config.read_u32(at + PciAccess::LEN);
        let aligned = matches!(len, 1 | 2 | 4) && offset % u64::from(len) == 0;
        let inside = bar[0] == BAR.get() && offset + u64::from(len) <= BAR_SIZE;
        (aligned && inside).then_some((offset, len as usize))
    }
}

impl PciFunction for VirtioPciFunction {
    fn config(&self) -> &ConfigSpace {
        &self.registers.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.registers.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        if self.touches_window(offset, data.len())
            && let Some((at, len)) = self.window()
        {
            let mut value = [0; 4];
            self.transport.read(at, &mut value[..len]);
            self.registers.config.set(self.window_data(), &value);
        }
        self.registers.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let Registers { config, msix, .. } = &mut self.registers;
        config.write(offset, data);
        msix.update(config, &self.msix);
        if self.touches_window(offset, data.len())
            && let Some((at, len)) = self.window()
        {
            let mut value = [0; 4];
            self.registers.config.read(self.window_data(), &mut value);
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
            bar: self.bar,
            config: self.registers.config.save(),
            msix: self.msix.save(),
            transport,
            device,
        })?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let state: VirtioPciState = serde_json::from_value(state)?;
        self.place_bar(state.bar)?;
        self.registers.config.restore(&state.config)?;
        self.transport.restore(&state.transport, state.device)?;
        self.msix.restore(&state.msix)?;
        // The capability is what the guest reads, so it takes precedence.
        let Registers { config, msix, .. } = &self.registers;
        msix.update(config, &self.msix);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.transport.reset();
        self.msix.reset();
        self.registers.config.reset();
        Ok(())
    }

    fn had_driver(&self) -> bool {
        self.transport.had_driver()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.transport.counters()
    }
}
