//! Power management (PCI PM 1.2, 3.2): the guest's power state is a register of its own.
//!
//! The device stays in D0: in a lower state vfio-pci takes its memory away, and a guest that looks
//! at a BAR would end its own VM. What the guest sees of D3hot is that DMA and interrupts stop.

use pci::{ConfigError, ConfigSpace};

const CAPABILITY_ID: u8 = 0x01;
/// Capabilities: the version, and whether the device needs its driver to initialize it. No D1, no
/// D2, no wake-up events.
const CAPABILITIES: u16 = 0x27;
/// Control: the power state.
const CONTROL_STATE: u16 = 3;
/// Control: what the device holds survives D3hot.
const CONTROL_NO_RESET: u16 = 1 << 3;
const D0: u16 = 0;
const D3HOT: u16 = 3;

/// The power management capability in a configuration space.
#[derive(Clone, Copy, Debug)]
pub struct PowerCapability {
    control: usize,
}

impl PowerCapability {
    /// Puts the capability at an offset; `capabilities` is the device's register of that name.
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

    /// The guest has not put the device to sleep.
    pub fn is_awake(&self, config: &ConfigSpace) -> bool {
        config.read_u16(self.control) & CONTROL_STATE == D0
    }

    /// Takes a state back that the device does not have: such a write changes nothing (3.2.4). For
    /// use after every write to configuration space, with what [`Self::is_awake`] was before.
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
