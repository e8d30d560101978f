//! The panic device.

use std::sync::{Arc, Mutex};

use devices::pci::PvPanic;
use vmm_config::{CommonConfig, HasCommonConfig, VmConfig};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
        events::MachineEvent,
    },
    Handle,
};

/// The panic device of a machine. It has no configuration besides that there is one.
pub struct Panic {
    common: CommonConfig,
}

impl Panic {
    /// The panic device of a configuration, if there is one.
    pub fn of(config: &VmConfig) -> Option<Self> {
        config.pvpanic.then(|| Self {
            common: CommonConfig::named("_pvpanic"),
        })
    }
}

impl HasCommonConfig for Panic {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn common_mut(&mut self) -> &mut CommonConfig {
        &mut self.common
    }

    /// The configuration says that it is present.
    fn is_removable(&self) -> bool {
        false
    }
}

impl DeviceKind for Panic {
    const NAME: &'static str = "pvpanic";
    const CALLED: &'static str = "panic device";

    fn make(&self, _id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let events = surroundings.events.clone();
        let report = move |event| events.send(MachineEvent::Guest(event));
        let device = PvPanic::new(Box::new(report)).map_err(DeviceError::of)?;
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(device))),
            handle: Handle::None,
        })
    }
}
