//! Physical devices (VFIO).

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use devices::vfio::{self, Function};
use vmm_config::{Descriptor, DeviceConfig};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Slot, Surroundings},
        error::DeviceError,
    },
    Handle,
};

impl DeviceKind for DeviceConfig {
    const NAME: &'static str = "vfio";
    const CALLED: &'static str = "physical device";

    const BEHIND_IOMMU: bool = true;

    fn slot(&self) -> Slot {
        Slot {
            parent: self.parent.clone(),
            function: self.pci_function,
            iommu: self.iommu,
            ..Slot::at(&self.common)
        }
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let path = self.path.as_deref().unwrap_or(Path::new(""));
        let physical = &surroundings.physical;
        let mut host_device = vfio::HostDevice::new(path)?;
        if let Some(files) = &self.files {
            let duplicate = |descriptor: &Descriptor| {
                let duplicate = descriptor.duplicate();
                duplicate.map_err(|source| DeviceError::Host {
                    action: "use the descriptor of a physical device",
                    source,
                })
            };
            host_device.give(vfio::Given {
                device: duplicate(&files.device)?.into(),
                iommufd: duplicate(&files.iommufd)?.into(),
                bound: Arc::clone(&files.bound),
            })?;
        }
        let iommu = physical.iommu(&host_device)?;
        // Behind a root port it would be elsewhere. Segments behind the virtual IOMMU contain no
        // root ports.
        let behind = surroundings.iommu.as_ref().filter(|iommu| {
            self.parent.is_none() && iommu.segments.contains(&self.common.pci_segment)
        });
        let behind = behind.map(|iommu| &iommu.endpoints);
        let device = Arc::new(vfio::Physical::open(host_device, &iommu, behind)?);
        let watch = physical.watch(id, &device)?;
        let mut function = Function::new(device, physical.resources(), &self.x_exclude_mmap_bars)?;
        if let Some(clique) = self.x_nv_gpudirect_clique {
            function.join_clique(clique)?;
        }
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(function))),
            handle: Handle::Physical(watch),
        })
    }
}
