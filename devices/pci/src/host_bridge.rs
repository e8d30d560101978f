//! The host bridge at device 0 of each segment: it indicates that there is a bus, and to firmware
//! which machine this is.

use serde_json::Value;

use super::{
    config::{ConfigSpace, Identity},
    function::{LifecycleError, PciFunction},
};

/// A generic PCI Express host bridge, for which operating systems have no quirks.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    subsystem_vendor: 0,
    subsystem: 0,
    revision: 0,
    class: 0x06_0000,
};

/// The host bridge by which edk2's CloudHv target knows the machines that it supports (CloudHv.h,
/// `CLOUDHV_DEVICE_ID`). It stops at others.
const FOR_FIRMWARE: Identity = Identity {
    vendor: 0x8086,
    device: 0x0d57,
    ..IDENTITY
};

/// Function 00.0 of a segment.
pub struct HostBridge {
    config: ConfigSpace,
}

impl HostBridge {
    /// Creates a host bridge in its power-on state.
    pub fn new() -> Self {
        Self {
            config: ConfigSpace::new(IDENTITY),
        }
    }

    /// Creates the host bridge that firmware expects, in its power-on state.
    pub fn for_firmware() -> Self {
        Self {
            config: ConfigSpace::new(FOR_FIRMWARE),
        }
    }
}

impl Default for HostBridge {
    fn default() -> Self {
        Self::new()
    }
}

impl PciFunction for HostBridge {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn pause(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        Ok(serde_json::to_value(self.config.save())?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        Ok(self.config.restore(&serde_json::from_value(state)?)?)
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.config.reset();
        Ok(())
    }
}
