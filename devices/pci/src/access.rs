//! A guest's access to configuration space: the ECAM window and, for segment 0, ports 0xcf8 to
//! 0xcff.
//!
//! Both are registered on the buses that the segment uses, so they hold only weak references to the
//! segment. Once it is gone, reads return all ones.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU32, Ordering},
};

use device_model::bus::BusDevice;

use super::{bdf::Bdf, segment::PciSegment};

/// Size in bytes of the ECAM window of one bus.
pub const ECAM_SIZE: u64 = 1 << 20;
/// The first configuration port.
pub const CONFIG_PORTS_BASE: u64 = 0xcf8;
/// Number of configuration ports.
pub const CONFIG_PORTS_LEN: u64 = 8;

/// Enable bit of the address port.
const ADDRESS_ENABLE: u32 = 1 << 31;

/// The memory-mapped configuration window of a segment (PCI Express 7.2.2).
pub struct Ecam {
    segment: Weak<PciSegment>,
}

impl Ecam {
    /// Creates the window of `segment`.
    pub fn new(segment: &Arc<PciSegment>) -> Arc<Self> {
        Arc::new(Self {
            segment: Arc::downgrade(segment),
        })
    }

    /// Decodes an offset to the segment, the function and the register.
    fn decode(&self, offset: u64) -> Option<(Arc<PciSegment>, Bdf, usize)> {
        let at = Bdf {
            segment: 0,
            // Eight, five and three bits: the window is not larger than 256 buses.
            bus: (offset >> 20) as u8,
            device: (offset >> 15 & 0x1f) as u8,
            function: (offset >> 12 & 7) as u8,
        };
        Some((self.segment.upgrade()?, at, (offset & 0xfff) as usize))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.decode(offset) {
            Some((segment, at, register)) => segment.read_config(at, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((segment, at, register)) = self.decode(offset) {
            segment.write_config(at, register, data);
        }
    }
}

/// Address port 0xcf8 and data ports 0xcfc to 0xcff (PCI 3.0, 3.2.2.3.2).
pub struct ConfigPorts {
    segment: Weak<PciSegment>,
    address: AtomicU32,
}

impl ConfigPorts {
    /// Creates the ports, for segment 0.
    pub fn new(segment: &Arc<PciSegment>) -> Arc<Self> {
        Arc::new(Self {
            segment: Arc::downgrade(segment),
            address: AtomicU32::new(0),
        })
    }

    /// The last value that the guest wrote to the address port, for a snapshot.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Restores the address port; any value is harmless.
    pub fn set_address(&self, address: u32) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// Decodes a data port to the segment, the function and the register.
    fn decode(&self, port: u64) -> Option<(Arc<PciSegment>, Bdf, usize)> {
        let address = self.address();
        if address & ADDRESS_ENABLE == 0 {
            return None;
        }
        let at = Bdf {
            segment: 0,
            // Eight, five and three bits.
            bus: (address >> 16) as u8,
            device: (address >> 11 & 0x1f) as u8,
            function: (address >> 8 & 7) as u8,
        };
        let register = (address & 0xfc) as usize + (port & 3) as usize;
        Some((self.segment.upgrade()?, at, register))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address().to_le_bytes());
        } else if (4..8).contains(&offset)
            && let Some((segment, at, register)) = self.decode(offset)
        {
            segment.read_config(at, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            // Narrower writes belong to other ports (0xcf9 resets some chipsets).
            if let Ok(bytes) = data.try_into() {
                self.set_address(u32::from_le_bytes(bytes));
            }
        } else if (4..8).contains(&offset)
            && let Some((segment, at, register)) = self.decode(offset)
        {
            segment.write_config(at, register, data);
        }
    }
}
