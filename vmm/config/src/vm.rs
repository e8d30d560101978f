//! The configuration of the whole machine.

use std::path::PathBuf;

use arch::layout::{MAX_PCI_BUSES, MAX_ROOT_PORTS};
use serde::{Deserialize, Serialize};

use super::{
    Device, HotplugMethod, VmConfig,
    check::{self, Invalid, Placement, Problem},
    syntax::{Key, SyntaxError, ValueType, parse},
};

/// Defines [`VmConfig`](super::VmConfig) from the list of device kinds: see [`super`].
macro_rules! vm_config {
    ($(
        $(#[doc = $doc:literal])+
        $key:ident: $field:ty = $option:literal,
    )+) => {
        /// The configuration of the whole machine.
        #[derive(Clone, Debug, Default, Eq, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct VmConfig {
            /// Virtual processors.
            #[serde(default)]
            pub cpus: CpusConfig,
            /// Memory.
            #[serde(default)]
            pub memory: MemoryConfig,
            /// What the machine boots.
            pub payload: PayloadConfig,
            /// Rate limits that disks share.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rate_limit_groups: Option<Vec<RateLimitGroupConfig>>,
            /// Other vhost-user devices.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub generic_vhost_user: Option<Vec<GenericVhostUserConfig>>,
            /// Serial port.
            #[serde(default)]
            pub serial: SerialConfig,
            /// Debug console.
            #[serde(default)]
            pub debug_console: DebugConsoleConfig,
            /// vDPA devices.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub vdpa: Option<Vec<VdpaConfig>>,
            /// NUMA nodes.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub numa: Option<Vec<NumaConfig>>,
            /// A virtual IOMMU.
            #[serde(default)]
            pub iommu: bool,
            /// A watchdog, which resets a guest that no longer writes to it.
            #[serde(default)]
            pub watchdog: bool,
            /// A virtio clock.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rtc: Option<RtcConfig>,
            /// A panic device, by which the guest reports that its kernel has panicked.
            #[serde(default)]
            pub pvpanic: bool,
            /// Shares of PCI segments in the BAR windows.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub pci_segments: Option<Vec<PciSegmentConfig>>,
            /// Platform.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub platform: Option<PlatformConfig>,
            /// Trusted platform module.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub tpm: Option<TpmConfig>,
            /// Restricts Gantry to the files of its configuration (Landlock).
            #[serde(default)]
            pub landlock_enable: bool,
            /// Additional files that Gantry may use.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub landlock_rules: Option<Vec<LandlockConfig>>,
            $(
                $(#[doc = $doc])+
                #[serde(default, skip_serializing_if = "crate::kind::Field::is_absent")]
                pub $key: $field,
            )+
        }

        impl VmConfig {
            /// The kinds of devices, in the order in which a machine plugs them in.
            pub const KINDS: &'static [Kind] = &[$(
                Kind::of::<$field>(
                    stringify!($key),
                    $option,
                    concat!("add-", $option),
                    concat!("vm.add-", $option),
                ),
            )+];

            /// All devices with their locations in the configuration, in the order in which a machine plugs them in.
            pub fn all_devices(&self) -> Vec<(String, &dyn Device)> {
                let mut devices = Vec::new();
                $(
                        kind::Field::collect(&self.$key, stringify!($key), &mut devices);
                )+
                devices
            }

            /// All devices, in the order in which a machine plugs them in.
            pub fn all_devices_mut(&mut self) -> Vec<&mut dyn Device> {
                let mut devices = Vec::new();
                $(
                        kind::Field::collect_mut(&mut self.$key, &mut devices);
                )+
                devices
            }

            /// Removes a device; false if there is none with this name or it is not removable. What refers to it
            /// stays: it may come back.
            pub fn take_device(&mut self, id: &str) -> bool {
                $(
                        if kind::Field::take(&mut self.$key, id) {
                        return true;
                    }
                )+
                false
            }

            /// Adds a device. It replaces the existing one if there can be only one.
            pub fn put_device(&mut self, device: Box<dyn Device>) {
                let device: Box<dyn std::any::Any> = device;
                $(
                        let device = match device.downcast::<<$field as kind::Field>::Config>() {
                        Ok(device) => return kind::Field::put(&mut self.$key, *device),
                        Err(device) => device,
                    };
                )+
                // Unreachable: boxes are created only by the kinds of the list.
                drop(device);
            }
        }
    };
}

pub(super) use vm_config;

/// A path that Gantry may use under Landlock.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LandlockConfig {
    /// The file or directory.
    pub path: PathBuf,
    /// `r`, `w` or `rw`.
    pub access: String,
}

const LANDLOCK: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("access", ValueType::Text),
];

impl LandlockConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[LANDLOCK];

    /// Parses the value of `--landlock-rules`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--landlock-rules", input, Self::SYNTAX)?;
        parsed.require("path", "path")?;
        parsed.require("access", "access")?;
        parsed.build()
    }

    /// Checks whether the rule is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        let valid = matches!(self.access.as_str(), "r" | "w" | "rw");
        check::text("access", &self.access, valid, "one of r, w, rw")
    }
}

impl VmConfig {
    /// Restricts a VM that was configured elsewhere at least as much as whoever takes it in asks for. What its own
    /// configuration names stays allowed, so this does not protect from who wrote that.
    pub fn confine(&mut self, landlock: bool, rules: Option<&[LandlockConfig]>) {
        self.landlock_enable |= landlock;
        if let Some(rules) = rules {
            self.landlock_rules
                .get_or_insert_default()
                .extend_from_slice(rules);
        }
    }

    /// Checks whether a machine can be built from it, as far as that can be told without accessing files.
    pub fn validate(&self) -> Result<(), Invalid> {
        let within = |place: &'static str| move |invalid: Invalid| invalid.within(place);
        self.refuse_unsupported()?;
        self.cpus.validate().map_err(within("cpus"))?;
        self.memory.validate().map_err(within("memory"))?;
        self.payload.validate().map_err(within("payload"))?;
        if self.payload.firmware.is_some() && self.accel_server.is_some() {
            let with = "accel_server, which makes a hole in memory";
            let advice = "boot a kernel";
            return Err(Problem::Conflict { with, advice }.at("payload.firmware"));
        }
        if let Some(platform) = &self.platform {
            platform.validate().map_err(within("platform"))?;
        }
        self.serial.validate().map_err(within("serial"))?;
        self.debug_console
            .validate()
            .map_err(within("debug_console"))?;
        for (place, device) in self.all_devices() {
            let valid = device.validate().and_then(|()| device.validate_in(self));
            valid.map_err(|invalid| invalid.within(&place))?;
        }
        let rules = self.landlock_rules.as_deref();
        each("landlock_rules", rules, LandlockConfig::validate)?;
        let segments = self.segments();
        each("pci_segments", self.pci_segments.as_deref(), |segment| {
            segment.validate(segments)
        })?;
        each("numa", self.numa.as_deref(), |node| node.validate(self))?;
        if self.pvpanic && self.iommu_segments().contains(&0) {
            let with = "the panic device, which is in segment 0";
            let advice = "name other segments, or leave pvpanic out";
            let problem = Problem::Conflict { with, advice };
            return Err(problem.at("platform.iommu_segments"));
        }
        if self.watchdog && self.accel_server.is_some() {
            let with = "accel_server: a guest that serves others is stopped meanwhile";
            let advice = "leave one of them out";
            let problem = Problem::Conflict { with, advice };
            return Err(problem.at("watchdog"));
        }
        // The virtio-mem devices have no configurable location.
        if self.memory.hotplug_method == HotplugMethod::VirtioMem
            && self.iommu_segments().contains(&0)
        {
            let with = "virtio-mem, whose devices are in segment 0";
            let advice = "name other segments, or use hotplug_method=Acpi";
            let problem = Problem::Conflict { with, advice };
            return Err(problem.at("platform.iommu_segments"));
        }
        self.validate_placements()
    }

    /// Segments behind the virtual IOMMU; if empty, there is no virtual IOMMU.
    pub fn iommu_segments(&self) -> &[u16] {
        let platform = self.platform.as_ref();
        let segments = platform.and_then(|platform| platform.iommu_segments.as_deref());
        segments.unwrap_or_default()
    }

    /// Expands short forms: adds the segments behind the virtual IOMMU that devices refer to, and sets each device's
    /// `pci_segment`. To be called before [`VmConfig::validate`].
    pub fn normalize(&mut self) {
        let devices = self.devices.iter().flatten();
        for segment in devices.filter_map(|device| device.iommu_segment) {
            let platform = self.platform.get_or_insert_default();
            // A number that is too large is rejected later.
            let count = segment.saturating_add(1).max(platform.num_pci_segments);
            platform.num_pci_segments = count;
            let behind = platform.iommu_segments.get_or_insert_default();
            if !behind.contains(&segment) {
                behind.push(segment);
            }
        }
        let behind = self.iommu_segments().to_vec();
        for device in self.all_devices_mut() {
            device.normalize_segment(&behind);
        }
    }

    /// Whether processes of the VM use the gate, as clients or as a server.
    pub fn has_gate(&self) -> bool {
        let accels = self.accels.iter().flatten();
        let mut gates = accels.filter(|accel| accel.is_gate());
        self.accel_server.is_some() || gates.next().is_some()
    }

    /// Names of network cards whose taps came as descriptors: they have no name for another process.
    pub fn unnamed_taps(&self) -> Vec<String> {
        let cards = self.net.iter().flatten();
        let unnamed = cards.filter(|card| !card.fds.is_empty());
        unnamed
            .map(|card| card.common.id.clone().unwrap_or_default())
            .collect()
    }

    /// Number of PCI segments.
    pub(super) fn segments(&self) -> u16 {
        self.platform
            .as_ref()
            .map_or(1, |platform| platform.num_pci_segments)
    }

    /// Number of PCI Express root ports of each segment.
    pub fn root_ports(&self) -> Vec<u8> {
        let mut counts = vec![0_u8; self.segments().into()];
        for port in self.pci_root_ports.iter().flatten() {
            if let Some(count) = counts.get_mut(usize::from(port.common.pci_segment)) {
                *count = count.saturating_add(1);
            }
        }
        counts
    }

    /// Checks that there is a bus for each root port, and a root port for each `parent`.
    fn validate_parents(&self, placements: &[(String, Placement<'_>)]) -> Result<(), Invalid> {
        let counts = self.root_ports();
        for count in &counts {
            check::range("pci_root_ports", *count, 0, MAX_ROOT_PORTS.into())?;
        }
        let ports: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        let most = MAX_PCI_BUSES.saturating_sub(self.segments());
        check::range("pci_root_ports", ports, 0, most.into())?;
        for (place, placement) in placements {
            let Some(parent) = placement.parent else {
                continue;
            };
            let mut ports = self.pci_root_ports.iter().flatten();
            let Some(port) = ports.find(|port| port.common.id.as_deref() == Some(parent)) else {
                let (what, name) = ("PCI root port", parent.to_owned());
                return Err(Problem::Unknown { what, name }.at(format!("{place}.parent")));
            };
            if ![0, port.common.pci_segment].contains(&placement.segment) {
                let with = "a root port of another segment";
                let advice = "leave it out";
                let problem = Problem::Conflict { with, advice };
                return Err(problem.at(format!("{place}.pci_segment")));
            }
        }
        Ok(())
    }

    fn refuse_unsupported(&self) -> Result<(), Invalid> {
        let has = |count: Option<usize>| count.is_some_and(|count| count > 0);
        let lists = [
            (
                "generic_vhost_user",
                self.generic_vhost_user.as_ref().map(Vec::len),
                "devices of other processes (vhost-user)",
            ),
            ("vdpa", self.vdpa.as_ref().map(Vec::len), "vDPA devices"),
        ];
        for (place, count, what) in lists {
            check::unsupported(has(count), place, what, "leave them out")?;
        }
        let switches = [
            ("tpm", self.tpm.is_some(), "a trusted platform module"),
            ("rtc", self.rtc.is_some(), "a virtio clock"),
            ("iommu", self.iommu, "a virtual IOMMU"),
        ];
        for (place, wanted, what) in switches {
            check::unsupported(wanted, place, what, "leave it out")?;
        }
        Ok(())
    }

    /// Checks that no two devices have the same name or slot, and that all segments exist.
    fn validate_placements(&self) -> Result<(), Invalid> {
        let last = u64::from(self.segments().saturating_sub(1));
        let devices = self.all_devices();
        let placements = devices
            .iter()
            .map(|(place, device)| (place.clone(), device.placement()));
        let placements: Vec<_> = placements.collect();
        for (index, (place, placement)) in placements.iter().enumerate() {
            let field = |field: &str| format!("{place}.{field}");
            check::range(&field("pci_segment"), placement.segment, 0, last)?;
            let others = &placements[..index];
            if let Some(id) = placement.id
                && let Some((other, _)) = others.iter().find(|(_, other)| other.id == Some(id))
            {
                let what = format!("'{id}'");
                let other = other.clone();
                return Err(Problem::Taken { what, other }.at(field("id")));
            }
            if let Some(seat) = placement.seat()
                && let Some((other, _)) =
                    others.iter().find(|(_, other)| other.seat() == Some(seat))
            {
                let (what, key) = match seat {
                    (_, Some(parent), _, function) => (
                        format!("function {function} behind '{parent}'"),
                        "pci_function",
                    ),
                    (segment, None, slot, 0) => {
                        (format!("slot {slot} of segment {segment}"), "pci_device_id")
                    }
                    (segment, None, slot, function) => (
                        format!("function {function} of slot {slot} of segment {segment}"),
                        "pci_function",
                    ),
                };
                let other = other.clone();
                return Err(Problem::Taken { what, other }.at(field(key)));
            }
        }
        self.validate_parents(&placements)
    }

    /// Finds an accelerator among those in `leaving` that tracks a physical device which is not in `leaving`. Returns
    /// the names of both.
    pub fn tracker_among(&self, leaving: &[String]) -> Option<(&str, &str)> {
        let mut devices = self.devices.iter().flatten();
        devices.find_map(|device| {
            let accel = device.tracked.as_ref()?;
            let id = device.common.id.as_ref()?;
            let stays_behind = leaving.contains(accel) && !leaving.contains(id);
            stays_behind.then_some((accel.as_str(), id.as_str()))
        })
    }

    /// Removes all references to a device that no longer exists: of NUMA nodes, and of devices that an accelerator has
    /// tracked.
    pub fn forget(&mut self, device: &str) {
        for tracking in self.devices.iter_mut().flatten() {
            tracking.tracked.take_if(|tracked| tracked == device);
        }
        for node in self.numa.iter_mut().flatten() {
            node.device_id.take_if(|id| id == device);
        }
    }

    /// Whether there is a device with this name.
    pub fn has_device(&self, id: &str) -> bool {
        let mut devices = self.all_devices().into_iter();
        devices.any(|(_, device)| device.common().id.as_deref() == Some(id))
    }

    /// Whether another device of this kind can be added.
    pub fn has_room_for(&self, device: &dyn Device) -> bool {
        let mut kinds = Self::KINDS.iter();
        let Some(kind) = kinds.find(|kind| (kind.is_of)(device)) else {
            return false;
        };
        kind.many
            || self
                .all_devices()
                .iter()
                .all(|(place, _)| place != kind.key)
    }
}

/// Validates every item of a list.
fn each<T>(
    name: &str,
    items: Option<&[T]>,
    validate: impl Fn(&T) -> Result<(), Invalid>,
) -> Result<(), Invalid> {
    for (index, item) in items.unwrap_or_default().iter().enumerate() {
        validate(item).map_err(|invalid| invalid.within(&format!("{name}[{index}]")))?;
    }
    Ok(())
}
