//! PCI configuration space: its contents, and which parts are writable.

use super::bars::{BAR1_BYTES, BAR3_BYTES};

/// Size of the configuration space in bytes.
pub const BYTES: usize = 256;

const COMMAND: usize = 0x04;
const MSI: usize = 0x68;
const MSI_CONTROL: usize = MSI + 2;

/// The BAR sizes of the model must be valid.
const _: () = assert!(BAR1_BYTES.is_power_of_two() && BAR3_BYTES.is_power_of_two());

/// The configuration space of the function: 10de:06d8, a 3D controller; memory BARs 0 (32 bits), 1
/// and 3 (64 bits, prefetchable); INTx, and one MSI without a mask.
pub struct Config {
    bytes: [u8; BYTES],
}

impl Default for Config {
    fn default() -> Self {
        let mut bytes = [0; BYTES];
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(0x00, &[0xde, 0x10, 0xd8, 0x06]);
        // The function has capabilities.
        set(0x06, &[0x10, 0]);
        set(0x08, &[0xa3, 0x00, 0x02, 0x03]);
        set(0x14, &[0xc]);
        set(0x1c, &[0xc]);
        set(0x2c, &[0xde, 0x10, 0xd8, 0x06]);
        set(0x34, &[MSI as u8]);
        set(0x3d, &[1]);
        // MSI, the only capability: 64-bit addresses, one message.
        set(MSI, &[0x05, 0, 0x80, 0]);
        Self { bytes }
    }
}

impl Config {
    /// Reads; bytes beyond the end are zero.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        data.fill(0);
        let from = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..));
        for (to, from) in data.iter_mut().zip(from.unwrap_or_default()) {
            *to = *from;
        }
    }

    /// Writes the writable bits. The client itself keeps BARs and MSI addresses.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        for (step, value) in data.iter().enumerate() {
            let Some(at) = usize::try_from(at).ok().and_then(|at| at.checked_add(step)) else {
                return;
            };
            let mask = match at {
                // Memory space and bus master; in the next byte, INTx disable.
                COMMAND => 0x06,
                0x05 => 0x04,
                0x3c => 0xff,
                MSI_CONTROL => 0x01,
                _ => continue,
            };
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
        }
    }

    /// Whether the function may access memory (bus mastering).
    pub fn is_master(&self) -> bool {
        self.bytes[COMMAND] & 4 != 0
    }

    /// Whether interrupts are delivered as MSI.
    pub fn has_msi(&self) -> bool {
        self.bytes[MSI_CONTROL] & 1 != 0
    }

    /// Whether interrupts may use the line (INTx).
    pub fn has_line(&self) -> bool {
        !self.has_msi() && self.bytes[COMMAND + 1] & 4 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_controls_can_be_written() {
        let mut config = Config::default();
        config.write(0, &[0xff; BYTES]);
        config.write(u64::MAX, &[1; 8]);
        let mut head = [0; 4];
        config.read(0, &mut head);
        assert_eq!(head, [0xde, 0x10, 0xd8, 0x06]);
        assert!(config.is_master() && config.has_msi() && !config.has_line());
        config.write(MSI_CONTROL as u64, &[0]);
        config.write(COMMAND as u64, &[6, 0]);
        assert!(config.has_line() && !config.has_msi());
        config.read(u64::MAX, &mut head);
        assert_eq!(head, [0; 4]);
    }
}
