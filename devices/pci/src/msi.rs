//! The MSI capability (PCI 3.0, 6.8.1), without per-vector masking.

use device_model::msi::MsiMessage;

use super::config::{ConfigError, ConfigSpace};

const CAPABILITY_ID: u8 = 0x05;
/// Message control: MSI is enabled.
const CONTROL_ENABLE: u16 = 1 << 0;
/// Message control: number of vectors that the device supports, as a power of two.
const CONTROL_CAPABLE: u16 = 7 << 1;
/// Message control: number of vectors that the guest enabled, as a power of two.
const CONTROL_GIVEN: u16 = 7 << 4;
/// Message control: the device supports 64-bit addresses.
const CONTROL_WIDE: u16 = 1 << 7;

/// The MSI capability in a configuration space.
#[derive(Clone, Copy, Debug)]
pub struct MsiCapability {
    at: usize,
    wide: bool,
    count: u16,
}

impl MsiCapability {
    /// Places the capability at an offset, for the number of vectors in a device's message control
    /// register.
    pub fn place(config: &mut ConfigSpace, at: usize, control: u16) -> Result<Self, ConfigError> {
        let wide = control & CONTROL_WIDE != 0;
        // At most 32 vectors; the two largest values are reserved.
        let power = (control & CONTROL_CAPABLE).min(5 << 1);
        let mut body = vec![0; if wide { 12 } else { 8 }];
        body[..2].copy_from_slice(&(power | control & CONTROL_WIDE).to_le_bytes());
        let mut writable = vec![0; body.len()];
        writable[..2].copy_from_slice(&(CONTROL_ENABLE | CONTROL_GIVEN).to_le_bytes());
        // The address is a multiple of 4.
        writable[2] = 0xfc;
        writable[3..6].fill(0xff);
        let data = if wide { 10 } else { 6 };
        writable[6..data].fill(0xff);
        writable[data..data + 2].fill(0xff);
        config.place_capability(at, CAPABILITY_ID, &body, &writable)?;
        Ok(Self {
            at,
            wide,
            count: 1 << (power >> 1),
        })
    }

    /// Number of vectors that the device supports, 1 to 32.
    pub fn count(&self) -> u16 {
        self.count
    }

    /// The messages of the vectors that the guest enabled; empty while MSI is disabled.
    pub fn messages(&self, config: &ConfigSpace) -> Vec<MsiMessage> {
        let control = config.read_u16(self.at + 2);
        if control & CONTROL_ENABLE == 0 {
            return Vec::new();
        }
        let given = (1 << ((control & CONTROL_GIVEN) >> 4)).min(self.count);
        let low = u64::from(config.read_u32(self.at + 4));
        let (high, data) = if self.wide {
            (u64::from(config.read_u32(self.at + 8)) << 32, self.at + 12)
        } else {
            (0, self.at + 8)
        };
        let data = config.read_u16(data);
        // The device replaces the low bits by the vector's number.
        (0..given)
            .map(|vector| MsiMessage {
                address: high | low,
                data: u32::from(data & !(given - 1) | vector),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Identity;

    #[test]
    fn vectors_differ_in_the_low_bits_of_the_data() {
        let mut config = ConfigSpace::new(Identity::default());
        let msi = MsiCapability::place(&mut config, 0x50, CONTROL_WIDE | 2 << 1).unwrap();
        assert_eq!(msi.count(), 4);
        config.write(0x54, &0xfee0_1000_u32.to_le_bytes());
        config.write(0x58, &1_u32.to_le_bytes());
        config.write(0x5c, &0x4042_u16.to_le_bytes());
        assert_eq!(msi.messages(&config), []);
        // Two vectors, enabled.
        config.write(0x52, &0x11_u16.to_le_bytes());
        let address = 0x1_fee0_1000;
        assert_eq!(
            msi.messages(&config),
            [0x4042, 0x4043].map(|data| MsiMessage { address, data })
        );
        // More than the device supports.
        config.write(0x52, &0x71_u16.to_le_bytes());
        assert_eq!(msi.messages(&config).len(), 4);
    }

    #[test]
    fn narrow_addresses_have_their_data_earlier() {
        let mut config = ConfigSpace::new(Identity::default());
        let msi = MsiCapability::place(&mut config, 0x40, 0).unwrap();
        config.write(0x44, &0xfee0_0003_u32.to_le_bytes());
        config.write(0x48, &0x31_u16.to_le_bytes());
        config.write(0x42, &1_u16.to_le_bytes());
        let message = MsiMessage {
            address: 0xfee0_0000,
            data: 0x31,
        };
        assert_eq!(msi.messages(&config), [message]);
    }
}
