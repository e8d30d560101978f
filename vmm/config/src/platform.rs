//! The platform: PCI segments, NUMA nodes, and the machine's identification.

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Problem},
    syntax::{Key, Part, SyntaxError, ValueType, parse},
};

/// A segment's share of the windows for BARs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciSegmentConfig {
    /// Number of the segment.
    pub pci_segment: u16,
    /// Weight for its share of the window below 4 GiB: must be 1, because all segments get the same.
    #[serde(default = "one")]
    pub mmio32_aperture_weight: u32,
    /// Weight for its share of the window above 4 GiB: must be 1, because all segments get the same.
    #[serde(default = "one")]
    pub mmio64_aperture_weight: u32,
}

fn one() -> u32 {
    1
}

/// The platform.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PlatformConfig {
    /// Number of PCI segments, 1 to 96.
    #[serde(default = "one_segment")]
    pub num_pci_segments: u16,
    /// Segments behind a virtual IOMMU, which translates the accesses of physical devices in them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_segments: Option<Vec<u16>>,
    /// Width of the addresses that the virtual IOMMU translates, 32 to 64 bits; 48 if absent.
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
    /// Refuses physical devices that cannot use iommufd. If off, iommufd is used where the host supports it.
    #[serde(default)]
    pub iommufd: bool,
    /// Physical devices may access each other's BARs, as far as the host's IOMMU permits. If off, they can access only
    /// RAM.
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
    /// The distance, 10 to 254; 20 is usual.
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
    /// Name of a device that belongs to the node as processors do (a generic initiator). It must be there at boot, and
    /// several nodes may have the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
}

const SEGMENT: &[Key] = &[
    Key::new("pci_segment", ValueType::Number),
    Key::new("mmio32_aperture_weight", ValueType::Number),
    Key::new("mmio64_aperture_weight", ValueType::Number),
];

const PLATFORM: &[Key] = &[
    Key::new("num_pci_segments", ValueType::Number),
    Key::new("iommu_segments", ValueType::Numbers),
    Key::named(
        "iommu_address_width",
        "iommu_address_width_bits",
        ValueType::Number,
    ),
    Key::named("serial_number", "system_serial_number", ValueType::Text),
    Key::named("uuid", "system_uuid", ValueType::Text),
    Key::new("system_serial_number", ValueType::Text),
    Key::new("system_uuid", ValueType::Text),
    Key::new("oem_strings", ValueType::Texts),
    Key::new("system_manufacturer", ValueType::Text),
    Key::new("system_product_name", ValueType::Text),
    Key::new("system_version", ValueType::Text),
    Key::new("system_family", ValueType::Text),
    Key::new("system_sku_number", ValueType::Text),
    Key::new("chassis_asset_tag", ValueType::Text),
    Key::new("tdx", ValueType::Switch),
    Key::new("sev_snp", ValueType::Switch),
    Key::new("iommufd", ValueType::Switch),
    Key::new("vfio_p2p_dma", ValueType::Switch),
];

const NUMA: &[Key] = &[
    Key::new("guest_numa_id", ValueType::Number),
    Key::new("cpus", ValueType::Numbers),
    Key::new(
        "distances",
        ValueType::Pairs(
            Part("destination", &ValueType::Number),
            Part("distance", &ValueType::Number),
        ),
    ),
    Key::new("memory_zones", ValueType::Texts),
    Key::new("pci_segments", ValueType::Numbers),
    Key::new("device_id", ValueType::Text),
];

impl PciSegmentConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[SEGMENT];

    /// Parses the value of `--pci-segment`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--pci-segment", input, Self::SYNTAX)?;
        parsed.require("pci_segment", "pci_segment")?;
        parsed.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self, segments: u16) -> Result<(), Invalid> {
        let last = u64::from(segments.saturating_sub(1));
        check::range("pci_segment", self.pci_segment, 0, last)?;
        for (place, weight) in [
            ("mmio32_aperture_weight", self.mmio32_aperture_weight),
            ("mmio64_aperture_weight", self.mmio64_aperture_weight),
        ] {
            check::unsupported(
                weight != 1,
                place,
                "unequal shares of the windows for BARs",
                "leave it out, and every segment gets the same share",
            )?;
        }
        Ok(())
    }
}

impl PlatformConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[PLATFORM];

    /// Maximum number of PCI segments.
    pub const MAX_SEGMENTS: u16 = arch::layout::MAX_PCI_SEGMENTS;

    /// Parses the value of `--platform`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        parse("--platform", input, Self::SYNTAX)?.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        check::range(
            "num_pci_segments",
            self.num_pci_segments,
            1,
            u64::from(Self::MAX_SEGMENTS),
        )?;
        let last = u64::from(self.num_pci_segments - 1);
        let behind = self.iommu_segments.as_deref().unwrap_or_default();
        for (index, segment) in behind.iter().enumerate() {
            let place = format!("iommu_segments[{index}]");
            check::range(&place, *segment, 0, last)?;
            if let Some(other) = behind[..index].iter().position(|other| other == segment) {
                let what = format!("segment {segment}");
                let other = format!("iommu_segments[{other}]");
                return Err(Problem::Taken { what, other }.at(place));
            }
        }
        if let Some(bits) = self.iommu_address_width_bits {
            check::range("iommu_address_width_bits", bits, 32, 64)?;
        }
        for (place, wanted, what) in [
            ("tdx", self.tdx, "confidential guests (Intel TDX)"),
            ("sev_snp", self.sev_snp, "confidential guests (AMD SEV-SNP)"),
        ] {
            check::unsupported(wanted, place, what, "leave it out")?;
        }
        if let Some(uuid) = &self.system_uuid {
            let valid = is_uuid(uuid);
            let expected = "a UUID such as 123e4567-e89b-12d3-a456-426614174000";
            check::text("system_uuid", uuid, valid, expected)?;
        }
        Ok(())
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

impl NumaConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[NUMA];

    /// Parses the value of `--numa`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--numa", input, Self::SYNTAX)?;
        parsed.require("guest_numa_id", "guest_numa_id")?;
        parsed.build()
    }

    /// Checks whether it is valid in a machine.
    pub fn validate(&self, vm: &VmConfig) -> Result<(), Invalid> {
        let nodes = vm.numa.as_deref().unwrap_or_default();
        let zones = vm.memory.zones.as_deref().unwrap_or_default();
        let vcpus = vm.cpus.max_vcpus;
        // Numbered without gaps, as in the tables of distances.
        let last = nodes.len().saturating_sub(1) as u64;
        let number = u64::from(self.guest_numa_id);
        check::range("guest_numa_id", number, 0, last)?;
        let same = nodes
            .iter()
            .filter(|node| node.guest_numa_id == self.guest_numa_id);
        if same.count() > 1 {
            let (what, other) = (format!("number {number}"), "another node".to_owned());
            return Err(Problem::Taken { what, other }.at("guest_numa_id"));
        }
        for (index, cpu) in self.cpus.iter().flatten().enumerate() {
            let place = format!("cpus[{index}]");
            check::range(&place, *cpu, 0, u64::from(vcpus.saturating_sub(1)))?;
            self.alone(nodes, place, format!("vCPU {cpu}"), |node| {
                node.cpus.iter().flatten().any(|of_node| of_node == cpu)
            })?;
        }
        for (index, distance) in self.distances.iter().flatten().enumerate() {
            let place = format!("distances[{index}].distance");
            check::range(&place, distance.distance, 10, 254)?;
            let known = |node: &Self| node.guest_numa_id == distance.destination;
            if !nodes.iter().any(known) {
                let name = distance.destination.to_string();
                let what = "NUMA node";
                let place = format!("distances[{index}].destination");
                return Err(Problem::Unknown { what, name }.at(place));
            }
        }
        for (index, zone) in self.memory_zones.iter().flatten().enumerate() {
            let place = format!("memory_zones[{index}]");
            if !zones.iter().any(|known| known.id == *zone) {
                let name = zone.clone();
                let what = "memory zone";
                return Err(Problem::Unknown { what, name }.at(place));
            }
            self.alone(nodes, place, format!("memory zone '{zone}'"), |node| {
                node.memory_zones
                    .iter()
                    .flatten()
                    .any(|of_node| of_node == zone)
            })?;
        }
        for (index, segment) in self.pci_segments.iter().flatten().enumerate() {
            let place = format!("pci_segments[{index}]");
            let last = u64::from(vm.segments().saturating_sub(1));
            check::range(&place, *segment, 0, last)?;
            self.alone(nodes, place, format!("PCI segment {segment}"), |node| {
                node.pci_segments
                    .iter()
                    .flatten()
                    .any(|of_node| of_node == segment)
            })?;
        }
        match &self.device_id {
            Some(id) if !vm.has_device(id) => {
                let (what, name) = ("device", id.clone());
                Err(Problem::Unknown { what, name }.at("device_id"))
            }
            _ => Ok(()),
        }
    }

    /// Fails if another node also has `what`.
    fn alone(
        &self,
        nodes: &[Self],
        place: String,
        what: String,
        has: impl Fn(&Self) -> bool,
    ) -> Result<(), Invalid> {
        let other = |node: &&Self| node.guest_numa_id != self.guest_numa_id && has(node);
        nodes.iter().find(other).map_or(Ok(()), |other| {
            let other = format!("NUMA node {}", other.guest_numa_id);
            Err(Problem::Taken { what, other }.at(place))
        })
    }
}
