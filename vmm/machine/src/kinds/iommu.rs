//! The virtual IOMMU.

use std::sync::Arc;

use arch::acpi;
use devices::{vfio, virtio::iommu};
use vmm_config::{CommonConfig, HasCommonConfig, VmConfig};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

/// Its slot on segment 0, where the guest's ACPI tables say it is.
const SLOT: u8 = 1;

/// Width of I/O addresses in bits: that of Intel's and AMD's IOMMUs with four levels of page
/// tables.
const ADDRESS_WIDTH: u8 = 48;

/// The virtual IOMMU of a machine. It has no configuration of its own: a platform with
/// `iommu_segments` has one.
pub struct Iommu {
    common: CommonConfig,
    address_width: u8,
    segments: Vec<u16>,
}

impl Iommu {
    /// The virtual IOMMU of a configuration, if there is one.
    pub fn of(config: &VmConfig) -> Option<Self> {
        let platform = config.platform.as_ref()?;
        let segments = config.iommu_segments().to_vec();
        (!segments.is_empty()).then(|| Self {
            common: CommonConfig {
                pci_device_id: Some(SLOT),
                ..CommonConfig::named("_iommu")
            },
            address_width: platform.iommu_address_width_bits.unwrap_or(ADDRESS_WIDTH),
            segments,
        })
    }

    /// Its description in the guest's ACPI tables.
    pub fn described(&self) -> acpi::VirtualIommu {
        acpi::VirtualIommu {
            device: SLOT,
            segments: self.segments.clone(),
        }
    }
}

impl HasCommonConfig for Iommu {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn common_mut(&mut self) -> &mut CommonConfig {
        &mut self.common
    }

    /// The guest's ACPI tables say that it is present.
    fn is_removable(&self) -> bool {
        false
    }
}

impl DeviceKind for Iommu {
    const NAME: &'static str = "iommu";
    const CALLED: &'static str = "IOMMU";

    /// The ACPI tables exclude it from its own segment.
    const BEHIND_IOMMU: bool = true;

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = iommu::Options {
            thread_name: thread_name(Self::NAME, id),
            address_width: self.address_width,
            reserved: vfio::reserved_by_all(),
        };
        let iommu = surroundings.iommu.as_ref();
        let endpoints = iommu
            .map(|iommu| iommu.endpoints.clone())
            .unwrap_or_default();
        let spawner = Arc::clone(&surroundings.spawner);
        let iommu = iommu::VirtioIommu::new(endpoints, options, spawner);
        let iommu = iommu.map_err(DeviceError::of)?;
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(iommu)),
            handle: Handle::None,
        })
    }
}
