//! PCI Express root ports.

use std::sync::{Arc, Mutex};

use devices::pci::RootPort;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle,
};
use crate::config::PciRootPortConfig;

impl DeviceKind for PciRootPortConfig {
    const NAME: &'static str = "rootport";
    const CALLED: &'static str = "PCI root port";

    /// The address windows of the other root ports depend on it.
    const REMOVABLE: bool = false;

    fn make(&self, _id: &str, _surroundings: &Surroundings) -> Result<Made, DeviceError> {
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(RootPort::new()))),
            handle: Handle::None,
        })
    }
}
