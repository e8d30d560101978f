//! The machine's I/O address spaces as its vCPUs see them.

use std::sync::Arc;

use devices::bus::Bus;
use hypervisor::Exits;

/// The buses for I/O ports and memory-mapped devices.
#[derive(Default)]
pub struct Buses {
    /// I/O ports.
    pub pio: Arc<Bus>,
    /// Physical addresses outside RAM.
    pub mmio: Arc<Bus>,
}

impl Exits for Buses {
    fn pio_read(&self, port: u16, data: &mut [u8]) {
        if !self.pio.read(port.into(), data) {
            log::trace!(
                "read of {} bytes from port {port:#x}: nothing is there",
                data.len()
            );
        }
    }

    fn pio_write(&self, port: u16, data: &[u8]) {
        if !self.pio.write(port.into(), data) {
            log::trace!("write of {data:x?} to port {port:#x}: nothing is there");
        }
    }

    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        if !self.mmio.read(address, data) {
            log::trace!(
                "read of {} bytes from {address:#x}: nothing is there",
                data.len()
            );
        }
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        if !self.mmio.write(address, data) {
            log::trace!("write of {data:x?} to {address:#x}: nothing is there");
        }
    }
}
