//! Devices that another process serves (vfio-user).

use std::sync::{Arc, Mutex};

use devices::vfio::Function;
use vmm_config::UserDeviceConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Slot, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for UserDeviceConfig {
    const NAME: &'static str = "vfio_user";
    const CALLED: &'static str = "user device";

    fn slot(&self) -> Slot {
        Slot {
            parent: self.parent.clone(),
            function: self.pci_function,
            ..Slot::at(&self.common)
        }
    }

    fn shares_ram(&self) -> bool {
        true
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let physical = &surroundings.physical;
        let thread = thread_name("user", id);
        let device = physical.connect(id, &self.socket, &thread, &*surroundings.spawner)?;
        let handle = Handle::User(Arc::downgrade(&device));
        let function = Function::new(device, physical.resources(), &[])?;
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(function))),
            handle,
        })
    }
}
