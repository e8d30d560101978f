//! Power management (PCI PM 1.2, 3.2): the guest's power state is an emulated register.
//!
//! The device stays in D0: in a lower state vfio-pci disables its memory, and a guest access to a
//! BAR would end the VM. The only effect of D3hot for the guest is that DMA and interrupts stop.

use pci::{ConfigError, ConfigSpace};

const CAPABILITY_ID: u8 = 0x01;
/// Capabilities: the version, and whether the device requires initialization by its driver. No D1,
/// no D2, no wake-up events.
const CAPABILITIES: u16 = 0x27;
/// Control: the power state.
const CONTROL_STATE: u16 = 3;
/// Control: the device keeps its state in D3hot.
const CONTROL_NO_RESET: u16 = 1 << 3;
const D0: u16 = 0;
const D3HOT: u16 = 3;

/// The power management capability in a configuration space.
#[derive(Clone, Copy, Debug)]
pub struct PowerCapability {
    control: usize,
}

impl PowerCapability {
    /// Places the capability at an offset; `capabilities` is the device's register of that name.
    pub fn place(
        config: &mut ConfigSpace,
        at: usize,
        capabilities: u16,
    ) -> Result<Self, ConfigError> {
        let mut body = [0; 6];
        body[..2].copy_from_slice(&(capabilities & CAPABILITIES).to_le_bytes());
        body[2..4].copy_from_slice(&CONTROL_NO_RESET.to_le_bytes());
        let writable = [0, 0, CONTROL_STATE as u8];
        config.place_capability(at, CAPABILITY_ID, &body, &writable)?;
        Ok(Self { control: at + 4 })
    }

    /// Whether the guest has the device in D0.
    pub fn is_awake(&self, config: &ConfigSpace) -> bool {
        config.read_u16(self.control) & CONTROL_STATE == D0
    }

    /// Reverts an unsupported power state: such a write has no effect (3.2.4). Call it after every
    /// write to configuration space, with the value of [`Self::is_awake`] from before.
    pub fn refuse_unsupported(&self, config: &mut ConfigSpace, was_awake: bool) {
        let control = config.read_u16(self.control);
        if !matches!(control & CONTROL_STATE, D0 | D3HOT) {
            let state = if was_awake { D0 } else { D3HOT };
            let control = control & !CONTROL_STATE | state;
            config.set(self.control, &control.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use pci::Identity;

    use super::*;

    #[test]
    fn only_states_that_the_device_has_are_taken() {
        let mut config = ConfigSpace::new(Identity::default());
        let power = PowerCapability::place(&mut config, 0x40, 0xffff).unwrap();
        assert_eq!(config.read_u16(0x42), 0x27, "neither D1, D2 nor wake-up");
        assert!(power.is_awake(&config));
        let mut write = |state: u8| {
            let before = power.is_awake(&config);
            config.write(0x44, &[state]);
            power.refuse_unsupported(&mut config, before);
            (power.is_awake(&config), config.read_u16(0x44))
        };
        assert_eq!(write(1), (true, 8));
        assert_eq!(write(3), (false, 0xb));
        assert_eq!(write(2), (false, 0xb));
        assert_eq!(write(0xfc), (true, 8), "the other bits are not the guest's");
    }
}
