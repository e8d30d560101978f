//! How a guest reaches configuration space: the ECAM window and, for segment 0, ports 0xcf8 to
//! 0xcff.
//!
//! Both sit on the buses that the segment uses, so they do not keep the segment alive: once it is
//! gone, reads return ones.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU32, Ordering},
};

use super::segment::PciSegment;
use crate::bus::BusDevice;

/// Bytes of the ECAM window of a segment: one bus.
pub const ECAM_SIZE: u64 = 1 << 20;
/// First of the configuration ports.
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
    /// The window of `segment`.
    pub fn new(segment: &Arc<PciSegment>) -> Arc<Self> {
        Arc::new(Self {
            segment: Arc::downgrade(segment),
        })
    }

    /// The segment, the device and the register; `None` for other buses and functions.
    fn decode(&self, offset: u64) -> Option<(Arc<PciSegment>, u8, usize)> {
        let (bus, device, function) = (offset >> 20, offset >> 15 & 0x1f, offset >> 12 & 7);
        if bus != 0 || function != 0 {
            return None;
        }
        // Five and twelve bits.
        Some((
            self.segment.upgrade()?,
            device as u8,
            (offset & 0xfff) as usize,
        ))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.decode(offset) {
            Some((segment, device, register)) => segment.read_config(device, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((segment, device, register)) = self.decode(offset) {
            segment.write_config(device, register, data);
        }
    }
}

/// Address port 0xcf8 and data ports 0xcfc to 0xcff (PCI 3.0, 3.2.2.3.2).
pub struct ConfigPorts {
    segment: Weak<PciSegment>,
    address: AtomicU32,
}

impl ConfigPorts {
    /// The ports, for the segment 0.
    pub fn new(segment: &Arc<PciSegment>) -> Arc<Self> {
        Arc::new(Self {
            segment: Arc::downgrade(segment),
            address: AtomicU32::new(0),
        })
    }

    /// What the guest last wrote to the address port, for a snapshot.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Restores the address port; any value is harmless.
    pub fn set_address(&self, address: u32) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// The device and register behind a data port.
    fn decode(&self, port: u64) -> Option<(Arc<PciSegment>, u8, usize)> {
        let address = self.address();
        let (bus, device, function) =
            (address >> 16 & 0xff, address >> 11 & 0x1f, address >> 8 & 7);
        if address & ADDRESS_ENABLE == 0 || bus != 0 || function != 0 {
            return None;
        }
        let register = (address & 0xfc) as usize + (port & 3) as usize;
        Some((self.segment.upgrade()?, device as u8, register))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address().to_le_bytes());
        } else if (4..8).contains(&offset)
            && let Some((segment, device, register)) = self.decode(offset)
        {
            segment.read_config(device, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            // Narrower writes belong to other ports (0xcf9 resets some chipsets).
            if let Ok(bytes) = data.try_into() {
                self.set_address(u32::from_le_bytes(bytes));
            }
        } else if (4..8).contains(&offset)
            && let Some((segment, device, register)) = self.decode(offset)
        {
            segment.write_config(device, register, data);
        }
    }
}
