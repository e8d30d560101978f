//! The platform: PCI segments, NUMA nodes, and how the machine names itself.

use serde::{Deserialize, Serialize};

/// How a segment shares the windows for BARs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciSegmentConfig {
    /// Which segment.
    pub pci_segment: u16,
    /// Its share of memory below 4 GiB, relative to the others'.
    #[serde(default = "one")]
    pub mmio32_aperture_weight: u32,
    /// Its share of memory above 4 GiB, relative to the others'.
    #[serde(default = "one")]
    pub mmio64_aperture_weight: u32,
}

fn one() -> u32 {
    1
}

/// The platform.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PlatformConfig {
    /// PCI segments, 1 to 96.
    #[serde(default = "one_segment")]
    pub num_pci_segments: u16,
    /// Segments behind a virtual IOMMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_segments: Option<Vec<u16>>,
    /// Address width of the virtual IOMMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_address_width_bits: Option<u8>,
    /// Serial number (SMBIOS).
    #[serde(
        default,
        alias = "serial_number",
        skip_serializing_if = "Option::is_none"
    )]
    pub system_serial_number: Option<String>,
    /// UUID (SMBIOS).
    #[serde(default, alias = "uuid", skip_serializing_if = "Option::is_none")]
    pub system_uuid: Option<String>,
    /// OEM strings (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oem_strings: Option<Vec<String>>,
    /// Manufacturer (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_manufacturer: Option<String>,
    /// Product (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_product_name: Option<String>,
    /// Version (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_version: Option<String>,
    /// Family (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_family: Option<String>,
    /// SKU number (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_sku_number: Option<String>,
    /// Asset tag of the chassis (SMBIOS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chassis_asset_tag: Option<String>,
    /// Intel TDX.
    #[serde(default)]
    pub tdx: bool,
    /// AMD SEV-SNP.
    #[serde(default)]
    pub sev_snp: bool,
    /// Use iommufd for physical devices.
    #[serde(default)]
    pub iommufd: bool,
    /// Let physical devices reach each other's BARs.
    #[serde(default = "yes")]
    pub vfio_p2p_dma: bool,
}

fn one_segment() -> u16 {
    1
}

fn yes() -> bool {
    true
}

impl Default for PlatformConfig {
    fn default() -> Self {
        Self {
            num_pci_segments: 1,
            iommu_segments: None,
            iommu_address_width_bits: None,
            system_serial_number: None,
            system_uuid: None,
            oem_strings: None,
            system_manufacturer: None,
            system_product_name: None,
            system_version: None,
            system_family: None,
            system_sku_number: None,
            chassis_asset_tag: None,
            tdx: false,
            sev_snp: false,
            iommufd: false,
            vfio_p2p_dma: true,
        }
    }
}

/// Distance between two nodes.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct NumaDistance {
    /// The other node.
    pub destination: u32,
    /// 10 to 254; 20 is the usual distance.
    pub distance: u8,
}

/// A NUMA node of the guest.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct NumaConfig {
    /// Its number.
    pub guest_numa_id: u32,
    /// Its vCPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u32>>,
    /// Distances to other nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distances: Option<Vec<NumaDistance>>,
    /// Its memory zones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_zones: Option<Vec<String>>,
    /// Its PCI segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_segments: Option<Vec<u16>>,
    /// A device that is the node's initiator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
}
