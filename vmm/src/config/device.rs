//! Physical devices.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem, is_zero},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, HotPlug},
    syntax::{FUNCTION, IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// A physical device (VFIO).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Its folder in sysfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Behind the virtual IOMMU, as all in segments that are; without a segment, in the first of
    /// those.
    #[serde(default)]
    pub iommu: bool,
    /// The segment behind the virtual IOMMU that it goes into: short for `pci_segment` with `iommu`,
    /// and for naming it in the platform before the VM starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_segment: Option<u16>,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Function of the slot, 0 to 7.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pci_function: u8,
    /// The root port behind which it sits, in the only slot there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// GPUDirect clique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_nv_gpudirect_clique: Option<u8>,
    /// BARs that are not mapped into the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub x_exclude_mmap_bars: Vec<u64>,
}

const KEYS: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("iommu_segment", ValueType::Number),
    Key::new("x_nv_gpudirect_clique", ValueType::Number),
    Key::new("x_exclude_mmap_bars", ValueType::Numbers),
];

has_common_config!(DeviceConfig);

impl Configured for DeviceConfig {
    const HELP: &'static str = "Physical devices: path=/sys/bus/pci/devices/ADDRESS,id=NAME,pci_device_id=N, \
        pci_function=N,parent=ROOTPORT,iommu=on|off,iommu_segment=N,x_exclude_mmap_bars=[N,N]";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Give the VM a physical device",
        help: "As for --device: path=/sys/bus/pci/devices/ADDRESS,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE, FUNCTION];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--device", input, Self::SYNTAX)?;
        parsed.require("path", "path")?;
        parsed.build()
    }
}

impl Device for DeviceConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.path.is_none() {
            return Err(Problem::Missing("name its folder in sysfs").at("path"));
        }
        let advice = "leave it out";
        let clique = self.x_nv_gpudirect_clique.is_some();
        check::unsupported(clique, "x_nv_gpudirect_clique", "GPUDirect cliques", advice)?;
        for &bar in &self.x_exclude_mmap_bars {
            check::range("x_exclude_mmap_bars", bar, 0, 5)?;
        }
        if let Some(segment) = self.iommu_segment
            && ![0, segment].contains(&self.common.pci_segment)
        {
            let with = "another pci_segment";
            let advice = "leave pci_segment out";
            return Err(Problem::Conflict { with, advice }.at("iommu_segment"));
        }
        if self.parent.is_some() && (self.iommu || self.iommu_segment.is_some()) {
            let with = "the virtual IOMMU";
            let advice = "leave it out: behind the virtual IOMMU there are no root ports";
            return Err(Problem::Conflict { with, advice }.at("parent"));
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            function: self.pci_function,
            parent: self.parent.as_deref(),
            ..self.common.placement()
        }
    }

    fn normalize_segment(&mut self, behind: &[u16]) {
        if let Some(segment) = self.iommu_segment.take() {
            self.common.pci_segment = segment;
            self.iommu = true;
            return;
        }
        // Clients that always name a segment name this one if they mean none.
        let is_named = self.common.pci_segment != 0 || behind.contains(&0);
        if let Some(first) = behind.first()
            && self.iommu
            && !is_named
        {
            self.common.pci_segment = *first;
        }
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("physical device")
    }
}
