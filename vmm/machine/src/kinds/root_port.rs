//! PCI Express root ports.

use std::sync::{Arc, Mutex};

use devices::pci::RootPort;
use vmm_config::PciRootPortConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle,
};

impl DeviceKind for PciRootPortConfig {
    const NAME: &'static str = "rootport";
    const CALLED: &'static str = "PCI root port";

    fn make(&self, _id: &str, _surroundings: &Surroundings) -> Result<Made, DeviceError> {
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(RootPort::new()))),
            handle: Handle::None,
        })
    }
}
